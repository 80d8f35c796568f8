//! The output directory of a run as a model: its configuration, tokenizer and checkpoints.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::models::ModelConfig;
use shardwise::text::Tokenizer;
use shardwise::{Error, Result};

use super::checkpoints::{cannot_write, series};
use super::data::{TOKENIZER, read_tokenizer};

const CONFIG: &str = "config.json";

/// The contents of `config.json`.
#[derive(Serialize, Deserialize)]
struct ModelInfo {
    #[serde(flatten)]
    model: ModelConfig,
    /// `bytes`, or the name of a file in the same directory.
    tokenizer: String,
}

/// Writes the configuration and the tokenizer into an existing directory.
pub(super) fn write_info(directory: &Path, config: &ModelConfig, tokenizer: &Tokenizer) -> Result<()> {
    let tokenizer = if tokenizer.write(directory.join(TOKENIZER))? { TOKENIZER } else { "bytes" };
    let info = ModelInfo { model: config.clone(), tokenizer: tokenizer.to_string() };
    let text = serde_json::to_string_pretty(&info).map_err(Error::other)?;
    write(&directory.join(CONFIG), text + "\n")
}

/// Writes an output file.
pub(super) fn write(path: &Path, content: String) -> Result<()> {
    std::fs::write(path, content).map_err(|error| cannot_write("output file", path, &error))
}

/// A trained model on disk.
pub(crate) struct ModelDir {
    pub(crate) config: ModelConfig,
    pub(crate) tokenizer: Tokenizer,
    /// The latest one.
    pub(crate) checkpoint: PathBuf,
}

/// Whether a directory is an output directory of `train`: its configuration names a model of this library, or there is none and
/// the directory is the default one.
pub(crate) fn is_trained(directory: &Path) -> bool {
    let text = std::fs::read_to_string(directory.join(CONFIG));
    match text.ok().and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok()) {
        Some(config) => {
            config.get("model").is_some_and(serde_json::Value::is_string) && config.get("tokenizer").is_some()
        }
        None => directory.join("checkpoints").is_dir() || directory == Path::new("shardwise-out"),
    }
}

/// Reads the configuration and the tokenizer of a directory and finds its latest checkpoint.
pub(crate) fn read(directory: &Path) -> Result<ModelDir> {
    let bad = |file: &str, error: String| {
        let found = format!("{}: {error}", directory.join(file).display());
        ErrorKind::Argument.error::<Error>(
            "model",
            found,
            "a directory that `shardwise train` wrote",
            "train a model, or choose another directory",
        )
    };
    let text = std::fs::read_to_string(directory.join(CONFIG)).map_err(|error| bad(CONFIG, error.to_string()))?;
    let info: ModelInfo = serde_json::from_str(&text).map_err(|error| bad(CONFIG, error.to_string()))?;
    let file = (info.tokenizer != "bytes").then(|| directory.join(&info.tokenizer));
    let checkpoint = series(directory).latest()?.ok_or_else(|| bad("checkpoints", "no checkpoint yet".into()))?;
    Ok(ModelDir { config: info.model, tokenizer: read_tokenizer(file.as_deref())?, checkpoint })
}
