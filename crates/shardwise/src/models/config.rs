//! The language models of this crate as one enum.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::gpt::GptConfig;
use super::language::example_batch;
use super::llama::LlamaConfig;
use super::model::ModelSpec;
use super::pretrained::{PretrainedConfig, PretrainedModel};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::Builder;
use crate::tensor::DTensor;

/// Sizes of any language model of this crate. In JSON an object with the name of the model under `model`.
///
/// ```
/// use shardwise::models::{ModelConfig, ModelSpec};
///
/// let config: ModelConfig = serde_json::from_str(r#"{"model": "llama", "d_model": 128, "n_heads": 8}"#).unwrap();
/// assert_eq!((config.heads(), config.vocab_size()), ((8, 2), 256));
/// assert!(config.check().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "model", rename_all = "lowercase")]
#[non_exhaustive]
pub enum ModelConfig {
    /// A GPT-2.
    Gpt(GptConfig),
    /// A model of the Llama family.
    Llama(LlamaConfig),
    /// A model of another library.
    Pretrained {
        /// Its configuration in Hugging Face's form.
        config: PretrainedConfig,
        /// Length of sequences in training, in tokens: most models take longer ones than anybody trains on.
        seq_len: usize,
    },
}

impl ModelConfig {
    /// Name of the model: `gpt`, `llama`, or the kind of a model of another library.
    pub fn name(&self) -> &'static str {
        match self {
            ModelConfig::Gpt(_) => "gpt",
            ModelConfig::Llama(_) => "llama",
            ModelConfig::Pretrained { config, .. } => config.model_type(),
        }
    }

    /// Size of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.vocab_size,
            ModelConfig::Llama(config) => config.vocab_size,
            ModelConfig::Pretrained { config, .. } => config.vocab_size(),
        }
    }

    /// Longest sequence, in tokens.
    pub fn seq_len(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.seq_len,
            ModelConfig::Llama(config) => config.seq_len,
            ModelConfig::Pretrained { seq_len, .. } => *seq_len,
        }
    }

    /// Numbers of query heads and of key heads.
    pub fn heads(&self) -> (usize, usize) {
        match self {
            ModelConfig::Gpt(config) => (config.n_heads, config.n_heads),
            ModelConfig::Llama(config) => (config.n_heads, config.n_kv_heads),
            ModelConfig::Pretrained { config, .. } => config.heads(),
        }
    }
}

impl ModelSpec for ModelConfig {
    type Model = PretrainedModel;

    fn check(&self) -> Result<()> {
        match self {
            ModelConfig::Gpt(config) => config.check(),
            ModelConfig::Llama(config) => config.check(),
            ModelConfig::Pretrained { config, seq_len } => {
                let (found, most) = (*seq_len, config.max_positions());
                if found == 0 || found > most {
                    let needed = format!("1 to {most}, the positions of the model");
                    let fix = "choose another length";
                    return Err(ErrorKind::Model.error("length of sequences", found, needed, fix));
                }
                config.check()
            }
        }
    }

    fn build(&self, builder: &Builder) -> Result<PretrainedModel> {
        match self {
            ModelConfig::Gpt(config) => config.build(builder),
            ModelConfig::Llama(config) => config.build(builder),
            ModelConfig::Pretrained { config, .. } => config.build(builder),
        }
    }

    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
        match self {
            ModelConfig::Gpt(config) => config.example_batch(samples, mesh),
            ModelConfig::Llama(config) => config.example_batch(samples, mesh),
            ModelConfig::Pretrained { seq_len, .. } => example_batch(samples, *seq_len, mesh),
        }
    }

    fn hf_config(&self, dtype: DType) -> Value {
        match self {
            ModelConfig::Gpt(config) => config.hf_config(dtype),
            ModelConfig::Llama(config) => config.hf_config(dtype),
            ModelConfig::Pretrained { config, .. } => config.hf_config(dtype),
        }
    }
}
