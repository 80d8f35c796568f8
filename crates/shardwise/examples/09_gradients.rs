//! Gradients: the backward pass uses the same distributed operators, and leaves partial sums until they are needed.
//!
//! Run with `cargo run --example 09_gradients`.

use shardwise::prelude::*;

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let x = DTensor::randn((8, 64), &mesh, [Shard(0), Replicate])?;
        let w = DTensor::randn((64, 64), &mesh, [Replicate, Shard(1)])?.requires_grad();
        let y = x.matmul(&w)?.gelu()?; // no communication: y is [Shard(0), Shard(1)]
        let loss = y.sum_all()?; // a partial sum until its value is read
        world.trace().clear();

        let grads = loss.backward()?;
        let is_silent = world.trace().records().is_empty();
        let raw_layout = grads.get(&w)?.layout().to_string();
        let grads = grads.in_param_layout()?; // one all-reduce over dp

        if world.rank() == 0 {
            println!("gradient after backward: {raw_layout} (no communication: {is_silent})");
            println!("gradient in the layout of the parameter: {}", grads.get(&w)?.layout());
            println!("\n{}", world.trace().report());
        }
        Ok(())
    })
}
