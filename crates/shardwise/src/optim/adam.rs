//! Adam and AdamW.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adam: means of gradients and of their squares.
    Adam {
        /// How much of the means is kept: of the gradients, of the squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// AMSGrad: divides by the largest mean of squares so far.
        amsgrad: bool = false,
    }
}

settings! {
    /// Adam with decoupled weight decay.
    AdamW {
        /// How much of the means is kept: of the gradients, of the squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// The parameter shrinks by this much times the learning rate.
        weight_decay: f64 = 1e-2,
        /// AMSGrad: divides by the largest mean of squares so far.
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

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let rule = Means { decay: self.weight_decay, ..Means::new(self.betas, self.eps, at) };
        rule.run(at, self.amsgrad)
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

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let shrink = 1.0 - at.lr() * self.weight_decay;
        let rule = Means { shrink, ..Means::new(self.betas, self.eps, at) };
        rule.run(at, self.amsgrad)
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

/// Adam's and AdamW's rule, of which either leaves out one kind of decay.
#[derive(Clone, Copy)]
struct Means {
    betas: (f64, f64),
    eps: f64,
    decay: f64,
    shrink: f64,
    /// The learning rate, with the bias correction of the mean.
    lr: f64,
    /// The bias correction of the root of the mean of squares.
    correction: f64,
}

impl Means {
    fn new(betas: (f64, f64), eps: f64, at: &ParamStep<'_>) -> Self {
        let t = at.count() as f64;
        let (lr, correction) = (at.lr() / (1.0 - betas.0.powf(t)), 1.0 / (1.0 - betas.1.powf(t)).sqrt());
        Means { betas, eps, decay: 0.0, shrink: 1.0, lr, correction }
    }

    fn run(self, at: &mut ParamStep<'_>, amsgrad: bool) -> Result<()> {
        match amsgrad {
            true => at.elementwise(["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], LargestMeans(self)),
            false => at.elementwise(["exp_avg", "exp_avg_sq"], self),
        }
    }

    /// The new means.
    #[inline(always)]
    fn means(self, p: f64, g: f64, m: f64, v: f64) -> (f64, f64) {
        let (first, second) = self.betas;
        let g = g + self.decay * p;
        (first * m + (1.0 - first) * g, second * v + (1.0 - second) * (g * g))
    }

    /// The new parameter.
    #[inline(always)]
    fn moved(self, p: f64, m: f64, v: f64) -> f64 {
        p * self.shrink - self.lr * m / (v.sqrt() * self.correction + self.eps)
    }
}

impl Elementwise<2> for Means {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let (m, v) = self.means(p, g, m, v);
        (self.moved(p, m, v), [m, v])
    }
}

/// AMSGrad: the largest mean of squares so far.
#[derive(Clone, Copy)]
struct LargestMeans(Means);

impl Elementwise<3> for LargestMeans {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v, largest]: [f64; 3]) -> (f64, [f64; 3]) {
        let (m, v) = self.0.means(p, g, m, v);
        let largest = if largest >= v { largest } else { v };
        (self.0.moved(p, m, largest), [m, v, largest])
    }
}
