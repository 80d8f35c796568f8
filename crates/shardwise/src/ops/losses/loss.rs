//! Losses of predictions and targets, reduced to a scalar or left per element.

use std::panic::Location;

use candle_core::DType;

use crate::error::{ErrorKind, Result};
use crate::op::{loss_dtype, name_call};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::tensor::DTensor;
use shardwise_kernels::first_outside;

/// How a loss reduces its elements, PyTorch's `reduction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reduction {
    /// No reduction: one loss per element.
    None,
    /// The sum of the losses.
    Sum,
    /// The mean of the losses.
    Mean,
    /// The sum divided by the size of the first dimension, only for [`kl_div`](DTensor::kl_div); an error for other losses.
    BatchMean,
}

impl Reduction {
    #[track_caller]
    pub(in crate::ops) fn of(self, losses: DTensor) -> Result<DTensor> {
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

    /// Fails for a reduction that only `kl_div` has.
    fn check(self, name: &str) -> Result<()> {
        if self != Reduction::BatchMean {
            return Ok(());
        }
        let found = format!("BatchMean in {name}");
        Err(ErrorKind::Argument.error("reduction", found, "None, Sum or Mean", "use Mean, which divides by all losses"))
    }
}

/// Options of the losses of class indices, [`cross_entropy`](DTensor::cross_entropy) and [`nll_loss`](DTensor::nll_loss).
///
/// The defaults are those of PyTorch: the mean, `ignore_index` -100, no label smoothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossOptions {
    /// How the losses of single predictions are reduced.
    pub reduction: Reduction,
    /// Targets with this value do not contribute to the loss, nor to the count of a mean.
    pub ignore_index: i64,
    /// The share of every target that is distributed evenly over all classes, from 0 to 1. Ignored by `nll_loss`.
    pub label_smoothing: f64,
}

impl Default for LossOptions {
    fn default() -> Self {
        LossOptions { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0 }
    }
}

impl DTensor {
    /// Computes the cross entropy of logits `[n, classes, ...]` (or `[classes]`) and class indices `[n, ...]` (or a scalar).
    ///
    /// If the classes are sharded, the logits are never gathered: ranks all-reduce the logarithm of a sum per prediction, in f64 (of f64
    /// logits a maximum and a sum), and the losses are `Partial(Sum)`, each held by the rank that has the logit of its target. In PyTorch
    /// this needs the context `loss_parallel`. Half precision is computed in f32.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// use shardwise::ops::LossOptions;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let logits = DTensor::zeros((3, 8), DType::F32, &mesh, [Shard(1)])?; // classes are sharded
    ///     let targets = DTensor::zeros(3, DType::I64, &mesh, [Replicate])?;
    ///     let loss = logits.cross_entropy(&targets, LossOptions::default())?;
    ///     assert!((loss.item::<f32>()? - 8f32.ln()).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// If shapes or types do not fit. A target that is neither a class nor ignored is an error on the ranks that hold it; the other
    /// ranks get it with their next collective.
    #[doc(alias = "loss_parallel")]
    #[track_caller]
    pub fn cross_entropy(&self, target: &DTensor, options: LossOptions) -> Result<DTensor> {
        let dim = self.check_classes("cross_entropy", target)?;
        options.reduction.check("cross_entropy")?;
        if let Some(wide) = self.widened()? {
            return wide.cross_entropy(target, options)?.to_dtype(loss_dtype(self.dtype()));
        }
        // The logits are used several times: partial sums are reduced once, up front.
        let logits = &self.without_partials("cross_entropy", &[dim])?;
        // i64 holds every `ignore_index`; the type of the targets may not.
        let target = &target.to_dtype(DType::I64)?;
        let known = self.known_targets("cross_entropy", target, dim, options.ignore_index)?;
        let over = [dim as usize];
        let sums = logits.log_sums("cross_entropy", &over)?;
        let losses = logits.class_losses(&sums, over[0], &known)?;
        let losses = match options.label_smoothing {
            0.0 => losses,
            smoothing => {
                let mean = logits.mean(&[dim], true)?;
                let even = logits.log_sum_minus(&sums, &over, Some(&mean))?.squeeze(Some(dim))?;
                losses.mul_scalar(1.0 - smoothing)?.add(&even.mul_scalar(smoothing)?)?
            }
        };
        reduce_counted(&losses, target, options)
    }

    /// Computes the negative log likelihood of log-probabilities `[n, classes, ...]` (or `[classes]`) and class indices `[n, ...]`.
    ///
    /// If the classes are sharded, one number per prediction is all-reduced.
    #[track_caller]
    pub fn nll_loss(&self, target: &DTensor, options: LossOptions) -> Result<DTensor> {
        let dim = self.check_classes("nll_loss", target)?;
        options.reduction.check("nll_loss")?;
        if let Some(wide) = self.widened()? {
            return wide.nll_loss(target, options)?.to_dtype(loss_dtype(self.dtype()));
        }
        let target = &target.to_dtype(DType::I64)?;
        reduce_counted(&self.of_target("nll_loss", target, dim, options.ignore_index)?.neg()?, target, options)
    }

    /// Checks shapes and types, and returns the dimension of classes.
    fn check_classes(&self, name: &str, target: &DTensor) -> Result<isize> {
        let dim = usize::from(self.ndim() > 1);
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

    /// The element at the class of each target, all-reduced; arbitrary where the target is ignored.
    #[track_caller]
    fn of_target(&self, name: &'static str, target: &DTensor, dim: isize, ignore_index: i64) -> Result<DTensor> {
        let known = self.known_targets(name, target, dim, ignore_index)?;
        self.gather(dim, &known.unsqueeze(dim)?)?.squeeze(Some(dim))?.all_reduced(name)
    }

    /// The class of each target, 0 where it is ignored.
    #[track_caller]
    fn known_targets(&self, name: &'static str, target: &DTensor, dim: isize, ignore_index: i64) -> Result<DTensor> {
        let target = &target.all_reduced(name)?;
        self.check_targets(name, target, self.shape()[dim as usize], ignore_index)?;
        let ignored = target.full_like(ignore_index)?;
        target.ne(&ignored)?.where_cond(target, &target.zeros_like()?)
    }

    /// Fails if a target that this rank holds is neither a class nor ignored. Without this check the error would name `gather`
    /// instead of the loss that the program called.
    #[track_caller]
    fn check_targets(&self, name: &str, target: &DTensor, classes: usize, ignore_index: i64) -> Result<()> {
        let world = target.device_mesh().world();
        if world.is_dry() || !target.device_mesh().contains(world.rank()) {
            return Ok(());
        }
        let outside = first_outside(target.storage(), 0..classes as i64, Some(ignore_index))?;
        let Some(class) = outside else { return Ok(()) };
        let found = format!("class {class} among the targets of {name}");
        let needed = format!("classes from 0 to {}, or {ignore_index} to ignore a target", classes.saturating_sub(1));
        let kind = ErrorKind::Index { index: class, size: classes };
        let error = kind.error("class index", found, needed, "correct the targets");
        Err(name_call(error, name, &[self, target], Location::caller()))
    }

    /// Computes the mean squared error: the squared difference of each element, reduced.
    ///
    /// Communicates as [`sub`](Self::sub) and the reduction do.
    #[track_caller]
    pub fn mse_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.check("mse_loss")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.mse_loss(&y, reduction)?.to_dtype(loss_dtype(dtype::promote(self.dtype(), target.dtype())));
        }
        reduction.of(self.sub(target)?.square()?)
    }

    /// Computes the mean absolute error: the absolute difference of each element, reduced.
    ///
    /// Communicates as [`sub`](Self::sub) and the reduction do.
    #[track_caller]
    pub fn l1_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.check("l1_loss")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.l1_loss(&y, reduction)?.to_dtype(loss_dtype(dtype::promote(self.dtype(), target.dtype())));
        }
        reduction.of(self.sub(target)?.abs()?)
    }

    /// Computes the smooth L1 loss: `0.5 * d^2 / beta` where the absolute difference `d` is below `beta`, else `d - beta / 2`.
    ///
    /// Communicates as [`sub`](Self::sub) and the reduction do.
    #[track_caller]
    pub fn smooth_l1_loss(&self, target: &DTensor, beta: f64, reduction: Reduction) -> Result<DTensor> {
        reduction.check("smooth_l1_loss")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            let dtype = dtype::promote(self.dtype(), target.dtype());
            return x.smooth_l1_loss(&y, beta, reduction)?.to_dtype(loss_dtype(dtype));
        }
        let difference = self.sub(target)?.abs()?.without_partials("smooth_l1_loss", &[])?;
        if beta == 0.0 {
            return reduction.of(difference);
        }
        // Bounded, so that the branch that does not count has no infinite gradient.
        let curved = difference.clamp(None, Some(beta))?.square()?.mul_scalar(0.5 / beta)?;
        let straight = difference.sub_scalar(0.5 * beta)?;
        reduction.of(difference.lt(beta)?.where_cond(&curved, &straight)?)
    }

    /// Computes the binary cross entropy of logits and targets from 0 to 1, as `(1 - y) * x - log(sigmoid(x))`, which does not
    /// overflow.
    ///
    /// PyTorch's `binary_cross_entropy_with_logits`.
    #[doc(alias = "binary_cross_entropy_with_logits")]
    #[track_caller]
    pub fn bce_with_logits(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.check("bce_with_logits")?;
        if let Some((x, y)) = self.widened_beside(target)? {
            return x
                .bce_with_logits(&y, reduction)?
                .to_dtype(loss_dtype(dtype::promote(self.dtype(), target.dtype())));
        }
        let x = self.without_partials("bce_with_logits", &[])?;
        reduction.of(target.rsub_scalar(1.0)?.mul(&x)?.sub(&x.logsigmoid()?)?)
    }

    /// Computes the Kullback-Leibler divergence of log-probabilities (this tensor) and target probabilities:
    /// `target * (log(target) - self)`, and 0 where the target is 0.
    ///
    /// Use [`Reduction::BatchMean`] for the mathematical mean, as in PyTorch.
    #[track_caller]
    pub fn kl_div(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        if let Some((x, y)) = self.widened_beside(target)? {
            return x.kl_div(&y, reduction)?.to_dtype(loss_dtype(dtype::promote(self.dtype(), target.dtype())));
        }
        let target = &target.without_partials("kl_div", &[])?;
        let zero = target.zeros_like()?;
        // The logarithm of 1 in place of 0, whose gradient would be infinite; NaN for negative targets, which are not probabilities.
        let counts = target.ne(&zero)?;
        let known = counts.where_cond(target, &target.ones_like()?)?;
        let losses = target.mul(&known.log()?.sub(self)?)?;
        reduction.of(counts.where_cond(&losses, &zero)?)
    }

    /// Computes the Kullback-Leibler divergence as [`kl_div`](Self::kl_div) does, of target log-probabilities: PyTorch's
    /// `kl_div(log_target=True)`.
    #[track_caller]
    pub fn kl_div_log_target(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        if let Some((x, y)) = self.widened_beside(target)? {
            let dtype = dtype::promote(self.dtype(), target.dtype());
            return x.kl_div_log_target(&y, reduction)?.to_dtype(loss_dtype(dtype));
        }
        // The exponential may be large: terms of a partial sum would be rounded at its size.
        let [x, target] = [self, target].map(|t| t.without_partials("kl_div_log_target", &[]));
        let (x, target) = (x?, target?);
        reduction.of(target.exp()?.mul(&target.sub(&x)?)?)
    }

    /// Both tensors in f32 if their promoted type is half precision; see [`widened`](Self::widened).
    #[track_caller]
    fn widened_beside(&self, other: &DTensor) -> Result<Option<(DTensor, DTensor)>> {
        match dtype::promote(self.dtype(), other.dtype()) {
            DType::F16 | DType::BF16 => Ok(Some((self.to_dtype(DType::F32)?, other.to_dtype(DType::F32)?))),
            _ => Ok(None),
        }
    }
}

/// Reduces losses; ignored targets count as zero, and a mean is over the targets that are not ignored.
#[track_caller]
fn reduce_counted(losses: &DTensor, target: &DTensor, options: LossOptions) -> Result<DTensor> {
    let counts = target.ne(&target.full_like(options.ignore_index)?)?;
    let zero = losses.zeros_like()?;
    let losses = counts.where_cond(losses, &zero)?;
    match options.reduction {
        Reduction::None => Ok(losses),
        Reduction::Sum => losses.sum(&[], false),
        Reduction::Mean => {
            // The count is needed reduced on every rank; the sum of the losses may stay partial.
            let count = counts.to_dtype(losses.dtype())?.sum(&[], false)?.all_reduced("cross_entropy")?;
            let sum = losses.sum(&[], false)?;
            // A product leaves the sum partial where every rank has losses of its classes, for half a unit in the last place.
            if losses.layout().is_partial() { sum.mul(&count.reciprocal()?) } else { sum.div(&count) }
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

/// The reductions of every loss.
const MEANS: [Reduction; 3] = [Reduction::None, Reduction::Sum, Reduction::Mean];

/// Options that ignore some of the sample targets.
const CLASSES: [LossOptions; 3] = [
    LossOptions { reduction: Reduction::None, ignore_index: 1, label_smoothing: 0.0 },
    LossOptions { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0 },
    LossOptions { reduction: Reduction::Sum, ignore_index: 2, label_smoothing: 0.25 },
];

pub(in crate::ops) const CLASS_OPS: &[OpEntry] = &[
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

fn classes() -> Vec<Vec<SampleInput>> {
    vec![
        vec![SampleInput::new(&[5, 7], DType::F64), SampleInput::index(&[5], 7)],
        vec![SampleInput::new(&[2, 3, 2], DType::F64), SampleInput::index(&[2, 2], 3)],
        vec![SampleInput::new(&[4], DType::F64), SampleInput::index(&[], 4)],
    ]
}

pub(in crate::ops) const OPS: &[OpEntry] = entries! {
    mse_loss, MEANS;
    l1_loss, MEANS;
    smooth_l1_loss, MEANS, 2.0;
    bce_with_logits, MEANS;
    kl_div, [Reduction::None, Reduction::Sum, Reduction::Mean, Reduction::BatchMean];
};

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 2] = [&[5, 3], &[4]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64), SampleInput::new(shape, DType::F64)]).collect()
}
