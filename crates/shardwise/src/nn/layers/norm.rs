//! Normalization layers.

use crate::error::Result;
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{Buffer, Forward, Hooks, TrainingMode};
use crate::param::Param;
use crate::tensor::{DTensor, no_grad};
use shardwise_derive::Module;

/// Layer norm over the last dimension, with weight and bias.
#[derive(Module)]
pub struct LayerNorm {
    /// Weight, one element per normalized feature or channel.
    pub weight: Param,
    /// Bias, of the shape of the weight.
    pub bias: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    eps: f64,
}

impl LayerNorm {
    /// Builds the layer for a last dimension of size `features`; the weight starts with ones.
    pub fn new(builder: &Builder, features: usize, eps: f64) -> Result<Self> {
        let (weight, bias) = affine(builder, features)?;
        Ok(LayerNorm { weight, bias, hooks: builder.hooks(), eps })
    }
}

impl LayerNorm {
    /// Computes `x + branch` and the norm of the sum, in one pass over memory unless the layer has hooks or was replaced.
    ///
    /// Returns the sum and its norm: what a transformer block needs after a residual branch.
    #[track_caller]
    pub fn forward_residual(&self, x: &DTensor, branch: &DTensor) -> Result<(DTensor, DTensor)> {
        self.hooks.run_residual(x, branch, &|sum| self.forward(sum), |x, branch| {
            x.add_layer_norm(branch, Some(&self.weight.forward_value()?), Some(&self.bias.forward_value()?), self.eps)
        })
    }
}

impl Forward for LayerNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            x.layer_norm(1, Some(&self.weight.forward_value()?), Some(&self.bias.forward_value()?), self.eps)
        })
    }
}

fn affine(builder: &Builder, features: usize) -> Result<(Param, Param)> {
    Ok((builder.param("weight", &[features], Init::ONES)?, builder.param("bias", &[features], Init::ZEROS)?))
}

/// RMS norm over the last dimension, with a weight.
#[doc(alias = "RMSNorm")]
#[derive(Module)]
pub struct RmsNorm {
    /// Weight, one element per normalized feature or channel.
    pub weight: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    eps: f64,
}

impl RmsNorm {
    /// Builds the layer for a last dimension of size `features`; the weight starts with ones.
    pub fn new(builder: &Builder, features: usize, eps: f64) -> Result<Self> {
        Ok(RmsNorm { weight: builder.param("weight", &[features], Init::ONES)?, hooks: builder.hooks(), eps })
    }
}

impl RmsNorm {
    /// Computes `x + branch` and the norm of the sum, as [`LayerNorm::forward_residual`] does.
    #[track_caller]
    pub fn forward_residual(&self, x: &DTensor, branch: &DTensor) -> Result<(DTensor, DTensor)> {
        self.hooks.run_residual(x, branch, &|sum| self.forward(sum), |x, branch| {
            x.add_rms_norm(branch, Some(&self.weight.forward_value()?), self.eps)
        })
    }
}

impl Forward for RmsNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.rms_norm(1, Some(&self.weight.forward_value()?), self.eps))
    }
}

/// Group norm of `[n, channels, ...]`, with weight and bias per channel.
#[derive(Module)]
pub struct GroupNorm {
    /// Weight, one element per normalized feature or channel.
    pub weight: Param,
    /// Bias, of the shape of the weight.
    pub bias: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// Builds the layer for `channels` channels in `groups` groups.
    pub fn new(builder: &Builder, groups: usize, channels: usize, eps: f64) -> Result<Self> {
        let (weight, bias) = affine(builder, channels)?;
        Ok(GroupNorm { weight, bias, hooks: builder.hooks(), groups, eps })
    }
}

impl Forward for GroupNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let (weight, bias) = (self.weight.forward_value()?, self.bias.forward_value()?);
            x.group_norm(self.groups, Some(&weight), Some(&bias), self.eps)
        })
    }
}

/// Batch norm of `[n, channels, ...]`.
///
/// In training the statistics are those of the whole batch over all ranks, as in PyTorch's `SyncBatchNorm`, and running
/// averages follow them; in evaluation the running averages are used.
#[doc(alias = "SyncBatchNorm")]
#[doc(alias = "BatchNorm1d")]
#[doc(alias = "BatchNorm2d")]
#[derive(Module)]
pub struct BatchNorm {
    /// Weight, one element per normalized feature or channel.
    pub weight: Param,
    /// Bias, of the shape of the weight.
    pub bias: Param,
    /// Running mean `[channels]`.
    pub running_mean: Buffer,
    /// Running variance `[channels]`, with divisor `n - 1`.
    pub running_var: Buffer,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    training_mode: TrainingMode,
    momentum: f64,
    eps: f64,
}

impl BatchNorm {
    /// Builds the layer for `channels` channels; `momentum` is the weight of a new batch in the running averages.
    pub fn new(builder: &Builder, channels: usize, momentum: f64, eps: f64) -> Result<Self> {
        let (weight, bias) = affine(builder, channels)?;
        let running_mean = builder.buffer("running_mean", &[channels], Init::ZEROS)?;
        let running_var = builder.buffer("running_var", &[channels], Init::ONES)?;
        let (hooks, training_mode) = (builder.hooks(), TrainingMode::default());
        Ok(BatchNorm { weight, bias, running_mean, running_var, hooks, training_mode, momentum, eps })
    }

    fn normalize(&self, x: &DTensor) -> Result<DTensor> {
        let (weight, bias) = (self.weight.forward_value()?, self.bias.forward_value()?);
        if !self.training_mode.is_training() {
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
        self.hooks.run(x, |x| self.normalize(x))
    }
}
