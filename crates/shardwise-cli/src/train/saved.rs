//! A trained model on disk: weights, sizes and how text becomes tokens.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use shardwise::models::ModelConfig;
use shardwise::{Error, Result};

use super::data::{Coding, TOKENIZER};

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";

/// What is said of a model beside its weights.
#[derive(Serialize, Deserialize)]
struct About {
    #[serde(flatten)]
    model: ModelConfig,
    /// `bytes`, or the name of a file beside this one.
    tokenizer: String,
}

/// Writes a model into a directory that exists.
pub(crate) fn write(
    directory: &Path,
    config: &ModelConfig,
    coding: &Coding,
    weights: &BTreeMap<String, Tensor>,
) -> Result<()> {
    let tokenizer = match coding {
        Coding::Bytes => "bytes".to_string(),
        Coding::File(tokenizer) => {
            tokenizer.save(directory.join(TOKENIZER), false).map_err(|error| Error::other(error.to_string()))?;
            TOKENIZER.to_string()
        }
    };
    let about = About { model: config.clone(), tokenizer };
    let text = serde_json::to_string_pretty(&about).map_err(Error::other)?;
    std::fs::write(directory.join(CONFIG), text + "\n")?;
    let weights: HashMap<String, Tensor> = weights.iter().map(|(name, t)| (name.clone(), t.clone())).collect();
    Ok(candle_core::safetensors::save(&weights, directory.join(WEIGHTS))?)
}

/// What a directory holds.
pub(crate) struct Saved {
    pub(crate) config: ModelConfig,
    pub(crate) coding: Coding,
    pub(crate) weights: BTreeMap<String, Tensor>,
}

/// Reads a model from a directory.
pub(crate) fn read(directory: &Path) -> Result<Saved> {
    let bad = |file: &str, error: String| {
        let found = format!("{}: {error}", directory.join(file).display());
        Error::invalid("model", found, "a directory that `shardwise train` wrote", "train a model, or name another one")
    };
    let text = std::fs::read_to_string(directory.join(CONFIG)).map_err(|error| bad(CONFIG, error.to_string()))?;
    let about: About = serde_json::from_str(&text).map_err(|error| bad(CONFIG, error.to_string()))?;
    let file = (about.tokenizer != "bytes").then(|| directory.join(&about.tokenizer));
    let weights = candle_core::safetensors::load(directory.join(WEIGHTS), &Device::Cpu)
        .map_err(|error| bad(WEIGHTS, error.to_string()))?;
    let weights = weights.into_iter().collect();
    Ok(Saved { config: about.model, coding: Coding::read(file.as_deref())?, weights })
}
