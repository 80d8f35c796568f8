//! Lion.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Lion: every element moves by the learning rate, in the direction of the sign of an interpolated momentum.
    ///
    /// As in "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023), with decoupled weight decay. Elementwise.
    Lion {
        /// Decay rates of the momentum: in the interpolation that gives the sign, and in the running average itself.
        betas: (f64, f64) = (0.9, 0.99),
        /// Decoupled weight decay: the parameter is multiplied by `1 - lr * weight_decay`.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for Lion {
    const NAME: &'static str = "lion";
    const DEFAULT_LR: f64 = 1e-4;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("exp_avg", shape)]
    }

    fn check(&self) -> Result<()> {
        check_betas(Self::NAME, self.betas)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let lr = step.lr();
        step.elementwise(["exp_avg"], LionRule { lr, shrink: 1.0 - lr * self.weight_decay, betas: self.betas })
    }
}

/// The update of Lion.
#[derive(Clone, Copy)]
struct LionRule {
    lr: f64,
    shrink: f64,
    betas: (f64, f64),
}

impl Elementwise<1> for LionRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m]: [f64; 1]) -> (f64, [f64; 1]) {
        let (first, second) = self.betas;
        let mean = first * m + (1.0 - first) * g;
        // Zero gives no update and NaN stays NaN, as in torch.sign.
        let direction = if mean > 0.0 {
            1.0
        } else if mean < 0.0 {
            -1.0
        } else {
            mean
        };
        (p * self.shrink - self.lr * direction, [second * m + (1.0 - second) * g])
    }
}
