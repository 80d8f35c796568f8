//! The model to generate with, and what its files say.

use std::path::{Path, PathBuf};

use serde_json::Value;
use shardwise::checkpoint::{self, Format};
use shardwise::error::ErrorKind;
use shardwise::generate::Sampling;
use shardwise::models::{DataParallelMode, ModelConfig, ParallelismConfig, PretrainedConfig, load_tokenizer};
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;
use shardwise::read_file::{MOST_CONFIG_BYTES, read_text};
use shardwise::text::Tokenizer;

use super::WeightDtype;
use crate::train::lora::LoraSettings;
use crate::train::model_dir::{self, ModelDir};

/// A model on disk.
pub(super) struct GenerationSource {
    pub(super) kind: SourceKind,
    pub(super) tokenizer: Tokenizer,
    /// Type of the weights in memory.
    pub(super) dtype: DType,
    pub(super) stored: StoredForm,
}

/// How the weights are stored, and what becomes of them in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoredForm {
    /// Plain elements.
    Plain,
    /// Quantized; expanded when they are loaded.
    Dequantized,
    /// Quantized, in memory too.
    KeptQuantized,
}

impl StoredForm {
    /// What the options ask for.
    fn of(path: &Path, keep_quantized: bool) -> Result<Self> {
        let is_quantized = checkpoint::open(path).is_ok_and(|catalog| {
            catalog.format == Format::Gguf && catalog.tensors.values().any(|tensor| tensor.quantization().is_some())
        });
        match (is_quantized, keep_quantized) {
            (false, false) => Ok(StoredForm::Plain),
            (true, false) => Ok(StoredForm::Dequantized),
            (true, true) => Ok(StoredForm::KeptQuantized),
            (false, true) => {
                let found = format!("{}, without quantized weights", path.display());
                let needed = "a GGUF file with quantized weights";
                Err(ErrorKind::Argument.error("--quantized", found, needed, "leave the option out"))
            }
        }
    }
}

pub(super) enum SourceKind {
    /// A directory in Hugging Face's form, or a GGUF file.
    Pretrained { path: PathBuf, config: Box<PretrainedConfig> },
    /// A checkpoint of `shardwise train`.
    Trained { config: ModelConfig, lora: Option<LoraSettings>, checkpoint: PathBuf },
}

impl GenerationSource {
    /// Reads configuration and tokenizer.
    pub(super) fn open(path: &Path, dtype: Option<WeightDtype>, keep_quantized: bool) -> Result<Self> {
        if model_dir::is_trained(path) {
            let ModelDir { config, tokenizer, lora, checkpoint } = model_dir::read(path)?;
            let saved = checkpoint::open(&checkpoint)?.tensor("model.tokens.weight")?.element.dtype();
            let dtype = dtype.map_or(saved.unwrap_or(DType::F32), WeightDtype::dtype);
            let stored = StoredForm::of(&checkpoint, keep_quantized)?;
            return Ok(GenerationSource {
                kind: SourceKind::Trained { config, lora, checkpoint },
                tokenizer,
                dtype,
                stored,
            });
        }
        let config = pretrained_config(path)?;
        if config.is_encoder() {
            let found = format!("{}, an encoder ({})", path.display(), config.model_type());
            let fix = "use `shardwise embed` for encoders";
            return Err(ErrorKind::Model.error("model", found, "a causal language model", fix));
        }
        let kind = SourceKind::Pretrained { path: path.to_path_buf(), config: Box::new(config) };
        let dtype = dtype.map_or(DType::F32, WeightDtype::dtype);
        let stored = StoredForm::of(path, keep_quantized)?;
        Ok(GenerationSource { kind, tokenizer: load_tokenizer(path)?, dtype, stored })
    }

    pub(super) fn is_trained(&self) -> bool {
        matches!(self.kind, SourceKind::Trained { .. })
    }

    /// Whether the model was trained from scratch: then its context is the length of the sequences it was trained on, and texts
    /// may be longer.
    pub(super) fn has_short_context(&self) -> bool {
        matches!(&self.kind, SourceKind::Trained { config: ModelConfig::Gpt(_) | ModelConfig::Llama(_), .. })
    }

    /// Checks that the model accepts a prompt, before it is loaded.
    pub(super) fn check(&self, ids: &[u32]) -> Result<()> {
        let (context, vocabulary) = match &self.kind {
            SourceKind::Pretrained { config, .. } => (config.max_positions(), config.vocab_size()),
            SourceKind::Trained { config: ModelConfig::Pretrained { config, .. }, .. } => {
                (config.max_positions(), config.vocab_size())
            }
            SourceKind::Trained { config, .. } => (usize::MAX, config.vocab_size()),
        };
        let bad =
            |found: String, needed: String, fix: &str| Err(ErrorKind::Argument.error("prompt", found, needed, fix));
        if ids.len() > context {
            let needed = format!("at most {context}, the context of the model");
            return bad(format!("{} tokens", ids.len()), needed, "shorten the prompt");
        }
        match ids.iter().find(|&&id| id as usize >= vocabulary) {
            Some(id) => {
                let needed = format!("tokens below {vocabulary}, the vocabulary of the model");
                bad(format!("token {id}"), needed, "use the tokenizer that belongs to the model")
            }
            None => Ok(()),
        }
    }

    /// How tokens are sampled if no option says otherwise.
    pub(super) fn usual_sampling(&self) -> Result<Sampling> {
        match &self.kind {
            SourceKind::Trained { .. } => Ok(model_dir::usual_sampling()),
            SourceKind::Pretrained { path, .. } => {
                let path = path.join("generation_config.json");
                let Ok(text) = read_text(&path, MOST_CONFIG_BYTES) else { return Ok(Sampling::greedy()) };
                // The tokenizer has read the file before, so it is JSON.
                sampling_of(&serde_json::from_str(&text).unwrap_or_default())
            }
        }
    }

    /// Tensor parallelism over `tp`, replicated over `dp`.
    pub(super) fn plan(&self, mesh: &Mesh) -> Result<ShardingPlan> {
        match &self.kind {
            SourceKind::Trained { config, .. } => parallelism(mesh).plan(config, mesh),
            SourceKind::Pretrained { config, .. } => parallelism(mesh).plan(&**config, mesh),
        }
    }
}

/// The configuration of a model directory or GGUF file.
pub(crate) fn pretrained_config(path: &Path) -> Result<PretrainedConfig> {
    if !path.exists() {
        let found = format!("no such file or directory: {}", path.display());
        let needed = "a model directory, a GGUF file, or an output directory of `shardwise train`";
        return Err(ErrorKind::path(path).error("model", found, needed, "check the path"));
    }
    PretrainedConfig::read(path)
}

/// How models are sharded for inference.
pub(crate) fn parallelism(mesh: &Mesh) -> ParallelismConfig {
    ParallelismConfig {
        data_parallel: DataParallelMode::Replicate,
        tensor_parallel: mesh.axis("tp").is_ok(),
        sequence_parallel: false,
    }
}

/// The settings of a `generation_config.json`, with the defaults of transformers.
fn sampling_of(config: &Value) -> Result<Sampling> {
    let number = |name: &str, usual: f64| config[name].as_f64().unwrap_or(usual);
    let greedy = Sampling::greedy().repetition_penalty(number("repetition_penalty", 1.0));
    let sampling = match config["do_sample"].as_bool() {
        Some(true) => Sampling {
            temperature: number("temperature", 1.0),
            top_k: config["top_k"].as_u64().unwrap_or(50) as usize,
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            ..greedy
        },
        _ => greedy,
    };
    sampling.check()?;
    Ok(sampling)
}

#[test]
fn settings_of_generation_config_apply_only_if_it_samples() {
    let of = |text: &str| sampling_of(&serde_json::from_str(text).unwrap()).unwrap();
    assert!(of(r#"{"temperature": 0.6, "top_k": 20}"#).is_greedy());
    let found = of(r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}"#);
    assert_eq!((found.temperature, found.top_k, found.top_p, found.repetition_penalty), (0.6, 50, 0.9, 1.1));
    assert!(sampling_of(&serde_json::json!({"do_sample": true, "top_p": 3.0})).is_err());
}
