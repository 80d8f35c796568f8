//! RMSprop.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// RMSprop: divides by the root of the mean of squared gradients.
    #[doc(alias = "RMSprop")]
    RmsProp {
        /// How much of the means is kept.
        alpha: f64 = 0.99,
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// How much of the last change is kept; 0 for no momentum.
        momentum: f64 = 0.0,
        /// Whether the mean gradient is taken out of the mean of the squares.
        centered: bool = false,
        /// This much of the parameter is added to its gradient.
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

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let rule = MeanSquare { lr: at.lr(), settings: *self };
        match (self.momentum != 0.0, self.centered) {
            (false, false) => at.elementwise(["square_avg"], rule),
            (true, false) => at.elementwise(["square_avg", "momentum_buffer"], WithMomentum(rule)),
            (false, true) => at.elementwise(["square_avg", "grad_avg"], Centered(rule)),
            (true, true) => at.elementwise(["square_avg", "grad_avg", "momentum_buffer"], CenteredWithMomentum(rule)),
        }
    }
}

#[derive(Clone, Copy)]
struct MeanSquare {
    lr: f64,
    settings: RmsProp,
}

impl MeanSquare {
    /// The gradient with decay, and the new mean of squares.
    #[inline(always)]
    fn square(self, p: f64, g: f64, q: f64) -> (f64, f64) {
        let g = g + self.settings.weight_decay * p;
        (g, self.settings.alpha * q + (1.0 - self.settings.alpha) * (g * g))
    }

    /// The new mean of gradients and the spread around it, which rounding must not make negative.
    #[inline(always)]
    fn spread(self, g: f64, a: f64, q: f64) -> (f64, f64) {
        let a = self.settings.alpha * a + (1.0 - self.settings.alpha) * g;
        (a, (q - a * a).max(0.0))
    }

    /// The change per learning rate.
    #[inline(always)]
    fn change(self, g: f64, q: f64) -> f64 {
        g / (q.sqrt() + self.settings.eps)
    }
}

impl Elementwise<1> for MeanSquare {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q]: [f64; 1]) -> (f64, [f64; 1]) {
        let (g, q) = self.square(p, g, q);
        (p - self.lr * self.change(g, q), [q])
    }
}

#[derive(Clone, Copy)]
struct WithMomentum(MeanSquare);

impl Elementwise<2> for WithMomentum {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q, b]: [f64; 2]) -> (f64, [f64; 2]) {
        let (g, q) = self.0.square(p, g, q);
        let b = self.0.settings.momentum * b + self.0.change(g, q);
        (p - self.0.lr * b, [q, b])
    }
}

#[derive(Clone, Copy)]
struct Centered(MeanSquare);

impl Elementwise<2> for Centered {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q, a]: [f64; 2]) -> (f64, [f64; 2]) {
        let (g, q) = self.0.square(p, g, q);
        let (a, spread) = self.0.spread(g, a, q);
        (p - self.0.lr * self.0.change(g, spread), [q, a])
    }
}

#[derive(Clone, Copy)]
struct CenteredWithMomentum(MeanSquare);

impl Elementwise<3> for CenteredWithMomentum {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [q, a, b]: [f64; 3]) -> (f64, [f64; 3]) {
        let (g, q) = self.0.square(p, g, q);
        let (a, spread) = self.0.spread(g, a, q);
        let b = self.0.settings.momentum * b + self.0.change(g, spread);
        (p - self.0.lr * b, [q, a, b])
    }
}
