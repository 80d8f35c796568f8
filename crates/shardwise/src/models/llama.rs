//! Sizes of a model of the Llama family that is trained from scratch.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::decoder::DropoutSpec;
use super::language::{LanguageModelSizes, example_batch};
use super::model::ModelSpec;
use super::names::torch_name;
use super::pretrained::{PretrainedConfig, PretrainedModel};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::Builder;
use crate::tensor::DTensor;

/// Sizes of a model of the Llama family, with the defaults of a small model: rotary positions, RMS norm before each branch, gated
/// MLP, grouped-query attention.
///
/// The model is the one that [`load`](super::load) loads from a directory with the same [`hf_config`](ModelSpec::hf_config),
/// with dropout.
#[doc(alias = "LlamaForCausalLM")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LlamaConfig {
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Longest sequence in training; rotary positions set no limit.
    #[doc(alias = "max_position_embeddings")]
    pub seq_len: usize,
    /// Features of the residual stream.
    pub d_model: usize,
    /// Number of transformer blocks.
    pub n_layers: usize,
    /// Query heads; `d_model` must be a multiple, and features per head an even number.
    pub n_heads: usize,
    /// Key and value heads, each shared by a group of query heads.
    #[doc(alias = "num_key_value_heads")]
    pub n_kv_heads: usize,
    /// Features inside an MLP.
    pub d_ff: usize,
    /// Added to the mean square in RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the head uses the weight of the token embedding (weight tying).
    #[doc(alias = "tie_word_embeddings")]
    pub tied_head: bool,
    /// Dropout probability of residual branches.
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

impl ModelSpec for LlamaConfig {
    type Model = PretrainedModel;

    fn check(&self) -> Result<()> {
        let sizes = LanguageModelSizes {
            model: "llama",
            vocab_size: self.vocab_size,
            seq_len: self.seq_len,
            width: self.d_model,
            layers: self.n_layers,
            heads: self.n_heads,
            key_heads: self.n_kv_heads,
            d_ff: self.d_ff,
            dropout: self.dropout,
        };
        sizes.check()?;
        let (width, heads) = (self.d_model, self.n_heads);
        if (width / heads).is_multiple_of(2) {
            return Ok(());
        }
        let found = format!("llama of width {width} with {heads} heads: {} features per head", width / heads);
        let needed = "an even number, because positions rotate pairs of features";
        Err(ErrorKind::Model.error("model", found, needed, "change width or heads"))
    }

    fn build(&self, builder: &Builder) -> Result<PretrainedModel> {
        self.check()?;
        // The token embedding of Llama has none.
        let dropout = DropoutSpec { embeddings: 0.0, branches: self.dropout };
        PretrainedConfig::of_sizes(&self.hf_config(DType::F32), dropout)?.build(builder)
    }

    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
        example_batch(samples, self.seq_len, mesh)
    }

    fn hf_config(&self, dtype: DType) -> Value {
        json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": torch_name(dtype),
        "vocab_size": self.vocab_size,
        "max_position_embeddings": self.seq_len,
        "hidden_size": self.d_model,
        "num_hidden_layers": self.n_layers,
        "num_attention_heads": self.n_heads,
        "num_key_value_heads": self.n_kv_heads,
        "head_dim": self.d_model / self.n_heads,
        "intermediate_size": self.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": self.rms_norm_eps,
        "rope_theta": self.rope_theta,
        "attention_bias": false,
        "mlp_bias": false,
        "attention_dropout": 0.0,
        "tie_word_embeddings": self.tied_head,
        "bos_token_id": null,
        "eos_token_id": null,
        })
    }
}
