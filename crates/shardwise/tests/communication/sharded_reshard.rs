//! Sharded tensors resharded from any spec to any other: exact, and every byte is sent at most once.
//!
//! `SHARDWISE_SPEC_CASES` sets the number of random pairs of specs (default 1000), `SHARDWISE_SEED` the first seed.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;
use shardwise::sharded::{
    AnyShardingSpec, ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensor,
    shard_tensor,
};
use shardwise::{OwnedBox, TensorBox};
use shardwise_test_suites::settings::env_or;

const DTYPES: [DType; 6] = [DType::F64, DType::F32, DType::BF16, DType::I64, DType::U32, DType::U8];

/// A tensor whose elements are all different, as far as the type can represent them.
fn whole(shape: &[usize], dtype: DType) -> Tensor {
    let count = shape.iter().product::<usize>() as i64;
    Tensor::arange(0i64, count, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

fn part(whole: &Tensor, shard: &ShardMetadata) -> Tensor {
    if shard.volume() == 0 {
        return Tensor::zeros(shard.sizes.as_slice(), whole.dtype(), &Device::Cpu).unwrap();
    }
    let view = |t: Tensor, dim: usize| t.narrow(dim, shard.offsets[dim], shard.sizes[dim]).unwrap();
    (0..whole.rank()).fold(whole.clone(), view)
}

fn same(a: &Tensor, b: &Tensor) -> bool {
    let numbers = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    a.dims() == b.dims() && a.dtype() == b.dtype() && numbers(a) == numbers(b)
}

/// A random spec for a tensor over some ranks, and the name of its kind.
fn spec(rng: &mut StdRng, shape: &[usize], ranks: usize) -> (&'static str, AnyShardingSpec) {
    let any_rank = |rng: &mut StdRng| rng.random_range(0..ranks);
    let chunks = |dim: usize, owners: Vec<usize>| ChunkShardingSpec::over_ranks(dim as isize, owners).unwrap().into();
    let listed = |mut shards: Vec<ShardMetadata>, rng: &mut StdRng| {
        shards.shuffle(rng);
        AnyShardingSpec::from(EnumerableShardingSpec::new(shards).unwrap())
    };
    let dim = rng.random_range(0..shape.len());
    match rng.random_range(0..6) {
        0 => {
            let mut owners: Vec<usize> = (0..ranks).collect();
            owners.shuffle(rng);
            ("permutation", chunks(dim, owners))
        }
        1 => {
            let turned = (0..ranks).map(|r| (r + 1) % ranks).collect();
            ("cycle", chunks(dim, turned))
        }
        2 => {
            let count = rng.random_range(1..9);
            let owners = (0..count).map(|_| any_rank(rng)).collect();
            ("chunks with repeated ranks", chunks(dim, owners))
        }
        3 => {
            let mut boxes = vec![TensorBox { offsets: vec![0; shape.len()], sizes: shape.to_vec() }];
            for (along, &n) in shape.iter().enumerate() {
                let mut cuts: Vec<usize> = (0..rng.random_range(0..3)).map(|_| rng.random_range(0..=n)).collect();
                cuts.extend([0, n]);
                cuts.sort_unstable();
                let pieces = |b: &TensorBox| -> Vec<TensorBox> {
                    let piece = |ends: &[usize]| {
                        let mut piece = b.clone();
                        (piece.offsets[along], piece.sizes[along]) = (ends[0], ends[1] - ends[0]);
                        piece
                    };
                    cuts.windows(2).map(piece).collect()
                };
                boxes = boxes.iter().flat_map(pieces).collect();
            }
            let shards = boxes.into_iter().map(|b| on(b, any_rank(rng))).collect();
            ("grid", listed(shards, rng))
        }
        4 => {
            let mut boxes = vec![TensorBox { offsets: vec![0; shape.len()], sizes: shape.to_vec() }];
            for _ in 0..rng.random_range(0..8) {
                let split = boxes.swap_remove(rng.random_range(0..boxes.len()));
                let along = rng.random_range(0..shape.len());
                let at = rng.random_range(0..=split.sizes[along]);
                let (mut low, mut high) = (split.clone(), split);
                low.sizes[along] = at;
                high.offsets[along] += at;
                high.sizes[along] -= at;
                boxes.extend([low, high]);
            }
            let shards = boxes.into_iter().map(|b| on(b, any_rank(rng))).collect();
            ("irregular boxes", listed(shards, rng))
        }
        _ => {
            let mesh = Mesh::new([ranks]).unwrap();
            let mut sizes: Vec<usize> = vec![0; ranks];
            (0..shape[dim]).for_each(|_| sizes[any_rank(rng)] += 1);
            let layout = Layout::new(&mesh, shape, [Placement::ragged(dim as isize, sizes)]).unwrap();
            ("ragged layout", AnyShardingSpec::from_layout(&layout).unwrap())
        }
    }
}

fn on(b: TensorBox, rank: usize) -> ShardMetadata {
    ShardMetadata::new(b.offsets, b.sizes, Some(RemoteDevice::cpu_of(rank))).unwrap()
}

/// Bytes that this rank sent in exchanges since the trace was cleared.
fn sent(mesh: &DeviceMesh) -> usize {
    let records = mesh.world().trace().records();
    records.iter().filter(|r| r.call == "all_to_all").map(|r| r.bytes).sum()
}

/// Elements of the shards of all ranks that their owners did not have before.
fn lacking(before: &ShardedTensor, after: &ShardedTensor) -> usize {
    let boxes = |x: &ShardedTensor, rank: usize| -> Vec<TensorBox> {
        x.metadata().shards_of(rank).map(ShardMetadata::as_box).collect()
    };
    let of_rank = |&rank: &usize| -> usize {
        let had = boxes(before, rank);
        let missing = |b: &TensorBox| {
            let kept: usize = had.iter().filter_map(|h| h.intersect(b)).map(|both| both.volume()).sum();
            b.volume() - kept
        };
        boxes(after, rank).iter().map(missing).sum()
    };
    before.device_mesh().ranks().iter().map(of_rank).sum()
}

#[test]
fn any_spec_to_any_other_is_exact_and_sends_every_byte_once() {
    let (cases, first) = (env_or("SHARDWISE_SPEC_CASES", 1000usize), env_or("SHARDWISE_SEED", 0usize) as u64);
    let mut kinds = std::collections::BTreeMap::<&str, usize>::new();
    for case in 0..cases {
        let seed = first * 1_000_003 + case as u64;
        let mut rng = StdRng::seed_from_u64(seed);
        let ranks = rng.random_range(1..7);
        let shape: Vec<usize> = (0..rng.random_range(1..4)).map(|_| rng.random_range(0..9)).collect();
        let dtype = DTYPES[rng.random_range(0..DTYPES.len())];
        let (kind, from) = spec(&mut rng, &shape, ranks);
        let (other_kind, to) = spec(&mut rng, &shape, ranks);
        let (source, dst) = (rng.random_range(0..ranks), rng.random_range(0..ranks));
        *kinds.entry(kind).or_default() += 1;
        let label = format!("seed {seed}: {shape:?} {dtype:?} on {ranks} ranks, {kind} {from} to {other_kind} {to}");
        let context = label.clone();
        let result = launch(ranks, move |world| {
            let mesh = world.mesh([("all", ranks)])?;
            let table = whole(&shape, dtype);
            let given = if world.rank() == source { table.clone() } else { table.zeros_like()? };
            world.trace().clear();
            let x = shard_tensor(&given, from.clone(), &mesh, Some(source))?;
            let scattered = sent(&mesh);
            let elsewhere: usize = (0..ranks).filter(|&r| r != source).map(|r| x.shard_size(r)).sum();
            let of_source = if world.rank() == source { elsewhere * dtype.size_in_bytes() } else { 0 };
            assert_eq!(scattered, of_source, "bytes of shard_tensor, {context}");
            for shard in x.local_shards() {
                assert!(same(&shard.tensor(), &part(&table, shard.metadata())), "sharded, {context}");
            }
            world.trace().clear();
            let y = x.reshard(to.clone())?;
            let moved = Tensor::new(&[sent(&mesh) as i64], &Device::Cpu)?;
            let total = world.all_reduce(&moved, ReduceOp::Sum)?.to_vec1::<i64>()?[0] as usize;
            assert_eq!(total, lacking(&x, &y) * dtype.size_in_bytes(), "bytes of reshard, {context}");
            for shard in y.local_shards() {
                assert!(same(&shard.tensor(), &part(&table, shard.metadata())), "resharded, {context}");
            }
            assert_eq!(y.metadata().shards, to.build_metadata(&shape, dtype)?.shards);
            for (tensor, name) in [(&x, "before"), (&y, "after")] {
                match tensor.gather(dst)? {
                    Some(all) => assert!(world.rank() == dst && same(&all, &table), "gathered {name}, {context}"),
                    None => assert_ne!(world.rank(), dst),
                }
            }
            assert!(same(&x.full_tensor()?, &table) && x.equal(&y)?, "equal, {context}");
            // to a distributed tensor on the same mesh and on one of fewer ranks, and back
            assert!(same(&y.to_dtensor()?.to_mesh(&mesh, [Replicate])?.full_tensor()?, &table), "dtensor, {context}");
            let back = ShardedTensor::from_dtensor(&y.to_dtensor_on(&mesh, [Shard(-1)])?)?;
            assert!(back.equal(&x)?, "back, {context}");
            Ok(())
        });
        assert!(result.is_ok(), "{label}: {}", result.unwrap_err());
    }
    println!("{cases} pairs of specs from seed {first}: {kinds:?}");
    assert!(cases < 100 || kinds.len() == 6);
}

#[test]
fn shards_that_stay_keep_their_memory_and_nothing_is_sent() {
    launch(3, |world| {
        let mesh = world.mesh([("all", 3)])?;
        let x = ShardedTensor::rand(ChunkShardingSpec::over_ranks(0, [0, 1, 2])?, (9, 4), DType::F32, &mesh)?;
        world.trace().clear();
        // the same rows as listed shards: every rank holds what it needs
        let row = |i: usize| ShardMetadata::new([i, 0], [1, 4], Some(RemoteDevice::cpu_of(i / 3)));
        let rows = EnumerableShardingSpec::new((0..9).map(row).collect::<Result<Vec<_>>>()?)?;
        let y = x.reshard(rows)?;
        assert_eq!(y.local_shards().len(), 3);
        assert!(world.trace().records().iter().all(|r| r.call == "all_gather" && r.bytes <= 32), "only the agreement");
        let again = y.reshard(x.sharding_spec().clone())?;
        assert!(again.equal(&x)?);
        let kept = x.reshard(x.sharding_spec().clone())?;
        assert!(kept.local_shards()[0].shares_memory(&x.local_shards()[0]));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_spec_becomes_a_layout_and_back_whenever_it_is_regular() {
    let mut regular = 0;
    for seed in 0..400 {
        let mut rng = StdRng::seed_from_u64(seed);
        let shape: Vec<usize> = (0..rng.random_range(1..4)).map(|_| rng.random_range(1..9)).collect();
        let (kind, spec) = spec(&mut rng, &shape, 4);
        let metadata = spec.build_metadata(&shape, DType::F32).unwrap();
        let Some(layout) = spec.layout(&shape).unwrap() else {
            assert!(!matches!(kind, "permutation" | "cycle" | "ragged layout"), "seed {seed}: {kind} {spec}");
            continue;
        };
        regular += 1;
        // the layout gives every rank exactly the boxes of the spec
        let boxes = |rank: usize| layout.boxes_of(rank).into_iter().map(|b: OwnedBox| b.global).collect::<Vec<_>>();
        for rank in 0..4 {
            let held: Vec<TensorBox> =
                metadata.shards_of(rank).map(ShardMetadata::as_box).filter(|b| b.volume() > 0).collect();
            assert_eq!(boxes(rank), held, "seed {seed}: {kind} {spec}");
        }
        let back = AnyShardingSpec::from_layout(&layout).unwrap().build_metadata(&shape, DType::F32).unwrap();
        let sorted = |m: &shardwise::sharded::ShardedTensorMetadata| {
            let mut shards: Vec<String> = m.shards.iter().filter(|s| s.volume() > 0).map(ToString::to_string).collect();
            shards.sort();
            shards
        };
        assert_eq!(sorted(&back), sorted(&metadata), "seed {seed}: {kind} {spec}");
    }
    println!("{regular} of 400 specs are regular");
    assert!(regular > 100);
}

#[test]
fn a_distributed_tensor_of_any_layout_becomes_shards_and_back_without_a_copy_where_it_is_regular() {
    launch(6, |world| {
        let mesh = world.mesh([("a", 2), ("b", 3)])?;
        let table = whole(&[7, 5], DType::F64);
        for text in ["S(0),S(1)", "S(1),S(0)", "S(0),S(0)", "R,S(0)", "S(1),R", "R,R", "SS(0,3),S(0)", "S(0;1,6),S(1)"]
        {
            let placements = Placement::parse_list(text)?;
            let x = DTensor::distribute_tensor(&table, &mesh, placements.clone(), None)?;
            world.trace().clear();
            let shards = ShardedTensor::from_dtensor(&x)?;
            assert!(world.trace().records().is_empty(), "{text}");
            assert!(same(&shards.full_tensor()?, &table), "{text}");
            let is_regular = !text.contains('R') && !text.contains("SS");
            world.trace().clear();
            let back = shards.to_dtensor()?;
            if is_regular {
                assert!(world.trace().records().is_empty(), "{text}: {:?}", world.trace().records());
                assert_eq!(back.layout(), x.layout(), "{text}");
                let is_empty = x.local_elem_count() == 0;
                assert!(is_empty || back.shares_memory(&x), "{text}");
            }
            assert!(same(&back.to_mesh(&mesh, [Replicate, Replicate])?.full_tensor()?, &table), "{text}");
        }
        let pending = DTensor::distribute_tensor(&table, &mesh, [Partial(ReduceOp::Sum), Shard(0)], None)?;
        assert!(same(&ShardedTensor::from_dtensor(&pending)?.full_tensor()?, &table));
        Ok(())
    })
    .unwrap();
}
