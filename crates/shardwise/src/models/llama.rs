//! The Llama family.

use candle_core::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::language::{LanguageModel, Sizes, batch_loss, begin, example_batch, head};
use super::model::{Model, ModelSpec};
use super::names::{Names, torch_name};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::nn::{
    AttentionConfig, Builder, Dropout, Embedding, Forward, Hooks, Item, Linear, Module, MultiHeadAttention, PlanHints,
    RmsNorm, RotaryEmbedding, SwiGlu, join, layer,
};
use crate::tensor::DTensor;

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

impl ModelSpec for LlamaConfig {
    type Model = Llama;

    fn check(&self) -> Result<()> {
        let sizes = Sizes {
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

    fn build(&self, at: &Builder) -> Result<Llama> {
        self.check()?;
        Llama::new(at, self)
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

/// RMS norm, rotary positions, gated MLP, query heads that share key heads.
pub struct Llama {
    /// The table of tokens.
    pub tokens: Embedding,
    /// The blocks.
    pub blocks: Vec<LlamaBlock>,
    /// The last norm.
    pub norm: RmsNorm,
    /// Logits from features.
    pub head: Linear,
    /// Hooks.
    pub hooks: Hooks,
    /// Hints for planners.
    pub hints: PlanHints,
}

layer!(Llama { tokens, blocks, norm, head, hooks, hints });

/// Attention and a gated MLP, each added to what goes in.
pub struct LlamaBlock {
    /// The norm before attention.
    pub before_attention: RmsNorm,
    /// Attention.
    pub attention: MultiHeadAttention,
    /// The norm before the MLP.
    pub before_mlp: RmsNorm,
    /// The MLP.
    pub mlp: SwiGlu,
    /// Of what is added.
    pub dropout: Dropout,
    /// Hooks.
    pub hooks: Hooks,
}

layer!(LlamaBlock { before_attention, attention, before_mlp, mlp, dropout, hooks });

impl Llama {
    /// A new model.
    pub fn new(at: &Builder, config: &LlamaConfig) -> Result<Self> {
        let LlamaConfig { vocab_size, d_model, n_layers, rms_norm_eps, .. } = *config;
        let tokens = Embedding::new(&at.at("tokens"), vocab_size, d_model)?;
        let blocks = (0..n_layers).map(|i| LlamaBlock::new(&at.at(&format!("blocks.{i}")), config));
        let model = Llama {
            blocks: blocks.collect::<Result<_>>()?,
            norm: RmsNorm::new(&at.at("norm"), d_model, rms_norm_eps)?,
            head: head(at, &tokens, config.tied_head)?,
            tokens,
            hooks: at.hooks(),
            hints: PlanHints::new().batch_input("blocks.0"),
        };
        begin(&model, n_layers)?;
        Ok(model)
    }
}

impl LlamaBlock {
    fn new(at: &Builder, config: &LlamaConfig) -> Result<Self> {
        let LlamaConfig { d_model: width, n_heads: heads, n_kv_heads: key_heads, d_ff, rms_norm_eps: eps, .. } =
            *config;
        let rotary = Some(RotaryEmbedding { base: config.rope_theta });
        let attention = AttentionConfig { width, heads, key_heads, causal: true, rotary, bias: false };
        Ok(LlamaBlock {
            before_attention: RmsNorm::new(&at.at("before_attention"), width, eps)?,
            attention: MultiHeadAttention::new(&at.at("attention"), attention)?,
            before_mlp: RmsNorm::new(&at.at("before_mlp"), width, eps)?,
            mlp: SwiGlu::new(&at.at("mlp"), width, d_ff)?,
            dropout: Dropout::new(config.dropout)?,
            hooks: at.hooks(),
        })
    }
}

impl Forward for LlamaBlock {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let mixed = self.attention.forward(&self.before_attention.forward(x)?)?;
            let x = x.add(&self.dropout.forward(&mixed)?)?;
            let changed = self.mlp.forward(&self.before_mlp.forward(&x)?)?;
            x.add(&self.dropout.forward(&changed)?)
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

    fn names(&self) -> Names {
        let mut names = Names::new().add("model.embed_tokens.weight", "tokens.weight");
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
