//! GPT-2.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::language::{
    LanguageModel, LanguageModelSizes, batch_loss, example_batch, initialize_weights, language_head,
};
use super::model::{Model, ModelSpec};
use super::names::{WeightNames, torch_name};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::nn::init::Init;
use crate::nn::{
    Activation, AttentionConfig, Builder, Dropout, Embedding, Forward, Hooks, LayerNorm, Linear, Mlp, Module,
    MultiHeadAttention, PlanHints,
};
use crate::param::Param;
use crate::tensor::DTensor;

/// Sizes of a GPT-2, with the defaults of a small model.
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
    type Model = Gpt;

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

    fn build(&self, builder: &Builder) -> Result<Gpt> {
        self.check()?;
        Gpt::new(builder, self)
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

/// GPT-2: learned positions, layer norm before each branch, GELU.
#[doc(alias = "GPT2LMHeadModel")]
#[derive(Module)]
pub struct Gpt {
    /// Token embedding.
    pub tokens: Embedding,
    /// Learned position embedding, `[seq_len, d_model]`.
    pub positions: Param,
    /// Dropout of the embeddings.
    pub dropout: Dropout,
    /// Transformer blocks.
    pub blocks: Vec<GptBlock>,
    /// Norm before the head.
    pub norm: LayerNorm,
    /// Head, from features to logits.
    pub head: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    /// Hints for planners; see [`PlanHints`].
    pub hints: PlanHints,
}

/// A transformer block of [`Gpt`]: attention and MLP as residual branches.
#[derive(Module)]
pub struct GptBlock {
    /// Norm before attention.
    pub before_attention: LayerNorm,
    /// Causal self-attention.
    pub attention: MultiHeadAttention,
    /// Norm before the MLP.
    pub before_mlp: LayerNorm,
    /// Feed-forward block.
    pub mlp: Mlp,
    /// Dropout of both residual branches.
    pub dropout: Dropout,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

impl Gpt {
    /// Builds the model with GPT-2's initializer. Check sizes before with [`ModelSpec::check`].
    pub fn new(builder: &Builder, config: &GptConfig) -> Result<Self> {
        let GptConfig { vocab_size, seq_len, d_model, n_layers, layer_norm_eps, dropout, .. } = *config;
        let tokens = Embedding::new(&builder.child("tokens"), vocab_size, d_model)?;
        let blocks = (0..n_layers).map(|i| GptBlock::new(&builder.child(&format!("blocks.{i}")), config));
        let model = Gpt {
            positions: builder.param("positions", &[seq_len, d_model], Init::ZEROS)?,
            dropout: Dropout::new(dropout)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: LayerNorm::new(&builder.child("norm"), d_model, layer_norm_eps)?,
            head: language_head(builder, &tokens, config.tied_head)?,
            tokens,
            hooks: builder.hooks(),
            hints: PlanHints::new().batch_input("blocks.0"),
        };
        initialize_weights(&model, n_layers)?;
        Ok(model)
    }
}

impl GptBlock {
    fn new(builder: &Builder, config: &GptConfig) -> Result<Self> {
        let GptConfig { d_model: width, n_heads: heads, d_ff, layer_norm_eps: eps, dropout, .. } = *config;
        let attention =
            AttentionConfig { width, heads, key_heads: heads, causal: true, bias: true, ..AttentionConfig::default() };
        Ok(GptBlock {
            before_attention: LayerNorm::new(&builder.child("before_attention"), width, eps)?,
            attention: MultiHeadAttention::new(&builder.child("attention"), attention)?,
            before_mlp: LayerNorm::new(&builder.child("before_mlp"), width, eps)?,
            mlp: Mlp::new(&builder.child("mlp"), width, d_ff, Activation::GeluTanh)?,
            dropout: Dropout::new(dropout)?,
            hooks: builder.hooks(),
        })
    }
}

impl Forward for GptBlock {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let attended = self.attention.forward(&self.before_attention.forward(x)?)?;
            let (x, normal) = self.before_mlp.forward_residual(x, &self.dropout.forward(&attended)?)?;
            let fed_forward = self.mlp.forward(&normal)?;
            x.add(&self.dropout.forward(&fed_forward)?)
        })
    }
}

impl Forward for Gpt {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| {
            let positions = self.positions.forward_value()?.narrow(0, 0, ids.shape()[1])?;
            let x = self.dropout.forward(&self.tokens.forward(ids)?.add(&positions)?)?;
            let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
            self.head.forward(&self.norm.forward(&x)?)
        })
    }
}

impl LanguageModel for Gpt {}

impl Model for Gpt {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        batch_loss(self, batch)
    }

    fn weight_names(&self) -> WeightNames {
        let mut names = WeightNames::new()
            .add("transformer.wte.weight", "tokens.weight")
            .add("transformer.wpe.weight", "positions");
        for i in 0..self.blocks.len() {
            let (theirs, ours) = (format!("transformer.h.{i}"), format!("blocks.{i}"));
            for kind in ["weight", "bias"] {
                for (their, our) in [("ln_1", "before_attention"), ("ln_2", "before_mlp")] {
                    names = names.add(&format!("{theirs}.{their}.{kind}"), &format!("{ours}.{our}.{kind}"));
                }
                let query_key_value = ["query", "key", "value"].map(|part| format!("attention.{part}"));
                let linears = [
                    ("attn.c_attn", query_key_value.to_vec()),
                    ("attn.c_proj", vec!["attention.output".to_string()]),
                    ("mlp.c_fc", vec!["mlp.up".to_string()]),
                    ("mlp.c_proj", vec!["mlp.down".to_string()]),
                ];
                for (their, parts) in linears {
                    let (name, paths) =
                        (format!("{theirs}.{their}.{kind}"), parts.iter().map(|part| format!("{ours}.{part}.{kind}")));
                    // Matrices inside the blocks of GPT-2 have inputs first.
                    names = if kind == "weight" { names.transposed(&name, paths) } else { names.join(&name, paths) };
                }
            }
        }
        for kind in ["weight", "bias"] {
            names = names.add(&format!("transformer.ln_f.{kind}"), &format!("norm.{kind}"));
        }
        match self.head.weight.is_same(&self.tokens.weight) {
            true => names,
            false => names.add("lm_head.weight", "head.weight"),
        }
    }
}
