//! GPT.

use super::config::GptConfig;
use super::names::{Entry, Names};
use super::{LanguageModel, begin, head};
use crate::error::Result;
use crate::nn::init::Init;
use crate::nn::{
    Activation, AttentionConfig, Builder, Dropout, Embedding, Forward, Hooks, Item, LayerNorm, Linear, Mlp, Module,
    MultiHeadAttention, join, layer,
};
use crate::param::Param;
use crate::tensor::DTensor;

/// Learned positions, layer norm, GELU.
pub struct Gpt {
    /// The table of tokens.
    pub tokens: Embedding,
    /// What every position adds, `[length, width]`.
    pub positions: Param,
    /// Of the embeddings.
    pub dropout: Dropout,
    /// The blocks.
    pub blocks: Vec<GptBlock>,
    /// The last norm.
    pub norm: LayerNorm,
    /// Logits from features.
    pub head: Linear,
    /// Hooks.
    pub hooks: Hooks,
}

layer!(Gpt { tokens, positions, dropout, blocks, norm, head, hooks });

/// Attention and an MLP, each added to what goes in.
pub struct GptBlock {
    /// The norm before attention.
    pub before_attention: LayerNorm,
    /// Attention.
    pub attention: MultiHeadAttention,
    /// The norm before the MLP.
    pub before_mlp: LayerNorm,
    /// The MLP.
    pub mlp: Mlp,
    /// Of what is added.
    pub dropout: Dropout,
    /// Hooks.
    pub hooks: Hooks,
}

layer!(GptBlock { before_attention, attention, before_mlp, mlp, dropout, hooks });

impl Gpt {
    /// A new model.
    pub fn new(at: &Builder, config: &GptConfig) -> Result<Self> {
        let GptConfig { vocab_size, seq_len, d_model, n_layers, layer_norm_eps, dropout, .. } = *config;
        let tokens = Embedding::new(&at.at("tokens"), vocab_size, d_model)?;
        let blocks = (0..n_layers).map(|i| GptBlock::new(&at.at(&format!("blocks.{i}")), config));
        let model = Gpt {
            positions: at.param("positions", &[seq_len, d_model], Init::ZEROS)?,
            dropout: Dropout::new(dropout)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: LayerNorm::new(&at.at("norm"), d_model, layer_norm_eps)?,
            head: head(at, &tokens, config.tied_head)?,
            tokens,
            hooks: at.hooks(),
        };
        begin(&model, n_layers)?;
        Ok(model)
    }
}

impl GptBlock {
    fn new(at: &Builder, config: &GptConfig) -> Result<Self> {
        let GptConfig { d_model: width, n_heads: heads, d_ff, layer_norm_eps: eps, dropout, .. } = *config;
        let attention = AttentionConfig { width, heads, key_heads: heads, causal: true, rotary: None, bias: true };
        Ok(GptBlock {
            before_attention: LayerNorm::new(&at.at("before_attention"), width, eps)?,
            attention: MultiHeadAttention::new(&at.at("attention"), attention)?,
            before_mlp: LayerNorm::new(&at.at("before_mlp"), width, eps)?,
            mlp: Mlp::new(&at.at("mlp"), width, d_ff, Activation::GeluTanh)?,
            dropout: Dropout::new(dropout)?,
            hooks: at.hooks(),
        })
    }
}

impl Forward for GptBlock {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let mixed = self.attention.forward(&self.before_attention.forward(x)?)?;
            let x = x.add(&self.dropout.forward(&mixed)?)?;
            let changed = self.mlp.forward(&self.before_mlp.forward(&x)?)?;
            x.add(&self.dropout.forward(&changed)?)
        })
    }
}

impl Forward for Gpt {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| {
            let positions = self.positions.get().narrow(0, 0, ids.shape()[1])?;
            let x = self.dropout.forward(&self.tokens.forward(ids)?.add(&positions)?)?;
            let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
            self.head.forward(&self.norm.forward(&x)?)
        })
    }
}

impl LanguageModel for Gpt {
    fn names(&self) -> Names {
        let mut names = Names::default();
        names.add("transformer.wte.weight", "tokens.weight");
        names.add("transformer.wpe.weight", "positions");
        for i in 0..self.blocks.len() {
            let (theirs, ours) = (format!("transformer.h.{i}"), format!("blocks.{i}"));
            for kind in ["weight", "bias"] {
                for (their, our) in [
                    ("ln_1", "before_attention"),
                    ("attn.c_proj", "attention.output"),
                    ("ln_2", "before_mlp"),
                    ("mlp.c_fc", "mlp.up"),
                    ("mlp.c_proj", "mlp.down"),
                ] {
                    names.add(&format!("{theirs}.{their}.{kind}"), &format!("{ours}.{our}.{kind}"));
                }
                let parts = ["query", "key", "value"].map(|part| format!("{ours}.attention.{part}.{kind}"));
                names.0.push(Entry { name: format!("{theirs}.attn.c_attn.{kind}"), paths: parts.to_vec() });
            }
        }
        for kind in ["weight", "bias"] {
            names.add(&format!("transformer.ln_f.{kind}"), &format!("norm.{kind}"));
        }
        if !self.head.weight.is_same(&self.tokens.weight) {
            names.add("lm_head.weight", "head.weight");
        }
        names
    }
}
