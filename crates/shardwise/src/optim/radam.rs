//! RAdam.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, check_betas, settings};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adam with a rectified learning rate: steps are those of momentum until the variance of the second moment is known. Elementwise.
    RAdam {
        /// Decay rates of the running averages of gradients and of their squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the denominator for numerical stability.
        eps: f64 = 1e-8,
        /// L2 penalty, or decoupled weight decay.
        weight_decay: f64 = 0.0,
        /// Whether the parameter is multiplied by `1 - lr * weight_decay`, instead of a penalty in the gradient.
        decoupled_weight_decay: bool = false,
    }
}

impl RAdam {
    /// The factor of the step without and with the second moment: one of them is 0.
    fn factors(&self, step: u64, lr: f64) -> (f64, f64) {
        let (first, second) = self.betas;
        let power = second.powf(step as f64);
        let lr = lr / (1.0 - first.powf(step as f64));
        // The length of the moving average of squares, at the end and at this step.
        let longest = 2.0 / (1.0 - second) - 1.0;
        let length = longest - 2.0 * step as f64 * power / (1.0 - power);
        // Up to 5 the variance is not tractable; the bound is that of the paper's authors and of PyTorch.
        if length <= 5.0 {
            return (lr, 0.0);
        }
        let rectified = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length);
        (0.0, lr * (rectified * (1.0 - power)).sqrt())
    }
}

impl Optimizer for RAdam {
    const NAME: &'static str = "radam";

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("exp_avg", shape), StateTensor::zeros("exp_avg_sq", shape)]
    }

    fn check(&self) -> Result<()> {
        check_betas(Self::NAME, self.betas)?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let (plain_lr, adaptive_lr) = self.factors(step.count(), step.lr());
        let shrink = if self.decoupled_weight_decay { 1.0 - step.lr() * self.weight_decay } else { 1.0 };
        let penalty = if self.decoupled_weight_decay { 0.0 } else { self.weight_decay };
        let rule = RAdamRule { betas: self.betas, eps: self.eps, plain_lr, adaptive_lr, shrink, penalty };
        step.elementwise(["exp_avg", "exp_avg_sq"], rule)
    }
}

#[derive(Clone, Copy)]
struct RAdamRule {
    betas: (f64, f64),
    eps: f64,
    /// Learning rates of only the first moment, and divided by the root of the second, with their bias corrections.
    plain_lr: f64,
    adaptive_lr: f64,
    /// Factor of the parameter (decoupled weight decay).
    shrink: f64,
    /// L2 penalty.
    penalty: f64,
}

impl Elementwise<2> for RAdamRule {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [m, v]: [f64; 2]) -> (f64, [f64; 2]) {
        let (p, g) = (p * self.shrink, g + self.penalty * p);
        let m = self.betas.0 * m + (1.0 - self.betas.0) * g;
        let v = self.betas.1 * v + (1.0 - self.betas.1) * (g * g);
        (p - m * (self.plain_lr + self.adaptive_lr / (v.sqrt() + self.eps)), [m, v])
    }
}
