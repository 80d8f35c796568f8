//! Adagrad.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adagrad: divides by the root of the sum of all squared gradients.
    Adagrad {
        /// How fast the learning rate falls.
        lr_decay: f64 = 0.0,
        /// Added to the divisor.
        eps: f64 = 1e-10,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// What the sums begin with.
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

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let lr = at.lr() / (1.0 + (at.count() - 1) as f64 * self.lr_decay);
        at.elementwise(["sum"], SumOfSquares { lr, decay: self.weight_decay, eps: self.eps })
    }
}

#[derive(Clone, Copy)]
struct SumOfSquares {
    lr: f64,
    decay: f64,
    eps: f64,
}

impl Elementwise<1> for SumOfSquares {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [sum]: [f64; 1]) -> (f64, [f64; 1]) {
        let g = g + self.decay * p;
        let sum = sum + g * g;
        (p - self.lr * g / (sum.sqrt() + self.eps), [sum])
    }
}
