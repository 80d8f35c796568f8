//! The output directory of a run as a model: its configuration, tokenizer and checkpoints.

use shardwise::error::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;
use shardwise::generate::Sampling;
use shardwise::models::ModelConfig;
use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};
use shardwise::text::{TextFiles, Tokenizer};
use shardwise::{Error, Result};

use super::checkpoints::{cannot_write, series};
use super::data::tokenizer_file;
use super::lora::LoraSettings;
use super::settings::TrainJob;

const CONFIG: &str = "config.json";

/// The contents of `config.json`.
#[derive(Serialize, Deserialize)]
struct ModelInfo {
    #[serde(flatten)]
    model: ModelConfig,
    /// `bytes`, or the name of a file in the same directory.
    tokenizer: String,
    /// Adapters whose weights are in the checkpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lora: Option<LoraSettings>,
    /// The log of the run, which a resumed one continues; relative to the directory if it is inside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log: Option<PathBuf>,
}

/// File name of the tokenizer.
const TOKENIZER: &str = TextFiles::NAMES[0];

/// Writes the configuration and the tokenizer into an existing directory.
pub(super) fn write_info(directory: &Path, job: &TrainJob, files: &TextFiles) -> Result<()> {
    files.write(directory)?;
    let tokenizer = if files.tokenizer.is_empty() { "bytes" } else { TOKENIZER }.to_string();
    let log = job.log.as_deref().map(|log| log_from(directory, log)).transpose()?;
    let info = ModelInfo { model: job.config.clone(), tokenizer, lora: job.lora.clone(), log };
    let text = serde_json::to_string_pretty(&info).map_err(Error::other)?;
    write(&directory.join(CONFIG), text + "\n")
}

/// The model of a run in Hugging Face's form, inside its output directory.
pub(crate) fn export_of(directory: &Path) -> PathBuf {
    directory.join("model")
}

/// The path of a model that may be given as the output directory of the run that trained it.
pub(crate) fn model_of(path: PathBuf) -> PathBuf {
    let export = export_of(&path);
    if is_trained(&path) && export.join(CONFIG).is_file() { export } else { path }
}

/// What an export says about text: a model of bytes has a tokenizer that other libraries know, and a model that was trained from
/// scratch is sampled as `generate` does.
pub(super) fn text_files(job: &TrainJob, files: &TextFiles) -> TextFiles {
    let files = if files.tokenizer.is_empty() { TextFiles::bytes() } else { files.clone() };
    if job.init.is_some() || !files.generation_config.is_null() {
        return files;
    }
    let Sampling { temperature, top_k, .. } = usual_sampling();
    let generation_config = json!({ "do_sample": true, "temperature": temperature, "top_k": top_k });
    TextFiles { generation_config, ..files }
}

/// How tokens of a model that was trained from scratch are sampled if nothing says otherwise.
pub(crate) fn usual_sampling() -> Sampling {
    Sampling::new(0.8).top_k(50)
}

/// The path of a log as the configuration in a directory stores it: it stays right if the directory is moved with it.
fn log_from(directory: &Path, log: &Path) -> Result<PathBuf> {
    let (directory, log) = (std::path::absolute(directory)?, std::path::absolute(log)?);
    Ok(log.strip_prefix(&directory).map_or(log.clone(), Path::to_path_buf))
}

/// The log of the run that wrote a directory, if it had one. Fails if the configuration is there and cannot be read: the run would go
/// on without its log.
pub(super) fn log_of(directory: &Path) -> Result<Option<PathBuf>> {
    #[derive(Deserialize)]
    struct LogInfo {
        log: PathBuf,
    }
    let path = directory.join(CONFIG);
    let text = match read_text(&path, MOST_CONFIG_BYTES) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| -> Error {
            let found = format!("{}: {error}", path.display());
            let needed = "the configuration of the run that is resumed, or no file";
            ErrorKind::path(&path).error("output directory", found, needed, "remove the file: resuming writes it again")
        })?,
    };
    Ok(serde_json::from_str(&text).ok().map(|LogInfo { log }| directory.join(log)))
}

/// Writes an output file. A pipe in its place would wait for a reader.
pub(super) fn write(path: &Path, content: String) -> Result<()> {
    let written = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(std::io::Error::other("something that is not a file is in its place")),
        _ => std::fs::write(path, content),
    };
    written.map_err(|error| cannot_write("output file", path, &error))
}

/// A trained model on disk.
pub(crate) struct ModelDir {
    pub(crate) config: ModelConfig,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) lora: Option<LoraSettings>,
    /// The latest one.
    pub(crate) checkpoint: PathBuf,
}

/// Whether a directory is an output directory of `train`: its configuration names a model of this library, or there is none and
/// the directory is the default one.
pub(crate) fn is_trained(directory: &Path) -> bool {
    let text = read_text(directory.join(CONFIG), MOST_CONFIG_BYTES);
    match text.ok().and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok()) {
        Some(config) => {
            config.get("model").is_some_and(serde_json::Value::is_string) && config.get("tokenizer").is_some()
        }
        None => directory.join("checkpoints").is_dir() || directory == Path::new("shardwise-out"),
    }
}

/// Checks that a run may write to a directory: one that is new, or has no configuration but that of an earlier run.
pub(super) fn check_out(directory: &Path) -> Result<()> {
    if !directory.join(CONFIG).is_file() || is_trained(directory) {
        return Ok(());
    }
    let found = format!("{}, which `shardwise train` did not write", directory.join(CONFIG).display());
    let needed = "a new directory, or one of an earlier run";
    Err(ErrorKind::path(directory).error("output directory", found, needed, "choose another --out"))
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
    let text = read_text(directory.join(CONFIG), MOST_CONFIG_BYTES).map_err(|error| bad(CONFIG, error.to_string()))?;
    let info: ModelInfo = serde_json::from_str(&text).map_err(|error| bad(CONFIG, error.to_string()))?;
    let tokenizer = match (&info.model, info.tokenizer.as_str()) {
        (_, "bytes") => Tokenizer::bytes(),
        (ModelConfig::Pretrained { config, .. }, _) => {
            Tokenizer::new(&TextFiles { config: config.json().clone(), ..TextFiles::read(directory)? })?
        }
        (_, file) => Tokenizer::new(&tokenizer_file(&directory.join(file))?)?,
    };
    let checkpoint = series(directory).latest()?.ok_or_else(|| bad("checkpoints", "no checkpoint yet".into()))?;
    Ok(ModelDir { config: info.model, tokenizer, lora: info.lora, checkpoint })
}
