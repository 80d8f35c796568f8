//! Fused softmax and norms over a last dimension that every rank holds whole: one pass over memory in the forward and one in
//! the backward pass. If that dimension is sharded, the composed operators in `normalization` exchange statistics instead.

use std::panic::Location;

use candle_core::Tensor;

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch, dispatch_onto};
use crate::ops::arguments::scalar::Scalar;
use crate::ops::gradients::accumulate::target;
use crate::placement::ReduceOp;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::rows::{
    add_layer_norm_backward_rows, add_rms_norm_backward_rows, layer_norm_backward_rows, layer_norm_rows,
    log_softmax_backward_rows, log_softmax_rows, logsumexp_rows, rms_norm_backward_rows, rms_norm_rows,
    softmax_backward_rows, softmax_rows,
};

/// A fused function of every row. Inputs of norms: the tensor, then optionally a weight, then optionally a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops) enum RowOp {
    Softmax,
    LogSoftmax,
    LogSumExp,
    LayerNorm(Scalar),
    RmsNorm(Scalar),
}

/// The backward pass of a [`RowOp`]. Inputs: the result of a softmax, or the input (and weight) of a norm; then the gradient of
/// the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops) struct RowOpBackward(pub(in crate::ops) RowOp);

impl DTensor {
    /// Whether `dim` is the last dimension, not sharded, of a floating-point tensor.
    pub(in crate::ops) fn holds_whole_rows(&self, dim: isize) -> bool {
        let last = self.ndim() as isize - 1;
        let along = dim == last || dim == -1;
        along && last >= 0 && self.dtype().is_float() && self.layout().shard_order(last as usize).is_empty()
    }

    #[track_caller]
    pub(in crate::ops) fn softmax_rows(&self) -> Result<DTensor> {
        rows(RowOp::Softmax, &[self])
    }

    #[track_caller]
    pub(in crate::ops) fn log_softmax_rows(&self) -> Result<DTensor> {
        rows(RowOp::LogSoftmax, &[self])
    }

    /// Keeps the last dimension, with size 1.
    #[track_caller]
    pub(in crate::ops) fn logsumexp_rows(&self) -> Result<DTensor> {
        rows(RowOp::LogSumExp, &[self])
    }

    /// `None` if the operands are not of the types and shapes that the fused kernel takes.
    #[track_caller]
    pub(in crate::ops) fn layer_norm_rows(
        &self,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<Option<DTensor>> {
        let inputs: Vec<&DTensor> = [Some(self), weight, bias].into_iter().flatten().collect();
        if weight.is_none() && bias.is_some() || !self.fits_fused_kernel(&inputs) {
            return Ok(None);
        }
        rows(RowOp::LayerNorm(Scalar(eps)), &inputs).map(Some)
    }

    /// `None` if the operands are not of the types and shapes that the fused kernel takes.
    #[track_caller]
    pub(in crate::ops) fn rms_norm_rows(&self, weight: Option<&DTensor>, eps: f64) -> Result<Option<DTensor>> {
        let inputs: Vec<&DTensor> = [Some(self), weight].into_iter().flatten().collect();
        if !self.fits_fused_kernel(&inputs) {
            return Ok(None);
        }
        rows(RowOp::RmsNorm(Scalar(eps)), &inputs).map(Some)
    }

    pub(in crate::ops) fn fits_fused_kernel(&self, inputs: &[&DTensor]) -> bool {
        let vector = |t: &&DTensor| t.dtype() == self.dtype() && t.shape() == &self.shape()[self.ndim() - 1..];
        self.holds_whole_rows(-1) && inputs[1..].iter().all(vector)
    }
}

#[track_caller]
fn rows(op: RowOp, inputs: &[&DTensor]) -> Result<DTensor> {
    Ok(dispatch(&op, inputs, Location::caller())?.swap_remove(0))
}

/// The dimensions of a tensor of rows: all but the last may be sharded.
fn dims(ndim: usize) -> (Vec<DimSharding>, Vec<Option<usize>>) {
    let sharding = (0..ndim).map(|d| if d + 1 == ndim { DimSharding::Never } else { DimSharding::Free }).collect();
    (sharding, (0..ndim).map(Some).collect())
}

impl Op for RowOp {
    fn name(&self) -> &'static str {
        match self {
            RowOp::Softmax => "softmax",
            RowOp::LogSoftmax => "log_softmax",
            RowOp::LogSumExp => "logsumexp",
            RowOp::LayerNorm(_) => "layer_norm",
            RowOp::RmsNorm(_) => "rms_norm",
        }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let (sharding, all) = dims(x.shape.len());
        let vectors = inputs[1..].iter().map(|_| vec![None]);
        let (mut shape, mut output) = (x.shape.clone(), all.clone());
        if *self == RowOp::LogSumExp {
            let last = shape.len() - 1;
            (shape[last], output[last]) = (1, None);
        }
        let signature = Signature::new(sharding, std::iter::once(all).chain(vectors), [output]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        Ok(vec![match *self {
            RowOp::Softmax => softmax_rows(x)?,
            RowOp::LogSoftmax => log_softmax_rows(x)?,
            RowOp::LogSumExp => logsumexp_rows(x)?,
            RowOp::LayerNorm(eps) => layer_norm_rows(x, inputs.get(1), inputs.get(2), eps.0)?,
            RowOp::RmsNorm(eps) => rms_norm_rows(x, inputs.get(1), eps.0)?,
        }])
    }

    fn gradient(&self) -> Gradient<Self> {
        match self {
            RowOp::LogSumExp => Gradient::From(SaveForBackward::All, |_, saved, gradients| {
                let slope = saved.input(0).sub(&saved.output(0))?.exp()?;
                Ok(vec![gradients[0].as_ref().map(|g| slope.mul(g)).transpose()?])
            }),
            RowOp::Softmax | RowOp::LogSoftmax => Gradient::From(SaveForBackward::Outputs, |op, saved, gradients| {
                op.backward(&[saved.output(0)], saved, gradients)
            }),
            RowOp::LayerNorm(_) | RowOp::RmsNorm(_) => {
                Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
                    let kept: Vec<DTensor> = (0..saved.num_inputs().min(2)).map(|i| saved.input(i)).collect();
                    op.backward(&kept, saved, gradients)
                })
            }
        }
    }
}

impl RowOp {
    /// The gradient in one pass over memory, or as a differentiable formula if the backward pass is recorded.
    fn backward(
        &self,
        kept: &[DTensor],
        saved: &SavedTensors<'_>,
        gradients: &[Option<DTensor>],
    ) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
        if is_recording() {
            return self.formula(saved, g);
        }
        let inputs: Vec<&DTensor> = kept.iter().chain([g]).collect();
        let op = RowOpBackward(*self);
        let site = Location::caller();
        let found = match self {
            RowOp::LayerNorm(_) | RowOp::RmsNorm(_) => saved.with_sum(0, |sum| {
                let kernel = |sum: &Tensor, is_exclusive: bool, inputs: &[Tensor], _: &KernelContext<'_>| {
                    op.run_onto(&target(sum, is_exclusive)?, inputs)
                };
                dispatch_onto(&op, &inputs, sum, &kernel, false, site)
            })?,
            _ => dispatch(&op, &inputs, site)?,
        };
        Ok(found.into_iter().map(Some).take(saved.num_inputs()).collect())
    }

    /// The gradient in terms of differentiable operators (double backward).
    #[track_caller]
    fn formula(&self, saved: &SavedTensors<'_>, g: &DTensor) -> Result<Vec<Option<DTensor>>> {
        let over = |t: &DTensor| t.sum(&[-1], true);
        match self {
            RowOp::Softmax => {
                let y = saved.output(0);
                return Ok(vec![Some(y.mul(&g.sub(&over(&g.mul(&y)?)?)?)?)]);
            }
            RowOp::LogSoftmax => {
                let y = saved.output(0);
                return Ok(vec![Some(g.sub(&y.exp()?.mul(&over(g)?)?)?)]);
            }
            RowOp::LogSumExp => unreachable!("has one formula"),
            RowOp::LayerNorm(_) | RowOp::RmsNorm(_) => {}
        }
        let weight = (saved.num_inputs() > 1).then(|| saved.input(1));
        let found = self.norm_formula(&saved.input(0), weight.as_ref(), g)?;
        Ok(found.into_iter().take(saved.num_inputs()).map(Some).collect())
    }

    /// The gradients of the input of a norm, of the weight if there is one, and of the bias, in terms of differentiable operators.
    #[track_caller]
    pub(in crate::ops) fn norm_formula(
        &self,
        x: &DTensor,
        weight: Option<&DTensor>,
        g: &DTensor,
    ) -> Result<Vec<DTensor>> {
        let (eps, is_layer) = match self {
            RowOp::LayerNorm(eps) => (eps.0, true),
            RowOp::RmsNorm(eps) => (eps.0, false),
            other => unreachable!("{other:?} is not a norm"),
        };
        let centred = if is_layer { x.sub(&x.mean(&[-1], true)?)? } else { x.clone() };
        let scale = centred.square()?.mean(&[-1], true)?.add_scalar(eps)?.rsqrt()?;
        let normal = centred.mul(&scale)?;
        let weighted = weight.map_or(Ok(g.clone()), |weight| g.mul(weight))?;
        let mut inner = weighted.sub(&normal.mul(&weighted.mul(&normal)?.mean(&[-1], true)?)?)?;
        if is_layer {
            inner = inner.sub(&weighted.mean(&[-1], true)?)?;
        }
        let others: Vec<isize> = (0..g.ndim() as isize - 1).collect();
        let summed = |t: &DTensor| if others.is_empty() { Ok(t.clone()) } else { t.sum(&others, false) };
        let mut found = vec![inner.mul(&scale)?];
        if weight.is_some() {
            found.push(summed(&g.mul(&normal)?)?);
            found.push(summed(g)?);
        }
        Ok(found)
    }
}

impl RowOpBackward {
    /// As `run` of a norm, with the gradient of its input added to `sum`.
    pub(in crate::ops) fn run_onto(self, sum: &Tensor, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let (x, g) = (&inputs[0], &inputs[inputs.len() - 1]);
        let weight = inputs[1..inputs.len() - 1].first();
        let first = std::iter::once(sum.clone());
        Ok(match self.0 {
            RowOp::LayerNorm(eps) => {
                let (dweight, dbias) = add_layer_norm_backward_rows(sum, x, weight, g, eps.0)?;
                first.chain([dweight, dbias]).collect()
            }
            RowOp::RmsNorm(eps) => first.chain(add_rms_norm_backward_rows(sum, x, weight, g, eps.0)?).collect(),
            _ => unreachable!("a sum for norms only"),
        })
    }
}

impl Op for RowOpBackward {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Outputs: the gradient of the input and, of a norm, those of the weight and the bias, summed over the rows.
    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, g) = (&inputs[0], &inputs[inputs.len() - 1]);
        let (_, all) = dims(x.shape.len());
        let last = x.shape.len() - 1;
        let sharding =
            (0..=last).map(|d| if d == last { DimSharding::Never } else { DimSharding::Reduces(ReduceOp::Sum) });
        let vectors = inputs[1..inputs.len() - 1].iter().map(|_| vec![None]);
        let named = std::iter::once(all.clone()).chain(vectors).chain([all.clone()]);
        let summed = match self.0 {
            RowOp::LayerNorm(_) => 2,
            RowOp::RmsNorm(_) => inputs.len() - 2,
            _ => 0,
        };
        let made = std::iter::once(all).chain((0..summed).map(|_| vec![None]));
        let partial_gradient = |op| (0..inputs.len()).map(move |i| (i + 1 == inputs.len()).then_some(op));
        let signature =
            Signature::new(sharding, named, made).allow_partial(partial_gradient(ReduceOp::Sum), ReduceOp::Sum);
        let vector = TensorMeta { shape: vec![x.shape[last]], dtype: g.dtype };
        let outputs = std::iter::once(g.clone()).chain((0..summed).map(|_| vector.clone()));
        Ok(OpPlan { signature, outputs: outputs.collect() })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, g) = (&inputs[0], &inputs[inputs.len() - 1]);
        let weight = inputs[1..inputs.len() - 1].first();
        Ok(match self.0 {
            RowOp::Softmax => vec![softmax_backward_rows(x, g)?],
            RowOp::LogSoftmax => vec![log_softmax_backward_rows(x, g)?],
            RowOp::LogSumExp => unreachable!("has a formula"),
            RowOp::LayerNorm(eps) => {
                let (dx, dweight, dbias) = layer_norm_backward_rows(x, weight, g, eps.0)?;
                vec![dx, dweight, dbias]
            }
            RowOp::RmsNorm(eps) => {
                let (dx, dweight) = rms_norm_backward_rows(x, weight, g, eps.0)?;
                std::iter::once(dx).chain(dweight).collect()
            }
        })
    }

    /// Runs in backward passes that are not recorded; recorded ones use `RowOp::formula`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
