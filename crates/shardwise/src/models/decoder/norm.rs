//! The norms of decoders and encoders.

use super::spec::{NormKind, NormSpec};
use crate::error::Result;
use crate::nn::init::Init;
use crate::nn::{Builder, Forward, Hooks, Module};
use crate::param::Param;
use crate::tensor::DTensor;

/// RMS norm or layer norm over the last dimension.
#[derive(Module)]
pub struct FeatureNorm {
    /// Weight, one element per feature.
    pub weight: Param,
    /// Bias of a layer norm.
    pub bias: Option<Param>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    spec: NormSpec,
}

impl FeatureNorm {
    pub(in crate::models) fn new(builder: &Builder, features: usize, spec: NormSpec) -> Result<Self> {
        let start = if spec.kind == NormKind::RmsPlusOne { Init::ZEROS } else { Init::ONES };
        let bias = (spec.kind == NormKind::Layer).then(|| builder.param("bias", &[features], Init::ZEROS));
        Ok(FeatureNorm {
            weight: builder.param("weight", &[features], start)?,
            bias: bias.transpose()?,
            hooks: builder.hooks(),
            spec,
        })
    }
}

impl FeatureNorm {
    /// Computes `x + branch` and the norm of the sum, as [`LayerNorm::forward_residual`](crate::nn::LayerNorm::forward_residual)
    /// does.
    #[track_caller]
    pub fn forward_residual(&self, x: &DTensor, branch: &DTensor) -> Result<(DTensor, DTensor)> {
        self.hooks.run_residual(x, branch, &|sum| self.forward(sum), |x, branch| {
            let (weight, bias) = self.factors()?;
            match self.spec.kind {
                NormKind::Rms | NormKind::RmsPlusOne => x.add_rms_norm(branch, Some(&weight), self.spec.eps),
                NormKind::Layer => x.add_layer_norm(branch, Some(&weight), bias.as_ref(), self.spec.eps),
            }
        })
    }

    /// What the normalized features are multiplied by, and what is added.
    fn factors(&self) -> Result<(DTensor, Option<DTensor>)> {
        let weight = self.weight.forward_value()?;
        let weight = if self.spec.kind == NormKind::RmsPlusOne { weight.add_scalar(1.0)? } else { weight };
        Ok((weight, self.bias.as_ref().map(Param::forward_value).transpose()?))
    }
}

impl Forward for FeatureNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let (weight, bias) = self.factors()?;
            match self.spec.kind {
                NormKind::Rms | NormKind::RmsPlusOne => x.rms_norm(1, Some(&weight), self.spec.eps),
                NormKind::Layer => x.layer_norm(1, Some(&weight), bias.as_ref(), self.spec.eps),
            }
        })
    }
}
