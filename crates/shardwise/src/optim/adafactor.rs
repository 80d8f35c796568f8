//! Adafactor.

use super::optimizer::{Optimizer, StateTensor};
use super::param_step::ParamStep;
use super::settings::{at_least_zero, settings, within};
use crate::error::Result;
use crate::placement::Placement;
use crate::tensor::DTensor;

settings! {
    /// Adafactor, as `torch.optim.Adafactor`: second moments of a matrix are factored into one number per row and one per
    /// column, so that the state of an n x m matrix has n + m elements.
    ///
    /// Tensors of more than two dimensions are batches of matrices; those of less keep a second moment per element. Steps
    /// are relative to the root mean square of the parameter.
    ///
    /// Communicates statistics only: per matrix the sums of squares of its rows if columns are sharded, those of its columns
    /// if rows are sharded, and three sums of one element (per batch of matrices: one per matrix). Of a parameter with merged
    /// dimensions ([`Param::merge_dims`](crate::Param::merge_dims)) whose shards cross their borders, parameter and gradient are gathered.
    Adafactor {
        /// The second moments at step t keep `1 - t^beta2_decay`.
        beta2_decay: f64 = -0.8,
        /// Smallest second moment (its root; the smallest difference from 1 of the parameter's type if not set), and smallest
        /// root mean square of the parameter that steps are relative to.
        eps: (Option<f64>, f64) = (None, 1e-3),
        /// Largest root mean square of an update; larger ones are scaled down to it.
        d: f64 = 1.0,
        /// Decoupled weight decay: the parameter is multiplied by `1 - lr * weight_decay`.
        weight_decay: f64 = 0.0,
    }
}

impl Optimizer for Adafactor {
    const NAME: &'static str = "adafactor";
    const DEFAULT_LR: f64 = 1e-2;

    fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
        let Some(rows) = shape.len().checked_sub(2) else { return vec![StateTensor::zeros("variance", shape)] };
        let (mut by_row, mut by_column) = (shape.to_vec(), shape.to_vec());
        (by_row[rows + 1], by_column[rows]) = (1, 1);
        vec![StateTensor::zeros("row_var", by_row), StateTensor::zeros("col_var", by_column)]
    }

    fn check(&self) -> Result<()> {
        let decay = self.beta2_decay;
        within(Self::NAME, "beta2_decay", decay, decay <= 0.0 && decay.is_finite(), "a number that is at most 0")?;
        at_least_zero(Self::NAME, "eps", self.eps.0.unwrap_or(0.0))?;
        at_least_zero(Self::NAME, "eps", self.eps.1)?;
        within(Self::NAME, "d", self.d, self.d >= 1.0 && self.d.is_finite(), "a number that is at least 1")?;
        at_least_zero(Self::NAME, "weight_decay", self.weight_decay)
    }

    fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
        let count = step.shape().iter().product::<usize>() as f64;
        if count == 0.0 {
            return Ok(());
        }
        let (lr, t) = (step.lr(), step.count() as f64);
        let smallest = self.eps.0.unwrap_or_else(|| machine_epsilon(step.dtype()));
        let gradient = step.gradient()?;
        let variance = variance(step, &gradient, t.powf(self.beta2_decay), smallest)?;
        let update = variance.clamp(Some(smallest * smallest), None)?.rsqrt()?.mul(&gradient)?;
        let size = root_mean_square(&step.param()?, count)?.clamp(Some(self.eps.1), None)?;
        let excess = root_mean_square(&update, count)?.div_scalar(self.d)?.clamp(Some(1.0), None)?;
        let rate = size.mul_scalar(lr.min(1.0 / t.sqrt()))?.div(&excess)?;
        let shrink = 1.0 - lr * self.weight_decay;
        step.apply(&update.mul(&rate)?, [], move |p: f64, change: f64, []: [f64; 0]| (p * shrink - change, []))
    }
}

/// Updates the factored second moments, in which this gradient has `weight`, and returns those of all elements.
fn variance(step: &mut ParamStep<'_>, gradient: &DTensor, weight: f64, smallest: f64) -> Result<DTensor> {
    let squares = gradient.square()?;
    if step.shape().len() < 2 {
        let kept = step.state("variance")?.lerp(&squares, weight)?;
        step.set_state("variance", &kept)?;
        return Ok(kept);
    }
    let [by_row, by_column] = [("row_var", -1), ("col_var", -2)].map(|(name, dim)| -> Result<DTensor> {
        let kept = step.state(name)?;
        let mean = squares.mean(&[dim], true)?.to_layout(kept.layout())?;
        let kept = kept.lerp(&mean, weight)?;
        step.set_state(name, &kept)?;
        Ok(kept)
    });
    let by_row = by_row?;
    let mean = by_row.mean(&[-2], true)?;
    let mean = mean.to_layout(&mean.layout().reduced())?.clamp(Some(smallest), None)?;
    by_row.div(&mean)?.mul(&by_column?)
}

/// Root mean square of a tensor, replicated.
fn root_mean_square(tensor: &DTensor, count: f64) -> Result<DTensor> {
    let sum = tensor.square()?.sum_all()?;
    let replicated = vec![Placement::Replicate; tensor.device_mesh().ndim()];
    sum.redistribute(replicated)?.div_scalar(count)?.sqrt()
}

/// Machine epsilon of a type, PyTorch's `torch.finfo(dtype).eps`.
fn machine_epsilon(dtype: candle_core::DType) -> f64 {
    match dtype {
        candle_core::DType::F64 => f64::EPSILON,
        candle_core::DType::F16 => f64::from(half::f16::EPSILON),
        candle_core::DType::BF16 => f64::from(half::bf16::EPSILON),
        _ => f64::from(f32::EPSILON),
    }
}
