//! Operators on windows of a sharded dimension: ranks exchange borders and nothing else, forward and backward, and results and
//! gradients are the unsharded ones.

use shardwise::ops::{InterpolateOptions, Interpolation, PadMode, PoolOptions};
use shardwise::prelude::*;
use shardwise_test_suites::values;

/// Images `[n, channels, height, width]`, sharded on the height.
const SHAPE: [usize; 4] = [2, 3, 64, 5];

/// A call, and how many rows per border between two shards it may send, forward and backward.
type Case = (&'static str, fn(&DTensor) -> Result<DTensor>, usize, usize);

fn pool(size: usize, stride: usize, padding: usize) -> PoolOptions {
    PoolOptions { stride: vec![stride], padding: vec![padding], ..PoolOptions::new(&[size]) }
}

fn resized(x: &DTensor, mode: Interpolation, height: usize) -> Result<DTensor> {
    x.interpolate(&[height, 5], &InterpolateOptions { mode, ..InterpolateOptions::default() })
}

/// Rows of the results are counted as rows of the image: a row of windows of 3 x 2 elements as up to 6.
const CASES: &[Case] = &[
    ("avg_pool", |x| x.avg_pool(2, &pool(3, 1, 1)), 2, 2),
    ("avg_pool, ceil_mode", |x| x.avg_pool(2, &PoolOptions { ceil_mode: true, ..pool(3, 2, 1) }), 2, 2),
    ("max_pool", |x| Ok(x.max_pool(2, &pool(3, 1, 1))?.0), 2, 6),
    ("max_pool, dilation", |x| Ok(x.max_pool(2, &PoolOptions { dilation: vec![2], ..pool(3, 1, 1) })?.0), 4, 12),
    ("adaptive_avg_pool", |x| x.adaptive_avg_pool(&[Some(24), Some(2)]), 3, 3),
    ("adaptive_max_pool", |x| Ok(x.adaptive_max_pool(&[Some(24), Some(2)])?.0), 3, 9),
    ("im2col", |x| x.im2col(&[3, 2], &[1], &[1, 0], &[1]), 2, 12),
    ("unfold", |x| x.unfold(2, 4, 2), 2, 4),
    ("nearest", |x| resized(x, Interpolation::Nearest, 96), 1, 2),
    ("linear", |x| resized(x, Interpolation::Linear, 96), 2, 2),
    ("linear, smaller", |x| resized(x, Interpolation::Linear, 48), 2, 2),
    ("bicubic", |x| resized(x, Interpolation::Bicubic, 128), 3, 6),
    ("area", |x| resized(x, Interpolation::Area, 24), 3, 3),
    ("reflect", |x| x.pad_with(&[(1, 1), (3, 2)], PadMode::Reflect), 0, 0),
    ("replicate", |x| x.pad_with(&[(0, 0), (3, 2)], PadMode::Replicate), 0, 0),
    ("circular", |x| x.pad_with(&[(0, 0), (3, 2)], PadMode::Circular), 5, 10),
    ("constant", |x| x.pad_with(&[(0, 0), (3, 2)], PadMode::Constant(1.5.into())), 0, 0),
];

/// The bytes that a rank sends forward and backward, with the result and the gradient.
fn run(case: &Case, x: &DTensor) -> Result<(usize, usize, DTensor, DTensor)> {
    let world = x.device_mesh().world();
    let sent = || world.trace().records().iter().map(|r| r.bytes).sum::<usize>();
    let x = x.requires_grad();
    world.trace().clear();
    let y = (case.1)(&x)?;
    let forward = sent();
    let cotangent = DTensor::arange(0.0..y.elem_count() as f64, DType::F64, x.device_mesh(), [Replicate])?;
    let shape: Vec<isize> = y.shape().iter().map(|&n| n as isize).collect();
    let cotangent = cotangent.sin()?.reshape(&shape)?.to_layout(&y.layout().reduced())?;
    world.trace().clear();
    let gradient = y.backward_from(&cotangent)?.get(&x)?.clone();
    Ok((forward, sent(), y.detach(), gradient))
}

#[test]
fn windows_exchange_borders_in_both_directions() {
    for ranks in [2, 4] {
        let program = move |world: World| {
            let mesh = world.mesh([("a", ranks)])?;
            let whole = DTensor::randn(SHAPE.as_slice(), &mesh, [Replicate])?.to_dtype(DType::F64)?;
            let mut all = Vec::new();
            for case in CASES {
                let (_, _, expected, slope) = run(case, &whole)?;
                let (forward, backward, y, gradient) = run(case, &whole.redistribute([Shard(2)])?)?;
                for (got, expected) in [(y, expected), (gradient, slope)] {
                    let (got, expected) = (got.full_tensor()?, expected.full_tensor()?);
                    assert!(values::close(&got, &expected, 1.0), "{} on {ranks} ranks", case.0);
                }
                all.push((forward, backward));
            }
            Ok(all)
        };
        let of_ranks = ThreadWorld::new(ranks).unwrap().run(program).unwrap();
        let row = SHAPE.iter().product::<usize>() / SHAPE[2] * 8;
        let mut over = Vec::new();
        for (i, (name, _, forward, backward)) in CASES.iter().enumerate() {
            let sum = |f: fn(&(usize, usize)) -> usize| of_ranks.iter().map(|all| f(&all[i])).sum::<usize>();
            let (f, b) = (sum(|s| s.0), sum(|s| s.1));
            let most = |rows: usize| rows * row * (ranks - 1);
            if f > most(*forward) || b > most(*backward) {
                let rows = |bytes: usize| bytes as f64 / (row * (ranks - 1)) as f64;
                over.push(format!(
                    "{name}: {:.2} rows per border (at most {forward}), {:.2} backward (at most {backward})",
                    rows(f),
                    rows(b)
                ));
            }
        }
        assert!(over.is_empty(), "on {ranks} ranks more is sent than borders:\n{}", over.join("\n"));
    }
}
