//! Sizes of models, and the check that they fit together.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Sizes of a GPT: learned positions, layer norm, GELU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GptConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Longest sequence.
    pub seq_len: usize,
    /// Features.
    pub d_model: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Heads of attention.
    pub n_heads: usize,
    /// Features inside an MLP.
    pub d_ff: usize,
    /// Added to the variance in norms.
    pub layer_norm_eps: f64,
    /// Whether the table of tokens is also the weight of the head.
    pub tied_head: bool,
    /// Probability with which elements of embeddings and of what blocks add are dropped.
    pub dropout: f64,
}

impl Default for GptConfig {
    fn default() -> Self {
        GptConfig {
            vocab_size: 256,
            seq_len: 64,
            d_model: 96,
            n_layers: 3,
            n_heads: 4,
            d_ff: 384,
            layer_norm_eps: 1e-5,
            tied_head: false,
            dropout: 0.0,
        }
    }
}

/// Sizes of a model of the Llama family: RMS norm, rotary positions, gated MLP, heads that share keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LlamaConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Longest sequence that it is trained on.
    pub seq_len: usize,
    /// Features.
    pub d_model: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Features inside an MLP.
    pub d_ff: usize,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the table of tokens is also the weight of the head.
    pub tied_head: bool,
    /// Probability with which elements of what blocks add are dropped.
    pub dropout: f64,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        LlamaConfig {
            vocab_size: 256,
            seq_len: 64,
            d_model: 96,
            n_layers: 3,
            n_heads: 4,
            n_kv_heads: 2,
            d_ff: 256,
            rms_norm_eps: 1e-5,
            rope_theta: 10000.0,
            tied_head: false,
            dropout: 0.0,
        }
    }
}

/// Which model, and its sizes. As JSON an object with the name of the model under `model`.
///
/// ```
/// use shardwise::models::ModelConfig;
///
/// let config: ModelConfig = serde_json::from_str(r#"{"model": "llama", "d_model": 128, "n_heads": 8}"#).unwrap();
/// assert_eq!((config.heads(), config.vocab_size()), ((8, 2), 256));
/// assert!(config.check().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "model", rename_all = "lowercase")]
pub enum ModelConfig {
    /// A GPT.
    Gpt(GptConfig),
    /// A model of the Llama family.
    Llama(LlamaConfig),
}

impl ModelConfig {
    /// Which model: `gpt` or `llama`.
    pub fn name(&self) -> &'static str {
        match self {
            ModelConfig::Gpt(_) => "gpt",
            ModelConfig::Llama(_) => "llama",
        }
    }

    /// Number of tokens.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.vocab_size,
            ModelConfig::Llama(config) => config.vocab_size,
        }
    }

    /// Longest sequence.
    pub fn seq_len(&self) -> usize {
        match self {
            ModelConfig::Gpt(config) => config.seq_len,
            ModelConfig::Llama(config) => config.seq_len,
        }
    }

    /// Query heads, and key heads.
    pub fn heads(&self) -> (usize, usize) {
        match self {
            ModelConfig::Gpt(config) => (config.n_heads, config.n_heads),
            ModelConfig::Llama(config) => (config.n_heads, config.n_kv_heads),
        }
    }

    /// An error if the sizes do not fit together.
    pub fn check(&self) -> Result<()> {
        let bad = |found: String, needed: &str, fix: &str| Err(Error::invalid("model", found, needed, fix));
        let name = self.name();
        let (width, dropout, sizes) = match self {
            ModelConfig::Gpt(c) => {
                (c.d_model, c.dropout, [c.vocab_size, c.seq_len, c.d_model, c.n_layers, c.n_heads, c.d_ff])
            }
            ModelConfig::Llama(c) => {
                (c.d_model, c.dropout, [c.vocab_size, c.seq_len, c.d_model, c.n_layers, c.n_heads, c.d_ff])
            }
        };
        let (heads, key_heads) = self.heads();
        if sizes.contains(&0) || key_heads == 0 {
            let found =
                format!("{name} with a size of 0 among vocabulary, length, width, layers, heads, MLP {sizes:?}");
            return bad(found, "sizes of at least 1", "correct the size");
        }
        if !width.is_multiple_of(heads) || !heads.is_multiple_of(key_heads) {
            let found = format!("{name} of width {width} with {heads} query heads and {key_heads} key heads");
            return bad(
                found,
                "a width that is a multiple of the heads, and these of the key heads",
                "change the heads",
            );
        }
        if matches!(self, ModelConfig::Llama(_)) && !(width / heads).is_multiple_of(2) {
            let found = format!("{name} of width {width} with {heads} heads: {} features per head", width / heads);
            return bad(found, "an even number, because positions rotate pairs of features", "change width or heads");
        }
        if !(0.0..1.0).contains(&dropout) {
            return bad(format!("dropout {dropout}"), "0 to below 1", "correct it");
        }
        Ok(())
    }
}
