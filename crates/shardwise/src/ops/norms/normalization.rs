//! Softmax, variance and normalization, composed of other operators: if a normalized dimension is sharded, ranks exchange
//! statistics of it (maxima, sums), never the elements.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::comm::record_implicit_operator;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::reductions::reduce::resolve;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};

/// The identity on a tensor that is not partial: reduces a partial input, for operators that use it more than once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ReducePartials {
    name: &'static str,
    /// Dimensions that must not become sharded by the reduction.
    dims: Vec<usize>,
}

impl Op for ReducePartials {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let dims: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
        let sharding =
            (0..dims.len()).map(|d| if self.dims.contains(&d) { DimSharding::Never } else { DimSharding::Free });
        let signature = Signature::new(sharding, [dims.clone()], [dims]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(inputs.to_vec())
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |_, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            Ok(vec![Some(gradient.clone())])
        })
    }
}

impl DTensor {
    /// Reduces partial placements, by reduce-scatter on a dimension other than `dims` where possible, else by all-reduce.
    #[track_caller]
    pub(in crate::ops) fn without_partials(&self, name: &'static str, dims: &[isize]) -> Result<DTensor> {
        // Resolved here, so that a wrong dimension is reported in the name of this operator, not of one that it is composed of.
        let dims = match *dims {
            [dim] if self.is_scalar_with(dim) => Vec::new(),
            _ => dims.iter().map(|&d| self.resolve_dim(name, d)).collect::<Result<_>>()?,
        };
        if !self.layout().is_partial() {
            return Ok(self.clone());
        }
        Ok(dispatch(&ReducePartials { name, dims }, &[self], Location::caller())?.swap_remove(0))
    }

    /// Reduces partial placements by all-reduce, for small results that every rank uses again in the backward pass.
    #[track_caller]
    pub(in crate::ops) fn all_reduced(&self, name: &'static str) -> Result<DTensor> {
        let site = Location::caller();
        record_implicit_operator(name, || self.reduced(site))
    }

    /// This tensor in f32 if it is half precision, so that a composed operator rounds once, in its result. `None` for other types.
    #[track_caller]
    pub(in crate::ops) fn widened(&self) -> Result<Option<DTensor>> {
        match self.dtype() {
            DType::F16 | DType::BF16 => self.to_dtype(DType::F32).map(Some),
            _ => Ok(None),
        }
    }

    /// The promoted type of this tensor, a weight and a bias.
    fn promoted_type(&self, weight: Option<&DTensor>, bias: Option<&DTensor>) -> DType {
        [weight, bias].into_iter().flatten().fold(self.dtype(), |dtype, t| dtype::promote(dtype, t.dtype()))
    }

    /// Applies the softmax along a dimension.
    ///
    /// Local if the dimension is not sharded. If it is, ranks all-reduce the logarithm of a sum per line (in f64; of f64 a maximum and a
    /// sum), and one number per line in the backward pass; the layout stays.
    #[track_caller]
    pub fn softmax(&self, dim: isize) -> Result<DTensor> {
        // Differences of unsigned integers would wrap.
        if !self.dtype().is_float() {
            return self.to_dtype(dtype::real(self.dtype()))?.softmax(dim);
        }
        if let Some(found) = self.as_vector(dim, |x| x.softmax(0)?.squeeze(Some(0))) {
            return found;
        }
        if self.elem_count() == 0 {
            return self.without_partials("softmax", &[dim]);
        }
        if self.holds_whole_rows(dim) {
            return self.softmax_rows();
        }
        let x = self.without_partials("softmax", &[dim])?;
        if let Some(wide) = x.widened()? {
            return wide.softmax(dim)?.to_dtype(self.dtype());
        }
        let dims = [x.resolve_dim("softmax", dim)?];
        x.softmax_with(&x.log_sums("softmax", &dims)?, &dims, false)
    }

    /// Returns the logarithm of the softmax along a dimension, without overflow.
    ///
    /// Communicates as [`softmax`](Self::softmax) does.
    #[track_caller]
    pub fn log_softmax(&self, dim: isize) -> Result<DTensor> {
        // Differences of unsigned integers would wrap.
        if !self.dtype().is_float() {
            return self.to_dtype(dtype::real(self.dtype()))?.log_softmax(dim);
        }
        if let Some(found) = self.as_vector(dim, |x| x.log_softmax(0)?.squeeze(Some(0))) {
            return found;
        }
        if self.elem_count() == 0 {
            return self.without_partials("log_softmax", &[dim]);
        }
        if self.holds_whole_rows(dim) {
            return self.log_softmax_rows();
        }
        let x = self.without_partials("log_softmax", &[dim])?;
        if let Some(wide) = x.widened()? {
            return wide.log_softmax(dim)?.to_dtype(self.dtype());
        }
        let dims = [x.resolve_dim("log_softmax", dim)?];
        x.softmax_with(&x.log_sums("log_softmax", &dims)?, &dims, true)
    }

    /// Computes `log(sum(exp(x)))` over some dimensions, or over all if `dims` is empty, without overflow.
    ///
    /// If a reduced dimension is sharded, ranks communicate as in [`softmax`](Self::softmax), and not in the backward pass.
    #[track_caller]
    pub fn logsumexp(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        // Differences of unsigned integers would wrap.
        if !self.dtype().is_float() {
            return self.to_dtype(dtype::real(self.dtype()))?.logsumexp(dims, keepdim);
        }
        if let [dim] = *dims
            && let Some(found) = self.as_vector(dim, |x| x.logsumexp(&[0], false))
        {
            return found;
        }
        if let [dim] = dims
            && self.elem_count() > 0
            && self.holds_whole_rows(*dim)
        {
            let kept = self.logsumexp_rows()?;
            return if keepdim { Ok(kept) } else { kept.squeeze(Some(-1)) };
        }
        let x = self.without_partials("logsumexp", dims)?;
        if let Some(wide) = x.widened()? {
            return wide.logsumexp(dims, keepdim)?.to_dtype(self.dtype());
        }
        if x.elem_count() == 0 {
            return x.sum(dims, keepdim)?.log(); // nothing adds up to 0
        }
        let over = resolve("logsumexp", dims, &x)?;
        let kept = x.log_sum_minus(&x.log_sums("logsumexp", &over)?, &over, None)?;
        if keepdim {
            return Ok(kept);
        }
        kept.sum(dims, false) // every sum has one term: this removes the dimensions
    }

    /// Computes the variance over some dimensions, or over all if `dims` is empty, with divisor `n - correction`.
    ///
    /// If a reduced dimension is sharded over up to 4 ranks, one all-gather brings mean and variance of every shard together; over more
    /// ranks, the mean is all-reduced, and the result is `Partial(Sum)`. Two passes, so it is accurate for data far from zero.
    #[track_caller]
    pub fn var(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<DTensor> {
        resolve("var", dims, self)?;
        let x = self.without_partials("var", dims)?;
        if let Some(wide) = x.widened()? {
            return wide.var(dims, correction, keepdim)?.to_dtype(self.dtype());
        }
        if let Some((_, kept)) = x.merged_statistics("var", dims)? {
            let count = self.elem_count() as f64 / kept.elem_count() as f64;
            let variance = kept.mul_scalar(count / (count - correction).max(0.0))?;
            return if keepdim { Ok(variance) } else { variance.sum(dims, false) };
        }
        let centred = x.sub(&x.mean(dims, true)?)?;
        let squares = centred.square()?.sum(dims, keepdim)?;
        let count = self.elem_count() as f64 / squares.elem_count().max(1) as f64;
        squares.div_scalar((count - correction).max(0.0))
    }

    /// Computes the standard deviation over some dimensions, or over all if `dims` is empty, with divisor `n - correction`.
    ///
    /// If a reduced dimension is sharded, ranks communicate as in [`var`](Self::var).
    #[track_caller]
    pub fn std(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<DTensor> {
        // In f64, where the variance of no narrower type is 0 or infinite.
        let x = self.without_partials("std", dims)?;
        let wide = if x.dtype().is_float() { x.to_dtype(DType::F64)? } else { x };
        let deviation = wide.var(dims, correction, keepdim)?.root(2.0)?;
        if self.dtype().is_float() { deviation.to_dtype(self.dtype()) } else { Ok(deviation) }
    }

    /// Computes the vector norm of an order over some dimensions, or over all if `dims` is empty.
    ///
    /// Orders may be infinite (maximum, minimum of the absolute values) or 0 (number of nonzero elements). If a reduced dimension
    /// is sharded, one number per line is reduced. The gradient at zero is zero. PyTorch's `linalg.vector_norm`.
    #[doc(alias = "vector_norm")]
    #[track_caller]
    pub fn norm(&self, order: f64, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        let over = resolve("norm", dims, self)?;
        if order.is_finite()
            && let Some(wide) = self.widened()?
        {
            return wide.norm(order, dims, keepdim)?.to_dtype(self.dtype());
        }
        let x = self.abs()?;
        match order {
            f64::INFINITY => x.amax(dims, keepdim),
            f64::NEG_INFINITY => x.amin(dims, keepdim),
            0.0 => x.ne(&x.zeros_like()?)?.to_dtype(x.dtype())?.sum(dims, keepdim),
            1.0 => x.sum(dims, keepdim),
            // The power of a single element may be 0 or infinite where its root is neither.
            _ if x.dtype().is_float() && over.iter().all(|&d| x.shape()[d] == 1) => x.sum(dims, keepdim),
            2.0 => x.square()?.sum(dims, keepdim)?.root(2.0),
            p => x.pow_scalar(p)?.sum(dims, keepdim)?.root(p),
        }
    }

    /// The root of an order, with gradient zero at zero: a subgradient, since a norm or deviation is minimal there.
    #[track_caller]
    fn root(&self, order: f64) -> Result<DTensor> {
        let root = |x: &DTensor| if order == 2.0 { x.sqrt() } else { x.pow_scalar(1.0 / order) };
        if !self.has_gradient() {
            return root(self);
        }
        let x = self.without_partials("norm", &[])?;
        let zero = x.zeros_like()?;
        let flat = x.eq(&zero)?;
        flat.where_cond(&zero, &root(&flat.where_cond(&x.ones_like()?, &x)?)?)
    }

    /// Applies layer normalization over the last `dims` dimensions: mean 0 and variance 1, times `weight`, plus `bias`.
    ///
    /// Local if these dimensions are not sharded; else ranks exchange the mean and the variance of each row, as in [`var`](Self::var),
    /// and all-reduce two numbers of each row in the backward pass, together if up to 4 ranks share a row.
    #[track_caller]
    pub fn layer_norm(
        &self,
        dims: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        let last = self.last_dims("layer_norm", dims)?;
        self.check_affine("layer_norm", dims, weight)?;
        self.check_affine("layer_norm", dims, bias)?;
        if dims == 1
            && let Some(normal) = self.layer_norm_rows(weight, bias, eps)?
        {
            return Ok(normal);
        }
        let x = self.without_partials("layer_norm", &last)?;
        if let Some(wide) = x.widened()? {
            return wide.layer_norm(dims, weight, bias, eps)?.to_dtype(self.promoted_type(weight, bias));
        }
        let (centred, scale) = match x.merged_statistics("layer_norm", &last)? {
            Some((mean, variance)) => {
                let scale = variance.add_scalar(eps)?.rsqrt()?;
                let [mean, scale] = DTensor::with_gradients_reduced_together("layer_norm", [&mean, &scale])?;
                (x.sub(&mean)?, scale)
            }
            None => {
                let centred = x.sub(&x.mean(&last, true)?)?;
                let scale = centred.square()?.mean(&last, true)?.add_scalar(eps)?.rsqrt()?;
                (centred, scale)
            }
        };
        let normal = centred.mul(&scale)?;
        let scaled = weight.map_or(Ok(normal.clone()), |w| normal.mul(w))?;
        bias.map_or(Ok(scaled.clone()), |b| scaled.add(b))
    }

    /// Applies RMS normalization over the last `dims` dimensions: mean square 1, times `weight`.
    ///
    /// Local if these dimensions are not sharded; else ranks all-reduce one number per row.
    #[track_caller]
    pub fn rms_norm(&self, dims: usize, weight: Option<&DTensor>, eps: f64) -> Result<DTensor> {
        let last = self.last_dims("rms_norm", dims)?;
        self.check_affine("rms_norm", dims, weight)?;
        if dims == 1
            && let Some(normal) = self.rms_norm_rows(weight, eps)?
        {
            return Ok(normal);
        }
        let x = self.without_partials("rms_norm", &last)?;
        if let Some(wide) = x.widened()? {
            return wide.rms_norm(dims, weight, eps)?.to_dtype(self.promoted_type(weight, None));
        }
        let normal = x.mul(&x.square()?.mean(&last, true)?.add_scalar(eps)?.rsqrt()?)?;
        weight.map_or(Ok(normal.clone()), |w| normal.mul(w))
    }

    /// Applies group normalization to `[n, channels, ...]`: mean 0 and variance 1 per group of channels, times `weight` and plus
    /// `bias` per channel.
    ///
    /// If a normalized dimension is sharded, ranks all-reduce mean and variance per group.
    ///
    /// # Errors
    /// If `groups` does not divide the channels.
    #[track_caller]
    pub fn group_norm(
        &self,
        groups: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        if self.ndim() < 2 || groups == 0 || !self.shape()[1].is_multiple_of(groups) {
            let found = format!("{groups} groups in group_norm of {}", self.layout());
            return Err(ErrorKind::Argument.error(
                "groups",
                found,
                "a divisor of the channels",
                "change the number of groups",
            ));
        }
        if let Some(wide) = self.widened()? {
            return wide.group_norm(groups, weight, bias, eps)?.to_dtype(self.promoted_type(weight, bias));
        }
        let signed = |dims: &[usize]| dims.iter().map(|&n| n as isize).collect::<Vec<_>>();
        let apart = self.unflatten(1, &[groups as isize, (self.shape()[1] / groups) as isize])?;
        let normal = apart.layer_norm(apart.ndim() - 2, None, None, eps)?.reshape(&signed(self.shape()))?;
        normal.per_channel("group_norm", weight, bias)
    }

    /// Applies batch normalization to `[n, channels, ...]`: mean 0 and variance 1 per channel, times `weight` and plus `bias`.
    ///
    /// Mean and variance are `statistics` (inference), or those of the global batch (training): if the batch is sharded, ranks
    /// all-reduce both per channel, as PyTorch's `SyncBatchNorm`.
    #[doc(alias = "SyncBatchNorm")]
    #[track_caller]
    pub fn batch_norm(
        &self,
        statistics: Option<(&DTensor, &DTensor)>,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Err(self.bad_dims("batch_norm", &[], "[n, channels, ...]"));
        }
        let fused = match statistics {
            None => self.fused_batch_norm(weight, bias, eps)?,
            Some((mean, variance)) => self.fused_inference_norm([mean, variance], weight, bias, eps)?,
        };
        if let Some(normal) = fused {
            return Ok(normal);
        }
        if let Some(wide) = self.widened()? {
            // In half precision the reciprocal of the deviation would be rounded once more.
            let widened = statistics.map(|(mean, variance)| {
                Ok::<_, Error>((mean.to_dtype(wide.dtype())?, variance.to_dtype(wide.dtype())?))
            });
            let widened = widened.transpose()?;
            let statistics = widened.as_ref().map(|(mean, variance)| (mean, variance));
            // Weight and bias too: the fused kernel takes one type.
            let dtype = self.promoted_type(weight, bias);
            let widen = |t: &DTensor| Ok::<_, Error>(t.widened()?.unwrap_or_else(|| t.clone()));
            let (weight, bias) = (weight.map(widen).transpose()?, bias.map(widen).transpose()?);
            return wide.batch_norm(statistics, weight.as_ref(), bias.as_ref(), eps)?.to_dtype(dtype);
        }
        let own;
        let (mean, variance) = match statistics {
            Some(given) => given,
            None => {
                own = self.channel_statistics("batch_norm", 0.0)?;
                (&own.0, &own.1)
            }
        };
        let centred = self.sub(&self.channels("batch_norm", mean)?)?;
        let normal = centred.mul(&self.channels("batch_norm", &variance.add_scalar(eps)?.rsqrt()?)?)?;
        normal.per_channel("batch_norm", weight, bias)
    }

    /// Computes the mean and the variance (with divisor `n - correction`) of every channel of `[n, channels, ...]`.
    ///
    /// If the batch is sharded, the mean is all-reduced, and both results are `Partial(Sum)`.
    #[track_caller]
    pub fn batch_statistics(&self, correction: f64) -> Result<(DTensor, DTensor)> {
        self.channel_statistics("batch_statistics", correction)
    }

    #[track_caller]
    fn channel_statistics(&self, name: &'static str, correction: f64) -> Result<(DTensor, DTensor)> {
        if self.ndim() < 2 {
            return Err(self.bad_dims(name, &[], "[n, channels, ...]"));
        }
        let floats = matches!(self.dtype(), DType::F32 | DType::F64) && !self.layout().is_partial();
        if floats && !self.has_gradient() && self.elem_count() > 0 {
            return self.fused_statistics(name, correction);
        }
        let others: Vec<isize> = (0..self.ndim() as isize).filter(|&d| d != 1).collect();
        Ok((self.mean(&others, false)?, self.var(&others, correction, false)?))
    }

    /// Reshapes a vector with one number per channel to broadcast with `[n, channels, ...]`.
    #[track_caller]
    fn channels(&self, name: &str, vector: &DTensor) -> Result<DTensor> {
        if vector.shape() != [self.shape()[1]] {
            let found = format!("shape {:?} in {name} of {}", vector.shape(), self.layout());
            let needed = format!("shape [{}], one number per channel", self.shape()[1]);
            let fix = "create weight, bias and statistics with the number of channels";
            return Err(ErrorKind::shape(vector.shape()).error("weight, bias or statistics", found, needed, fix));
        }
        vector.reshape(&[vec![-1], vec![1; self.ndim() - 2]].concat())
    }

    #[track_caller]
    fn per_channel(&self, name: &str, weight: Option<&DTensor>, bias: Option<&DTensor>) -> Result<DTensor> {
        let scaled = weight.map_or(Ok(self.clone()), |w| self.mul(&self.channels(name, w)?))?;
        bias.map_or(Ok(scaled.clone()), |b| scaled.add(&self.channels(name, b)?))
    }

    /// Fails unless a weight or bias has the shape of the last `dims` dimensions.
    #[track_caller]
    fn check_affine(&self, name: &str, dims: usize, parameter: Option<&DTensor>) -> Result<()> {
        let wanted = &self.shape()[self.ndim() - dims..];
        match parameter {
            Some(found) if found.shape() != wanted => {
                let kind = ErrorKind::shape(found.shape());
                let found = format!("shape {:?} in {name} of {}", found.shape(), self.layout());
                let fix = "create weight and bias with the shape of the normalized dimensions";
                Err(kind.error("weight or bias", found, format!("shape {wanted:?}"), fix))
            }
            _ => Ok(()),
        }
    }

    fn last_dims(&self, name: &str, dims: usize) -> Result<Vec<isize>> {
        if dims == 0 || dims > self.ndim() {
            let found = format!("{dims} dimension(s) in {name} of {}", self.layout());
            return Err(ErrorKind::Argument.error(
                "dimensions",
                found,
                format!("1 to {} trailing dimensions", self.ndim()),
                "pass the number of dimensions to normalize",
            ));
        }
        Ok((1..=dims as isize).map(|d| -d).collect())
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "softmax", samples, apply: |x| Ok(vec![x[0].softmax(0)?, x[0].softmax(-1)?]) },
    OpEntry { name: "log_softmax", samples, apply: |x| Ok(vec![x[0].log_softmax(0)?, x[0].log_softmax(-1)?]) },
    OpEntry {
        name: "logsumexp",
        samples,
        apply: |x| Ok(vec![x[0].logsumexp(&[0], false)?, x[0].logsumexp(&[], true)?]),
    },
    OpEntry { name: "var", samples, apply: |x| Ok(vec![x[0].var(&[0], 0.0, true)?, x[0].var(&[], 1.0, false)?]) },
    OpEntry { name: "std", samples, apply: |x| Ok(vec![x[0].std(&[-1], 0.0, false)?]) },
    OpEntry {
        name: "norm",
        samples,
        apply: |x| {
            let orders = [1.0, 2.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, 0.0];
            orders.iter().map(|&p| x[0].norm(p, &[0], false)).collect()
        },
    },
    OpEntry { name: "layer_norm", samples, apply: |x| Ok(vec![x[0].layer_norm(1, None, None, 1e-5)?]) },
    OpEntry { name: "rms_norm", samples, apply: |x| Ok(vec![x[0].rms_norm(1, None, 1e-5)?]) },
    OpEntry {
        name: "group_norm",
        samples: channels,
        apply: |x| Ok(vec![x[0].group_norm(2, Some(&x[1]), Some(&x[1]), 1e-5)?]),
    },
    OpEntry {
        name: "batch_norm",
        samples: channels,
        apply: |x| {
            let given = (&x[1], &x[1].abs()?);
            Ok(vec![x[0].batch_norm(None, Some(&x[1]), None, 1e-5)?, x[0].batch_norm(Some(given), None, None, 1e-5)?])
        },
    },
    OpEntry {
        name: "batch_statistics",
        samples,
        apply: |x| {
            let (mean, variance) = x[0].batch_statistics(1.0)?;
            Ok(vec![mean, variance])
        },
    },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[3, 1]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}

fn channels() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 2] = [&[3, 4, 2], &[5, 4]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64), SampleInput::new(&[4], DType::F64)]).collect()
}
