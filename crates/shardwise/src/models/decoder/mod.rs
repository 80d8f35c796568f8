//! The decoder that all causal families share; families say what differs in a [`DecoderSpec`].
//!
//! * `spec`: sizes and options.
//! * `rope`: angles of rotary positions.
//! * `norm`, `attention`, `mlp`, `experts`, `block`: the layers.

mod attention;
mod block;
mod experts;
mod mlp;
mod norm;
mod rope;
mod spec;

pub use attention::DecoderAttention;
pub(super) use attention::{AttentionCall, linear};
pub use block::DecoderBlock;
pub use experts::{Experts, MixtureOfExperts};
pub use mlp::DecoderMlp;
pub use norm::FeatureNorm;
pub(super) use rope::{Rope, RopeScaling};
pub(super) use spec::{
    AttentionSpec, DecoderSpec, DropoutSpec, ExpertsSpec, LayerSpec, MlpSpec, NormKind, NormSpec, QueryKeyNorm,
};

use std::sync::Arc;

use candle_core::DType;

use super::cache::KvCache;
use crate::error::{ErrorKind, Result};
use crate::nn::init::Init;
use crate::nn::{Builder, Dropout, Embedding, Forward, Hooks, Linear, Module, PlanHints};
use crate::ops::RotaryFrequencies;
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// A causal transformer: token embedding, blocks of attention and MLP, and a head that gives the logits of the next token.
#[derive(Module)]
pub struct Decoder {
    /// Token embedding.
    pub tokens: Embedding,
    /// Learned position embedding `[positions, width]`, of families that have one.
    pub positions: Option<Param>,
    /// Dropout of the embeddings.
    pub dropout: Dropout,
    /// Transformer blocks.
    pub blocks: Vec<DecoderBlock>,
    /// Norm before the head.
    pub norm: FeatureNorm,
    /// Head, from features to logits.
    pub head: Linear,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    /// Hints for planners; see [`PlanHints`].
    pub hints: PlanHints,
    #[module(skip)]
    spec: Arc<DecoderSpec>,
    /// Angles of the rotary embeddings whose angles do not depend on the length.
    #[module(skip)]
    angles: Vec<Arc<RotaryFrequencies>>,
}

/// Which logits a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Logits {
    /// Of all positions: `[batch, length, vocabulary]`.
    All,
    /// Of the last position: `[batch, vocabulary]`.
    Last,
}

impl Decoder {
    pub(super) fn new(builder: &Builder, spec: &Arc<DecoderSpec>) -> Result<Self> {
        let DecoderSpec { vocab_size, width, max_positions, .. } = **spec;
        let tokens = Embedding::new(&builder.child("tokens"), vocab_size, width)?;
        let positions =
            spec.learned_positions.then(|| builder.param("positions", &[max_positions, width], Init::ZEROS));
        let blocks = (0..spec.layers.len()).map(|i| DecoderBlock::new(&builder.child(&format!("blocks.{i}")), spec, i));
        let head = match spec.tied_head {
            true => Linear { weight: tokens.weight.clone(), bias: None, hooks: builder.child("head").hooks() },
            false => linear(builder, "head", [width, vocab_size], spec.head_bias)?,
        };
        Ok(Decoder {
            positions: positions.transpose()?,
            dropout: Dropout::new(spec.dropout.embeddings)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: FeatureNorm::new(&builder.child("norm"), width, spec.norm)?,
            head,
            tokens,
            hooks: builder.hooks(),
            hints: PlanHints::new().batch_input("blocks.0"),
            angles: spec.ropes.iter().map(|rope| rope.frequencies(0)).collect(),
            spec: Arc::clone(spec),
        })
    }

    /// As `forward`, with the positions of tokens in their documents; see
    /// [`PretrainedModel::forward_documents`](super::PretrainedModel::forward_documents).
    #[track_caller]
    pub(super) fn forward_documents(&self, ids: &DTensor, positions: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| self.run(ids, Some(positions), None, Logits::All, &mut |_| Ok(())))
    }

    /// Logits of ids `[batch, length]`; `visit` sees the embedding output, the output of every block but the last, and the
    /// output of the final norm.
    #[track_caller]
    pub(super) fn run(
        &self,
        ids: &DTensor,
        documents: Option<&DTensor>,
        mut cache: Option<&mut KvCache>,
        logits: Logits,
        visit: &mut dyn FnMut(&DTensor) -> Result<()>,
    ) -> Result<DTensor> {
        // As transformers: when a sequence outgrows the angles of short ones, nothing that was computed with them is used.
        let limit = self.spec.ropes.iter().find_map(Rope::short_limit);
        let recomputed = match cache.as_deref_mut().zip(limit) {
            Some((cache, limit)) => cache.tokens_to_recompute(ids, limit)?,
            None => None,
        };
        let hidden = self.hidden(recomputed.as_ref().unwrap_or(ids), documents, &mut cache, visit)?;
        let hidden = match logits {
            Logits::All if recomputed.is_none() => hidden,
            Logits::All => hidden.narrow(1, hidden.shape()[1] - ids.shape()[1], ids.shape()[1])?,
            Logits::Last => hidden.select(1, -1)?,
        };
        let found = self.head.forward(&hidden)?;
        match self.spec.logit_soft_cap {
            Some(cap) => found.div_scalar(cap)?.tanh()?.mul_scalar(cap),
            None => Ok(found),
        }
    }

    /// The output of the final norm, `[batch, length, width]`.
    #[track_caller]
    fn hidden(
        &self,
        ids: &DTensor,
        documents: Option<&DTensor>,
        cache: &mut Option<&mut KvCache>,
        visit: &mut dyn FnMut(&DTensor) -> Result<()>,
    ) -> Result<DTensor> {
        let [rows, length] = *ids.shape() else {
            let found = format!("ids {}", ids.layout());
            return Err(ErrorKind::shape(ids.shape()).error("ids", found, "[batch, length]", "reshape them"));
        };
        let first = cache.as_ref().map_or(0, |cache| cache.len());
        let padding = cache.as_ref().and_then(|cache| cache.left_padding().map(<[usize]>::to_vec));
        let shortest = padding.as_ref().and_then(|padding| padding.iter().min().copied()).unwrap_or(0);
        let longest = (first + length).saturating_sub(shortest);
        self.check_length(longest)?;
        if let Some(cache) = cache {
            cache.check_rows(rows)?;
            cache.extend(length, self.blocks.len());
        }
        let mut x = self.tokens.forward(ids)?;
        if let Some(scale) = self.spec.embedding_scale {
            x = x.mul_scalar(scale)?;
        }
        if let Some(table) = &self.positions {
            let table = table.forward_value()?;
            let rows = match documents {
                Some(positions) => table.embedding(positions)?,
                None => self.position_rows(&table, ids, first, padding.as_deref())?,
            };
            x = x.add(&rows)?;
        }
        let mut x = self.dropout.forward(&x)?;
        visit(&x)?;
        let padded = padding.map(|padding| {
            let real = move |i: &[usize]| f64::from(u8::from(i[3] >= padding[i[0]]));
            DTensor::from_fn((rows, 1, 1, first + length), DType::U8, ids.device_mesh(), batch_placed(ids), real)
        });
        // A cache has no documents, and documents no padding on their left.
        let mask = match documents {
            Some(positions) => Some(document_mask(ids, positions)?),
            None => padded.transpose()?,
        };
        let angles: Vec<Arc<RotaryFrequencies>> = self
            .spec
            .ropes
            .iter()
            .zip(&self.angles)
            .map(|(rope, known)| if rope.depends_on_length() { rope.frequencies(longest) } else { Arc::clone(known) })
            .collect();
        for (i, block) in self.blocks.iter().enumerate() {
            let call = AttentionCall {
                first,
                rotary: self.spec.layers[i].rope.map(|rope| &angles[rope]),
                mask: mask.as_ref(),
                cache: cache.as_deref_mut().map(|cache| (cache, i)),
            };
            x = block.run(&x, call)?;
            if i + 1 < self.blocks.len() {
                visit(&x)?;
            }
        }
        let x = self.norm.forward(&x)?;
        visit(&x)?;
        Ok(x)
    }

    /// Learned positions have a last one.
    fn check_length(&self, length: usize) -> Result<()> {
        if !self.spec.learned_positions || length <= self.spec.max_positions {
            return Ok(());
        }
        let found = format!("{length} positions");
        let needed = format!("at most {}, for which the model has position embeddings", self.spec.max_positions);
        Err(ErrorKind::Argument.error("sequence", found, needed, "shorten the sequence"))
    }

    /// The rows of the position table for positions from `first` on, which begin after the padding of each row.
    #[track_caller]
    fn position_rows(
        &self,
        table: &DTensor,
        ids: &DTensor,
        first: usize,
        padding: Option<&[usize]>,
    ) -> Result<DTensor> {
        let length = ids.shape()[1];
        let Some(padding) = padding else { return table.narrow(0, first, length) };
        let padding = padding.to_vec();
        let position = move |i: &[usize]| (first + i[1]).saturating_sub(padding[i[0]]) as f64;
        let positions = DTensor::from_fn(ids.shape(), DType::U32, ids.device_mesh(), batch_placed(ids), position)?;
        table.embedding(&positions)
    }
}

/// Placements of a tensor whose rows are those of the ids.
fn batch_placed(ids: &DTensor) -> Vec<Placement> {
    let rows = ids.layout().shard_order(0);
    let placements = ids.placements().iter().enumerate();
    placements.map(|(axis, p)| if rows.contains(&axis) { p.clone() } else { Placement::Replicate }).collect()
}

/// Ones where a key belongs to the document of a query or follows it, `[batch, 1, queries, keys]`, of the positions of tokens in
/// their documents. What follows a query is masked anyway, because attention is causal.
fn document_mask(ids: &DTensor, positions: &DTensor) -> Result<DTensor> {
    if positions.shape() != ids.shape() || positions.dtype().is_float() {
        let found = format!("{} {}", positions.dtype().as_str(), positions.layout());
        let needed = format!("integers {:?}, as the ids", ids.shape());
        let fix = "use `data::PackedSequences::with_positions`";
        return Err(ErrorKind::shape(positions.shape()).error("positions in documents", found, needed, fix));
    }
    let (mesh, length) = (positions.device_mesh(), positions.shape()[1] as i64);
    let index = DTensor::arange(0..length, DType::I64, mesh, vec![Placement::Replicate; mesh.mesh().ndim()])?;
    let starts = index.sub(&positions.to_dtype(DType::I64)?)?;
    starts.unsqueeze(-1)?.le(&index)?.unsqueeze(1)
}

impl Forward for Decoder {
    fn forward(&self, ids: &DTensor) -> Result<DTensor> {
        self.hooks.run(ids, |ids| self.run(ids, None, None, Logits::All, &mut |_| Ok(())))
    }
}
