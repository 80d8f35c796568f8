//! Scenarios of PyTorch's `test_math_ops.py`, `test_matrix_ops.py`, `test_pointwise_ops.py`, `test_tensor_ops.py`,
//! `test_common_rules.py` and `test_strategy_validation.py`: placements of results and the collectives that they cost.

use candle_core::{Device, Tensor};
use shardwise::op::cache_report;
use shardwise::ops::{LossOptions, Reduction, override_rule};
use shardwise::prelude::*;
use shardwise::rule::{Decision, DimSharding, RuleCall};
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{assert_close, list, on, rows, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);
const AVG: Placement = Partial(ReduceOp::Avg);
const MAX: Placement = Partial(ReduceOp::Max);
const MIN: Placement = Partial(ReduceOp::Min);

/// The terms `[rank + 1, rank + 1, ...]`, as a tensor that is partial with a reduction.
fn terms(mesh: &DeviceMesh, shape: &[usize], op: ReduceOp) -> Result<DTensor> {
    let mine = Tensor::full((mesh.world().rank() + 1) as f64, shape, &Device::Cpu)?;
    DTensor::from_local_with_shape(&mine, mesh, [Partial(op)], shape)
}

#[test]
fn layer_norm_over_a_sharded_dimension_gathers_statistics_once() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let shape = [20, 5, 10];
        for last in 1..=3 {
            let inner: Vec<usize> = shape[3 - last..].to_vec();
            for affine in [false, true] {
                let weights = |placement: Placement| -> Result<Option<[DTensor; 2]>> {
                    let one = |factor: f64| -> Result<DTensor> {
                        Ok((tensor(&mesh, &inner, std::slice::from_ref(&placement))? * factor)?.requires_grad())
                    };
                    affine.then(|| Ok([one(1.0)?, one(-0.5)?])).transpose()
                };
                let run = |x: &DTensor, w: &Option<[DTensor; 2]>| match w {
                    Some([w, b]) => x.layer_norm(last, Some(w), Some(b), 1e-5),
                    None => x.layer_norm(last, None, None, 1e-5),
                };
                let (whole, w) = (tensor(&mesh, &shape, &[Replicate])?.requires_grad(), weights(Replicate)?);
                let expected = run(&whole, &w)?;
                let wanted = expected.square()?.sum_all()?.backward()?;
                for dim in 0..3 {
                    let what = format!("the last {last}, sharded on {dim}, affine {affine}");
                    let (x, v) = (tensor(&mesh, &shape, &[Shard(dim)])?.requires_grad(), weights(Replicate)?);
                    let most = usize::from(dim as usize >= 3 - last);
                    let (y, grads, calls) = counted_both_ways(&world, || run(&x, &v))?;
                    assert!(calls[0].len() <= most && calls[1].len() <= most, "{what}: {calls:?}");
                    assert_close(&y, &expected, &what);
                    if let (Some([w, _]), 0) = (&v, most) {
                        assert!(grads.get(w)?.layout().is_partial(), "{what}");
                    }
                    let found = run(&x, &v)?.square()?.sum_all()?.backward()?;
                    assert_close(found.get(&x)?, wanted.get(&whole)?, &what);
                    for (v, w) in v.iter().flatten().zip(w.iter().flatten()) {
                        assert_close(found.get(v)?, wanted.get(w)?, &what);
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn merged_statistics_are_accurate_far_from_zero_and_differentiable_twice() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        // uneven shards, one of them empty, and a mean that is 1e8 deviations from zero
        for placement in [Shard(1), Placement::ragged(1, [0, 5, 1, 3]), Placement::strided(1, 3)] {
            let x = (tensor(&mesh, &[4, 9], std::slice::from_ref(&placement))? + 1e8)?;
            let whole = x.redistribute([Replicate])?;
            for (found, expected) in [
                (x.var(&[1], 1.0, false)?, whole.var(&[1], 1.0, false)?),
                (x.std(&[0, 1], 0.0, true)?, whole.std(&[0, 1], 0.0, true)?),
                (x.layer_norm(1, None, None, 1e-5)?, whole.layer_norm(1, None, None, 1e-5)?),
            ] {
                // the mean is known to 1e-8, a unit in the last place of the elements
                assert!(found.allclose(&expected, 1e-6, 1e-7)?, "{placement}");
            }
            let twice = |x: &DTensor| -> Result<DTensor> {
                let x = x.detach().requires_grad();
                let first =
                    x.sub(1e8)?.layer_norm(1, None, None, 1e-5)?.pow_scalar(3.0)?.sum_all()?.backward_graph()?;
                Ok(first.get(&x)?.square()?.sum_all()?.backward()?.get(&x)?.clone())
            };
            assert!(twice(&x)?.allclose(&twice(&whole)?, 1e-6, 1e-9)?, "{placement}");
        }
        Ok(())
    });
}

#[test]
fn the_deviation_of_two_sharded_dimensions_takes_one_collective() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let all = Tensor::new(&[[-20f64, -18.0, -12.0, 0.0], [-20.0, -18.0, -8.0, 4.0]], &Device::Cpu)?;
        let x = DTensor::distribute_tensor(&all, &mesh, [Shard(0), Shard(1)], None)?;
        let (y, calls) = counted(&world, || x.std(&[1], 1.0, false))?;
        assert!(calls.len() <= 1, "{calls:?}");
        let found = list(&y)?;
        let expected = all.var(1)?.sqrt()?.to_vec1::<f64>()?;
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
        Ok(())
    });
}

#[test]
fn selections_and_norms_have_the_placements_of_pytorch() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for (placement, most) in [(Shard(0), 1), (Shard(1), 0), (Shard(2), 0), (Replicate, 0)] {
            let x = tensor(&mesh, &[12, 8, 8], std::slice::from_ref(&placement))?;
            let ((values, _), calls) = counted(&world, || x.topk(3, 0, true))?;
            assert!(calls.len() <= most, "{placement}: {calls:?}");
            assert_close(&values, &x.redistribute([Replicate])?.topk(3, 0, true)?.0, "topk");
        }
        let x = tensor(&mesh, &[12, 8], &[Shard(0)])?;
        for (order, op) in [
            (f64::INFINITY, ReduceOp::Max),
            (f64::NEG_INFINITY, ReduceOp::Min),
            (1.0, ReduceOp::Sum),
            (0.0, ReduceOp::Sum),
        ] {
            let (norm, calls) = counted(&world, || x.norm(order, &[], false))?;
            assert_eq!((norm.placements(), calls.len()), (&[Partial(op)][..], 0), "norm {order}");
        }
        for power in [1.0, 2.0, 3.0] {
            let (sum, calls) = counted(&world, || x.abs()?.pow_scalar(power)?.sum(&[], false))?;
            assert_eq!((sum.placements(), calls.len()), (&[SUM][..], 0));
            assert_close(&sum, &x.redistribute([Replicate])?.abs()?.pow_scalar(power)?.sum(&[], false)?, "powers");
        }
        // a norm of 2 of [1, 1, 7, 7] is 10, whatever it is combined with
        let values = Tensor::new(&[1f64, 1.0, 7.0, 7.0], &Device::Cpu)?;
        let norm = DTensor::distribute_tensor(&values, &mesh, [Shard(0)], None)?.norm(2.0, &[], false)?;
        for (found, expected) in [
            ((&norm * 2.0)?, 20.0),
            ((&norm / 2.0)?, 5.0),
            ((&norm * -2.0)?, -20.0),
            ((&norm + 1.0)?, 11.0),
            ((&norm - 1.0)?, 9.0),
        ] {
            assert!((found.item::<f64>()? - expected).abs() < 1e-12);
        }
        // a histogram with given bounds counts without communication; PyTorch needs one all-gather without them
        let (counts, calls) = counted(&world, || x.histc(5, -3.0, 3.0))?;
        assert!(calls.is_empty(), "{calls:?}");
        assert_close(&counts, &x.redistribute([Replicate])?.histc(5, -3.0, 3.0)?, "histc");
        Ok(())
    });
}

#[test]
fn norms_stay_on_the_meshes_of_their_tensors() {
    on(4, |world| {
        let mesh = world.mesh([("x", 2), ("y", 2)])?;
        let (first, second) = (mesh.slice(["x"])?, mesh.slice(["y"])?);
        for part in [&first, &second] {
            let x = tensor(part, &[4, 4], &[Shard(0)])?;
            let (norm, calls) = counted(&world, || x.norm(2.0, &[], false))?;
            assert!(norm.device_mesh() == part && calls.len() <= 1);
            assert_close(&norm, &x.redistribute([Replicate])?.norm(2.0, &[], false)?, "norm");
        }
        let (a, b) = (tensor(&first, &[4, 4], &[Shard(0)])?, tensor(&second, &[4, 4], &[Shard(0)])?);
        assert!(a.add(&b).is_err());
        Ok(())
    });
}

#[test]
fn products_follow_the_shards_of_their_factors() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let of = |shape: &[usize], placement: Placement| tensor(&mesh, shape, &[placement]);
        // the bias scalar, per column, per row and full
        for bias in [vec![], vec![4], vec![1, 4], vec![12, 1], vec![12, 4]] {
            let cases = [
                (Shard(0), Replicate, Replicate, vec![Shard(0)]),
                (Replicate, Shard(1), Replicate, vec![Shard(1)]),
                (Replicate, Replicate, Replicate, vec![Replicate]),
                (Shard(1), Shard(0), SUM, vec![SUM]),
            ];
            for (left, right, start, expected) in cases {
                let (a, b, c) = (of(&[12, 8], left)?, of(&[8, 4], right)?, of(&bias, start)?);
                let (y, calls) = counted(&world, || c.addmm(&a, &b, 1.0, 1.0))?;
                assert!(calls.is_empty(), "{bias:?}: {calls:?}");
                assert_eq!(y.placements(), expected, "{bias:?}");
                let whole = |x: &DTensor| x.redistribute([Replicate]);
                assert_close(&y, &whole(&c)?.addmm(&whole(&a)?, &whole(&b)?, 1.0, 1.0)?, "addmm");
            }
        }
        // nothing to add up: the bias in every row
        let y = of(&[4], Replicate)?.addmm(&of(&[12, 0], Shard(0))?, &of(&[0, 4], Replicate)?, 1.0, 1.0)?;
        assert_eq!(list(&y)?, list(&of(&[4], Replicate)?)?.repeat(12));
        // fewer rows than ranks
        let (y, calls) = counted(&world, || of(&[3, 8], Shard(0))?.matmul(&of(&[8, 5], Replicate)?))?;
        assert_eq!((y.placements(), calls.len()), (&[Shard(0)][..], 0));
        // tensordot over the first dimensions
        for (a, b) in [
            (Shard(0), Shard(0)),
            (Shard(0), Replicate),
            (Replicate, Shard(1)),
            (Shard(1), Shard(1)),
            (Replicate, Replicate),
        ] {
            let y = DTensor::einsum("ki,kj->ij", &[&of(&[4, 4], a)?, &of(&[4, 15], b)?])?;
            let whole = DTensor::einsum("ki,kj->ij", &[&of(&[4, 4], Replicate)?, &of(&[4, 15], Replicate)?])?;
            assert_close(&y, &whole, "tensordot");
        }
        for shape in [[2, 2], [4, 1], [1, 4]] {
            let mesh = world.mesh([("a", shape[0]), ("b", shape[1])])?;
            let (a, b) = (
                tensor(&mesh, &[256, 128], &[Shard(0), Replicate])?,
                tensor(&mesh, &[128, 256], &[Replicate, Shard(1)])?,
            );
            let (y, calls) = counted(&world, || a.matmul(&b))?;
            assert_eq!((y.placements(), calls.len()), (&[Shard(0), Shard(1)][..], 0));
        }
        Ok(())
    });
}

#[test]
fn conflicting_factors_send_no_more_bytes_than_gathering_one_of_them() {
    for ranks in [2usize, 4] {
        on(ranks, move |world| {
            let mesh = world.mesh([("a", ranks)])?;
            for (m, k, n) in [(8, 8, 32), (8, 64, 64), (64, 8, 8), (256, 16, 32), (1024, 1024, 8), (8, 1024, 1024)] {
                let (a, b) = (DTensor::randn((m, k), &mesh, [Shard(0)])?, DTensor::randn((k, n), &mesh, [Shard(0)])?);
                world.trace().clear();
                let y = a.matmul(&b)?;
                let y = if y.layout().is_partial() { y.redistribute([Shard(0)])? } else { y };
                let records = world.trace().records();
                let sent: usize = records.iter().map(|record| record.bytes).sum();
                let calls: Vec<String> = records.iter().map(|r| format!("{} {} B", r.call, r.bytes)).collect();
                // PyTorch gathers the second factor.
                world.trace().clear();
                let whole = b.redistribute([Replicate])?;
                let gathered: usize = world.trace().records().iter().map(|record| record.bytes).sum();
                println!("{ranks} ranks, [{m}, {k}] x [{k}, {n}]: {calls:?}; gathering sends {gathered} B");
                assert!(sent <= gathered, "{calls:?}, gathering: {gathered}");
                assert!(calls.len() == 1 || calls.len() == 2 && sent < gathered, "{calls:?}, gathering: {gathered}");
                let whole = a.redistribute([Replicate])?.matmul(&whole)?;
                assert!(y.allclose(&whole, 1e-4, 1e-4)?);
            }
            Ok(())
        });
    }
}

#[test]
fn partial_operands_pass_where_the_function_allows_it() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let replicated = tensor(&mesh, &[2, 1], &[Replicate])?;
        type Function = fn(&DTensor, &DTensor) -> Result<DTensor>;
        // operation, reduction of the left operand, of the right one (none: replicated), collectives, placement of the result
        let (sum, avg, max, min) = (ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min);
        type Case = (&'static str, Function, ReduceOp, Option<ReduceOp>, usize, Option<Placement>);
        let cases: [Case; 10] = [
            ("add", |a, b| a + b, sum, Some(sum), 0, Some(SUM)),
            ("add", |a, b| a + b, sum, None, 0, Some(SUM)),
            ("add", |a, b| a + b, avg, None, 0, Some(AVG)),
            ("mul", |a, b| a * b, sum, None, 0, Some(SUM)),
            ("mul", |a, b| a * b, avg, None, 0, Some(AVG)),
            ("mul", |a, b| a * b, sum, Some(sum), 1, None),
            ("mul", |a, b| a * b, max, None, 1, None),
            ("maximum", |a, b| a.maximum(b), max, Some(max), 0, Some(MAX)),
            ("minimum", |a, b| a.minimum(b), min, Some(min), 0, Some(MIN)),
            ("maximum", |a, b| a.maximum(b), max, Some(sum), 1, Some(MAX)),
        ];
        for (name, function, left, right, most, placement) in cases {
            let a = terms(&mesh, &[2, 2], left)?;
            let b = right.map_or(Ok(replicated.clone()), |op| terms(&mesh, &[2, 2], op))?;
            let (y, calls) = counted(&world, || function(&a, &b))?;
            assert!(calls.len() <= most, "{name} of {left:?} and {right:?}: {calls:?}");
            if let Some(placement) = placement {
                assert_eq!(y.placements(), [placement], "{name} of {left:?} and {right:?}");
            }
            let whole = |x: &DTensor| x.redistribute([Replicate]);
            assert_close(&y, &function(&whole(&a)?, &whole(&b)?)?, name);
        }
        // dropout of a partial sum drops whole sums, and leaves it partial
        mesh.manual_seed(3);
        let dropped = terms(&mesh, &[64], sum)?.dropout(0.5, true)?;
        assert!(list(&dropped)?.iter().all(|x| [0.0, 20.0].contains(x)), "10 or nothing, times 2");
        Ok(())
    });
}

#[test]
fn a_difference_with_a_maximum_is_exact_for_infinities() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        // PyTorch passes the maximum on as a minimum of differences; here -inf - max(3, -inf) would be min(-inf, NaN)
        let mine = Tensor::new(&[if world.rank() == 0 { 3.0 } else { f64::NEG_INFINITY }], &Device::Cpu)?;
        let most = DTensor::from_local_with_shape(&mine, &mesh, [MAX], 1)?;
        let low = DTensor::full(f64::NEG_INFINITY, 1, DType::F64, &mesh, [Replicate])?;
        let (y, calls) = counted(&world, || low.sub(&most))?;
        assert_eq!((list(&y)?, calls.len() <= 1), (vec![f64::NEG_INFINITY], true));
        Ok(())
    });
}

#[test]
fn splitting_and_stacking_keep_partial_sums_and_shards() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let x = terms(&mesh, &[12, 12], op)?;
            for (size, dim) in [(2, 0), (3, 1), (4, 0)] {
                let (parts, calls) = counted(&world, || x.split(size, dim))?;
                assert!(calls.is_empty() && parts.iter().all(|p| p.placements() == [Partial(op)]), "{op:?}");
            }
        }
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let (one, two) = (tensor(&mesh, &[4, 4], &[SUM, Replicate])?, tensor(&mesh, &[4, 4], &[SUM, SUM])?);
        let (y, calls) = counted(&world, || DTensor::stack(&[&one, &two], 0))?;
        assert_eq!((y.placements(), calls.len()), (&[SUM, SUM][..], 0), "{calls:?}");
        let whole = tensor(&mesh, &[4, 4], &[Replicate, Replicate])?;
        assert_close(&y, &DTensor::stack(&[&whole, &whole], 0)?, "stack");
        let x = tensor(&mesh, &[4, 4], &[Replicate, Shard(1)])?;
        for dim in [0, 1] {
            let (y, calls) = counted(&world, || DTensor::stack(&[&x, &x], dim))?;
            assert_eq!((y.placements(), calls.len()), (&[Replicate, Shard(2)][..], 0));
        }
        // another number of inputs is another decision
        let before = cache_report().misses;
        let (two, three) = (DTensor::stack(&[&x, &x], 0)?, DTensor::stack(&[&x, &x, &x], 0)?);
        assert_eq!((two.shape(), three.shape()), (&[2, 4, 4][..], &[3, 4, 4][..]));
        assert!(cache_report().misses > before);
        Ok(())
    });
}

#[test]
fn joining_on_three_axes_moves_the_smaller_part_once() {
    on(8, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2)])?;
        let (a, b) = (
            tensor(&mesh, &[8, 8], &[Replicate, Replicate, Shard(1)])?,
            tensor(&mesh, &[8, 8], &[Shard(1), Shard(1), Shard(1)])?,
        );
        let whole = tensor(&mesh, &[8, 8], &[Replicate, Replicate, Replicate])?;
        let expected = DTensor::cat(&[&whole, &whole], 0)?;
        let (y, calls) = counted(&world, || DTensor::cat(&[&a, &b], 0))?;
        assert!(calls.len() <= 1, "{calls:?}");
        assert_close(&y, &expected, "cat");
        let p = tensor(&mesh, &[8, 8], &[SUM, SUM, SUM])?;
        let (y, calls) = counted(&world, || DTensor::cat(&[&p, &p], 0))?;
        assert_eq!((y.placements(), calls.len()), (&[SUM, SUM, SUM][..], 0));
        let many = vec![&a; 100];
        assert_eq!(DTensor::cat(&many, 0)?.shape(), [800, 8]);
        Ok(())
    });
}

#[test]
fn lookups_stay_where_the_index_or_the_input_is() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let index = |shape: &[usize], placement: Placement| {
            DTensor::from_fn(shape, DType::I64, &mesh, [placement], |i| ((i[0] * 3 + i[1]) % 4) as f64)
        };
        let whole = tensor(&mesh, &[8, 4], &[Replicate])?;
        for (input, at, most) in [(Replicate, Replicate, 0), (Shard(0), Replicate, 0), (Replicate, Shard(0), 0)] {
            let x = tensor(&mesh, &[8, 4], std::slice::from_ref(&input))?;
            let picks = index(&[4, 4], at.clone())?;
            let (y, calls) = counted(&world, || x.gather(0, &picks))?;
            assert!(calls.len() <= most, "{input} {at}: {calls:?}");
            // read twice
            for _ in 0..2 {
                assert_close(&y, &whole.gather(0, &index(&[4, 4], Replicate)?)?, "gather");
            }
        }
        // scatter of a number and of a tensor
        let (picks, source) = (index(&[4, 4], Replicate)?, tensor(&mesh, &[4, 4], &[Replicate])?);
        for dim in [0, 1] {
            let ((a, b), calls) = counted(&world, || {
                Ok((
                    whole.scatter(dim, &picks, &picks.full_like(4)?.to_dtype(DType::F64)?)?,
                    whole.scatter(dim, &picks, &source)?,
                ))
            })?;
            assert!(calls.is_empty() && a.shape() == b.shape());
        }
        // plain numbers where tensors may stand
        let mask = whole.gt(0.0)?;
        assert_eq!(list(&mask.where_cond(1.0, 0.0)?)?, list(&mask)?);
        // slices of the whole dimension, and beyond its end
        let x = tensor(&mesh, &[2, 4], &[Shard(1)])?;
        let (same, calls) = counted(&world, || Ok([x.i((.., ..4))?, x.slice(1, 0, Some(8), 1)?, x.i((..2, ..))?]))?;
        assert!(calls.is_empty() && same.iter().all(|y| y.layout() == x.layout()));
        Ok(())
    });
}

#[test]
fn writes_at_indices_keep_partial_and_other_shards() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let at = |list: &[i64]| DTensor::replicate(&Tensor::new(list, &Device::Cpu)?, &mesh);
        let (x, v) = (tensor(&mesh, &[4, 8], &[SUM])?, terms(&mesh, &[2, 8], ReduceOp::Sum)?);
        for accumulate in [false, true] {
            let (y, calls) = counted(&world, || x.index_put(&[&at(&[1, 3])?], &v, accumulate))?;
            assert_eq!((y.placements(), calls.len()), (&[SUM][..], 0));
            let (one, two) = (x.redistribute([Replicate])?, v.redistribute([Replicate])?);
            assert_close(&y, &one.index_put(&[&at(&[1, 3])?], &two, accumulate)?, "index_put");
        }
        // a row of values that are sharded with the row, and values that broadcast
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let at = |list: &[i64]| DTensor::replicate(&Tensor::new(list, &Device::Cpu)?, &mesh);
        let mut x = tensor(&mesh, &[4, 8], &[Shard(1), Replicate])?;
        let row = tensor(&mesh, &[8], &[Shard(0), Replicate])?;
        let (_, calls) = counted(&world, || x.set((2, ..), &row))?;
        assert!(calls.len() <= 1, "{calls:?}");
        let mut whole = tensor(&mesh, &[4, 8], &[Replicate, Replicate])?;
        whole.set((2, ..), &tensor(&mesh, &[8], &[Replicate, Replicate])?)?;
        assert_close(&x, &whole, "set");
        let mut x = tensor(&mesh, &[4, 8], &[Shard(0), Replicate])?;
        let picks = at(&[0, 3])?.redistribute([Shard(0), Replicate])?;
        x.set(&picks, &tensor(&mesh, &[8], &[Replicate, Replicate])?)?;
        let found = rows(&x.full_tensor()?);
        assert_eq!((&found[0], &found[3]), (&list(&row)?, &list(&row)?));
        // one element by 0-d indices
        x.set((1, 2), 5.0)?;
        assert_eq!(rows(&x.full_tensor()?)[1][2], 5.0);
        Ok(())
    });
}

#[test]
fn class_weights_leave_sharded_classes_where_they_are() {
    on(4, |world| {
        let mesh = world.mesh([("tp", 4)])?;
        for shape in [vec![8, 16], vec![8, 16, 12]] {
            let places: Vec<usize> = shape.iter().enumerate().filter(|(d, _)| *d != 1).map(|(_, n)| *n).collect();
            let target = DTensor::from_fn(places.as_slice(), DType::I64, &mesh, [Replicate], |i| {
                (i.iter().sum::<usize>() * 7 % 16) as f64
            })?;
            let weight = DTensor::from_fn(16, DType::F64, &mesh, [Replicate], |i| 0.5 + i[0] as f64 / 8.0)?;
            for reduction in [Reduction::None, Reduction::Sum, Reduction::Mean] {
                let options = LossOptions { reduction, ..LossOptions::default() };
                let run = |logits: &DTensor, weight: &DTensor| logits.cross_entropy_weighted(&target, weight, options);
                let whole = tensor(&mesh, &shape, &[Replicate])?.requires_grad();
                let expected = run(&whole, &weight)?;
                let wanted = expected.backward_from(&expected.detach().ones_like()?)?;
                for placed in [Replicate, Shard(0)] {
                    let weight = weight.redistribute([placed.clone()])?;
                    let logits = tensor(&mesh, &shape, &[Shard(1)])?.requires_grad();
                    let (loss, grads, calls) = counted_both_ways(&world, || run(&logits, &weight))?;
                    // a maximum and a sum per prediction, the weight of the target if the weights are sharded, and a mean
                    let mean = usize::from(reduction == Reduction::Mean);
                    let most = [2 + mean + usize::from(placed != Replicate), 0];
                    assert!(
                        calls[0].len() <= most[0] && calls[1].len() <= most[1],
                        "{shape:?} {reduction:?} {placed}: {calls:?}"
                    );
                    assert_close(&loss, &expected, "loss");
                    assert_eq!(grads.get(&logits)?.placements(), [Shard(1)]);
                    assert_close(grads.get(&logits)?, wanted.get(&whole)?, "gradient");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_custom_rule_sees_the_dimension_of_a_reduction() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = tensor(&mesh, &[4, 6, 4], &[Replicate])?;
        // shards the first dimension that the operator does not need whole, in the maxima and in where they are
        let rule = |call: &RuleCall<'_>| {
            let (mesh, input) = (call.inputs[0].mesh(), call.inputs[0]);
            let free = |dim: &usize| call.signature.sharding(0, *dim) == Some(DimSharding::Free);
            let Some(dim) = (0..input.shape().len()).find(free) else { return Ok(None) };
            let sharded = |shape: &[usize]| Layout::new(mesh, shape, [Shard(dim as isize)]);
            let outputs = call.outputs.iter().map(|output| sharded(&output.shape)).collect::<Result<Vec<_>>>()?;
            Ok(Some(Decision::new([sharded(input.shape())?], outputs)))
        };
        override_rule(&mesh, "argmax", rule, || {
            for dim in 0..3 {
                for keepdim in [false, true] {
                    let y = x.argmax(Some(dim), keepdim)?;
                    let sharded = if dim > 0 { 0 } else { isize::from(keepdim) };
                    assert_eq!(y.placements(), [Shard(sharded)], "{dim} {keepdim}");
                }
            }
            Ok(())
        })?;
        let expected = x.argmax(Some(1), false)?;
        let found = override_rule(&mesh, "argmax", rule, || x.argmax(Some(1), false))?;
        assert!(found.equal(&expected)?);
        // over everything no dimension is kept
        let all = override_rule(&mesh, "argmax", rule, || x.argmax(None, false))?;
        assert_eq!(all.item::<i64>()?, x.argmax(None, false)?.item::<i64>()?);
        Ok(())
    });
}
