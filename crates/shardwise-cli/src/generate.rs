//! `shardwise generate`: text generation with a trained model.

use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use shardwise::checkpoint;
use shardwise::models::ModelSpec;
use shardwise::nn::Builder;
use shardwise::prelude::*;

use crate::train::checkpoints::load_model;
use crate::train::model_dir;
use crate::train::sample::{Sampling, generate};

/// The options of `shardwise generate`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardwise generate
  shardwise generate shardwise-out --prompt 'Alice was' --top-k 20
  shardwise generate --temperature 0 --json")]
pub(crate) struct GenerateOptions {
    /// Output directory of `shardwise train`; its latest checkpoint is loaded
    #[arg(default_value = "shardwise-out")]
    model: PathBuf,
    /// Text to continue
    #[arg(long, default_value = "The ")]
    prompt: String,
    /// Number of tokens to generate
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Sample from this many most likely tokens
    #[arg(long, value_name = "K", default_value_t = 50)]
    top_k: usize,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print a JSON object with the fields `prompt` and `text`
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &GenerateOptions) -> Result<()> {
    if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
        let found = options.temperature;
        return Err(ErrorKind::Argument.error(
            "temperature",
            found,
            "a finite number of at least 0",
            "correct the option",
        ));
    }
    let saved = model_dir::read(&options.model)?;
    let prompt = saved.codec.encode(&options.prompt)?;
    if prompt.is_empty() {
        return Err(ErrorKind::Argument.error(
            "prompt",
            "no tokens",
            "at least one",
            "give a prompt that is not empty",
        ));
    }
    let stored = checkpoint::open(&saved.checkpoint)?;
    let dtype = stored.tensor("model.tokens.weight")?.element.dtype().unwrap_or(DType::F32);
    let config = saved.config;
    let sampling = Sampling {
        tokens: options.tokens,
        window: config.seq_len(),
        temperature: options.temperature,
        top_k: options.top_k,
        seed: options.seed,
    };
    let generated = launch(1, move |world| {
        let mesh = world.mesh([("dp", 1)])?;
        let model = config.build(&Builder::new(&mesh).dtype(dtype))?;
        load_model(&world, &saved.checkpoint, &*model)?;
        generate(&*model, &mesh, &prompt, sampling)
    })?;
    let text = saved.codec.decode(&generated)?;
    let mut out = std::io::stdout().lock();
    if options.json {
        let object = serde_json::json!({ "prompt": options.prompt, "text": text });
        return Ok(writeln!(out, "{object}")?);
    }
    Ok(writeln!(out, "{}{text}", options.prompt)?)
}
