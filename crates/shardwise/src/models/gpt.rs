//! Sizes of a GPT-2 that is trained from scratch.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::decoder::DropoutSpec;
use super::language::{LanguageModelSizes, example_batch};
use super::model::ModelSpec;
use super::names::torch_name;
use super::pretrained::{PretrainedConfig, PretrainedModel};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::nn::Builder;
use crate::tensor::DTensor;

/// Sizes of a GPT-2, with the defaults of a small model: learned positions, layer norm before each branch, GELU.
///
/// The model is the one that [`load`](super::load) loads from a directory with the same [`hf_config`](ModelSpec::hf_config),
/// with dropout.
#[doc(alias = "GPT2LMHeadModel")]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GptConfig {
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Longest sequence: number of learned positions.
    #[doc(alias = "n_positions")]
    pub seq_len: usize,
    /// Features of the residual stream.
    pub d_model: usize,
    /// Number of transformer blocks.
    pub n_layers: usize,
    /// Attention heads; `d_model` must be a multiple.
    pub n_heads: usize,
    /// Features inside an MLP.
    pub d_ff: usize,
    /// Added to the variance in layer norms.
    pub layer_norm_eps: f64,
    /// Whether the head uses the weight of the token embedding (weight tying).
    #[doc(alias = "tie_word_embeddings")]
    pub tied_head: bool,
    /// Dropout probability of embeddings and residual branches.
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

impl ModelSpec for GptConfig {
    type Model = PretrainedModel;

    fn check(&self) -> Result<()> {
        let sizes = LanguageModelSizes {
            model: "gpt",
            vocab_size: self.vocab_size,
            seq_len: self.seq_len,
            width: self.d_model,
            layers: self.n_layers,
            heads: self.n_heads,
            key_heads: self.n_heads,
            d_ff: self.d_ff,
            dropout: self.dropout,
        };
        sizes.check()
    }

    fn build(&self, builder: &Builder) -> Result<PretrainedModel> {
        self.check()?;
        let dropout = DropoutSpec { embeddings: self.dropout, branches: self.dropout };
        PretrainedConfig::of_sizes(&self.hf_config(DType::F32), dropout)?.build(builder)
    }

    fn example_batch(&self, samples: usize, mesh: &DeviceMesh) -> Result<Vec<DTensor>> {
        example_batch(samples, self.seq_len, mesh)
    }

    fn hf_config(&self, dtype: DType) -> Value {
        json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": torch_name(dtype),
        "vocab_size": self.vocab_size,
        "n_positions": self.seq_len,
        "n_embd": self.d_model,
        "n_layer": self.n_layers,
        "n_head": self.n_heads,
        "n_inner": self.d_ff,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": self.layer_norm_eps,
        "embd_pdrop": self.dropout,
        "resid_pdrop": self.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": self.tied_head,
        "bos_token_id": null,
        "eos_token_id": null,
        })
    }
}
