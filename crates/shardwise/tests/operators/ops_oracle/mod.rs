//! Every operator against its unsharded result: all combinations of placements of its inputs on one mesh axis, and random
//! ones on two.
//!
//! `SHARDWISE_OP_CASES` sets the number of random layouts on two axes per operator (default 40), `SHARDWISE_SEED` the seed.

mod missing;
mod zeros;

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use shardwise::ops::{AttentionOptions, OpEntry, SampleInput, composed_ops, ops};
use shardwise::prelude::*;
use shardwise_test_suites::settings::env_or;
use shardwise_test_suites::values;

/// The operators of both tables, or the ones listed in `SHARDWISE_OP_NAMES`, separated by commas.
fn selected() -> impl Iterator<Item = &'static OpEntry> {
    let names = env_or("SHARDWISE_OP_NAMES", String::new());
    let wanted = move |op: &&OpEntry| names.is_empty() || names.split(',').any(|name| name == op.name);
    ops().chain(composed_ops()).filter(wanted)
}

/// The placements to try for an input along one axis.
fn placements(mesh: &Mesh, sample: &SampleInput, axis: usize, so_far: &[Placement]) -> Vec<Placement> {
    let mut all = vec![Replicate];
    for dim in 0..sample.shape.len() {
        all.push(Shard(dim as isize));
        all.push(values::ragged(mesh, &sample.shape, so_far, dim, axis, dim + 3));
    }
    all.push(Placement::StridedShard { dim: 0, split_factor: 2 });
    all.push(Placement::block_cyclic(0, 1));
    if sample.shape.is_empty() {
        all.truncate(1);
    }
    // An index tensor cannot be a partial sum.
    if sample.below.is_some() {
        return all;
    }
    let reductions: &[ReduceOp] = match sample.dtype.is_float() {
        true => &[ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min],
        false => &[ReduceOp::Sum, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min, ReduceOp::BitXor],
    };
    all.extend(reductions.iter().map(|&op| Partial(op)));
    all
}

fn input(mesh: &DeviceMesh, sample: &SampleInput, placements: &[Placement]) -> Result<DTensor> {
    let layout = Layout::new(mesh.mesh(), sample.shape.as_slice(), placements.to_vec())?;
    let local = values::local(&layout, mesh.world().rank()).to_dtype(sample.dtype)?;
    let local = match sample.below {
        Some(_) if local.elem_count() == 0 => local,
        Some(n) => {
            let index = |x: i64| x.rem_euclid(n as i64);
            let values = local.flatten_all()?.to_vec1::<i64>()?.into_iter().map(index).collect::<Vec<_>>();
            Tensor::from_vec(values, local.dims(), local.device())?
        }
        None => local,
    };
    DTensor::from_local_with_shape(&local, mesh, placements.to_vec(), sample.shape.as_slice())
}

/// Runs the operator on inputs in the given placements and compares every output with the unsharded one.
fn check(
    op: &OpEntry,
    mesh: &DeviceMesh,
    samples: &[SampleInput],
    chosen: &[Vec<Placement>],
    expected: &[Tensor],
) -> Result<()> {
    let inputs = samples.iter().zip(chosen).map(|(s, p)| input(mesh, s, p)).collect::<Result<Vec<_>>>()?;
    let layouts: Vec<String> = inputs.iter().map(|t| t.layout().to_string()).collect();
    let outputs = (op.apply)(&inputs).map_err(|e| Error::other(format!("{} of {layouts:?}: {e}", op.name)))?;
    assert_eq!(outputs.len(), expected.len());
    for (output, expected) in outputs.iter().zip(expected) {
        let got = output.full_tensor()?;
        assert_eq!((got.dims(), got.dtype()), (expected.dims(), expected.dtype()), "{} of {layouts:?}", op.name);
        assert!(
            values::close(&got, expected, 1.0),
            "{} of {layouts:?} gives {}: got {got}, expected {expected}",
            op.name,
            output.layout()
        );
    }
    Ok(())
}

/// The result of one rank that holds everything.
fn unsharded(op: &OpEntry, world: &World, samples: &[SampleInput]) -> Result<Vec<Tensor>> {
    let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
    let inputs = samples.iter().map(|s| input(&alone, s, &[Replicate])).collect::<Result<Vec<_>>>()?;
    (op.apply)(&inputs)?.iter().map(|t| t.full_tensor()).collect()
}

#[test]
fn every_rule_on_one_axis_gives_the_unsharded_result() {
    for ranks in [2, 3] {
        let run = move |world: World| {
            let mesh = world.mesh([("a", ranks)])?;
            let mut checked = 0;
            for op in selected() {
                for samples in (op.samples)() {
                    let expected = unsharded(op, &world, &samples)?;
                    let mut combinations: Vec<Vec<Vec<Placement>>> = vec![Vec::new()];
                    for sample in &samples {
                        let options = placements(mesh.mesh(), sample, 0, &[Replicate]);
                        let with = |so_far: &Vec<Vec<Placement>>, p: &Placement| {
                            [so_far.as_slice(), &[vec![p.clone()]]].concat()
                        };
                        combinations =
                            combinations.iter().flat_map(|c| options.iter().map(move |p| with(c, p))).collect();
                    }
                    for chosen in combinations {
                        check(op, &mesh, &samples, &chosen, &expected)?;
                        checked += 1;
                    }
                }
            }
            Ok(checked)
        };
        let checked = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
        println!("{} operators, {} combinations on {ranks} ranks", selected().count(), checked[0]);
    }
}

#[test]
fn random_layouts_on_two_axes_give_the_unsharded_result() {
    let (cases, seed) = (env_or("SHARDWISE_OP_CASES", 40u64), env_or("SHARDWISE_SEED", 0u64));
    let run = move |world: World| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        for (i, op) in selected().enumerate() {
            let rng = &mut StdRng::seed_from_u64(seed + i as u64);
            let all = (op.samples)();
            for _ in 0..cases {
                let samples = all.choose(rng).unwrap();
                let expected = unsharded(op, &world, samples)?;
                let mut chosen = Vec::new();
                for sample in samples {
                    let mut placed = vec![Replicate, Replicate];
                    for axis in 0..2 {
                        let options = placements(mesh.mesh(), sample, axis, &placed);
                        placed[axis] = options[rng.random_range(0..options.len())].clone();
                    }
                    chosen.push(placed);
                }
                check(op, &mesh, samples, &chosen, &expected)?;
            }
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn infinities_and_integer_limits_survive_every_unary_operator() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
        let cpu = &candle_core::Device::Cpu;
        let reals = Tensor::new(&[-3.5, f64::NEG_INFINITY, 0.0, 2.5, f64::INFINITY, -0.25], cpu)?.reshape((6, 1))?;
        let bytes = Tensor::new(&[0u8, 100, 200, 255, 1, 128], cpu)?.reshape((6, 1))?;
        for tensor in [reals, bytes] {
            let whole = DTensor::distribute_tensor(&tensor, &alone, [Replicate], None)?;
            for op in ops().filter(|op| (op.samples)()[0].len() == 1) {
                // operators that refuse this shape are tested in ops_bad_input
                let Ok(plain) = (op.apply)(std::slice::from_ref(&whole)) else { continue };
                let expected: Vec<Tensor> = plain.iter().map(DTensor::full_tensor).collect::<Result<_>>()?;
                for reduction in [ReduceOp::Max, ReduceOp::Min, ReduceOp::Sum] {
                    // a shard padded with the neutral element: infinities, or the limits of the type
                    let sharded = DTensor::distribute_tensor(&tensor, &mesh, [Shard(0)], None)?;
                    let outputs = (op.apply)(&[sharded.redistribute([Partial(reduction)])?])?;
                    for (output, expected) in outputs.iter().zip(&expected) {
                        let got = output.full_tensor()?;
                        assert!(
                            values::close(&got, expected, 1.0),
                            "{} of {reduction}: got {got}, expected {expected}",
                            op.name
                        );
                    }
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn operands_of_different_dtypes_are_promoted_before_rounding() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        // 2^24 + 1 is not an f32: a sum of operands that are converted first would lose the one
        let part = Tensor::full((1i64 << 23) + world.rank() as i64, 3, &candle_core::Device::Cpu)?;
        let whole = DTensor::from_local(&part, &mesh, [Partial(ReduceOp::Sum)])?;
        let half = DTensor::full(0.5, 3, DType::F64, &mesh, [Replicate])?;
        let sum = whole.add(&half)?;
        assert_eq!((sum.dtype(), sum.full_tensor()?.to_vec1::<f64>()?), (DType::F64, vec![16_777_217.5; 3]));
        let narrow = DTensor::ones(3, DType::BF16, &mesh, [Shard(0)])?;
        assert_eq!(narrow.mul(&DTensor::ones(3, DType::F16, &mesh, [Shard(0)])?)?.dtype(), DType::F32);
        assert_eq!(narrow.eq(&narrow)?.dtype(), DType::U8);
        assert_eq!(whole.div(&whole)?.dtype(), DType::F32);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn sharding_decisions_are_cached() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let x = DTensor::ones((4, 4), DType::F32, &mesh, [Shard(0)])?;
        x.add(&x)?;
        let before = shardwise::op::cache_report();
        for _ in 0..10 {
            x.add(&x)?;
        }
        let after = shardwise::op::cache_report();
        assert_eq!((after.hits - before.hits, after.misses - before.misses), (10, 0));
        // another argument is another cache entry
        x.add_scalar(1.0)?;
        x.add_scalar(2.0)?;
        assert_eq!(shardwise::op::cache_report().misses - after.misses, 2);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn products_and_chains_stay_sharded_without_communication() {
    let run = |world: World| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let x = DTensor::randn((8, 6), &mesh, [Shard(0), Replicate])?;
        let w = DTensor::randn((6, 4), &mesh, [Replicate, Shard(1)])?;
        world.trace().clear();
        let y = x.matmul(&w)?.gelu()?;
        assert_eq!(y.placements(), [Shard(0), Shard(1)]);
        let loss = y.sum_all()?;
        assert_eq!(loss.placements(), [Partial(ReduceOp::Sum), Partial(ReduceOp::Sum)]);
        let mean = y.mean(&[0], false)?;
        assert_eq!(mean.placements(), [Partial(ReduceOp::Sum), Shard(0)]);
        let deep = x.matmul(&w)?.matmul(&DTensor::randn((4, 3), &mesh, [Replicate, Shard(0)])?)?;
        assert_eq!(deep.placements(), [Shard(0), Partial(ReduceOp::Sum)]);
        // Attention sharded on batch or heads, grouped-query attention included.
        let queries = DTensor::randn((2, 8, 5, 4), &mesh, [Shard(0), Shard(1)])?;
        let keys = DTensor::randn((2, 4, 5, 4), &mesh, [Shard(0), Shard(1)])?;
        let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
        let mixed = queries.scaled_dot_product_attention(&keys, &keys, causal)?;
        assert_eq!(mixed.placements(), [Shard(0), Shard(1)]);
        let communicated = world.trace().records().iter().filter(|r| r.call != "agree").count();
        assert_eq!(communicated, 0, "{:?}", world.trace().records());
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn invalid_operands_are_the_same_error_on_every_rank() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let other = world.mesh([("b", 2)])?;
        let x = DTensor::zeros((4, 3), DType::F32, &mesh, [Shard(0)])?;
        let far = DTensor::zeros((4, 3), DType::F32, &other, [Shard(0)])?;
        let scalar = DTensor::zeros((), DType::F32, &mesh, [Replicate])?;
        let empty = DTensor::zeros((0, 3), DType::F32, &mesh, [Shard(0)])?;
        for (result, parts) in [
            (x.matmul(&x), &["matmul", "[4, 3]"][..]),
            (x.add(&DTensor::zeros((4, 2), DType::F32, &mesh, [Replicate])?), &["add", "[4, 2]"]),
            (x.add(&far), &["add", "b=2", "one mesh"]),
            (x.bitwise_and(&x), &["bitwise_and", "integers"]),
            (x.sum(&[2], false), &["sum", "[2]"]),
            (x.sum(&[0, -2], false), &["sum", "each once"]),
            (empty.amax(&[0], false), &["amax", "at least one element"]),
            (scalar.matmul(&x), &["scalar in matmul"]),
            (DTensor::einsum("ij,jk", &[&x, &x]), &["one size for `j`", "3 and 4"]),
            (DTensor::einsum("ii->i", &[&x]), &["one size for `i` of a diagonal", "4 and 3"]),
            (DTensor::einsum("ij->k", &[&x]), &["`ij->k`"]),
            (DTensor::einsum("ijk->i", &[&x]), &["[4, 3]", "3 dimension(s)"]),
        ] {
            let message = result.expect_err(parts[0]).to_string();
            assert!(parts.iter().all(|p| message.contains(p)), "{parts:?} missing in {message}");
        }
        world.barrier()
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn a_source_longer_than_its_index_is_not_sharded_with_it() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let x = DTensor::zeros((1, 7), DType::F64, &mesh, [Replicate])?;
        let index = DTensor::arange(0.0..3.0, DType::I64, &mesh, [Shard(0)])?.reshape(&[1, 3])?;
        let source = DTensor::arange(1.0..5.0, DType::F64, &mesh, [Replicate])?.reshape(&[1, 4])?;
        for placement in [Replicate, Shard(1), Partial(ReduceOp::Sum)] {
            let added = x.scatter_add(1, &index, &source.redistribute([placement])?)?;
            assert_eq!(added.full_tensor()?.to_vec2::<f64>()?, [[1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]]);
        }
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn operands_are_not_converted_to_a_partial_that_no_input_has() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let bytes = DTensor::full(3.0, (), DType::U8, &mesh, [Partial(ReduceOp::Min)])?;
        let wholes = DTensor::full(5.0, (), DType::I64, &mesh, [Partial(ReduceOp::Max)])?;
        // A mean of integers would be an error.
        assert_eq!(bytes.sub(&wholes)?.item::<i64>()?, -2);
        let least = DTensor::full(3.0, (), DType::F32, &mesh, [Partial(ReduceOp::Min)])?;
        assert_eq!(least.add(&wholes)?.placements(), [Replicate]);
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn combinations_that_need_no_communication_have_none_or_a_listed_reason() {
    let world = ThreadWorld::new(2).unwrap();
    let found = world.run(|world| missing::combinations(&world)).unwrap().swap_remove(0);
    let unexplained: Vec<&missing::Combination> = found.iter().filter(|c| missing::reason(c).is_none()).collect();
    println!("valid without communication, but no rule offers it:");
    for (reason, all) in missing::grouped(&found) {
        println!("* {reason}: {all}");
    }
    assert!(unexplained.is_empty(), "without a reason: {unexplained:#?}");
}

#[test]
fn zeros_keep_their_signs_in_every_placement() {
    for ranks in [2, 3] {
        let found = ThreadWorld::new(ranks).unwrap().run(|world| zeros::differing(&world, selected())).unwrap();
        let mut names: Vec<&str> = found[0].iter().map(|(name, _)| *name).collect();
        names.dedup();
        assert!(found[0].is_empty(), "{names:?}: {:#?}", found[0]);
    }
}
