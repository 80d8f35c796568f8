//! Attention layers.

use super::build::Builder;
use super::hints::Heads;
use super::linear::{Linear, layer};
use super::module::{Forward, Hooks, Item, Module, join};
use crate::error::{ErrorKind, Result};
use crate::ops::AttentionOptions;
use crate::tensor::DTensor;

/// Positions as rotations of pairs of features.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryEmbedding {
    /// Base of the frequencies.
    pub base: f64,
}

impl Forward for RotaryEmbedding {
    /// `[..., length, size]`, the first row at position 0.
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        x.rotary_embedding(self.base, 0)
    }
}

/// Sizes of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    /// Features.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, each of which serves a group of query heads.
    pub key_heads: usize,
    /// Queries look only at keys that are not later.
    pub causal: bool,
    /// Positions.
    pub rotary: Option<RotaryEmbedding>,
    /// Linear layers have a bias.
    pub bias: bool,
}

/// Attention with several heads over `[batch, length, width]`.
#[doc(alias = "MultiheadAttention")]
pub struct MultiHeadAttention {
    /// Makes the queries.
    pub query: Linear,
    /// Makes the keys.
    pub key: Linear,
    /// Makes the values.
    pub value: Linear,
    /// Mixes the heads.
    pub output: Linear,
    /// Hooks.
    pub hooks: Hooks,
    heads: Heads,
    config: AttentionConfig,
}

layer!(MultiHeadAttention { query, key, value, output, heads, hooks });

impl MultiHeadAttention {
    /// A layer of these sizes.
    pub fn new(at: &Builder, config: AttentionConfig) -> Result<Self> {
        let AttentionConfig { width, heads, key_heads, bias, .. } = config;
        if heads == 0 || key_heads == 0 || !width.is_multiple_of(heads) || !heads.is_multiple_of(key_heads) {
            let found = format!("width {width}, {heads} query heads and {key_heads} key heads");
            let needed = "a width that is a multiple of the heads, and these of the key heads";
            return Err(ErrorKind::Model.error("attention", found, needed, "change the numbers of heads"));
        }
        let size = width / heads;
        let linear = |name: &str, inputs: usize, outputs: usize| match bias {
            true => Linear::new(&at.at(name), inputs, outputs),
            false => Linear::without_bias(&at.at(name), inputs, outputs),
        };
        Ok(MultiHeadAttention {
            query: linear("query", width, width)?,
            key: linear("key", width, key_heads * size)?,
            value: linear("value", width, key_heads * size)?,
            output: linear("output", width, width)?,
            hooks: at.hooks(),
            heads: Heads { query: heads, key: key_heads },
            config,
        })
    }

    /// Attention from `x` to `context`, with a mask that is added to the scores. Hooks see `x`.
    #[track_caller]
    pub fn attend(&self, x: &DTensor, context: &DTensor, mask: Option<&DTensor>) -> Result<DTensor> {
        self.hooks.run_own("attend", x, |x| self.mix(x, context, mask))
    }

    fn mix(&self, x: &DTensor, context: &DTensor, mask: Option<&DTensor>) -> Result<DTensor> {
        let AttentionConfig { heads, key_heads, causal, rotary, .. } = self.config;
        let apart = |t: DTensor, heads: usize| t.unflatten(-1, &[heads as isize, -1])?.transpose(-3, -2);
        let turned = |t: DTensor| rotary.map_or(Ok(t.clone()), |rotary| rotary.forward(&t));
        let queries = turned(apart(self.query.forward(x)?, heads)?)?;
        let keys = turned(apart(self.key.forward(context)?, key_heads)?)?;
        let values = apart(self.value.forward(context)?, key_heads)?;
        let mixed =
            queries.scaled_dot_product_attention(&keys, &values, AttentionOptions { causal, mask, scale: None })?;
        self.output.forward(&mixed.transpose(-3, -2)?.flatten(-2, -1)?)
    }
}

impl Forward for MultiHeadAttention {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.mix(x, x, None))
    }
}
