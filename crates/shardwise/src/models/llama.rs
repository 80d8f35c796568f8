//! The Llama family.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::language::{
    LanguageModel, LanguageModelSizes, batch_loss, example_batch, initialize_weights, language_head,
};
use super::model::{Model, ModelSpec};
use super::names::{WeightNames, torch_name};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::{
    AttentionConfig, Builder, Dropout, Embedding, Forward, Hooks, Linear, Module, MultiHeadAttention, PlanHints,
    RmsNorm, RotaryEmbedding, SwiGlu,
};
use crate::tensor::DTensor;

/// Sizes of a model of the Llama family, with the defaults of a small model.
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
    type Model = Llama;

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

    fn build(&self, builder: &Builder) -> Result<Llama> {
        self.check()?;
        Llama::new(builder, self)
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

/// Llama: rotary positions, RMS norm before each branch, gated MLP, grouped-query attention.
#[doc(alias = "LlamaForCausalLM")]
#[derive(Module)]
pub struct Llama {
    /// Token embedding.
    pub tokens: Embedding,
    /// Transformer blocks.
    pub blocks: Vec<LlamaBlock>,
    /// Norm before the head.
    pub norm: RmsNorm,
    /// Head, from features to logits.
    pub head: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    /// Hints for planners; see [`PlanHints`].
    pub hints: PlanHints,
}

/// A transformer block of [`Llama`]: attention and gated MLP as residual branches.
#[derive(Module)]
pub struct LlamaBlock {
    /// Norm before attention.
    pub before_attention: RmsNorm,
    /// Causal self-attention.
    pub attention: MultiHeadAttention,
    /// Norm before the MLP.
    pub before_mlp: RmsNorm,
    /// Feed-forward block.
    pub mlp: SwiGlu,
    /// Dropout of both residual branches.
    pub dropout: Dropout,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

impl Llama {
    /// Builds the model with GPT-2's initializer. Check sizes before with [`ModelSpec::check`].
    pub fn new(builder: &Builder, config: &LlamaConfig) -> Result<Self> {
        let LlamaConfig { vocab_size, d_model, n_layers, rms_norm_eps, .. } = *config;
        let tokens = Embedding::new(&builder.child("tokens"), vocab_size, d_model)?;
        let blocks = (0..n_layers).map(|i| LlamaBlock::new(&builder.child(&format!("blocks.{i}")), config));
        let model = Llama {
            blocks: blocks.collect::<Result<_>>()?,
            norm: RmsNorm::new(&builder.child("norm"), d_model, rms_norm_eps)?,
            head: language_head(builder, &tokens, config.tied_head)?,
            tokens,
            hooks: builder.hooks(),
            hints: PlanHints::new().batch_input("blocks.0"),
        };
        initialize_weights(&model, n_layers)?;
        Ok(model)
    }
}

impl LlamaBlock {
    fn new(builder: &Builder, config: &LlamaConfig) -> Result<Self> {
        let LlamaConfig { d_model: width, n_heads: heads, n_kv_heads: key_heads, d_ff, rms_norm_eps: eps, .. } =
            *config;
        let rotary = Some(RotaryEmbedding { base: config.rope_theta });
        let attention = AttentionConfig { width, heads, key_heads, causal: true, rotary, ..AttentionConfig::default() };
        Ok(LlamaBlock {
            before_attention: RmsNorm::new(&builder.child("before_attention"), width, eps)?,
            attention: MultiHeadAttention::new(&builder.child("attention"), attention)?,
            before_mlp: RmsNorm::new(&builder.child("before_mlp"), width, eps)?,
            mlp: SwiGlu::new(&builder.child("mlp"), width, d_ff)?,
            dropout: Dropout::new(config.dropout)?,
            hooks: builder.hooks(),
        })
    }
}

impl Forward for LlamaBlock {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let attended = self.attention.forward(&self.before_attention.forward(x)?)?;
            let (x, normal) = self.before_mlp.forward_residual(x, &self.dropout.forward(&attended)?)?;
            let fed_forward = self.mlp.forward(&normal)?;
            x.add(&self.dropout.forward(&fed_forward)?)
        })
    }
}

impl Forward for Llama {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| {
            let x = self.tokens.forward(ids)?;
            let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
            self.head.forward(&self.norm.forward(&x)?)
        })
    }
}

impl LanguageModel for Llama {}

impl Model for Llama {
    fn batch_loss(&self, batch: &[DTensor]) -> Result<DTensor> {
        batch_loss(self, batch)
    }

    fn weight_names(&self) -> WeightNames {
        let mut names = WeightNames::new().add("model.embed_tokens.weight", "tokens.weight");
        for i in 0..self.blocks.len() {
            for (their, our) in [
                ("input_layernorm", "before_attention"),
                ("self_attn.q_proj", "attention.query"),
                ("self_attn.k_proj", "attention.key"),
                ("self_attn.v_proj", "attention.value"),
                ("self_attn.o_proj", "attention.output"),
                ("post_attention_layernorm", "before_mlp"),
                ("mlp.gate_proj", "mlp.gate"),
                ("mlp.up_proj", "mlp.up"),
                ("mlp.down_proj", "mlp.down"),
            ] {
                names = names.add(&format!("model.layers.{i}.{their}.weight"), &format!("blocks.{i}.{our}.weight"));
            }
        }
        names = names.add("model.norm.weight", "norm.weight");
        match self.head.weight.is_same(&self.tokens.weight) {
            true => names,
            false => names.add("lm_head.weight", "head.weight"),
        }
    }
}
