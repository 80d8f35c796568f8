//! Stochastic gradient descent.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::{ErrorKind, Result};
use shardwise_kernels::Elementwise;

settings! {
    /// Stochastic gradient descent, with momentum if it is not 0.
    ///
    /// Elementwise: steps communicate nothing beyond bringing gradients into the layouts of their parameters.
    #[doc(alias = "SGD")]
    Sgd {
        /// Momentum factor; 0 for none.
        momentum: f64 = 0.0,
        /// Dampening of the gradient in the momentum.
        dampening: f64 = 0.0,
        /// Nesterov momentum; needs a momentum and no dampening.
        nesterov: bool = false,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for Sgd {
    const NAME: &'static str = "sgd";

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        (self.momentum != 0.0).then(|| StateTensor::zeros("momentum_buffer", shape)).into_iter().collect()
    }

    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[]
    }

    fn check(&self) -> Result<()> {
        at_least_zero(Self::NAME, "momentum", self.momentum)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let found = format!("momentum {} and dampening {} with nesterov", self.momentum, self.dampening);
            let needed = "a momentum and no dampening";
            return Err(ErrorKind::Optimizer.error(
                "momentum",
                found,
                needed,
                "set a momentum, or switch nesterov off",
            ));
        }
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let (lr, decay) = (step.lr(), self.weight_decay);
        if self.momentum == 0.0 {
            return step.elementwise([], SgdRule { lr, decay });
        }
        // As in PyTorch, the momentum buffer starts as the first gradient, without dampening.
        let (keep, take) = if step.is_first() { (0.0, 1.0) } else { (self.momentum, 1.0 - self.dampening) };
        let rule = MomentumRule { lr, decay, keep, take, momentum: self.momentum };
        match self.nesterov {
            true => step.elementwise(["momentum_buffer"], NesterovRule(rule)),
            false => step.elementwise(["momentum_buffer"], rule),
        }
    }
}

/// SGD without momentum.
#[derive(Clone, Copy)]
struct SgdRule {
    lr: f64,
    decay: f64,
}

impl Elementwise<0> for SgdRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, _: [f64; 0]) -> (f64, [f64; 0]) {
        (p - self.lr * (g + self.decay * p), [])
    }
}

/// SGD with momentum.
#[derive(Clone, Copy)]
struct MomentumRule {
    lr: f64,
    decay: f64,
    /// Factor of the momentum buffer.
    keep: f64,
    /// Factor of the gradient.
    take: f64,
    /// Factor of the new buffer in the Nesterov update.
    momentum: f64,
}

impl Elementwise<1> for MomentumRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [b]: [f64; 1]) -> (f64, [f64; 1]) {
        let b = self.keep * b + self.take * (g + self.decay * p);
        (p - self.lr * b, [b])
    }
}

/// SGD with Nesterov momentum.
#[derive(Clone, Copy)]
struct NesterovRule(MomentumRule);

impl Elementwise<1> for NesterovRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [b]: [f64; 1]) -> (f64, [f64; 1]) {
        let MomentumRule { lr, decay, keep, take, momentum } = self.0;
        let g = g + decay * p;
        let b = keep * b + take * g;
        (p - lr * (g + momentum * b), [b])
    }
}
