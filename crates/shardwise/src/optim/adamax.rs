//! Adamax.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adamax: Adam with the infinity norm of gradients instead of the second moment. Elementwise.
    Adamax {
        /// Decay rates of the running average of gradients and of their infinity norm.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the absolute value of the gradient for numerical stability.
        eps: f64 = 1e-8,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for Adamax {
    const NAME: &'static str = "adamax";
    const DEFAULT_LR: f64 = 2e-3;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("exp_avg", shape), StateTensor::zeros("exp_inf", shape)]
    }

    fn check(&self) -> Result<()> {
        check_betas(Self::NAME, self.betas)?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let lr = step.lr() / (1.0 - self.betas.0.powf(step.count() as f64));
        step.elementwise(["exp_avg", "exp_inf"], AdamaxRule { lr, settings: *self })
    }
}

#[derive(Clone, Copy)]
struct AdamaxRule {
    lr: f64,
    settings: Adamax,
}

impl Elementwise<2> for AdamaxRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, u]: [f64; 2]) -> (f64, [f64; 2]) {
        let Adamax { betas, eps, weight_decay } = self.settings;
        let g = g + weight_decay * p;
        let m = betas.0 * m + (1.0 - betas.0) * g;
        let (kept, size) = (betas.1 * u, g.abs() + eps);
        let u = if kept >= size { kept } else { size };
        (p - self.lr * m / u, [m, u])
    }
}
