//! `shardwise bench train`: time per training step of a small GPT on one rank and on several.

use shardwise::error::ErrorKind;
use std::time::Instant;

use candle_core::{Device, Tensor};
use clap::{Args, ValueEnum};
use serde::Serialize;
use shardwise::models::{DataParallelMode, GptConfig, ModelConfig, ParallelismConfig, batch_placements};
use shardwise::optim::{AdamW, ParamGroup, Schedule};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;
use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};
use shardwise_mpi::Settings;

use crate::output::{RowPrinter, TableRow};
use crate::processes::{self, Launched};
use crate::train::trainer::TrainerConfig;

/// The options of `shardwise bench train`.
#[derive(Args)]
#[command(after_help = "\
Trains a GPT in f32 with AdamW. `single` is one rank; `ddp`, `fsdp` and `tp` use two thread ranks, or under mpirun one rank \
per process. A step is forward, backward and optimizer step. The losses of all modes are equal up to rounding. `peak MB` is the \
largest resident memory of the process so far, so measure modes one at a time to compare it.

Sizes, each of which has 8 heads (large: 12) and can be changed by the options below:
  default   4 layers, width 256, 8 sequences of 128 tokens, vocabulary 1024
  long      6 layers, width 512, 4 sequences of 512 tokens, vocabulary 256
  large     12 layers, width 768, 1 sequence of 1024 tokens, vocabulary 16384

Examples:
  shardwise bench train
  shardwise bench train --json --steps 40
  shardwise bench train --size long --modes single --threads 2
  mpirun -n 4 shardwise bench train --modes ddp,fsdp")]
pub(crate) struct BenchTrainOptions {
    /// Steps to measure per mode, after 3 warm-up steps
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Modes to measure [default: all; under mpirun the ones that fit the number of processes]
    #[arg(long, value_delimiter = ',', value_parser = MODES)]
    modes: Option<Vec<String>>,
    /// Size of the model and the batch
    #[arg(long, value_enum, default_value_t = BenchSize::Default)]
    size: BenchSize,
    /// Number of layers
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Width of the model
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Number of attention heads
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Tokens per sequence
    #[arg(long, value_name = "N")]
    length: Option<usize>,
    /// Sequences per batch
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Size of the vocabulary
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// Threads of each rank
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: u64,
    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,
}

const MODES: [&str; 4] = ["single", "ddp", "tp", "fsdp"];
const WARM_UP: u32 = 3;

/// A size of the model and the batch.
#[derive(Clone, Copy, ValueEnum)]
enum BenchSize {
    Default,
    Long,
    Large,
}

/// Sizes of the model, the batch and the ranks.
#[derive(Clone, Copy)]
struct TrainSizes {
    layers: usize,
    width: usize,
    heads: usize,
    length: usize,
    batch: usize,
    vocab: usize,
    threads: usize,
}

impl BenchTrainOptions {
    fn sizes(&self) -> TrainSizes {
        let [layers, width, heads, length, batch, vocab] = match self.size {
            BenchSize::Default => [4, 256, 8, 128, 8, 1024],
            BenchSize::Long => [6, 512, 8, 512, 4, 256],
            BenchSize::Large => [12, 768, 12, 1024, 1, 16384],
        };
        TrainSizes {
            layers: self.layers.unwrap_or(layers),
            width: self.width.unwrap_or(width),
            heads: self.heads.unwrap_or(heads),
            length: self.length.unwrap_or(length),
            batch: self.batch.unwrap_or(batch),
            vocab: self.vocab.unwrap_or(vocab),
            threads: self.threads as usize,
        }
    }
}

#[derive(Serialize)]
struct TrainTiming {
    mode: String,
    world: usize,
    /// Milliseconds of the best step.
    best_ms: f64,
    /// Milliseconds of the median step.
    median_ms: f64,
    /// Tokens per second of the median step.
    tokens_per_s: f64,
    /// Loss of the last step.
    loss: f64,
    /// Milliseconds of the first step.
    first_ms: f64,
    /// Largest resident memory of the process so far, in MB; 0 where the system does not report it.
    peak_mb: f64,
}

impl TableRow for TrainTiming {
    fn columns(&self) -> Vec<(&'static str, i32, String)> {
        vec![
            ("mode", -8, self.mode.clone()),
            ("world", 5, self.world.to_string()),
            ("best ms", 9, format!("{:.1}", self.best_ms)),
            ("median ms", 9, format!("{:.1}", self.median_ms)),
            ("tokens/s", 9, format!("{:.0}", self.tokens_per_s)),
            ("loss", 8, format!("{:.4}", self.loss)),
            ("first ms", 9, format!("{:.1}", self.first_ms)),
            ("peak MB", 8, format!("{:.0}", self.peak_mb)),
        ]
    }
}

/// The mesh and the sharding plan of a mode.
struct TrainCase {
    mode: String,
    mesh: Mesh,
    plan: ShardingPlan,
}

pub(crate) fn run(options: &BenchTrainOptions) -> Result<()> {
    let cases = processes::all_ok(cases(options))?;
    let mut rows = RowPrinter::new(options.json, cases.len() as u64);
    for case in cases {
        rows.announce(&case.mode);
        rows.print(&measure(case, options.steps, options.sizes())?)?;
    }
    Ok(())
}

/// The modes that are asked for; by default all modes that fit the number of processes.
fn cases(options: &BenchTrainOptions) -> Result<Vec<TrainCase>> {
    let (asked, config) = (options.modes.as_deref(), config(options.sizes()));
    let processes = processes::launched();
    let several = processes.as_ref().map_or(2, |job| job.size);
    let all: Vec<String> = MODES.map(str::to_string).into();
    let usual = match processes.map(|job| job.size) {
        None => &all[..],
        Some(1) => &all[..1],
        Some(_) => &all[1..],
    };
    let case = |mode: &String| {
        let is_single = mode == "single";
        if let (true, Some(Launched { by, .. })) = (is_single && several > 1, processes::launched()) {
            let found = format!("single, which is one rank, in a job of {several} processes");
            let fix = format!("leave it out, or run with {by} -n 1");
            return Err(ErrorKind::Argument.error("mode", found, "one process per rank", fix));
        }
        let parallelism = ParallelismConfig {
            data_parallel: if mode == "fsdp" { DataParallelMode::FullyShard } else { DataParallelMode::Replicate },
            tensor_parallel: mode == "tp",
            sequence_parallel: false,
        };
        let axis = if mode == "tp" { "tp" } else { "dp" };
        let mesh = Mesh::new([(axis, if is_single { 1 } else { several })])?;
        Ok(TrainCase { mode: mode.clone(), plan: parallelism.plan(&config, &mesh)?, mesh })
    };
    asked.unwrap_or(usual).iter().map(case).collect()
}

fn config(sizes: TrainSizes) -> ModelConfig {
    ModelConfig::Gpt(GptConfig {
        vocab_size: sizes.vocab,
        seq_len: sizes.length,
        d_model: sizes.width,
        n_layers: sizes.layers,
        n_heads: sizes.heads,
        d_ff: 4 * sizes.width,
        ..GptConfig::default()
    })
}

fn measure(TrainCase { mode, mesh, plan }: TrainCase, steps: u32, sizes: TrainSizes) -> Result<TrainTiming> {
    let world = mesh.size();
    let program = move |ranks: World| {
        let mesh = ranks.device_mesh(mesh.clone())?;
        let group = ParamGroup::new(AdamW::default());
        let recipe = TrainerConfig {
            init: None,
            lora: None,
            config: &config(sizes),
            plan: &plan,
            dtype: DType::F32,
            seed: 1,
            groups: &[group.clone(), group],
            schedule: Schedule::Constant,
            clip: None,
        };
        let mut trainer = recipe.build(&mesh)?;
        let (mut times, mut loss) = (Vec::new(), 0.0);
        for step in 0..WARM_UP + steps {
            let tokens = tokens(step, sizes);
            ranks.barrier()?;
            let start = Instant::now();
            loss = trainer.step(&batch(&tokens, &mesh, sizes)?)?.loss;
            ranks.barrier()?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        let first_ms = times[0];
        let mut times = times.split_off(WARM_UP as usize);
        times.sort_by(f64::total_cmp);
        Ok((times, loss, first_ms))
    };
    let (times, loss, first_ms) = Settings::from_env()?.kernel_threads(sizes.threads).launch(world, program)?;
    let median_ms = times[times.len() / 2];
    let tokens_per_s = (sizes.batch * sizes.length) as f64 / (median_ms * 1e-3);
    Ok(TrainTiming { mode, world, best_ms: times[0], median_ms, tokens_per_s, loss, first_ms, peak_mb: peak_mb() })
}

/// The largest resident memory of this process so far, as Linux reports it.
fn peak_mb() -> f64 {
    let status = read_text("/proc/self/status", MOST_CONFIG_BYTES).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok());
    kilobytes.unwrap_or(0.0) * 1024.0 / 1e6
}

/// Ids and targets of a batch, sharded over the mesh.
fn batch(tokens: &[u32], mesh: &DeviceMesh, sizes: TrainSizes) -> Result<Vec<DTensor>> {
    let tokens = Tensor::from_slice(tokens, (sizes.batch, sizes.length + 1), &Device::Cpu)?;
    let part = |start: usize| {
        let part = tokens.narrow(1, start, sizes.length)?.contiguous()?;
        DTensor::distribute_tensor(&part, mesh, batch_placements(mesh), None)
    };
    Ok(vec![part(0)?, part(1)?])
}

/// Synthetic tokens with something to learn: three of four follow from the token before, one is random.
fn tokens(step: u32, sizes: TrainSizes) -> Vec<u32> {
    let mut state = u64::from(step) + 1;
    let mut token = 0u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let noise = state >> 33;
        token = if noise % 4 == 0 { noise / 4 } else { token * 5 + 1 } % sizes.vocab as u64;
        token as u32
    };
    (0..sizes.batch * (sizes.length + 1)).map(|_| next()).collect()
}
