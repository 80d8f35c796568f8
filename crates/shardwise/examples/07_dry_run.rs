//! A dry run: the memory and communication of one rank in a world of 16,384, computed in one process without data.
//!
//! Run with `cargo run --example 07_dry_run`.

use shardwise::DryWorld;
use shardwise::prelude::*;

fn main() -> Result<()> {
    let run = DryWorld::new(16_384)?.run(|world| {
        let mesh = world.mesh([("dp", 128), ("fsdp", 16), ("tp", 8)])?;
        // One weight of a large model, sharded over fsdp and tp, and gathered over fsdp before use.
        let weight = DTensor::zeros((28_672, 8_192), DType::BF16, &mesh, [Replicate, Shard(0), Shard(1)])?;
        let gathered = weight.redistribute([Replicate, Replicate, Shard(1)])?;
        Ok((weight.local_shape().to_vec(), gathered.local_shape().to_vec()))
    })?;
    println!("local shape of the weight: {:?}, gathered over fsdp: {:?}", run.value.0, run.value.1);
    for record in &run.records {
        println!("{} over {} ranks, {} bytes sent", record.call, record.group.len(), record.bytes);
    }
    println!("peak memory: {:.1} MB", run.peak_bytes as f64 / 1e6);
    Ok(())
}
