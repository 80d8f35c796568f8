//! Normalisation layers.

use super::build::Builder;
use super::init::Init;
use super::linear::layer;
use super::module::{Buffer, Forward, Hooks, Item, Mode, Module, join};
use crate::error::Result;
use crate::param::Param;
use crate::tensor::{DTensor, no_grad};

/// Mean 0 and variance 1 over the last dimension, times a weight, plus a bias.
pub struct LayerNorm {
    /// The weight.
    pub weight: Param,
    /// The bias.
    pub bias: Param,
    /// Hooks.
    pub hooks: Hooks,
    eps: f64,
}

layer!(LayerNorm { weight, bias, hooks });

impl LayerNorm {
    /// For so many features.
    pub fn new(at: &Builder, features: usize, eps: f64) -> Result<Self> {
        let (weight, bias) = affine(at, features)?;
        Ok(LayerNorm { weight, bias, hooks: at.hooks(), eps })
    }
}

impl Forward for LayerNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.layer_norm(1, Some(&self.weight.get()), Some(&self.bias.get()), self.eps))
    }
}

fn affine(at: &Builder, features: usize) -> Result<(Param, Param)> {
    Ok((at.param("weight", &[features], Init::ONES)?, at.param("bias", &[features], Init::ZEROS)?))
}

/// Mean square 1 over the last dimension, times a weight.
pub struct RmsNorm {
    /// The weight.
    pub weight: Param,
    /// Hooks.
    pub hooks: Hooks,
    eps: f64,
}

layer!(RmsNorm { weight, hooks });

impl RmsNorm {
    /// For so many features.
    pub fn new(at: &Builder, features: usize, eps: f64) -> Result<Self> {
        Ok(RmsNorm { weight: at.param("weight", &[features], Init::ONES)?, hooks: at.hooks(), eps })
    }
}

impl Forward for RmsNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.rms_norm(1, Some(&self.weight.get()), self.eps))
    }
}

/// Mean 0 and variance 1 over groups of channels of `[n, channels, ...]`.
pub struct GroupNorm {
    /// The weight.
    pub weight: Param,
    /// The bias.
    pub bias: Param,
    /// Hooks.
    pub hooks: Hooks,
    groups: usize,
    eps: f64,
}

layer!(GroupNorm { weight, bias, hooks });

impl GroupNorm {
    /// For so many channels in so many groups.
    pub fn new(at: &Builder, groups: usize, channels: usize, eps: f64) -> Result<Self> {
        let (weight, bias) = affine(at, channels)?;
        Ok(GroupNorm { weight, bias, hooks: at.hooks(), groups, eps })
    }
}

impl Forward for GroupNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        let (weight, bias) = (self.weight.get(), self.bias.get());
        self.hooks.run(x, |x| x.group_norm(self.groups, Some(&weight), Some(&bias), self.eps))
    }
}

/// Mean 0 and variance 1 per channel of `[n, channels, ...]`: of the whole batch while training, else of running averages.
#[doc(alias = "SyncBatchNorm")]
#[doc(alias = "BatchNorm1d")]
#[doc(alias = "BatchNorm2d")]
pub struct BatchNorm {
    /// The weight.
    pub weight: Param,
    /// The bias.
    pub bias: Param,
    /// Running mean.
    pub running_mean: Buffer,
    /// Running variance, with divisor `n - 1`.
    pub running_var: Buffer,
    /// Hooks.
    pub hooks: Hooks,
    mode: Mode,
    momentum: f64,
    eps: f64,
}

layer!(BatchNorm { weight, bias, running_mean, running_var, mode, hooks });

impl BatchNorm {
    /// For so many channels; running averages move by `momentum` towards each batch.
    pub fn new(at: &Builder, channels: usize, momentum: f64, eps: f64) -> Result<Self> {
        let (weight, bias) = affine(at, channels)?;
        let running_mean = at.buffer("running_mean", &[channels], Init::ZEROS)?;
        let running_var = at.buffer("running_var", &[channels], Init::ONES)?;
        let (hooks, mode) = (at.hooks(), Mode::default());
        Ok(BatchNorm { weight, bias, running_mean, running_var, hooks, mode, momentum, eps })
    }

    fn normalise(&self, x: &DTensor) -> Result<DTensor> {
        let (weight, bias) = (self.weight.get(), self.bias.get());
        if !self.mode.is_training() {
            let running = (&self.running_mean.get(), &self.running_var.get());
            return x.batch_norm(Some(running), Some(&weight), Some(&bias), self.eps);
        }
        no_grad(|| -> Result<()> {
            let (mean, variance) = x.detach().batch_statistics(1.0)?;
            for (buffer, new) in [(&self.running_mean, mean), (&self.running_var, variance)] {
                let old = buffer.get();
                let next = old.lerp(&new, self.momentum)?;
                buffer.set(&next.to_layout(old.layout())?);
            }
            Ok(())
        })?;
        x.batch_norm(None, Some(&weight), Some(&bias), self.eps)
    }
}

impl Forward for BatchNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.normalise(x))
    }
}
