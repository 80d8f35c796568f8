//! The factories of [`DTensor`] without their mesh argument: they use the mesh of the surrounding
//! [`with_mesh`](crate::comm::with_mesh).
//!
//! # Errors
//! Each returns [`Error::Invalid`](crate::Error::Invalid) outside of `with_mesh`.

use candle_core::{DType, Shape, Tensor};

use super::{Arange, DTensor, Number};
use crate::comm::current_mesh;
use crate::error::Result;
use crate::placement::Placement;

/// [`DTensor::full`] on the current mesh.
#[track_caller]
pub fn full(
    value: impl Into<Number>,
    shape: impl Into<Shape>,
    dtype: DType,
    placements: impl IntoIterator<Item = Placement>,
) -> Result<DTensor> {
    DTensor::full(value, shape, dtype, &current_mesh()?, placements)
}

/// [`DTensor::zeros`] on the current mesh.
#[track_caller]
pub fn zeros(
    shape: impl Into<Shape>,
    dtype: DType,
    placements: impl IntoIterator<Item = Placement>,
) -> Result<DTensor> {
    DTensor::zeros(shape, dtype, &current_mesh()?, placements)
}

/// [`DTensor::ones`] on the current mesh.
#[track_caller]
pub fn ones(shape: impl Into<Shape>, dtype: DType, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
    DTensor::ones(shape, dtype, &current_mesh()?, placements)
}

/// [`DTensor::arange`] on the current mesh.
#[track_caller]
pub fn arange(
    range: impl Into<Arange>,
    dtype: DType,
    placements: impl IntoIterator<Item = Placement>,
) -> Result<DTensor> {
    DTensor::arange(range, dtype, &current_mesh()?, placements)
}

/// [`DTensor::rand`] on the current mesh.
#[track_caller]
pub fn rand(shape: impl Into<Shape>, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
    DTensor::rand(shape, &current_mesh()?, placements)
}

/// [`DTensor::randn`] on the current mesh.
#[track_caller]
pub fn randn(shape: impl Into<Shape>, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
    DTensor::randn(shape, &current_mesh()?, placements)
}

/// [`DTensor::from_local`] on the current mesh.
#[track_caller]
pub fn from_local(local: &Tensor, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
    DTensor::from_local(local, &current_mesh()?, placements)
}

/// [`DTensor::distribute_tensor`] on the current mesh.
#[track_caller]
pub fn distribute_tensor(
    tensor: &Tensor,
    placements: impl IntoIterator<Item = Placement>,
    src_data_rank: Option<usize>,
) -> Result<DTensor> {
    DTensor::distribute_tensor(tensor, &current_mesh()?, placements, src_data_rank)
}
