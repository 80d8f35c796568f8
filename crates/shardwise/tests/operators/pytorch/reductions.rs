//! Scenarios of PyTorch's `test_math_ops.py`: reductions, normalizations and losses of sharded and partial tensors.

use candle_core::{Device, Tensor};
use shardwise::ops::{LossOptions, Reduction};
use shardwise::prelude::*;
use shardwise_test_suites::counting::{counted, counted_both_ways};

use crate::pytorch::{assert_close, list, on, replicated, tensor};

type Reduce = fn(&DTensor, &[isize], bool) -> Result<DTensor>;

#[test]
fn reductions_of_a_sharded_dimension_stay_partial() {
    // the reduction that is left to do where the sharded dimension is reduced; none where the result needs more than that
    let all: [(&str, Reduce, Option<ReduceOp>); 11] = [
        ("sum", |x, dims, keep| x.sum(dims, keep), Some(ReduceOp::Sum)),
        ("mean", |x, dims, keep| x.mean(dims, keep), Some(ReduceOp::Sum)),
        ("prod", |x, dims, keep| x.prod(dims, keep), Some(ReduceOp::Product)),
        ("amax", |x, dims, keep| x.amax(dims, keep), Some(ReduceOp::Max)),
        ("amin", |x, dims, keep| x.amin(dims, keep), Some(ReduceOp::Min)),
        ("all", |x, dims, keep| x.gt(-2.5)?.all(dims, keep), Some(ReduceOp::Min)),
        ("any", |x, dims, keep| x.gt(2.5)?.any(dims, keep), Some(ReduceOp::Max)),
        ("var", |x, dims, keep| x.var(dims, 1.0, keep), None),
        ("std", |x, dims, keep| x.std(dims, 1.0, keep), None),
        ("norm", |x, dims, keep| x.norm(2.0, dims, keep), None),
        ("logsumexp", |x, dims, keep| x.logsumexp(dims, keep), None),
    ];
    on(4, move |world| {
        let mesh = world.mesh([("a", 4)])?;
        for shape in [[12, 8, 8], [3, 5, 2]] {
            // small factors, so that products stay finite
            let x = (tensor(&mesh, &shape, &[Shard(0)])? * 0.5)?;
            let whole = replicated(&x)?;
            for (name, reduce, left) in all {
                for dims in [&[0][..], &[1], &[2], &[0, 1, 2]] {
                    for keepdim in [false, true] {
                        let what = format!("{name} of {shape:?} over {dims:?}");
                        let (y, calls) = counted(&world, || reduce(&x, dims, keepdim))?;
                        if !dims.contains(&0) {
                            assert_eq!((y.placements(), calls.len()), (&[Shard(0)][..], 0), "{what}");
                        } else if let Some(op) = left {
                            assert_eq!((y.placements(), calls.len()), (&[Partial(op)][..], 0), "{what}");
                        } else {
                            // a maximum and a sum of exponentials, else one reduction
                            let most = if name == "logsumexp" { 2 } else { 1 };
                            assert!(calls.len() <= most, "{what}: {calls:?}");
                        }
                        let (found, expected) = (y.to_dtype(DType::F64)?, reduce(&whole, dims, keepdim)?);
                        assert_close(&found, &expected.to_dtype(DType::F64)?, &what);
                    }
                }
            }
        }
        // 8 columns over 4 ranks, and 9 rows, of which the ranks have 3, 3, 3 and none
        let (even, uneven) = (tensor(&mesh, &[9, 8], &[Shard(1)])?, tensor(&mesh, &[9, 8], &[Shard(0)])?);
        let (y, calls) = counted(&world, || even.mean(&[1], false))?;
        assert!(y.layout().is_partial() && calls.is_empty());
        assert_close(&y, &replicated(&even)?.mean(&[1], false)?, "mean of columns");
        assert_close(&uneven.mean(&[0], false)?, &replicated(&uneven)?.mean(&[0], false)?, "mean of rows");
        Ok(())
    });
}

#[test]
fn reductions_of_partial_tensors_reduce_first_unless_they_commute() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let rank = world.rank() as f64;
        let of = |values: &[f64], op: ReduceOp| {
            DTensor::from_local(&Tensor::new(values, &Device::Cpu)?, &mesh, [Partial(op)])
        };
        // [0 + 1 + 2 + 3, 4 x 1]
        let sums = of(&[rank, 1.0], ReduceOp::Sum)?;
        for (name, found, expected) in [
            ("norm", sums.norm(2.0, &[], false)?, 52f64.sqrt()),
            ("max", sums.amax(&[], false)?, 6.0),
            ("min", sums.amin(&[], false)?, 4.0),
        ] {
            assert!((found.item::<f64>()? - expected).abs() < 1e-12, "{name}");
        }
        // one rank holds what is not zero
        let holds = |value: f64| if rank == 2.0 { value } else { 0.0 };
        let terms = [0.0, 1.0, 0.0, 3.0, 0.0, 5.0].map(holds);
        let x = of(&terms, ReduceOp::Sum)?;
        let ((zeros, counts), calls) =
            counted(&world, || Ok((x.norm(0.0, &[], false)?, x.count_nonzero(&[], false)?)))?;
        assert!(calls.len() <= 2, "one reduction each: {calls:?}");
        assert_eq!((zeros.item::<f64>()?, counts.item::<i64>()?), (3.0, 3));
        // the maximum of maxima is still to be reduced, that of minima is not
        for (op, passes) in [(ReduceOp::Max, true), (ReduceOp::Min, false)] {
            let x = of(&[rank, -rank], op)?;
            let (y, calls) = counted(&world, || x.amax(&[0], false))?;
            assert!(calls.len() <= usize::from(!passes), "{op:?}: {calls:?}");
            assert!(!passes || y.placements() == [Partial(op)]);
            assert_close(&y, &replicated(&x)?.amax(&[0], false)?, "maximum");
        }
        // a chain: the largest magnitude of three tensors
        for seed in 0..3 {
            let x = (tensor(&mesh, &[8, 3], &[Shard(0)])? - seed as f64)?;
            let (y, calls) = counted(&world, || x.abs()?.amax(&[], false))?;
            assert_eq!((y.placements(), calls.len()), (&[Partial(ReduceOp::Max)][..], 0));
            assert_close(&y, &replicated(&x)?.abs()?.amax(&[], false)?, "largest magnitude");
        }
        Ok(())
    });
}

#[test]
fn a_softmax_stays_sharded_and_communicates_over_its_own_dimension_alone() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for shape in [[8, 12, 16], [3, 5, 4]] {
            for dim in [-1isize, 0, 1, 2] {
                for (name, run) in [
                    ("softmax", (|x, dim| x.softmax(dim)) as fn(&DTensor, isize) -> Result<DTensor>),
                    ("log_softmax", |x, dim| x.log_softmax(dim)),
                ] {
                    let whole = tensor(&mesh, &shape, &[Replicate])?.requires_grad();
                    let expected = run(&whole, dim)?;
                    let wanted = expected.square()?.sum_all()?.backward()?;
                    for sharded in 0..3isize {
                        let what = format!("{name} of {shape:?} over {dim}, sharded on {sharded}");
                        let x = tensor(&mesh, &shape, &[Shard(sharded)])?.requires_grad();
                        let (y, forward) = counted(&world, || run(&x, dim))?;
                        let own = (dim + 3) % 3 == sharded;
                        // PyTorch gathers the tensor once; here a maximum and a sum per row are reduced, of f32 one number (`log_sums.rs`)
                        assert!(forward.len() <= if own { 2 } else { 0 }, "{what}: {forward:?}");
                        assert_eq!(y.placements(), [Shard(sharded)], "{what}");
                        assert_close(&y, &expected, &what);
                        let loss = y.square()?.sum_all()?;
                        assert_eq!(loss.placements(), [Partial(ReduceOp::Sum)], "{what}");
                        let (grads, backward) = counted(&world, || loss.backward())?;
                        assert!(backward.len() <= usize::from(own), "{what}: {backward:?}");
                        assert_eq!(grads.get(&x)?.placements(), [Shard(sharded)], "{what}");
                        assert_close(grads.get(&x)?, wanted.get(&whole)?, &what);
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn losses_of_classes_communicate_where_classes_are_sharded_alone() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        for shape in [vec![8, 16], vec![8, 16, 12]] {
            let places: Vec<usize> = shape.iter().enumerate().filter(|(d, _)| *d != 1).map(|(_, n)| *n).collect();
            let target = |placement: Placement| {
                DTensor::from_fn(places.as_slice(), DType::I64, &mesh, [placement], |i| {
                    (i.iter().sum::<usize>() * 7 % 16) as f64
                })
            };
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                let options = LossOptions { reduction, ..LossOptions::default() };
                let whole = tensor(&mesh, &shape, &[Replicate])?.requires_grad();
                let expected = whole.cross_entropy(&target(Replicate)?, options)?;
                let composed = whole.log_softmax(1)?.nll_loss(&target(Replicate)?, options)?;
                assert_close(&composed, &expected, "a loss in two steps");
                let wanted = expected.backward_from(&expected.detach().ones_like()?)?;
                for dim in 0..shape.len() as isize {
                    // the target's own dimension of a batch dimension, which lacks the classes
                    let beside = [None, Some(Shard(if dim > 1 { dim - 1 } else { dim }))];
                    for placed in beside.into_iter().filter(|p| p.is_none() || dim != 1) {
                        let what = format!("{shape:?} sharded on {dim}, target {placed:?}, {reduction:?}");
                        let sharded = placed.is_some();
                        let ids = target(placed.unwrap_or(Replicate))?;
                        let x = tensor(&mesh, &shape, &[Shard(dim)])?.requires_grad();
                        let (y, grads, calls) = counted_both_ways(&world, || x.cross_entropy(&ids, options))?;
                        // a maximum and a sum of each prediction, of f32 one number (`log_sums.rs`); a mean reduces the loss, and adds up
                        // how many targets count
                        let mean = if reduction == Reduction::Mean { 1 + usize::from(sharded) } else { 0 };
                        let most = if dim == 1 { [2, 0] } else { [mean, 0] };
                        let few = |(calls, most): (&Vec<&str>, usize)| calls.len() <= most;
                        assert!(calls.iter().zip(most).all(few), "{what}: {calls:?}");
                        assert_close(&y, &expected, &what);
                        assert_eq!(grads.get(&x)?.placements(), [Shard(dim)], "{what}");
                        assert_close(grads.get(&x)?, wanted.get(&whole)?, &what);
                    }
                }
            }
        }
        Ok(())
    });
}

#[test]
fn scans_histograms_and_decompositions_take_at_most_one_collective() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        // 3 rows over 4 ranks
        let x = tensor(&mesh, &[3, 5], &[Shard(0)])?;
        for (dim, most) in [(0, 1), (1, 0)] {
            let (y, calls) = counted(&world, || x.cumsum(dim))?;
            assert!(calls.len() <= most, "over {dim}: {calls:?}");
            assert_eq!(y.placements(), [Shard(0)]);
            assert_close(&y, &replicated(&x)?.cumsum(dim)?, "cumsum");
        }
        // without bounds the smallest and the largest element are bounds
        let x = tensor(&mesh, &[12, 8, 8], &[Shard(0)])?;
        for (low, high, most) in [(-3.0, 3.0, 0), (0.0, 0.0, 1)] {
            let (counts, calls) = counted(&world, || x.histc(5, low, high))?;
            assert!(calls.len() <= most, "from {low} to {high}: {calls:?}");
            assert_close(&counts, &replicated(&x)?.histc(5, low, high)?, "histogram");
        }
        let x = tensor(&mesh, &[8, 8], &[Shard(0)])?;
        let ((u, s, v), calls) = counted(&world, || x.linalg_svd(false))?;
        assert!(calls.len() <= 1, "{calls:?}");
        let product = u.mul(&s.unsqueeze(0)?)?.matmul(&v)?;
        assert!(product.allclose(&x, 1e-10, 1e-10)?, "{:?}", list(&product)?);
        Ok(())
    });
}

#[test]
fn arithmetic_with_numbers_is_exact_on_two_axes() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        for placements in [[Shard(0), Shard(0)], [Shard(0), Shard(1)]] {
            let x = DTensor::ones((4, 4), DType::F32, &mesh, placements.clone())?;
            let (all, calls) = counted(&world, || Ok([(&x + 2.0)?, (&x - 2.0)?, (&x * 2.0)?, (&x / 2.0)?]))?;
            assert!(calls.is_empty(), "{calls:?}");
            for (y, expected) in all.iter().zip([3.0, -1.0, 2.0, 0.5]) {
                assert_eq!((y.placements(), list(y)?), (&placements[..], vec![expected; 16]));
            }
        }
        Ok(())
    });
}
