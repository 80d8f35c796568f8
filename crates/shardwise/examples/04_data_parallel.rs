//! Data-parallel linear regression with explicit collectives: four ranks end with the weights of one rank.
//!
//! Run with `cargo run --example 04_data_parallel`.

use shardwise::candle_core::{D, Device, Tensor};
use shardwise::prelude::*;

const SAMPLES: usize = 103; // not divisible by 4: shards are uneven
const FEATURES: usize = 5;
const STEPS: usize = 200;

fn main() -> Result<()> {
    let one_rank = launch(1, |world| train(&world))?;
    let four_ranks = launch(4, |world| train(&world))?;
    println!("weights on 1 rank:  {one_rank:.4?}");
    println!("weights on 4 ranks: {four_ranks:.4?}");
    let difference = one_rank.iter().zip(&four_ranks).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    println!("largest difference: {difference:.1e}");
    assert!(difference < 1e-12);
    Ok(())
}

fn train(world: &World) -> Result<Vec<f64>> {
    // Each rank generates the rows of its shard.
    let mesh = world.mesh([("dp", world.size())])?;
    let layout = Layout::new(mesh.mesh(), (SAMPLES, FEATURES), [Shard(0)])?;
    let (rows, first) = (layout.local_shape(world.rank())[0], layout.global_offset(world.rank())[0]);
    let feature = |i: usize| ((i * 37 % 101) as f64 / 50.0) - 1.0;
    let x: Vec<f64> = (first * FEATURES..(first + rows) * FEATURES).map(feature).collect();
    let x = Tensor::from_vec(x, (rows, FEATURES), &Device::Cpu)?;
    let truth = Tensor::new(&[1.0, -2.0, 0.5, 3.0, -0.25], &Device::Cpu)?.reshape((FEATURES, 1))?;
    let y = x.matmul(&truth)?;

    let mut weights = Tensor::zeros((FEATURES, 1), shardwise::candle_core::DType::F64, &Device::Cpu)?;
    for _ in 0..STEPS {
        let error = (x.matmul(&weights)? - &y)?;
        let gradient = (x.t()?.matmul(&error)? * (2.0 / SAMPLES as f64))?;
        let gradient = world.all_reduce(&gradient, ReduceOp::Sum)?;
        weights = (weights - (gradient * 0.5)?)?;
    }
    let error = (x.matmul(&weights)? - &y)?.sqr()?.sum_keepdim(D::Minus2)?;
    let loss = world.all_reduce(&error, ReduceOp::Sum)?.to_vec2::<f64>()?[0][0] / SAMPLES as f64;
    if world.rank() == 0 {
        println!("{} rank(s): loss {loss:.2e} after {STEPS} steps", world.size());
    }
    Ok(weights.flatten_all()?.to_vec1()?)
}
