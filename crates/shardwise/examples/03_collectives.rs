//! Collectives on uneven sizes, in the world and in groups of a mesh.
//!
//! Run with `cargo run --example 03_collectives`.

use candle_core::{Device, Tensor};
use shardwise::prelude::*;

fn main() -> Result<()> {
    launch(4, |world| {
        let rank = world.rank();
        // Rank r holds r rows; rank 0 holds nothing, which is ordinary.
        let mine = Tensor::full(rank as f32, (rank, 2), &Device::Cpu)?;
        let all = world.all_gather(&mine, 0, &[0, 1, 2, 3])?;

        // Reduce within the rows and columns of a 2x2 mesh.
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let one = Tensor::new(&[rank as i64], &Device::Cpu)?;
        let over_dp = mesh.group(&["dp"])?.all_reduce(&one, ReduceOp::Sum)?;
        let over_tp = mesh.group(&["tp"])?.all_reduce(&one, ReduceOp::Max)?;

        let (dp, tp) = (over_dp.to_vec1::<i64>()?[0], over_tp.to_vec1::<i64>()?[0]);
        println!("rank {rank}: gathered {:?}, sum over dp {dp}, max over tp {tp}", all.dims());
        Ok(())
    })
}
