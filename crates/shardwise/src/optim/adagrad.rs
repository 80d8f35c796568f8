//! Adagrad.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adagrad: divides gradients by the root of the sum of all squared gradients so far. Elementwise.
    Adagrad {
        /// Learning rate decay: the rate of step t, from 0, is `lr / (1 + t * lr_decay)`.
        lr_decay: f64 = 0.0,
        /// Added to the denominator for numerical stability.
        eps: f64 = 1e-10,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// Initial value of the sums.
        initial_accumulator_value: f64 = 0.0,
    }
}

impl Optimizer for Adagrad {
    const NAME: &'static str = "adagrad";
    const DEFAULT_LR: f64 = 1e-2;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::full("sum", shape, self.initial_accumulator_value)]
    }

    fn check(&self) -> Result<()> {
        at_least_zero(Self::NAME, "lr_decay", self.lr_decay)?;
        at_least_zero(Self::NAME, "initial_accumulator_value", self.initial_accumulator_value)?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let lr = step.lr() / (1.0 + (step.count() - 1) as f64 * self.lr_decay);
        step.elementwise(["sum"], AdagradRule { lr, decay: self.weight_decay, eps: self.eps })
    }
}

#[derive(Clone, Copy)]
struct AdagradRule {
    lr: f64,
    decay: f64,
    eps: f64,
}

impl Elementwise<1> for AdagradRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [sum]: [f64; 1]) -> (f64, [f64; 1]) {
        let g = g + self.decay * p;
        let sum = sum + g * g;
        (p - self.lr * g / (sum.sqrt() + self.eps), [sum])
    }
}
