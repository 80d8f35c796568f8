//! The Llama family.

use super::config::LlamaConfig;
use super::names::Names;
use super::{LanguageModel, begin, head};
use crate::error::Result;
use crate::nn::{
    AttentionConfig, Builder, Dropout, Embedding, Forward, Hooks, Item, Linear, Module, MultiHeadAttention, RmsNorm,
    RotaryEmbedding, SwiGlu, join, layer,
};
use crate::tensor::DTensor;

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
}

layer!(Llama { tokens, blocks, norm, head, hooks });

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

impl LanguageModel for Llama {
    fn names(&self) -> Names {
        let mut names = Names::default();
        names.add("model.embed_tokens.weight", "tokens.weight");
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
                names.add(&format!("model.layers.{i}.{their}.weight"), &format!("blocks.{i}.{our}.weight"));
            }
        }
        names.add("model.norm.weight", "norm.weight");
        if !self.head.weight.is_same(&self.tokens.weight) {
            names.add("lm_head.weight", "head.weight");
        }
        names
    }
}
