//! NAdam.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adam with momentum applied one step ahead.
    NAdam {
        /// How much of the means is kept: of the gradients, of the squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// How fast the momentum grows to its final value.
        momentum_decay: f64 = 4e-3,
    }
}

/// Name of the product of the momenta of all steps.
const MU_PRODUCT: &str = "mu_product";

impl NAdam {
    /// The momentum at a step.
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

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let (lr, step) = (at.lr(), at.count());
        let product = at.number(MU_PRODUCT)? * self.momentum(step);
        at.set_number(MU_PRODUCT, product)?;
        let next = self.momentum(step + 1);
        let rule = NextMean {
            settings: *self,
            of_gradient: lr * (1.0 - self.momentum(step)) / (1.0 - product),
            of_mean: lr * next / (1.0 - product * next),
            correction: 1.0 / (1.0 - self.betas.1.powf(step as f64)).sqrt(),
        };
        at.elementwise(["exp_avg", "exp_avg_sq"], rule)
    }
}

#[derive(Clone, Copy)]
struct NextMean {
    settings: NAdam,
    of_gradient: f64,
    of_mean: f64,
    /// The bias correction of the root of the mean of squares.
    correction: f64,
}

impl Elementwise<2> for NextMean {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let NAdam { betas, eps, weight_decay, .. } = self.settings;
        let g = g + weight_decay * p;
        let m = betas.0 * m + (1.0 - betas.0) * g;
        let v = betas.1 * v + (1.0 - betas.1) * (g * g);
        (p - (self.of_gradient * g + self.of_mean * m) / (v.sqrt() * self.correction + eps), [m, v])
    }
}
