//! `shardwise generate`: text generation with a model directory, a GGUF file or a model that `shardwise train` trained.

mod chat;
pub(crate) mod dry;
mod job;
mod output;
mod prompts;
pub(crate) mod run;
pub(crate) mod source;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use shardwise::error::ErrorKind;
use shardwise::generate::Sampling;
use shardwise::prelude::*;

use crate::processes;
use job::GenerateJob;
use prompts::Request;
use source::GenerationSource;

/// The options of `shardwise generate`.
#[derive(Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
MODEL is a directory in Hugging Face's form (config.json, safetensors or pytorch_model.bin, tokenizer.json), a GGUF file, or an \
output directory of `shardwise train`. Without options for sampling, the settings of generation_config.json apply, or greedy \
decoding; trained models are sampled with a temperature of 0.8 and a top-k of 50. Greedy decoding gives the same tokens on every \
mesh, and so does sampling with the same seed, up to rounding.

Text goes to standard output as it is generated, figures and progress to standard error. Under mpirun or srun each process is a \
rank; the default mesh for N processes is tp=N, and the first process reads and prints.

Examples:
  shardwise generate SmolLM2-135M-Instruct --prompt 'The capital of' --mesh tp=3
  shardwise generate model.gguf --chat --quantized
  shardwise generate model --chat --prompt 'What is a mesh?' --max-tokens 64
  shardwise generate model --batch prompts.txt --mesh dp=2 --json
  shardwise generate model --prompt Hello --temperature 0.7 --top-p 0.9
  shardwise generate model --mesh tp=4 --dry
  mpirun -n 2 shardwise generate model --prompt Hello
  shardwise generate shardwise-out --prompt Alice"
)]
pub(crate) struct GenerateOptions {
    /// Model directory, GGUF file, or output directory of `shardwise train`
    #[arg(default_value = "shardwise-out")]
    model: PathBuf,
    /// Text to continue; `-` reads it from standard input
    #[arg(long)]
    prompt: Option<String>,
    /// Talk to the model with its chat template: one message per line of standard input, or the one of --prompt
    #[arg(long)]
    chat: bool,
    /// Instructions of a conversation
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Continue every line of a text file, or every object of a .jsonl file with `prompt` or `messages`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "chat"])]
    batch: Option<PathBuf>,
    /// Number of prompts of --batch that are computed together
    #[arg(long, value_name = "PROMPTS", default_value_t = 8)]
    batch_size: usize,
    /// Largest number of new tokens per prompt [default: 200]
    #[arg(long, value_name = "TOKENS")]
    max_tokens: Option<usize>,
    /// Sampling temperature; 0 is greedy decoding. Where decoding is greedy by default, --top-k, --top-p and --min-p set it to 1
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample from this many most likely tokens; 0 takes all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities add up to this
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Sample from tokens that are at least so many times as likely as the most likely one
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Divide the logits of tokens that occurred already by this
    #[arg(long, value_name = "PENALTY")]
    repetition_penalty: Option<f64>,
    /// End at this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Device mesh: tensor parallelism over the axis tp, prompts sharded over dp [default: tp=1; under mpirun tp=N]
    #[arg(long)]
    mesh: Option<String>,
    /// Data type of the weights in memory [default: f32; for a trained model that of its checkpoint]
    #[arg(long)]
    dtype: Option<WeightDtype>,
    /// Keep weights of a GGUF file quantized in memory: less memory, more tokens per second; otherwise they are dequantized
    #[arg(long, conflicts_with = "dtype")]
    quantized: bool,
    /// Print what each rank would read and hold, and load nothing
    #[arg(long, conflicts_with_all = ["prompt", "chat", "batch"])]
    dry: bool,
    /// Print a JSON object per prompt, with tokens, text, speed and peak memory per rank
    #[arg(long)]
    json: bool,
}

/// Data type of the weights in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightDtype {
    F32,
    Bf16,
    F16,
}

impl WeightDtype {
    pub(crate) fn dtype(self) -> DType {
        match self {
            WeightDtype::F32 => DType::F32,
            WeightDtype::Bf16 => DType::BF16,
            WeightDtype::F16 => DType::F16,
        }
    }
}

pub(crate) fn run(options: &GenerateOptions) -> Result<()> {
    let job = processes::all_ok(prepare(options))?;
    if options.dry {
        return dry::print(&job, options.json);
    }
    let mut settings = shardwise_mpi::Settings::from_env()?;
    if job.request.is_interactive() && std::env::var_os("SHARDWISE_DEADLINE").is_none() {
        // Ranks wait for a person, who may take a break.
        settings = settings.deadline(Duration::from_secs(24 * 3600));
    }
    settings.launch(job.mesh.size(), move |world| run::on_rank(&world, &job))
}

/// Resolves and checks all options, and encodes the prompts, before ranks start.
fn prepare(options: &GenerateOptions) -> Result<GenerateJob> {
    // Before anything is read: a wrong number is wrong for every model.
    let narrows = options.top_k.is_some() || options.top_p.is_some() || options.min_p.is_some();
    let over = |usual: &Sampling| Sampling {
        temperature: options.temperature.unwrap_or(match usual.is_greedy() && narrows {
            true => 1.0,
            false => usual.temperature,
        }),
        top_k: options.top_k.unwrap_or(usual.top_k),
        top_p: options.top_p.unwrap_or(usual.top_p),
        min_p: options.min_p.unwrap_or(usual.min_p),
        repetition_penalty: options.repetition_penalty.unwrap_or(usual.repetition_penalty),
        seed: options.seed,
        max_tokens: options.max_tokens.unwrap_or(200),
        stop: options.stop.clone(),
        eos: None,
    };
    over(&Sampling::greedy()).check()?;
    let source = GenerationSource::open(&options.model, options.dtype, options.quantized)?;
    let mesh = processes::mesh(options.mesh.as_deref(), "tp=1", "tp")?;
    if !options.dry {
        processes::check_thread_ranks(&mesh)?;
    }
    let sampling = over(&source.usual_sampling()?);
    sampling.check()?;
    if options.batch_size == 0 {
        return Err(ErrorKind::Argument.error("batch-size", 0, "at least 1", "correct the option"));
    }
    let request = if options.dry { Request::Nothing } else { Request::new(options, &source)? };
    let plan = source.plan(&mesh)?;
    Ok(GenerateJob { source, mesh, plan, sampling, request, batch_size: options.batch_size, json: options.json })
}
