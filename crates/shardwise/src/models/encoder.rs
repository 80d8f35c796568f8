//! Encoders such as BERT: hidden states of all tokens, and embeddings of sentences.

use candle_core::DType;

use super::decoder::{
    AttentionCall, AttentionSpec, DecoderAttention, DecoderMlp, FeatureNorm, LayerSpec, MlpSpec, NormKind, NormSpec,
    QueryKeyNorm, linear,
};
use crate::error::{ErrorKind, Result};
use crate::nn::init::Init;
use crate::nn::{Activation, Builder, Embedding, Forward, Hooks, Linear, Module, PlanHints};
use crate::param::Param;
use crate::placement::Placement::Replicate;
use crate::tensor::DTensor;

/// Sizes and options of an [`Encoder`].
#[derive(Debug, Clone, PartialEq)]
pub(super) struct EncoderSpec {
    pub(super) vocab_size: usize,
    pub(super) width: usize,
    /// Features of the embeddings, projected to `width` if that is another number.
    pub(super) embedding_width: usize,
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
    /// Buckets of distances between positions with a bias of attention each; 0 if there are none.
    pub(super) distance_buckets: usize,
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
        let EncoderSpec { vocab_size, width, embedding_width, layers, heads, hidden, positions, .. } = *self;
        if [vocab_size, width, embedding_width, layers, heads, hidden, positions].contains(&0) {
            return bad("a size of 0".into(), "sizes of at least 1");
        }
        if !self.width.is_multiple_of(self.heads) {
            return bad(format!("{} heads of {} features", self.heads, self.width), "features that the heads divide");
        }
        if self.first_position >= self.positions {
            return bad(format!("{} positions", self.positions), "more positions than the first one");
        }
        Ok(())
    }
}

/// A bidirectional encoder such as BERT, for hidden states and sentence embeddings.
///
/// [`load_encoder`](super::load_encoder) loads one. Sharded over heads and features by
/// [`TensorParallel`](crate::plan::TensorParallel).
#[doc(alias = "BertModel")]
#[derive(Module)]
pub struct Encoder {
    /// Token embedding.
    pub tokens: Embedding,
    /// Position embedding `[positions, features]`.
    pub positions: Param,
    /// Embedding of token types `[types, features]`, if there is one.
    pub token_types: Option<Param>,
    /// Norm of the sum of the embeddings.
    pub norm: FeatureNorm,
    /// Layer from the features of the embeddings to those of the blocks, if they differ (ELECTRA).
    #[doc(alias = "embeddings_project")]
    pub projection: Option<Linear>,
    /// Bias of attention by the distance of two positions `[buckets, heads]`, if there is one (MPNet).
    #[doc(alias = "relative_attention_bias")]
    pub distance_bias: Option<Param>,
    /// Transformer blocks.
    pub blocks: Vec<EncoderBlock>,
    /// Layer on top of the first token, if there is one.
    pub pooler: Option<Linear>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    /// Hints for planners; see [`PlanHints`].
    pub hints: PlanHints,
    #[module(skip)]
    spec: EncoderSpec,
}

/// A block of an [`Encoder`]: attention and MLP, each followed by a norm of the residual sum.
#[derive(Module)]
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
        let EncoderSpec { vocab_size, width, embedding_width, heads, positions, token_types, eps, .. } = *spec;
        let table = |name: &str, shape: [usize; 2]| builder.param(name, &shape, Init::Normal(0.0, 0.02));
        let (buckets, norm) = (spec.distance_buckets, NormSpec { kind: NormKind::Layer, eps });
        let is_projected = embedding_width != width;
        let projection = is_projected.then(|| linear(builder, "projection", [embedding_width, width], true));
        let blocks = (0..spec.layers).map(|i| EncoderBlock::new(&builder.child(&format!("blocks.{i}")), spec));
        Ok(Encoder {
            tokens: Embedding::new(&builder.child("tokens"), vocab_size, embedding_width)?,
            positions: table("positions", [positions, embedding_width])?,
            token_types: (token_types > 0).then(|| table("token_types", [token_types, embedding_width])).transpose()?,
            norm: FeatureNorm::new(&builder.child("norm"), embedding_width, norm)?,
            projection: projection.transpose()?,
            distance_bias: (buckets > 0).then(|| table("distance_bias", [buckets, heads])).transpose()?,
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
        x = x.add(&self.positions.forward_value()?.narrow(0, self.spec.first_position, length)?)?;
        if let Some(table) = &self.token_types {
            x = match token_types {
                Some(types) => x.add(&table.forward_value()?.embedding(types)?)?,
                None => x.add(&table.forward_value()?.narrow(0, 0, 1)?)?,
            };
        }
        let mut x = self.norm.forward(&x)?;
        if let Some(projection) = &self.projection {
            x = projection.forward(&x)?;
        }
        let seen = mask.map(|mask| mask.ne(0.0)?.unsqueeze(1)?.unsqueeze(1)).transpose()?;
        let mask = match &self.distance_bias {
            Some(table) => Some(biased_mask(&table.forward_value()?, length, seen.as_ref())?),
            None => seen,
        };
        let last_hidden_state = self.blocks.iter().try_fold(x, |x, block| block.run(&x, mask.as_ref()))?;
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
                // A row of only padding has the mean 0.
                hidden.mul(&counts)?.sum(&[1], false)?.div(&counts.sum(&[1], false)?.maximum(1e-9)?)
            }
        }
    }
}

/// A mask that adds the bias of the distance of query and key to the scores `[batch or 1, heads, length, length]`, and hides the
/// keys that are not seen. `table` is `[buckets, heads]`.
#[track_caller]
fn biased_mask(table: &DTensor, length: usize, seen: Option<&DTensor>) -> Result<DTensor> {
    let (mesh, buckets) = (table.device_mesh(), table.shape()[0]);
    let bucket = |i: &[usize]| distance_bucket(i[0], i[1], buckets) as f64;
    let of_pairs = DTensor::from_fn((length, length), DType::U32, mesh, vec![Replicate; mesh.ndim()], bucket)?;
    let bias = table.embedding(&of_pairs)?.permute(&[2, 0, 1])?.unsqueeze(0)?;
    let Some(seen) = seen else { return Ok(bias) };
    let hidden = seen.to_dtype(bias.dtype())?.zeros_like()?.masked_fill(&seen.eq(0.0)?, f64::NEG_INFINITY)?;
    bias.add(&hidden)
}

/// The bucket of the distance of a key from a query: half of the buckets are for later keys; half of those for one distance each,
/// and the rest for ranges of distances that grow up to [`MAX_DISTANCE`].
fn distance_bucket(query: usize, key: usize, buckets: usize) -> usize {
    /// Keys that are farther away share a bucket.
    const MAX_DISTANCE: f32 = 128.0;
    let (half, exact, distance) = (buckets / 2, buckets / 4, query.abs_diff(key));
    let side = if key > query { half } else { 0 };
    if distance < exact {
        return side + distance;
    }
    // In f32, so that the ranges begin where those of transformers do.
    let part = (distance as f32 / exact as f32).ln() / (MAX_DISTANCE / exact as f32).ln();
    side + (exact + (part * (half - exact) as f32) as usize).min(half - 1)
}
