//! Gradients: taken with the same distributed operators, pending until somebody needs them.
//!
//! Run with `cargo run --example 09_gradients`.

use shardwise::prelude::*;

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let x = DTensor::randn((8, 64), &mesh, [Shard(0), Replicate])?;
        let w = DTensor::randn((64, 64), &mesh, [Replicate, Shard(1)])?.requires_grad();
        let y = x.matmul(&w)?.gelu()?; // no communication: y is [Shard(0), Shard(1)]
        let loss = y.sum_all()?; // a pending sum until someone needs the value
        world.trace().clear();

        let grads = loss.backward()?;
        let quiet = world.trace().records().is_empty();
        let pending = grads.get(&w)?.layout().to_string();
        let grads = grads.in_param_layout()?; // one all-reduce over dp

        if world.rank() == 0 {
            println!("gradient as it falls out: {pending} (communicated nothing: {quiet})");
            println!("in the layout of the parameter: {}", grads.get(&w)?.layout());
            println!("\n{}", world.trace().report());
        }
        Ok(())
    })
}
