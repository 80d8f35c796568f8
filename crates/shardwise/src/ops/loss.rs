//! Losses of predictions and targets, element by element and then reduced.

use candle_core::DType;

use super::{OpEntry, Sample};
use crate::error::Result;
use crate::tensor::DTensor;

/// What becomes of the losses of single elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// They stay.
    None,
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
}

impl Reduction {
    #[track_caller]
    fn of(self, losses: DTensor) -> Result<DTensor> {
        match self {
            Reduction::None => Ok(losses),
            Reduction::Sum => losses.sum(&[], false),
            Reduction::Mean => losses.mean(&[], false),
        }
    }
}

impl DTensor {
    /// The square of the difference.
    #[track_caller]
    pub fn mse_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.of(self.sub(target)?.square()?)
    }

    /// The absolute difference.
    #[track_caller]
    pub fn l1_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.of(self.sub(target)?.abs()?)
    }

    /// Half the square of the difference over `beta` where it is below `beta`, else the difference less `beta / 2`.
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &DTensor, beta: f64, reduction: Reduction) -> Result<DTensor> {
        let difference = self.sub(target)?.abs()?;
        if beta == 0.0 {
            return reduction.of(difference);
        }
        // With d' = min(d, beta) both branches are d'^2 / (2 beta) + (d - d').
        let inner = difference.clamp(None, Some(beta))?;
        let curved = inner.square()?.mul_scalar(0.5 / beta)?;
        reduction.of(curved.add(&difference.sub(&inner)?)?)
    }

    /// Cross entropy of logits and targets from 0 to 1: `max(x, 0) - x * y + log(1 + exp(-|x|))`.
    #[track_caller]
    pub fn bce_with_logits(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        let tail = self.abs()?.neg()?.exp()?.log1p()?;
        reduction.of(self.relu()?.sub(&self.mul(target)?)?.add(&tail)?)
    }

    /// `target * (log(target) - x)` of log-probabilities and probabilities, and 0 where the target is 0.
    #[track_caller]
    pub fn kl_div(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        let zero = target.zeros_like()?;
        let losses = target.mul(&target.log()?.sub(self)?)?;
        reduction.of(target.gt(&zero)?.where_cond(&losses, &zero)?)
    }
}

macro_rules! entries {
    ($($name:ident $(, $argument:expr)?;)*) => {
        &[$(
            OpEntry { name: stringify!($name), samples, apply: |x| {
                let all = [Reduction::None, Reduction::Sum, Reduction::Mean];
                all.into_iter().map(|r| x[0].$name(&x[1], $($argument,)? r)).collect()
            } },
        )*]
    };
}

pub(super) const OPS: &[OpEntry] = entries! {
    mse_loss;
    l1_loss;
    smooth_l1_loss, 2.0;
    bce_with_logits;
    kl_div;
};

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 2] = [&[5, 3], &[4]];
    shapes.iter().map(|shape| vec![Sample::new(shape, DType::F64), Sample::new(shape, DType::F64)]).collect()
}
