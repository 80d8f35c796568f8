//! Mistakes: which error they end in, and that every rank gets it.

use shardwise::candle_core::{Device, Tensor};
use shardwise::prelude::*;

use super::{RANKS, elements, square};

pub(super) fn readable_errors(world: &World) -> Result<String> {
    let mesh = square(world)?;
    let x = DTensor::ones((4, 6), DType::F32, &mesh, [Shard(0), Replicate])?;
    let w = DTensor::ones((5, 8), DType::F32, &mesh, [Replicate, Shard(1)])?;
    let error = x.matmul(&w).unwrap_err().to_string();
    for part in ["[4, 6]", "[5, 8]", "dp=2,tp=2", "S(0)", "S(1)"] {
        assert!(error.contains(part), "no {part} in: {error}");
    }
    Ok("shapes, mesh and placements as the program wrote them".into())
}

/// The collectives of the world still work.
fn still_works(world: &World) -> Result<()> {
    let sum = world.all_reduce(&Tensor::ones(3, DType::F64, &Device::Cpu)?, ReduceOp::Sum)?;
    assert_eq!(elements(&sum)?, [RANKS as f64; 3]);
    Ok(())
}

pub(super) fn different_sizes(world: &World) -> Result<String> {
    let size = if world.rank() == 0 { 12 } else { 1 };
    let own = Tensor::full(world.rank() as f32, size, &Device::Cpu)?;
    let error = world.all_gather(&own, 0, &[size; RANKS]).unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("[12]") && error.contains("[1]"), "{error}");
    still_works(world)?;
    Ok("an error on every rank with the calls of both; the next all-reduce is right".into())
}

pub(super) fn different_calls(world: &World) -> Result<String> {
    let tensor = Tensor::ones(3, DType::F32, &Device::Cpu)?;
    let result = if world.rank() == 1 { world.barrier() } else { world.all_reduce(&tensor, ReduceOp::Sum).map(drop) };
    let error = result.unwrap_err().to_string();
    assert!(error.contains("all_reduce") && error.contains("barrier"), "{error}");
    still_works(world)?;
    Ok("an error on every rank with both calls; the next all-reduce is right".into())
}
