//! Sizes and options of a decoder: what families of models set, and all that the shared decoder knows of them.

use crate::error::{ErrorKind, Result};
use crate::nn::Activation;

use super::rope::Rope;

/// Sizes and options of a [`Decoder`](super::Decoder).
#[derive(Debug, Clone, PartialEq)]
pub(in crate::models) struct DecoderSpec {
    pub(in crate::models) vocab_size: usize,
    /// Features of the residual stream.
    pub(in crate::models) width: usize,
    /// Longest sequence that the model is meant for.
    pub(in crate::models) max_positions: usize,
    /// Whether positions are a learned table of `max_positions` rows, added to the token embedding.
    pub(in crate::models) learned_positions: bool,
    pub(in crate::models) attention: AttentionSpec,
    pub(in crate::models) norm: NormSpec,
    /// Whether norms precede attention and MLP.
    pub(in crate::models) norms_before: bool,
    /// Whether norms follow attention and MLP, inside the residual branches.
    pub(in crate::models) norms_after: bool,
    /// Whether attention and MLP see the same input, instead of one after the other.
    pub(in crate::models) parallel_residual: bool,
    pub(in crate::models) mlp: MlpSpec,
    pub(in crate::models) layers: Vec<LayerSpec>,
    /// Rotary position embeddings; layers refer to them by position.
    pub(in crate::models) ropes: Vec<Rope>,
    /// Factor of the token embedding.
    pub(in crate::models) embedding_scale: Option<f64>,
    /// Bounds the logits smoothly, by `cap * tanh(logit / cap)`.
    pub(in crate::models) logit_soft_cap: Option<f64>,
    /// Whether the head uses the weight of the token embedding.
    pub(in crate::models) tied_head: bool,
    /// Whether the head has a bias.
    pub(in crate::models) head_bias: bool,
    /// Dropout in training.
    pub(in crate::models) dropout: DropoutSpec,
}

/// Dropout probabilities in training; none in models of files, which say nothing that a fine-tuning has to follow.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(in crate::models) struct DropoutSpec {
    pub(in crate::models) embeddings: f64,
    /// Of the outputs of attention and MLP.
    pub(in crate::models) branches: f64,
}

/// Sizes and options of the attention of all layers.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::models) struct AttentionSpec {
    pub(in crate::models) heads: usize,
    pub(in crate::models) key_heads: usize,
    pub(in crate::models) head_dim: usize,
    /// Bias of the query, key and value projections.
    pub(in crate::models) bias: bool,
    pub(in crate::models) output_bias: bool,
    pub(in crate::models) query_key_norm: QueryKeyNorm,
    /// Bounds queries, keys and values to `-clip..clip`, after a norm of all heads.
    pub(in crate::models) clip: Option<f64>,
    pub(in crate::models) soft_cap: Option<f64>,
}

/// The norm of queries and keys before positions are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::models) enum QueryKeyNorm {
    None,
    /// Over the features of every head.
    PerHead,
    /// Over the features of all heads together.
    AllHeads,
}

/// A norm of the features.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::models) struct NormSpec {
    pub(in crate::models) kind: NormKind,
    pub(in crate::models) eps: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::models) enum NormKind {
    /// RMS norm with a weight.
    Rms,
    /// RMS norm whose weight is stored without its 1.
    RmsPlusOne,
    /// Layer norm with weight and bias.
    Layer,
}

/// Sizes and options of a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::models) struct MlpSpec {
    pub(in crate::models) hidden: usize,
    /// `down(activation(gate(x)) * up(x))` instead of `down(activation(up(x)))`.
    pub(in crate::models) gated: bool,
    pub(in crate::models) activation: Activation,
    pub(in crate::models) bias: bool,
}

/// What differs between layers.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::models) struct LayerSpec {
    /// Positions that a query sees, with its own.
    pub(in crate::models) window: Option<usize>,
    /// Which of the rotary embeddings of the model positions use.
    pub(in crate::models) rope: Option<usize>,
    /// Factor of the scores.
    pub(in crate::models) scale: f64,
    /// A mixture of experts in place of the MLP.
    pub(in crate::models) experts: Option<ExpertsSpec>,
}

/// Sizes and options of a mixture of experts; each is a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::models) struct ExpertsSpec {
    pub(in crate::models) count: usize,
    pub(in crate::models) per_token: usize,
    pub(in crate::models) hidden: usize,
    /// Whether the probabilities of the chosen experts are divided by their sum.
    pub(in crate::models) normalized: bool,
    /// Features inside an expert that every token uses, behind a gate.
    pub(in crate::models) shared_hidden: Option<usize>,
}

impl DecoderSpec {
    /// Checks that the sizes fit together; `model` is the name of the family.
    pub(in crate::models) fn check(&self, model: &str) -> Result<()> {
        let bad = |found: String, needed: &str| {
            Err(ErrorKind::Model.error("model", format!("{model} with {found}"), needed, "correct the configuration"))
        };
        let AttentionSpec { heads, key_heads, head_dim, .. } = self.attention;
        let sizes = [
            ("vocabulary", self.vocab_size),
            ("hidden size", self.width),
            ("layers", self.layers.len()),
            ("heads", heads),
            ("key heads", key_heads),
            ("head size", head_dim),
            ("MLP size", self.mlp.hidden),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return bad(format!("0 as {name}"), "sizes of at least 1");
        }
        if !heads.is_multiple_of(key_heads) {
            return bad(
                format!("{heads} heads and {key_heads} key heads"),
                "heads that are a multiple of the key heads",
            );
        }
        if let Some(rope) = self.ropes.iter().find(|rope| rope.size.next_multiple_of(2) > head_dim || rope.size == 0) {
            let found = format!("{} features of a head of {head_dim} that turn with the position", rope.size);
            return bad(found, "pairs of features, at least one and at most the size of a head");
        }
        for experts in self.layers.iter().filter_map(|layer| layer.experts) {
            if experts.count == 0 || experts.hidden == 0 || !(1..=experts.count).contains(&experts.per_token) {
                let found = format!("{} of {} experts of size {}", experts.per_token, experts.count, experts.hidden);
                return bad(found, "1 to all experts per token, of a size of at least 1");
            }
        }
        let DropoutSpec { embeddings, branches } = self.dropout;
        if let Some(p) = [embeddings, branches].into_iter().find(|p| !(0.0..1.0).contains(p)) {
            return bad(format!("dropout {p}"), "0 to below 1");
        }
        Ok(())
    }
}
