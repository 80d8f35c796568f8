//! Scenarios of PyTorch's `test_redistribute.py`, `test_utils.py` and `test_op_strategy.py`.

use shardwise::prelude::*;
use shardwise::redistribute::explain;
use shardwise::tensor::RedistributeOptions;
use shardwise::{DryWorld, ExplicitRedistribution};
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{list, on, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

#[test]
fn moves_along_one_axis_take_one_collective_forward_and_backward() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        // from, to, collectives forward and backward
        let cases: [(Placement, Placement, &[&str], &[&str]); 5] = [
            (Shard(0), Replicate, &["all_gather"], &[]),
            (Shard(1), Replicate, &["all_gather"], &[]),
            (Replicate, Replicate, &[], &[]),
            (Replicate, Shard(0), &[], &["all_gather"]),
            (SUM, Replicate, &["all_reduce"], &[]),
        ];
        for n in [12, 13, 14] {
            for (from, to, forward, backward) in &cases {
                let x = tensor(&mesh, &[n, n], std::slice::from_ref(from))?.requires_grad();
                let (y, grads, calls) = counted_both_ways(&world, || x.redistribute([to.clone()]))?;
                assert_eq!(calls, [forward.to_vec(), backward.to_vec()], "{n} rows, {from} to {to}");
                assert_eq!(list(&y)?, list(&x)?);
                let expected = if from.is_partial() { Replicate } else { from.clone() };
                assert_eq!(grads.get(&x)?.placements(), [expected]);
                assert_eq!(list(grads.get(&x)?)?, vec![1.0; n * n]);
            }
            let x = tensor(&mesh, &[n, 3], &[SUM])?;
            let (y, calls) = counted(&world, || x.redistribute([Shard(0)]))?;
            assert_eq!((calls, list(&y)?), (vec!["reduce_scatter"], list(&x)?));
        }
        Ok(())
    });
}

#[test]
fn types_forward_and_backward_are_independent() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for from in [Replicate, Shard(0)] {
            let types = [None, Some(DType::BF16), Some(DType::F32)];
            for (forward_dtype, backward_dtype) in types.iter().flat_map(|a| types.iter().map(move |b| (*a, *b))) {
                let x = DTensor::ones((8, 4), DType::F32, &mesh, [from.clone()])?.requires_grad();
                let options = RedistributeOptions { forward_dtype, backward_dtype };
                let y = x.redistribute_with([Replicate], options)?;
                assert_eq!((y.dtype(), y.placements()), (forward_dtype.unwrap_or(DType::F32), &[Replicate][..]));
                let grads = y.sum_all()?.backward()?;
                let gradient = grads.get(&x)?;
                assert_eq!((gradient.dtype(), list(gradient)?), (DType::F32, vec![1.0; 32]));
            }
        }
        Ok(())
    });
}

#[test]
fn an_axis_of_one_rank_needs_no_collective() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4), ("one", 1)])?;
        for from in [Shard(1), Replicate, SUM] {
            for to in [Shard(0), Shard(1), Replicate] {
                let x = tensor(&mesh, &[8, 8], &[Shard(0), from.clone()])?;
                let (y, calls) = counted(&world, || x.redistribute([Shard(0), to.clone()]))?;
                assert!(calls.is_empty(), "{from} to {to}: {calls:?}");
                assert_eq!(list(&y)?, list(&x)?);
            }
        }
        Ok(())
    });
}

#[test]
fn reductions_and_gathers_over_several_axes_merge() {
    on(8, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2)])?;
        let whole = vec![Replicate; 3];
        // from, to, at most as many collectives as PyTorch runs
        let cases: [(&str, &str, usize); 8] = [
            ("P(sum),P(sum),P(sum)", "R,R,R", 1),
            ("P(sum),P(sum),R", "R,R,R", 1),
            ("P(sum),R,P(sum)", "R,R,R", 1),
            ("P(sum),S(0),P(sum)", "R,R,R", 3),
            ("P(sum),P(sum),S(0)", "S(0),S(0),S(0)", 3),
            ("S(0),S(0),R", "R,R,R", 1),
            ("P(sum),S(0),R", "R,R,R", 2),
            ("P(sum),P(sum),R", "S(0),S(0),R", 1),
        ];
        let expected = list(&tensor(&mesh, &[16, 4], &whole)?)?;
        for (from, to, most) in cases {
            let x = tensor(&mesh, &[16, 4], &Placement::parse_list(from)?)?;
            let (y, calls) = counted(&world, || x.redistribute(Placement::parse_list(to)?))?;
            assert!(calls.len() <= most, "{from} to {to}: {calls:?}");
            assert_eq!(list(&y)?, expected, "{from} to {to}");
        }
        // what ones on every rank add up to
        for (from, sum) in [("P(sum),P(sum),P(sum)", 8.0), ("P(sum),P(sum),R", 4.0), ("P(sum),R,P(sum)", 4.0)] {
            let ones = candle_core::Tensor::ones((4, 2), DType::F64, &candle_core::Device::Cpu)?;
            let x = DTensor::from_local(&ones, &mesh, Placement::parse_list(from)?)?;
            assert_eq!(list(&x)?, [sum; 8]);
        }
        Ok(())
    });
}

#[test]
fn changes_of_the_sharded_dimension_take_no_more_collectives_than_in_pytorch() {
    // mesh, shapes, from, to, collectives in PyTorch
    type Case = (&'static str, &'static [&'static [usize]], &'static str, &'static str, usize);
    const FLAT: &[&[usize]] = &[&[8, 8], &[8, 8, 8], &[8, 5], &[5, 8], &[5, 5]];
    const CUBE: &[&[usize]] = &[&[8, 8, 8], &[5, 7, 6]];
    let cases: [Case; 18] = [
        ("a=4,b=2", FLAT, "S(0),R", "S(1),R", 1),
        ("a=4,b=2", FLAT, "S(1),R", "S(0),R", 1),
        ("a=4,b=2", FLAT, "R,S(0)", "R,S(1)", 1),
        ("a=2,b=2,c=2", CUBE, "S(0),S(1),R", "S(0),S(0),R", 1),
        ("a=2,b=2,c=2", CUBE, "S(0),S(1),R", "S(1),S(0),R", 2),
        ("a=2,b=2,c=2", CUBE, "S(0),S(0),R", "S(1),S(1),R", 2),
        ("a=2,b=2,c=2", CUBE, "S(0),S(2),R", "S(1),S(0),R", 2),
        ("a=2,b=2,c=2", CUBE, "S(1),S(1),R", "S(1),S(2),R", 1),
        ("a=2,b=2,c=2", CUBE, "S(0),S(0),S(0)", "S(1),S(1),S(1)", 3),
        ("a=2,b=2,c=2", CUBE, "S(0),S(1),S(0)", "S(1),S(0),S(0)", 3),
        ("a=2,b=2,c=2", CUBE, "S(0),S(1),S(2)", "S(2),S(1),S(0)", 2),
        ("a=2,b=2,c=2", CUBE, "S(1),S(0),S(0)", "R,S(0),S(0)", 1),
        ("a=2,b=2,c=2", CUBE, "S(1),R,S(0)", "R,S(0),S(0)", 2),
        ("a=2,b=2,c=2", CUBE, "S(0),S(0),S(1)", "S(0),S(1),S(2)", 2),
        // a partial sum stays one while another axis moves, and a replica becomes one without communication
        ("a=4,b=2", FLAT, "P(sum),S(0)", "P(sum),S(1)", 1),
        ("a=4,b=2", FLAT, "P(sum),S(0)", "P(sum),R", 1),
        ("a=4,b=2", FLAT, "R,S(0)", "P(sum),S(0)", 0),
        ("a=4,b=2", FLAT, "R,R", "P(sum),P(sum)", 0),
    ];
    on(8, move |world| {
        for (mesh, shapes, from, to, most) in cases {
            let mesh = world.device_mesh(mesh.parse()?)?;
            for shape in shapes {
                let x = tensor(&mesh, shape, &Placement::parse_list(from)?)?;
                let (y, calls) = counted(&world, || x.redistribute(Placement::parse_list(to)?))?;
                assert!(calls.len() <= most, "{shape:?} from {from} to {to}: {calls:?}");
                let expected = Layout::new(mesh.mesh(), *shape, Placement::parse_list(to)?)?;
                assert_eq!(y.local_shape(), expected.local_shape(world.rank()));
                assert_eq!(list(&y)?, list(&x)?, "{shape:?} from {from} to {to}");
            }
        }
        // (16,24) on 4 x 2, every pair, and sizes that the ranks do not divide on 2 x 2
        let mesh = world.mesh([("a", 4), ("b", 2)])?;
        let kinds = [Replicate, Shard(0), Shard(1), SUM];
        let pairs = || kinds.iter().flat_map(|a| kinds.iter().map(move |b| [a.clone(), b.clone()]));
        let expected = list(&tensor(&mesh, &[16, 24], &[Replicate, Replicate])?)?;
        for from in pairs() {
            let x = tensor(&mesh, &[16, 24], &from)?;
            for to in pairs().filter(|to| !to.contains(&SUM)) {
                assert_eq!(list(&x.redistribute(to.clone())?)?, expected, "{from:?} to {to:?}");
            }
        }
        let mesh = world.device_mesh("a=2,b=2@0,1,2,3".parse()?)?;
        for shape in [[10, 5], [9, 5], [3, 5], [1, 3]] {
            for placements in [[Shard(0), Shard(0)], [Shard(0), Shard(1)]] {
                let x = tensor(&mesh, &shape, &placements)?;
                let whole = x.redistribute([Replicate, Replicate])?;
                if mesh.my_coordinate().is_some() {
                    let count = shape.iter().product::<usize>();
                    let plain: Vec<f64> = (0..count).map(|flat| ((flat * 37 + 11) % 101) as f64 / 16.0 - 3.0).collect();
                    assert_eq!(list(&whole)?, plain, "{shape:?} {placements:?}");
                }
            }
        }
        Ok(())
    });
}

/// Every combination of placements on three axes.
fn layouts(mesh: &DeviceMesh, shape: &[usize], kinds: &[Placement]) -> Result<Vec<Layout>> {
    let mut all = Vec::new();
    for (a, b) in kinds.iter().flat_map(|a| kinds.iter().map(move |b| (a, b))) {
        for c in kinds {
            all.push(Layout::new(mesh.mesh(), shape, [a.clone(), b.clone(), c.clone()])?);
        }
    }
    Ok(all)
}

#[test]
fn a_detour_is_never_cheaper_than_the_plan() {
    DryWorld::new(8)
        .unwrap()
        .run(|world| {
            let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2)])?;
            // One more collective must save a latency, since each has overhead beyond the model: plans are compared with that price.
            let latency = shardwise::mesh::Link::THREADS.latency_us;
            let us = |from: &Layout, to: &Layout| -> Result<f64> {
                let plan = explain(&mesh, from, to, DType::F32)?.chosen;
                let calls = plan.steps().iter().filter(|step| step.cost.us > 0.0).count();
                Ok(plan.us() + calls as f64 * latency)
            };
            let all = layouts(&mesh, &[1024, 1024], &[Replicate, Shard(0), Shard(1)])?;
            let costs: Vec<Vec<f64>> = all
                .iter()
                .map(|from| all.iter().map(|to| us(from, to)).collect::<Result<_>>())
                .collect::<Result<_>>()?;
            for (i, a) in all.iter().enumerate() {
                assert_eq!(costs[i][i], 0.0, "{a}");
                for (j, b) in all.iter().enumerate() {
                    for (k, c) in all.iter().enumerate() {
                        let detour = costs[i][j] + costs[j][k];
                        let most = detour * (1.0 + 1e-9);
                        assert!(costs[i][k] <= most, "{a} to {c}: {} us, by {b} {detour} us", costs[i][k]);
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn costs_order_collectives_as_pytorch_does() {
    DryWorld::new(4)
        .unwrap()
        .run(|world| {
            for mesh in [world.mesh([("a", 4), ("b", 1)])?, world.mesh([("a", 2), ("b", 2)])?] {
                let us = |from: &str, to: &str| -> Result<f64> {
                    let layout = |text: &str| Layout::new(mesh.mesh(), (1024, 1024), Placement::parse_list(text)?);
                    Ok(explain(&mesh, &layout(from)?, &layout(to)?, DType::F32)?.chosen.us())
                };
                let (gather, scatter, reduce) =
                    (us("S(0),R", "R,R")?, us("P(sum),R", "S(0),R")?, us("P(sum),R", "R,R")?);
                assert_eq!(us("S(0),R", "S(0),R")?, 0.0);
                assert!(gather < reduce && scatter < reduce, "{gather} {scatter} {reduce}");
                assert!((gather - scatter).abs() < 1e-6 * gather, "{gather} {scatter}");
            }
            // of two axes that shard rows, the outer one is the more expensive to free: its shards are not adjacent afterwards
            let mesh = world.mesh([("a", 2), ("b", 2)])?;
            let us = |to: [Placement; 2]| -> Result<f64> {
                let from = Layout::new(mesh.mesh(), (1024, 1024), [Shard(0), Shard(0)])?;
                Ok(explain(&mesh, &from, &Layout::new(mesh.mesh(), (1024, 1024), to)?, DType::F32)?.chosen.us())
            };
            assert!(us([Replicate, Shard(0)])? >= us([Shard(0), Replicate])?);
            Ok(())
        })
        .unwrap();
}

#[test]
fn local_shapes_and_offsets_of_strided_shards_are_those_of_pytorch() {
    // recorded from compute_local_shape_and_global_offset: mesh, rows, placements, rows and first row per rank
    type Case = (&'static str, usize, &'static str, &'static [usize], &'static [usize]);
    let cases: [Case; 8] = [
        ("a=4,b=2", 39, "SS(0,3),SS(0,4)", &[8, 4, 8, 4, 8, 4, 3, 0], &[0, 2, 4, 6, 8, 10, 12, 39]),
        ("a=4,b=2", 18, "S(0),SS(0,2)", &[3, 2, 3, 2, 3, 2, 2, 1], &[0, 2, 5, 7, 10, 12, 15, 16]),
        ("a=4,b=2", 18, "S(0),S(0)", &[3, 2, 3, 2, 3, 2, 2, 1], &[0, 3, 5, 8, 10, 13, 15, 17]),
        ("a=4,b=2", 13, "S(0),S(0)", &[2, 2, 2, 2, 2, 2, 1, 0], &[0, 2, 4, 6, 8, 10, 12, 13]),
        ("a=4,b=2", 15, "SS(0,2),S(0)", &[2, 2, 2, 2, 2, 2, 2, 1], &[0, 8, 2, 10, 4, 12, 6, 14]),
        ("a=4,b=2", 18, "SS(0,2),S(0)", &[3, 3, 3, 3, 3, 3, 0, 0], &[0, 9, 3, 12, 6, 15, 18, 18]),
        ("a=2,b=2,c=2", 14, "SS(0,4),S(0),S(0)", &[2, 2, 2, 1, 2, 2, 2, 1], &[0, 4, 8, 12, 2, 6, 10, 13]),
        (
            "a=4,b=2,c=3",
            39,
            "S(0),SS(0,2),S(0)",
            &[2, 2, 2, 2, 2, 0, 2, 2, 2, 2, 2, 0, 2, 2, 2, 2, 2, 0, 2, 2, 1, 2, 2, 0],
            &[0, 2, 6, 3, 8, 39, 10, 12, 16, 13, 18, 39, 20, 22, 26, 23, 28, 39, 30, 32, 36, 33, 37, 39],
        ),
    ];
    let parts = |mesh: &str, n: usize, placements: &str| -> (Vec<usize>, Vec<usize>) {
        let mesh: Mesh = mesh.parse().unwrap();
        let layout = Layout::new(&mesh, (n, 3), Placement::parse_list(placements).unwrap()).unwrap();
        (0..mesh.size()).map(|rank| (layout.local_shape(rank)[0], layout.global_offset(rank)[0])).unzip()
    };
    for (mesh, n, placements, rows, offsets) in cases {
        assert_eq!(parts(mesh, n, placements), (rows.to_vec(), offsets.to_vec()), "{n} rows, {placements}");
    }
    // 18 rows each, 8 on the last rank of dp that has any, nothing after it
    let (rows, offsets) = parts("a=30,b=8", 4096, "SS(0,8),S(0)");
    assert_eq!((rows[0], offsets[0], rows[28 * 8], offsets[28 * 8]), (18, 0, 8, 504));
    assert!(rows[29 * 8..].iter().all(|rows| *rows == 0) && offsets[29 * 8..].iter().all(|first| *first == 4096));
}

#[test]
fn fully_sharding_a_tensor_parallel_weight_takes_one_collective() {
    on(4, |world| {
        let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
        let x = tensor(&mesh, &[4, 3], &[Replicate, Shard(0)])?;
        let (y, calls) = counted(&world, || x.redistribute([Shard(0), Shard(0)]))?;
        assert!(calls.len() <= 1, "{calls:?}");
        assert_eq!(y.layout().global_offset(world.rank())[0], world.rank());
        assert_eq!(list(&y)?, list(&x)?);
        Ok(())
    });
}

#[test]
fn strict_scopes_refuse_free_relabelling_too() {
    on(2, |world| {
        let mesh = world.mesh([("tp", 2)])?;
        let (x, w) = (tensor(&mesh, &[8, 6], &[Shard(0)])?, tensor(&mesh, &[8, 6], &[Replicate])?);
        // an operator that takes a replicated input as a shard moves nothing
        let (_, calls) = counted(&world, || ExplicitRedistribution::error().run(|| x.mul(&w)))?;
        assert!(calls.is_empty());
        let error = ExplicitRedistribution::strict().run(|| x.mul(&w)).unwrap_err();
        assert!(matches!(&error, Error::Implicit { operator: "mul", .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("on tp=2: R to") && text.contains("redistribute.rs"), "{text}");
        // explicit relabelling is fine, and a scope inside lifts the check and sets it again
        ExplicitRedistribution::strict().run(|| -> Result<()> {
            x.mul(&w.redistribute([Shard(0)])?)?;
            ExplicitRedistribution::allow().run(|| -> Result<()> {
                x.matmul(&w.t()?)?.exp()?;
                assert!(ExplicitRedistribution::strict().run(|| x.mul(&w)).is_err());
                x.mul(&w)?;
                Ok(())
            })?;
            assert!(x.mul(&w).is_err());
            Ok(())
        })
    });
}

#[test]
fn sequence_and_feature_shards_are_exchanged_with_their_gradients() {
    on(4, |world| {
        let mesh = world.mesh([("cp", 4)])?;
        let x = tensor(&mesh, &[2, 8, 16], &[Shard(1)])?.requires_grad();
        let (y, grads, calls) = counted_both_ways(&world, || {
            let features = x.redistribute([Shard(2)])?;
            features.square()?.redistribute([Shard(1)])
        })?;
        assert!(calls.iter().all(|calls| calls.len() <= 2), "{calls:?}");
        assert_eq!(list(&y)?, list(&x.square()?)?);
        assert_eq!(list(grads.get(&x)?)?, list(&(&x * 2.0)?)?);
        Ok(())
    });
}
