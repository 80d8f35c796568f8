//! A few kernels and collectives: exact results, and figures next to what the processor reaches.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::Device;
use serde::Serialize;
use shardwise::comm::engine::available_cores;
use shardwise::mesh::Link;
use shardwise::prelude::*;

use super::Verdict;
use crate::bench::{Work, floor_ms};

/// How long a case is repeated; seven of them and what they are compared with take about five seconds.
const CASE: Duration = Duration::from_millis(350);

/// A figure below this part of the expected one is worth a note: noise of a shared machine alone does not cause it often.
const SLOW: f64 = 0.2;

/// A case of the self-test.
#[derive(Serialize)]
pub(super) struct TestedCase {
    case: &'static str,
    pub(super) verdict: Verdict,
    measured: f64,
    expected: f64,
    unit: &'static str,
}

impl TestedCase {
    /// A rate with that of the processor.
    fn rate(case: &'static str, right: bool, measured: f64, expected: f64, unit: &'static str) -> Self {
        let verdict = match (right, measured >= SLOW * expected) {
            (false, _) => Verdict::Wrong,
            (true, false) => Verdict::Note,
            (true, true) => Verdict::Ok,
        };
        TestedCase { case, verdict, measured, expected, unit }
    }

    /// A time with the expected one.
    fn time(case: &'static str, right: bool, measured: f64, expected: f64, unit: &'static str) -> Self {
        let Self { verdict, .. } = Self::rate(case, right, 1.0 / measured.max(1e-9), 1.0 / expected, unit);
        TestedCase { case, verdict, measured, expected, unit }
    }

    /// The line of the table, of at most 80 columns.
    pub(super) fn line(&self) -> String {
        let TestedCase { case, verdict, measured, expected, unit } = self;
        let verdict = match verdict {
            Verdict::Ok => "",
            Verdict::Note => "  note: slow",
            Verdict::Wrong => "  wrong result",
        };
        format!("{case:<28}{measured:>12.1}{expected:>12.1}  {unit}{verdict}\n")
    }
}

/// Runs all cases; ranks are threads of this process.
pub(super) fn run() -> Result<Vec<TestedCase>> {
    let mut cases = launch(1, |world| kernels(&world.mesh([("one", 1)])?))?;
    cases.extend(launch(2, |world| collectives(&world))?);
    Ok(cases)
}

/// The best time of repeated calls, in seconds.
fn best(mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let begin = Instant::now();
    let mut best = f64::INFINITY;
    while best.is_infinite() || begin.elapsed() < CASE {
        let start = Instant::now();
        call()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn kernels(mesh: &DeviceMesh) -> Result<Vec<TestedCase>> {
    let cores = available_cores();
    const SIDE: usize = 768;
    const LONG: usize = 4_000_000;
    // Small integers: sums of their products are exact in f32.
    let small = |factor: usize| {
        DTensor::from_fn((SIDE, SIDE), DType::F32, mesh, [Replicate], move |index| {
            ((index[0] * factor + index[1] * 3) % 7) as f64 - 3.0
        })
    };
    let (a, b) = (small(5)?, small(2)?);
    let element = |i: usize, j: usize, factor: usize| ((i * factor + j * 3) % 7) as f64 - 3.0;
    let product = a.matmul(&b)?.full_tensor()?.to_vec2::<f32>()?;
    let is_exact = |i: usize, j: usize| {
        let sum: f64 = (0..SIDE).map(|k| element(i, k, 5) * element(k, j, 2)).sum();
        f64::from(product[i][j]) == sum
    };
    let right = (0..SIDE).step_by(13).all(|i| (0..SIDE).step_by(17).all(|j| is_exact(i, j)));
    let seconds = best(|| a.matmul(&b).map(|c| drop(black_box(c))))?;
    let billions = (SIDE as f64).powi(3) / 1e9;
    let floor = floor_ms(Work::MultiplyAdds(billions), cores)? / 1e3;
    let mut cases =
        vec![TestedCase::rate("matmul 768, f32", right, 2.0 * billions / seconds, 2.0 * billions / floor, "GFLOP/s")];
    let ones = DTensor::ones(LONG, DType::F32, mesh, [Replicate])?;
    let millions = LONG as f64 / 1e6;
    let total = ones.sum_all()?.full_tensor()?.to_scalar::<f32>()?;
    let seconds = best(|| ones.sum_all().map(|sum| drop(black_box(sum))))?;
    let floor = floor_ms(Work::Memory { read: millions, written: 0.0 }, cores)? / 1e3;
    let gigabytes = millions * 4e-3;
    let right = total == LONG as f32;
    cases.push(TestedCase::rate("sum of 16 MB", right, gigabytes / seconds, gigabytes / floor, "GB/s"));
    let right = ones.add(&ones)?.sum_all()?.full_tensor()?.to_scalar::<f32>()? == 2.0 * LONG as f32;
    let seconds = best(|| ones.add(&ones).map(|sum| drop(black_box(sum))))?;
    let floor = floor_ms(Work::Memory { read: 2.0 * millions, written: millions }, cores)? / 1e3;
    cases.push(TestedCase::rate("add 16 MB", right, 3.0 * gigabytes / seconds, 3.0 * gigabytes / floor, "GB/s"));
    Ok(cases)
}

/// Collectives of two ranks, with what planners price them at. Collective.
fn collectives(world: &World) -> Result<Vec<TestedCase>> {
    let Link { latency_us, gb_per_s } = Link::THREADS;
    let rank = world.rank() as f32;
    let mut cases = Vec::new();
    const LONG: usize = 4_000_000;
    for (case, count) in [("all_reduce 64 B, 2 ranks", 16), ("all_reduce 16 MB, 2 ranks", LONG)] {
        let mine = candle_core::Tensor::full(rank + 1.0, count, &Device::Cpu)?;
        let sum = world.all_reduce(&mine, ReduceOp::Sum)?;
        let right = sum.min_all()?.to_scalar::<f32>()? == 3.0 && sum.max_all()?.to_scalar::<f32>()? == 3.0;
        // All ranks make the same number of calls.
        let calls = if count == LONG { 12 } else { 3000 };
        let mut best = f64::INFINITY;
        for _ in 0..calls {
            let start = Instant::now();
            drop(black_box(world.all_reduce(&mine, ReduceOp::Sum)?));
            best = best.min(start.elapsed().as_secs_f64());
        }
        cases.push(match count == LONG {
            true => TestedCase::rate(case, right, count as f64 * 4e-9 / best, gb_per_s, "GB/s"),
            false => TestedCase::time(case, right, best * 1e6, 2.0 * latency_us, "us"),
        });
    }
    let mesh = world.mesh([("tp", 2)])?;
    let x = DTensor::from_fn((64, 64), DType::F32, &mesh, [Shard(0)], |index| (index[0] * 64 + index[1]) as f64)?;
    let start = Instant::now();
    let back = x.redistribute([Shard(1)])?.redistribute([Shard(0)])?;
    let us = start.elapsed().as_secs_f64() * 1e6;
    let right = back.equal(&x)? && x.redistribute([Shard(1)])?.local_shape() == [64, 32];
    // Two exchanges; the first of a kind also plans.
    cases.push(TestedCase::time("redistribute there and back", right, us, 2000.0, "us, at most"));
    Ok(cases)
}
