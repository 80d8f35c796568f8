//! Softmax and cross entropy in f32 from sharded lines: one collective, no more bytes than a maximum and a sum per line take, and the
//! digits that the type has.

use candle_core::{Device, Tensor};
use shardwise::ThreadWorld;
use shardwise::ops::{LossOptions, Reduction};
use shardwise::prelude::*;
use shardwise_test_suites::counting::counted;

const ROWS: usize = 24;
const CLASSES: usize = 1000;

/// Logits with a spread, around an offset, rounded to f32. Row 0 has one large logit: its loss is small.
fn logits(spread: f64, offset: f64) -> Vec<Vec<f32>> {
    let one = |row: usize, class: usize| {
        let bits = (row * CLASSES + class + 1) as u64;
        let mixed = bits.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11;
        let uniform = mixed as f64 / (1u64 << 53) as f64 * 2.0 - 1.0;
        let large = if row == 0 && class == target(0) as usize { 12.0 } else { 0.0 };
        (offset + large + spread * uniform) as f32
    };
    (0..ROWS).map(|row| (0..CLASSES).map(|class| one(row, class)).collect()).collect()
}

fn target(row: usize) -> i64 {
    (row * 389 % CLASSES) as i64
}

/// The softmax of a row in f64, and the logarithm of the sum of its exponentials less its maximum, with the maximum.
fn exact(row: &[f32]) -> (Vec<f64>, f64, f64) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let terms: Vec<f64> = row.iter().map(|&x| (f64::from(x) - f64::from(most)).exp()).collect();
    let sum: f64 = terms.iter().sum();
    (terms.iter().map(|term| term / sum).collect(), sum.ln(), f64::from(most))
}

/// One unit in the last place of f32 at a number.
fn ulp(x: f64) -> f64 {
    let x = (x.abs() as f32).max(f32::MIN_POSITIVE);
    f64::from(f32::from_bits(x.to_bits() + 1)) - f64::from(x)
}

/// What a sum of exponentials in f32 contributes: every one is rounded, and short chains are added in f32.
const OF_SUM: f64 = 1.5e-7;

/// Meshes with layouts of a matrix: rows, classes and both sharded, in even and uneven parts.
fn layouts() -> Vec<(Vec<usize>, Vec<Placement>)> {
    vec![
        (vec![1], vec![Replicate]),
        (vec![2], vec![Shard(0)]),
        (vec![2], vec![Shard(1)]),
        (vec![3], vec![Shard(1)]),
        (vec![4], vec![Shard(1)]),
        (vec![2, 2], vec![Shard(1), Shard(1)]),
        (vec![2, 2], vec![Shard(0), Shard(1)]),
    ]
}

fn on(mesh: &[usize], run: impl Fn(&World, &DeviceMesh) -> Result<()> + Send + Sync + 'static) {
    let shape = mesh.to_vec();
    let program = move |world: World| run(&world, &world.mesh(shape.clone())?);
    ThreadWorld::new(mesh.iter().product()).unwrap().run(program).unwrap();
}

fn matrix(mesh: &DeviceMesh, values: &[Vec<f32>], placements: &[Placement]) -> Result<DTensor> {
    let whole = Tensor::new(values.to_vec(), &Device::Cpu)?;
    DTensor::distribute_tensor(&whole, mesh, placements.to_vec(), None)
}

fn values(x: &DTensor) -> Result<Vec<f64>> {
    Ok(x.detach().full_tensor()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

#[test]
fn cross_entropy_in_f32_is_as_exact_as_its_result() {
    for (mesh, placements) in layouts() {
        on(&mesh, move |_, mesh| {
            let targets: Vec<i64> = (0..ROWS).map(target).collect();
            let targets = Tensor::new(targets, &Device::Cpu)?;
            let targets = DTensor::distribute_tensor(&targets, mesh, vec![Replicate; placements.len()], None)?;
            for (spread, offset) in [(1.0, 0.0), (20.0, 0.0), (1.0, 1e3), (20.0, -3e4), (1.0, 1e7)] {
                let all = logits(spread, offset);
                let x = matrix(mesh, &all, &placements)?.requires_grad();
                let options = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
                let losses = x.cross_entropy(&targets, options)?;
                let found = values(&losses)?;
                let gradient = losses.sum_all()?.backward()?;
                let gradient = values(gradient.get(&x)?)?;
                for (row, logits) in all.iter().enumerate() {
                    let (shares, log, most) = exact(logits);
                    let class = target(row) as usize;
                    let loss = (most - f64::from(logits[class])) + log;
                    let (error, limit) = ((found[row] - loss).abs(), 2.0 * ulp(loss) + OF_SUM);
                    let what = format!("{placements:?}, {spread} around {offset}, row {row}");
                    assert!(error <= limit, "{what}: {} and not {loss}, off by {error:e}", found[row]);
                    for (i, share) in shares.iter().enumerate() {
                        let chosen = f64::from(u8::from(i == class));
                        let error = (gradient[row * CLASSES + i] - (share - chosen)).abs();
                        let limit = 6e-7 * share + 1e-7 * chosen + 1e-37;
                        assert!(error <= limit, "{what}, class {i} of {share}: gradient off by {error:e}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn softmax_in_f32_keeps_its_digits_in_every_layout() {
    for (mesh, placements) in layouts() {
        on(&mesh, move |_, mesh| {
            for (spread, offset) in [(1.0, 0.0), (20.0, 0.0), (1.0, 1e3), (20.0, -3e4)] {
                let all = logits(spread, offset);
                let x = matrix(mesh, &all, &placements)?;
                let shares = values(&x.softmax(1)?)?;
                let logs = values(&x.log_softmax(-1)?)?;
                let sums = values(&x.logsumexp(&[1], false)?)?;
                let down = values(&x.transpose(0, 1)?.softmax(0)?.transpose(0, 1)?)?;
                for (row, logits) in all.iter().enumerate() {
                    let (expected, log, most) = exact(logits);
                    let what = format!("{placements:?}, {spread} around {offset}, row {row}");
                    let error = (sums[row] - (most + log)).abs();
                    assert!(error <= ulp(most + log) + OF_SUM, "{what}: logsumexp off by {error:e}");
                    for (i, share) in expected.iter().enumerate() {
                        for found in [shares[row * CLASSES + i], down[row * CLASSES + i]] {
                            let error = (found - share).abs();
                            // its logarithm may be rounded once, as in the kernel of rows
                            let limit = (ulp(share.ln()) + 3e-7) * share + 1e-37;
                            assert!(error <= limit, "{what}, class {i} of {share}: off by {error:e}");
                        }
                        let exact = (f64::from(logits[i]) - most) - log;
                        let error = (logs[row * CLASSES + i] - exact).abs();
                        assert!(error <= 2.0 * ulp(exact) + OF_SUM, "{what}, class {i}: logarithm off by {error:e}");
                    }
                }
            }
            Ok(())
        });
    }
}

type Function = fn(&DTensor, &DTensor) -> Result<DTensor>;

/// The names, functions and the numbers per line that the backward pass reduces.
const FUNCTIONS: [(&str, Function, usize); 4] = [
    ("softmax", |x, _| x.softmax(1), 1),
    ("log_softmax", |x, _| x.log_softmax(1), 1),
    ("logsumexp", |x, _| x.logsumexp(&[1], false), 0),
    (
        "cross_entropy",
        |x, targets| x.cross_entropy(targets, LossOptions { reduction: Reduction::Sum, ..LossOptions::default() }),
        0,
    ),
];

#[test]
fn a_sharded_line_takes_one_collective_of_no_more_bytes_than_its_maximum_and_sum() {
    for ranks in [2, 3, 4] {
        on(&[ranks], move |world, mesh| {
            let targets: Vec<i64> = (0..ROWS).map(target).collect();
            let targets = Tensor::new(targets, &Device::Cpu)?;
            let targets = DTensor::distribute_tensor(&targets, mesh, [Replicate], None)?;
            let all = logits(3.0, 0.0);
            for dtype in [DType::F32, DType::BF16] {
                for (name, function, numbers) in FUNCTIONS {
                    let x = matrix(mesh, &all, &[Shard(1)])?.to_dtype(dtype)?.requires_grad();
                    let bytes = || world.trace().records().iter().map(|record| record.bytes).sum::<usize>();
                    let all_reduce = |numbers: usize| 2 * (numbers * 4 * ROWS) * (ranks - 1) / ranks;
                    let (y, forward) = counted(world, || function(&x, &targets))?;
                    let sent = bytes();
                    println!("{name} of {dtype:?} on {ranks} ranks: {forward:?}, {sent} bytes");
                    assert_eq!(forward, ["all_reduce"], "{name} on {ranks} ranks");
                    assert!(sent <= all_reduce(2), "{name}: {sent} bytes and not {}", all_reduce(2));
                    let cotangent = DTensor::ones(y.shape(), dtype, mesh, y.layout().reduced().placements().to_vec())?;
                    let (_, backward) = counted(world, || y.backward_from(&cotangent))?;
                    let sent = bytes();
                    println!("  backward: {backward:?}, {sent} bytes");
                    assert_eq!(backward, vec!["all_reduce"; numbers], "{name} on {ranks} ranks");
                    assert!(sent <= all_reduce(numbers), "{name} backward: {sent} bytes");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn infinite_logits_and_empty_shards_have_the_softmax_of_one_rank() {
    let (low, high) = (f32::NEG_INFINITY, f32::INFINITY);
    let rows = vec![
        vec![1.0, low, 2.0],
        vec![low, low, 0.5],
        vec![low, low, low],
        vec![high, 0.0, 1.0],
        vec![f32::NAN, 0.0, 1.0],
        vec![3e38, -3e38, 3e38],
        // what masks leave of a row without any other element
        vec![f32::MIN; 3],
    ];
    // of 4 ranks the last has no column
    for ranks in [2, 4] {
        let rows = rows.clone();
        on(&[ranks], move |_, mesh| {
            let targets = DTensor::distribute_tensor(&Tensor::new(&[2i64; 7], &Device::Cpu)?, mesh, [Replicate], None)?;
            let options = LossOptions { reduction: Reduction::None, ..LossOptions::default() };
            let run = |placement: Placement| -> Result<Vec<Vec<f64>>> {
                let x = matrix(mesh, &rows, &[placement])?;
                let loss = x.cross_entropy(&targets, options)?;
                [x.softmax(1)?, x.log_softmax(1)?, x.logsumexp(&[1], true)?, loss].iter().map(values).collect()
            };
            let (sharded, whole) = (run(Shard(1))?, run(Replicate)?);
            for (found, expected) in sharded.iter().zip(&whole) {
                let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan() || (a - b).abs() < 1e-5;
                assert!(found.iter().zip(expected).all(same), "{found:?} and not {expected:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn second_derivatives_go_through_sharded_lines() {
    on(&[2], |_, mesh| {
        let all: Vec<Vec<f32>> = logits(2.0, 0.0).into_iter().take(3).map(|row| row[..7].to_vec()).collect();
        let targets = DTensor::distribute_tensor(&Tensor::new(&[0i64, 3, 6], &Device::Cpu)?, mesh, [Replicate], None)?;
        for (name, function, _) in FUNCTIONS {
            let mut found = Vec::new();
            for placement in [Replicate, Shard(1), Shard(0)] {
                let x = matrix(mesh, &all, &[placement])?.requires_grad();
                let first = function(&x, &targets)?
                    .square()?
                    .sum_all()?
                    .backward_with(shardwise::BackwardOptions { create_graph: true, ..Default::default() })?;
                let second = first.get(&x)?.square()?.sum_all()?.backward()?;
                found.push(values(second.get(&x)?)?);
            }
            for other in &found[1..] {
                let close = other.iter().zip(&found[0]).all(|(a, b)| (a - b).abs() < 1e-4 * b.abs().max(1.0));
                assert!(close, "{name}: {other:?} and not {:?}", found[0]);
            }
        }
        Ok(())
    });
}
