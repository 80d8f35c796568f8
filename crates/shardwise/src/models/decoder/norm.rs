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

impl Forward for FeatureNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let (weight, eps) = (self.weight.forward_value()?, self.spec.eps);
            let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
            match self.spec.kind {
                NormKind::Rms => x.rms_norm(1, Some(&weight), eps),
                NormKind::RmsPlusOne => x.rms_norm(1, Some(&weight.add_scalar(1.0)?), eps),
                NormKind::Layer => x.layer_norm(1, Some(&weight), bias.as_ref(), eps),
            }
        })
    }
}
