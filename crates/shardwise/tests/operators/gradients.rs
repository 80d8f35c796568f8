//! The gradient of every differentiable operator: every placement on one mesh axis against unsharded, and unsharded against
//! finite differences.

use candle_core::{DType, Device, Tensor};
use shardwise::ops::{OpEntry, SampleInput, ops};
use shardwise::prelude::*;
use shardwise_test_suites::values;

/// Operators that are not differentiable: piecewise constant, or with integer results.
const WITHOUT: &[&str] = &[
    "isnan",
    "isfinite",
    "isinf",
    "signbit",
    "logical_not",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "frexp_exponent",
    "bitwise_not",
    "isposinf",
    "isneginf",
    "heaviside",
    "gcd",
    "lcm",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "any",
    "all",
    "count_nonzero",
    "one_hot",
    "bucketize",
    "argsort",
    "argmax",
    "argmin",
    "nonzero",
    "linalg_ldl_factor",
    "linalg_ldl_solve",
    "linalg_matrix_rank",
    "special_scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k1",
    "special_spherical_bessel_j0",
    "special_airy_ai",
];

/// The inputs of a sample as floating-point tensors; indices stay integers.
fn real(samples: &[SampleInput]) -> Vec<SampleInput> {
    let float =
        |s: &SampleInput| SampleInput { dtype: if s.below.is_some() { DType::I64 } else { DType::F64 }, ..s.clone() };
    samples.iter().map(float).collect()
}

/// The value of an element: no two are equal, none is zero, and most are small.
fn value(flat: usize, input: usize) -> f64 {
    values::value(flat + 97 * input) / 16.0 + 0.0123 + flat as f64 * 1.7e-4
}

/// The local tensor of a rank, with different terms on partial axes.
fn local(layout: &Layout, rank: usize, sample: &SampleInput, input: usize) -> Result<Tensor> {
    let mut flat = vec![0usize];
    for (dim, &n) in layout.shape().iter().enumerate() {
        let held = layout.global_indices(rank, dim);
        flat = flat.iter().flat_map(|f| held.iter().map(move |i| f * n + i)).collect();
    }
    let shape = layout.local_shape(rank);
    if let Some(below) = sample.below {
        let index = |&f: &usize| (values::hash(&[f, input]) % below as u64) as i64;
        return Ok(Tensor::from_vec(flat.iter().map(index).collect::<Vec<_>>(), shape, &Device::Cpu)?);
    }
    let coordinate = layout.mesh().coordinate(rank).expect("all ranks are in the mesh");
    let operand = |&f: &usize| {
        let (whole, noise) = (value(f, input), (values::hash(&[f, input, 5]) % 7) as f64 / 4.0);
        let (k, i) = (layout.mesh().shape()[0] as f64, coordinate[0]);
        match &layout.placements()[0] {
            Partial(ReduceOp::Sum) if i == 0 => whole - noise * (k - 1.0),
            Partial(ReduceOp::Sum) => noise,
            Partial(ReduceOp::Avg) if i == 0 => whole - noise * (k - 1.0),
            Partial(ReduceOp::Avg) => whole + noise,
            Partial(ReduceOp::Max) if i == 0 => whole - noise,
            _ => whole,
        }
    };
    Ok(Tensor::from_vec(flat.iter().map(operand).collect::<Vec<_>>(), shape, &Device::Cpu)?)
}

fn leaf(mesh: &DeviceMesh, sample: &SampleInput, placement: &Placement, input: usize) -> Result<DTensor> {
    let layout = Layout::new(mesh.mesh(), sample.shape.as_slice(), [placement.clone()])?;
    let local = local(&layout, mesh.world().rank(), sample, input)?;
    let tensor = DTensor::from_local_with_shape(&local, mesh, [placement.clone()], sample.shape.as_slice())?;
    Ok(if sample.below.is_none() { tensor.requires_grad() } else { tensor })
}

/// A scalar that depends on every output: the sum of products with fixed weights.
fn loss(op: &OpEntry, inputs: &[DTensor]) -> Result<Option<DTensor>> {
    let mut total: Option<DTensor> = None;
    for (i, output) in (op.apply)(inputs)?.iter().enumerate().filter(|(_, y)| y.has_gradient()) {
        let shape = output.shape().to_vec();
        let weight = move |at: &[usize]| {
            let flat = at.iter().zip(&shape).fold(0, |flat, (i, n)| flat * n + i);
            (values::hash(&[flat, i, 11]) % 17) as f64 / 8.0 - 1.0
        };
        let mesh = output.device_mesh();
        let weights = DTensor::from_fn(output.shape(), output.dtype(), mesh, [Replicate], weight)?;
        let part = output.mul(&weights)?.sum_all()?;
        total = Some(total.map_or(Ok(part.clone()), |total| total.add(&part))?);
    }
    Ok(total)
}

/// The gradients of all inputs that have one; zeros where the loss does not depend on one.
fn gradients(op: &OpEntry, inputs: &[DTensor]) -> Result<Option<Vec<Tensor>>> {
    let Some(loss) = loss(op, inputs)? else { return Ok(None) };
    let found = loss.backward()?;
    let one = |x: &DTensor| match found.get(x) {
        Ok(gradient) => gradient.full_tensor(),
        Err(_) => Ok(Tensor::zeros(x.shape(), DType::F64, &Device::Cpu)?),
    };
    inputs.iter().filter(|x| x.has_gradient()).map(one).collect::<Result<Vec<_>>>().map(Some)
}

fn alone(world: &World) -> Result<DeviceMesh> {
    world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)
}

fn numbers(t: &Tensor) -> Vec<f64> {
    if t.elem_count() == 0 { Vec::new() } else { t.flatten_all().unwrap().to_vec1().unwrap() }
}

/// Equal up to the rounding of sums in another order.
fn same(a: &Tensor, b: &Tensor) -> bool {
    let (a_values, b_values) = (numbers(a), numbers(b));
    let scale = b_values.iter().filter(|x| x.is_finite()).fold(1.0, |scale: f64, x| scale.max(x.abs()));
    let close = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-11 * scale;
    a.dims() == b.dims() && a_values.iter().zip(&b_values).all(close)
}

#[test]
fn the_table_says_which_operators_have_a_gradient() {
    ThreadWorld::new(1)
        .unwrap()
        .run(|world| {
            let mesh = alone(&world)?;
            for op in ops() {
                let samples = real(&(op.samples)()[0]);
                let all = samples.iter().enumerate().map(|(i, s)| leaf(&mesh, s, &Replicate, i));
                let inputs = all.collect::<Result<Vec<_>>>()?;
                // operators on integers refuse floating-point inputs
                let has = loss(op, &inputs).is_ok_and(|loss| loss.is_some());
                assert_eq!(has, !WITHOUT.contains(&op.name), "{}", op.name);
                assert_eq!(op.is_differentiable()?, has, "{}", op.name);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_in_every_placement_equal_the_unsharded_gradients() {
    for ranks in [2, 3] {
        let run = move |world: World| {
            let (mesh, one) = (world.mesh([("a", ranks)])?, alone(&world)?);
            let mut checked = 0;
            for op in ops().filter(|op| !WITHOUT.contains(&op.name)) {
                for samples in (op.samples)().iter().map(|s| real(s)) {
                    let leaves = |mesh: &DeviceMesh, chosen: &[Placement]| {
                        let each = samples.iter().zip(chosen).enumerate();
                        each.map(|(i, (s, p))| leaf(mesh, s, p, i)).collect::<Result<Vec<_>>>()
                    };
                    let whole = leaves(&one, &vec![Replicate; samples.len()])?;
                    let Some(expected) = gradients(op, &whole)? else { continue };
                    for chosen in combinations(mesh.mesh(), &samples) {
                        let inputs = leaves(&mesh, &chosen)?;
                        let got = gradients(op, &inputs)?.expect("as the unsharded one");
                        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                            let what = || format!("gradient {i} of {} with {chosen:?} on {samples:?}", op.name);
                            assert!(same(got, expected), "{}: got {got}, expected {expected}", what());
                        }
                        checked += 1;
                    }
                }
            }
            Ok(checked)
        };
        let checked = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
        println!("gradients: {} combinations on {ranks} ranks", checked[0]);
    }
}

/// All combinations of placements of the inputs along one axis. With more than two inputs one at a time is not
/// replicated, and all are sharded on their first dimension once.
fn combinations(mesh: &Mesh, samples: &[SampleInput]) -> Vec<Vec<Placement>> {
    let options = |sample: &SampleInput| {
        let mut all = vec![Replicate];
        for dim in 0..sample.shape.len() {
            all.push(Shard(dim as isize));
        }
        if !sample.shape.is_empty() {
            all.push(values::ragged(mesh, &sample.shape, &[Replicate], 0, 0, 3));
            all.push(Placement::StridedShard { dim: 0, split_factor: 2 });
        }
        if sample.below.is_none() {
            all.extend([Partial(ReduceOp::Sum), Partial(ReduceOp::Avg), Partial(ReduceOp::Max)]);
        }
        all
    };
    if samples.len() <= 2 {
        return samples.iter().fold(vec![Vec::new()], |so_far, sample| {
            let with = |chosen: &Vec<Placement>, p: Placement| [chosen.as_slice(), &[p]].concat();
            so_far.iter().flat_map(|chosen| options(sample).into_iter().map(|p| with(chosen, p))).collect()
        });
    }
    let first = |s: &SampleInput| if s.shape.is_empty() { Replicate } else { Shard(0) };
    let mut all = vec![samples.iter().map(first).collect::<Vec<_>>()];
    for (i, sample) in samples.iter().enumerate() {
        for option in options(sample) {
            let mut chosen = vec![Replicate; samples.len()];
            chosen[i] = option;
            all.push(chosen);
        }
    }
    all
}

#[test]
fn unsharded_gradients_match_finite_differences() {
    let run = |world: World| {
        let mesh = alone(&world)?;
        for op in ops().filter(|op| !WITHOUT.contains(&op.name)) {
            for samples in (op.samples)().iter().map(|s| real(s)) {
                let tensors = samples.iter().enumerate().map(|(i, s)| leaf(&mesh, s, &Replicate, i));
                let tensors = tensors.collect::<Result<Vec<_>>>()?;
                let Some(found) = gradients(op, &tensors)? else { continue };
                let mut found = found.iter();
                for (i, x) in tensors.iter().enumerate().filter(|(_, x)| x.has_gradient()) {
                    let gradient = numbers(found.next().expect("one per input"));
                    let values = numbers(&x.full_tensor()?);
                    for at in (0..values.len()).step_by(values.len().div_ceil(12).max(1)) {
                        let moved = |step: f64| -> Result<f64> {
                            let mut values = values.clone();
                            values[at] += step;
                            let local = Tensor::from_vec(values, x.shape(), &Device::Cpu)?;
                            let mut inputs = tensors.clone();
                            inputs[i] = DTensor::from_local(&local, &mesh, [Replicate])?.requires_grad();
                            loss(op, &inputs)?.expect("as before").full_tensor()?.to_scalar().map_err(Error::from)
                        };
                        // the error of a central difference is of the order of the square of the step, plus rounding
                        let step = 1e-5;
                        let slope = (moved(step)? - moved(-step)?) / (2.0 * step);
                        let got = gradient[at];
                        let fits = slope.is_nan() || (slope - got).abs() <= 2e-5 * slope.abs().max(got.abs()).max(1.0);
                        assert!(fits, "{} of {samples:?}: input {i} at {at}: {got}, slope {slope}", op.name);
                    }
                }
            }
        }
        Ok(())
    };
    ThreadWorld::new(1).unwrap().run(run).unwrap();
}
