//! Scenarios of sharded tensors that PyTorch's developers test: unusual inputs, sub-groups, operators through `apply`.

use candle_core::{D, Device, Tensor};
use shardwise::nn::{Builder, EmbeddingBag, Forward, Module};
use shardwise::ops::{EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions};
use shardwise::prelude::*;
use shardwise::sharded::{
    AnyShardingSpec, ChunkShardingSpec, EnumerableShardingSpec, RemoteDevice, ShardHolder, ShardMetadata,
    ShardedTensor, ShardedTensorMetadata, TensorShard, shard_tensor,
};
use shardwise_test_suites::errors::same_error_on_all_ranks;

fn counting(shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f64> = (0..count).map(|i| ((i * 7) % 31) as f64 - 9.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn near(a: &Tensor, b: &Tensor) -> bool {
    a.dims() == b.dims() && numbers(a).iter().zip(numbers(b)).all(|(a, b)| (a - b).abs() <= 1e-12 * (1.0 + b.abs()))
}

fn part(offsets: &[usize], sizes: &[usize], rank: usize) -> ShardMetadata {
    ShardMetadata::new(offsets, sizes, Some(RemoteDevice::cpu_of(rank))).unwrap()
}

#[test]
fn a_transposed_tensor_is_sharded_with_the_right_values() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let whole = counting(&[4, 3]).t()?;
        for dim in [0, 1] {
            for source in [None, Some(0), Some(2)] {
                let x = shard_tensor(&whole, ChunkShardingSpec::over_ranks(dim, [2, 0, 3, 1])?, &mesh, source)?;
                assert_eq!(numbers(&x.full_tensor()?), numbers(&whole));
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn filled_and_random_tensors_have_type_and_spec() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let spec = || ChunkShardingSpec::over_ranks(0, 0..4);
        let x = ShardedTensor::full(spec()?, 1234.0, (10, 20), DType::I32, &mesh)?;
        let rows = [3, 3, 3, 1][world.rank()];
        assert_eq!(x.local_tensor()?.to_vec2::<i32>()?, vec![vec![1234; 20]; rows]);
        let x = ShardedTensor::zeros(spec()?, (8, 8), DType::F64, &mesh)?;
        for y in [x.rand_like()?, x.randn_like()?] {
            assert_eq!((y.shape(), y.dtype(), y.metadata()), (x.shape(), x.dtype(), x.metadata()));
            let values = numbers(&y.full_tensor()?);
            assert!(values.iter().any(|&v| v != values[0]), "{values:?}");
        }
        assert!(numbers(&x.rand_like()?.full_tensor()?).iter().all(|v| (0.0..1.0).contains(v)));
        Ok(())
    })
    .unwrap();
}

#[test]
fn uneven_chunks_are_gathered_on_a_chosen_rank() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let whole = counting(&[11, 4]);
        let x = shard_tensor(&whole, ChunkShardingSpec::over_ranks(0, [0, 0, 1, 1, 2])?, &mesh, None)?;
        assert_eq!(x.local_shards().len(), [2, 2, 1, 0][world.rank()]);
        let gathered = x.gather(1)?;
        assert_eq!(gathered.as_ref().map(numbers), (world.rank() == 1).then(|| numbers(&whole)));
        Ok(())
    })
    .unwrap();
}

/// PyTorch lists as many shards as there are rows; here every rank of the spec has a shard, the last two without elements.
#[test]
fn fewer_rows_than_ranks_leave_empty_shards() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, 0..4)?, (2, 20), DType::F32, &mesh)?;
        assert_eq!(x.metadata().shards.len(), 4);
        assert_eq!(x.local_tensor()?.dims(), [[1, 20], [0, 20]][world.rank() / 2]);
        assert_eq!(x.shard_size(world.rank()), [20, 20, 0, 0][world.rank()]);
        assert_eq!(numbers(&x.full_tensor()?), [1.0; 40]);
        assert_eq!(numbers(&x.add(&x)?.full_tensor()?), [2.0; 40]);
        Ok(())
    })
    .unwrap();
}

/// Shards of ranks 2 and 3, two per rank; ranks 0 and 1 are not on the mesh.
#[test]
fn states_of_a_sub_group_load_on_its_members() {
    launch(4, |world| {
        let mesh = world.device_mesh(Mesh::from_ranks([("some", 2)], vec![2, 3])?)?;
        let whole = counting(&[8, 3]);
        let x = shard_tensor(&whole, ChunkShardingSpec::over_ranks(0, [2, 3, 2, 3])?, &mesh, None)?;
        if world.rank() < 2 {
            let error = ShardedTensor::load_with_process_group(&mesh, &[], None).unwrap_err().to_string();
            assert!(error.contains("mesh"), "{error}");
            return Ok(());
        }
        let loaded = ShardedTensor::load_with_process_group(&mesh, &[x.state()?], None)?;
        assert_eq!(loaded.metadata(), x.metadata());
        assert_eq!(numbers(&loaded.full_tensor()?), numbers(&whole));
        Ok(())
    })
    .unwrap();
}

#[test]
fn shards_without_elements_and_local_views_of_metadata() {
    launch(4, |world| {
        let (mesh, me) = (world.mesh([("all", 4)])?, world.rank());
        let describe = |size: &[usize], shards: Vec<ShardMetadata>| ShardedTensorMetadata {
            size: size.to_vec(),
            dtype: DType::F64,
            requires_grad: false,
            shards,
        };
        // A tensor of 0 x 0 in four empty shards.
        let nothing = Tensor::zeros((0, 0), DType::F64, &Device::Cpu)?;
        let mine = [TensorShard::new(&nothing, part(&[0, 0], &[0, 0], me))?];
        let all = describe(&[0, 0], (0..4).map(|rank| part(&[0, 0], &[0, 0], rank)).collect());
        let x = ShardedTensor::init_from_local_shards_and_global_metadata(&mine, all, &mesh)?;
        assert_eq!((x.local_shards().len(), x.full_tensor()?.dims()), (1, &[0, 0][..]));
        // Each rank describes the shards of other ranks as empty: accepted at offset 0, refused outside of the tensor.
        let own = counting(&[2, 2]);
        let mine = [TensorShard::new(&own, part(&[0, 0], &[2, 2], me))?];
        let view = |offset: usize| {
            let of = |rank| if rank == me { part(&[0, 0], &[2, 2], me) } else { part(&[offset, 0], &[0, 0], rank) };
            describe(&[2, 2], (0..4).map(of).collect())
        };
        let x = ShardedTensor::init_from_local_shards_and_global_metadata(&mine, view(0), &mesh)?;
        assert_eq!(numbers(&x.local_tensor()?), numbers(&own));
        let error = ShardedTensor::init_from_local_shards_and_global_metadata(&mine, view(3), &mesh).err().unwrap();
        assert!(error.to_string().contains("inside the tensor"), "{error}");
        Ok(())
    })
    .unwrap();
    // Two shards for one entry, or none, are refused.
    let error = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let shards = vec![part(&[0], &[2], 0), part(&[2], &[2], 1)];
        let all = ShardedTensorMetadata { size: vec![4], dtype: DType::F64, requires_grad: false, shards };
        let shard = TensorShard::new(&counting(&[2]), part(&[2 * world.rank()], &[2], world.rank()))?;
        let none = ShardedTensor::init_from_local_shards_and_global_metadata(&[], all.clone(), &mesh);
        assert!(none.is_err());
        let twice = [shard.clone(), shard];
        let twice = ShardedTensor::init_from_local_shards_and_global_metadata(&twice, all, &mesh);
        twice.map(drop).map_err(|error| Error::other(error.to_string().split(" at ").next().unwrap().to_string()))
    });
    assert!(error.contains("local shards"), "{error}");
}

#[test]
fn a_shard_without_a_placement_is_valid_and_unchecked() {
    let metadata = ShardMetadata::new([0, 0], [2, 3], None).unwrap();
    let shard = TensorShard::new(&counting(&[2, 3]), metadata).unwrap();
    assert_eq!((shard.metadata().rank(), shard.metadata().placement.is_none()), (None, true));
    let error = TensorShard::new(&counting(&[2, 2]), ShardMetadata::new([0, 0], [2, 3], None).unwrap()).unwrap_err();
    assert!(error.to_string().contains("[2, 2]"), "{error}");
}

/// The size follows from local shards, some of them without rows; offsets that shards came with are replaced.
#[test]
fn the_size_of_stacked_shards_is_inferred() {
    launch(4, |world| {
        let (mesh, me) = (world.mesh([("all", 4)])?, world.rank());
        for offsets in [[5 * me, 0], [me / 2 * 5, me % 2 * 5]] {
            let rows = [5, 0, 5, 2][me];
            let local = Tensor::full(me as f64, (rows, 5), &Device::Cpu)?;
            let shard = TensorShard::from_tensor_and_offsets(&local, offsets, me)?;
            let x = ShardedTensor::init_from_stacked_shards(&[shard], &mesh)?;
            assert_eq!(x.shape(), [12, 5]);
            let begins: Vec<usize> = x.metadata().shards.iter().map(|shard| shard.offsets[0]).collect();
            assert_eq!(begins, [0, 5, 5, 10]);
            let expected: Vec<f64> = [[0.0; 25], [2.0; 25]].concat().into_iter().chain([3.0; 10]).collect();
            assert_eq!(numbers(&x.full_tensor()?), expected);
        }
        Ok(())
    })
    .unwrap();
    let rows = same_error_on_all_ranks(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let local = counting(&[2, 3 + world.rank()]);
        let shard = TensorShard::from_tensor_and_offsets(&local, [0, 0], world.rank())?;
        ShardedTensor::init_from_stacked_shards(&[shard], &mesh).map(drop)
    });
    assert!(rows.contains("[3]") && rows.contains("[4]"), "{rows}");
}

#[test]
fn shards_are_held_without_a_mesh() {
    let boxes = [[0, 0], [0, 5], [5, 0], [5, 5]];
    let whole = counting(&[10, 10]);
    let cell = |i: usize| whole.narrow(0, boxes[i][0], 5).unwrap().narrow(1, boxes[i][1], 5).unwrap();
    let shards: Vec<ShardMetadata> = (0..4).map(|i| part(&boxes[i], &[5, 5], i)).collect();
    let metadata = ShardedTensorMetadata { size: vec![10, 10], dtype: DType::F64, requires_grad: false, shards };
    let shard = |i: usize| TensorShard::new(&cell(i), part(&boxes[i], &[5, 5], i)).unwrap();
    let holder = ShardHolder::new((0..4).map(shard).collect(), metadata.clone()).unwrap();
    assert_eq!((holder.local_shards().len(), holder.metadata()), (4, &metadata));
    assert_eq!(numbers(&holder.full_tensor().unwrap()), numbers(&whole));
    let some = ShardHolder::new(vec![shard(2)], metadata.clone()).unwrap();
    assert!(some.full_tensor().unwrap_err().to_string().contains("no shard"));
    assert!(ShardHolder::new(vec![shard(1), shard(1)], metadata.clone()).is_err(), "one shard twice");
    let wrong = TensorShard::new(&cell(0), part(&[1, 0], &[5, 5], 0)).unwrap();
    assert!(ShardHolder::new(vec![wrong], metadata).is_err(), "a shard that is not listed");
    // The same shards on a mesh are the sharded tensor.
    let expected = numbers(&whole);
    launch(4, move |world| {
        let x = holder.on_mesh(&world.mesh([("all", 4)])?)?;
        assert_eq!(numbers(&x.full_tensor()?), expected);
        Ok(())
    })
    .unwrap();
}

#[test]
fn detaching_drops_requires_grad() {
    launch(2, |world| {
        let mesh = world.mesh([("all", 2)])?;
        let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, 0..2)?, 4, DType::F32, &mesh)?;
        let leaf = x.with_requires_grad(true);
        assert!(leaf.requires_grad() && leaf.to_dtensor()?.has_gradient());
        let detached = leaf.with_requires_grad(false);
        assert!(!detached.requires_grad() && !detached.to_dtensor()?.has_gradient());
        Ok(())
    })
    .unwrap();
}

#[test]
fn operands_of_other_groups_and_shapes_are_refused_on_all_ranks() {
    let compared = same_error_on_all_ranks(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let turned = world.device_mesh(Mesh::from_ranks([("all", 4)], vec![3, 2, 1, 0])?)?;
        let spec = || ChunkShardingSpec::over_ranks(0, 0..4);
        let x = ShardedTensor::ones(spec()?, (4, 2), DType::F32, &mesh)?;
        let y = ShardedTensor::ones(spec()?, (4, 2), DType::F32, &turned)?;
        assert!(x.allclose(&y, 0.0, 0.0).is_err());
        x.equal(&y).map(drop)
    });
    assert!(compared.contains("mesh"), "{compared}");
    for (shape, boxes) in [(12, false), (13, true)] {
        let error = same_error_on_all_ranks(2, move |world| {
            let mesh = world.mesh([("all", 2)])?;
            let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, 0..2)?, (20, 3), DType::F32, &mesh)?;
            let spec: AnyShardingSpec = match boxes {
                true => EnumerableShardingSpec::new(vec![part(&[0, 0], &[9, 3], 1), part(&[9, 0], &[4, 3], 0)])?.into(),
                false => ChunkShardingSpec::over_ranks(0, 0..2)?.into(),
            };
            let y = ShardedTensor::ones(spec, (shape, 3), DType::F32, &mesh)?;
            x.add(&y).map(drop)
        });
        assert!(error.contains("20") && error.contains(&shape.to_string()), "{error}");
    }
}

/// Chunks in shuffled order and boxes of different sizes, over a tensor of these sizes.
fn specs(shape: &[usize]) -> Vec<AnyShardingSpec> {
    let mut all = Vec::new();
    for dim in 0..shape.len() as isize {
        all.push(ChunkShardingSpec::over_ranks(dim, [2, 0, 3, 1]).unwrap().into());
    }
    let (mut first, mut second) = (shape.to_vec(), shape.to_vec());
    let mut offsets = vec![0; shape.len()];
    (first[0], second[0], offsets[0]) = (2, shape[0] - 2, 2);
    let boxes = vec![part(&vec![0; shape.len()], &first, 3), part(&offsets, &second, 1)];
    all.push(EnumerableShardingSpec::new(boxes).unwrap().into());
    all
}

type Apply = fn(&DTensor) -> Result<DTensor>;

/// Transposes, softmax, views, layer norm and masks of sharded tensors equal those of the whole one, for any spec.
#[test]
fn shape_and_row_operators_of_sharded_tensors_give_the_unsharded_result() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let shape = [16, 9, 10];
        let whole = counting(&shape);
        let operators: [(&str, Apply); 9] = [
            ("transpose", |x| x.transpose(0, 1)),
            ("transpose", |x| x.transpose(1, 2)),
            ("softmax", |x| x.softmax(1)),
            ("softmax", |x| x.softmax(-1)),
            ("view", |x| x.reshape(&[4, 4, 9, 10])),
            ("view", |x| x.reshape(&[4, 4, 9, 10])?.reshape(&[16, -1, 10])),
            ("gelu", |x| x.gelu()),
            ("layer_norm", |x| x.layer_norm(2, None, None, 1e-5)),
            ("scale", |x| (x * 3.0)? - 1.8),
        ];
        for spec in specs(&shape) {
            let x = shard_tensor(&whole, spec.clone(), &mesh, None)?;
            for (name, operator) in operators {
                let found = ShardedTensor::apply(name, &[&x], |x| operator(&x[0]))?.full_tensor()?;
                let expected = operator(&DTensor::replicate(&whole, &alone)?)?.full_tensor()?;
                assert!(near(&found, &expected), "{name} of {spec}");
            }
            let (weight, bias) = (counting(&[9, 10]), counting(&[9, 10]));
            let found = ShardedTensor::apply("layer_norm", &[&x], |x| {
                let mesh = x[0].device_mesh();
                let (weight, bias) = (DTensor::replicate(&weight, mesh)?, DTensor::replicate(&bias, mesh)?);
                x[0].layer_norm(2, Some(&weight), Some(&bias), 1e-5)
            })?;
            let rows = whole.reshape((16, 90))?;
            let centered = rows.broadcast_sub(&rows.mean_keepdim(D::Minus1)?)?;
            let scale = (centered.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?;
            let normal = centered.broadcast_div(&scale)?.reshape(&shape)?;
            let expected = normal.broadcast_mul(&weight)?.broadcast_add(&bias)?;
            assert!(near(&found.full_tensor()?, &expected), "layer_norm of {spec}");
            // A mask of more dimensions broadcasts, as in PyTorch.
            for mask_shape in [vec![16, 9, 10], vec![9, 10], vec![10], vec![9, 1], vec![2, 16, 9, 10]] {
                let mask = counting(&mask_shape).gt(0.0)?;
                let found = ShardedTensor::apply("masked_fill", &[&x], |x| {
                    x[0].masked_fill(&DTensor::replicate(&mask, x[0].device_mesh())?, -7.5)
                })?;
                let broad = if mask_shape.len() > 3 { &mask_shape[..] } else { &shape[..] };
                let (wide, values) = (mask.broadcast_as(broad)?, whole.broadcast_as(broad)?.contiguous()?);
                let expected = wide.where_cond(&(values.zeros_like()? - 7.5)?, &values)?;
                assert_eq!(numbers(&found.full_tensor()?), numbers(&expected), "mask {mask_shape:?} of {spec}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_views_masks_and_normalized_shapes_are_refused() {
    let refused: [(&str, Apply); 4] = [
        ("-1", |x| x.reshape(&[-1, -1, 10])),
        ("[7, 10]", |x| x.reshape(&[7, 10])),
        ("[5]", |x| x.layer_norm(1, Some(&DTensor::ones(5, DType::F64, x.device_mesh(), [Replicate])?), None, 1e-5)),
        ("[3]", |x| x.masked_fill(&DTensor::ones(3, DType::U8, x.device_mesh(), [Replicate])?, 0.0)),
    ];
    for (said, operator) in refused {
        let error = same_error_on_all_ranks(4, move |world| {
            let mesh = world.mesh([("all", 4)])?;
            let spec = ChunkShardingSpec::over_ranks(0, 0..4)?;
            let x = shard_tensor(&counting(&[8, 10]), spec, &mesh, None)?;
            ShardedTensor::apply("refused", &[&x], |x| operator(&x[0])).map(drop)
        });
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn batches_of_matrices_multiply_and_chunks_split() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let (a, b) = (counting(&[15, 4, 5]), counting(&[15, 5, 6]));
        let expected = a.matmul(&b)?;
        for (left, right) in [(0, 0), (0, 1), (1, 0), (2, 1)] {
            let x = shard_tensor(&a, ChunkShardingSpec::over_ranks(left, [1, 3, 0, 2])?, &mesh, None)?;
            let y = shard_tensor(&b, ChunkShardingSpec::over_ranks(right, [1, 3, 0, 2])?, &mesh, None)?;
            assert!(near(&x.matmul(&y)?.full_tensor()?, &expected), "dims {left} and {right}");
        }
        let whole = counting(&[12, 16]);
        for dim in [0, 1] {
            let x = shard_tensor(&whole, ChunkShardingSpec::over_ranks(dim, [1, 3, 0, 2])?, &mesh, None)?;
            for (i, piece) in whole.chunk(4, 1)?.iter().enumerate() {
                let found = ShardedTensor::apply("chunk", &[&x], |x| Ok(x[0].chunk(4, -1)?.swap_remove(i)))?;
                assert_eq!(numbers(&found.full_tensor()?), numbers(piece));
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn texts_of_remote_devices() {
    for text in ["cuda:0", "rank:0/cuda:0", "rank:0/cpu", "rank:0", "worker0/cpu", "cpu"] {
        let device: RemoteDevice = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(device.to_string().parse::<RemoteDevice>().unwrap(), device, "{text}");
        assert!(ChunkShardingSpec::new(-1, [text]).is_ok(), "{text}");
    }
    for text in ["cuda:foo", "foo:0", "rank:0/cuda:foo", "rank:0/cpu2", "random:0", "rank:foo", "rank:0/foo"] {
        let error = text.parse::<RemoteDevice>().unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("rank:<rank>/<device>"), "{error}");
        assert!(ChunkShardingSpec::new(0, [text]).is_err(), "{text}");
    }
    // A worker without a rank is valid as a text; no tensor can be placed on it.
    let error = same_error_on_all_ranks(2, |world| {
        let spec = ChunkShardingSpec::new(0, ["worker0/cpu", "worker1/cpu"])?;
        ShardedTensor::zeros(spec, 4, DType::F32, &world.mesh([("all", 2)])?).map(drop)
    });
    assert!(error.contains("worker0"), "{error}");
}

#[derive(Module)]
struct Bags {
    bags: Vec<EmbeddingBag>,
}

/// Ten embedding bags, half of them sharded by rows and half by columns.
#[test]
fn a_collection_of_embedding_bags_sharded_by_rows_and_columns_equals_the_local_one() {
    let outputs = |ranks: usize| {
        ThreadWorld::new(ranks)
            .unwrap()
            .run(move |world| {
                let mesh = world.mesh([("all", ranks)])?;
                mesh.manual_seed(11);
                let builder = Builder::new(&mesh).placed(|path, _| {
                    let number = path.split('.').nth(1).and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
                    vec![Shard((number % 2) as isize)]
                });
                let bag = |i: usize| {
                    EmbeddingBag::new(&builder.child("bags").child(&i.to_string()), 10, 8, EmbeddingBagMode::Sum)
                };
                let model = Bags { bags: (0..10).map(bag).collect::<Result<_>>()? };
                assert_eq!(model.named_parameters().len(), 10);
                let ids = Tensor::new(&[[1i64, 2, 4, 9], [4, 3, 2, 9]], &Device::Cpu)?;
                let ids = DTensor::replicate(&ids, &mesh)?;
                let outputs: Vec<Vec<f64>> = model
                    .bags
                    .iter()
                    .map(|bag| Ok(numbers(&bag.forward(&ids)?.full_tensor()?)))
                    .collect::<Result<_>>()?;
                Ok(outputs)
            })
            .unwrap()
            .swap_remove(0)
    };
    let (alone, sharded) = (outputs(1), outputs(4));
    for (a, b) in alone.iter().flatten().zip(sharded.iter().flatten()) {
        assert!((a - b).abs() < 1e-6, "{a} and {b}");
    }
}

/// Values and gradients of lookups with `padding_idx`, `max_norm`, weights per id and a last offset, in tables that are sharded by
/// rows and by columns in shuffled order.
#[test]
fn embedding_options_of_sharded_tables_give_the_unsharded_result() {
    launch(4, |world| {
        let mesh = world.mesh([("all", 4)])?;
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let table = (counting(&[17, 6]) / 8.0)?;
        let ids = Tensor::new(&[[1i64, 10, 10, 16], [3, 0, 10, 2]], &Device::Cpu)?;
        let (flat, offsets) = (ids.flatten_all()?, Tensor::new(&[0i64, 3, 5, 8], &Device::Cpu)?);
        let weights = (counting(&[8]) / 4.0)?;
        let plain = EmbeddingOptions::default();
        let lookups = [
            EmbeddingOptions { padding_idx: Some(10), ..plain },
            EmbeddingOptions { padding_idx: Some(-1), max_norm: Some(1.25), norm_type: 1.0, ..plain },
            EmbeddingOptions { max_norm: Some(2.5), ..plain },
        ];
        let results = |table: &DTensor| -> Result<Vec<Tensor>> {
            let table = table.requires_grad();
            let on = |tensor: &Tensor| DTensor::replicate(tensor, table.device_mesh());
            let (flat, offsets, weights) = (on(&flat)?, on(&offsets)?, on(&weights)?);
            let bag = |mode| EmbeddingBagOptions {
                mode,
                offsets: Some(&offsets),
                include_last_offset: true,
                ..EmbeddingBagOptions::default()
            };
            let sum = EmbeddingBagOptions { per_sample_weights: Some(&weights), ..bag(EmbeddingBagMode::Sum) };
            let bags = [
                sum,
                EmbeddingBagOptions { padding_idx: Some(10), ..bag(EmbeddingBagMode::Mean) },
                EmbeddingBagOptions { padding_idx: Some(10), max_norm: Some(2.0), ..bag(EmbeddingBagMode::Max) },
            ];
            let mut outputs = Vec::new();
            for options in lookups {
                outputs.push(table.embedding_with(&on(&ids)?, options)?);
            }
            for options in &bags {
                outputs.push(table.embedding_bag_with(&flat, options)?);
            }
            let mut all = Vec::new();
            for output in outputs {
                all.push(output.full_tensor()?);
                all.push(output.square()?.sum_all()?.backward()?.get(&table)?.full_tensor()?);
            }
            Ok(all)
        };
        let expected = results(&DTensor::replicate(&table, &alone)?)?;
        // Row 10 is the padding of the first lookup: it has no gradient, and row 1 has one.
        let rows = expected[1].to_vec2::<f64>()?;
        assert!(rows[10].iter().all(|&x| x == 0.0) && rows[1].iter().any(|&x| x != 0.0));
        for dim in [0, 1] {
            let spec = ChunkShardingSpec::over_ranks(dim, [2, 0, 3, 1])?;
            let found = results(&shard_tensor(&table, spec, &mesh, None)?.to_dtensor()?)?;
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!(near(found, expected), "result {i} sharded on dimension {dim}");
            }
        }
        Ok(())
    })
    .unwrap();
}
