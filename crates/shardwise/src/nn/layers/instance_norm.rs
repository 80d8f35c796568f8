//! Norms of single channels and of neighbouring channels.

use crate::error::Result;
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{Buffer, Forward, Hooks, TrainingMode};
use crate::param::Param;
use crate::tensor::{DTensor, no_grad};
use shardwise_derive::Module;

/// Options of [`InstanceNorm`], with PyTorch's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InstanceNormOptions {
    /// Added to the variance; 1e-5 by default.
    pub eps: f64,
    /// Weight of a new batch in the running averages; 0.1 by default.
    pub momentum: f64,
    /// Whether there are a weight and a bias per channel; false by default.
    pub affine: bool,
    /// Whether running averages are kept, and used in evaluation; false by default.
    pub track_running_stats: bool,
}

impl Default for InstanceNormOptions {
    fn default() -> Self {
        InstanceNormOptions { eps: 1e-5, momentum: 0.1, affine: false, track_running_stats: false }
    }
}

/// Instance norm of `[n, channels, ...]`: every channel of every image with its own mean and variance.
#[doc(alias = "InstanceNorm1d")]
#[doc(alias = "InstanceNorm2d")]
#[doc(alias = "InstanceNorm3d")]
#[derive(Module)]
pub struct InstanceNorm {
    /// Weight per channel.
    pub weight: Option<Param>,
    /// Bias per channel.
    pub bias: Option<Param>,
    /// Running mean `[channels]`.
    pub running_mean: Option<Buffer>,
    /// Running variance `[channels]`, with divisor `n - 1`.
    pub running_var: Option<Buffer>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    training_mode: TrainingMode,
    #[module(skip)]
    options: InstanceNormOptions,
}

impl InstanceNorm {
    /// Builds the layer for `channels` channels.
    pub fn new(builder: &Builder, channels: usize, options: InstanceNormOptions) -> Result<Self> {
        let InstanceNormOptions { affine, track_running_stats: tracks, .. } = options;
        let param = |name: &str, init: Init| affine.then(|| builder.param(name, &[channels], init)).transpose();
        let buffer = |name: &str, init: Init| tracks.then(|| builder.buffer(name, &[channels], init)).transpose();
        Ok(InstanceNorm {
            weight: param("weight", Init::ONES)?,
            bias: param("bias", Init::ZEROS)?,
            running_mean: buffer("running_mean", Init::ZEROS)?,
            running_var: buffer("running_var", Init::ONES)?,
            hooks: builder.hooks(),
            training_mode: TrainingMode::default(),
            options,
        })
    }

    fn normalize(&self, x: &DTensor) -> Result<DTensor> {
        let weight = self.weight.as_ref().map(Param::forward_value).transpose()?;
        let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
        let eps = self.options.eps;
        let Some((mean, var)) = self.running_mean.as_ref().zip(self.running_var.as_ref()) else {
            return x.instance_norm(None, weight.as_ref(), bias.as_ref(), eps);
        };
        if !self.training_mode.is_training() {
            return x.instance_norm(Some((&mean.get(), &var.get())), weight.as_ref(), bias.as_ref(), eps);
        }
        let result = x.instance_norm(None, weight.as_ref(), bias.as_ref(), eps)?;
        no_grad(|| -> Result<()> {
            // The averages over the batch of the statistics of its images.
            let pixels: Vec<isize> = (2..x.ndim() as isize).collect();
            let x = x.detach();
            let means = x.mean(&pixels, false)?.mean(&[0], false)?;
            let variances = x.var(&pixels, 1.0, false)?.mean(&[0], false)?;
            for (buffer, new) in [(mean, means), (var, variances)] {
                let old = buffer.get();
                buffer.set(&old.lerp(&new, self.options.momentum)?.to_layout(old.layout())?);
            }
            Ok(())
        })?;
        Ok(result)
    }
}

impl Forward for InstanceNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| self.normalize(x))
    }
}

/// Norm over `size` neighbouring channels of `[n, channels, ...]`: `x / (k + alpha * mean of squares) ^ beta`.
#[derive(Clone, Module)]
pub struct LocalResponseNorm {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    size: usize,
    alpha: f64,
    beta: f64,
    k: f64,
}

impl LocalResponseNorm {
    /// Creates the layer; PyTorch's defaults are `alpha` 1e-4, `beta` 0.75 and `k` 1.
    pub fn new(size: usize, alpha: f64, beta: f64, k: f64) -> Self {
        LocalResponseNorm { hooks: Hooks::default(), size, alpha, beta, k }
    }
}

impl Forward for LocalResponseNorm {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.local_response_norm(self.size, self.alpha, self.beta, self.k))
    }
}
