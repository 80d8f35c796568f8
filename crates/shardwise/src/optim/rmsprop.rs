//! RMSprop.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// RMSprop: divides gradients by the root of a running average of their squares. Elementwise.
    #[doc(alias = "RMSprop")]
    RmsProp {
        /// Decay rate of the running averages.
        alpha: f64 = 0.99,
        /// Added to the denominator for numerical stability.
        eps: f64 = 1e-8,
        /// Momentum factor; 0 for none.
        momentum: f64 = 0.0,
        /// Whether the denominator is the variance of the gradient instead of its mean square.
        centered: bool = false,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for RmsProp {
    const NAME: &'static str = "rmsprop";
    const DEFAULT_LR: f64 = 1e-2;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        let centered = self.centered.then_some("grad_avg");
        let momentum = (self.momentum != 0.0).then_some("momentum_buffer");
        let names = std::iter::once("square_avg").chain(centered).chain(momentum);
        names.map(|name| StateTensor::zeros(name, shape)).collect()
    }

    fn check(&self) -> Result<()> {
        at_least_zero(Self::NAME, "momentum", self.momentum)?;
        at_least_zero(Self::NAME, "alpha", self.alpha)?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let rule = RmsPropRule { lr: step.lr(), settings: *self };
        match (self.momentum != 0.0, self.centered) {
            (false, false) => step.elementwise(["square_avg"], rule),
            (true, false) => step.elementwise(["square_avg", "momentum_buffer"], MomentumRmsPropRule(rule)),
            (false, true) => step.elementwise(["square_avg", "grad_avg"], CenteredRmsPropRule(rule)),
            (true, true) => {
                step.elementwise(["square_avg", "grad_avg", "momentum_buffer"], CenteredMomentumRmsPropRule(rule))
            }
        }
    }
}

#[derive(Clone, Copy)]
struct RmsPropRule {
    lr: f64,
    settings: RmsProp,
}

impl RmsPropRule {
    /// The gradient with weight decay, and the new mean square.
    #[inline(always)]
    fn square(self, p: f64, g: f64, q: f64) -> (f64, f64) {
        let g = g + self.settings.weight_decay * p;
        (g, self.settings.alpha * q + (1.0 - self.settings.alpha) * (g * g))
    }

    /// The new mean of gradients and their variance, which rounding must not make negative.
    #[inline(always)]
    fn variance(self, g: f64, a: f64, q: f64) -> (f64, f64) {
        let a = self.settings.alpha * a + (1.0 - self.settings.alpha) * g;
        (a, (q - a * a).max(0.0))
    }

    /// The change per learning rate.
    #[inline(always)]
    fn change(self, g: f64, q: f64) -> f64 {
        g / (q.sqrt() + self.settings.eps)
    }
}

impl Elementwise<1> for RmsPropRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q]: [f64; 1]) -> (f64, [f64; 1]) {
        let (g, q) = self.square(p, g, q);
        (p - self.lr * self.change(g, q), [q])
    }
}

#[derive(Clone, Copy)]
struct MomentumRmsPropRule(RmsPropRule);

impl Elementwise<2> for MomentumRmsPropRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q, b]: [f64; 2]) -> (f64, [f64; 2]) {
        let (g, q) = self.0.square(p, g, q);
        let b = self.0.settings.momentum * b + self.0.change(g, q);
        (p - self.0.lr * b, [q, b])
    }
}

#[derive(Clone, Copy)]
struct CenteredRmsPropRule(RmsPropRule);

impl Elementwise<2> for CenteredRmsPropRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q, a]: [f64; 2]) -> (f64, [f64; 2]) {
        let (g, q) = self.0.square(p, g, q);
        let (a, variance) = self.0.variance(g, a, q);
        (p - self.0.lr * self.0.change(g, variance), [q, a])
    }
}

#[derive(Clone, Copy)]
struct CenteredMomentumRmsPropRule(RmsPropRule);

impl Elementwise<3> for CenteredMomentumRmsPropRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q, a, b]: [f64; 3]) -> (f64, [f64; 3]) {
        let (g, q) = self.0.square(p, g, q);
        let (a, variance) = self.0.variance(g, a, q);
        let b = self.0.settings.momentum * b + self.0.change(g, variance);
        (p - self.0.lr * b, [q, a, b])
    }
}
