//! `shardwise bench kernels`: operators on large tensors of one rank, compared with the memory or the peak of the processor.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

use clap::Args;
use serde::Serialize;
use shardwise::error::{ErrorKind, nearest};
use shardwise::ops::{AttentionOptions, BlockType, ConvOptions, LossOptions, QuantizedTensor};
use shardwise::optim::{AdamW, ShardedOptimizer};
use shardwise::param::Param;
use shardwise::prelude::*;
use shardwise_mpi::Settings;

use crate::output::{RowPrinter, TableRow};

pub(super) mod peak;

use peak::Work;

/// The options of `shardwise bench kernels`.
#[derive(Args)]
#[command(after_help = "\
Each case is one operator on a mesh of one rank, in f32 unless its name says otherwise, through the same calls as in a program. \
`fwd+bwd` is the operator and the gradients of all its inputs. `floor` is the time in which this processor reads and writes as many \
bytes as the operator has to, or does its multiplications and additions in registers, measured \
after each case. SHARDWISE_SIMD=avx2 or baseline selects shorter vectors than the processor has.

Examples:
  shardwise bench kernels --threads 1
  shardwise bench kernels --only sin,'attention causal 1024' --json")]
pub(crate) struct BenchKernelsOptions {
    /// Threads of the rank
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: u64,
    /// Cases to measure, separated by commas [default: all]
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Seconds per case
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct KernelTiming {
    system: &'static str,
    case: String,
    threads: usize,
    /// Milliseconds of the best call.
    ms: f64,
    /// Milliseconds of the median call.
    median_ms: f64,
    /// Milliseconds that reading and writing the bytes, or the arithmetic at peak rate, takes.
    floor_ms: f64,
}

impl TableRow for KernelTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("case", -32, self.case.clone()),
            ("best ms", 9, format!("{:.3}", self.ms)),
            ("median ms", 9, format!("{:.3}", self.median_ms)),
            ("floor ms", 9, format!("{:.3}", self.floor_ms)),
            ("of floor", 8, format!("{:.1}x", self.median_ms / self.floor_ms)),
        ]
    }
}

pub(crate) fn run(options: &BenchKernelsOptions) -> Result<()> {
    let (threads, seconds) = (options.threads as usize, options.seconds);
    let (only, json) = (options.only.clone(), options.json);
    // The rank runs on another thread, which owns what it captures.
    let program = move |world: World| {
        let mesh = world.mesh([("one", 1)])?;
        let mut bench = KernelBench {
            only: &only,
            seconds,
            threads,
            floors: Vec::new(),
            rows: RowPrinter::new(json, 83),
            ran: Vec::new(),
            names: Vec::new(),
        };
        elementwise(&mut bench, &mesh)?;
        reductions(&mut bench, &mesh)?;
        movement(&mut bench, &mesh)?;
        rows(&mut bench, &mesh)?;
        products(&mut bench, &mesh)?;
        attention(&mut bench, &mesh)?;
        images(&mut bench, &mesh)?;
        optimizer(&mut bench, &mesh)?;
        let unknown: Vec<&str> = only.iter().filter(|name| !bench.ran.contains(name)).map(String::as_str).collect();
        if !unknown.is_empty() {
            let needed = "names of cases as the table lists them";
            let near = nearest(unknown[0], bench.names.iter().map(String::as_str));
            let fix = format!("the nearest are {near}; run without --only to see all");
            return Err(ErrorKind::Argument.error("--only", unknown.join(","), needed, fix));
        }
        Ok(())
    };
    Settings::from_env()?.kernel_threads(threads).launch(1, program)
}

/// Measures and prints the cases that are asked for.
struct KernelBench<'a> {
    only: &'a [String],
    seconds: f64,
    threads: usize,
    /// Floors in milliseconds of the work of the cases so far.
    floors: Vec<(Work, f64)>,
    rows: RowPrinter,
    /// Names of the cases so far.
    ran: Vec<String>,
    /// Names of all cases.
    names: Vec<String>,
}

impl KernelBench<'_> {
    fn case<R>(&mut self, name: &str, work: Work, call: impl Fn() -> Result<R>) -> Result<()> {
        self.prepared_case(name, work, || Ok(()), |()| call())
    }

    /// Measures a call, at least three times, each after a preparation that is not measured.
    fn prepared_case<P, R>(
        &mut self,
        name: &str,
        work: Work,
        prepare: impl Fn() -> Result<P>,
        call: impl Fn(P) -> Result<R>,
    ) -> Result<()> {
        self.names.push(name.to_string());
        if !self.only.is_empty() && !self.only.iter().any(|only| only == name) {
            return Ok(());
        }
        self.ran.push(name.to_string());
        self.rows.announce(name);
        (0..2).try_for_each(|_| call(prepare()?).map(|out| drop(black_box(out))))?;
        let (mut times, begin) = (Vec::new(), Instant::now());
        while times.len() < 3 || begin.elapsed().as_secs_f64() < self.seconds {
            let prepared = prepare()?;
            let start = Instant::now();
            drop(black_box(call(prepared)?));
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        let floor_ms = self.floor_ms(work)?;
        let (ms, median_ms) = (times[0], times[times.len() / 2]);
        let case = name.to_string();
        Ok(self.rows.print(&KernelTiming {
            system: "shardwise",
            case,
            threads: self.threads,
            ms,
            median_ms,
            floor_ms,
        })?)
    }

    /// The floor of some work: measured once before, and once more now, because one of two moments is quieter.
    fn floor_ms(&mut self, work: Work) -> Result<f64> {
        let now = peak::floor_ms(work, self.threads)?;
        let known = self.floors.iter().filter(|(known, _)| *known == work).map(|(_, ms)| *ms);
        let ms = known.fold(now, f64::min);
        self.floors.push((work, ms));
        Ok(ms)
    }

    /// Measures the forward pass, then forward and backward with gradients of all `inputs`.
    fn both(
        &mut self,
        name: &str,
        [forward, backward]: [Work; 2],
        inputs: &[&DTensor],
        op: impl Fn(&[DTensor]) -> Result<DTensor>,
    ) -> Result<()> {
        let plain: Vec<DTensor> = inputs.iter().map(|&x| x.clone()).collect();
        self.case(name, forward, || op(&plain))?;
        let leaves: Vec<DTensor> = inputs.iter().map(|x| x.requires_grad()).collect();
        let gradient = op(&plain)?;
        let gradient = DTensor::randn(gradient.shape(), gradient.device_mesh(), [Replicate])?;
        self.case(&format!("{name} fwd+bwd"), backward, || op(&leaves)?.backward_from(&gradient))
    }
}

/// Millions of f32 elements read, and written.
fn moves(read: f64, written: f64) -> Work {
    Work::Memory { read, written }
}

/// Millions of elements of the long vectors.
const LONG: f64 = 4.194_304;

fn normal(shape: &[usize], mesh: &DeviceMesh) -> Result<DTensor> {
    DTensor::randn(shape, mesh, [Replicate])
}

/// Random integers below `end`.
fn integers(end: i64, shape: &[usize], mesh: &DeviceMesh) -> Result<DTensor> {
    DTensor::randint(0..end, shape, mesh, [Replicate])
}

fn elementwise(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    let (x, y) = (normal(&[4 << 20], mesh)?, normal(&[4 << 20], mesh)?);
    let positive = x.abs()?.add_scalar(0.1)?;
    bench.case("add", moves(2.0 * LONG, LONG), || x.add(&y))?;
    bench.case("mul", moves(2.0 * LONG, LONG), || x.mul(&y))?;
    bench.case("maximum", moves(2.0 * LONG, LONG), || x.maximum(&y))?;
    bench.case("exp", moves(LONG, LONG), || positive.exp())?;
    bench.case("log", moves(LONG, LONG), || positive.log())?;
    bench.case("sin", moves(LONG, LONG), || positive.sin())?;
    bench.case("cos", moves(LONG, LONG), || positive.cos())?;
    bench.case("tanh", moves(LONG, LONG), || positive.tanh())?;
    bench.case("sigmoid", moves(LONG, LONG), || positive.sigmoid())?;
    bench.case("erf", moves(LONG, LONG), || positive.erf())?;
    bench.case("rsqrt", moves(LONG, LONG), || positive.rsqrt())?;
    bench.case("gelu", moves(LONG, LONG), || x.gelu())?;
    bench.case("gelu tanh", moves(LONG, LONG), || x.gelu_tanh())?;
    bench.case("silu", moves(LONG, LONG), || x.silu())?;
    bench.case("pow 1.7", moves(LONG, LONG), || positive.pow_scalar(1.7))?;
    bench.case("where", moves(2.0 * LONG, LONG), || x.where_(&x.gt(0.0)?, &y))?;
    bench.case("f32 to bf16", moves(LONG, 0.5 * LONG), || x.to_dtype(DType::BF16))?;
    let m = normal(&[4096, 1024], mesh)?;
    bench.case("broadcast add row", moves(LONG, LONG), || m.add(&m.select(0, 0)?))?;
    bench.case("randn", moves(0.0, LONG), || normal(&[4 << 20], mesh))?;
    bench.case("dropout", moves(LONG, LONG), || x.dropout(0.1, true))
}

fn reductions(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    let (x, m) = (normal(&[4 << 20], mesh)?, normal(&[4096, 1024], mesh)?);
    bench.case("sum all", moves(LONG, 0.0), || x.sum_all())?;
    bench.case("sum rows", moves(LONG, 0.0), || m.sum(&[1], false))?;
    bench.case("sum columns", moves(LONG, 0.0), || m.sum(&[0], false))?;
    bench.case("var rows", moves(LONG, 0.0), || m.var(&[1], 1.0, false))?;
    bench.case("max columns", moves(LONG, 0.0), || m.max_dim(0, false))?;
    bench.case("argmax rows", moves(LONG, 0.0), || m.argmax(Some(-1), false))?;
    bench.case("cumsum rows", moves(LONG, LONG), || m.cumsum(-1))?;
    bench.case("cumsum columns", moves(LONG, LONG), || m.cumsum(0))?;
    bench.case("sort rows", moves(LONG, 3.0 * LONG), || m.sort(-1, false))?;
    bench.case("topk 10 rows", moves(LONG, 0.0), || m.topk(10, -1, true))?;
    let large = integers(1 << 40, &[4096, 1024], mesh)?;
    bench.case("sort i64 rows", moves(2.0 * LONG, 4.0 * LONG), || large.sort(-1, false))
}

fn movement(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    let m = normal(&[4096, 1024], mesh)?;
    let (ids, table) = (integers(50000, &[8192], mesh)?, normal(&[50000, 256], mesh)?);
    bench.case("transposed copy", moves(LONG, LONG), || Ok(shardwise_kernels::contiguous(&m.t()?.to_local()?)?))?;
    bench.case("cat columns", moves(LONG, 2.0 * LONG), || DTensor::cat(&[&m, &m], 1))?;
    bench.case("index_select rows", moves(0.5 * LONG, 0.5 * LONG), || table.index_select(0, &ids))?;
    let source = table.narrow(0, 0, 8192)?;
    bench.case("index_add rows", moves(0.5 * LONG, 12.8), || {
        DTensor::zeros((50000, 256), DType::F32, mesh, [Replicate])?.index_add(0, &ids, &source)
    })?;
    bench.case("gather columns", moves(LONG, 2.0 * LONG), || m.gather(1, &m.argsort(1, false)?.narrow(1, 0, 64)?))?;
    bench.both("embedding", [moves(0.5 * LONG, 0.5 * LONG), moves(LONG, 0.5 * LONG + 12.8)], &[&table], |x| {
        x[0].embedding(&ids)
    })
}

fn rows(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    let (m, wide) = (normal(&[4096, 1024], mesh)?, normal(&[64, 50257], mesh)?);
    let (ones, zeros) =
        (normal(&[1024], mesh)?.mul_scalar(0.0)?.add_scalar(1.0)?, normal(&[1024], mesh)?.mul_scalar(0.0)?);
    let ids = integers(50000, &[64], mesh)?;
    let forward_and_backward = |millions: f64| [moves(millions, millions), moves(3.0 * millions, 2.0 * millions)];
    bench.both("softmax rows", forward_and_backward(LONG), &[&m], |x| x[0].softmax(-1))?;
    bench.both("softmax 50257", forward_and_backward(3.216), &[&wide], |x| x[0].softmax(-1))?;
    bench.both("layer_norm", forward_and_backward(LONG), &[&m, &ones, &zeros], |x| {
        x[0].layer_norm(1, Some(&x[1]), Some(&x[2]), 1e-5)
    })?;
    bench.both("rms_norm", forward_and_backward(LONG), &[&m, &ones], |x| x[0].rms_norm(1, Some(&x[1]), 1e-5))?;
    bench.both("cross_entropy 50257", [moves(3.216, 0.0), moves(2.0 * 3.216, 3.216)], &[&wide], |x| {
        x[0].cross_entropy(&ids, LossOptions::default())
    })
}

fn products(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    use Work::MultiplyAdds;
    let (square, m) = (normal(&[1024, 1024], mesh)?, normal(&[4096, 1024], mesh)?);
    let forward_and_backward = |billions: f64| [MultiplyAdds(billions), MultiplyAdds(3.0 * billions)];
    let other = normal(&[1024, 1024], mesh)?;
    bench.both("matmul 1024", forward_and_backward(1.074), &[&square, &other], |x| x[0].matmul(&x[1]))?;
    let few = normal(&[64, 1024], mesh)?;
    bench.both("matmul 64x1024x1024", forward_and_backward(0.0671), &[&few, &square], |x| x[0].matmul(&x[1]))?;
    let (a, b) = (normal(&[16, 256, 256], mesh)?, normal(&[16, 256, 256], mesh)?);
    bench.both("bmm 16x256", forward_and_backward(0.268), &[&a, &b], |x| x[0].bmm(&x[1]))?;
    let bias = normal(&[1024], mesh)?.mul_scalar(0.0)?;
    bench.both("linear 1024 bias", forward_and_backward(4.295), &[&m, &square, &bias], |x| {
        x[0].linear(&x[1], Some(&x[2]))
    })?;
    let (one, big) = (normal(&[1, 2048], mesh)?, normal(&[8192, 2048], mesh)?);
    bench.case("decode matvec 2048x8192", moves(16.78, 0.0), || one.linear(&big, None))?;
    for (name, block) in
        [("decode matvec 2048x8192 Q8_0", BlockType::Q8_0), ("decode matvec 2048x8192 Q4_1", BlockType::Q4_1)]
    {
        // Written, because memory that holds zeros may have no pages.
        let shape = (8192, 2048 / block.elements(), block.bytes());
        let weight = QuantizedTensor::new(&DTensor::full(1, shape, DType::U8, mesh, [Replicate])?, block)?;
        // The bytes of 32 elements, in units of an f32.
        let work = moves(16.78 / 128.0 * block.bytes() as f64, 0.0);
        bench.case(name, work, || one.quantized_linear(&weight, None))?;
    }
    Ok(())
}

fn attention(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    use Work::MultiplyAdds;
    let q = normal(&[2, 8, 1024, 64], mesh)?;
    let (k, v) = (normal(&[2, 8, 1024, 64], mesh)?, normal(&[2, 8, 1024, 64], mesh)?);
    let (few_k, few_v) = (normal(&[2, 2, 1024, 64], mesh)?, normal(&[2, 2, 1024, 64], mesh)?);
    let causal = AttentionOptions { causal: true, ..AttentionOptions::default() };
    // Two products of half the square of the length, and five more in the backward pass.
    let work = [MultiplyAdds(1.074), MultiplyAdds(3.5 * 1.074)];
    let attend = |x: &[DTensor]| x[0].scaled_dot_product_attention(&x[1], &x[2], causal);
    bench.both("attention causal 1024", work, &[&q, &k, &v], attend)?;
    bench.both("attention grouped 1024", work, &[&q, &few_k, &few_v], attend)?;
    let long = normal(&[1, 4, 8192, 64], mesh)?;
    bench.case("attention causal 8192", MultiplyAdds(17.18), || long.scaled_dot_product_attention(&long, &long, causal))
}

fn images(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    use Work::MultiplyAdds;
    let (image, weight) = (normal(&[8, 32, 56, 56], mesh)?, normal(&[64, 32, 3, 3], mesh)?);
    let padded = ConvOptions { padding: 1, ..ConvOptions::default() };
    bench.both("conv2d 3x3", [MultiplyAdds(0.462), MultiplyAdds(3.0 * 0.462)], &[&image, &weight], |x| {
        x[0].conv2d(&x[1], None, padded)
    })?;
    bench.both("max_pool2d", [moves(0.8, 0.2), moves(1.0, 1.0)], &[&image], |x| x[0].max_pool2d(2, None, 0))?;
    bench.both("batch_norm", [moves(0.8, 0.8), moves(2.4, 1.6)], &[&image], |x| x[0].batch_norm(None, None, None, 1e-5))
}

/// Steps over eight parameters. The gradients of a step belong to the values after the one before, so each is computed anew,
/// outside the measured time.
fn optimizer(bench: &mut KernelBench<'_>, mesh: &DeviceMesh) -> Result<()> {
    let params = (0..8).map(|i| Ok((format!("p{i}"), Param::new(&normal(&[1024, 1024], mesh)?))));
    let params = params.collect::<Result<Vec<_>>>()?;
    let gradient = normal(&[1024, 1024], mesh)?;
    let optimizer = RefCell::new(ShardedOptimizer::new(params.clone(), AdamW::default())?);
    let gradients = || {
        let mut loss = params[0].1.get().mul(&gradient)?.sum_all()?;
        for (_, param) in &params[1..] {
            loss = loss.add(&param.get().mul(&gradient)?.sum_all()?)?;
        }
        loss.backward()
    };
    // The gradient is read; the parameter and two moments are changed, in PyTorch all of them in place.
    bench.prepared_case("adamw 8M", Work::Update { read: 8.389, changed: 3.0 * 8.389 }, gradients, |gradients| {
        optimizer.borrow_mut().step(gradients)
    })
}
