//! `shardwise bench decode`: tokens per second of a model directory or GGUF file, and the share of the memory bandwidth.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use candle_core::{Device, Tensor};
use clap::Args;
use serde::Serialize;
use shardwise::checkpoint;
use shardwise::models::{KvCache, LoadOptions, PretrainedModel, load_with};
use shardwise::nn::Module;
use shardwise::plan::TensorParallel;
use shardwise::prelude::*;
use shardwise_mpi::Settings;

use crate::generate::source::pretrained_config;
use crate::output::{RowPrinter, TableRow};
use crate::processes;

/// The options of `shardwise bench decode`.
#[derive(Args)]
#[command(after_help = "\
Decodes greedily from a prompt of 8 tokens, one token at a time, with the key/value cache: in f32 and, if the file has quantized \
weights, with these as they are. The model is sharded by tensor parallelism over thread ranks, or under mpirun over the \
processes. Every rank has its share of the cores, and once more one thread; --threads sets another number.

A token takes a pass over all weights, so the memory bandwidth bounds its time: `GB/s` are the bytes of the weights per second, \
`of memory` their share of what all cores together read from memory in the same run. Rates are the median of the runs.

Examples:
  shardwise bench decode SmolLM2-135M-Instruct.Q4_1.gguf
  shardwise bench decode model --ranks 1 --tokens 128 --json
  mpirun -n 2 shardwise bench decode model --threads 1")]
pub(crate) struct BenchDecodeOptions {
    /// Model directory or GGUF file
    model: PathBuf,
    /// Numbers of ranks [default: 1,2; under mpirun the number of processes]
    #[arg(long, value_delimiter = ',')]
    ranks: Option<Vec<usize>>,
    /// Threads of each rank [default: 1, and the share of the cores]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: Option<u64>,
    /// Tokens per run
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(2..=4096))]
    tokens: u64,
    /// Runs per case, after one that warms up
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: u64,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

/// Tokens of the prompt.
const PROMPT: usize = 8;

#[derive(Serialize)]
struct DecodeTiming {
    /// `f32` or `quantized`.
    weights: &'static str,
    world: usize,
    /// Threads of each rank.
    threads: usize,
    /// Tokens per second, median of the runs.
    tokens_per_s: f64,
    /// Tokens per second of the best run.
    best_tokens_per_s: f64,
    /// Milliseconds until the first token, median of the runs.
    first_ms: f64,
    /// Bytes of weights that a token needs, of all ranks.
    weight_bytes: u64,
    /// Bytes of weights per second, in GB.
    gbps: f64,
    /// What all cores together read from memory, in GB per second.
    memory_gbps: f64,
    /// `gbps` as a share of `memory_gbps`.
    bandwidth_share: f64,
}

impl TableRow for DecodeTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("weights", -9, self.weights.to_string()),
            ("ranks", 5, self.world.to_string()),
            ("threads", 7, self.threads.to_string()),
            ("tokens/s", 9, format!("{:.1}", self.tokens_per_s)),
            ("best", 9, format!("{:.1}", self.best_tokens_per_s)),
            ("first ms", 9, format!("{:.1}", self.first_ms)),
            ("GB/s", 7, format!("{:.1}", self.gbps)),
            ("of memory", 9, format!("{:.0} %", self.bandwidth_share * 100.0)),
        ]
    }
}

/// A case that is measured.
#[derive(Clone, Copy)]
struct DecodeCase {
    keep_quantized: bool,
    world: usize,
    threads: usize,
}

pub(crate) fn run(options: &BenchDecodeOptions) -> Result<()> {
    let cases = processes::all_ok(cases(options))?;
    let mut rows = RowPrinter::new(options.json, cases.len() as u64);
    for case in cases {
        rows.announce(&format!("{} on {} rank(s)", case.weights(), case.world));
        rows.print(&measure(case, options)?)?;
    }
    Ok(())
}

impl DecodeCase {
    fn weights(self) -> &'static str {
        if self.keep_quantized { "quantized" } else { "f32" }
    }
}

fn cases(options: &BenchDecodeOptions) -> Result<Vec<DecodeCase>> {
    pretrained_config(&options.model)?;
    let catalog = checkpoint::open(&options.model);
    let is_quantized = catalog.is_ok_and(|found| found.tensors.values().any(|t| t.quantization().is_some()));
    let mut cases = Vec::new();
    for keep_quantized in [false, true].into_iter().filter(|&kept| is_quantized || !kept) {
        for world in processes::world_sizes(options.ranks.as_deref(), &[1, 2])? {
            ThreadWorld::new(world)?;
            let threads = match options.threads {
                Some(threads) => vec![threads as usize],
                None if cores() / world > 1 => vec![1, cores() / world],
                None => vec![1],
            };
            cases.extend(threads.into_iter().map(|threads| DecodeCase { keep_quantized, world, threads }));
        }
    }
    Ok(cases)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn measure(case: DecodeCase, options: &BenchDecodeOptions) -> Result<DecodeTiming> {
    let DecodeCase { keep_quantized, world, threads } = case;
    let (path, runs, tokens) = (options.model.clone(), options.runs, options.tokens as usize);
    let program = move |ranks: World| {
        let model = load(&ranks, &path, keep_quantized)?;
        model.eval();
        let mut times = Vec::new();
        for _ in 0..=runs {
            times.push(no_grad(|| decode(&ranks, &model, tokens))?);
        }
        let bytes = Tensor::new(&[weight_bytes(&model) as i64], &Device::Cpu)?;
        let all = ranks.all_gather(&bytes, 0, &vec![1; ranks.size()])?.to_vec1::<i64>()?;
        let bandwidth = ranks.on_first_rank(|| Ok(read_bandwidth()))?;
        Ok((times.split_off(1), all.iter().sum::<i64>() as u64, bandwidth.unwrap_or(f64::NAN)))
    };
    let (times, weight_bytes, memory_gbps) = Settings::from_env()?.kernel_threads(threads).launch(world, program)?;
    let sorted = |of: &dyn Fn(&DecodeTimes) -> f64| {
        let mut all: Vec<f64> = times.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let (first, per_token) = (sorted(&|run| run.first), sorted(&|run| run.decoding / (tokens - 1) as f64));
    let seconds = per_token[per_token.len() / 2];
    let gbps = weight_bytes as f64 / seconds / 1e9;
    Ok(DecodeTiming {
        weights: case.weights(),
        world,
        threads,
        tokens_per_s: 1.0 / seconds,
        best_tokens_per_s: 1.0 / per_token[0],
        first_ms: first[first.len() / 2] * 1e3,
        weight_bytes,
        gbps,
        memory_gbps,
        bandwidth_share: gbps / memory_gbps,
    })
}

fn load(world: &World, path: &Path, keep_quantized: bool) -> Result<PretrainedModel> {
    let mesh = world.mesh([("tp", world.size())])?;
    let options = LoadOptions { keep_quantized, ..LoadOptions::default() };
    load_with(path, &mesh, TensorParallel::new("tp"), &options).map(|(model, _)| model)
}

/// Seconds of a run.
struct DecodeTimes {
    /// Until the first token.
    first: f64,
    /// Of all tokens after it.
    decoding: f64,
}

/// Decodes from a prompt. Collective.
fn decode(world: &World, model: &PretrainedModel, tokens: usize) -> Result<DecodeTimes> {
    let mesh = world.mesh([("tp", world.size())])?;
    let vocabulary = model.config().vocab_size();
    let placed = |ids: &[i64]| DTensor::replicate(&Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu)?, &mesh);
    let next = |ids: &[i64], cache: &mut KvCache| -> Result<i64> {
        let logits = model.forward_cached(&placed(ids)?, cache)?;
        Ok(logits.argmax(Some(-1), false)?.full_tensor()?.to_dtype(DType::I64)?.to_vec1::<i64>()?[0])
    };
    let mut cache = KvCache::new();
    world.barrier()?;
    let start = Instant::now();
    let prompt: Vec<i64> = (0..PROMPT).map(|i| ((7 * i + 1) % vocabulary) as i64).collect();
    let mut token = next(&prompt, &mut cache)?;
    let first = start.elapsed().as_secs_f64();
    for _ in 1..tokens {
        token = next(&[token], &mut cache)?;
    }
    world.barrier()?;
    Ok(DecodeTimes { first, decoding: start.elapsed().as_secs_f64() - first })
}

/// Bytes of this rank's weights that a token needs: all but the embedding of a model with a head of its own, of which one row
/// is read. Experts that were not chosen count too.
fn weight_bytes(model: &PretrainedModel) -> u64 {
    let params = model.named_parameters();
    let has_head = params.iter().any(|(path, _)| path == "head.weight");
    let needed = params.iter().filter(|(path, _)| !(has_head && path == "tokens.weight"));
    let elements = |param: &Param| param.get().local_elem_count();
    needed.map(|(_, param)| (elements(param) * param.dtype().size_in_bytes()) as u64).sum()
}

/// GB per second that all cores together read from memory: the best of some passes over more than the caches hold.
fn read_bandwidth() -> f64 {
    const BYTES: usize = 256 << 20;
    let memory = vec![1u64; BYTES / 8];
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in memory.chunks(memory.len().div_ceil(cores())) {
                scope.spawn(move || {
                    // Several sums, so that additions do not wait for each other.
                    let mut sums = [0u64; 16];
                    for line in part.chunks_exact(16) {
                        sums.iter_mut().zip(line).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
                    }
                    black_box(sums);
                });
            }
        });
        BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..9).map(|_| pass()).fold(0.0, f64::max)
}
