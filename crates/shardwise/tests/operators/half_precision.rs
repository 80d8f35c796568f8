//! Sums and statistics do not depend on the layout: half precision is accumulated and communicated in f32, sums of f32 in
//! f64, and results are rounded once.

use candle_core::{Device, Tensor};
use shardwise::DryWorld;
use shardwise::ops::{EmbeddingBagMode, LossOptions, Reduction};
use shardwise::prelude::*;

/// Relative error of one rounding to the nearest number of a type.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::F32 => 2f64.powi(-24),
        _ => f64::EPSILON / 2.0,
    }
}

/// Pseudo-random numbers with a mean and a spread, the same in every world.
fn numbers(shape: &[usize], mean: f64, spread: f64, salt: u64) -> Tensor {
    let count: usize = shape.iter().product();
    let number = |i: usize| {
        let h = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ salt.wrapping_mul(0xD6E8_FEB8_6659_FD93);
        let h = (h ^ h >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let uniform = (h >> 11) as f64 / (1u64 << 53) as f64;
        mean + spread * 12f64.sqrt() * (uniform - 0.5)
    };
    Tensor::from_vec((0..count).map(number).collect::<Vec<_>>(), shape, &Device::Cpu).unwrap()
}

fn reals(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Fails unless numbers are the exact ones, rounded once. Computing in f32 adds an error of a few f32 units, relative
/// to the largest number where terms cancel.
fn rounded_once(got: &Tensor, exact: &Tensor, dtype: DType) -> std::result::Result<(), String> {
    if (got.dims(), got.dtype()) != (exact.dims(), dtype) {
        return Err(format!("{:?} {:?} and not {dtype:?} {:?}", got.dtype(), got.dims(), exact.dims()));
    }
    let (got, exact) = (reals(got), reals(exact));
    let largest = exact.iter().fold(0f64, |a, x| a.max(x.abs()));
    let before = 32.0 * unit(if dtype == DType::F32 { DType::F64 } else { DType::F32 });
    for (i, (g, e)) in got.iter().zip(&exact).enumerate() {
        let bound = unit(dtype) * e.abs() * (1.0 + 2.0 * unit(dtype)) + before * largest + 2f64.powi(-25);
        if (g - e).abs() > bound || g.is_nan() {
            return Err(format!(
                "element {i} is {g} and not {e}, off by {:.2} roundings",
                (g - e).abs() / (unit(dtype) * e.abs())
            ));
        }
    }
    Ok(())
}

type Function = fn(&DTensor) -> Result<DTensor>;

/// A replicated tensor on the mesh of `x`.
fn beside(x: &DTensor, values: &Tensor, dtype: DType) -> Result<DTensor> {
    let whole = vec![Replicate; x.device_mesh().ndim()];
    // Rounded to bf16 first, so that every type holds the same numbers.
    let values = values.to_dtype(DType::BF16)?.to_dtype(dtype)?;
    DTensor::distribute_tensor(&values, x.device_mesh(), whole, None)
}

const ROWS: usize = 8;
const WIDTH: usize = 1536;

fn weight(x: &DTensor) -> Result<DTensor> {
    beside(x, &numbers(&[WIDTH], 1.0, 0.2, 7), x.dtype())
}

fn targets(x: &DTensor) -> Result<DTensor> {
    let whole = vec![Replicate; x.device_mesh().ndim()];
    let ids: Vec<i64> = (0..ROWS).map(|i| (i * 191 % WIDTH) as i64).collect();
    DTensor::distribute_tensor(&Tensor::new(ids, &Device::Cpu)?, x.device_mesh(), whole, None)
}

fn other(x: &DTensor) -> Result<DTensor> {
    beside(x, &numbers(&[ROWS, WIDTH], -200.0, 40.0, 3), x.dtype())
}

const FUNCTIONS: &[(&str, Function)] = &[
    ("sum", |x| x.sum(&[1], false)),
    ("mean", |x| x.mul_scalar(32)?.mean(&[], false)),
    ("mean of rows", |x| x.mul_scalar(32)?.mean(&[0], true)),
    ("var", |x| x.var(&[1], 1.0, false)),
    ("std", |x| x.mul_scalar(64)?.std(&[], 0.0, false)),
    ("norm", |x| x.mul_scalar(16)?.norm(2.0, &[1], false)),
    ("norm of order 1", |x| x.norm(1.0, &[1], false)),
    ("norm of order 3", |x| x.mul_scalar(16)?.norm(3.0, &[], false)),
    ("logsumexp", |x| x.logsumexp(&[1], false)),
    ("softmax", |x| x.softmax(1)),
    ("softmax of columns", |x| x.softmax(0)),
    ("log_softmax", |x| x.log_softmax(1)),
    ("layer_norm", |x| x.layer_norm(1, Some(&weight(x)?), Some(&weight(x)?), 1e-5)),
    ("layer_norm of all", |x| x.layer_norm(2, None, None, 1e-5)),
    ("rms_norm", |x| x.rms_norm(1, Some(&weight(x)?), 1e-5)),
    ("group_norm", |x| x.group_norm(3, Some(&weight(x)?), None, 1e-5)),
    ("batch_norm", |x| x.mul_scalar(64)?.batch_norm(None, Some(&weight(x)?), None, 1e-5)),
    ("mse_loss", |x| x.mse_loss(&other(x)?, Reduction::Mean)),
    ("l1_loss", |x| x.l1_loss(&other(x)?, Reduction::Mean)),
    ("smooth_l1_loss", |x| x.smooth_l1_loss(&other(x)?, 100.0, Reduction::Mean)),
    ("bce_with_logits", |x| x.bce_with_logits(&x.zeros_like()?, Reduction::Mean)),
    ("cross_entropy", |x| x.cross_entropy(&targets(x)?, LossOptions::default())),
    ("cross_entropy, smoothed", |x| {
        x.cross_entropy(&targets(x)?, LossOptions { label_smoothing: 0.25, ..LossOptions::default() })
    }),
    ("cumsum", |x| x.cumsum(1)),
    ("matmul", |x| x.matmul(&weight(x)?)),
    ("einsum of one", |x| DTensor::einsum("ij->i", &[x])),
    ("index_add", |x| {
        let place = targets(x)?.mul_scalar(0)?;
        x.zeros_like()?.index_add(0, &place, &x.mul_scalar(0.25)?)?.narrow(0, 0, 1)
    }),
    ("embedding_bag", |x| {
        let ids = targets(x)?.mul_scalar(0)?.reshape(&[2, 4])?;
        x.embedding_bag(&ids, None, EmbeddingBagMode::Mean)
    }),
    ("avg_pool1d", |x| x.unsqueeze(0)?.avg_pool1d(16, None, 0)),
];

/// The mesh shapes and placements in which a matrix is tried.
fn placements() -> Vec<(Vec<usize>, Vec<Placement>)> {
    let ragged = Placement::ragged(1, [WIDTH - 5, 5]);
    vec![
        (vec![1], vec![Replicate]),
        (vec![2], vec![Shard(0)]),
        (vec![2], vec![Shard(1)]),
        (vec![2], vec![ragged]),
        (vec![2], vec![Partial(ReduceOp::Sum)]),
        (vec![5], vec![Shard(1)]),
        (vec![2, 2], vec![Shard(0), Shard(1)]),
        (vec![2, 2], vec![Shard(1), Shard(1)]),
        (vec![2, 2], vec![Partial(ReduceOp::Sum), Shard(1)]),
    ]
}

#[test]
fn statistics_of_half_precision_are_rounded_once_in_every_layout() {
    let mut failures = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        // Numbers that both types hold: bf16 of so many digits.
        let x = numbers(&[ROWS, WIDTH], 3.0, 6.0, 1).to_dtype(DType::BF16).unwrap();
        let exact = {
            let x = x.to_dtype(DType::F64).unwrap();
            run(&[1], move |_, mesh| {
                let x = DTensor::distribute_tensor(&x, mesh, [Replicate], None)?;
                FUNCTIONS.iter().map(|(_, f)| f(&x)?.full_tensor()).collect::<Result<Vec<_>>>()
            })
        };
        for (shape, placements) in placements() {
            let (x, exact, shown) = (x.to_dtype(dtype).unwrap(), exact.clone(), format!("{placements:?}"));
            let found = run(&shape, move |_, mesh| {
                let x = DTensor::distribute_tensor(&x, mesh, placements.clone(), None)?;
                let mut found = Vec::new();
                for ((name, f), exact) in FUNCTIONS.iter().zip(&exact) {
                    if let Err(difference) = rounded_once(&f(&x)?.full_tensor()?, exact, dtype) {
                        found.push(format!("{name} of {dtype:?} in {shown}: {difference}"));
                    }
                }
                Ok(found)
            });
            failures.extend(found);
        }
    }
    assert!(failures.is_empty(), "{}\n{} differ", failures.join("\n"), failures.len());
}

/// Runs a program on a mesh of a shape and returns what its first rank found.
fn run<T: Send + 'static>(
    shape: &[usize],
    program: impl Fn(&World, &DeviceMesh) -> Result<T> + Send + Sync + 'static,
) -> T {
    let shape = shape.to_vec();
    let world = ThreadWorld::new(shape.iter().product()).unwrap();
    world.run(move |world| program(&world, &world.mesh(shape.clone())?)).unwrap().swap_remove(0)
}

/// The layouts of a vector of four on meshes of one to four ranks.
fn layouts_of_four() -> Vec<(Vec<usize>, Vec<Placement>)> {
    let sum = || Partial(ReduceOp::Sum);
    vec![
        (vec![1], vec![Replicate]),
        (vec![2], vec![Shard(0)]),
        (vec![2], vec![Placement::ragged(0, [1, 3])]),
        (vec![2], vec![Placement::StridedShard { dim: 0, split_factor: 2 }]),
        (vec![2], vec![sum()]),
        (vec![3], vec![Shard(0)]),
        (vec![4], vec![Shard(0)]),
        (vec![6], vec![Shard(0)]),
        (vec![2, 2], vec![Shard(0), Shard(0)]),
        (vec![2, 2], vec![Replicate, Shard(0)]),
        (vec![2, 2], vec![sum(), Shard(0)]),
    ]
}

#[test]
fn sums_of_f32_do_not_depend_on_the_layout() {
    for (shape, placements) in layouts_of_four() {
        run(&shape, move |_, mesh| {
            let x = Tensor::new(&[1e8f32, 1.0, -1e8, 1.0], &Device::Cpu)?;
            let x = DTensor::distribute_tensor(&x, mesh, placements.clone(), None)?;
            let of = |t: &DTensor| -> Result<f32> { Ok(t.full_tensor()?.to_scalar::<f32>()?) };
            let sum = x.sum_all()?;
            assert_eq!((sum.dtype(), sum.to_local()?.dtype()), (DType::F32, DType::F32));
            assert_eq!(of(&sum)?, 2.0, "{placements:?}");
            // Views and multiples of a partial sum, and sums of them, lose nothing either.
            let twice = sum.reshape(&[1])?.add(&sum.mul_scalar(1)?.unsqueeze(0)?)?.neg()?.squeeze(None)?;
            assert_eq!(of(&twice)?, -4.0, "{placements:?}");
            assert_eq!(of(&x.mean(&[], false)?)?, 0.5, "{placements:?}");
            assert_eq!(of(&x.cumsum(0)?.select(0, 3)?)?, 2.0, "{placements:?}");
            assert_eq!(of(&x.l1_loss(&x.zeros_like()?, Reduction::Sum)?)?, 2e8 + 2.0, "{placements:?}");
            assert_eq!(of(&x.sum_all()?.to_dtype(DType::BF16)?.to_dtype(DType::F32)?)?, 2.0, "{placements:?}");
            Ok(())
        });
    }
}

#[test]
fn partial_products_of_half_precision_are_communicated_in_f32() {
    for dtype in [DType::F16, DType::BF16] {
        // Terms that cancel between ranks: rounded before they are added, nothing would be left of the small ones.
        let found = run(&[2], move |world, mesh| {
            let of = |values: &[f32], placement| -> Result<DTensor> {
                let t = Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)?;
                DTensor::distribute_tensor(&t.reshape((1, values.len()))?, mesh, [placement], None)
            };
            let a = of(&[256.0, 1.0, -256.0, 1.0], Shard(1))?;
            let b = of(&[64.0, 0.25, 64.0, 0.5], Shard(1))?;
            let product = a.linear(&b, None)?;
            assert_eq!((product.dtype(), product.to_local()?.dtype()), (dtype, dtype));
            assert_eq!(product.placements(), [Partial(ReduceOp::Sum)]);
            // Views of a partial sum, and its sum with another, stay in f32.
            let made = product.t()?.add(&product.mul_scalar(-0.5)?)?;
            assert_eq!(made.placements(), [Partial(ReduceOp::Sum)]);
            world.trace().clear();
            let made = made.full_tensor()?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
            let bytes: usize = world.trace().records().iter().map(|r| r.bytes).sum();
            Ok((reals(&product.full_tensor()?)[0], made[0], bytes))
        });
        assert_eq!(found, (0.75, 0.375, 4), "{dtype:?}: one number of f32 is sent");
    }
}

#[test]
fn gradients_of_half_precision_are_accumulated_in_f32() {
    for (shape, placements) in [(vec![4], vec![Shard(0)]), (vec![2, 2], vec![Shard(0), Shard(0)])] {
        let world = ThreadWorld::new(4).unwrap();
        world
            .run(move |world| {
                let mesh = world.mesh(shape.clone())?;
                let whole = vec![Replicate; mesh.ndim()];
                // The terms of rank 0 and rank 2 cancel; 1/64 of another one stays.
                let rows = [512f32, 1.0 / 64.0, -512.0, 0.0];
                let x = Tensor::new(&rows, &Device::Cpu)?.reshape((4, 1))?.to_dtype(DType::BF16)?;
                let x = DTensor::distribute_tensor(&x, &mesh, placements.clone(), None)?;
                let leaf = |n: usize| -> Result<DTensor> {
                    Ok(DTensor::ones((1, n), DType::BF16, &mesh, whole.clone())?.requires_grad())
                };
                let (w, v) = (leaf(1)?, leaf(3)?);
                let loss = x.matmul(&w)?.sum_all()?.add(&x.matmul(&v)?.sum_all()?)?;
                let gradients = loss.backward()?.in_param_layout()?;
                for leaf in [&w, &v] {
                    let gradient = gradients.get(leaf)?;
                    assert_eq!(gradient.dtype(), DType::BF16);
                    assert!(reals(&gradient.full_tensor()?).iter().all(|g| *g == 1.0 / 64.0));
                }
                Ok(())
            })
            .unwrap();
    }
}

/// The bytes that the first of two ranks sends.
fn bytes_sent(world: &World) -> Result<usize> {
    let mesh = world.mesh([("tp", 2)])?;
    world.trace().clear();
    let x = DTensor::zeros((4, 6), DType::BF16, &mesh, [Shard(1)])?;
    let w = DTensor::zeros((5, 6), DType::BF16, &mesh, [Shard(1)])?;
    x.linear(&w, None)?.relu()?.sum(&[0], false)?.full_tensor()?;
    x.to_dtype(DType::F32)?.sum(&[1], false)?.full_tensor()?;
    x.layer_norm(1, None, None, 1e-5)?.cumsum(1)?;
    Ok(world.trace().records().iter().map(|r| r.bytes).sum())
}

#[test]
fn dry_runs_count_bytes_in_the_communicated_dtype() {
    let real = ThreadWorld::new(2).unwrap().run(|world| bytes_sent(&world)).unwrap()[0];
    let dry = DryWorld::new(2).unwrap().run(|world| bytes_sent(&world)).unwrap().value;
    assert_eq!(real, dry);
}
