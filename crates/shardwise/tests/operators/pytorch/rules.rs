//! Scenarios of PyTorch's `test_common_rules.py`, `test_op_strategy.py`, `test_single_dim_strategy.py`, `test_decompositions.py` and
//! `test_dtensor_logging.py`: which placements operators pass on, and which decisions are kept.

use shardwise::op::cache_report;
use shardwise::ops::{FftNorm, Reduction};
use shardwise::prelude::*;
use shardwise_test_suites::counting::counted;

use crate::pytorch::{assert_close, list, on, replicated, tensor};

const SUM: Placement = Partial(ReduceOp::Sum);

/// How many decisions of a call were not in the cache.
fn decided<T>(body: impl FnOnce() -> Result<T>) -> Result<usize> {
    let before = cache_report().misses;
    body()?;
    Ok(cache_report().misses - before)
}

#[test]
fn decisions_are_kept_per_argument_placement_shape_and_number_of_inputs() {
    on(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = tensor(&mesh, &[4, 6, 8], &[Shard(0)])?;
        type Call = fn(&DTensor) -> Result<()>;
        // pairs that differ in only one argument
        let pairs: [(&str, Call, Call); 4] = [
            ("sort", |x| x.sort(0, false).map(drop), |x| x.sort(1, false).map(drop)),
            ("chunk", |x| x.chunk(2, 1).map(drop), |x| x.chunk(2, 2).map(drop)),
            ("aminmax", |x| x.aminmax(None, false).map(drop), |x| x.aminmax(Some(1), false).map(drop)),
            ("stack", |x| DTensor::stack(&[x, x], 0).map(drop), |x| DTensor::stack(&[x, x, x], 0).map(drop)),
        ];
        for (name, first, second) in pairs {
            assert!(decided(|| first(&x))? > 0, "{name}");
            assert!(decided(|| second(&x))? > 0, "another argument of {name}");
            assert_eq!(decided(|| first(&x).and_then(|()| second(&x)))?, 0, "{name} again");
            for other in [tensor(&mesh, &[4, 6, 8], &[Shard(1)])?, tensor(&mesh, &[4, 6, 10], &[Shard(0)])?] {
                assert!(decided(|| first(&other))? > 0, "{name} of {}", other.layout());
                assert_eq!(decided(|| first(&other))?, 0, "{name} of {} again", other.layout());
            }
        }
        // and the results are those of their own arguments
        let whole = replicated(&x)?;
        for dim in [0, 1, 0] {
            assert_close(&x.sort(dim, false)?.0, &whole.sort(dim, false)?.0, "sort");
        }
        for dim in [1, 2, 1] {
            for (found, expected) in x.chunk(2, dim)?.iter().zip(&whole.chunk(2, dim)?) {
                assert_close(found, expected, "chunk");
            }
        }
        for dim in [None, Some(1), None] {
            let (found, expected) = (x.aminmax(dim, false)?, whole.aminmax(dim, false)?);
            assert_close(&found.0, &expected.0, "smallest");
            assert_close(&found.1, &expected.1, "largest");
        }
        Ok(())
    });
}

#[test]
fn shards_follow_the_larger_operand() {
    on(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let of = |shape: &[usize], text: &str| tensor(&mesh, shape, &Placement::parse_list(text)?);
        type Function = fn(&DTensor, &DTensor) -> Result<DTensor>;
        let (add, mm): (Function, Function) = (|a, b| a.add(b), |a, b| a.matmul(b));
        // operands with their placements, the placements of the result; nothing is communicated
        type Case = (Function, &'static [usize], &'static str, &'static [usize], &'static str);
        let cases: [(Case, &str); 9] = [
            ((add, &[8, 6], "S(0),R", &[8, 6], "S(0),R"), "S(0),R"),
            ((add, &[4, 6, 8], "R,S(2)", &[8], "R,S(0)"), "R,S(2)"),
            ((add, &[4, 6, 8], "S(1),S(2)", &[1, 8], "R,S(1)"), "S(1),S(2)"),
            ((add, &[20, 6], "S(1),R", &[6], "S(0),R"), "S(1),R"),
            ((mm, &[8, 4], "R,R", &[4, 6], "S(1),R"), "S(1),R"),
            ((mm, &[8, 4], "S(0),R", &[4, 6], "R,R"), "S(0),R"),
            ((mm, &[8, 4], "S(1),R", &[4, 6], "S(0),R"), "P(sum),R"),
            ((mm, &[8, 4], "S(0),R", &[4, 6], "R,S(1)"), "S(0),S(1)"),
            ((mm, &[8, 4], "P(sum),S(0)", &[4, 6], "R,R"), "P(sum),S(0)"),
        ];
        for ((function, left, a, right, b), result) in cases {
            let what = format!("{left:?} {a} and {right:?} {b}");
            let (x, y) = (of(left, a)?, of(right, b)?);
            let (z, calls) = counted(&world, || function(&x, &y))?;
            assert!(calls.is_empty(), "{what}: {calls:?}");
            assert_eq!(z.placements(), Placement::parse_list(result)?, "{what}");
            assert_close(&z, &function(&replicated(&x)?, &replicated(&y)?)?, &what);
        }
        // sums that are partial along different axes, and one dimension that two axes shard: PyTorch moves the first or refuses
        let conflicts: [Case; 3] = [
            (add, &[12, 1, 1, 8], "S(0),R", &[12, 4, 8], "S(0),R"),
            (mm, &[8, 4], "S(1),R", &[4, 6], "R,S(0)"),
            (add, &[8, 6], "S(0),R", &[8, 6], "R,S(0)"),
        ];
        for (function, left, a, right, b) in conflicts {
            let (x, y) = (of(left, a)?, of(right, b)?);
            let (z, calls) = counted(&world, || function(&x, &y))?;
            assert!(calls.len() <= 2, "{left:?} {a} and {right:?} {b}: {calls:?}");
            assert_close(&z, &function(&replicated(&x)?, &replicated(&y)?)?, "conflict");
        }
        // a condition of 8, a number and a (1,1): the result is (1,8), sharded as the condition
        let condition = of(&[8], "S(0),R")?.gt(0.0)?;
        let (number, one) = (of(&[], "R,R")?, of(&[1, 1], "R,R")?);
        let (y, calls) = counted(&world, || condition.where_cond(&number, &one))?;
        assert_eq!((y.shape(), y.placements()), (&[1, 8][..], &[Shard(1), Replicate][..]));
        assert!(calls.is_empty(), "{calls:?}");
        assert_close(&y, &replicated(&condition)?.where_cond(&number, &one)?, "where");
        // conditions and branches that are sharded on different dimensions
        for (c, a, b) in [("S(0),R", "S(1),R", "R,R"), ("R,R", "S(0),R", "S(1),R"), ("S(1),R", "S(1),R", "S(0),S(1)")] {
            let (condition, x, y) = (of(&[8, 6], c)?.gt(0.0)?, of(&[8, 6], a)?, (of(&[8, 6], b)? - 50.0)?);
            let z = condition.where_cond(&x, &y)?;
            assert_close(&z, &replicated(&condition)?.where_cond(&replicated(&x)?, &replicated(&y)?)?, "where");
        }
        // operands that have to move keep the number between them
        let (x, y) = (of(&[8, 6], "S(0),R")?, of(&[8, 6], "S(1),R")?);
        assert_close(&x.lerp(&y, -0.5)?, &replicated(&x)?.lerp(&replicated(&y)?, -0.5)?, "lerp");
        Ok(())
    });
}

#[test]
fn sums_and_products_on_three_axes_combine_the_shards_of_their_operands() {
    on(8, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2)])?;
        let of = |text: &str| tensor(&mesh, &[8, 8], &Placement::parse_list(text)?);
        type Function = fn(&DTensor, &DTensor) -> Result<DTensor>;
        let cases: [(Function, &str, &str, &str); 5] = [
            (|a, b| a.add(b), "R,S(0),S(1)", "R,R,R", "R,S(0),S(1)"),
            (|a, b| a.add(b), "R,R,S(1)", "S(0),R,R", "S(0),R,S(1)"),
            (|a, b| a.matmul(b), "S(0),R,S(1)", "R,S(1),S(0)", "S(0),S(1),P(sum)"),
            (|a, b| a.matmul(b), "S(0),S(0),R", "R,R,S(1)", "S(0),S(0),S(1)"),
            (|a, b| a.matmul(b), "SS(0,2),S(0),R", "R,R,S(1)", "SS(0,2),S(0),S(1)"),
        ];
        for (function, left, right, result) in cases {
            let (x, y) = (of(left)?, of(right)?);
            let (z, calls) = counted(&world, || function(&x, &y))?;
            assert!(calls.is_empty(), "{left} and {right}: {calls:?}");
            assert_eq!(z.placements(), Placement::parse_list(result)?, "{left} and {right}");
            assert_close(&z, &function(&replicated(&x)?, &replicated(&y)?)?, left);
        }
        Ok(())
    });
}

#[test]
fn composed_operators_have_the_placements_of_their_parts() {
    on(4, |world| {
        let mesh = world.mesh([("a", 4)])?;
        let x = tensor(&mesh, &[8, 6, 4], &[Shard(0)])?;
        let whole = replicated(&x)?;
        let ((low, high), calls) = counted(&world, || x.aminmax(None, false))?;
        assert!(calls.is_empty(), "{calls:?}");
        assert_eq!(
            (low.placements(), high.placements()),
            (&[Partial(ReduceOp::Min)][..], &[Partial(ReduceOp::Max)][..])
        );
        let expected = whole.aminmax(None, false)?;
        assert_eq!((list(&low)?, list(&high)?), (list(&expected.0)?, list(&expected.1)?));
        // means of losses stay partial
        let target = (&x * 0.5)?;
        type Loss = fn(&DTensor, &DTensor) -> Result<DTensor>;
        let losses: [(&str, Loss); 3] = [
            ("bce_with_logits", |x, y| x.bce_with_logits(&y.sigmoid()?, Reduction::Mean)),
            ("mse_loss", |x, y| x.mse_loss(y, Reduction::Mean)),
            ("smooth_l1_loss", |x, y| x.smooth_l1_loss(y, 1.0, Reduction::Mean)),
        ];
        for (name, loss) in losses {
            let (y, calls) = counted(&world, || loss(&x, &target))?;
            assert!(y.layout().is_partial() && calls.is_empty(), "{name}: {calls:?}");
            assert_close(&y, &loss(&whole, &replicated(&target)?)?, name);
        }
        // what moves nothing along the sharded dimension keeps it
        type Unary = fn(&DTensor) -> Result<DTensor>;
        let kept: [(&str, Unary); 8] = [
            ("roll", |x| x.roll(&[1, -2], &[1, 2])),
            ("flip", |x| x.flip(&[1, 2])),
            ("glu", |x| x.glu(1)),
            ("fft_hfft", |x| x.fft_hfft(None, -1, FftNorm::Ortho)),
            ("fft_irfftn", |x| x.fft_irfftn(None, Some(&[1, 2]), FftNorm::Backward)),
            ("fft_fftshift", |x| x.fft_fftshift(Some(&[1, 2]))),
            ("cumsum", |x| x.cumsum(2)),
            ("pad", |x| x.pad(&[(0, 0), (1, 2)], 0.0)),
        ];
        for (name, function) in kept {
            let (y, calls) = counted(&world, || function(&x))?;
            assert_eq!((y.placements(), calls.len()), (&[Shard(0)][..], 0), "{name}: {calls:?}");
            assert_close(&y, &function(&whole)?, name);
        }
        // rolling the flat elements, or along the sharded dimension, moves the borders
        for (shifts, dims) in [(&[5][..], &[][..]), (&[3], &[0])] {
            assert_close(&x.roll(shifts, dims)?, &whole.roll(shifts, dims)?, "roll");
        }
        let least = x.amin(&[0], true)?;
        let (wide, calls) = counted(&world, || least.expand(&[5, 6, 4]))?;
        assert_eq!((wide.placements(), calls.len()), (&[Partial(ReduceOp::Min)][..], 0));
        assert_close(&wide, &whole.amin(&[0], true)?.expand(&[5, 6, 4])?, "expand");
        Ok(())
    });
}

#[test]
fn joining_fewer_columns_than_ranks_is_right() {
    on(8, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2), ("c", 2)])?;
        // 4 columns over 8 ranks: the last axis has nothing left to divide
        for (a, b) in
            [("S(1),S(1),S(1)", "R,R,S(1)"), ("S(1),S(1),S(1)", "S(1),S(1),S(1)"), ("P(sum),R,S(1)", "R,S(1),R")]
        {
            let (x, y) = (
                tensor(&mesh, &[3, 4], &Placement::parse_list(a)?)?,
                tensor(&mesh, &[5, 4], &Placement::parse_list(b)?)?,
            );
            let joined = DTensor::cat(&[&x, &y], 0)?;
            assert_close(&joined, &DTensor::cat(&[&replicated(&x)?, &replicated(&y)?], 0)?, "cat");
        }
        let x = tensor(&mesh, &[2, 4], &[SUM, SUM, Replicate])?;
        let many = DTensor::cat(&[&x; 100], 0)?;
        assert_eq!(list(&many)?, list(&x)?.repeat(100));
        Ok(())
    });
}
