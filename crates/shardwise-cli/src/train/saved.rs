//! A trained model on disk: checkpoints, sizes and how text becomes tokens.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shardwise::models::ModelConfig;
use shardwise::{Error, Result};

use super::checkpoints::{series, unwritable};
use super::data::{Coding, TOKENIZER};

const CONFIG: &str = "config.json";

/// What is said of a model beside its weights.
#[derive(Serialize, Deserialize)]
struct About {
    #[serde(flatten)]
    model: ModelConfig,
    /// `bytes`, or the name of a file beside this one.
    tokenizer: String,
}

/// Writes what is known of a model before it is trained into a directory that exists.
pub(super) fn describe(directory: &Path, config: &ModelConfig, coding: &Coding) -> Result<()> {
    let tokenizer = if coding.write(directory)? { TOKENIZER } else { "bytes" };
    let about = About { model: config.clone(), tokenizer: tokenizer.to_string() };
    let text = serde_json::to_string_pretty(&about).map_err(Error::other)?;
    write(&directory.join(CONFIG), text + "\n")
}

/// Writes a file of a run.
pub(super) fn write(path: &Path, content: String) -> Result<()> {
    std::fs::write(path, content).map_err(|error| unwritable("output file", path, &error))
}

/// What a directory holds.
pub(crate) struct Saved {
    pub(crate) config: ModelConfig,
    pub(crate) coding: Coding,
    /// The last checkpoint.
    pub(crate) checkpoint: PathBuf,
}

/// What is known of the model in a directory.
pub(crate) fn read(directory: &Path) -> Result<Saved> {
    let bad = |file: &str, error: String| {
        let found = format!("{}: {error}", directory.join(file).display());
        ErrorKind::Argument.error::<Error>(
            "model",
            found,
            "a directory that `shardwise train` wrote",
            "train a model, or name another one",
        )
    };
    let text = std::fs::read_to_string(directory.join(CONFIG)).map_err(|error| bad(CONFIG, error.to_string()))?;
    let about: About = serde_json::from_str(&text).map_err(|error| bad(CONFIG, error.to_string()))?;
    let file = (about.tokenizer != "bytes").then(|| directory.join(&about.tokenizer));
    let checkpoint = series(directory).latest()?.ok_or_else(|| bad("checkpoints", "no checkpoint yet".into()))?;
    Ok(Saved { config: about.model, coding: Coding::read(file.as_deref())?, checkpoint })
}
