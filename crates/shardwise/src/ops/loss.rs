//! Losses of predictions and targets, element by element and then reduced.

use std::panic::Location;

use candle_core::DType;

use super::{OpEntry, Sample, dtype};
use crate::error::{ErrorKind, Result};
use crate::op::name_call;
use crate::tensor::DTensor;
use shardwise_kernels::to_i64_vec;

/// What becomes of the losses of single elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reduction {
    /// They stay.
    None,
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
    /// Their sum divided by the size of the first dimension: the mathematical mean of [`kl_div`](DTensor::kl_div). An error
    /// for other losses.
    BatchMean,
}

impl Reduction {
    #[track_caller]
    fn of(self, losses: DTensor) -> Result<DTensor> {
        match self {
            Reduction::None => Ok(losses),
            Reduction::Sum => losses.sum(&[], false),
            Reduction::Mean => losses.mean(&[], false),
            Reduction::BatchMean => match losses.shape().first() {
                Some(&n) => losses.sum(&[], false)?.div_scalar(n as f64),
                None => Ok(losses),
            },
        }
    }

    /// An error if it is one that only `kl_div` has.
    fn check(self, name: &str) -> Result<()> {
        if self != Reduction::BatchMean {
            return Ok(());
        }
        let found = format!("BatchMean in {name}");
        Err(ErrorKind::Argument.error("reduction", found, "None, Sum or Mean", "use Mean, which divides by all losses"))
    }
}

/// How classes are judged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Classes {
    /// What becomes of the losses of single predictions.
    pub reduction: Reduction,
    /// Targets with this number do not count.
    pub ignore_index: i64,
    /// This share of every target is spread over all classes.
    pub label_smoothing: f64,
}

impl Default for Classes {
    fn default() -> Self {
        Classes { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0 }
    }
}

impl DTensor {
    /// Cross entropy of logits `[n, classes, ...]` (or `[classes]`) and classes `[n, ...]` (or a scalar). Ranks that share
    /// the classes exchange a maximum, a sum and the logit of the target: three numbers per prediction.
    #[doc(alias = "loss_parallel")]
    #[track_caller]
    pub fn cross_entropy(&self, target: &DTensor, options: Classes) -> Result<DTensor> {
        let dim = self.check_classes("cross_entropy", target)?;
        options.reduction.check("cross_entropy")?;
        if let Some(wide) = self.widened()? {
            return wide.cross_entropy(target, options)?.to_dtype(self.dtype());
        }
        // Used several times: partial sums are reduced once.
        let logits = &self.settle("cross_entropy", &[dim])?;
        // A type that holds every number to be ignored.
        let target = &target.to_dtype(DType::I64)?;
        let spread = logits.logsumexp(&[dim], false)?;
        let losses = spread.sub(&logits.of_target("cross_entropy", target, dim, options.ignore_index)?)?;
        let losses = match options.label_smoothing {
            0.0 => losses,
            smoothing => {
                let even = spread.sub(&logits.mean(&[dim], false)?)?;
                losses.mul_scalar(1.0 - smoothing)?.add(&even.mul_scalar(smoothing)?)?
            }
        };
        counted(&losses, target, options)
    }

    /// Negative log-likelihood of log-probabilities `[n, classes, ...]` (or `[classes]`) and classes `[n, ...]`.
    #[track_caller]
    pub fn nll_loss(&self, target: &DTensor, options: Classes) -> Result<DTensor> {
        let dim = self.check_classes("nll_loss", target)?;
        options.reduction.check("nll_loss")?;
        if let Some(wide) = self.widened()? {
            return wide.nll_loss(target, options)?.to_dtype(self.dtype());
        }
        let target = &target.to_dtype(DType::I64)?;
        counted(&self.of_target("nll_loss", target, dim, options.ignore_index)?.neg()?, target, options)
    }

    /// The dimension of classes.
    fn check_classes(&self, name: &str, target: &DTensor) -> Result<isize> {
        let dim = usize::from(self.rank() > 1);
        let mut wanted = self.shape().to_vec();
        let fits = !wanted.is_empty() && {
            wanted.remove(dim);
            wanted == target.shape()
        };
        if fits && !target.dtype().is_float() && self.dtype().is_float() {
            return Ok(dim as isize);
        }
        let (own, classes) = (self.dtype().as_str(), target.dtype().as_str());
        let found = format!("{own} {} and {classes} targets {} in {name}", self.layout(), target.layout());
        let needed = "predictions [n, classes, ...] and integer classes [n, ...]";
        Err(ErrorKind::shape(target.shape()).error("operands", found, needed, "reshape or convert the operands"))
    }

    /// The element at the class of the target; anything where the target is ignored.
    #[track_caller]
    fn of_target(&self, name: &'static str, target: &DTensor, dim: isize, ignore_index: i64) -> Result<DTensor> {
        let target = &target.everywhere(name)?;
        self.check_targets(name, target, self.shape()[dim as usize], ignore_index)?;
        let ignored = target.full_like(ignore_index)?;
        let known = target.ne(&ignored)?.where_cond(target, &target.zeros_like()?)?;
        self.gather(dim, &known.unsqueeze(dim)?)?.squeeze(Some(dim))?.everywhere(name)
    }

    /// An error if a target that this rank holds is neither a class nor ignored. `gather` would name itself, and not the loss
    /// that the program called.
    #[track_caller]
    fn check_targets(&self, name: &str, target: &DTensor, classes: usize, ignore_index: i64) -> Result<()> {
        let world = target.device_mesh().world();
        if world.is_dry() || !target.device_mesh().contains(world.rank()) {
            return Ok(());
        }
        let bad = |&class: &i64| class != ignore_index && !usize::try_from(class).is_ok_and(|class| class < classes);
        let Some(class) = to_i64_vec(target.held())?.into_iter().find(bad) else { return Ok(()) };
        let found = format!("class {class} among the targets of {name}");
        let needed = format!("classes from 0 to {}, or {ignore_index} to ignore a target", classes.saturating_sub(1));
        let kind = ErrorKind::Index { index: class, size: classes };
        let error = kind.error("class index", found, needed, "correct the targets");
        Err(name_call(error, name, &[self, target], Location::caller()))
    }

    /// The square of the difference.
    #[track_caller]
    pub fn mse_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.check("mse_loss")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.mse_loss(&y, reduction)?.to_dtype(dtype::promote(self.dtype(), target.dtype()));
        }
        reduction.of(self.sub(target)?.square()?)
    }

    /// The absolute difference.
    #[track_caller]
    pub fn l1_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.check("l1_loss")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.l1_loss(&y, reduction)?.to_dtype(dtype::promote(self.dtype(), target.dtype()));
        }
        reduction.of(self.sub(target)?.abs()?)
    }

    /// Half the square of the difference over `beta` where it is below `beta`, else the difference less `beta / 2`.
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &DTensor, beta: f64, reduction: Reduction) -> Result<DTensor> {
        reduction.check("smooth_l1_loss")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            let dtype = dtype::promote(self.dtype(), target.dtype());
            return x.smooth_l1_loss(&y, beta, reduction)?.to_dtype(dtype);
        }
        let difference = self.sub(target)?.abs()?;
        if beta == 0.0 {
            return reduction.of(difference);
        }
        // With d' = min(d, beta) both branches are d'^2 / (2 beta) + (d - d').
        let inner = difference.clamp(None, Some(beta))?;
        let curved = inner.square()?.mul_scalar(0.5 / beta)?;
        reduction.of(curved.add(&difference.sub(&inner)?)?)
    }

    /// Cross entropy of logits and targets from 0 to 1: `(1 - y) * x - log(sigmoid(x))`, which is smooth at 0.
    #[track_caller]
    pub fn bce_with_logits(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.check("bce_with_logits")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.bce_with_logits(&y, reduction)?.to_dtype(dtype::promote(self.dtype(), target.dtype()));
        }
        let x = self.settle("bce_with_logits", &[])?;
        reduction.of(target.rsub_scalar(1.0)?.mul(&x)?.sub(&x.logsigmoid()?)?)
    }

    /// `target * (log(target) - x)` of log-probabilities and probabilities, and 0 where the target is 0.
    #[track_caller]
    pub fn kl_div(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.kl_div(&y, reduction)?.to_dtype(dtype::promote(self.dtype(), target.dtype()));
        }
        let target = &target.settle("kl_div", &[])?;
        let zero = target.zeros_like()?;
        // The logarithm not of 0, so that its slope does no harm; of a negative number, which is no probability, it is NaN.
        let counts = target.ne(&zero)?;
        let known = counts.where_cond(target, &target.ones_like()?)?;
        let losses = target.mul(&known.log()?.sub(self)?)?;
        reduction.of(counts.where_cond(&losses, &zero)?)
    }

    /// This tensor and another in f32, if the type in which they meet is of half precision; see [`widened`](Self::widened).
    #[track_caller]
    fn widened_beside(&self, other: &DTensor) -> Result<Option<(DTensor, DTensor)>> {
        match dtype::promote(self.dtype(), other.dtype()) {
            DType::F16 | DType::BF16 => Ok(Some((self.to_dtype(DType::F32)?, other.to_dtype(DType::F32)?))),
            _ => Ok(None),
        }
    }
}

/// Losses without those of ignored targets, reduced.
#[track_caller]
fn counted(losses: &DTensor, target: &DTensor, options: Classes) -> Result<DTensor> {
    let counts = target.ne(&target.full_like(options.ignore_index)?)?;
    let zero = losses.zeros_like()?;
    let losses = counts.where_cond(losses, &zero)?;
    match options.reduction {
        Reduction::None => Ok(losses),
        Reduction::Sum => losses.sum(&[], false),
        Reduction::Mean => {
            // The sum of the losses may stay partial.
            let count = counts.to_dtype(losses.dtype())?.sum(&[], false)?.everywhere("cross_entropy")?;
            losses.sum(&[], false)?.div(&count)
        }
        Reduction::BatchMean => unreachable!("refused by Reduction::check"),
    }
}

macro_rules! entries {
    ($($name:ident, $reductions:expr $(, $argument:expr)?;)*) => {
        &[$(
            OpEntry { name: stringify!($name), samples, apply: |x| {
                $reductions.iter().map(|&r| x[0].$name(&x[1], $($argument,)? r)).collect()
            } },
        )*]
    };
}

/// The reductions that every loss has.
const MEANS: [Reduction; 3] = [Reduction::None, Reduction::Sum, Reduction::Mean];

/// Class losses with some targets ignored.
const CLASSES: [Classes; 3] = [
    Classes { reduction: Reduction::None, ignore_index: 1, label_smoothing: 0.0 },
    Classes { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0 },
    Classes { reduction: Reduction::Sum, ignore_index: 2, label_smoothing: 0.25 },
];

pub(super) const CLASS_OPS: &[OpEntry] = &[
    OpEntry {
        name: "cross_entropy",
        samples: classes,
        apply: |x| CLASSES.into_iter().map(|options| x[0].cross_entropy(&x[1], options)).collect(),
    },
    OpEntry {
        name: "nll_loss",
        samples: classes,
        apply: |x| CLASSES.into_iter().map(|options| x[0].nll_loss(&x[1], options)).collect(),
    },
];

fn classes() -> Vec<Vec<Sample>> {
    vec![
        vec![Sample::new(&[5, 7], DType::F64), Sample::index(&[5], 7)],
        vec![Sample::new(&[2, 3, 2], DType::F64), Sample::index(&[2, 2], 3)],
        vec![Sample::new(&[4], DType::F64), Sample::index(&[], 4)],
    ]
}

pub(super) const OPS: &[OpEntry] = entries! {
    mse_loss, MEANS;
    l1_loss, MEANS;
    smooth_l1_loss, MEANS, 2.0;
    bce_with_logits, MEANS;
    kl_div, [Reduction::None, Reduction::Sum, Reduction::Mean, Reduction::BatchMean];
};

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 2] = [&[5, 3], &[4]];
    shapes.iter().map(|shape| vec![Sample::new(shape, DType::F64), Sample::new(shape, DType::F64)]).collect()
}
