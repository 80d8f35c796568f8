//! Operators made of others: ranks that share a dimension exchange statistics of it, not data.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{OpEntry, SampleInput, dtype};
use crate::comm::implicitly;
use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};

/// The tensor itself without pending reductions, for operators that need it more than once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ReducePartials {
    name: &'static str,
    /// Dimensions that shall not be cut for it.
    dims: Vec<usize>,
}

impl Op for ReducePartials {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::OneTerm
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let dims: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
        let shared =
            (0..dims.len()).map(|d| if self.dims.contains(&d) { DimSharding::Never } else { DimSharding::Free });
        let signature = Signature::new(shared, [dims.clone()], [dims]);
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
    /// The tensor without pending reductions, brought about as is best for an operator along some dimensions.
    #[track_caller]
    pub(super) fn without_partials(&self, name: &'static str, dims: &[isize]) -> Result<DTensor> {
        // A dimension that there is not shall be found here, not by a part of the operator.
        let dims = dims.iter().map(|&d| self.resolve_dim(name, d)).collect::<Result<_>>()?;
        if !self.layout().is_partial() {
            return Ok(self.clone());
        }
        Ok(dispatch(&ReducePartials { name, dims }, &[self], Location::caller())?.swap_remove(0))
    }

    /// The tensor with its pending reductions carried out for all ranks at once, for results that all of them use again on
    /// the way back.
    #[track_caller]
    pub(super) fn all_reduced(&self, name: &'static str) -> Result<DTensor> {
        let site = Location::caller();
        implicitly(name, || self.reduced(site))
    }

    /// This tensor in f32 if it is of half precision: an operator of several steps is computed in f32 and rounds its result
    /// once. `None` for other types.
    #[track_caller]
    pub(super) fn widened(&self) -> Result<Option<DTensor>> {
        match self.dtype() {
            DType::F16 | DType::BF16 => self.to_dtype(DType::F32).map(Some),
            _ => Ok(None),
        }
    }

    /// The type of a result that this tensor, a weight and a bias have a part in.
    fn promoted_type(&self, weight: Option<&DTensor>, bias: Option<&DTensor>) -> DType {
        [weight, bias].into_iter().flatten().fold(self.dtype(), |dtype, t| dtype::promote(dtype, t.dtype()))
    }

    /// `exp(x)` divided by its sum along a dimension.
    #[track_caller]
    pub fn softmax(&self, dim: isize) -> Result<DTensor> {
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
        let exponentials = x.sub(&x.amax(&[dim], true)?)?.exp()?;
        exponentials.div(&exponentials.sum_of_positive(&[dim])?)
    }

    /// The logarithm of the softmax.
    #[track_caller]
    pub fn log_softmax(&self, dim: isize) -> Result<DTensor> {
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
        let shifted = x.sub(&x.amax(&[dim], true)?)?;
        shifted.sub(&shifted.exp()?.sum_of_positive(&[dim])?.log()?)
    }

    /// `log(sum(exp(x)))` over some dimensions (all for none named).
    #[track_caller]
    pub fn logsumexp(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
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
        // The result does not depend on the shift, so that no gradient goes through it. An infinite one would turn
        // everything into not-a-number.
        let shift = x.detach().amax(dims, true)?.all_reduced("logsumexp")?.nan_to_num(f64::NAN, 0.0, 0.0)?;
        let sum = x.sub(&shift)?.exp()?.sum_of_positive(dims)?.all_reduced("logsumexp")?;
        let kept = sum.log()?.add(&shift)?;
        if keepdim {
            return Ok(kept);
        }
        kept.sum(dims, false) // each sum has one term
    }

    /// The variance over some dimensions (all for none named), with divisor `n - correction`.
    #[track_caller]
    pub fn var(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<DTensor> {
        let x = self.without_partials("var", dims)?;
        if let Some(wide) = x.widened()? {
            return wide.var(dims, correction, keepdim)?.to_dtype(self.dtype());
        }
        let centred = x.sub(&x.mean(dims, true)?)?;
        let squares = centred.square()?.sum(dims, keepdim)?;
        let count = self.elem_count() as f64 / squares.elem_count().max(1) as f64;
        squares.div_scalar((count - correction).max(0.0))
    }

    /// The standard deviation over some dimensions (all for none named), with divisor `n - correction`.
    #[track_caller]
    pub fn std(&self, dims: &[isize], correction: f64, keepdim: bool) -> Result<DTensor> {
        let x = self.without_partials("std", dims)?;
        match x.widened()? {
            Some(wide) => wide.var(dims, correction, keepdim)?.root(2.0)?.to_dtype(self.dtype()),
            None => x.var(dims, correction, keepdim)?.root(2.0),
        }
    }

    /// The vector norm of an order (infinities included) over some dimensions (all for none named).
    #[track_caller]
    pub fn norm(&self, order: f64, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        dims.iter().try_for_each(|&d| self.resolve_dim("norm", d).map(drop))?;
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
            2.0 => x.square()?.sum(dims, keepdim)?.root(2.0),
            p => x.pow_scalar(p)?.sum(dims, keepdim)?.root(p),
        }
    }

    /// The root of an order, whose gradient at zero is taken as zero: there a spread or a norm cannot fall.
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

    /// Mean 0 and variance 1 over the last `dims` dimensions, times a weight, plus a bias.
    #[track_caller]
    pub fn layer_norm(
        &self,
        dims: usize,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        let last = self.last_dims("layer_norm", dims)?;
        if dims == 1
            && let Some(normal) = self.layer_norm_rows(weight, bias, eps)?
        {
            return Ok(normal);
        }
        let x = self.without_partials("layer_norm", &last)?;
        if let Some(wide) = x.widened()? {
            return wide.layer_norm(dims, weight, bias, eps)?.to_dtype(self.promoted_type(weight, bias));
        }
        let centred = x.sub(&x.mean(&last, true)?)?;
        let variance = centred.square()?.mean(&last, true)?;
        let normal = centred.mul(&variance.add_scalar(eps)?.rsqrt()?)?;
        let scaled = weight.map_or(Ok(normal.clone()), |w| normal.mul(w))?;
        bias.map_or(Ok(scaled.clone()), |b| scaled.add(b))
    }

    /// Mean square 1 over the last `dims` dimensions, times a weight.
    #[track_caller]
    pub fn rms_norm(&self, dims: usize, weight: Option<&DTensor>, eps: f64) -> Result<DTensor> {
        let last = self.last_dims("rms_norm", dims)?;
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

    /// Mean 0 and variance 1 over groups of the channels of `[n, channels, ...]`, times a weight and plus a bias per channel.
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
        normal.per_channel(weight, bias)
    }

    /// Mean 0 and variance 1 per channel of `[n, channels, ...]`, times a weight and plus a bias per channel. Mean and
    /// variance are those given, or those of the whole batch, whatever ranks share it.
    #[track_caller]
    pub fn batch_norm(
        &self,
        statistics: Option<(&DTensor, &DTensor)>,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        if let Some(wide) = self.widened()? {
            return wide.batch_norm(statistics, weight, bias, eps)?.to_dtype(self.promoted_type(weight, bias));
        }
        let own;
        let (mean, variance) = match statistics {
            Some(given) => given,
            None => {
                own = self.channel_statistics("batch_norm", 0.0)?;
                (&own.0, &own.1)
            }
        };
        let centred = self.sub(&self.channels(mean)?)?;
        let normal = centred.mul(&self.channels(&variance.add_scalar(eps)?.rsqrt()?)?)?;
        normal.per_channel(weight, bias)
    }

    /// The mean and the variance (with divisor `n - correction`) of every channel of `[n, channels, ...]`.
    #[track_caller]
    pub fn batch_statistics(&self, correction: f64) -> Result<(DTensor, DTensor)> {
        self.channel_statistics("batch_statistics", correction)
    }

    #[track_caller]
    fn channel_statistics(&self, name: &'static str, correction: f64) -> Result<(DTensor, DTensor)> {
        if self.ndim() < 2 {
            return Err(self.bad_dims(name, &[], "[n, channels, ...]"));
        }
        let others: Vec<isize> = (0..self.ndim() as isize).filter(|&d| d != 1).collect();
        Ok((self.mean(&others, false)?, self.var(&others, correction, false)?))
    }

    /// A vector with one number per channel as it stands beside `[n, channels, ...]`.
    #[track_caller]
    fn channels(&self, vector: &DTensor) -> Result<DTensor> {
        vector.reshape(&[vec![-1], vec![1; self.ndim() - 2]].concat())
    }

    #[track_caller]
    fn per_channel(&self, weight: Option<&DTensor>, bias: Option<&DTensor>) -> Result<DTensor> {
        let scaled = weight.map_or(Ok(self.clone()), |w| self.mul(&self.channels(w)?))?;
        bias.map_or(Ok(scaled.clone()), |b| scaled.add(&self.channels(b)?))
    }

    fn last_dims(&self, name: &str, dims: usize) -> Result<Vec<isize>> {
        if dims == 0 || dims > self.ndim() {
            let found = format!("{dims} dimension(s) in {name} of {}", self.layout());
            return Err(ErrorKind::Argument.error(
                "dimensions",
                found,
                "some of the last ones",
                "normalise at least one",
            ));
        }
        Ok((1..=dims as isize).map(|d| -d).collect())
    }
}

pub(super) const OPS: &[OpEntry] = &[
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
