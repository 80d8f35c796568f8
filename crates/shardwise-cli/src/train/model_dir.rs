//! The output directory of a run as a model: its configuration, tokenizer and checkpoints.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::models::ModelConfig;
use shardwise::{Error, Result};

use super::checkpoints::{cannot_write, series};
use super::data::{TOKENIZER, TextCodec};

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
pub(super) fn write_info(directory: &Path, config: &ModelConfig, codec: &TextCodec) -> Result<()> {
    let tokenizer = if codec.write(directory)? { TOKENIZER } else { "bytes" };
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
    pub(crate) codec: TextCodec,
    /// The latest one.
    pub(crate) checkpoint: PathBuf,
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
    Ok(ModelDir { config: info.model, codec: TextCodec::read(file.as_deref())?, checkpoint })
}
