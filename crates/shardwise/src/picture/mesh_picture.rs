//! Pictures of meshes: which rank has which coordinate.

use std::fmt;

use super::grid::{GridCell, GridLine, PictureGrid, lines, shown};
use super::{svg, text};
use crate::comm::DeviceMesh;
use crate::mesh::Mesh;

/// Most rows, and most columns, of a picture.
const MAX_LINES: usize = 12;

/// Most pictures of a mesh with more than two axes.
const MAX_SLICES: usize = 4;

/// A picture of a mesh: the last axis as columns, the one before as rows, and one picture per coordinate of the axes before these.
#[derive(Debug, Clone)]
pub struct MeshPicture {
    mesh: Mesh,
    /// Lines about the axes.
    remarks: Vec<String>,
}

impl Mesh {
    /// Returns a picture of this mesh. Local.
    pub fn picture(&self) -> MeshPicture {
        let axis = |axis: &crate::mesh::Axis| format!("axis {}: {} ranks", axis.name, axis.size);
        MeshPicture { mesh: self.clone(), remarks: self.axes().iter().map(axis).collect() }
    }

    /// Returns a picture of this mesh as text. Local.
    ///
    /// ```
    /// use shardwise::Mesh;
    /// let expected = "\
    /// mesh dp=2,tp=2
    /// rows: dp, columns: tp
    ///     0        1
    ///   ┌────────┬────────┐
    /// 0 │ 0      │ 1      │
    ///   ├────────┼────────┤
    /// 1 │ 2      │ 3      │
    ///   └────────┴────────┘
    /// axis dp: 2 ranks
    /// axis tp: 2 ranks
    /// ";
    /// assert_eq!(Mesh::new([("dp", 2), ("tp", 2)])?.show(), expected);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn show(&self) -> String {
        self.picture().to_string()
    }
}

impl DeviceMesh {
    /// Returns a picture of this mesh, with the links along its axes. Local.
    pub fn picture(&self) -> MeshPicture {
        let axis = |(i, axis): (usize, &crate::mesh::Axis)| {
            format!("axis {}: {} ranks, link {}", axis.name, axis.size, self.links().of_axis(i))
        };
        MeshPicture { mesh: self.mesh().clone(), remarks: self.axes().iter().enumerate().map(axis).collect() }
    }

    /// Returns a picture of this mesh as text, with the links along its axes. Local.
    pub fn show(&self) -> String {
        self.picture().to_string()
    }
}

impl MeshPicture {
    /// Returns the picture as text of at most `width` columns, with ANSI colours by rank if `color` is set.
    pub fn to_text(&self, width: usize, color: bool) -> String {
        self.grids().iter().map(|grid| text::text(grid, width, color)).collect()
    }

    /// Returns the picture as an SVG document.
    pub fn to_svg(&self) -> String {
        let grids = self.grids();
        svg::svg(&format!("mesh {}", self.mesh), &grids.iter().collect::<Vec<_>>())
    }

    fn grids(&self) -> Vec<PictureGrid> {
        let mesh = &self.mesh;
        let ndim = mesh.ndim();
        let outer = ndim.saturating_sub(2);
        let slices: usize = mesh.shape()[..outer].iter().product();
        let mut grids: Vec<PictureGrid> = (0..slices.min(MAX_SLICES)).map(|slice| self.slice(outer, slice)).collect();
        let name = |axis: usize| &mesh.axes()[axis].name;
        let drawn = match ndim {
            0 => String::new(),
            1 => format!("columns: {}", name(0)),
            n => format!("rows: {}, columns: {}", name(n - 2), name(n - 1)),
        };
        if let Some(first) = grids.first_mut() {
            let slice = std::mem::take(&mut first.heading);
            first.heading = [vec![format!("mesh {mesh}"), drawn], slice].concat();
        }
        if let Some(last) = grids.last_mut() {
            last.remarks.extend((slices > MAX_SLICES).then(|| format!("and {} more", slices - MAX_SLICES)));
            last.remarks.extend(self.remarks.iter().cloned());
        }
        grids
    }

    /// The grid of one combination of coordinates of the first `outer` axes.
    fn slice(&self, outer: usize, mut slice: usize) -> PictureGrid {
        let (mesh, shape) = (&self.mesh, self.mesh.shape());
        let mut fixed = vec![0; outer];
        for axis in (0..outer).rev() {
            (fixed[axis], slice) = (slice % shape[axis], slice / shape[axis]);
        }
        let size = |from_end: usize| shape.len().checked_sub(from_end).map_or(1, |axis| shape[axis]);
        let single = |count: usize| -> Vec<std::ops::Range<usize>> { (0..count).map(|i| i..i + 1).collect() };
        let (row_count, column_count) = (size(2), size(1));
        let (shown_rows, row_gap) = shown(row_count, MAX_LINES);
        let (shown_columns, column_gap) = shown(column_count, MAX_LINES);
        let mut rows = lines(&single(row_count), &shown_rows, &row_gap);
        let columns = lines(&single(column_count), &shown_columns, &column_gap);
        let rank = |row: &GridLine, column: &GridLine| -> Option<usize> {
            let (row, column): (usize, usize) = (row.label.parse().ok()?, column.label.parse().ok()?);
            let mut coordinate = fixed.clone();
            coordinate.extend([row, column].into_iter().skip(2usize.saturating_sub(shape.len())));
            mesh.rank_at(&coordinate)
        };
        let cell = |row: &GridLine, column: &GridLine| match rank(row, column) {
            Some(rank) => GridCell { label: rank.to_string(), color: rank, is_partial: false },
            None => GridCell { label: "…".into(), ..GridCell::default() },
        };
        let cells = rows.iter().map(|row| columns.iter().map(|column| cell(row, column)).collect()).collect();
        if shape.len() < 2 {
            rows.iter_mut().for_each(|row| row.label = String::new());
        }
        let at = (0..outer).map(|axis| format!("{}={}", mesh.axes()[axis].name, fixed[axis])).collect::<Vec<_>>();
        let heading = if outer > 0 { vec![format!("at {}", at.join(", "))] } else { vec![] };
        PictureGrid { heading, rows, columns, cells, remarks: vec![] }
    }
}

impl fmt::Display for MeshPicture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(80, false))
    }
}
