//! Attention layers.

use crate::error::{ErrorKind, Result};
use crate::nn::build::Builder;
use crate::nn::hints::Heads;
use crate::nn::layers::linear::Linear;
use crate::nn::module::{Forward, Hooks, TrainingMode};
use crate::ops::AttentionOptions;
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// Rotary position embedding (RoPE): rotates pairs of features by angles that grow with the position.
///
/// Feature `i` of the first half of a head is paired with feature `i` of the second half, as in Hugging Face's Llama.
#[doc(alias = "RoPE")]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryEmbedding {
    /// Base of the frequencies, `rope_theta` in Llama; usually 10000.
    #[doc(alias = "rope_theta")]
    pub base: f64,
}

impl Forward for RotaryEmbedding {
    /// Takes `[..., length, head_dim]`; the first row is position 0.
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        x.rotary_embedding(self.base, 0)
    }
}

/// Sizes and options of a [`MultiHeadAttention`].
///
/// By default one head of no features without a mask; write the sizes and what differs:
///
/// ```
/// use shardwise::nn::AttentionConfig;
///
/// // A layer of Mistral, whose positions see themselves and 4095 before.
/// let config = AttentionConfig { width: 4096, heads: 32, key_heads: 8, causal: true, window: Some(4095), ..Default::default() };
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    /// Features of input and output.
    #[doc(alias = "embed_dim")]
    pub width: usize,
    /// Query heads; `width` must be a multiple.
    #[doc(alias = "num_heads")]
    pub heads: usize,
    /// Key and value heads, each shared by a group of query heads (grouped-query attention); equal to `heads` for plain
    /// multi-head attention.
    pub key_heads: usize,
    /// Whether a causal mask hides later positions.
    pub causal: bool,
    /// Rotary position embedding of queries and keys, if any.
    pub rotary: Option<RotaryEmbedding>,
    /// Whether the linear layers have a bias.
    pub bias: bool,
    /// How many positions before its own a query sees, as in [`AttentionOptions::window`]; by default all.
    #[doc(alias = "sliding_window")]
    pub window: Option<usize>,
    /// Smooth bound of the scores, as in [`AttentionOptions::soft_cap`]; by default none.
    #[doc(alias = "attn_logit_softcapping")]
    pub soft_cap: Option<f64>,
    /// Dropout probability of the attention probabilities in training; none in evaluation ([`Module::eval`](crate::nn::Module::eval)).
    #[doc(alias = "attention_dropout")]
    pub dropout: f64,
}

impl Default for AttentionConfig {
    fn default() -> Self {
        AttentionConfig {
            width: 0,
            heads: 1,
            key_heads: 1,
            causal: false,
            rotary: None,
            bias: false,
            window: None,
            soft_cap: None,
            dropout: 0.0,
        }
    }
}

/// Multi-head attention over `[batch, length, width]`, also with fewer key heads than query heads (grouped-query).
///
/// Sharded over heads, no operator inside communicates; [`TensorParallel`](crate::plan::TensorParallel) does so, since the
/// module has [`Heads`].
#[doc(alias = "MultiheadAttention")]
#[derive(Module)]
pub struct MultiHeadAttention {
    /// Query projection.
    pub query: Linear,
    /// Key projection.
    pub key: Linear,
    /// Value projection.
    pub value: Linear,
    /// Output projection.
    pub output: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    heads: Heads,
    training_mode: TrainingMode,
    #[module(skip)]
    config: AttentionConfig,
}

impl MultiHeadAttention {
    /// Builds the layer.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the sizes are not multiples of each other, the dropout is not at least 0 and
    /// below 1, or the soft cap is not above 0.
    pub fn new(builder: &Builder, config: AttentionConfig) -> Result<Self> {
        let AttentionConfig { width, heads, key_heads, bias, .. } = config;
        if heads == 0 || key_heads == 0 || !width.is_multiple_of(heads) || !heads.is_multiple_of(key_heads) {
            let found = format!("width {width}, {heads} query heads and {key_heads} key heads");
            let needed = "a width that is a multiple of the heads, and these of the key heads";
            return Err(ErrorKind::Model.error("attention", found, needed, "change the numbers of heads"));
        }
        let AttentionConfig { dropout, soft_cap, .. } = config;
        if !(0.0..1.0).contains(&dropout) || soft_cap.is_some_and(|cap| cap.is_nan() || cap <= 0.0) {
            let found = format!("dropout {dropout} and soft cap {soft_cap:?}");
            let needed = "a dropout of at least 0 and below 1, and a soft cap above 0";
            return Err(ErrorKind::Model.error("attention", found, needed, "correct the configuration"));
        }
        let size = width / heads;
        let linear = |name: &str, inputs: usize, outputs: usize| match bias {
            true => Linear::new(&builder.child(name), inputs, outputs),
            false => Linear::without_bias(&builder.child(name), inputs, outputs),
        };
        Ok(MultiHeadAttention {
            query: linear("query", width, width)?,
            key: linear("key", width, key_heads * size)?,
            value: linear("value", width, key_heads * size)?,
            output: linear("output", width, width)?,
            hooks: builder.hooks(),
            heads: Heads { query: heads, key: key_heads },
            training_mode: TrainingMode::default(),
            config,
        })
    }

    /// Cross-attention: queries from `x`, keys and values from `context`, and a mask that is added to the scores.
    ///
    /// Hooks see `x`. A module that was replaced has no cross-attention: an error.
    #[track_caller]
    pub fn attend(&self, x: &DTensor, context: &DTensor, mask: Option<&DTensor>) -> Result<DTensor> {
        self.hooks.run_own("attend", x, |x| self.mix(x, context, mask))
    }

    fn mix(&self, x: &DTensor, context: &DTensor, mask: Option<&DTensor>) -> Result<DTensor> {
        let AttentionConfig { heads, key_heads, causal, rotary, window, soft_cap, .. } = self.config;
        let dropout = if self.training_mode.is_training() { self.config.dropout } else { 0.0 };
        let split_heads = |t: DTensor, heads: usize| t.unflatten(-1, &[heads as isize, -1])?.transpose(-3, -2);
        let rotated = |t: DTensor| rotary.map_or(Ok(t.clone()), |rotary| rotary.forward(&t));
        let queries = rotated(split_heads(self.query.forward(x)?, heads)?)?;
        let keys = rotated(split_heads(self.key.forward(context)?, key_heads)?)?;
        let values = split_heads(self.value.forward(context)?, key_heads)?;
        let mixed = queries.scaled_dot_product_attention(
            &keys,
            &values,
            AttentionOptions { causal, mask, window, soft_cap, dropout, ..AttentionOptions::default() },
        )?;
        self.output.forward(&mixed.transpose(-3, -2)?.flatten(-2, -1)?)
    }
}

impl Forward for MultiHeadAttention {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.mix(x, x, None))
    }
}
