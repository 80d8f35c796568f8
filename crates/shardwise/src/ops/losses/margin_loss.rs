//! More losses: of margins, distributions and sequences. Reductions leave partial sums unreduced, as in `loss`.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result};
use crate::ops::losses::loss::{LossOptions, Reduction};
use crate::ops::shapes::arrange::{one_mesh, signed};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::Placement;
use crate::tensor::{DTensor, check_whole};

/// Options of [`gaussian_nll_loss`](DTensor::gaussian_nll_loss) and [`poisson_nll_loss`](DTensor::poisson_nll_loss).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NllOptions {
    /// Whether the constant part of the likelihood is included.
    pub full: bool,
    /// Smallest variance, or what is added before a logarithm.
    pub eps: f64,
    /// How the losses are reduced.
    pub reduction: Reduction,
}

/// Options of [`triplet_margin_loss`](DTensor::triplet_margin_loss), with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TripletOptions {
    /// How much closer the positive has to be than the negative.
    pub margin: f64,
    /// Order of the norm.
    pub p: f64,
    /// Added to every difference.
    pub eps: f64,
    /// Whether the distance of positive and negative counts where it is smaller.
    pub swap: bool,
    /// How the losses are reduced.
    pub reduction: Reduction,
}

impl Default for TripletOptions {
    fn default() -> Self {
        TripletOptions { margin: 1.0, p: 2.0, eps: 1e-6, swap: false, reduction: Reduction::Mean }
    }
}

impl DTensor {
    /// Computes the cross entropy of logits and class indices as [`cross_entropy`](Self::cross_entropy) does, with a weight per
    /// class.
    ///
    /// Communicates as [`cross_entropy`](Self::cross_entropy) does, and the weights of the targets if the weights are sharded.
    #[track_caller]
    pub fn cross_entropy_weighted(&self, target: &DTensor, weight: &DTensor, options: LossOptions) -> Result<DTensor> {
        let dim = isize::from(self.ndim() > 1);
        let unreduced = LossOptions { reduction: Reduction::None, label_smoothing: 0.0, ..options };
        let weights = target_weights(target, weight, options.ignore_index)?;
        let smoothing = options.label_smoothing;
        if smoothing == 0.0 {
            let losses = self.cross_entropy(target, unreduced)?.mul(&weights)?;
            return weighted_mean(&losses, &weights, options.reduction);
        }
        let log_probabilities = self.log_softmax(dim)?;
        let losses = log_probabilities.nll_loss(target, unreduced)?.mul(&weights)?;
        let classes = self.shape()[dim as usize] as f64;
        let even = log_probabilities.mul(&log_probabilities.per_class(weight)?)?.sum(&[dim], false)?.neg()?;
        let even = target.ne(options.ignore_index)?.where_cond(&even, 0.0)?;
        let losses = losses.mul_scalar(1.0 - smoothing)?.add(&even.mul_scalar(smoothing / classes)?)?;
        weighted_mean(&losses, &weights, options.reduction)
    }

    /// Computes the cross entropy of logits and class probabilities of the same shape, with an optional weight per class.
    ///
    /// If the classes are sharded, ranks all-reduce the statistics of [`log_softmax`](Self::log_softmax) and one sum.
    #[track_caller]
    pub fn cross_entropy_probabilities(
        &self,
        target: &DTensor,
        weight: Option<&DTensor>,
        options: LossOptions,
    ) -> Result<DTensor> {
        if target.shape() != self.shape() || self.ndim() == 0 {
            let found = format!("probabilities {} for {}", target.layout(), self.layout());
            let needed = "one probability per logit";
            return Err(ErrorKind::shape(target.shape()).error("target", found, needed, "reshape the target"));
        }
        let dim = isize::from(self.ndim() > 1);
        let classes = self.shape()[dim as usize];
        let target = match options.label_smoothing {
            0.0 => target.clone(),
            smoothing => target.mul_scalar(1.0 - smoothing)?.add_scalar(smoothing / classes as f64)?,
        };
        let mut terms = self.log_softmax(dim)?.mul(&target)?;
        if let Some(weight) = weight {
            terms = terms.mul(&self.per_class(weight)?)?;
        }
        let losses = terms.sum(&[dim], false)?.neg()?;
        match options.reduction {
            Reduction::None => Ok(losses),
            Reduction::Sum => losses.sum_all(),
            _ => losses.sum_all()?.div_scalar(self.elem_count() as f64 / classes as f64),
        }
    }

    /// Computes the negative log likelihood as [`nll_loss`](Self::nll_loss) does, with a weight per class.
    #[track_caller]
    pub fn nll_loss_weighted(&self, target: &DTensor, weight: &DTensor, options: LossOptions) -> Result<DTensor> {
        let losses = self.nll_loss(target, LossOptions { reduction: Reduction::None, ..options })?;
        let weights = target_weights(target, weight, options.ignore_index)?;
        weighted_mean(&losses.mul(&weights)?, &weights, options.reduction)
    }

    /// A vector with one number per class, shaped to broadcast with `[n, classes, ...]` or `[classes]`.
    #[track_caller]
    fn per_class(&self, weight: &DTensor) -> Result<DTensor> {
        weight.reshape(&[vec![-1], vec![1; self.ndim().saturating_sub(2)]].concat())
    }

    /// Computes the binary cross entropy of probabilities and targets from 0 to 1, with an optional weight per element.
    ///
    /// Logarithms are at least -100, as in PyTorch.
    #[track_caller]
    pub fn binary_cross_entropy(
        &self,
        target: &DTensor,
        weight: Option<&DTensor>,
        reduction: Reduction,
    ) -> Result<DTensor> {
        let x = self.without_partials("binary_cross_entropy", &[])?;
        let low = |x: &DTensor| x.log()?.clamp_min(-100.0);
        let other = target.rsub_scalar(1.0)?;
        let losses = target.mul(&low(&x)?)?.add(&other.mul(&low(&x.rsub_scalar(1.0)?)?)?)?.neg()?;
        reduction.of(weighted(&losses, weight)?)
    }

    /// Computes the binary cross entropy of logits as [`bce_with_logits`](Self::bce_with_logits) does, with a weight per element
    /// and one for positive targets.
    #[doc(alias = "binary_cross_entropy_with_logits")]
    #[track_caller]
    pub fn bce_with_logits_weighted(
        &self,
        target: &DTensor,
        weight: Option<&DTensor>,
        pos_weight: Option<&DTensor>,
        reduction: Reduction,
    ) -> Result<DTensor> {
        let x = self.without_partials("bce_with_logits_weighted", &[])?;
        let mut logarithms = x.logsigmoid()?;
        if let Some(positive) = pos_weight {
            logarithms = logarithms.mul(&positive.add_scalar(-1.0)?.mul(target)?.add_scalar(1.0)?)?;
        }
        let losses = target.rsub_scalar(1.0)?.mul(&x)?.sub(&logarithms)?;
        reduction.of(weighted(&losses, weight)?)
    }

    /// Computes the Huber loss: `0.5 * d^2` where the difference `d` is at most `delta`, else `delta * (d - delta / 2)`.
    #[track_caller]
    pub fn huber_loss(&self, target: &DTensor, delta: f64, reduction: Reduction) -> Result<DTensor> {
        let distance = self.sub(target)?.abs()?.without_partials("huber_loss", &[])?;
        let far = distance.add_scalar(-0.5 * delta)?.mul_scalar(delta)?;
        // Bounded, so that the branch that does not count has no infinite gradient.
        let near = distance.clamp(None, Some(delta))?.square()?.mul_scalar(0.5)?;
        reduction.of(distance.le(delta)?.where_cond(&near, &far)?)
    }

    /// Computes the hinge embedding loss: the element where the target is 1, else `max(0, margin - x)`.
    #[track_caller]
    pub fn hinge_embedding_loss(&self, target: &DTensor, margin: f64, reduction: Reduction) -> Result<DTensor> {
        let x = self.without_partials("hinge_embedding_loss", &[])?;
        let far = target.ne(1.0)?.where_cond(&x.rsub_scalar(margin)?.clamp_min(0.0)?, 0.0)?;
        reduction.of(far.add(&target.ne(-1.0)?.where_cond(&x, 0.0)?)?)
    }

    /// Computes the negative log likelihood of a normal distribution with this mean and the variance `var`, whose last dimension may
    /// be missing or of size 1.
    #[track_caller]
    pub fn gaussian_nll_loss(&self, target: &DTensor, var: &DTensor, options: NllOptions) -> Result<DTensor> {
        let last = var.ndim() + 1 == self.ndim() && var.shape() == &self.shape()[..var.ndim()];
        let var = if last { var.unsqueeze(-1)? } else { var.clone() };
        // The bound does not stop the gradient.
        let var = var.straight_through(&var.detach().clamp_min(options.eps)?)?;
        let losses = var.log()?.add(&self.sub(target)?.square()?.div(&var)?)?.mul_scalar(0.5)?;
        let constant = if options.full { 0.5 * (2.0 * std::f64::consts::PI).ln() } else { 0.0 };
        options.reduction.of(losses.add_scalar(constant)?)
    }

    /// Computes the negative log likelihood of a Poisson distribution with this rate, or its logarithm if `log_input`.
    #[track_caller]
    pub fn poisson_nll_loss(&self, target: &DTensor, log_input: bool, options: NllOptions) -> Result<DTensor> {
        let x = self.without_partials("poisson_nll_loss", &[])?;
        let mut losses = match log_input {
            true => x.exp()?.sub(&target.mul(&x)?)?,
            false => x.sub(&target.mul(&x.add_scalar(options.eps)?.log()?)?)?,
        };
        if options.full {
            // Stirling's approximation of the logarithm of the factorial.
            let above = target.gt(1.0)?;
            let t = above.where_cond(target, 1.0)?;
            let root = t.mul_scalar(2.0 * std::f64::consts::PI)?.log()?.mul_scalar(0.5)?;
            let stirling = t.mul(&t.log()?)?.sub(&t)?.add(&root)?;
            losses = losses.add(&above.where_cond(&stirling, 0.0)?)?;
        }
        options.reduction.of(losses)
    }

    /// Computes `max(0, margin - target * (self - other))`: which of two is to be ranked higher.
    #[track_caller]
    pub fn margin_ranking_loss(
        &self,
        other: &DTensor,
        target: &DTensor,
        margin: f64,
        reduction: Reduction,
    ) -> Result<DTensor> {
        let difference = target.mul(&self.sub(other)?)?;
        let short = difference.to_dtype(dtype::real(difference.dtype()))?.rsub_scalar(margin)?;
        reduction.of(short.without_partials("margin_ranking_loss", &[])?.clamp_min(0)?)
    }

    /// Computes `log(1 + exp(-target * self))`.
    #[track_caller]
    pub fn soft_margin_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        reduction.of(target.mul(self)?.neg()?.exp()?.log1p()?)
    }

    /// Computes the mean binary cross entropy of the logits of several labels, the last dimension.
    #[track_caller]
    pub fn multilabel_soft_margin_loss(
        &self,
        target: &DTensor,
        weight: Option<&DTensor>,
        reduction: Reduction,
    ) -> Result<DTensor> {
        let x = self.without_partials("multilabel_soft_margin_loss", &[])?;
        let other = target.rsub_scalar(1.0)?.mul(&x.neg()?.logsigmoid()?)?;
        let losses = weighted(&target.mul(&x.logsigmoid()?)?.add(&other)?.neg()?, weight)?;
        reduction.of(losses.mean(&[-1], false)?)
    }

    /// Computes the margin loss of class scores `[n, classes]` or `[classes]`: the mean of `max(0, margin - x[y] + x[i])^p` over the
    /// classes other than the target `y`, with an optional weight per class.
    #[track_caller]
    pub fn multi_margin_loss(
        &self,
        target: &DTensor,
        p: f64,
        margin: f64,
        weight: Option<&DTensor>,
        reduction: Reduction,
    ) -> Result<DTensor> {
        if self.ndim() == 0 {
            return self.unsqueeze(0)?.multi_margin_loss(target, p, margin, weight, reduction);
        }
        let target_shape = signed(target.shape());
        let target = target.reshape(&signed(&self.shape()[..self.ndim() - 1]))?.to_dtype(DType::I64)?;
        let x = self.without_partials("multi_margin_loss", &[-1])?;
        let classes = self.shape()[self.ndim() - 1];
        let own = x.gather(-1, &target.unsqueeze(-1)?)?;
        let mut short = x.sub(&own)?.add_scalar(margin)?.clamp_min(0.0)?;
        if p != 1.0 {
            short = short.pow_scalar(p)?;
        }
        if let Some(weight) = weight {
            short = short.mul(&weight.index(&target)?.unsqueeze(-1)?)?;
        }
        let others = target.one_hot(classes)?.eq(0)?;
        let losses = others.where_cond(&short, 0.0)?.sum(&[-1], false)?.div_scalar(classes as f64)?;
        // The target of scores without rows has no dimension, or one of size 1.
        reduction.of(losses.reshape(&target_shape)?)
    }

    /// Computes the margin loss of class scores `[n, classes]` or `[classes]` with several targets per row, which end at the first
    /// -1: the mean of `max(0, 1 - (x[y] - x[i]))` over all pairs of a target and another class.
    ///
    /// Sharded scores stay where they are: targets are brought to the same rows, and one score per target is all-reduced.
    #[track_caller]
    pub fn multilabel_margin_loss(&self, target: &DTensor, reduction: Reduction) -> Result<DTensor> {
        if self.ndim() == 0 {
            return self.unsqueeze(0)?.multilabel_margin_loss(&target.atleast_1d()?, reduction)?.reshape(&[]);
        }
        let (name, site, last) = ("multilabel_margin_loss", Location::caller(), self.ndim() - 1);
        one_mesh(name, &[self, target])?;
        if target.shape() != self.shape() {
            let found = format!("{} with targets {} in {name}", self.layout(), target.layout());
            let needed = "as many targets per row as classes, -1 after the last";
            return Err(ErrorKind::shape(target.shape()).error(
                "targets",
                found,
                needed,
                "fill the targets up with -1",
            ));
        }
        let x = self.without_partials(name, &[-1])?;
        let classes = self.shape()[last];
        // All that is as large as the pairs follows the layout of the scores, or of the targets if the scores are replicated.
        let rows = if x.placements().iter().all(Placement::is_replicate) {
            target.layout().reduced()
        } else {
            x.layout().clone()
        };
        let rows = rows.without_axes(rows.shard_order(last))?;
        let target = &record_implicit_operator(name, || target.to_layout_at(&rows, site))?;
        // A target counts if no -1 comes before it.
        let counts = target.ge(0)?.to_dtype(DType::I64)?.cumprod(-1)?;
        let known = counts.where_cond(&target.to_dtype(DType::I64)?, 0)?;
        let zeros = known.zeros_like()?;
        let is_target = zeros.scatter_add(-1, &known, &counts)?.gt(0)?;
        let own = x.gather(-1, &known)?.all_reduced(name)?.unsqueeze(-1)?;
        let short = x.unsqueeze(-2)?.sub(&own)?.add_scalar(1.0)?.clamp_min(0.0)?;
        let pairs = counts.ne(0)?.unsqueeze(-1)?.logical_and(&is_target.logical_not()?.unsqueeze(-2)?)?;
        let losses = pairs.where_cond(&short, 0.0)?.sum(&[-2, -1], false)?.div_scalar(classes as f64)?;
        reduction.of(losses)
    }

    /// Computes the cosine embedding loss: `1 - cos` where the target is 1, `max(0, cos - margin)` where it is -1.
    #[track_caller]
    pub fn cosine_embedding_loss(
        &self,
        other: &DTensor,
        target: &DTensor,
        margin: f64,
        reduction: Reduction,
    ) -> Result<DTensor> {
        const EPS: f64 = 1e-12; // as in PyTorch, added to the squared lengths
        let real = |x: &DTensor| x.to_dtype(dtype::real(x.dtype()));
        let (a, b) = (real(self)?, real(other)?);
        let squares = |x: &DTensor| x.square()?.sum(&[-1], false)?.add_scalar(EPS);
        let cosine = a.mul(&b)?.sum(&[-1], false)?.div(&squares(&a)?.mul(&squares(&b)?)?.sqrt()?)?;
        let cosine = cosine.without_partials("cosine_embedding_loss", &[])?;
        let near = target.eq(1.0)?.where_cond(&cosine.rsub_scalar(1.0)?, 0.0)?;
        let far = target.eq(-1.0)?.where_cond(&cosine.add_scalar(-margin)?.clamp_min(0.0)?, 0.0)?;
        reduction.of(near.add(&far)?)
    }

    /// Computes the triplet loss of this tensor as anchor: `max(0, d(self, positive) - d(self, negative) + margin)`.
    #[track_caller]
    pub fn triplet_margin_loss(
        &self,
        positive: &DTensor,
        negative: &DTensor,
        options: TripletOptions,
    ) -> Result<DTensor> {
        let TripletOptions { margin, p, eps, swap, reduction } = options;
        let near = self.pairwise_distance(positive, p, eps, false)?;
        let mut far = self.pairwise_distance(negative, p, eps, false)?;
        if swap {
            far = far.minimum(&positive.pairwise_distance(negative, p, eps, false)?)?;
        }
        reduction.of(near.sub(&far)?.add_scalar(margin)?.clamp_min(0.0)?)
    }

    /// Computes the distances of the last dimension: the norm of order `p` of `self - other + eps`.
    #[track_caller]
    pub fn pairwise_distance(&self, other: &DTensor, p: f64, eps: f64, keepdim: bool) -> Result<DTensor> {
        self.sub(other)?.add_scalar(eps)?.norm(p, &[-1], keepdim)
    }

    /// Computes the connectionist temporal classification loss of log-probabilities `[time, n, classes]` or `[time, classes]` and
    /// targets `[n, length]`, or all targets one after the other.
    ///
    /// Time and classes are gathered if they are sharded; the batch may stay so. As in PyTorch the gradient is that of
    /// log-probabilities which are normalized.
    ///
    /// # Errors
    /// If shapes and lengths do not fit.
    #[track_caller]
    pub fn ctc_loss(
        &self,
        targets: &DTensor,
        input_lengths: &[usize],
        target_lengths: &[usize],
        options: CtcOptions,
    ) -> Result<DTensor> {
        one_mesh("ctc_loss", &[self, targets])?;
        if self.ndim() == 2 {
            let reduction = options.reduction;
            let loss =
                self.unsqueeze(1)?.ctc_loss(&targets.reshape(&[1, -1])?, input_lengths, target_lengths, options)?;
            return if reduction == Reduction::None { loss.squeeze(Some(0)) } else { Ok(loss) };
        }
        let n = input_lengths.len();
        let longest = target_lengths.iter().copied().max().unwrap_or(0);
        let fits = self.ndim() == 3
            && self.shape()[1] == n
            && target_lengths.len() == n
            && input_lengths.iter().all(|&t| t <= self.shape()[0])
            && options.blank < self.shape()[2]
            && match targets.ndim() {
                1 => {
                    targets.shape()[0]
                        == target_lengths.iter().fold(0, |sum: usize, &length| sum.saturating_add(length))
                }
                2 => targets.shape()[0] == n && longest <= targets.shape()[1],
                _ => false,
            };
        if !fits {
            let found = format!(
                "{} with targets {}, lengths {input_lengths:?} and {target_lengths:?} in ctc_loss",
                self.layout(),
                targets.layout()
            );
            let needed = "[time, n, classes], targets [n, length] and one pair of lengths per row";
            return Err(ErrorKind::shape(self.shape()).error("operands", found, needed, "correct the lengths"));
        }
        let losses = self.ctc_losses(targets, input_lengths, target_lengths, options.blank)?;
        let losses = match options.zero_infinity {
            true => losses.isinf()?.where_cond(0.0, &losses)?,
            false => losses,
        };
        match options.reduction {
            Reduction::None => Ok(losses),
            Reduction::Sum => losses.sum_all(),
            _ => {
                let lengths: Vec<f64> = target_lengths.iter().map(|&l| l.max(1) as f64).collect();
                let lengths = self.constant(&Tensor::from_vec(lengths, n, &Device::Cpu)?.to_dtype(self.dtype())?)?;
                losses.div(&lengths)?.mean_all()
            }
        }
    }

    /// The loss of every row: forward variables of all alignments, one time step after the other.
    #[track_caller]
    fn ctc_losses(
        &self,
        targets: &DTensor,
        input_lengths: &[usize],
        target_lengths: &[usize],
        blank: usize,
    ) -> Result<DTensor> {
        // Stands for the logarithm of 0: far below any likelihood, and finite, so that differences are numbers.
        const NEVER: f64 = -1e30;
        let (steps, n) = (self.shape()[0], input_lengths.len());
        let longest = target_lengths.iter().copied().max().unwrap_or(0);
        let states = 2 * longest + 1;
        // One long target among many rows.
        check_whole(&[steps.max(1), n, states], DType::I64)?;
        let host = match targets.is_readable() {
            false => vec![0; targets.elem_count()],
            true => targets.detach().full_tensor()?.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?,
        };
        let width = if targets.ndim() == 2 { targets.shape()[1] } else { 0 };
        let (mut labels, mut skips, mut start) = (vec![blank as i64; n * states], vec![0u8; n * states], 0);
        for (row, &length) in target_lengths.iter().enumerate() {
            let first = if targets.ndim() == 2 { row * width } else { start };
            start += length;
            for i in 0..length {
                let (at, label) = (row * states + 2 * i + 1, host[first + i]);
                labels[at] = label;
                // Only a label that differs from the one before may follow it without a blank.
                skips[at] = u8::from(i > 0 && label != host[first + i - 1]);
            }
        }
        let constant = |t: Tensor| self.constant(&t);
        let labels = constant(Tensor::from_vec(labels, (1, n, states), &Device::Cpu)?)?;
        let skips = constant(Tensor::from_vec(skips, (n, states), &Device::Cpu)?)?;
        let wide = labels.expand(&[steps as isize, n as isize, states as isize])?;
        let x = self.without_partials("ctc_loss", &[0, 2])?;
        let scores = x.gather(2, &wide)?.clamp_min(NEVER)?;
        let begins: Vec<f64> = (0..states).map(|s| if s < 2 { 0.0 } else { NEVER }).collect();
        let begins = constant(Tensor::from_vec(begins, (1, states), &Device::Cpu)?.to_dtype(self.dtype())?)?;
        let mut alpha = scores.select(0, 0)?.add(&begins)?;
        for t in 1..steps {
            let moved = |by: usize| alpha.pad(&[(by, 0)], NEVER)?.narrow(-1, 0, states);
            let skipped = skips.where_cond(&moved(2)?, NEVER)?;
            let reached = alpha.logaddexp(&moved(1)?)?.logaddexp(&skipped)?;
            let next = reached.add(&scores.select(0, t as isize)?)?;
            let runs: Vec<u8> = input_lengths.iter().map(|&length| u8::from(t < length)).collect();
            let runs = constant(Tensor::from_vec(runs, (n, 1), &Device::Cpu)?)?;
            alpha = runs.where_cond(&next, &alpha)?;
        }
        // An alignment ends in the last label or the blank after it.
        let ends: Vec<i64> = target_lengths.iter().flat_map(|&l| [2 * l as i64, (2 * l as i64 - 1).max(0)]).collect();
        let ends = constant(Tensor::from_vec(ends, (n, 2), &Device::Cpu)?)?;
        let last = alpha.gather(1, &ends)?;
        let only: Vec<u8> = target_lengths.iter().map(|&l| u8::from(l == 0)).collect();
        let only = constant(Tensor::from_vec(only, n, &Device::Cpu)?)?;
        let both = last.select(1, 0)?.logaddexp(&last.select(1, 1)?)?;
        let likelihood = only.where_cond(&last.select(1, 0)?, &both)?;
        let impossible = likelihood.lt(NEVER / 2.0)?;
        let losses = impossible.where_cond(f64::INFINITY, &likelihood.neg()?)?;
        // PyTorch's gradient includes that of the normalization: the probabilities of all steps that count.
        let counted: Vec<f64> =
            (0..steps).flat_map(|t| input_lengths.iter().map(move |&l| f64::from(u8::from(t < l)))).collect();
        let counted = constant(Tensor::from_vec(counted, (steps, n, 1), &Device::Cpu)?.to_dtype(self.dtype())?)?;
        let mass = x.exp()?.mul(&counted)?.sum(&[0, 2], false)?;
        losses.add(&impossible.where_cond(0.0, &mass)?)?.straight_through(&losses)
    }
}

/// Options of [`ctc_loss`](DTensor::ctc_loss), with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CtcOptions {
    /// The class that stands for no label.
    pub blank: usize,
    /// How the losses of rows are reduced; the mean divides each by the length of its target first.
    pub reduction: Reduction,
    /// Whether the loss of a row without any alignment is 0 instead of infinite.
    pub zero_infinity: bool,
}

impl Default for CtcOptions {
    fn default() -> Self {
        CtcOptions { blank: 0, reduction: Reduction::Mean, zero_infinity: false }
    }
}

#[track_caller]
fn weighted(losses: &DTensor, weight: Option<&DTensor>) -> Result<DTensor> {
    weight.map_or(Ok(losses.clone()), |weight| losses.mul(weight))
}

/// The weight of the class of every target; 0 where the target is ignored.
#[track_caller]
fn target_weights(target: &DTensor, weight: &DTensor, ignore_index: i64) -> Result<DTensor> {
    let target = target.to_dtype(DType::I64)?;
    let known = target.ne(ignore_index)?;
    // Used more than once: the sum of a lookup in sharded weights is reduced here.
    let found = weight.index(&known.where_cond(&target, 0)?)?.all_reduced("nll_loss")?;
    known.where_cond(&found, 0.0)
}

#[track_caller]
fn weighted_mean(losses: &DTensor, weights: &DTensor, reduction: Reduction) -> Result<DTensor> {
    match reduction {
        Reduction::None => Ok(losses.clone()),
        Reduction::Sum => losses.sum_all(),
        _ => losses.sum_all()?.div(&weights.sum_all()?),
    }
}

/// The reductions of every loss.
const MEANS: [Reduction; 3] = [Reduction::None, Reduction::Sum, Reduction::Mean];

macro_rules! entries {
    ($($name:literal, $samples:ident, |$x:ident, $r:ident| $call:expr;)*) => {
        &[$(
            OpEntry { name: $name, samples: $samples, apply: |$x| MEANS.iter().map(|&$r| $call).collect() },
        )*]
    };
}

fn class_options(reduction: Reduction) -> LossOptions {
    LossOptions { reduction, ignore_index: 1, label_smoothing: 0.1 }
}

pub(in crate::ops) const OPS: &[OpEntry] = entries! {
    "cross_entropy_weighted", classes, |x, r| x[0].cross_entropy_weighted(&x[1], &x[2], class_options(r));
    "nll_loss_weighted", classes, |x, r| x[0].nll_loss_weighted(&x[1], &x[2], class_options(r));
    "cross_entropy_probabilities", pairs, |x, r| x[0].cross_entropy_probabilities(&x[1], None, class_options(r));
    "binary_cross_entropy", pairs, |x, r| x[0].sigmoid()?.binary_cross_entropy(&x[1], Some(&x[1]), r);
    "bce_with_logits_weighted", pairs, |x, r| x[0].bce_with_logits_weighted(&x[1], Some(&x[1]), Some(&x[0]), r);
    "kl_div_log_target", pairs, |x, r| x[0].kl_div_log_target(&x[1], r);
    "huber_loss", pairs, |x, r| x[0].huber_loss(&x[1], 0.5, r);
    "hinge_embedding_loss", pairs, |x, r| x[0].hinge_embedding_loss(&x[1].sign()?, 0.5, r);
    "gaussian_nll_loss", pairs, |x, r|
        x[0].gaussian_nll_loss(&x[1], &x[1].square()?, NllOptions { full: true, eps: 0.1, reduction: r });
    "poisson_nll_loss", pairs, |x, r|
        x[0].poisson_nll_loss(&x[1], true, NllOptions { full: true, eps: 0.1, reduction: r });
    "margin_ranking_loss", pairs, |x, r| x[0].margin_ranking_loss(&x[1], &x[1].sign()?, 0.5, r);
    "soft_margin_loss", pairs, |x, r| x[0].soft_margin_loss(&x[1], r);
    "multilabel_soft_margin_loss", pairs, |x, r| x[0].multilabel_soft_margin_loss(&x[1], Some(&x[1]), r);
    "multi_margin_loss", classes, |x, r| x[0].multi_margin_loss(&x[1], 2.0, 1.0, Some(&x[2]), r);
    "multilabel_margin_loss", labels, |x, r| x[0].multilabel_margin_loss(&x[1], r);
    "cosine_embedding_loss", pairs, |x, r| x[0].cosine_embedding_loss(&x[1], &x[1].select(-1, 0)?.sign()?, 0.5, r);
    "triplet_margin_loss", pairs, |x, r|
        x[0].triplet_margin_loss(&x[1], &x[0].neg()?, TripletOptions { swap: true, reduction: r, ..Default::default() });
    "pairwise_distance", pairs, |x, r| x[0].pairwise_distance(&x[1], 2.0, 1e-6, r == Reduction::Sum);
    "ctc_loss", sequences, |x, r|
        x[0].log_softmax(2)?.ctc_loss(&x[1], &[4, 3], &[2, 1], CtcOptions { reduction: r, ..Default::default() });
};

fn classes() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 4], DType::F64), SampleInput::index(&[5], 4), SampleInput::new(&[4], DType::F64)]]
}

fn pairs() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::new(&[5, 3], DType::F64)]]
}

fn labels() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[3, 4], DType::F64), SampleInput::index(&[3, 4], 4)]]
}

fn sequences() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[4, 2, 3], DType::F64), SampleInput::index(&[2, 2], 3)]]
}
