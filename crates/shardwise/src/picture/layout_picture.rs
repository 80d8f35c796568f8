//! Pictures of layouts: which rank holds which part of a tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use candle_core::DType;

use super::grid::{GridCell, PictureGrid, lines, shown};
use super::quantity::bytes_text;
use super::ranks::rank_list;
use super::{svg, text};
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, Runs};
use crate::tensor::DTensor;

/// Most rows of boxes; more are abbreviated in the middle.
const MAX_ROWS: usize = 16;

/// Most columns of boxes.
const MAX_COLUMNS: usize = 10;

/// Most lines about what ranks hold.
const MAX_HOLDINGS: usize = 8;

/// A picture of a layout: two dimensions of the tensor as boxes, with the ranks that hold each.
///
/// Prints without colours in 80 columns; [`to_text`](Self::to_text) has colours and another width, [`to_svg`](Self::to_svg) is for
/// documents. In a box, `0,1` are ranks with equal replicas and `0 + 1` ranks with terms of a partial value.
///
/// ```
/// use shardwise::{Layout, Mesh, Placement::*};
/// let mesh = Mesh::new([("tp", 2)])?;
/// let picture = Layout::new(&mesh, 4, [Shard(0)])?.picture().to_string();
/// let expected = "\
/// f32 [4] on tp=2: S(0)
/// columns: dimension 0; boxes: ranks
///    0                2
///  ┌────────────────┬────────────────┐
///  │ 0              │ 1              │
///  └────────────────┴────────────────┘
/// every rank holds [2], 8 B
/// ";
/// assert_eq!(picture, expected);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "visualize_array_sharding")]
#[doc(alias = "visualize_sharding")]
#[derive(Debug, Clone)]
pub struct LayoutPicture {
    layout: Layout,
    dtype: DType,
    rows: Option<usize>,
    columns: Option<usize>,
}

impl Layout {
    /// Returns a picture of this layout. Local.
    pub fn picture(&self) -> LayoutPicture {
        let (rows, columns) = default_dims(self);
        LayoutPicture { layout: self.clone(), dtype: DType::F32, rows, columns }
    }
}

impl DTensor {
    /// Returns a picture of the layout of this tensor, without its values; [`show`](Self::show) returns the values. Local.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let x = DTensor::ones((4, 4), DType::F32, &world.mesh([("dp", 2)])?, [Shard(0)])?;
    ///     assert!(x.show_layout().contains("every rank holds [2, 4], 32 B"));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "visualize_sharding")]
    pub fn show_layout(&self) -> String {
        self.layout().picture().dtype(self.dtype()).to_string()
    }
}

/// The dimensions that are drawn as rows and columns unless chosen otherwise: sharded ones first, then the last ones.
fn default_dims(layout: &Layout) -> (Option<usize>, Option<usize>) {
    let ndim = layout.shape().len();
    let is_sharded = |dim: &usize| !layout.shard_order(*dim).is_empty();
    let sharded: Vec<usize> = (0..ndim).filter(is_sharded).collect();
    match (ndim, sharded[..].first(), sharded.get(1)) {
        (0, ..) => (None, None),
        (1, ..) => (None, Some(0)),
        (_, Some(&first), Some(&second)) => (Some(first), Some(second)),
        (_, Some(&only), None) if only == ndim - 1 => (Some(ndim - 2), Some(only)),
        (_, Some(&only), None) => (Some(only), Some(ndim - 1)),
        (_, None, _) => (Some(ndim - 2), Some(ndim - 1)),
    }
}

impl LayoutPicture {
    /// Sets the element type, from which bytes are computed; f32 by default.
    #[must_use]
    pub fn dtype(self, dtype: DType) -> Self {
        LayoutPicture { dtype, ..self }
    }

    /// Draws dimension `rows` as rows and `columns` as columns. Of other dimensions the first index is drawn.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the tensor has no such dimensions, or both are the same.
    pub fn dims(self, rows: usize, columns: usize) -> Result<Self> {
        let ndim = self.layout.shape().len();
        if rows >= ndim || columns >= ndim || rows == columns {
            let found = format!("dimension {rows} as rows and {columns} as columns");
            let needed = format!("two dimensions of a tensor that has {ndim}");
            return Err(ErrorKind::Argument.error(
                "picture",
                found,
                needed,
                "choose two different dimensions below that number",
            ));
        }
        Ok(LayoutPicture { rows: Some(rows), columns: Some(columns), ..self })
    }

    /// Returns the picture as text of at most `width` columns, with ANSI colours by rank if `color` is set.
    pub fn to_text(&self, width: usize, color: bool) -> String {
        text::text(&self.grid(), width, color)
    }

    /// Returns the picture as an SVG document.
    pub fn to_svg(&self) -> String {
        svg::svg(&format!("{} {}", self.dtype.as_str(), self.layout), &[&self.grid()])
    }

    pub(super) fn grid(&self) -> PictureGrid {
        let layout = &self.layout;
        let (heading, remarks) = (self.heading(), self.remarks());
        if layout.shape().contains(&0) {
            return PictureGrid { heading, rows: vec![], columns: vec![], cells: vec![], remarks };
        }
        let mut parts = OwnedParts::default();
        let row_segments = self.rows.map_or(vec![0..1], |dim| parts.segments(layout, dim));
        let column_segments = self.columns.map_or(vec![0..1], |dim| parts.segments(layout, dim));
        let (shown_rows, row_gap) = shown(row_segments.len(), MAX_ROWS);
        let (shown_columns, column_gap) = shown(column_segments.len(), MAX_COLUMNS);
        let holders = self.holders(&mut parts, (&row_segments, &shown_rows), (&column_segments, &shown_columns));
        let mut rows = lines(&row_segments, &shown_rows, &row_gap);
        let mut columns = lines(&column_segments, &shown_columns, &column_gap);
        // A dimension that does not exist has no index.
        let unlabelled = |dim: Option<usize>, lines: &mut Vec<super::grid::GridLine>| {
            if dim.is_none() {
                lines.iter_mut().for_each(|line| line.label = String::new());
            }
        };
        unlabelled(self.rows, &mut rows);
        unlabelled(self.columns, &mut columns);
        let mut held = holders.into_iter();
        let mut cells = Vec::new();
        for row in &rows {
            let cell = |column: &super::grid::GridLine| match row.is_gap || column.is_gap {
                true => GridCell { label: "…".into(), ..GridCell::default() },
                false => self.cell(&held.next().unwrap_or_default()),
            };
            cells.push(columns.iter().map(cell).collect());
        }
        PictureGrid { heading, rows, columns, cells, remarks }
    }

    fn heading(&self) -> Vec<String> {
        let shape = self.layout.shape();
        let name = |what: &str, dim: Option<usize>| dim.map(|dim| format!("{what}: dimension {dim}"));
        let drawn: Vec<String> =
            [name("rows", self.rows), name("columns", self.columns)].into_iter().flatten().collect();
        let others = (0..shape.len()).filter(|dim| ![self.rows, self.columns].contains(&Some(*dim)));
        let others = others.map(|dim| {
            let sharded = if self.layout.shard_order(dim).is_empty() { "" } else { ", sharded too" };
            format!("dimension {dim} at index 0 of {}{sharded}", shape[dim])
        });
        let mut heading = vec![format!("{} {}", self.dtype.as_str(), self.layout)];
        let mut drawn: Vec<String> = drawn.into_iter().chain(others).collect();
        drawn.push(if shape.contains(&0) { "no elements" } else { "boxes: ranks" }.to_string());
        heading.push(drawn.join("; "));
        heading
    }

    /// Positions in the mesh of the ranks that hold each shown box, by rows, then by columns.
    fn holders(
        &self,
        parts: &mut OwnedParts,
        (row_segments, rows): (&[Range<usize>], &[usize]),
        (column_segments, columns): (&[Range<usize>], &[usize]),
    ) -> Vec<Vec<usize>> {
        let layout = &self.layout;
        let mut held = vec![Vec::new(); rows.len() * columns.len()];
        for position in 0..layout.mesh().size() {
            let coordinate = layout.mesh().coordinate_at(position);
            let fixed = (0..layout.shape().len()).filter(|dim| ![self.rows, self.columns].contains(&Some(*dim)));
            if !fixed.into_iter().all(|dim| parts.of(layout, dim, &coordinate).first() == Some(0)) {
                continue;
            }
            let mut within = |dim: Option<usize>, segments: &[Range<usize>], shown: &[usize]| -> Vec<usize> {
                let Some(dim) = dim else { return (0..shown.len()).collect() };
                let runs = parts.of(layout, dim, &coordinate);
                let is_held = |at: &usize| runs.iter().any(|run| run.contains(&segments[shown[*at]].start));
                (0..shown.len()).filter(is_held).collect()
            };
            let own_rows = within(self.rows, row_segments, rows);
            let own_columns = within(self.columns, column_segments, columns);
            for row in own_rows {
                own_columns.iter().for_each(|column| held[row * columns.len() + column].push(position));
            }
        }
        held
    }

    /// The box of some positions: terms of a partial value are separated by `+`, replicas by commas.
    fn cell(&self, positions: &[usize]) -> GridCell {
        let mesh = self.layout.mesh();
        let placements = self.layout.placements();
        let mut terms: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for &position in positions {
            let coordinate = mesh.coordinate_at(position);
            let term = coordinate.iter().zip(placements).filter(|(_, p)| p.is_partial()).map(|(c, _)| *c).collect();
            terms.entry(term).or_default().push(mesh.ranks()[position]);
        }
        terms.values_mut().for_each(|ranks| ranks.sort_unstable());
        let mut labels: Vec<String> = terms.values().map(|ranks| rank_list(ranks)).collect();
        if labels.len() > 4 {
            let count = labels.len();
            labels = vec![labels[0].clone(), "…".into(), format!("{} ({count} terms)", labels[count - 1])];
        }
        let color = positions.first().copied().unwrap_or(0);
        GridCell { label: labels.join(" + "), color, is_partial: terms.len() > 1 }
    }

    /// What ranks hold, and what the signs mean.
    fn remarks(&self) -> Vec<String> {
        let layout = &self.layout;
        let mut by_shape: Vec<(Vec<usize>, Vec<usize>)> = Vec::new();
        for &rank in layout.mesh().ranks() {
            let shape = layout.local_shape(rank);
            match by_shape.iter_mut().find(|(known, _)| *known == shape) {
                Some((_, ranks)) => ranks.push(rank),
                None => by_shape.push((shape, vec![rank])),
            }
        }
        let size = self.dtype.size_in_bytes();
        let bytes = |shape: &[usize]| bytes_text(shape.iter().product::<usize>() * size);
        let mut remarks = match &by_shape[..] {
            [(shape, _)] => vec![format!("every rank holds {shape:?}, {}", bytes(shape))],
            all => all
                .iter()
                .take(MAX_HOLDINGS)
                .map(|(shape, ranks)| {
                    let mut ranks = ranks.clone();
                    ranks.sort_unstable();
                    let who = if ranks.len() == 1 { "rank" } else { "ranks" };
                    let hold = if ranks.len() == 1 { "holds" } else { "hold" };
                    format!("{who} {} {hold} {shape:?}, {}", rank_list(&ranks), bytes(shape))
                })
                .collect(),
        };
        if by_shape.len() > MAX_HOLDINGS {
            remarks.push(format!("and {} more shapes", by_shape.len() - MAX_HOLDINGS));
        }
        let is_wide = |axis: usize| layout.mesh().shape()[axis] > 1;
        let replicates =
            (0..layout.mesh().ndim()).any(|axis| is_wide(axis) && layout.placements()[axis].is_replicate());
        if replicates {
            remarks.push("a,b: ranks with equal replicas".to_string());
        }
        if (0..layout.mesh().ndim()).any(|axis| is_wide(axis) && layout.placements()[axis].is_partial()) {
            remarks.push("a + b: ranks with terms that a reduction combines".to_string());
        }
        remarks
    }
}

/// The indices that ranks hold, computed once per dimension and coordinate on the axes that shard it.
#[derive(Default)]
struct OwnedParts(BTreeMap<(usize, Vec<usize>), Runs>);

impl OwnedParts {
    fn of(&mut self, layout: &Layout, dim: usize, coordinate: &[usize]) -> &Runs {
        let key = layout.shard_order(dim).iter().map(|&axis| coordinate[axis]).collect();
        self.0.entry((dim, key)).or_insert_with(|| layout.owned(dim, coordinate))
    }

    /// The parts of a dimension between the places at which some rank's share begins or ends.
    fn segments(&mut self, layout: &Layout, dim: usize) -> Vec<Range<usize>> {
        let mut edges = BTreeSet::from([0, layout.shape()[dim]]);
        for position in 0..layout.mesh().size() {
            let coordinate = layout.mesh().coordinate_at(position);
            let key: Vec<usize> = layout.shard_order(dim).iter().map(|&axis| coordinate[axis]).collect();
            if !self.0.contains_key(&(dim, key)) {
                edges.extend(self.of(layout, dim, &coordinate).iter().flat_map(|run| [run.start, run.end]));
            }
        }
        let edges: Vec<usize> = edges.into_iter().collect();
        edges.windows(2).map(|pair| pair[0]..pair[1]).collect()
    }
}

impl fmt::Display for LayoutPicture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(80, false))
    }
}
