//! Stochastic gradient descent.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::{ErrorKind, Result};
use shardwise_kernels::Elementwise;

settings! {
    /// Stochastic gradient descent.
    #[doc(alias = "SGD")]
    Sgd {
        /// How much of the last change is kept; 0 for no momentum.
        momentum: f64 = 0.0,
        /// How much less of the gradient goes into the momentum.
        dampening: f64 = 0.0,
        /// Whether the momentum is applied one step ahead.
        nesterov: bool = false,
        /// This much of the parameter is added to its gradient.
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

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let (lr, decay) = (at.lr(), self.weight_decay);
        if self.momentum == 0.0 {
            return at.elementwise([], Plain { lr, decay });
        }
        // The first gradient is not dampened.
        let (keep, take) = if at.is_first() { (0.0, 1.0) } else { (self.momentum, 1.0 - self.dampening) };
        let rule = Momentum { lr, decay, keep, take, ahead: self.momentum };
        match self.nesterov {
            true => at.elementwise(["momentum_buffer"], Ahead(rule)),
            false => at.elementwise(["momentum_buffer"], rule),
        }
    }
}

#[derive(Clone, Copy)]
struct Plain {
    lr: f64,
    decay: f64,
}

impl Elementwise<0> for Plain {
    #[inline(always)]
    fn update(self, p: f64, g: f64, _: [f64; 0]) -> (f64, [f64; 0]) {
        (p - self.lr * (g + self.decay * p), [])
    }
}

#[derive(Clone, Copy)]
struct Momentum {
    lr: f64,
    decay: f64,
    keep: f64,
    take: f64,
    /// The momentum of the next step.
    ahead: f64,
}

impl Elementwise<1> for Momentum {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [b]: [f64; 1]) -> (f64, [f64; 1]) {
        let b = self.keep * b + self.take * (g + self.decay * p);
        (p - self.lr * b, [b])
    }
}

/// Nesterov's: the gradient and the momentum of the next step.
#[derive(Clone, Copy)]
struct Ahead(Momentum);

impl Elementwise<1> for Ahead {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [b]: [f64; 1]) -> (f64, [f64; 1]) {
        let Momentum { lr, decay, keep, take, ahead } = self.0;
        let g = g + decay * p;
        let b = keep * b + take * g;
        (p - lr * (g + ahead * b), [b])
    }
}
