//! One layer of a decoder.

use super::attention::{AttentionCall, DecoderAttention};
use super::experts::MixtureOfExperts;
use super::mlp::DecoderMlp;
use super::norm::FeatureNorm;
use super::spec::DecoderSpec;
use crate::error::Result;
use crate::nn::{Builder, Dropout, Forward, Hooks, Module};
use crate::tensor::DTensor;

/// A transformer block of a [`Decoder`](super::Decoder): attention and MLP as residual branches.
#[derive(Module)]
pub struct DecoderBlock {
    /// Norm before attention.
    pub before_attention: Option<FeatureNorm>,
    /// Causal self-attention.
    pub attention: DecoderAttention,
    /// Norm after attention.
    pub after_attention: Option<FeatureNorm>,
    /// Norm before the MLP.
    pub before_mlp: Option<FeatureNorm>,
    /// Feed-forward block, of layers without experts.
    pub mlp: Option<DecoderMlp>,
    /// Mixture of experts, of layers that have one.
    pub experts: Option<MixtureOfExperts>,
    /// Norm after the MLP.
    pub after_mlp: Option<FeatureNorm>,
    /// Dropout of both residual branches.
    pub dropout: Dropout,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    parallel: bool,
}

impl DecoderBlock {
    pub(in crate::models) fn new(builder: &Builder, spec: &DecoderSpec, layer: usize) -> Result<Self> {
        let norm = |name: &str, there: bool| {
            there.then(|| FeatureNorm::new(&builder.child(name), spec.width, spec.norm)).transpose()
        };
        let own = &spec.layers[layer];
        Ok(DecoderBlock {
            before_attention: norm("before_attention", spec.norms_before)?,
            attention: DecoderAttention::new(
                &builder.child("attention"),
                spec.width,
                &spec.attention,
                spec.norm,
                own,
                true,
            )?,
            after_attention: norm("after_attention", spec.norms_after)?,
            before_mlp: norm("before_mlp", spec.norms_before)?,
            mlp: match own.experts {
                None => Some(DecoderMlp::new(&builder.child("mlp"), spec.width, spec.mlp)?),
                Some(_) => None,
            },
            experts: match own.experts {
                Some(experts) => Some(MixtureOfExperts::new(&builder.child("experts"), spec.width, experts, spec.mlp)?),
                None => None,
            },
            after_mlp: norm("after_mlp", spec.norms_after)?,
            dropout: Dropout::new(spec.dropout.branches)?,
            hooks: builder.hooks(),
            parallel: spec.parallel_residual,
        })
    }

    #[track_caller]
    pub(in crate::models) fn run(&self, x: &DTensor, call: AttentionCall<'_>) -> Result<DTensor> {
        let cached = call.cache.is_some();
        let compute = |x: &DTensor| -> Result<DTensor> {
            let attended = self.attention.attend(&normed(self.before_attention.as_ref(), x)?, call)?;
            let attended = self.dropout.forward(&normed(self.after_attention.as_ref(), &attended)?)?;
            let (after, mlp_input) = match &self.before_mlp {
                // The sum and its norm in one pass over memory.
                Some(norm) if !self.parallel => norm.forward_residual(x, &attended)?,
                norm => {
                    let after = x.add(&attended)?;
                    let mlp_input = normed(norm.as_ref(), if self.parallel { x } else { &after })?;
                    (after, mlp_input)
                }
            };
            let fed_forward = match (&self.mlp, &self.experts) {
                (Some(mlp), _) => mlp.forward(&mlp_input)?,
                (None, Some(experts)) => experts.forward(&mlp_input)?,
                (None, None) => unreachable!("a block has one of the two"),
            };
            after.add(&self.dropout.forward(&normed(self.after_mlp.as_ref(), &fed_forward)?)?)
        };
        match cached {
            true => self.hooks.run_own("a block with a cache", x, compute),
            false => self.hooks.run(x, compute),
        }
    }
}

#[track_caller]
fn normed(norm: Option<&FeatureNorm>, x: &DTensor) -> Result<DTensor> {
    norm.map_or_else(|| Ok(x.clone()), |norm| norm.forward(x))
}
