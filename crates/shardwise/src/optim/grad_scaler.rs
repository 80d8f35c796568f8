//! Gradient scaling for half precision.

use serde::{Deserialize, Serialize};

use super::ShardedOptimizer;
use crate::autograd::Gradients;
use crate::error::{ErrorKind, Result};
use crate::placement::ReduceOp;
use crate::tensor::DTensor;
use candle_core::{Device, Tensor};
use shardwise_kernels::{NormPartial, norm_partial};

/// Scales a loss so that small gradients do not vanish in f16, and skips steps whose gradients overflow. PyTorch's `GradScaler`.
///
/// A step is skipped on all ranks if a gradient has an infinity or NaN on any of them. Then the scale is multiplied by
/// `backoff_factor`; after `growth_interval` steps without one, by `growth_factor`. `(&scaler,)` and `(&mut scaler,)` are parts of a checkpoint.
///
/// ```
/// use shardwise::nn::Linear;
/// use shardwise::optim::GradScaler;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let layer = Linear::new(&Builder::new(&mesh).placed(|_, _| vec![Shard(0)]), 4, 6)?;
///     let (mut optimizer, mut scaler) = (Sgd::default().over(&layer)?, GradScaler::default());
///     let loss = layer.forward(&DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?)?.sum_all()?;
///     let gradients = scaler.scale(&loss)?.backward()?;
///     assert!(scaler.step(&mut optimizer, gradients)?); // not skipped
///     assert_eq!(scaler.scale, 65536.0);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GradScaler {
    /// The factor of the loss.
    pub scale: f64,
    /// Factor of the scale after `growth_interval` steps that were not skipped.
    pub growth_factor: f64,
    /// Factor of the scale after a step that was skipped.
    pub backoff_factor: f64,
    /// Number of steps after which the scale grows.
    pub growth_interval: u64,
    /// Number of steps since the scale changed.
    #[doc(alias = "_growth_tracker")]
    pub growth_tracker: u64,
}

impl Default for GradScaler {
    /// PyTorch's defaults.
    fn default() -> Self {
        let scale = f64::from(1 << 16);
        GradScaler { scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, growth_tracker: 0 }
    }
}

impl GradScaler {
    /// Multiplies a loss by the scale. Local.
    #[track_caller]
    pub fn scale(&self, loss: &DTensor) -> Result<DTensor> {
        loss.mul_scalar(self.scale)
    }

    /// Divides gradients by the scale, in the layouts of their leaves, and returns whether all are finite on all ranks. For
    /// clipping between scaling and the step; see [`update`](Self::update).
    ///
    /// Collective: reduces gradients that are partial sums, and one number.
    #[doc(alias = "unscale_")]
    #[track_caller]
    pub fn unscale(&self, gradients: Gradients) -> Result<(Gradients, bool)> {
        self.check()?;
        let gradients = gradients.in_param_layout()?;
        let Some(world) = gradients.iter().next().map(|gradient| gradient.device_mesh().world().clone()) else {
            return Ok((gradients, true));
        };
        let mut is_finite = true;
        for gradient in gradients.iter().filter(|_| !world.is_dry()) {
            is_finite &= norm_partial(gradient.local(), NormPartial::MaxAbs)?.is_finite();
        }
        let overflows =
            world.all_reduce(&Tensor::new(f32::from(u8::from(!is_finite)), &Device::Cpu)?, ReduceOp::Max)?;
        let is_finite = world.is_dry() || overflows.to_scalar::<f32>()? == 0.0;
        Ok((gradients.scale(1.0 / self.scale)?, is_finite))
    }

    /// Unscales gradients of a scaled loss, steps unless one is not finite, and updates the scale. Returns whether it stepped.
    ///
    /// Collective: all ranks must call it with the gradients of the same backward pass.
    #[track_caller]
    pub fn step(&mut self, optimizer: &mut ShardedOptimizer, gradients: Gradients) -> Result<bool> {
        let (gradients, is_finite) = self.unscale(gradients)?;
        if is_finite {
            optimizer.step(gradients)?;
        }
        self.update(is_finite);
        Ok(is_finite)
    }

    /// Adjusts the scale after a step that was taken (`true`) or skipped. Local.
    pub fn update(&mut self, stepped: bool) {
        self.growth_tracker += 1;
        if !stepped {
            (self.scale, self.growth_tracker) = (self.scale * self.backoff_factor, 0);
        } else if self.growth_tracker >= self.growth_interval {
            (self.scale, self.growth_tracker) = (self.scale * self.growth_factor, 0);
        }
    }

    /// Checks the settings.
    pub(crate) fn check(&self) -> Result<()> {
        let is_positive = |x: f64| x > 0.0 && x.is_finite();
        let usable = is_positive(self.scale) && self.growth_factor >= 1.0 && is_positive(self.backoff_factor);
        if usable && self.backoff_factor <= 1.0 && self.growth_interval > 0 {
            return Ok(());
        }
        Err(ErrorKind::Optimizer.error(
            "gradient scaler",
            format!("{self:?}"),
            "a positive scale, a growth factor from 1, a backoff factor up to 1, and an interval from 1",
            "correct the settings",
        ))
    }
}
