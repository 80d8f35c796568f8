//! Sharded tensors: shards of any size on any rank, resharded, gathered, saved, and read from other ranks.
//!
//! Run with `cargo run --example 11_sharded_tensor`.

use shardwise::ThreadWorld;
use shardwise::candle_core::{Device, Tensor};
use shardwise::prelude::*;
use shardwise::sharded::{
    ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensor, shard_tensor,
};

fn main() -> Result<()> {
    let states = ThreadWorld::new(3)?.run(|world| {
        let mesh = world.mesh([("all", 3)])?;
        // Rank 2 owns two shards, rank 1 none.
        let on = |offsets: [usize; 2], sizes: [usize; 2], rank| {
            ShardMetadata::new(offsets, sizes, Some(RemoteDevice::cpu_of(rank)))
        };
        let spec =
            EnumerableShardingSpec::new([on([0, 0], [4, 3], 2)?, on([0, 3], [2, 3], 0)?, on([2, 3], [2, 3], 2)?])?;
        let table = Tensor::arange(0f32, 24.0, &Device::Cpu)?.reshape((4, 6))?;
        let x = shard_tensor(&table, spec, &mesh, Some(0))?;
        if world.rank() == 0 {
            println!("{}\n", x.metadata());
        }

        // Rank 0 reads a shard of rank 2; rank 2 makes no call for it.
        let remote = x.remote_shards()?;
        if world.rank() == 0 {
            println!("shard 1 of rank 2:\n{}\n", remote[&2][1].fetch()?);
        }

        // Reshards from any spec to any other; every element is sent at most once.
        world.trace().clear();
        let rows = x.reshard(ChunkShardingSpec::over_ranks(0, [1, 2, 0])?)?;
        if world.rank() == 2 {
            println!("communication of rank 2 to reshard to {}:\n{}", rows.sharding_spec(), world.trace().report());
        }

        // Chunked shards convert to a DTensor without communication; operators work on both types.
        let y = rows.to_dtensor()?;
        assert!(rows.mul(&rows)?.equal(&ShardedTensor::from_dtensor(&y.square()?)?)?);
        rows.state()
    })?;

    // Two ranks load what three ranks saved, in a spec of their choice.
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        let mine: Vec<_> = states.iter().skip(world.rank()).step_by(2).cloned().collect();
        let columns = ChunkShardingSpec::over_ranks(1, [0, 1])?;
        let x = ShardedTensor::load_with_process_group(&mesh, &mine, Some(columns.into()))?;
        if let Some(whole) = x.gather(0)? {
            println!("loaded by two ranks:\n{whole}");
        }
        Ok(())
    })
}
