//! Collectives on shards of different sizes: over all ranks, and over the axes of a mesh.
//!
//! Run with `cargo run --example 03_collectives`.

use shardwise::candle_core::{Device, Tensor};
use shardwise::prelude::*;

fn main() -> Result<()> {
    launch(4, |world| {
        let rank = world.rank();
        // Rank r holds r rows: an empty shard is valid.
        let mine = Tensor::full(rank as f32, (rank, 2), &Device::Cpu)?;
        let all = world.all_gather(&mine, 0, &[0, 1, 2, 3])?;

        // Reduces over one axis of a 2 x 2 mesh: the ranks that differ in only that coordinate.
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let one = Tensor::new(&[rank as i64], &Device::Cpu)?;
        let over_dp = mesh.group(&["dp"])?.all_reduce(&one, ReduceOp::Sum)?;
        let over_tp = mesh.group(&["tp"])?.all_reduce(&one, ReduceOp::Max)?;

        let (dp, tp) = (over_dp.to_vec1::<i64>()?[0], over_tp.to_vec1::<i64>()?[0]);
        println!("rank {rank}: gathered {:?}, sum over dp {dp}, max over tp {tp}", all.dims());
        Ok(())
    })
}
