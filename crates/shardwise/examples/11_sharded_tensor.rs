//! Sharded tensors: boxes of any size on any rank, moved, gathered, stored and read from afar.

use candle_core::{Device, Tensor};
use shardwise::ThreadWorld;
use shardwise::prelude::*;
use shardwise::sharded::{
    ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensor, shard_tensor,
};

fn main() -> Result<()> {
    let states = ThreadWorld::new(3)?.run(|world| {
        let mesh = world.mesh([("all", 3)])?;
        // Rank 2 has two boxes, rank 1 has none.
        let on = |offsets: [usize; 2], sizes: [usize; 2], rank| {
            ShardMetadata::new(offsets, sizes, Some(RemoteDevice::cpu_of(rank)))
        };
        let boxes =
            EnumerableShardingSpec::new([on([0, 0], [4, 3], 2)?, on([0, 3], [2, 3], 0)?, on([2, 3], [2, 3], 2)?])?;
        let table = Tensor::arange(0f32, 24.0, &Device::Cpu)?.reshape((4, 6))?;
        let x = shard_tensor(&table, boxes, &mesh, Some(0))?;
        if world.rank() == 0 {
            println!("{}\n", x.metadata());
        }

        // Rank 0 reads a shard of rank 2, which takes no part.
        let remote = x.remote_shards()?;
        if world.rank() == 0 {
            println!("shard 1 of rank 2:\n{}\n", remote[&2][1].fetch()?);
        }

        // Any cut to any other, every element sent once at most.
        world.trace().clear();
        let rows = x.reshard(ChunkShardingSpec::over_ranks(0, [1, 2, 0])?)?;
        if world.rank() == 2 {
            println!("rank 2 sends, to get to {}:\n{}", rows.sharding_spec(), world.trace().report());
        }

        // Regular shards are a distributed tensor already; operators work on either form.
        let y = rows.to_dtensor()?;
        assert!(rows.mul(&rows)?.equal(&ShardedTensor::from_dtensor(&y.square()?)?)?);
        rows.state()
    })?;

    // What three ranks stored, two ranks load, cut as they like.
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
