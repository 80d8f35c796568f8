//! The indices of the elements of a triangle of a matrix.

use candle_core::{Device, Tensor};

use super::DTensor;
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::placement::Placement;

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
        triangle(sizes, |row, column| column <= row + offset, mesh, placements.into_iter().collect())
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
        triangle(sizes, |row, column| column >= row + offset, mesh, placements.into_iter().collect())
    }
}

#[track_caller]
fn triangle(
    (rows, columns): (usize, usize),
    inside: impl Fn(isize, isize) -> bool,
    mesh: &DeviceMesh,
    placements: Vec<Placement>,
) -> Result<DTensor> {
    let all = (0..rows as isize).flat_map(|row| (0..columns as isize).map(move |column| (row, column)));
    let (rows, columns): (Vec<i64>, Vec<i64>) =
        all.filter(|&(row, column)| inside(row, column)).map(|(row, column)| (row as i64, column as i64)).unzip();
    let indices = Tensor::from_vec([rows.as_slice(), &columns].concat(), (2, rows.len()), &Device::Cpu)?;
    DTensor::distribute_tensor(&indices, mesh, placements, None)
}
