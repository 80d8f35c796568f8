//! Adam and AdamW.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adam: running averages of gradients and of their squares, with bias correction. Elementwise.
    Adam {
        /// Decay rates of the running averages of gradients and of their squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator for numerical stability.
        eps: f64 = 1e-8,
        /// L2 penalty: this multiple of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// AMSGrad: the denominator uses the maximum of the second moments so far.
        amsgrad: bool = false,
    }
}

settings! {
    /// Adam with decoupled weight decay. Elementwise.
    AdamW {
        /// Decay rates of the running averages of gradients and of their squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator for numerical stability.
        eps: f64 = 1e-8,
        /// Decoupled weight decay: the parameter is multiplied by `1 - lr * weight_decay`.
        weight_decay: f64 = 1e-2,
        /// AMSGrad: the denominator uses the maximum of the second moments so far.
        amsgrad: bool = false,
    }
}

impl Optimizer for Adam {
    const NAME: &'static str = "adam";

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        moments(shape, self.amsgrad)
    }

    fn check(&self) -> Result<()> {
        check(Self::NAME, self.betas, self.eps, self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let rule = AdamRule { decay: self.weight_decay, ..AdamRule::new(self.betas, self.eps, step) };
        rule.run(step, self.amsgrad)
    }
}

impl Optimizer for AdamW {
    const NAME: &'static str = "adamw";

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        moments(shape, self.amsgrad)
    }

    fn check(&self) -> Result<()> {
        check(Self::NAME, self.betas, self.eps, self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let shrink = 1.0 - step.lr() * self.weight_decay;
        let rule = AdamRule { shrink, ..AdamRule::new(self.betas, self.eps, step) };
        rule.run(step, self.amsgrad)
    }
}

fn moments(shape: &[usize], amsgrad: bool) -> Vec<StateTensor> {
    let names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
    names[..if amsgrad { 3 } else { 2 }].iter().map(|name| StateTensor::zeros(name, shape)).collect()
}

fn check(name: &str, betas: (f64, f64), eps: f64, weight_decay: f64) -> Result<()> {
    check_betas(name, betas)?;
    at_least_zero(name, "eps", eps)?;
    at_least_zero(name, "weight_decay", weight_decay)
}

/// The update of Adam and AdamW, which differ in the kind of weight decay.
#[derive(Clone, Copy)]
struct AdamRule {
    betas: (f64, f64),
    eps: f64,
    /// L2 penalty (Adam).
    decay: f64,
    /// Factor of the parameter (AdamW).
    shrink: f64,
    /// The learning rate, with the bias correction of the first moment.
    lr: f64,
    /// The bias correction of the root of the second moment.
    correction: f64,
}

impl AdamRule {
    fn new(betas: (f64, f64), eps: f64, step: &ParamStep<'_>) -> Self {
        let t = step.count() as f64;
        let (lr, correction) = (step.lr() / (1.0 - betas.0.powf(t)), 1.0 / (1.0 - betas.1.powf(t)).sqrt());
        AdamRule { betas, eps, decay: 0.0, shrink: 1.0, lr, correction }
    }

    fn run(self, step: &mut ParamStep<'_>, amsgrad: bool) -> Result<()> {
        match amsgrad {
            true => step.elementwise(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], AmsGradRule(self)),
            false => step.elementwise(["exp_avg", "exp_avg_sq"], self),
        }
    }

    /// The new first and second moment.
    #[inline(always)]
    fn moments(self, p: f64, g: f64, m: f64, v: f64) -> (f64, f64) {
        let (first, second) = self.betas;
        let g = g + self.decay * p;
        (first * m + (1.0 - first) * g, second * v + (1.0 - second) * (g * g))
    }

    /// The new parameter.
    #[inline(always)]
    fn updated(self, p: f64, m: f64, v: f64) -> f64 {
        p * self.shrink - self.lr * m / (v.sqrt() * self.correction + self.eps)
    }
}

impl AdamRule {
    /// As [`moments`](Self::moments), in f32. A running average is the old one plus a share of the difference: so the rounded
    /// share is a small factor of a small number, where a rounded decay rate close to 1 would change the average itself.
    #[inline(always)]
    fn moments_f32(self, p: f32, g: f32, m: f32, v: f32) -> (f32, f32) {
        let average = |old: f32, new: f32, decay: f64| match decay > 0.5 {
            true => old + (1.0 - decay) as f32 * (new - old),
            false => new + decay as f32 * (old - new),
        };
        let g = g + self.decay as f32 * p;
        (average(m, g, self.betas.0), average(v, g * g, self.betas.1))
    }

    /// As [`updated`](Self::updated), in f32: the change is rounded, which is small compared with the parameter.
    #[inline(always)]
    fn updated_f32(self, p: f32, m: f32, v: f32) -> f32 {
        let quotient = m / (v.sqrt() * self.correction as f32 + self.eps as f32);
        p - (self.lr as f32 * quotient + (1.0 - self.shrink) as f32 * p)
    }
}

impl Elementwise<2> for AdamRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let (m, v) = self.moments(p, g, m, v);
        (self.updated(p, m, v), [m, v])
    }

    #[inline(always)]
    fn update_f32(self, p: f32, g: f32, [m, v]: [f32; 2]) -> (f32, [f32; 2]) {
        let (m, v) = self.moments_f32(p, g, m, v);
        (self.updated_f32(p, m, v), [m, v])
    }
}

/// AMSGrad.
#[derive(Clone, Copy)]
struct AmsGradRule(AdamRule);

impl Elementwise<3> for AmsGradRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v, max_v]: [f64; 3]) -> (f64, [f64; 3]) {
        let (m, v) = self.0.moments(p, g, m, v);
        let max_v = if max_v >= v { max_v } else { v };
        (self.0.updated(p, m, max_v), [m, v, max_v])
    }

    #[inline(always)]
    fn update_f32(self, p: f32, g: f32, [m, v, max_v]: [f32; 3]) -> (f32, [f32; 3]) {
        let (m, v) = self.0.moments_f32(p, g, m, v);
        let max_v = if max_v >= v { max_v } else { v };
        (self.0.updated_f32(p, m, max_v), [m, v, max_v])
    }
}
