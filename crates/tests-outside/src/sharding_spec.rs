//! A custom sharding spec in one file: rows distributed over ranks in blocks, with an operator that runs on the local
//! shards.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use shardwise::candle_core::{Device, Tensor};
use shardwise::prelude::*;
use shardwise::sharded::{
    ChunkShardingSpec, RemoteDevice, ShardMetadata, ShardTensorRequest, ShardedTensor, ShardedTensorMetadata,
    ShardingSpec, call_sharded_op, distribute, register_spec_op, shard_tensor,
};

/// Blocks of rows, one after the other to each rank in turn.
#[derive(Debug, Clone)]
struct BlockCyclic {
    rows: usize,
    ranks: usize,
}

static SHARDED: AtomicUsize = AtomicUsize::new(0);

impl fmt::Display for BlockCyclic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "blocks of {} rows on {} ranks in turn", self.rows, self.ranks)
    }
}

impl ShardingSpec for BlockCyclic {
    fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        let block = |(number, start): (usize, usize)| {
            let rows = self.rows.min(size[0] - start);
            let offsets = [vec![start], vec![0; size.len() - 1]].concat();
            let placement = RemoteDevice::cpu_of(number % self.ranks);
            ShardMetadata::new(offsets, [&[rows], &size[1..]].concat(), Some(placement))
        };
        let shards = (0..size[0]).step_by(self.rows).enumerate().map(block).collect::<Result<_>>()?;
        Ok(ShardedTensorMetadata { size: size.to_vec(), dtype, requires_grad: false, shards })
    }

    fn shard(&self, request: &ShardTensorRequest<'_>) -> Result<Vec<Tensor>> {
        SHARDED.fetch_add(1, SeqCst);
        distribute(request)
    }
}

/// An operator of elements, on the shards where they are.
fn on_shards(
    spec: &BlockCyclic,
    x: &ShardedTensor,
    f: impl Fn(&Tensor) -> shardwise::candle_core::Result<Tensor>,
) -> Result<ShardedTensor> {
    let tensors = x.local_shards().iter().map(|shard| Ok(f(&shard.tensor())?)).collect::<Result<Vec<_>>>()?;
    let whole = TensorMeta { shape: x.shape().to_vec(), dtype: x.dtype() };
    ShardedTensor::init_from_local_tensors(&tensors, spec.clone(), &whole, x.device_mesh())
}

fn register() -> Result<()> {
    register_spec_op::<BlockCyclic>("relu", |spec, inputs| on_shards(spec, inputs[0], Tensor::relu))?;
    register_spec_op::<BlockCyclic>("in_blocks", |spec, inputs| {
        on_shards(spec, inputs[0], |block| block * (1.0 / spec.rows as f64))
    })
}

fn table() -> Tensor {
    Tensor::arange(-12f32, 10.0, &Device::Cpu).unwrap().reshape((11, 2)).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<f32>> {
    tensor.to_vec2().unwrap()
}

#[test]
fn tensors_of_a_custom_spec_are_created_resharded_and_saved() {
    for ranks in [2, 3] {
        let before = SHARDED.load(SeqCst);
        launch(ranks, move |world| {
            let mesh = world.mesh([("all", ranks)])?;
            let spec = BlockCyclic { rows: 2, ranks };
            let x = shard_tensor(&table(), spec.clone(), &mesh, Some(1))?;
            assert_eq!(x.sharding_spec().downcast_ref::<BlockCyclic>().map(|spec| spec.rows), Some(2));
            assert_eq!(x.local_shards().len(), 6 / ranks);
            assert_eq!(rows(&x.full_tensor()?), rows(&table()));

            // to chunks of columns and back
            let columns = x.reshard(ChunkShardingSpec::over_ranks(1, 0..ranks)?)?;
            assert!(columns.equal(&x)?);
            let back = columns.reshard(spec.clone())?;
            assert!(back.local_shards().iter().zip(x.local_shards()).all(|(a, b)| a.metadata() == b.metadata()));
            assert!(ShardedTensor::zeros(spec, (11, 2), DType::F32, &mesh)?.equal(&x.full_like(0.0)?)?);

            // as a distributed tensor
            assert_eq!(rows(&x.to_dtensor()?.full_tensor()?), rows(&table()));

            // stored as a spec that needs no program, loaded in any spec
            let state = x.state()?;
            assert!(state.spec.downcast_ref::<BlockCyclic>().is_none());
            assert_eq!(state.spec.build_metadata(&[11, 2], DType::F32)?, *x.metadata());
            let as_stored = ShardedTensor::load_with_process_group(&mesh, std::slice::from_ref(&state), None)?;
            assert_eq!(as_stored.metadata().shards, x.metadata().shards);
            let wider = BlockCyclic { rows: 3, ranks };
            let loaded = ShardedTensor::load_with_process_group(&mesh, &[state], Some(wider.into()))?;
            assert!(loaded.equal(&x)? && loaded.sharding_spec().to_string().contains("3 rows"));
            Ok(())
        })
        .unwrap();
        assert!(SHARDED.load(SeqCst) >= before + ranks, "a spec may shard in its own way");
    }
}

#[test]
fn an_operator_of_the_spec_replaces_the_built_in_one() {
    for ranks in [2, 3] {
        launch(ranks, move |world| {
            register()?;
            let mesh = world.mesh([("all", ranks)])?;
            let x = shard_tensor(&table(), BlockCyclic { rows: 2, ranks }, &mesh, None)?;
            world.trace().clear();
            let y = x.relu()?;
            assert!(world.trace().records().is_empty(), "nothing is communicated");
            assert_eq!(y.sharding_spec(), x.sharding_spec());
            assert_eq!(rows(&y.full_tensor()?), rows(&table().relu()?));

            let half = call_sharded_op("in_blocks", &[&x])?;
            assert_eq!(rows(&half.full_tensor()?), rows(&(table() * 0.5)?));

            // other specs and other operators are as they were
            let chunks = x.reshard(ChunkShardingSpec::over_ranks(0, 0..ranks)?)?;
            assert!(chunks.relu()?.sharding_spec().downcast_ref::<ChunkShardingSpec>().is_some());
            assert_eq!(rows(&x.neg()?.full_tensor()?), rows(&table().neg()?));
            let error = call_sharded_op("in_block", &[&x]).unwrap_err().to_string();
            assert!(error.contains("in_blocks, relu"), "{error}");
            assert!(call_sharded_op("in_blocks", &[&chunks]).is_err());
            Ok(())
        })
        .unwrap();
    }
    let taken = register_spec_op::<BlockCyclic>("relu", |_, inputs| inputs[0].full_like(0.0));
    assert!(taken.unwrap_err().to_string().contains("relu"));
}

/// Forgets the last row.
#[derive(Debug)]
struct Short;

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("all rows but the last on rank 0")
    }
}

impl ShardingSpec for Short {
    fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        BlockCyclic { rows: size[0], ranks: 1 }
            .build_metadata(&[size[0] - 1, size[1]], dtype)
            .map(|short| ShardedTensorMetadata { size: size.to_vec(), ..short })
    }
}

#[test]
fn shards_that_do_not_cover_the_tensor_are_rejected() {
    let error = launch(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        ShardedTensor::zeros(Short, (11, 2), DType::F32, &mesh).map(drop)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("20 elements in 1 shard(s)"), "{error}");
}
