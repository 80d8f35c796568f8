//! Operators on distributed tensors: layouts propagate, and data moves only when it must.
//!
//! Run with `cargo run --example 08_operators`.

use shardwise::prelude::*;

fn main() -> Result<()> {
    launch(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let x = DTensor::randn((8, 64), &mesh, [Shard(0), Replicate])?;
        let up = DTensor::randn((64, 256), &mesh, [Replicate, Shard(1)])?;
        let down = DTensor::randn((256, 64), &mesh, [Replicate, Shard(0)])?;
        world.trace().clear();

        let hidden = x.matmul(&up)?.gelu()?; // no communication
        let y = hidden.matmul(&down)?; // pending: each tp rank has a part of the sum
        let normal = y.add(&x)?.rms_norm(1, None, 1e-6)?; // the residual joins the sum; the norm needs the value
        let loss = normal.square()?.mean(&[], false)?; // pending again until somebody asks

        let value: f32 = loss.item()?;
        if world.rank() == 0 {
            for (name, tensor) in [("hidden", &hidden), ("y", &y), ("normal", &normal), ("loss", &loss)] {
                println!("{name}: {}", tensor.layout());
            }
            println!("loss {value:.4}\n\nwhat rank 0 communicated:\n{}", world.trace().report());
        }
        Ok(())
    })
}
