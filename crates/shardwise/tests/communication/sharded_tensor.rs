//! The public API of `ShardedTensor`: construction, reading, remote shards, states across worlds, operators,
//! embeddings; and errors that are the same on every rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use shardwise::nn::init::Init;
use shardwise::ops::EmbeddingBagMode;
use shardwise::prelude::*;
use shardwise::sharded::{
    AnyShardingSpec, ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensor,
    ShardedTensorMetadata, ShardedTensorState, TensorShard, call_sharded_op, shard_tensor, with_sharded_op,
};
use shardwise::{DryWorld, ThreadWorld};
use shardwise_test_suites::errors::same_error_on_all_ranks;

fn numbers(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn counting(shape: &[usize], dtype: DType) -> Tensor {
    let count = shape.iter().product::<usize>() as i64;
    Tensor::arange(0i64, count, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

fn shard(offsets: &[usize], sizes: &[usize], rank: usize) -> ShardMetadata {
    ShardMetadata::new(offsets, sizes, Some(RemoteDevice::cpu_of(rank))).unwrap()
}

/// Six rows of two columns on three ranks: an L of boxes, two of them on rank 0, none on rank 1.
fn irregular() -> AnyShardingSpec {
    let shards = [
        shard(&[0, 0], &[3, 1], 0),
        shard(&[0, 1], &[2, 1], 2),
        shard(&[2, 1], &[4, 1], 0),
        shard(&[3, 0], &[3, 1], 2),
    ];
    EnumerableShardingSpec::new(shards).unwrap().into()
}

#[test]
fn random_tensors_of_a_spec_equal_those_of_any_other_layout() {
    launch(3, |world| {
        let mesh = world.mesh([("all", 3)])?;
        let specs: [AnyShardingSpec; 3] = [
            irregular(),
            ChunkShardingSpec::over_ranks(0, [2, 0])?.into(),
            ChunkShardingSpec::over_ranks(-1, [0, 1, 2, 0, 1])?.into(),
        ];
        for spec in specs {
            let full = |x: &ShardedTensor| -> Result<Vec<f64>> { Ok(numbers(&x.full_tensor()?)) };
            let make = |seed: u64| mesh.manual_seed(seed);
            make(3);
            let expected = numbers(&DTensor::randn((6, 2), &mesh, [Replicate])?.full_tensor()?);
            make(3);
            assert_eq!(full(&ShardedTensor::randn(spec.clone(), (6, 2), DType::F32, &mesh)?)?, expected);
            let ones = ShardedTensor::ones(spec.clone(), (6, 2), DType::I64, &mesh)?;
            assert_eq!(full(&ones)?, [1.0; 12]);
            assert_eq!(full(&ones.zeros_like()?)?, [0.0; 12]);
            assert_eq!(full(&ones.full_like(-4.0)?)?, [-4.0; 12]);
            assert_eq!(ones.sharding_spec(), ones.zeros_like()?.sharding_spec());
            make(5);
            let whole = Init::KaimingUniform(2.0).create(&[6, 2], DType::F64, &mesh, [Shard(1)])?.full_tensor()?;
            make(5);
            let mut weight = ShardedTensor::empty(spec.clone(), (6, 2), DType::F64, &mesh)?;
            let before = weight.clone();
            weight.init(Init::KaimingUniform(2.0))?;
            assert_eq!(full(&weight)?, numbers(&whole), "the fan is that of the whole tensor");
            assert_eq!(full(&before)?, [0.0; 12], "a clone keeps its elements");
            weight.fill(7.0)?;
            weight.copy_from(&ones)?;
            assert_eq!((weight.dtype(), full(&weight)?), (DType::F64, vec![1.0; 12]));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn shards_are_read_individually_and_gathered() {
    launch(3, |world| {
        let mesh = world.mesh([("all", 3)])?;
        let x = shard_tensor(&counting(&[6, 2], DType::F32), irregular(), &mesh, Some(1))?;
        assert_eq!(x.local_shards().len(), [2, 0, 2][world.rank()]);
        assert_eq!((0..3).map(|r| x.shard_size(r)).collect::<Vec<_>>(), [7, 0, 5]);
        let error = x.local_tensor().unwrap_err().to_string();
        assert!(error.contains("one shard") && error.contains("local_shards"), "{error}");
        assert_eq!((x.shape(), x.dtype(), x.elem_count()), ([6, 2].as_slice(), DType::F32, 12));
        assert!(!x.is_pinned() && !x.requires_grad() && x.with_requires_grad(true).requires_grad());
        assert!(format!("{x:?}").contains("[2, 1] at [0, 1] on rank:2/cpu"), "{x:?}");
        let halves = x.to_dtype(DType::BF16)?;
        assert_eq!((halves.dtype(), halves.local_shards().len()), (DType::BF16, x.local_shards().len()));
        assert!(halves.cpu()?.equal(&halves)? && halves.allclose(&x, 0.0, 0.0)?);
        assert!(!x.equal(&halves)?, "another type is not equal");
        let mut other = x.clone();
        other.fill(0.0)?;
        assert!(!x.equal(&other)? && x.allclose(&other, 0.0, 11.0)? && !x.allclose(&other, 0.0, 10.0)?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn gather_keeps_the_type_of_the_tensor() {
    launch(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let big = Tensor::new(&[(1i64 << 53) + 1, -(1 << 53) - 1, 3], &Device::Cpu)?;
        let x = shard_tensor(&big, ChunkShardingSpec::over_ranks(0, [1, 0])?, &mesh, None)?;
        let got = x.gather(1)?;
        assert_eq!(got.map(|t| t.to_vec1::<i64>().unwrap()), (world.rank() == 1).then(|| big.to_vec1().unwrap()));
        Ok(())
    })
    .unwrap();
}

#[test]
fn init_from_local_shards_takes_the_shards_of_each_rank() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let table = counting(&[4, 4], DType::F32);
        let rank = world.rank();
        let quarter = |r: usize| table.narrow(0, r / 2 * 2, 2)?.narrow(1, r % 2 * 2, 2);
        let own = TensorShard::from_tensor_and_offsets(&quarter(rank)?, [rank / 2 * 2, rank % 2 * 2], rank)?;
        let x = ShardedTensor::init_from_local_shards(std::slice::from_ref(&own), (4, 4), &mesh)?;
        assert_eq!(numbers(&x.full_tensor()?), numbers(&table));
        assert!(x.sharding_spec().downcast_ref::<EnumerableShardingSpec>().is_some());
        world.trace().clear();
        let metadata = x.metadata().clone();
        let y = ShardedTensor::init_from_local_shards_and_global_metadata(&[own], metadata, &mesh)?;
        assert!(world.trace().records().is_empty(), "nothing is communicated");
        assert!(y.equal(&x)?);
        let rows = ChunkShardingSpec::over_ranks(0, [3, 2, 1, 0])?;
        let mine = table.narrow(0, 3 - rank, 1)?;
        let z = ShardedTensor::init_from_local_tensor(&mine, rows.clone(), (4, 4), &mesh)?;
        assert!(z.equal(&x)?);
        // shards that a rank lists out of order stay in that order, for comparison, states and reads
        if rank == 0 || rank == 1 {
            let pair = world.subgroup(&[0, 1])?;
            let two = DeviceMesh::from_group(&world, "two", &pair)?;
            let row = |i: usize| TensorShard::from_tensor_and_offsets(&table.narrow(0, i, 1)?, [i, 0], rank);
            let mine = if rank == 0 { vec![row(2)?, row(0)?] } else { vec![row(1)?, row(3)?] };
            let mut v = ShardedTensor::init_from_local_shards(&mine, (4, 4), &two)?;
            assert!(v.equal(&v.clone())?);
            v.copy_from(&v.clone())?;
            assert_eq!(numbers(&v.full_tensor()?), numbers(&table));
            let offsets = |s: &TensorShard| s.metadata().offsets[0];
            assert_eq!(v.local_shards().iter().map(offsets).collect::<Vec<_>>(), [[2, 0], [1, 3]][rank]);
            assert!(v.local_shards().iter().all(|s| numbers(&s.tensor())[0] == 4.0 * offsets(s) as f64));
        }
        // chunks in any order are recognized as chunks
        let own = TensorShard::from_tensor_and_offsets(&mine, [3 - rank, 0], rank)?;
        let w = ShardedTensor::init_from_local_shards(&[own], (4, 4), &mesh)?;
        assert_eq!(w.sharding_spec(), &rows.into());
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_remote_shard_is_fetched_while_its_owner_is_busy() {
    let fetched = Arc::new(AtomicBool::new(false));
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let mut x = shard_tensor(&counting(&[6, 2], DType::F32), irregular(), &mesh, None)?;
        let remote = x.remote_shards()?;
        assert_eq!(
            remote.keys().copied().collect::<Vec<_>>(),
            (0..3).filter(|&r| r != world.rank()).collect::<Vec<_>>()
        );
        assert!(world.rank() == 1 || remote[&1].is_empty());
        // the owner overwrites its tensor afterwards: handles read the exposed elements
        x.fill(-1.0)?;
        if world.rank() == 1 {
            world.trace().clear();
            assert_eq!(numbers(&remote[&0][1].fetch()?), [5.0, 7.0, 9.0, 11.0]);
            assert_eq!(remote[&2][0].metadata(), &shard(&[0, 1], &[2, 1], 2));
            assert_eq!(numbers(&remote[&2][0].fetch()?), [1.0, 3.0]);
            let calls: Vec<(&str, usize)> = world.trace().records().iter().map(|r| (r.call, r.bytes)).collect();
            assert_eq!(calls, [("fetch", 16), ("fetch", 8)]);
            fetched.store(true, SeqCst);
        } else {
            // The owners make no call of any kind until the fetch is over.
            let start = Instant::now();
            while !fetched.load(SeqCst) {
                assert!(start.elapsed() < Duration::from_secs(20), "the fetch waits for its owner");
                std::thread::yield_now();
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_state_stored_by_one_world_loads_into_another() {
    let states = |ranks: usize, spec: AnyShardingSpec| -> Vec<ShardedTensorState> {
        let run = move |world: World| {
            let mesh = world.mesh([("all", world.size())])?;
            let table = counting(&[6, 2], DType::BF16);
            shard_tensor(&table, spec.clone(), &mesh, None)?.with_requires_grad(true).state()
        };
        ThreadWorld::new(ranks).unwrap().run(run).unwrap()
    };
    let stored = states(3, irregular());
    let json = serde_json::to_string(&stored).unwrap();
    let stored: Vec<ShardedTensorState> = serde_json::from_str(&json).unwrap();
    let all = stored.clone();
    for ranks in [1, 2, 5] {
        let stored = stored.clone();
        launch(ranks, move |world| {
            let mesh = world.mesh([("all", ranks)])?;
            let mine: Vec<_> = stored.iter().skip(world.rank()).step_by(ranks).cloned().collect();
            let columns: AnyShardingSpec = ChunkShardingSpec::over_ranks(1, (0..ranks).rev())?.into();
            let x = ShardedTensor::load_with_process_group(&mesh, &mine, Some(columns.clone()))?;
            assert_eq!((x.dtype(), x.sharding_spec(), x.requires_grad()), (DType::BF16, &columns, true));
            assert_eq!(numbers(&x.full_tensor()?), numbers(&counting(&[6, 2], DType::F64)));
            // every rank has read everything
            let y = ShardedTensor::load_with_process_group(&mesh, &stored, Some(columns))?;
            assert!(x.equal(&y)?);
            Ok(())
        })
        .unwrap();
    }
    // in the world that stored it, it has the same spec as before
    launch(3, move |world| {
        let mesh = world.mesh([("all", 3)])?;
        let x = ShardedTensor::load_with_process_group(&mesh, &all[world.rank()..=world.rank()], None)?;
        assert_eq!(x.sharding_spec(), &irregular());
        Ok(())
    })
    .unwrap();
}

#[test]
fn operators_give_the_unsharded_result_for_any_shards() {
    launch(3, |world| {
        let mesh = world.mesh([("all", 3)])?;
        let a = counting(&[6, 2], DType::F64);
        let b = (a.affine(0.5, -2.0))?;
        let w = counting(&[2, 5], DType::F64);
        let specs: [AnyShardingSpec; 4] = [
            irregular(),
            ChunkShardingSpec::over_ranks(0, [2, 0, 1])?.into(),
            ChunkShardingSpec::over_ranks(1, [1, 2])?.into(),
            EnumerableShardingSpec::new([shard(&[0, 0], &[6, 2], 1)])?.into(),
        ];
        let columns = ChunkShardingSpec::over_ranks(1, [0, 1, 2])?;
        let w_sharded = shard_tensor(&w, columns, &mesh, None)?;
        for first in &specs {
            let x = shard_tensor(&a, first.clone(), &mesh, None)?;
            for second in &specs {
                let y = shard_tensor(&b, second.clone(), &mesh, None)?;
                let full = |z: ShardedTensor| -> Result<Vec<f64>> { Ok(numbers(&z.full_tensor()?)) };
                assert_eq!(full(x.add(&y)?)?, numbers(&(&a + &b)?));
                assert_eq!(full(x.sub(&y)?)?, numbers(&(&a - &b)?));
                assert_eq!(full(x.mul(&y)?)?, numbers(&(&a * &b)?));
                assert_eq!(full(x.t()?.matmul(&y)?)?, numbers(&a.t()?.matmul(&b)?));
                assert_eq!(full(x.matmul(&w_sharded)?)?, numbers(&a.matmul(&w)?));
                assert_eq!(full(y.relu()?)?, numbers(&b.relu()?));
                let sum = ShardedTensor::apply("sum", &[&x], |x| x[0].sum_all())?;
                assert_eq!(full(sum)?, [66.0]);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_of_a_sharded_tensor_flow_through_its_dtensor() {
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let rows = ChunkShardingSpec::over_ranks(0, [0, 1])?;
        let x =
            shard_tensor(&counting(&[3, 2], DType::F64), rows, &mesh, None)?.with_requires_grad(true).to_dtensor()?;
        let gradients = x.square()?.sum_all()?.backward()?;
        assert_eq!(numbers(&gradients.get(&x)?.full_tensor()?), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn embeddings_of_tables_sharded_by_rows_by_columns_and_irregularly() {
    launch(3, |world| {
        let mesh = world.mesh([("all", 3)])?;
        let table = counting(&[6, 2], DType::F64);
        let ids = Tensor::new(&[[5i64, 0], [3, 3]], &Device::Cpu)?;
        let specs: [AnyShardingSpec; 4] = [
            ChunkShardingSpec::over_ranks(0, [0, 1, 2])?.into(),
            ChunkShardingSpec::over_ranks(1, [0, 1, 2])?.into(),
            ChunkShardingSpec::over_ranks(0, [2, 0, 1])?.into(),
            irregular(),
        ];
        for spec in specs {
            let sharded = shard_tensor(&table, spec.clone(), &mesh, None)?;
            let placed = DTensor::distribute_tensor(&ids, &mesh, [Replicate], None)?;
            let rows = |t: DTensor| -> Result<Vec<f64>> { Ok(numbers(&t.to_mesh(&mesh, [Replicate])?.full_tensor()?)) };
            assert_eq!(rows(sharded.embedding(&placed)?)?, [10.0, 11.0, 0.0, 1.0, 6.0, 7.0, 6.0, 7.0], "{spec}");
            let bags = sharded.embedding_bag(&placed, None, EmbeddingBagMode::Sum)?;
            assert_eq!(rows(bags)?, [10.0, 12.0, 12.0, 14.0], "{spec}");
            // every rank has its own ids, one of them none
            let own = [vec![5i64, 1, 2], vec![], vec![0]][world.rank()].clone();
            let expected: Vec<f64> = own.iter().flat_map(|&i| [2.0 * i as f64, 2.0 * i as f64 + 1.0]).collect();
            let count = own.len();
            let got = sharded.embedding_of_local(&Tensor::from_vec(own, (count, 1), &Device::Cpu)?)?;
            assert_eq!((got.dims(), numbers(&got)), ([count, 1, 2].as_slice(), expected), "{spec}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_custom_operator_replaces_the_built_in_one_inside_its_scope_only() {
    launch(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [0, 1])?, 3, DType::F32, &mesh)?;
        let value = |x: ShardedTensor| -> Result<f64> { Ok(numbers(&x.full_tensor()?)[0]) };
        let twice = with_sharded_op(
            "add",
            |inputs| inputs[0].full_like(10.0),
            || {
                let inner = with_sharded_op("add", |inputs| inputs[0].full_like(20.0), || value(x.add(&x).unwrap()));
                (inner, value(x.add(&x).unwrap()), value(call_sharded_op("add", &[&x]).unwrap()))
            },
        );
        assert_eq!((twice.0?, twice.1?, twice.2?, value(x.add(&x)?)?), (20.0, 10.0, 10.0, 2.0));
        let error = call_sharded_op("add", &[&x]).unwrap_err().to_string();
        assert!(error.contains("\"add\"") && error.contains("register"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_outside_the_mesh_hold_nothing_and_a_dry_run_knows_the_shapes() {
    launch(3, |world| {
        let mesh = world.device_mesh(Mesh::from_ranks([("some", 2)], vec![2, 0])?)?;
        let x = ShardedTensor::rand(ChunkShardingSpec::over_ranks(0, [0, 2])?, 5, DType::F32, &mesh)?;
        let y = x.reshard(ChunkShardingSpec::over_ranks(0, [2, 0])?)?;
        assert_eq!(y.local_shards().len(), [1, 0, 1][world.rank()]);
        assert_eq!(y.full_tensor()?.dims(), [[5], [0], [5]][world.rank()]);
        Ok(())
    })
    .unwrap();
    let run = DryWorld::new(1000)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("all", 1000)])?;
            let x = ShardedTensor::rand(ChunkShardingSpec::over_ranks(0, 0..1000)?, (5000, 64), DType::F32, &mesh)?;
            x.reshard(ChunkShardingSpec::over_ranks(1, 0..1000)?)
        })
        .unwrap();
    assert_eq!(run.value.local_tensor().unwrap().dims(), [5000, 1]);
    assert!(run.records.iter().any(|r| r.call == "all_to_all" && r.bytes == 5 * 63 * 4), "{:?}", run.records);
    assert_eq!(run.peak_bytes, 5 * 64 * 4 + 5000 * 4);
}

#[test]
fn invalid_local_shards_are_the_same_error_on_all_ranks() {
    /// The local shards of rank 0 and rank 1 for a tensor of size `size`, and what the error contains.
    struct Bad(&'static str, [Vec<(usize, usize, DType)>; 2], [usize; 2], &'static [&'static str]);
    let f = DType::F32;
    let cases = [
        Bad("overlap", [vec![(0, 3, f)], vec![(2, 2, f)]], [4, 4], &["[3] at [0] on rank:0/cpu", "overlap"]),
        Bad("gap", [vec![(0, 1, f)], vec![(2, 2, f)]], [4, 4], &["3 elements in 2 shard(s)", "needed 4"]),
        Bad("outside", [vec![(0, 2, f)], vec![(2, 3, f)]], [4, 4], &["[3] at [2] on rank:1/cpu", "inside"]),
        Bad("type", [vec![(0, 2, f)], vec![(2, 2, DType::F64)]], [4, 4], &["\"f32\" on rank 0", "\"f64\" on rank 1"]),
        Bad(
            "types of a rank",
            [vec![(0, 1, f), (1, 1, DType::U8)], vec![(2, 2, f)]],
            [4, 4],
            &["rank 0", "f32 and u8"],
        ),
        Bad("size", [vec![(0, 2, f)], vec![(2, 2, f)]], [4, 5], &["[4] on rank 0", "[5] on rank 1"]),
        Bad("nothing", [vec![], vec![]], [4, 4], &["no shards on any rank"]),
    ];
    for Bad(name, brought, sizes, said) in cases {
        let error = same_error_on_all_ranks(2, move |world| {
            let mesh = world.mesh([("all", 2)])?;
            let shard = |&(offset, size, dtype): &(usize, usize, DType)| {
                TensorShard::from_tensor_and_offsets(&Tensor::zeros(size, dtype, &Device::Cpu)?, [offset], world.rank())
            };
            let mine = brought[world.rank()].iter().map(shard).collect::<Result<Vec<_>>>()?;
            ShardedTensor::init_from_local_shards(&mine, sizes[world.rank()], &mesh).map(drop)
        });
        assert!(said.iter().all(|part| error.contains(part)), "{name}: {error}");
    }
    let foreign = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let zeros = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
        let shard = TensorShard::from_tensor_and_offsets(&zeros, [0], 1)?;
        ShardedTensor::init_from_local_shards(&[shard], 2, &mesh).map(drop)
    });
    assert!(foreign.contains("rank 0") && foreign.contains("rank:1/cpu"), "{foreign}");
}

#[test]
fn ranks_with_different_arguments_get_one_error_that_names_both() {
    let spec = |rank: usize| ChunkShardingSpec::over_ranks(0, if rank == 2 { [2, 1, 0] } else { [0, 1, 2] }).unwrap();
    let table = || Tensor::zeros(4, DType::F32, &Device::Cpu);
    let specs = same_error_on_all_ranks(3, move |world| {
        shard_tensor(&table()?, spec(world.rank()), &world.mesh([3])?, Some(0)).map(drop)
    });
    assert!(specs.contains("sharding spec") && specs.contains("on rank 0") && specs.contains("on rank 2"), "{specs}");
    let sources = same_error_on_all_ranks(3, move |world| {
        shard_tensor(&table()?, spec(0), &world.mesh([3])?, Some(world.rank() / 2)).map(drop)
    });
    assert!(sources.contains("source rank") && sources.contains("Some(0) on rank 0, Some(1) on rank 2"), "{sources}");
    let resharded = same_error_on_all_ranks(3, move |world| {
        let x = shard_tensor(&table()?, spec(0), &world.mesh([3])?, Some(0))?;
        x.reshard(spec(world.rank())).map(drop)
    });
    assert!(resharded.contains("sharding spec") && resharded.contains("on rank 2"), "{resharded}");
    let gathered = same_error_on_all_ranks(3, move |world| {
        let x = shard_tensor(&table()?, spec(0), &world.mesh([3])?, Some(0))?;
        x.gather(world.rank() % 2).map(drop)
    });
    assert!(gathered.contains("destination of gather") && gathered.contains("1 on rank 1"), "{gathered}");
    // created without communication: the difference is detected at the first collective
    let drifted = same_error_on_all_ranks(3, move |world| {
        ShardedTensor::zeros(spec(world.rank()), 4, DType::F32, &world.mesh([3])?)?.full_tensor().map(drop)
    });
    assert!(drifted.contains("sharded tensor") && drifted.contains("on rank 2"), "{drifted}");
}

#[test]
fn invalid_specs_are_rejected_with_a_fix() {
    let mesh = |world: &World| world.mesh([("all", 2)]);
    let zeros =
        move |world: World, spec: AnyShardingSpec| ShardedTensor::zeros(spec, 4, DType::F32, &mesh(&world)?).map(drop);
    let cases: [(AnyShardingSpec, &str); 5] = [
        (ChunkShardingSpec::over_ranks(1, [0, 1]).unwrap().into(), "dimension 1"),
        (ChunkShardingSpec::over_ranks(0, [0, 7]).unwrap().into(), "rank:7/cpu"),
        (ChunkShardingSpec::new(0, ["cpu", "cpu"]).unwrap().into(), "rank:0/cpu"),
        (ChunkShardingSpec::new(0, ["trainer/cpu"]).unwrap().into(), "trainer/cpu"),
        (ChunkShardingSpec::new(0, ["rank:0/cuda:0"]).unwrap().into(), "cuda:0"),
    ];
    for (spec, said) in cases {
        let error = same_error_on_all_ranks(2, move |world| zeros(world, spec.clone()));
        assert!(error.contains(said) && error.contains("needed"), "{error}");
    }
    let no = |error: shardwise::Error| error.to_string();
    assert!(no(ChunkShardingSpec::new(0, [""; 0]).unwrap_err()).contains("no placements"));
    assert!(no(ShardMetadata::new([0], [1, 2], None).unwrap_err()).contains("1 offsets and 2 sizes"));
    let tensor = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    assert!(no(TensorShard::new(&tensor, shard(&[0], &[3], 0)).unwrap_err()).contains("sizes [3]"));
    let huge = shard(&[usize::MAX], &[2], 0);
    let metadata = ShardedTensorMetadata { size: vec![4], dtype: DType::F32, requires_grad: false, shards: vec![huge] };
    assert!(no(metadata.check_covering().unwrap_err()).contains("inside"));
}

#[test]
fn an_invalid_state_is_the_same_error_on_all_ranks() {
    let states = ThreadWorld::new(2)
        .unwrap()
        .run(|world| {
            let rows = ChunkShardingSpec::over_ranks(0, [0, 1])?;
            ShardedTensor::ones(rows, 4, DType::F32, &world.mesh([("all", 2)])?)?.state()
        })
        .unwrap();
    let load = |change: fn(&mut Vec<ShardedTensorState>, usize)| {
        let states = states.clone();
        same_error_on_all_ranks(2, move |world| {
            let mut mine = vec![states[world.rank()].clone()];
            change(&mut mine, world.rank());
            ShardedTensor::load_with_process_group(&world.mesh([("all", 2)])?, &mine, None).map(drop)
        })
    };
    let missing = load(|mine, rank| {
        if rank == 1 {
            mine.clear();
        }
    });
    assert!(missing.contains("nothing for shard [2] at [2]"), "{missing}");
    let short = load(|mine, rank| {
        if rank == 1 {
            mine[0].shards[0].1.pop();
        }
    });
    assert!(short.contains("rank 1") && short.contains("7 bytes"), "{short}");
    let beyond = load(|mine, rank| {
        if rank == 0 {
            mine[0].shards[0].0 = 9;
        }
    });
    assert!(beyond.contains("rank 0") && beyond.contains("shard 9 of 2"), "{beyond}");
    let overlapping = load(|mine, rank| {
        if rank == 0 {
            mine[0].metadata.shards[1].offsets[0] = 1;
        }
    });
    assert!(overlapping.contains("overlap"), "{overlapping}");
    let other = load(|mine, rank| {
        if rank == 1 {
            mine[0].metadata.dtype = DType::I32;
        }
    });
    assert!(other.contains("f32 [4]") && other.contains("i32 [4]"), "{other}");
    let none = load(|mine, _| mine.clear());
    assert!(none.contains("no states on any rank"), "{none}");
}
