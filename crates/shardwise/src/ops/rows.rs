//! Softmax and norms over a last dimension that every rank holds whole: one pass over memory, forward and back. Where the
//! dimension is cut, the operators of `statistics` exchange statistics instead.

use std::panic::Location;

use candle_core::Tensor;

use super::scalar::Scalar;
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::{Shared, Signature};
use crate::tensor::{DTensor, Keeps, SavedTensors, is_recording};
use shardwise_kernels::rows::{
    layer_norm_backward_rows, layer_norm_rows, log_softmax_backward_rows, log_softmax_rows, logsumexp_rows,
    rms_norm_backward_rows, rms_norm_rows, softmax_backward_rows, softmax_rows,
};

/// A function of every row. Norms have a weight as second input and a bias as third, or only a weight, or neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Rows {
    Softmax,
    LogSoftmax,
    LogSumExp,
    LayerNorm(Scalar),
    RmsNorm(Scalar),
}

/// The way back. Inputs: the result of a softmax, or the input (and weight) of a norm; and the gradient of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RowsBack(Rows);

impl DTensor {
    /// Whether every rank holds rows along `dim` whole.
    pub(super) fn has_rows(&self, dim: isize) -> bool {
        let last = self.ndim() as isize - 1;
        let along = dim == last || dim == -1;
        along && last >= 0 && self.dtype().is_float() && self.layout().shard_order(last as usize).is_empty()
    }

    #[track_caller]
    pub(super) fn softmax_rows(&self) -> Result<DTensor> {
        rows(Rows::Softmax, &[self])
    }

    #[track_caller]
    pub(super) fn log_softmax_rows(&self) -> Result<DTensor> {
        rows(Rows::LogSoftmax, &[self])
    }

    /// With a last dimension of size 1.
    #[track_caller]
    pub(super) fn logsumexp_rows(&self) -> Result<DTensor> {
        rows(Rows::LogSumExp, &[self])
    }

    /// `None` if the operands do not suit one pass.
    #[track_caller]
    pub(super) fn layer_norm_rows(
        &self,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<Option<DTensor>> {
        let inputs: Vec<&DTensor> = [Some(self), weight, bias].into_iter().flatten().collect();
        if weight.is_none() && bias.is_some() || !self.suits(&inputs) {
            return Ok(None);
        }
        rows(Rows::LayerNorm(Scalar(eps)), &inputs).map(Some)
    }

    /// `None` if the operands do not suit one pass.
    #[track_caller]
    pub(super) fn rms_norm_rows(&self, weight: Option<&DTensor>, eps: f64) -> Result<Option<DTensor>> {
        let inputs: Vec<&DTensor> = [Some(self), weight].into_iter().flatten().collect();
        if !self.suits(&inputs) {
            return Ok(None);
        }
        rows(Rows::RmsNorm(Scalar(eps)), &inputs).map(Some)
    }

    fn suits(&self, inputs: &[&DTensor]) -> bool {
        let vector = |t: &&DTensor| t.dtype() == self.dtype() && t.shape() == &self.shape()[self.ndim() - 1..];
        self.has_rows(-1) && inputs[1..].iter().all(vector)
    }
}

#[track_caller]
fn rows(op: Rows, inputs: &[&DTensor]) -> Result<DTensor> {
    Ok(dispatch(&op, inputs, Location::caller())?.swap_remove(0))
}

/// The dimensions of a tensor of rows: all but the last may be shared.
fn dims(ndim: usize) -> (Vec<Shared>, Vec<Option<usize>>) {
    let shared = (0..ndim).map(|d| if d + 1 == ndim { Shared::Never } else { Shared::Free }).collect();
    (shared, (0..ndim).map(Some).collect())
}

impl Op for Rows {
    fn name(&self) -> &'static str {
        match self {
            Rows::Softmax => "softmax",
            Rows::LogSoftmax => "log_softmax",
            Rows::LogSumExp => "logsumexp",
            Rows::LayerNorm(_) => "layer_norm",
            Rows::RmsNorm(_) => "rms_norm",
        }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let (shared, all) = dims(x.shape.len());
        let vectors = inputs[1..].iter().map(|_| vec![None]);
        let (mut shape, mut output) = (x.shape.clone(), all.clone());
        if *self == Rows::LogSumExp {
            let last = shape.len() - 1;
            (shape[last], output[last]) = (1, None);
        }
        let signature = Signature::new(shared, std::iter::once(all).chain(vectors), [output]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        Ok(vec![match *self {
            Rows::Softmax => softmax_rows(x)?,
            Rows::LogSoftmax => log_softmax_rows(x)?,
            Rows::LogSumExp => logsumexp_rows(x)?,
            Rows::LayerNorm(eps) => layer_norm_rows(x, inputs.get(1), inputs.get(2), eps.0)?,
            Rows::RmsNorm(eps) => rms_norm_rows(x, inputs.get(1), eps.0)?,
        }])
    }

    fn gradient(&self) -> Gradient<Self> {
        match self {
            Rows::LogSumExp => Gradient::From(Keeps::All, |_, saved, gradients| {
                let slope = saved.input(0).sub(&saved.output(0))?.exp()?;
                Ok(vec![gradients[0].as_ref().map(|g| slope.mul(g)).transpose()?])
            }),
            Rows::Softmax | Rows::LogSoftmax => {
                Gradient::From(Keeps::Outputs, |op, saved, gradients| op.backward(&[saved.output(0)], saved, gradients))
            }
            Rows::LayerNorm(_) | Rows::RmsNorm(_) => Gradient::From(Keeps::Inputs, |op, saved, gradients| {
                let kept: Vec<DTensor> = (0..saved.num_inputs().min(2)).map(|i| saved.input(i)).collect();
                op.backward(&kept, saved, gradients)
            }),
        }
    }
}

impl Rows {
    /// The gradient in one pass over memory, or as a formula where it is recorded.
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
        let found = dispatch(&RowsBack(*self), &inputs, Location::caller())?;
        Ok(found.into_iter().map(Some).take(saved.num_inputs()).collect())
    }

    /// The gradient made of operators that have gradients themselves.
    #[track_caller]
    fn formula(&self, saved: &SavedTensors<'_>, g: &DTensor) -> Result<Vec<Option<DTensor>>> {
        let over = |t: &DTensor| t.sum(&[-1], true);
        let eps = match self {
            Rows::Softmax => {
                let y = saved.output(0);
                return Ok(vec![Some(y.mul(&g.sub(&over(&g.mul(&y)?)?)?)?)]);
            }
            Rows::LogSoftmax => {
                let y = saved.output(0);
                return Ok(vec![Some(g.sub(&y.exp()?.mul(&over(g)?)?)?)]);
            }
            Rows::LogSumExp => unreachable!("has one formula"),
            Rows::LayerNorm(eps) | Rows::RmsNorm(eps) => eps.0,
        };
        let x = saved.input(0);
        let centred = if matches!(self, Rows::LayerNorm(_)) { x.sub(&x.mean(&[-1], true)?)? } else { x };
        let scale = centred.square()?.mean(&[-1], true)?.add_scalar(eps)?.rsqrt()?;
        let normal = centred.mul(&scale)?;
        let weighted = if saved.num_inputs() > 1 { g.mul(&saved.input(1))? } else { g.clone() };
        let mut inner = weighted.sub(&normal.mul(&weighted.mul(&normal)?.mean(&[-1], true)?)?)?;
        if matches!(self, Rows::LayerNorm(_)) {
            inner = inner.sub(&weighted.mean(&[-1], true)?)?;
        }
        let others: Vec<isize> = (0..g.ndim() as isize - 1).collect();
        let summed = |t: &DTensor| if others.is_empty() { Ok(t.clone()) } else { t.sum(&others, false) };
        let mut found = vec![Some(inner.mul(&scale)?)];
        if saved.num_inputs() > 1 {
            found.push(Some(summed(&g.mul(&normal)?)?));
        }
        if saved.num_inputs() > 2 {
            found.push(Some(summed(g)?));
        }
        Ok(found)
    }
}

impl Op for RowsBack {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Outputs: the gradient of the input and, of a norm, those of the weight and the bias, summed over the rows.
    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, g) = (&inputs[0], &inputs[inputs.len() - 1]);
        let (_, all) = dims(x.shape.len());
        let last = x.shape.len() - 1;
        let shared = (0..=last).map(|d| if d == last { Shared::Never } else { Shared::Reduces(ReduceOp::Sum) });
        let vectors = inputs[1..inputs.len() - 1].iter().map(|_| vec![None]);
        let named = std::iter::once(all.clone()).chain(vectors).chain([all.clone()]);
        let summed = match self.0 {
            Rows::LayerNorm(_) => 2,
            Rows::RmsNorm(_) => inputs.len() - 2,
            _ => 0,
        };
        let made = std::iter::once(all).chain((0..summed).map(|_| vec![None]));
        let pending = |op| (0..inputs.len()).map(move |i| (i + 1 == inputs.len()).then_some(op));
        let signature = Signature::new(shared, named, made).passing(pending(ReduceOp::Sum), ReduceOp::Sum);
        let vector = TensorMeta { shape: vec![x.shape[last]], dtype: g.dtype };
        let outputs = std::iter::once(g.clone()).chain((0..summed).map(|_| vector.clone()));
        Ok(OpPlan { signature, outputs: outputs.collect() })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let (x, g) = (&inputs[0], &inputs[inputs.len() - 1]);
        let weight = inputs[1..inputs.len() - 1].first();
        Ok(match self.0 {
            Rows::Softmax => vec![softmax_backward_rows(x, g)?],
            Rows::LogSoftmax => vec![log_softmax_backward_rows(x, g)?],
            Rows::LogSumExp => unreachable!("has a formula"),
            Rows::LayerNorm(eps) => {
                let (dx, dweight, dbias) = layer_norm_backward_rows(x, weight, g, eps.0)?;
                vec![dx, dweight, dbias]
            }
            Rows::RmsNorm(eps) => {
                let (dx, dweight) = rms_norm_backward_rows(x, weight, g, eps.0)?;
                std::iter::once(dx).chain(dweight).collect()
            }
        })
    }

    /// Runs in backward passes that are not recorded; recorded ones use `Rows::formula`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
