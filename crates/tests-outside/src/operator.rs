//! Custom operators in one file: a row-wise one with its rule, kernel and gradient, and one that is not differentiable.

use shardwise::candle_core::{D, Device, Tensor};
use shardwise::error::ErrorKind;
use shardwise::op::{self, Gradient, KernelContext, Op, OpPlan, cache_report};
use shardwise::prelude::*;
use shardwise::rule::{DimSharding, Signature};
use shardwise::tensor::SaveForBackward;

/// `log_softmax(x * scale)` over the last dimension, where `scale` has one number per row: `[..., n]` and `[...]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct TemperedLogSoftmax;

/// The rule of a function of rows `[..., n]`, and of tensors with one number per row: leading dimensions are sharded together,
/// and a row stays on one rank.
fn rows(ndim: usize, inputs: &[bool], outputs: &[bool]) -> Signature {
    let names = |whole: &bool| (0..if *whole { ndim } else { ndim - 1 }).map(Some).collect();
    let dims = (0..ndim).map(|d| if d + 1 == ndim { DimSharding::Never } else { DimSharding::Free });
    Signature::new(dims, inputs.iter().map(names), outputs.iter().map(names))
}

impl Op for TemperedLogSoftmax {
    fn name(&self) -> &'static str {
        "tempered_log_softmax"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, scale) = (&inputs[0], &inputs[1]);
        if x.shape.split_last().map(|(_, front)| front) != Some(scale.shape.as_slice()) {
            let found = format!("shapes {:?} and {:?}", x.shape, scale.shape);
            return Err(ErrorKind::shape(&scale.shape).error(
                "operands",
                found,
                "[..., n] and [...]",
                "pass one scale per row",
            ));
        }
        Ok(OpPlan { signature: rows(x.shape.len(), &[true, false], &[true]), outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let z = inputs[0].broadcast_mul(&inputs[1].unsqueeze(D::Minus1)?)?;
        if z.elem_count() == 0 {
            return Ok(vec![z]);
        }
        let z = z.broadcast_sub(&z.max_keepdim(D::Minus1)?)?;
        Ok(vec![z.broadcast_sub(&z.exp()?.sum_keepdim(D::Minus1)?.log()?)?])
    }

    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        4 * inputs[0].iter().product::<usize>() as u64
    }

    /// With `p = exp(y)` and `d = g - p * sum(g)` over rows: `d * scale` and the sum of `d * x`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::All, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None, None]) };
            let (x, scale, y) = (saved.input(0), saved.input(1), saved.output(0));
            let d = (g - (y.exp()? * g.sum(&[-1], true)?)?)?;
            let of_x = || &d * scale.unsqueeze(-1)?;
            let of_scale = || (&d * &x)?.sum(&[-1], false);
            Ok(vec![
                saved.needs_input_grad(0).then(of_x).transpose()?,
                saved.needs_input_grad(1).then(of_scale).transpose()?,
            ])
        })
    }
}

/// How many elements of each row are above the first one: a step function of its input.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AboveFirst;

impl Op for AboveFirst {
    fn name(&self) -> &'static str {
        "above_first"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let TensorMeta { shape, dtype } = &inputs[0];
        let outputs = vec![TensorMeta::new(&shape[..shape.len() - 1], *dtype)];
        Ok(OpPlan { signature: rows(shape.len(), &[true], &[false]), outputs })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        if x.elem_count() == 0 {
            return Ok(vec![Tensor::zeros(context.local_shape(0), x.dtype(), x.device())?]);
        }
        let first = x.narrow(D::Minus1, 0, 1)?;
        Ok(vec![x.broadcast_gt(&first)?.to_dtype(x.dtype())?.sum(D::Minus1)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

fn apply<O: Op>(operator: &O, inputs: &[&DTensor]) -> Result<DTensor> {
    Ok(op::apply(operator, inputs)?.swap_remove(0))
}

/// Element `number` of operand `i`.
fn value(number: usize, i: usize) -> f64 {
    ((7 * number + 5 * i) % 11) as f64 / 4.0 - 1.0 + number as f64 * 0.01
}

fn filled(shape: &[usize], i: usize) -> Result<Tensor> {
    let count = shape.iter().product();
    Ok(Tensor::from_vec((0..count).map(|n| value(n, i)).collect::<Vec<f64>>(), shape, &Device::Cpu)?)
}

/// An operand in a placement; the terms of a partial one differ between ranks.
fn operand(mesh: &DeviceMesh, whole: &Tensor, placement: &Placement) -> Result<DTensor> {
    let (rank, ranks) = (mesh.world().rank() as f64, mesh.size() as f64);
    let local = match placement {
        // The terms of 0 to k - 1, less their mean, add up to nothing.
        Partial(ReduceOp::Sum) => ((whole / ranks)? + (rank - (ranks - 1.0) / 2.0))?,
        Partial(ReduceOp::Avg) => (whole + (rank - (ranks - 1.0) / 2.0))?,
        Partial(_) => (whole - rank)?,
        other => return Ok(DTensor::distribute_tensor(whole, mesh, [other.clone()], None)?.requires_grad()),
    };
    Ok(DTensor::from_local_with_shape(&local, mesh, [placement.clone()], whole.dims())?.requires_grad())
}

/// Every placement along one axis: the sizes that ranks hold of a ragged one rise with the rank.
fn placements(shape: &[usize], ranks: usize) -> Vec<Placement> {
    let mut all = vec![Replicate, Partial(ReduceOp::Sum), Partial(ReduceOp::Avg), Partial(ReduceOp::Max)];
    for (dim, &n) in shape.iter().enumerate() {
        all.push(Shard(dim as isize));
        all.push(Placement::StridedShard { dim: dim as isize, split_factor: 2 });
        let mut sizes: Vec<usize> = (0..ranks - 1).map(|r| r.min(n / ranks)).collect();
        sizes.push(n - sizes.iter().sum::<usize>());
        all.push(Placement::ragged(dim as isize, sizes));
    }
    all
}

fn numbers(t: &Tensor) -> Result<Vec<f64>> {
    Ok(t.flatten_all()?.to_vec1()?)
}

fn assert_near(found: &[f64], expected: &[f64], at: &str) {
    assert_eq!(found.len(), expected.len(), "{at}");
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() <= 1e-12 * b.abs().max(1.0), "{at}: {a} and {b}");
    }
}

/// A number that weighs every element differently.
fn loss(y: &DTensor) -> Result<DTensor> {
    let weights = filled(y.shape(), 3)?;
    (y * &DTensor::replicate(&weights, y.device_mesh())?)?.sum_all()
}

/// The value and both gradients, as whole tensors.
fn value_and_gradients(x: &DTensor, scale: &DTensor) -> Result<[Vec<f64>; 3]> {
    let y = apply(&TemperedLogSoftmax, &[x, scale])?;
    let gradients = loss(&y)?.backward()?;
    let whole = |t: &DTensor| numbers(&t.full_tensor()?);
    Ok([whole(&y)?, whole(gradients.get(x)?)?, whole(gradients.get(scale)?)?])
}

const SHAPES: [[&[usize]; 2]; 2] = [[&[4, 3, 5], &[4, 3]], [&[5, 2], &[5]]];

#[test]
fn value_and_gradient_equal_the_unsharded_ones_in_every_placement() {
    for ranks in [2, 3] {
        launch(ranks, move |world| {
            let mesh = world.mesh([("a", ranks)])?;
            let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
            for shapes in SHAPES {
                let [x, scale] = [filled(shapes[0], 0)?, filled(shapes[1], 1)?];
                let expected =
                    value_and_gradients(&operand(&alone, &x, &Replicate)?, &operand(&alone, &scale, &Replicate)?)?;
                for first in placements(shapes[0], ranks) {
                    for second in placements(shapes[1], ranks) {
                        let found =
                            value_and_gradients(&operand(&mesh, &x, &first)?, &operand(&mesh, &scale, &second)?)?;
                        for (found, expected) in found.iter().zip(&expected) {
                            assert_near(found, expected, &format!("{first} and {second} on {ranks} ranks"));
                        }
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn the_gradient_matches_finite_differences() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let [x, scale] = [filled(&[4, 3], 0)?, filled(&[4], 1)?];
        let of = |x: &Tensor, scale: &Tensor| -> Result<f64> {
            let inputs = [operand(&mesh, x, &Shard(0))?, operand(&mesh, scale, &Shard(0))?];
            loss(&apply(&TemperedLogSoftmax, &[&inputs[0], &inputs[1]])?)?.item::<f64>()
        };
        let leaves = [operand(&mesh, &x, &Shard(0))?, operand(&mesh, &scale, &Shard(0))?];
        let [_, of_x, of_scale] = value_and_gradients(&leaves[0], &leaves[1])?;
        let moved = |t: &Tensor, i: usize, by: f64| -> Result<Tensor> {
            let mut values = numbers(t)?;
            values[i] += by;
            Ok(Tensor::from_vec(values, t.dims(), &Device::Cpu)?)
        };
        let h = 1e-5;
        for (i, slope) in of_x.iter().enumerate() {
            let difference = of(&moved(&x, i, h)?, &scale)? - of(&moved(&x, i, -h)?, &scale)?;
            assert!((difference / (2.0 * h) - slope).abs() < 1e-8, "x {i}: {} and {slope}", difference / (2.0 * h));
        }
        for (i, slope) in of_scale.iter().enumerate() {
            let difference = of(&x, &moved(&scale, i, h)?)? - of(&x, &moved(&scale, i, -h)?)?;
            assert!((difference / (2.0 * h) - slope).abs() < 1e-8, "scale {i}: {} and {slope}", difference / (2.0 * h));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn sharded_rows_communicate_nothing_and_redistributions_are_traced() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let (x, scale) = (filled(&[4, 6], 0)?, filled(&[4], 1)?);
        let sent = || world.trace().records().into_iter().filter(|r| r.call != "agree").collect::<Vec<_>>();
        let rows = [operand(&mesh, &x, &Shard(0))?, operand(&mesh, &scale, &Replicate)?];
        world.trace().clear();
        let y = apply(&TemperedLogSoftmax, &[&rows[0], &rows[1]])?;
        assert_eq!((y.placements(), sent().len()), (&[Shard(0)][..], 0));
        let columns = operand(&mesh, &x, &Shard(1))?;
        let y = apply(&TemperedLogSoftmax, &[&columns, &rows[1]])?;
        let records = sent();
        assert_eq!((y.placements(), records.len()), (&[Shard(0)][..], 1), "{records:?}");
        assert!(records[0].site.to_string().contains("operator.rs"), "{}", records[0].site);
        // Inside a scope that allows no redistribution, the error names the operator.
        let refused = shardwise::explicit_communication_only(|| apply(&TemperedLogSoftmax, &[&columns, &rows[1]]));
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("tempered_log_softmax"), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn decisions_are_cached_and_errors_name_invalid_operands() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let [x, scale] =
            [operand(&mesh, &filled(&[4, 6], 0)?, &Shard(0))?, operand(&mesh, &filled(&[4], 1)?, &Shard(0))?];
        apply(&TemperedLogSoftmax, &[&x, &scale])?;
        let before = cache_report();
        for _ in 0..5 {
            apply(&TemperedLogSoftmax, &[&x, &scale])?;
        }
        let after = cache_report();
        assert_eq!((after.hits - before.hits, after.misses - before.misses), (5, 0));
        let error = apply(&TemperedLogSoftmax, &[&x, &x]).unwrap_err().to_string();
        assert!(error.contains("one scale per row") && error.contains("tempered_log_softmax("), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_result_that_is_not_differentiable_is_a_constant_and_its_gradient_an_error() {
    for ranks in [2, 3] {
        launch(ranks, move |world| {
            let mesh = world.mesh([("a", ranks)])?;
            let whole = filled(&[5, 4], 0)?;
            let expected: Vec<f64> =
                whole.to_vec2::<f64>()?.iter().map(|row| row.iter().filter(|x| **x > row[0]).count() as f64).collect();
            for placement in placements(&[5, 4], ranks) {
                let x = operand(&mesh, &whole, &placement)?;
                let counts = apply(&AboveFirst, &[&x])?;
                assert_eq!(numbers(&counts.full_tensor()?)?, expected, "{placement}");
                assert!(!counts.has_gradient());
                let error = counts.sum_all()?.backward().unwrap_err().to_string();
                assert!(error.contains("depends on no leaf"), "{error}");
                // Together with something that is differentiable it is a factor.
                let gradients = (x.sum(&[1], false)? * counts)?.sum_all()?.backward()?;
                let rows = numbers(&gradients.get(&x)?.full_tensor()?)?;
                assert_eq!(rows, expected.iter().flat_map(|n| [*n; 4]).collect::<Vec<_>>(), "{placement}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// The sum of rows, with a gradient of the wrong shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct WrongGradient;

impl Op for WrongGradient {
    fn name(&self) -> &'static str {
        "wrong_gradient"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let TensorMeta { shape, dtype } = &inputs[0];
        let outputs = vec![TensorMeta::new(&shape[..shape.len() - 1], *dtype)];
        Ok(OpPlan { signature: rows(shape.len(), &[true], &[false]), outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[0].sum(D::Minus1)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |_, _, gradients| Ok(gradients.to_vec()))
    }
}

#[test]
fn a_gradient_of_another_shape_is_an_error_that_names_the_operator() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        let x = operand(&mesh, &filled(&[4, 3], 0)?, &Shard(0))?;
        let error = apply(&WrongGradient, &[&x])?.sum_all()?.backward().unwrap_err().to_string();
        assert!(error.contains("[4] from wrong_gradient") && error.contains("[4, 3]"), "{error}");
        Ok(())
    })
    .unwrap();
}
