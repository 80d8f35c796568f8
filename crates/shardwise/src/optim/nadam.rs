//! NAdam.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adam with Nesterov momentum. Elementwise.
    NAdam {
        /// Decay rates of the running averages of gradients and of their squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator for numerical stability.
        eps: f64 = 1e-8,
        /// L2 penalty, or decoupled weight decay.
        weight_decay: f64 = 0.0,
        /// Decay of the momentum schedule.
        momentum_decay: f64 = 4e-3,
        /// Whether the parameter is multiplied by `1 - lr * weight_decay`, instead of a penalty in the gradient.
        #[serde(default)]
        decoupled_weight_decay: bool = false,
    }
}

/// State: product of the momenta of all steps so far.
const MU_PRODUCT: &str = "mu_product";

impl NAdam {
    /// The momentum at a step, by the schedule of the paper (0.96 is its constant).
    fn momentum(&self, step: u64) -> f64 {
        self.betas.0 * (1.0 - 0.5 * 0.96f64.powf(step as f64 * self.momentum_decay))
    }
}

impl Optimizer for NAdam {
    const NAME: &'static str = "nadam";
    const DEFAULT_LR: f64 = 2e-3;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("exp_avg", shape), StateTensor::zeros("exp_avg_sq", shape)]
    }

    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[("step", 0.0), (MU_PRODUCT, 1.0)]
    }

    fn check(&self) -> Result<()> {
        at_least_zero(Self::NAME, "momentum_decay", self.momentum_decay)?;
        check_betas(Self::NAME, self.betas)?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let (lr, t) = (step.lr(), step.count());
        let product = step.number(MU_PRODUCT)? * self.momentum(t);
        step.set_number(MU_PRODUCT, product)?;
        let next = self.momentum(t + 1);
        let (penalty, shrink) = match self.decoupled_weight_decay {
            true => (0.0, 1.0 - lr * self.weight_decay),
            false => (self.weight_decay, 1.0),
        };
        let rule = NAdamRule {
            betas: self.betas,
            eps: self.eps,
            penalty,
            shrink,
            gradient_lr: lr * (1.0 - self.momentum(t)) / (1.0 - product),
            moment_lr: lr * next / (1.0 - product * next),
            correction: 1.0 / (1.0 - self.betas.1.powf(t as f64)).sqrt(),
        };
        step.elementwise(["exp_avg", "exp_avg_sq"], rule)
    }
}

#[derive(Clone, Copy)]
struct NAdamRule {
    betas: (f64, f64),
    eps: f64,
    /// L2 penalty.
    penalty: f64,
    /// Factor of the parameter (decoupled weight decay).
    shrink: f64,
    /// Learning rates of the gradient and of the first moment.
    gradient_lr: f64,
    moment_lr: f64,
    /// The bias correction of the root of the second moment.
    correction: f64,
}

impl Elementwise<2> for NAdamRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let NAdamRule { betas, eps, .. } = self;
        let (p, g) = (p * self.shrink, g + self.penalty * p);
        let m = betas.0 * m + (1.0 - betas.0) * g;
        let v = betas.1 * v + (1.0 - betas.1) * (g * g);
        (p - (self.gradient_lr * g + self.moment_lr * m) / (v.sqrt() * self.correction + eps), [m, v])
    }
}
