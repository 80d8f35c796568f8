//! Averaged SGD.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// SGD with a decreasing learning rate and a running average of the parameter, which is in the state as `ax`. Elementwise.
    #[doc(alias = "ASGD")]
    Asgd {
        /// Decay term of parameter and learning rate.
        lambd: f64 = 1e-4,
        /// Power of the decay of the learning rate.
        alpha: f64 = 0.75,
        /// Step at which averaging starts.
        t0: f64 = 1e6,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

/// State: the learning rate of the next step, 0 before the first one.
const ETA: &str = "eta";
/// State: the weight of the next parameter in the average.
const MU: &str = "mu";

impl Optimizer for Asgd {
    const NAME: &'static str = "asgd";
    const DEFAULT_LR: f64 = 1e-2;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("ax", shape)]
    }

    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[("step", 0.0), (ETA, 0.0), (MU, 1.0)]
    }

    fn check(&self) -> Result<()> {
        at_least_zero(Self::NAME, "lambd", self.lambd)?;
        at_least_zero(Self::NAME, "alpha", self.alpha)?;
        at_least_zero(Self::NAME, "t0", self.t0)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let (lr, t) = (step.lr(), step.count() as f64);
        // As in PyTorch, a step uses the learning rate that the step before it computed.
        let eta = if step.count() == 1 { lr } else { step.number(ETA)? };
        let rule =
            AsgdRule { eta, shrink: 1.0 - self.lambd * eta, weight: step.number(MU)?, weight_decay: self.weight_decay };
        step.elementwise(["ax"], rule)?;
        step.set_number(ETA, lr / (1.0 + self.lambd * lr * t).powf(self.alpha))?;
        step.set_number(MU, 1.0 / (t - self.t0).max(1.0))
    }
}

#[derive(Clone, Copy)]
struct AsgdRule {
    eta: f64,
    /// Factor of the parameter.
    shrink: f64,
    /// Weight of the new parameter in the average.
    weight: f64,
    weight_decay: f64,
}

impl Elementwise<1> for AsgdRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [average]: [f64; 1]) -> (f64, [f64; 1]) {
        let g = g + self.weight_decay * p;
        let p = p * self.shrink - self.eta * g;
        (p, [if self.weight == 1.0 { p } else { average + (p - average) * self.weight }])
    }
}
