//! `shardwise generate`: text from a trained model.

use shardwise::error::ErrorKind;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use shardwise::checkpoint;
use shardwise::models::ModelSpec;
use shardwise::nn::Builder;
use shardwise::prelude::*;

use crate::train::checkpoints::load_model;
use crate::train::sample::{Choice, continued};
use crate::train::saved;

/// What to write.
#[derive(Args)]
#[command(after_help = "\
Examples:
  shardwise generate
  shardwise generate shardwise-out --prompt 'Alice was' --tokens 300 --temperature 0.7
  shardwise generate --temperature 0 --json")]
pub(crate) struct Options {
    /// Directory that `shardwise train` wrote; its last checkpoint is used.
    #[arg(default_value = "shardwise-out")]
    model: PathBuf,
    /// What the text begins with.
    #[arg(long, default_value = "The ")]
    prompt: String,
    /// Tokens to make.
    #[arg(long, default_value_t = 200)]
    tokens: usize,
    /// Below 1 likely tokens become likelier; 0 always takes the likeliest.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Consider only so many of the likeliest tokens.
    #[arg(long, default_value_t = 50)]
    top: usize,
    /// Another seed gives another text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print a JSON object with `prompt` and `text`.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if !(options.temperature >= 0.0 && options.temperature.is_finite()) {
        let found = options.temperature;
        return Err(ErrorKind::Argument.error(
            "temperature",
            found,
            "a number that is at least 0",
            "correct the option",
        ));
    }
    let saved = saved::read(&options.model)?;
    let prompt = saved.coding.encode(&options.prompt)?;
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
    let choice = Choice {
        tokens: options.tokens,
        window: config.seq_len(),
        temperature: options.temperature,
        top: options.top,
        seed: options.seed,
    };
    let made = launch(1, move |world| {
        let mesh = world.mesh([("dp", 1)])?;
        let model = config.build(&Builder::new(&mesh).dtype(dtype))?;
        load_model(&world, &saved.checkpoint, &*model)?;
        continued(&*model, &mesh, &prompt, choice)
    })?;
    let text = saved.coding.decode(&made)?;
    let mut out = std::io::stdout().lock();
    if options.json {
        let object = serde_json::json!({ "prompt": options.prompt, "text": text });
        return Ok(writeln!(out, "{object}")?);
    }
    Ok(writeln!(out, "{}{text}", options.prompt)?)
}
