//! What each algorithm does to one element.
//!
//! `g` is the gradient (negated to maximize), `p` the parameter, `t` = 1, 2, ... the step; `lr` and the corrections for the
//! first steps are worked out once per step, not per element.

use candle_core::Tensor;

use super::algorithm::{Adadelta, Adagrad, Adam, AdamW, Adamax, Algorithm, NAdam, RmsProp, Sgd};
use crate::error::Result;
use crate::local::{Stored, Update, update};

/// What a step depends on beside the settings of the algorithm.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub(super) lr: f64,
    pub(super) maximize: bool,
    /// The number of the step, from 1.
    pub(super) step: u64,
    /// Whether the momentum begins with this step.
    pub(super) first: bool,
    /// Product of the momenta of all steps, this one included; of NAdam.
    pub(super) mu_product: f64,
}

/// The new parameter; the state, in the order of [`Algorithm::tensors`], changes in place.
pub(super) fn step<S: Stored>(
    algorithm: &Algorithm,
    at: &Moment,
    p: &Tensor,
    g: &Tensor,
    state: &mut [Vec<S>],
    master: Option<&mut Vec<S>>,
) -> Result<Tensor> {
    let call = Call { p, g, state, master: master.map(Vec::as_mut_slice), sign: if at.maximize { -1.0 } else { 1.0 } };
    let lr = at.lr;
    match *algorithm {
        Algorithm::Sgd(s @ Sgd { momentum: 0.0, .. }) => call.run(Plain { lr, decay: s.weight_decay }),
        Algorithm::Sgd(s) => {
            let (keep, take) = if at.first { (0.0, 1.0) } else { (s.momentum, 1.0 - s.dampening) };
            let rule = Momentum { lr, decay: s.weight_decay, keep, take, ahead: s.momentum };
            if s.nesterov { call.run(Ahead(rule)) } else { call.run(rule) }
        }
        Algorithm::Adagrad(Adagrad { lr_decay, eps, weight_decay, .. }) => {
            let lr = lr / (1.0 + (at.step - 1) as f64 * lr_decay);
            call.run(SumOfSquares { lr, decay: weight_decay, eps })
        }
        Algorithm::Adam(Adam { betas, eps, weight_decay, amsgrad }) => {
            call.adam(amsgrad, Means { decay: weight_decay, ..Means::new(betas, eps, at) })
        }
        Algorithm::AdamW(AdamW { betas, eps, weight_decay, amsgrad }) => {
            call.adam(amsgrad, Means { shrink: 1.0 - lr * weight_decay, ..Means::new(betas, eps, at) })
        }
        Algorithm::RmsProp(s) => {
            let rule = MeanSquare { lr, settings: s };
            match (s.momentum != 0.0, s.centered) {
                (false, false) => call.run(rule),
                (true, false) => call.run(WithMomentum(rule)),
                (false, true) => call.run(Centered(rule)),
                (true, true) => call.run(CenteredWithMomentum(rule)),
            }
        }
        Algorithm::Adadelta(settings) => call.run(Delta { lr, settings }),
        Algorithm::Adamax(settings) => {
            let lr = lr / (1.0 - settings.betas.0.powf(at.step as f64));
            call.run(LargestGradient { lr, settings })
        }
        Algorithm::NAdam(settings) => {
            let next = momentum_of(&settings, at.step + 1);
            call.run(NextMean {
                settings,
                of_gradient: lr * (1.0 - momentum_of(&settings, at.step)) / (1.0 - at.mu_product),
                of_mean: lr * next / (1.0 - at.mu_product * next),
                correction: 1.0 / (1.0 - settings.betas.1.powf(at.step as f64)).sqrt(),
            })
        }
    }
}

/// The momentum of NAdam at a step.
pub(super) fn momentum_of(settings: &NAdam, step: u64) -> f64 {
    settings.betas.0 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * settings.momentum_decay))
}

/// What a rule is applied to.
struct Call<'a, S> {
    p: &'a Tensor,
    g: &'a Tensor,
    state: &'a mut [Vec<S>],
    master: Option<&'a mut [S]>,
    sign: f64,
}

impl<S: Stored> Call<'_, S> {
    fn run<U: Update<K>, const K: usize>(self, rule: U) -> Result<Tensor> {
        let state: &mut [Vec<S>; K] = self.state.try_into().expect("as many tensors as the algorithm has");
        let state = state.each_mut().map(Vec::as_mut_slice);
        Ok(update(Signed { rule, sign: self.sign }, self.p, self.g, state, self.master)?)
    }

    fn adam(self, amsgrad: bool, rule: Means) -> Result<Tensor> {
        if amsgrad { self.run(LargestMeans(rule)) } else { self.run(rule) }
    }
}

/// A rule for the gradient times 1 or -1.
#[derive(Clone, Copy)]
struct Signed<U> {
    rule: U,
    sign: f64,
}

impl<U: Update<K>, const K: usize> Update<K> for Signed<U> {
    #[inline(always)]
    fn step(self, p: f64, g: f64, state: [f64; K]) -> (f64, [f64; K]) {
        self.rule.step(p, self.sign * g, state)
    }
}

#[derive(Clone, Copy)]
struct Plain {
    lr: f64,
    decay: f64,
}

impl Update<0> for Plain {
    #[inline(always)]
    fn step(self, p: f64, g: f64, _: [f64; 0]) -> (f64, [f64; 0]) {
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

impl Update<1> for Momentum {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [b]: [f64; 1]) -> (f64, [f64; 1]) {
        let b = self.keep * b + self.take * (g + self.decay * p);
        (p - self.lr * b, [b])
    }
}

/// Nesterov's: the gradient and the momentum of the next step.
#[derive(Clone, Copy)]
struct Ahead(Momentum);

impl Update<1> for Ahead {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [b]: [f64; 1]) -> (f64, [f64; 1]) {
        let Momentum { lr, decay, keep, take, ahead } = self.0;
        let g = g + decay * p;
        let b = keep * b + take * g;
        (p - lr * (g + ahead * b), [b])
    }
}

#[derive(Clone, Copy)]
struct SumOfSquares {
    lr: f64,
    decay: f64,
    eps: f64,
}

impl Update<1> for SumOfSquares {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [sum]: [f64; 1]) -> (f64, [f64; 1]) {
        let g = g + self.decay * p;
        let sum = sum + g * g;
        (p - self.lr * g / (sum.sqrt() + self.eps), [sum])
    }
}

/// Adam's and AdamW's, of which either leaves out one kind of decay.
#[derive(Clone, Copy)]
struct Means {
    betas: (f64, f64),
    eps: f64,
    decay: f64,
    shrink: f64,
    /// The learning rate, with the correction of the mean.
    lr: f64,
    /// The correction of the root of the mean of squares.
    correction: f64,
}

impl Means {
    fn new(betas: (f64, f64), eps: f64, at: &Moment) -> Self {
        let t = at.step as f64;
        let (lr, correction) = (at.lr / (1.0 - betas.0.powf(t)), 1.0 / (1.0 - betas.1.powf(t)).sqrt());
        Means { betas, eps, decay: 0.0, shrink: 1.0, lr, correction }
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

impl Update<2> for Means {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let (m, v) = self.means(p, g, m, v);
        (self.moved(p, m, v), [m, v])
    }
}

/// AMSGrad: the largest mean of squares so far.
#[derive(Clone, Copy)]
struct LargestMeans(Means);

impl Update<3> for LargestMeans {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [m, v, largest]: [f64; 3]) -> (f64, [f64; 3]) {
        let (m, v) = self.0.means(p, g, m, v);
        let largest = if largest >= v { largest } else { v };
        (self.0.moved(p, m, largest), [m, v, largest])
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

impl Update<1> for MeanSquare {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [q]: [f64; 1]) -> (f64, [f64; 1]) {
        let (g, q) = self.square(p, g, q);
        (p - self.lr * self.change(g, q), [q])
    }
}

#[derive(Clone, Copy)]
struct WithMomentum(MeanSquare);

impl Update<2> for WithMomentum {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [q, b]: [f64; 2]) -> (f64, [f64; 2]) {
        let (g, q) = self.0.square(p, g, q);
        let b = self.0.settings.momentum * b + self.0.change(g, q);
        (p - self.0.lr * b, [q, b])
    }
}

#[derive(Clone, Copy)]
struct Centered(MeanSquare);

impl Update<2> for Centered {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [q, a]: [f64; 2]) -> (f64, [f64; 2]) {
        let (g, q) = self.0.square(p, g, q);
        let (a, spread) = self.0.spread(g, a, q);
        (p - self.0.lr * self.0.change(g, spread), [q, a])
    }
}

#[derive(Clone, Copy)]
struct CenteredWithMomentum(MeanSquare);

impl Update<3> for CenteredWithMomentum {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [q, a, b]: [f64; 3]) -> (f64, [f64; 3]) {
        let (g, q) = self.0.square(p, g, q);
        let (a, spread) = self.0.spread(g, a, q);
        let b = self.0.settings.momentum * b + self.0.change(g, spread);
        (p - self.0.lr * b, [q, a, b])
    }
}

#[derive(Clone, Copy)]
struct Delta {
    lr: f64,
    settings: Adadelta,
}

impl Update<2> for Delta {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [s, c]: [f64; 2]) -> (f64, [f64; 2]) {
        let Adadelta { rho, eps, weight_decay } = self.settings;
        let g = g + weight_decay * p;
        let s = rho * s + (1.0 - rho) * (g * g);
        let change = g * (c + eps).sqrt() / (s + eps).sqrt();
        (p - self.lr * change, [s, rho * c + (1.0 - rho) * (change * change)])
    }
}

#[derive(Clone, Copy)]
struct LargestGradient {
    lr: f64,
    settings: Adamax,
}

impl Update<2> for LargestGradient {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [m, u]: [f64; 2]) -> (f64, [f64; 2]) {
        let Adamax { betas, eps, weight_decay } = self.settings;
        let g = g + weight_decay * p;
        let m = betas.0 * m + (1.0 - betas.0) * g;
        let (kept, size) = (betas.1 * u, g.abs() + eps);
        let u = if kept >= size { kept } else { size };
        (p - self.lr * m / u, [m, u])
    }
}

#[derive(Clone, Copy)]
struct NextMean {
    settings: NAdam,
    of_gradient: f64,
    of_mean: f64,
    /// The correction of the root of the mean of squares.
    correction: f64,
}

impl Update<2> for NextMean {
    #[inline(always)]
    fn step(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let NAdam { betas, eps, weight_decay, .. } = self.settings;
        let g = g + weight_decay * p;
        let m = betas.0 * m + (1.0 - betas.0) * g;
        let v = betas.1 * v + (1.0 - betas.1) * (g * g);
        (p - (self.of_gradient * g + self.of_mean * m) / (v.sqrt() * self.correction + eps), [m, v])
    }
}
