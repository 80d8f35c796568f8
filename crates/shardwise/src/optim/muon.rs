//! Muon.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings, within};
use crate::error::{ErrorKind, Result};
use crate::placement::Placement;
use crate::tensor::DTensor;

/// How [`Muon`] scales the learning rate for an n x m matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// By `sqrt(max(1, n / m))`.
    Original,
    /// By `0.2 sqrt(max(n, m))`, so that rates and decay tuned for AdamW can be used.
    MatchRmsAdamw,
    /// By `sqrt(n / m)`.
    SpectralUnclamped,
}

settings! {
    /// Muon, as `torch.optim.Muon`: the momentum of a matrix is orthogonalized by Newton-Schulz iterations.
    ///
    /// For matrices only: give other parameters (and embeddings, as its authors advise) a group with another optimizer.
    ///
    /// Communicates one gather per parameter and step: every rank gets the parts of the momentum that it lacks, in f32, and
    /// orthogonalizes the whole matrix. So the result has the bits of the one-device result in every layout, also those where
    /// the matrix is sharded on both dimensions; a replicated parameter communicates nothing. PyTorch rounds to bf16 between
    /// iterations; here they run in f32 (f64 for parameters of f64).
    Muon {
        /// Decoupled weight decay: the parameter is multiplied by `1 - lr * weight_decay`.
        weight_decay: f64 = 0.1,
        /// Momentum factor.
        momentum: f64 = 0.95,
        /// Whether Nesterov momentum is used.
        nesterov: bool = true,
        /// Coefficients a, b, c of an iteration: `X` becomes `a X + (b A + c A A) X`, where `A` is `X X^T`.
        ns_coefficients: (f64, f64, f64) = (3.4445, -4.7750, 2.0315),
        /// Smallest norm that the momentum is divided by.
        eps: f64 = 1e-7,
        /// Number of iterations, less than 100.
        ns_steps: u32 = 5,
        /// How the learning rate is scaled; as `Original` if not set.
        adjust_lr_fn: Option<AdjustLr> = None,
    }
}

impl Muon {
    /// The learning rate for a matrix.
    fn adjusted(&self, lr: f64, rows: f64, columns: f64) -> f64 {
        lr * match self.adjust_lr_fn {
            None | Some(AdjustLr::Original) => (rows / columns).max(1.0).sqrt(),
            Some(AdjustLr::MatchRmsAdamw) => 0.2 * rows.max(columns).sqrt(),
            Some(AdjustLr::SpectralUnclamped) => (rows / columns).sqrt(),
        }
    }

    /// Orthogonalizes a full matrix.
    fn orthogonalized(&self, matrix: &DTensor) -> Result<DTensor> {
        let (a, b, c) = self.ns_coefficients;
        let is_tall = matrix.shape()[0] > matrix.shape()[1];
        let mut x = if is_tall { matrix.t()? } else { matrix.clone() };
        x = x.div(&x.norm(2.0, &[], false)?.clamp(Some(self.eps), None)?)?;
        for _ in 0..self.ns_steps {
            let gram = x.matmul(&x.t()?)?;
            let polynomial = gram.addmm(&gram, &gram, b, c)?;
            x = x.addmm(&polynomial, &x, a, 1.0)?;
        }
        if is_tall { x.t() } else { Ok(x) }
    }
}

impl Optimizer for Muon {
    const NAME: &'static str = "muon";

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        vec![StateTensor::zeros("momentum_buffer", shape)]
    }

    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[]
    }

    fn check(&self) -> Result<()> {
        at_least_zero(Self::NAME, "momentum", self.momentum)?;
        at_least_zero(Self::NAME, "eps", self.eps)?;
        let steps = f64::from(self.ns_steps);
        within(Self::NAME, "ns_steps", steps, self.ns_steps < 100, "less than 100 iterations")?;
        let (a, b, c) = self.ns_coefficients;
        for x in [a, b, c] {
            within(Self::NAME, "ns_coefficients", x, x.is_finite(), "finite numbers")?;
        }
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn check_shape(&self, shape: &[usize]) -> Result<()> {
        if shape.len() == 2 {
            return Ok(());
        }
        let fix = "give this parameter a group with another optimizer, such as AdamW";
        Err(ErrorKind::shape(shape).error(
            "parameter for muon",
            format!("shape {shape:?}"),
            "a matrix (2 dimensions)",
            fix,
        ))
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let (lr, &[rows, columns]) = (step.lr(), step.shape()) else {
            return self.check_shape(step.shape());
        };
        if rows * columns == 0 {
            return Ok(());
        }
        let gradient = step.gradient()?;
        let momentum = step.state("momentum_buffer")?.lerp(&gradient, 1.0 - self.momentum)?;
        step.set_state("momentum_buffer", &momentum)?;
        let update = if self.nesterov { gradient.lerp(&momentum, self.momentum)? } else { momentum };
        let whole = update.redistribute(vec![Placement::Replicate; update.device_mesh().ndim()])?;
        let update = self.orthogonalized(&whole)?;
        let (rate, shrink) = (self.adjusted(lr, rows as f64, columns as f64), 1.0 - lr * self.weight_decay);
        step.apply(&update, [], move |p: f64, change: f64, []: [f64; 0]| (p * shrink - rate * change, []))
    }
}
