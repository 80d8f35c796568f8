//! A dry run: what one rank of 16,384 would hold and communicate, found out without any of them.
//!
//! Run with `cargo run --example 07_dry_run`.

use shardwise::DryWorld;
use shardwise::prelude::*;

fn main() -> Result<()> {
    let run = DryWorld::new(16_384)?.run(|world| {
        let mesh = world.mesh([("dp", 128), ("fsdp", 16), ("tp", 8)])?;
        // One weight of a large model, sharded over two axes; gathered over one of them to be used.
        let weight = DTensor::zeros((28_672, 8_192), DType::BF16, &mesh, [Replicate, Shard(0), Shard(1)])?;
        let gathered = weight.redistribute([Replicate, Replicate, Shard(1)])?;
        Ok((weight.to_local().dims().to_vec(), gathered.to_local().dims().to_vec()))
    })?;
    println!("a rank holds {:?} of the weight, and {:?} while it is gathered", run.value.0, run.value.1);
    for record in &run.records {
        println!("{} over {} ranks, {} bytes sent", record.call, record.group.len(), record.bytes);
    }
    println!("peak memory: {:.1} MB", run.peak_bytes as f64 / 1e6);
    Ok(())
}
