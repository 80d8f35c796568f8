//! Encoders such as BERT: hidden states of all tokens, and embeddings of sentences.

use candle_core::DType;

use super::decoder::{
    AttentionCall, AttentionSpec, DecoderAttention, DecoderMlp, FeatureNorm, LayerSpec, MlpSpec, NormKind, NormSpec,
    QueryKeyNorm, linear,
};
use crate::error::{ErrorKind, Result};
use crate::nn::init::Init;
use crate::nn::{Activation, Builder, Embedding, Forward, Hooks, Linear, PlanHints, layer};
use crate::param::Param;
use crate::tensor::DTensor;

/// Sizes and options of an [`Encoder`].
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EncoderSpec {
    pub(super) vocab_size: usize,
    pub(super) width: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    /// Features inside an MLP.
    pub(super) hidden: usize,
    pub(super) activation: Activation,
    /// Rows of the position table.
    pub(super) positions: usize,
    /// The row of the position table that the first token uses.
    pub(super) first_position: usize,
    /// Rows of the table of token types; 0 if there is none.
    pub(super) token_types: usize,
    pub(super) eps: f64,
    /// Whether there is a layer on top of the first token.
    pub(super) pooler: bool,
}

impl EncoderSpec {
    /// Checks that the sizes fit together; `model` is the name of the family.
    pub(super) fn check(&self, model: &str) -> Result<()> {
        let bad = |found: String, needed: &str| {
            Err(ErrorKind::Model.error("model", format!("{model} with {found}"), needed, "correct the configuration"))
        };
        if [self.vocab_size, self.width, self.layers, self.heads, self.hidden, self.positions].contains(&0) {
            return bad("a size of 0".into(), "sizes of at least 1");
        }
        if !self.width.is_multiple_of(self.heads) {
            return bad(format!("{} heads of {} features", self.heads, self.width), "features that the heads divide");
        }
        Ok(())
    }
}

/// A bidirectional encoder such as BERT, for hidden states and sentence embeddings.
///
/// [`load_encoder`](super::load_encoder) loads one. Sharded over heads and features by
/// [`TensorParallel`](crate::plan::TensorParallel).
#[doc(alias = "BertModel")]
pub struct Encoder {
    /// Token embedding.
    pub tokens: Embedding,
    /// Position embedding `[positions, width]`.
    pub positions: Param,
    /// Embedding of token types `[types, width]`, if there is one.
    pub token_types: Option<Param>,
    /// Norm of the sum of the embeddings.
    pub norm: FeatureNorm,
    /// Transformer blocks.
    pub blocks: Vec<EncoderBlock>,
    /// Layer on top of the first token, if there is one.
    pub pooler: Option<Linear>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    /// Hints for planners; see [`PlanHints`].
    pub hints: PlanHints,
    spec: EncoderSpec,
}

layer!(Encoder { tokens, positions, token_types, norm, blocks, pooler, hooks, hints });

/// A block of an [`Encoder`]: attention and MLP, each followed by a norm of the residual sum.
pub struct EncoderBlock {
    /// Self-attention over all positions.
    pub attention: DecoderAttention,
    /// Norm after attention.
    pub after_attention: FeatureNorm,
    /// Feed-forward block.
    pub mlp: DecoderMlp,
    /// Norm after the MLP.
    pub after_mlp: FeatureNorm,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

layer!(EncoderBlock { attention, after_attention, mlp, after_mlp, hooks });

/// What an [`Encoder`] returns.
#[derive(Debug, Clone)]
pub struct EncoderOutput {
    /// Hidden states of all tokens, `[batch, length, width]`. Those of padding mean nothing.
    pub last_hidden_state: DTensor,
    /// The pooler's output of the first token, `[batch, width]`, of models that have a pooler.
    pub pooler_output: Option<DTensor>,
}

/// How hidden states become one embedding per sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// The mean of all tokens that are not padding.
    Mean,
    /// The first token.
    Cls,
}

impl EncoderBlock {
    fn new(builder: &Builder, spec: &EncoderSpec) -> Result<Self> {
        let EncoderSpec { width, heads, hidden, activation, eps, .. } = *spec;
        let norm = NormSpec { kind: NormKind::Layer, eps };
        let attention = AttentionSpec {
            heads,
            key_heads: heads,
            head_dim: width / heads,
            bias: true,
            output_bias: true,
            query_key_norm: QueryKeyNorm::None,
            clip: None,
            soft_cap: None,
        };
        let scale = (attention.head_dim as f64).sqrt().recip();
        let own = LayerSpec { window: None, rope: None, scale, experts: None };
        let mlp = MlpSpec { hidden, gated: false, activation, bias: true };
        Ok(EncoderBlock {
            attention: DecoderAttention::new(&builder.child("attention"), width, &attention, norm, &own, false)?,
            after_attention: FeatureNorm::new(&builder.child("after_attention"), width, norm)?,
            mlp: DecoderMlp::new(&builder.child("mlp"), width, mlp)?,
            after_mlp: FeatureNorm::new(&builder.child("after_mlp"), width, norm)?,
            hooks: builder.hooks(),
        })
    }

    #[track_caller]
    fn run(&self, x: &DTensor, mask: Option<&DTensor>) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let attended = self.attention.attend(x, AttentionCall { mask, ..AttentionCall::default() })?;
            let x = self.after_attention.forward(&x.add(&attended)?)?;
            self.after_mlp.forward(&x.add(&self.mlp.forward(&x)?)?)
        })
    }
}

impl Encoder {
    pub(super) fn new(builder: &Builder, spec: &EncoderSpec) -> Result<Self> {
        let EncoderSpec { vocab_size, width, positions, token_types, eps, .. } = *spec;
        let table = |name: &str, rows: usize| builder.param(name, &[rows, width], Init::Normal(0.0, 0.02));
        let blocks = (0..spec.layers).map(|i| EncoderBlock::new(&builder.child(&format!("blocks.{i}")), spec));
        Ok(Encoder {
            tokens: Embedding::new(&builder.child("tokens"), vocab_size, width)?,
            positions: table("positions", positions)?,
            token_types: (token_types > 0).then(|| table("token_types", token_types)).transpose()?,
            norm: FeatureNorm::new(&builder.child("norm"), width, NormSpec { kind: NormKind::Layer, eps })?,
            blocks: blocks.collect::<Result<_>>()?,
            pooler: spec.pooler.then(|| linear(builder, "pooler", [width, width], true)).transpose()?,
            hooks: builder.hooks(),
            hints: PlanHints::new().batch_input("blocks.0"),
            spec: spec.clone(),
        })
    }

    /// Features of an embedding.
    pub fn width(&self) -> usize {
        self.spec.width
    }

    /// Longest sequence, in tokens.
    pub fn max_positions(&self) -> usize {
        self.spec.positions - self.spec.first_position
    }

    /// Computes the hidden states of ids `[batch, length]`.
    ///
    /// `mask`, of the same shape, is 0 for padding, which must follow the tokens; `token_types` are 0 if absent. Collective.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the sequence is longer than the model's positions, or shapes differ.
    #[track_caller]
    pub fn encode(
        &self,
        ids: &DTensor,
        mask: Option<&DTensor>,
        token_types: Option<&DTensor>,
    ) -> Result<EncoderOutput> {
        let length = ids.shape().get(1).copied().unwrap_or(0);
        let same = |t: &&DTensor| t.shape() == ids.shape();
        if ids.ndim() != 2 || length > self.max_positions() || ![mask, token_types].iter().flatten().all(same) {
            let found = format!("ids {}, mask and token types {:?}", ids.layout(), mask.map(DTensor::shape));
            let needed = format!("[batch, length] of one shape, with a length of at most {}", self.max_positions());
            return Err(ErrorKind::shape(ids.shape()).error("ids", found, needed, "shorten or reshape them"));
        }
        let mut x = self.tokens.forward(ids)?;
        x = x.add(&self.positions.get().narrow(0, self.spec.first_position, length)?)?;
        if let Some(table) = &self.token_types {
            x = match token_types {
                Some(types) => x.add(&table.get().embedding(types)?)?,
                None => x.add(&table.get().narrow(0, 0, 1)?)?,
            };
        }
        let x = self.norm.forward(&x)?;
        let seen = mask.map(|mask| mask.ne(0.0)?.unsqueeze(1)?.unsqueeze(1)).transpose()?;
        let last_hidden_state = self.blocks.iter().try_fold(x, |x, block| block.run(&x, seen.as_ref()))?;
        let pooler_output = match &self.pooler {
            Some(pooler) => Some(pooler.forward(&last_hidden_state.select(1, 0)?)?.tanh()?),
            None => None,
        };
        Ok(EncoderOutput { last_hidden_state, pooler_output })
    }

    /// Computes one embedding of length 1 per row of ids: `[batch, width]`, as `sentence-transformers` does.
    ///
    /// Padding neither counts in the mean nor is attended to. Collective; errors as for [`encode`](Self::encode).
    #[track_caller]
    pub fn embed(
        &self,
        ids: &DTensor,
        mask: Option<&DTensor>,
        token_types: Option<&DTensor>,
        pooling: Pooling,
    ) -> Result<DTensor> {
        let pooled = self.pooled(ids, mask, token_types, pooling)?;
        let length = pooled.square()?.sum(&[-1], true)?.sqrt()?.maximum(1e-12)?;
        pooled.div(&length)
    }

    /// Computes as [`embed`](Self::embed), without dividing by the length. Collective.
    #[track_caller]
    pub fn pooled(
        &self,
        ids: &DTensor,
        mask: Option<&DTensor>,
        token_types: Option<&DTensor>,
        pooling: Pooling,
    ) -> Result<DTensor> {
        let hidden = self.encode(ids, mask, token_types)?.last_hidden_state.to_dtype(DType::F32)?;
        match (pooling, mask) {
            (Pooling::Cls, _) => hidden.select(1, 0),
            (Pooling::Mean, None) => hidden.mean(&[1], false),
            (Pooling::Mean, Some(mask)) => {
                let counts = mask.ne(0.0)?.to_dtype(DType::F32)?.unsqueeze(-1)?;
                // A row of padding alone has the mean 0.
                hidden.mul(&counts)?.sum(&[1], false)?.div(&counts.sum(&[1], false)?.maximum(1e-9)?)
            }
        }
    }
}
