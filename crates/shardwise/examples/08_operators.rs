//! Operators on distributed tensors: the layout of a result follows from its inputs, and ranks communicate only where
//! they must.
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
        let y = hidden.matmul(&down)?; // a partial sum: each tp rank holds one term
        let normal = y.add(&x)?.rms_norm(1, None, 1e-6)?; // the residual is added to the partial sum; the norm reduces it
        let loss = normal.square()?.mean(&[], false)?; // a partial value until it is read

        let value: f32 = loss.item()?;
        if world.rank() == 0 {
            for (name, tensor) in [("hidden", &hidden), ("y", &y), ("normal", &normal), ("loss", &loss)] {
                println!("{name}: {}", tensor.layout());
            }
            println!("loss {value:.4}\n\ncommunication of rank 0:\n{}", world.trace().report());
        }
        Ok(())
    })
}
