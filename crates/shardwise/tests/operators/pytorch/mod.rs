//! Scenarios of PyTorch's DTensor suites that no other test covers, with the collectives that PyTorch asserts as upper bounds;
//! docs/pytorch-parity/dtensor.md lists them all.

mod autocast;
mod complex;
mod construction;
mod dtensor;
mod eight_bit;
mod grouped;
mod matrices;
mod meshes;
mod optimizers;
mod parallel;
mod placements;
mod redistribute;
mod reductions;
mod rules;
mod styles;
mod tensors;
mod views;

use candle_core::{DType, Tensor};
use shardwise::ThreadWorld;
use shardwise::prelude::*;

/// Runs a program on thread ranks.
fn on(ranks: usize, run: impl Fn(World) -> Result<()> + Send + Sync + 'static) {
    ThreadWorld::new(ranks).unwrap().run(run).unwrap();
}

/// The elements of the full tensor.
fn list(x: &DTensor) -> Result<Vec<f64>> {
    let x = x.detach().to_dtype(DType::F64)?;
    Ok(x.full_tensor()?.flatten_all()?.to_vec1()?)
}

/// An f64 tensor with other elements at every place, in a layout.
fn tensor(mesh: &DeviceMesh, shape: &[usize], placements: &[Placement]) -> Result<DTensor> {
    DTensor::from_fn(shape, DType::F64, mesh, placements.to_vec(), |index| {
        let flat = index.iter().zip(shape).fold(0, |flat, (i, n)| flat * n + i);
        ((flat * 37 + 11) % 101) as f64 / 16.0 - 3.0
    })
}

/// The same tensor, replicated.
fn replicated(x: &DTensor) -> Result<DTensor> {
    x.redistribute(vec![Replicate; x.placements().len()])
}

/// Fails unless two tensors are equal up to the rounding of f64.
fn assert_close(found: &DTensor, expected: &DTensor, what: &str) {
    assert_eq!(found.shape(), expected.shape(), "{what}");
    assert!(found.detach().allclose(&expected.detach(), 1e-12, 1e-12).unwrap(), "{what}");
}

/// The rows of a plain matrix.
fn rows(x: &Tensor) -> Vec<Vec<f64>> {
    x.to_dtype(DType::F64).unwrap().to_vec2().unwrap()
}
