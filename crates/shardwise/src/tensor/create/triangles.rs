//! The indices of the elements of a triangle of a matrix.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::placement::Placement;
use crate::tensor::DTensor;
use crate::tensor::create::memory_check::check_whole;

impl DTensor {
    /// Returns the indices of the elements of the lower triangle of a matrix of these sizes, up to the diagonal `offset`: `[2, elements]`,
    /// rows and columns, as i64.
    ///
    /// Local: every rank computes its shard.
    #[track_caller]
    pub fn tril_indices(
        sizes: (usize, usize),
        offset: isize,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let (rows, columns) = if sizes.1 == 0 { (0, 0) } else { sizes };
        let filled = offset.saturating_neg().max(0) as usize..rows;
        let span = |row: usize| 0..row.saturating_add_signed(offset).saturating_add(1).min(columns);
        triangle(filled, span, mesh, placements.into_iter().collect())
    }

    /// Returns the indices of the elements of the upper triangle of a matrix of these sizes, from the diagonal `offset` on: `[2, elements]`,
    /// rows and columns, as i64.
    ///
    /// Local: every rank computes its shard.
    #[track_caller]
    pub fn triu_indices(
        sizes: (usize, usize),
        offset: isize,
        mesh: &DeviceMesh,
        placements: impl IntoIterator<Item = Placement>,
    ) -> Result<DTensor> {
        let (rows, columns) = if sizes.1 == 0 { (0, 0) } else { sizes };
        let filled = 0..columns.saturating_add_signed(offset.saturating_neg()).min(rows);
        let span = |row: usize| row.saturating_add_signed(offset)..columns;
        triangle(filled, span, mesh, placements.into_iter().collect())
    }
}

/// The indices of the columns `span(row)`, at least one, of every row of `filled`.
#[track_caller]
fn triangle(
    filled: Range<usize>,
    span: impl Fn(usize) -> Range<usize>,
    mesh: &DeviceMesh,
    placements: Vec<Placement>,
) -> Result<DTensor> {
    // Every rank has all indices for a moment. Before rows are counted one by one, they have to be so few that one of each fits.
    check_whole(&[2, filled.len()], DType::I64)?;
    let count = filled.clone().fold(0, |count: usize, row| count.saturating_add(span(row).len()));
    check_whole(&[2, count], DType::I64)?;
    let all = || filled.clone().flat_map(|row| span(row).map(move |column| (row, column)));
    let indices: Vec<i64> = all().map(|(row, _)| row as i64).chain(all().map(|(_, column)| column as i64)).collect();
    DTensor::distribute_tensor(&Tensor::from_vec(indices, (2, count), &Device::Cpu)?, mesh, placements, None)
}
