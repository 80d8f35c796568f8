//! Adadelta.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings, within};
use crate::error::Result;
use shardwise_kernels::Elementwise;

settings! {
    /// Adadelta: changes as large as those before.
    Adadelta {
        /// How much of the means is kept.
        rho: f64 = 0.9,
        /// Added to both means.
        eps: f64 = 1e-6,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for Adadelta {
    const NAME: &'static str = "adadelta";
    const DEFAULT_LR: f64 = 1.0;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("square_avg", shape), StateTensor::zeros("acc_delta", shape)]
    }

    fn check(&self) -> Result<()> {
        within(Self::NAME, "rho", self.rho, (0.0..=1.0).contains(&self.rho), "a number from 0 to 1")?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
        let rule = Delta { lr: at.lr(), settings: *self };
        at.elementwise(["square_avg", "acc_delta"], rule)
    }
}

#[derive(Clone, Copy)]
struct Delta {
    lr: f64,
    settings: Adadelta,
}

impl Elementwise<2> for Delta {
    #[inline(always)]
    fn update(self, p: f64, g: f64, [s, c]: [f64; 2]) -> (f64, [f64; 2]) {
        let Adadelta { rho, eps, weight_decay } = self.settings;
        let g = g + weight_decay * p;
        let s = rho * s + (1.0 - rho) * (g * g);
        let change = g * (c + eps).sqrt() / (s + eps).sqrt();
        (p - self.lr * change, [s, rho * c + (1.0 - rho) * (change * change)])
    }
}
