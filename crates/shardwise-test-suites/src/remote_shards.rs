//! One-sided reads of other ranks' shards while the owners make no library call, on a world of any engine.
//!
//! Ranks may be processes, and an owner that communicates could make progress on a read as a side effect. So ranks
//! signal with marker files that they have finished reading.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use shardwise::prelude::*;
use shardwise::sharded::{EnumerableShardingSpec, RemoteDevice, RemoteShard, ShardMetadata, shard_tensor};

/// Element type, and factor by which the number of rows grows: the last case is large enough for an engine that switches to
/// another algorithm for large tensors.
const CASES: [(DType, usize); 5] =
    [(DType::F32, 1), (DType::BF16, 3), (DType::I64, 2), (DType::U8, 7), (DType::F32, 40_000)];

/// Runs the suite and returns the number of shards that this rank read. Collective. `scratch` is an empty directory,
/// the same on all ranks.
pub fn run(world: &World, scratch: &Path) -> Result<usize> {
    let mesh = world.mesh([("all", world.size())])?;
    let mut read = 0;
    for (case, (dtype, scale)) in CASES.into_iter().enumerate() {
        let boxes = boxes(world.size(), scale)?;
        let rows = boxes.iter().map(|b| b.offsets[0] + b.sizes[0]).max().expect("rank 0 has a box");
        let whole = counting(rows, dtype)?;
        let mut x = shard_tensor(&whole, EnumerableShardingSpec::new(boxes)?, &mesh, None)?;
        let remote = x.remote_shards()?;
        // Owners overwrite and drop the tensor: handles still read the exposed elements.
        x.fill(99.0)?;
        drop(x);
        // One reader at a time, so that not even an owner's own reads make progress for another rank's.
        for reader in 0..world.size() {
            let marker = scratch.join(format!("{case}-alone-{reader}"));
            if reader == world.rank() {
                read += read_all(&remote, &whole, &marker)?;
            } else {
                wait_for(&marker)?;
            }
        }
        // All at once.
        let marker = |rank: usize| scratch.join(format!("{case}-together-{rank}"));
        read += read_all(&remote, &whole, &marker(world.rank()))?;
        for rank in 0..world.size() {
            wait_for(&marker(rank))?;
        }
    }
    Ok(read)
}

/// Shards of a tensor with three columns: every rank owns its rows as one shard, as two, or owns none.
fn boxes(ranks: usize, scale: usize) -> Result<Vec<ShardMetadata>> {
    let (mut boxes, mut row) = (Vec::new(), 0);
    for rank in 0..ranks {
        let height = (rank + 1) * scale;
        let columns: &[(usize, usize)] = [&[(0, 3)][..], &[(0, 1), (1, 2)], &[]][rank % 3];
        for &(column, width) in columns {
            boxes.push(ShardMetadata::new([row, column], [height, width], Some(RemoteDevice::cpu_of(rank)))?);
        }
        row += if columns.is_empty() { 0 } else { height };
    }
    Ok(boxes)
}

/// Numbers that every type holds exactly.
fn counting(rows: usize, dtype: DType) -> Result<Tensor> {
    let numbers: Vec<i64> = (0..3 * rows as i64).map(|i| i % 251).collect();
    Ok(Tensor::from_vec(numbers, (rows, 3), &Device::Cpu)?.to_dtype(dtype)?)
}

/// Reads and compares every shard of the other ranks; creates the marker on failure too, so that no rank waits for a
/// failed one.
fn read_all(remote: &BTreeMap<usize, Vec<RemoteShard>>, whole: &Tensor, marker: &Path) -> Result<usize> {
    let outcome = remote.values().flatten().try_fold(0, |read, shard| read_one(shard, whole).map(|()| read + 1));
    // A marker left by an earlier run would have kept the other ranks from waiting.
    let created = std::fs::File::create_new(marker);
    created.map_err(|e| Error::other(format!("cannot create the marker {}: {e}", marker.display())))?;
    outcome
}

fn read_one(shard: &RemoteShard, whole: &Tensor) -> Result<()> {
    let ShardMetadata { offsets, sizes, .. } = shard.metadata();
    let expected = whole.narrow(0, offsets[0], sizes[0])?.narrow(1, offsets[1], sizes[1])?;
    let got = shard.fetch()?;
    let numbers = |t: &Tensor| -> Result<Vec<i64>> { Ok(t.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?) };
    if got.dtype() == whole.dtype() && got.dims() == expected.dims() && numbers(&got)? == numbers(&expected)? {
        return Ok(());
    }
    Err(Error::other(format!("{} is not what was there: {got}", shard.metadata())))
}

/// Makes no library call until the marker file exists.
fn wait_for(marker: &Path) -> Result<()> {
    let start = Instant::now();
    while !marker.exists() {
        if start.elapsed() > Duration::from_secs(60) {
            return Err(Error::other(format!("no {} after 60 s: the read waits for its owner", marker.display())));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
