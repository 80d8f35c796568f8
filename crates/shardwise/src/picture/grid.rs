//! A table of labelled boxes: what pictures of meshes and of layouts have in common.

use std::ops::Range;

/// Boxes in rows and columns, with a heading and remarks.
pub(super) struct PictureGrid {
    /// Lines above the boxes.
    pub(super) heading: Vec<String>,
    pub(super) rows: Vec<GridLine>,
    pub(super) columns: Vec<GridLine>,
    /// By row and column.
    pub(super) cells: Vec<Vec<GridCell>>,
    /// Lines below the boxes.
    pub(super) remarks: Vec<String>,
}

/// A row or a column.
#[derive(Clone)]
pub(super) struct GridLine {
    pub(super) label: String,
    /// Size relative to other lines.
    pub(super) weight: usize,
    /// Whether it stands for lines that are left out.
    pub(super) is_gap: bool,
}

/// One box.
#[derive(Clone, Default)]
pub(super) struct GridCell {
    pub(super) label: String,
    /// Number of the colour.
    pub(super) color: usize,
    /// Whether what ranks hold here has to be reduced.
    pub(super) is_partial: bool,
}

/// The indices that are shown of `0..count`: all, or all but some in the middle, which are one range that is left out.
pub(super) fn shown(count: usize, most: usize) -> (Vec<usize>, Option<Range<usize>>) {
    if count <= most {
        return ((0..count).collect(), None);
    }
    let left_out = most - 2..count - 1;
    ((0..left_out.start).chain(left_out.end..count).collect(), Some(left_out))
}

/// The lines of some segments with their first indices as labels, and a gap where segments are left out.
pub(super) fn lines(segments: &[Range<usize>], shown: &[usize], gap: &Option<Range<usize>>) -> Vec<GridLine> {
    let mut lines = Vec::new();
    for &at in shown {
        if gap.as_ref().is_some_and(|gap| gap.end == at) {
            lines.push(GridLine { label: "…".into(), weight: 1, is_gap: true });
        }
        let segment = &segments[at];
        lines.push(GridLine { label: segment.start.to_string(), weight: segment.len().max(1), is_gap: false });
    }
    lines
}
