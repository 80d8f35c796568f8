//! Adadelta.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings, within};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adadelta: scales gradients by the ratio of running averages of squared updates and squared gradients. Elementwise.
    Adadelta {
        /// Decay rate of the running averages.
        rho: f64 = 0.9,
        /// Added to both running averages for numerical stability.
        eps: f64 = 1e-6,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for Adadelta {
    const NAME: &'static str = "adadelta";
    const DEFAULT_LR: f64 = 1.0;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("square_avg", shape), StateTensor::zeros("acc_delta", shape)]
    }

    fn check(&self) -> Result<()> {
        within(Self::NAME, "rho", self.rho, (0.0..=1.0).contains(&self.rho), "a number from 0 to 1")?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let rule = AdadeltaRule { lr: step.lr(), settings: *self };
        step.elementwise(["square_avg", "acc_delta"], rule)
    }
}

#[derive(Clone, Copy)]
struct AdadeltaRule {
    lr: f64,
    settings: Adadelta,
}

impl Elementwise<2> for AdadeltaRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [s, c]: [f64; 2]) -> (f64, [f64; 2]) {
        let Adadelta { rho, eps, weight_decay } = self.settings;
        let g = g + weight_decay * p;
        let s = rho * s + (1.0 - rho) * (g * g);
        let change = g * (c + eps).sqrt() / (s + eps).sqrt();
        (p - self.lr * change, [s, rho * c + (1.0 - rho) * (change * change)])
    }
}
