//! `shardwise bench dispatch`: overhead of an operator on a `DTensor` over the same operation of candle.

use std::hint::black_box;
use std::time::Instant;

use candle_core::{D, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::DryWorld;
use shardwise::prelude::*;

use crate::output::{RowPrinter, TableRow};

/// The options of `shardwise bench dispatch`.
#[derive(Args)]
#[command(after_help = "\
The tensors are 8x8 in f32 on a mesh of one rank, so nothing is communicated. `local` cases are candle's operation on plain \
tensors in the same run. `cold` cases are first calls for new shapes on meshes of 2 to 16 ranks, without data: they measure \
sharding propagation, whose result is cached. Times are the best of 20 samples.

Examples:
  shardwise bench dispatch
  shardwise bench dispatch --json")]
pub(crate) struct BenchDispatchOptions {
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct DispatchTiming {
    case: String,
    /// Microseconds per call, best sample.
    us: f64,
    /// Microseconds per call, median sample.
    median_us: f64,
}

impl TableRow for DispatchTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("case", -22, self.case.clone()),
            ("best us", 9, format!("{:.3}", self.us)),
            ("median us", 9, format!("{:.3}", self.median_us)),
        ]
    }
}

pub(crate) fn run(options: &BenchDispatchOptions) -> Result<()> {
    let mut rows = RowPrinter::new(options.json, 21);
    for (case, samples) in warm()? {
        rows.print(&measured(case, samples))?;
    }
    for axes in 1..=4 {
        for op in ["matmul", "add"] {
            rows.print(&measured(format!("cold {op} {axes} axes"), cold(op, axes)?))?;
        }
    }
    Ok(())
}

fn measured(case: String, mut samples: Vec<f64>) -> DispatchTiming {
    samples.sort_by(f64::total_cmp);
    DispatchTiming { case, us: samples[0], median_us: samples[samples.len() / 2] }
}

/// Microseconds per call, per sample.
fn time(call: impl Fn() -> Result<()>) -> Result<Vec<f64>> {
    const REPEATS: u32 = 5000;
    let mut samples = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        for _ in 0..REPEATS {
            call()?;
        }
        samples.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(REPEATS));
    }
    Ok(samples)
}

/// Each operator on plain tensors and on distributed ones, in alternation.
fn warm() -> Result<Vec<(String, Vec<f64>)>> {
    let mut ran = ThreadWorld::new(1)?.run(|world| {
        let mesh = world.mesh([("one", 1)])?;
        let (a, b) = (DTensor::randn((8, 8), &mesh, [Replicate])?, DTensor::randn((8, 8), &mesh, [Replicate])?);
        let (x, y): (Tensor, Tensor) = (a.to_local()?, b.to_local()?);
        let softmax = || -> Result<Tensor> {
            let exponentials = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
            Ok(exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?)
        };
        let kept = |t: Result<Tensor>| t.map(|t| drop(black_box(t)));
        let done = |t: Result<DTensor>| t.map(|t| drop(black_box(t)));
        let plain = |t: candle_core::Result<Tensor>| kept(t.map_err(Error::from));
        let mut all = Vec::new();
        let mut add = |case: &str, samples: Vec<f64>| all.push((case.to_string(), samples));
        add("local add", time(|| plain(&x + &y))?);
        add("add", time(|| done(a.add(&b)))?);
        add("local matmul", time(|| plain(x.matmul(&y)))?);
        add("matmul", time(|| done(a.matmul(&b)))?);
        add("local gelu", time(|| plain(x.gelu_erf()))?);
        add("gelu", time(|| done(a.gelu()))?);
        add("local reshape", time(|| plain(x.reshape((4, 16))))?);
        add("reshape", time(|| done(a.reshape(&[4, 16])))?);
        add("local softmax", time(|| kept(softmax()))?);
        add("softmax", time(|| done(a.softmax(-1)))?);
        add("local sum", time(|| plain(x.sum_all()))?);
        add("sum", time(|| done(a.sum_all()))?);
        let weight = b.requires_grad();
        let train = || {
            let gradients = a.matmul(&weight)?.relu()?.sum_all()?.backward()?;
            drop(black_box(gradients));
            Ok(())
        };
        add("train matmul-relu-sum", time(train)?);
        Ok(all)
    })?;
    Ok(ran.swap_remove(0))
}

/// First calls for new shapes, on a mesh with `axes` axes of size 2.
fn cold(op: &'static str, axes: usize) -> Result<Vec<f64>> {
    let dry = DryWorld::new(1 << axes)?.run(move |world| {
        let mesh = world.mesh(vec![2; axes])?;
        let left = [Shard(0), Shard(1), Replicate, Partial(ReduceOp::Sum)];
        let right = [Replicate, Shard(0), Shard(1), Replicate];
        let mut samples = Vec::new();
        for i in 0..20 {
            let n = 64 + 16 * i + usize::from(op == "add");
            let x = DTensor::zeros((n, n), candle_core::DType::F32, &mesh, left[..axes].to_vec())?;
            let w = DTensor::zeros((n, n), candle_core::DType::F32, &mesh, right[..axes].to_vec())?;
            let start = Instant::now();
            black_box(if op == "add" { x.add(&w)? } else { x.matmul(&w)? });
            samples.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(samples)
    })?;
    Ok(dry.value)
}
