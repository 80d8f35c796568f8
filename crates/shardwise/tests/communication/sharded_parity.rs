//! What PyTorch's tests of `ShardedTensor`, sharding specs and plans require in detail: sizes that do not divide, shards on some
//! of the ranks, local parts and not only the whole, and answers that are the same on all ranks.

use candle_core::{D, Device, Tensor};
use shardwise::nn::init::Init;
use shardwise::nn::{Linear, Module};
use shardwise::ops::EmbeddingBagMode;
use shardwise::plan::{ShardingPlan, ShardingPlanner, VocabularyParallel, shard_module, shard_parameter};
use shardwise::prelude::*;
use shardwise::sharded::{
    AnyShardingSpec, ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardMetadata, ShardedTensor,
    ShardedTensorMetadata, TensorShard, shard_tensor,
};
use shardwise_test_suites::errors::same_error_on_all_ranks;

fn counting(shape: &[usize]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i| i as f64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn part(offsets: &[usize], sizes: &[usize], rank: usize) -> ShardMetadata {
    ShardMetadata::new(offsets, sizes, Some(RemoteDevice::cpu_of(rank))).unwrap()
}

/// The box of a tensor that a shard describes.
fn cell(whole: &Tensor, shard: &ShardMetadata) -> Tensor {
    let view = |t: Tensor, dim: usize| t.narrow(dim, shard.offsets[dim], shard.sizes[dim]).unwrap();
    (0..whole.rank()).fold(whole.clone(), view)
}

#[test]
fn metadata_of_every_type_survives_serialization() {
    let types = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::U32,
        DType::U8,
    ];
    for (dtype, requires_grad) in types.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
        let shards = (0..4).map(|rank| part(&[rank / 2 * 5, rank % 2 * 5], &[5, 5], rank)).collect();
        let metadata = ShardedTensorMetadata { size: vec![10, 10], dtype, requires_grad, shards };
        let text = serde_json::to_string(&metadata).unwrap();
        assert_eq!(serde_json::from_str::<ShardedTensorMetadata>(&text).unwrap(), metadata, "{text}");
    }
}

#[test]
fn a_parameter_is_sharded_in_place() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let layer = Linear::new(&Builder::new(&mesh), 12, 12)?;
        let before = layer.weight.get().full_tensor()?;
        shard_parameter(&layer, &mesh, "weight", ChunkShardingSpec::over_ranks(0, 0..4)?)?;
        let local = layer.weight.get().to_local()?;
        assert_eq!(local.dims(), [3, 12]);
        assert_eq!(numbers(&local), numbers(&before.narrow(0, 3 * world.rank(), 3)?));
        assert_eq!(layer.bias.as_ref().unwrap().get().placements(), [Replicate]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn local_shards_have_the_rows_and_values_that_they_were_filled_with() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let spec = |dim| ChunkShardingSpec::over_ranks(dim, 0..4);
        let rows = [3, 3, 3, 1][world.rank()];
        for dim in [0, -2] {
            for (x, value) in [
                (ShardedTensor::ones(spec(dim)?, (10, 20), DType::F32, &mesh)?, 1.0),
                (ShardedTensor::zeros(spec(dim)?, (10, 20), DType::F64, &mesh)?, 0.0),
            ] {
                assert_eq!(x.local_shards().len(), 1);
                let shard = x.local_shards()[0].metadata();
                assert_eq!(
                    (shard.offsets.as_slice(), shard.sizes.as_slice()),
                    (&[3 * world.rank(), 0][..], &[rows, 20][..])
                );
                assert_eq!(numbers(&x.local_tensor()?), vec![value; rows * 20]);
            }
        }
        for dim in [1, -1] {
            let x = ShardedTensor::ones(spec(dim)?, (10, 32), DType::F32, &mesh)?;
            assert_eq!(x.local_shards()[0].metadata().offsets, [0, 8 * world.rank()]);
            assert_eq!(x.local_tensor()?.dims(), [10, 8]);
        }
        let x = ShardedTensor::full(spec(0)?, 2.5, (8, 8), DType::F64, &mesh)?;
        for (like, value) in
            [(x.zeros_like()?, 0.0), (x.ones_like()?, 1.0), (x.empty_like()?, 0.0), (x.full_like(8.8)?, 8.8)]
        {
            assert_eq!((like.metadata(), like.sharding_spec()), (x.metadata(), x.sharding_spec()));
            assert_eq!(numbers(&like.local_tensor()?), [value; 16]);
        }
        assert!(x.cpu()?.local_shards()[0].shares_memory(&x.local_shards()[0]), "nothing to move");
        assert!(x.to_dtype(DType::F64)?.local_shards()[0].shares_memory(&x.local_shards()[0]), "nothing to convert");
        for init in [Init::Uniform(10.0, 20.0), Init::Normal(10.0, 5.0)] {
            let mut x = ShardedTensor::empty(spec(0)?, (8, 2), DType::F64, &mesh)?;
            mesh.manual_seed(9);
            x.init(init)?;
            mesh.manual_seed(9);
            let whole = init.create(&[8, 2], DType::F64, &mesh, [Replicate])?.to_local()?;
            assert_eq!(numbers(&x.local_tensor()?), numbers(&whole.narrow(0, 2 * world.rank(), 2)?));
            assert!(init != Init::Uniform(10.0, 20.0) || numbers(&whole).iter().all(|v| (10.0..20.0).contains(v)));
        }
        Ok(())
    })
    .unwrap();
}

/// Shards on ranks 2 and 3 of 4, on two of the ranks of a mesh of 1, 2 and 3, and boxes on ranks 0 and 1: every rank of the mesh
/// knows the owners and reads their elements.
#[test]
fn shards_on_some_ranks_are_read_from_all() {
    launch(4, |world| {
        let all = world.mesh([("all", 4)])?;
        let some = world.device_mesh(Mesh::from_ranks([("some", 3)], vec![1, 2, 3])?)?;
        let boxes = EnumerableShardingSpec::new([part(&[0, 0], &[5, 20], 0), part(&[5, 0], &[5, 20], 1)])?;
        let cases: [(&DeviceMesh, AnyShardingSpec, [usize; 2]); 3] = [
            (&all, ChunkShardingSpec::over_ranks(0, [2, 3])?.into(), [2, 3]),
            (&some, ChunkShardingSpec::over_ranks(0, [3, 1])?.into(), [3, 1]),
            (&all, boxes.into(), [0, 1]),
        ];
        for (mesh, spec, owners) in cases {
            let whole = counting(&[10, 20]);
            let x = shard_tensor(&whole, spec, mesh, None)?;
            let me = world.rank();
            assert_eq!(x.local_shards().len(), usize::from(owners.contains(&me)));
            if !mesh.contains(me) {
                continue;
            }
            let remote = x.remote_shards()?;
            for (i, owner) in owners.into_iter().enumerate().filter(|(_, owner)| *owner != me) {
                let shards = &remote[&owner];
                assert_eq!((shards.len(), shards[0].metadata()), (1, &part(&[5 * i, 0], &[5, 20], owner)));
                assert_eq!(numbers(&shards[0].fetch()?), numbers(&whole.narrow(0, 5 * i, 5)?));
            }
            // Nobody leaves while another rank reads.
            x.process_group()?.barrier()?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn dimensions_and_ranks_that_do_not_exist_are_refused() {
    for dim in [2, 3, 4, -3, -4, -5] {
        let error = same_error_on_all_ranks(4, move |world| {
            let spec = ChunkShardingSpec::over_ranks(dim, 0..4)?;
            ShardedTensor::zeros(spec, (10, 20), DType::F32, &world.mesh([("all", 4)])?).map(drop)
        });
        assert!(error.contains(&format!("dimension {dim}")), "{error}");
    }
    let error = same_error_on_all_ranks(4, |world| {
        let spec = ChunkShardingSpec::over_ranks(0, [0, 1, 2, 5])?;
        ShardedTensor::zeros(spec, (10, 20), DType::F32, &world.mesh([("all", 4)])?).map(drop)
    });
    assert!(error.contains("rank:5/cpu"), "{error}");
}

#[test]
fn local_tensors_of_shuffled_chunks_make_up_the_whole() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        for (shape, ranks) in [
            (vec![20, 10], [1, 0, 3, 2]),
            (vec![21, 11], [3, 2, 1, 0]),
            (vec![23, 16], [2, 0, 1, 3]),
            (vec![44, 16, 8], [0, 3, 1, 2]),
        ] {
            for dim in [0, 1] {
                let spec = ChunkShardingSpec::over_ranks(dim, ranks)?;
                let (whole, metadata) = (counting(&shape), spec.build_metadata(&shape, DType::F64)?);
                let mine = cell(&whole, metadata.shards_of(world.rank()).next().expect("one per rank"));
                let x = ShardedTensor::init_from_local_tensor(&mine, spec.clone(), shape.as_slice(), &mesh)?;
                assert_eq!((x.metadata(), x.sharding_spec()), (&metadata, &spec.clone().into()));
                assert_eq!(numbers(&x.full_tensor()?), numbers(&whole), "{shape:?} on dimension {dim}");
                // A tensor with other strides counts by its elements.
                let turned = mine.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
                assert!(!turned.is_contiguous() || turned.dims().contains(&1));
                assert!(ShardedTensor::init_from_local_tensor(&turned, spec, shape.as_slice(), &mesh)?.equal(&x)?);
            }
        }
        // Boxes that do not cover the tensor, and a tensor that is not this rank's part.
        let half =
            EnumerableShardingSpec::new((0..4).map(|rank| part(&[3 * rank, 0], &[3, 12], rank)).collect::<Vec<_>>())?;
        let error = ShardedTensor::init_from_local_tensor(&counting(&[3, 12]), half, (24, 12), &mesh).err().unwrap();
        assert!(error.to_string().contains("144 elements in 4 shard(s)"), "{error}");
        let rows = ChunkShardingSpec::over_ranks(0, 0..4)?;
        let error = ShardedTensor::init_from_local_tensor(&counting(&[5, 12]), rows, (24, 12), &mesh).err().unwrap();
        assert!(error.to_string().contains("[5, 12]"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn shards_and_properties_that_contradict_the_whole_are_refused_on_all_ranks() {
    for (grid, said) in [(true, "inside"), (false, "overlap")] {
        let error = same_error_on_all_ranks(4, move |world| {
            let (mesh, me) = (world.mesh([("all", 4)])?, world.rank());
            let offsets = if grid { [me / 2 * 5, me % 2 * 5] } else { [0, 0] };
            let mine = TensorShard::from_tensor_and_offsets(&counting(&[5, 5]), offsets, me)?;
            ShardedTensor::init_from_local_shards(&[mine], (0, 0), &mesh).map(drop)
        });
        assert!(error.contains("[5, 5]") && error.contains(said), "{error}");
    }
    // Overlap and gap of boxes in two dimensions: rank 0 brings 6 x 6 or 4 x 4 for its quarter.
    for (size, said) in [(6, "overlap"), (4, "91 elements")] {
        let error = same_error_on_all_ranks(4, move |world| {
            let (mesh, me) = (world.mesh([("all", 4)])?, world.rank());
            let size = if me == 0 { size } else { 5 };
            let mine = TensorShard::from_tensor_and_offsets(&counting(&[size, size]), [me / 2 * 5, me % 2 * 5], me)?;
            ShardedTensor::init_from_local_shards(&[mine], (10, 10), &mesh).map(drop)
        });
        assert!(error.contains(said), "{error}");
    }
    let error = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, 0..2)?, 4, DType::F32, &mesh)?;
        x.with_requires_grad(world.rank() == 1).full_tensor().map(drop)
    });
    assert!(error.contains("requires_grad") && error.contains("on rank 1"), "{error}");
}

#[test]
fn comparisons_have_one_answer_on_all_ranks() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let spec = || ChunkShardingSpec::over_ranks(0, 0..4);
        let ones = |shape: (usize, usize), dtype| ShardedTensor::ones(spec()?, shape, dtype, &mesh);
        let x = ones((10, 10), DType::F32)?;
        let narrow = ones((10, 5), DType::F32)?;
        assert!(!x.equal(&narrow)? && !x.allclose(&narrow, 1.0, 1.0)?);
        assert!(!x.equal(&ones((10, 10), DType::F64)?)? && x.allclose(&ones((10, 10), DType::F64)?, 0.0, 0.0)?);
        assert!(!x.equal(&x.zeros_like()?)?);
        // One rank has another element: all ranks say so.
        let shards: Vec<TensorShard> = x
            .local_shards()
            .iter()
            .map(|shard| {
                let change = if world.rank() == 2 { 0.5 } else { 0.0 };
                TensorShard::new(&(shard.tensor() + change)?, shard.metadata().clone())
            })
            .collect::<Result<_>>()?;
        let y = ShardedTensor::init_from_local_shards(&shards, (10, 10), &mesh)?;
        assert!(!x.equal(&y)? && !x.allclose(&y, 0.0, 0.4)? && x.allclose(&y, 0.0, 0.5)?);
        // Specs and gradients do not count.
        let columns = x.reshard(ChunkShardingSpec::over_ranks(1, [3, 1])?)?.with_requires_grad(true);
        assert!(x.equal(&columns)? && columns.equal(&x)?);
        let draw = |seed: u64| {
            mesh.manual_seed(seed);
            ShardedTensor::rand(spec()?, (10, 10), DType::F64, &mesh)
        };
        assert!(draw(1)?.equal(&draw(1)?)? && !draw(1)?.equal(&draw(2)?)? && draw(1)?.allclose(&draw(2)?, 0.0, 1.0)?);
        Ok(())
    })
    .unwrap();
}

/// Tables whose rows and columns do not divide, ids of one to five dimensions that differ between ranks, and bags of all modes.
#[test]
fn lookups_in_uneven_tables_equal_those_in_the_whole_one() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        for (rows, columns) in [(17, 12), (21, 13), (64, 11)] {
            let table = counting(&[rows, columns]);
            for dim in [0, 1] {
                let x = shard_tensor(&table, ChunkShardingSpec::over_ranks(dim, [3, 0, 2, 1])?, &mesh, None)?;
                for shape in [vec![5], vec![6, 4], vec![3, 2, 2], vec![2, 1, 3, 2], vec![1, 2, 1, 2, 3]] {
                    let count: usize = shape.iter().product();
                    let ids: Vec<i64> = (0..count).map(|i| ((i * 5 + 3 * world.rank()) % rows) as i64).collect();
                    let ids = Tensor::from_vec(ids, shape.as_slice(), &Device::Cpu)?;
                    let found = x.embedding_of_local(&ids)?;
                    let expected = table.index_select(&ids.flatten_all()?, 0)?;
                    assert_eq!(found.dims(), [shape.as_slice(), &[columns]].concat());
                    assert_eq!(numbers(&found), numbers(&expected), "{rows} x {columns} on {dim}, {shape:?}");
                }
                let ids: Vec<i64> = (0..12).map(|i| (i * 7 % rows) as i64).collect();
                let ids = Tensor::from_vec(ids, 12, &Device::Cpu)?;
                let placed = |t: &Tensor| DTensor::replicate(t, x.to_dtensor()?.device_mesh());
                for (offsets, modes) in [(vec![0, 4, 9], true), (vec![0, 6], true), (vec![0, 3, 6, 9], false)] {
                    for mode in [EmbeddingBagMode::Sum, EmbeddingBagMode::Mean, EmbeddingBagMode::Max] {
                        let mut expected = Vec::new();
                        for (i, &start) in offsets.iter().enumerate() {
                            let end = offsets.get(i + 1).copied().unwrap_or(12);
                            let bag = table.index_select(&ids.narrow(0, start, end - start)?, 0)?;
                            expected.extend(numbers(&match mode {
                                EmbeddingBagMode::Sum => bag.sum(0)?,
                                EmbeddingBagMode::Mean => bag.mean(0)?,
                                _ => bag.max(0)?,
                            }));
                        }
                        // Bags of one length are also the rows of a matrix of ids.
                        let found = match modes {
                            true => x.embedding_bag(&placed(&ids)?, Some(&offsets), mode)?,
                            false => x.embedding_bag(&placed(&ids.reshape((4, 3))?)?, None, mode)?,
                        };
                        let found = numbers(&found.to_mesh(&mesh, [Replicate])?.full_tensor()?);
                        let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-12 * b.abs().max(1.0));
                        assert!(near && found.len() == expected.len(), "{offsets:?} {mode:?}: {found:?} {expected:?}");
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn quotients_numbers_and_partial_tensors_give_the_unsharded_result() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let (a, b) = ((counting(&[12, 3]) + 1.0)?, counting(&[12, 3]).affine(0.25, 2.0)?);
        let x = shard_tensor(&a, ChunkShardingSpec::over_ranks(0, [1, 3, 0, 2])?, &mesh, None)?;
        let y = shard_tensor(&b, ChunkShardingSpec::over_ranks(0, [1, 3, 0, 2])?, &mesh, None)?;
        assert_eq!(numbers(&x.div(&y)?.full_tensor()?), numbers(&(&a / &b)?));
        for number in [3.0, 1.8] {
            let all = |f: &dyn Fn(f64) -> f64| numbers(&a).into_iter().map(f).collect::<Vec<_>>();
            let apply = |f: fn(&DTensor, f64) -> Result<DTensor>| -> Result<Vec<f64>> {
                Ok(numbers(&ShardedTensor::apply("number", &[&x], |x| f(&x[0], number))?.full_tensor()?))
            };
            assert_eq!(apply(|x, n| x + n)?, all(&|v| v + number));
            assert_eq!(apply(|x, n| x - n)?, all(&|v| v - number));
            assert_eq!(apply(|x, n| x.rsub_scalar(n))?, all(&|v| number - v));
            assert_eq!(apply(|x, n| x * n)?, all(&|v| v * number));
            assert_eq!(apply(|x, n| x.div_scalar(n))?, all(&|v| v / number));
        }
        // Partial sums and maxima become shards in any order and of any size; transposed and concatenated they are the whole.
        for (shape, op) in [([13, 21], ReduceOp::Sum), ([12, 22], ReduceOp::Max), ([17, 21], ReduceOp::Sum)] {
            let term = (counting(&shape) + world.rank() as f64)?;
            let whole = match op {
                ReduceOp::Sum => counting(&shape).affine(4.0, 6.0)?,
                _ => (counting(&shape) + 3.0)?,
            };
            let partial = DTensor::from_local(&term, &mesh, [Partial(op)])?;
            let boxes = [part(&[0, 0], &[shape[0], 8], 2), part(&[0, 8], &[shape[0], shape[1] - 8], 0)];
            for spec in [
                AnyShardingSpec::from(ChunkShardingSpec::over_ranks(0, [2, 0, 3, 1])?),
                ChunkShardingSpec::over_ranks(1, [3, 1, 0, 2])?.into(),
                EnumerableShardingSpec::new(boxes)?.into(),
            ] {
                let found = ShardedTensor::from_dtensor(&partial)?.reshard(spec)?;
                for shard in found.local_shards() {
                    assert_eq!(numbers(&shard.tensor()), numbers(&cell(&whole, shard.metadata())));
                }
            }
            assert_eq!(numbers(&partial.transpose(0, 1)?.full_tensor()?), numbers(&whole.t()?));
            // The other reduction of the same terms next to it.
            let other = if op == ReduceOp::Sum { ReduceOp::Max } else { ReduceOp::Sum };
            let beside = DTensor::from_local(&term, &mesh, [Partial(other)])?;
            for dim in [0, 1] {
                let both = DTensor::cat(&[&partial, &beside], dim)?.full_tensor()?;
                let expected = Tensor::cat(&[whole.clone(), beside.full_tensor()?], dim as usize)?;
                assert_eq!(numbers(&both), numbers(&expected), "{shape:?} {op:?} on {dim}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn chunks_have_the_sizes_of_the_definition_and_are_recognized() {
    // (size, ranks): rows of the chunks.
    for (size, ranks, expected) in [
        (11, 4, vec![3, 3, 3, 2]),
        (12, 4, vec![3, 3, 3, 3]),
        (13, 4, vec![4, 4, 4, 1]),
        (5, 4, vec![2, 2, 1, 0]),
        (11, 1, vec![11]),
        (11, 11, vec![1; 11]),
    ] {
        let spec = ChunkShardingSpec::over_ranks(0, 0..ranks).unwrap();
        let metadata = spec.build_metadata(&[size, 2], DType::F32).unwrap();
        assert_eq!(
            metadata.shards.iter().map(|shard| shard.sizes[0]).collect::<Vec<_>>(),
            expected,
            "{size} over {ranks}"
        );
    }
    // Where the rows of ranks 1 and 3 begin, and how many they are.
    for (order, one, three) in [([0, 1, 2, 3], (6, 6), (18, 3)), ([3, 2, 1, 0], (12, 6), (0, 6))] {
        let spec = ChunkShardingSpec::over_ranks(0, order).unwrap();
        let metadata = spec.build_metadata(&[21, 5], DType::F32).unwrap();
        let rows = |rank: usize| metadata.shards_of(rank).map(|s| (s.offsets[0], s.sizes[0])).next().unwrap();
        assert_eq!((rows(1), rows(3)), (one, three));
    }
    let listed = [
        vec![part(&[0, 0], &[5, 5], 0), part(&[5, 0], &[10, 5], 1)],
        vec![part(&[0], &[16], 0), part(&[16], &[9], 0)],
        (0..4).map(|rank| part(&[rank / 2 * 3, rank % 2 * 3], &[3, 3], rank)).collect(),
    ];
    for shards in listed {
        let spec = AnyShardingSpec::infer(&shards).unwrap();
        assert_eq!(spec.downcast_ref::<EnumerableShardingSpec>().expect("listed").shards(), shards);
    }
    for shape in [vec![4, 16], vec![10, 6, 20], vec![50, 4, 18, 15], vec![50, 4, 18, 15, 77]] {
        for dim in 0..shape.len() as isize {
            let spec = ChunkShardingSpec::over_ranks(dim, [2, 0, 3, 1]).unwrap();
            let shards = spec.build_metadata(&shape, DType::F32).unwrap().shards;
            let found = AnyShardingSpec::infer(&shards).unwrap();
            let found = found.downcast_ref::<ChunkShardingSpec>().unwrap_or_else(|| panic!("{shape:?} on {dim}"));
            assert_eq!((found.dim(), found.placements()), (dim, spec.placements()), "{shape:?}");
        }
    }
}

#[derive(Module)]
struct Two {
    fc1: Linear,
    fc2: Linear,
}

/// A planner of the program: every parameter on dimension 0.
struct Rows;

impl ShardingPlanner for Rows {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, _: &DeviceMesh) -> Result<ShardingPlan> {
        let names = module.named_parameters().into_iter().map(|(name, _)| name);
        Ok(names.fold(plan, |plan, name| plan.param(&name, [("all", Shard(0))])))
    }
}

#[test]
fn a_planner_of_the_program_shards_every_parameter_under_its_own_name() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let builder = Builder::new(&mesh);
        let model =
            Two { fc1: Linear::new(&builder.child("fc1"), 6, 11)?, fc2: Linear::new(&builder.child("fc2"), 11, 9)? };
        let before: Vec<Tensor> =
            model.named_parameters().iter().map(|(_, p)| p.get().full_tensor()).collect::<Result<_>>()?;
        shard_module(&model, &mesh, &Rows.plan(&model, &mesh)?)?;
        let names: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
        for ((name, param), whole) in model.named_parameters().into_iter().zip(&before) {
            assert_eq!(param.get().placements(), [Shard(0)], "{name}");
            let (rows, size) = (whole.dims()[0].div_ceil(4), whole.dims()[0]);
            let start = (rows * world.rank()).min(size);
            let expected = whole.narrow(0, start, rows.min(size - start))?;
            assert_eq!(numbers(&param.get().to_local()?), numbers(&expected), "{name}");
        }
        // The whole model at the empty path cannot be replaced: it has no hooks.
        let plan = ShardingPlan::new().sharder("", VocabularyParallel::new("all"));
        let error = shard_module(&model, &mesh, &plan).unwrap_err().to_string();
        assert!(error.contains("Two"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn operands_that_no_linear_layer_takes_are_refused_with_the_reason() {
    type Call = fn(&DeviceMesh) -> Result<DTensor>;
    fn ones(mesh: &DeviceMesh, shape: &[usize]) -> Result<DTensor> {
        DTensor::ones(shape.to_vec(), DType::F32, mesh, [Replicate])
    }
    let calls: [(Call, &str); 4] = [
        (|mesh| ones(mesh, &[])?.linear(&ones(mesh, &[7, 5])?, None), "[]"),
        (|mesh| ones(mesh, &[3, 5])?.linear(&ones(mesh, &[2, 7, 5])?, None), "[2, 7, 5]"),
        (|mesh| ones(mesh, &[3, 5])?.linear(&ones(mesh, &[7, 5])?, Some(&ones(mesh, &[2, 7])?)), "[2, 7]"),
        (|mesh| ones(mesh, &[3, 13])?.linear(&ones(mesh, &[5, 7])?, None), "13"),
    ];
    for (call, said) in calls {
        let error = same_error_on_all_ranks(2, move |world| call(&world.mesh([("tp", 2)])?).map(drop));
        assert!(error.contains(said), "{said}: {error}");
    }
    // What they would be, to be sure that the rest fits.
    launch(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let y = ones(&mesh, &[3, 5])?.linear(&ones(&mesh, &[7, 5])?, Some(&ones(&mesh, &[7])?))?;
        assert_eq!(y.full_tensor()?.sum(D::Minus1)?.to_vec1::<f32>()?, [42.0; 3]);
        Ok(())
    })
    .unwrap();
}

/// Nothing keeps a tensor: what was dropped is free. Local parts are dense, however they came about.
#[test]
fn dropped_tensors_are_freed_and_local_parts_are_dense() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let before = world.memory().current();
        let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [2, 0, 3, 1])?, (10, 22, 5), DType::F32, &mesh)?;
        assert!(world.memory().current() > before);
        let turned = ShardedTensor::apply("transpose", &[&x], |x| x[0].transpose(0, 1))?;
        assert_eq!(turned.shape(), [22, 10, 5]);
        for tensor in [&x, &turned, &turned.reshard(ChunkShardingSpec::over_ranks(2, 0..4)?)?] {
            assert!(tensor.local_shards().iter().all(|shard| shard.tensor().is_contiguous()));
        }
        let clone = x.clone();
        drop((x, turned));
        assert!(world.memory().current() > before, "a clone holds the elements");
        drop(clone);
        assert_eq!(world.memory().current(), before);
        Ok(())
    })
    .unwrap();
}
