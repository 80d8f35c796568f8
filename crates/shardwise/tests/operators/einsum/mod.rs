//! Einsum against PyTorch's results for random equations, which `record.py` records: values and gradients in several
//! placements on two and three ranks. All elements are integers in f64, so that results must be equal.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use shardwise::DryWorld;
use shardwise::prelude::*;

/// A recorded call; one that PyTorch rejects has no output.
#[derive(Deserialize)]
struct Case {
    equation: String,
    shapes: Vec<Vec<usize>>,
    output_shape: Option<Vec<usize>>,
    #[serde(default)]
    output: Vec<i64>,
    #[serde(default)]
    gradients: Vec<Vec<i64>>,
}

fn cases() -> Vec<Case> {
    serde_json::from_str(include_str!("vectors.json")).unwrap()
}

/// The number of placement combinations that are tried per call.
const COMBINATIONS: usize = 10;

/// An element of an operand, as `record.py` has it.
fn value(number: usize, operand: usize) -> f64 {
    ((5 * number + 3 * operand + number / 2) % 7) as f64 - 3.0
}

fn filled(shape: &[usize], of: impl Fn(usize) -> f64) -> Tensor {
    let count = shape.iter().product();
    Tensor::from_vec((0..count).map(of).collect::<Vec<f64>>(), shape, &Device::Cpu).unwrap()
}

fn integers(t: &Tensor) -> Vec<i64> {
    let t = t.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    t.into_iter().map(|x| if x.fract() == 0.0 { x as i64 } else { panic!("{x} is not an integer") }).collect()
}

fn placements(ndim: usize) -> Vec<Placement> {
    (0..ndim as isize).map(Shard).chain([Replicate, Partial(ReduceOp::Sum)]).collect()
}

/// Operand number `i` of a call in a placement. The terms of a sum differ between ranks.
fn operand(mesh: &DeviceMesh, shape: &[usize], i: usize, placement: &Placement) -> Result<DTensor> {
    let whole = filled(shape, |n| value(n, i));
    if !placement.is_partial() {
        return Ok(DTensor::distribute_tensor(&whole, mesh, [placement.clone()], None)?.requires_grad());
    }
    let noise = |rank: usize| filled(shape, |n| ((n + 2 * rank) % 3) as f64);
    let local = match mesh.world().rank() {
        0 => (1..mesh.size()).try_fold(whole, |left, rank| left - noise(rank))?,
        rank => noise(rank),
    };
    Ok(DTensor::from_local_with_shape(&local, mesh, [placement.clone()], shape)?.requires_grad())
}

fn check(case: &Case, mesh: &DeviceMesh, chosen: &[Placement]) -> Result<()> {
    let at = format!("{} of {:?} in {chosen:?}", case.equation, case.shapes);
    let each = case.shapes.iter().zip(chosen).enumerate();
    let inputs = each.map(|(i, (shape, p))| operand(mesh, shape, i, p)).collect::<Result<Vec<_>>>()?;
    let product = DTensor::einsum(&case.equation, &inputs.iter().collect::<Vec<_>>());
    let Some(shape) = &case.output_shape else {
        let error = product.err().unwrap_or_else(|| panic!("{at}: PyTorch refuses this")).to_string();
        assert!(error.contains(case.equation.trim()) || error.contains("one size for"), "{at}: {error}");
        return Ok(());
    };
    let product = product.map_err(|e| Error::other(format!("{at}: {e}")))?;
    assert_eq!((product.shape(), &integers(&product.full_tensor()?)), (shape.as_slice(), &case.output), "{at}");
    let weights = filled(shape, |n| (3 * n % 5) as f64 - 2.0);
    let weights = DTensor::distribute_tensor(&weights, mesh, [Replicate], None)?;
    let gradients = product.mul(&weights)?.sum_all()?.backward()?;
    for (i, (input, expected)) in inputs.iter().zip(&case.gradients).enumerate() {
        let gradient = gradients.get(input)?.full_tensor()?;
        assert_eq!(gradient.dims(), input.shape(), "{at}: gradient {i}");
        assert_eq!(&integers(&gradient), expected, "{at}: gradient {i}");
    }
    Ok(())
}

#[test]
fn random_equations_match_pytorch() {
    for ranks in [2, 3] {
        let run = move |world: World| {
            let mesh = world.mesh([("a", ranks)])?;
            let mut checked = 0;
            for (number, case) in cases().iter().enumerate() {
                let options: Vec<Vec<Placement>> = case.shapes.iter().map(|s| placements(s.len())).collect();
                let count: usize = options.iter().map(Vec::len).product();
                let rng = &mut StdRng::seed_from_u64(number as u64);
                for tried in 0..count.min(COMBINATIONS) {
                    let mut left = if count <= COMBINATIONS { tried } else { rng.random_range(0..count) };
                    let mut chosen = Vec::new();
                    for options in &options {
                        chosen.push(options[left % options.len()].clone());
                        left /= options.len();
                    }
                    check(case, &mesh, &chosen)?;
                    checked += 1;
                }
            }
            Ok(checked)
        };
        let checked = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
        println!("{} equations, {} calls on {ranks} ranks", cases().len(), checked[0]);
        assert!(checked[0] > 1500, "{}", checked[0]);
    }
}

#[test]
fn a_diagonal_of_sharded_rows_communicates_nothing_and_has_a_second_derivative() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let x = DTensor::distribute_tensor(&filled(&[5, 5], |n| value(n, 0)), &mesh, [Shard(0)], None)?.requires_grad();
        world.trace().clear();
        let diagonal = DTensor::einsum("ii->i", &[&x])?;
        assert_eq!(diagonal.placements(), [Shard(0)]);
        let first = diagonal.pow_scalar(3.0)?.sum_all()?.backward_graph()?.get(&x)?.clone();
        assert_eq!(first.placements(), [Shard(0)]);
        let sent = world.trace().records().iter().filter(|r| r.call != "agree").count();
        assert_eq!(sent, 0, "{:?}", world.trace().records());
        let on = |n: usize, of: f64| if n.is_multiple_of(6) { of } else { 0.0 };
        let slope = filled(&[5, 5], |n| on(n, 3.0 * value(n, 0) * value(n, 0)));
        assert_eq!(integers(&first.full_tensor()?), integers(&slope));
        let weights = DTensor::distribute_tensor(&filled(&[5, 5], |n| n as f64), &mesh, [Replicate], None)?;
        let second = first.mul(&weights)?.sum_all()?.backward()?.get(&x)?.clone();
        let curvature = filled(&[5, 5], |n| on(n, 6.0 * value(n, 0) * n as f64));
        assert_eq!(integers(&second.full_tensor()?), integers(&curvature));
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn the_cheapest_order_is_the_one_that_runs() {
    // From the left, [300, 2] x [2, 300] would be computed first: 180,000 multiplications and 300 more of each with the
    // vector.
    let shapes: [&[usize]; 3] = [&[300, 2], &[2, 300], &[300]];
    let run = |world: World| {
        let mesh = world.mesh([("a", 1)])?;
        let inputs = shapes.map(|shape| DTensor::ones(shape, DType::F32, &mesh, [Replicate]));
        let [a, b, c] = inputs.map(|x| x.unwrap());
        DTensor::einsum("ij,jk,k->i", &[&a, &b, &c])
    };
    let report = DryWorld::new(1).unwrap().run(run).unwrap();
    assert_eq!(report.value.shape(), [300]);
    assert_eq!(report.flops, 2 * (2 * 300 + 300 * 2));
}

#[test]
fn capital_letters_are_ordinary_labels_and_errors_name_sizes() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2)])?;
        let [x, y] = [[4, 3], [5, 2]].map(|shape| DTensor::ones(&shape[..], DType::F64, &mesh, [Shard(0)]).unwrap());
        for (equation, letter) in [("AB,BC->AC", "`B`, found 3 and 5"), ("ab,bc->ac", "`b`, found 3 and 5")] {
            let error = DTensor::einsum(equation, &[&x, &y]).unwrap_err().to_string();
            assert!(error.contains(&format!("one size for {letter}")), "{error}");
        }
        // More than two: the error is that of the whole equation, before anything is multiplied.
        let error = DTensor::einsum("ij,jk,ki->", &[&x, &y, &x]).unwrap_err().to_string();
        assert!(error.contains("ij,jk,ki->") && error.contains("`j`, found 3 and 5"), "{error}");
        let error = DTensor::einsum("ii->i", &[&x]).unwrap_err().to_string();
        assert!(error.contains("one size for `i` of a diagonal, found 4 and 3"), "{error}");
        // Only einsum broadcasts letters.
        let [thin, wide] =
            [[4, 1], [3, 2]].map(|shape| DTensor::ones(&shape[..], DType::F64, &mesh, [Replicate]).unwrap());
        assert_eq!(DTensor::einsum("ij,jk->ik", &[&thin, &wide])?.full_tensor()?.sum_all()?.to_scalar::<f64>()?, 24.0);
        let error = thin.mm(&wide).unwrap_err().to_string();
        assert!(error.contains("one size for `k`, found 1 and 3"), "{error}");
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}
