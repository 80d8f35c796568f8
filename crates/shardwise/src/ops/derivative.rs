//! What the gradients of elementwise functions share: derivatives of functions of one number, and gradients of functions of two
//! tensors that broadcast.

use std::panic::Location;

use candle_core::Tensor;

use crate::comm::implicitly;
use crate::error::Result;
use crate::layout::Layout;
use crate::placement::Placement;
use crate::tensor::{DTensor, Keeps, Saved};
use shardwise_kernels::{ComputeType, ViaF64, pointwise};

/// The derivative of a function of one number.
pub(super) struct Derivative {
    /// Its value at a number.
    pub(super) at: fn(f64) -> f64,
    /// The same of a tensor, made of operators, which have derivatives themselves.
    pub(super) formula: fn(&DTensor) -> Result<DTensor>,
    /// A kernel for f32: the derivative at the first tensor, times the second. `None`: computed from `at`.
    pub(super) kernel: Option<fn(&Tensor, &Tensor) -> Result<Tensor>>,
}

impl Derivative {
    /// The derivative at every element of `x`, times that of `g`.
    pub(super) fn times(&self, x: &Tensor, g: &Tensor) -> Result<Tensor> {
        if let Some(kernel) = self.kernel {
            return kernel(x, g);
        }
        let at = self.at;
        let product = ViaF64(move |[x, g]: [f64; 2]| g * at(x), |[_, g]: [i64; 2]| g);
        Ok(pointwise(product, [x, g], x.dims(), ComputeType::float_for([x.dtype(), g.dtype()]), g.dtype())?)
    }
}

/// Zeros like a tensor, without its partial sums.
pub(super) fn zero(x: &DTensor) -> Result<DTensor> {
    DTensor::full_in(&x.layout().settled(), 0.0, x.dtype(), x.device_mesh())
}

/// The gradient with respect to one operand of a function of two, from both operands and the gradient of the value.
pub(super) type OfTwo = fn(&DTensor, &DTensor, &DTensor) -> Result<DTensor>;

/// How the gradient with respect to one operand of a function of two tensors is computed.
#[derive(Clone, Copy)]
pub(super) enum OperandGradient {
    /// From the gradient of the value alone.
    Alone(fn(&DTensor) -> Result<DTensor>),
    /// From operands that are used once at most, so that they are taken as they are placed: products are linear in a partial sum.
    Once(OfTwo),
    /// From operands that are used several times and are brought beside the gradient before.
    Several(OfTwo),
}

/// What the gradients of a function of two tensors need.
pub(super) fn of_two_keeps(of: &[OperandGradient; 2]) -> Keeps {
    let alone = of.iter().all(|of| matches!(of, OperandGradient::Alone(_)));
    if alone { Keeps::Nothing } else { Keeps::Inputs }
}

/// The gradients of a function of two tensors that broadcast.
#[track_caller]
pub(super) fn of_two(
    name: &'static str,
    of: &[OperandGradient; 2],
    saved: &Saved<'_>,
    gradient: &DTensor,
) -> Result<Vec<Option<DTensor>>> {
    let mut found = Vec::new();
    for (i, of) in of.iter().enumerate() {
        if !saved.wants(i) {
            found.push(None);
            continue;
        }
        let stretched = match of {
            OperandGradient::Alone(of) => of(gradient)?,
            OperandGradient::Once(of) => of(&saved.input(0), &saved.input(1), gradient)?,
            OperandGradient::Several(of) => {
                of(&beside(name, saved, 0, gradient)?, &beside(name, saved, 1, gradient)?, gradient)?
            }
        };
        found.push(Some(back_to(&stretched, saved, i)?));
    }
    Ok(found)
}

/// An input as a formula that uses it several times needs it beside the gradient, so that it is moved once: without partial
/// sums and, if it is smaller than the gradient, sharded as the gradient is.
#[track_caller]
fn beside(name: &'static str, saved: &Saved<'_>, i: usize, gradient: &DTensor) -> Result<DTensor> {
    let input = saved.input(i);
    let (own, of) = (input.layout(), gradient.layout());
    let new = of.shape().len() - own.shape().len();
    let smaller = input.elem_count() < gradient.elem_count();
    let placement = |axis: usize| match (&own.placements()[axis], &of.placements()[axis]) {
        (Placement::Replicate, _) => Placement::Replicate,
        (now, like) if now.is_partial() || smaller && like.is_shard(None) => {
            let same = |d: &usize| own.shape()[*d] == of.shape()[*d + new];
            let at = like.shard_dim().and_then(|d| d.checked_sub(new)).filter(same);
            at.map_or(Placement::Replicate, |d| like.with_dim(d))
        }
        (now, _) => now.clone(),
    };
    let placements: Vec<Placement> = (0..own.mesh().ndim()).map(placement).collect();
    if placements == own.placements() {
        return Ok(input);
    }
    // Ragged sizes need not fit other shards.
    let to = Layout::new(own.mesh(), own.shape(), placements).unwrap_or_else(|_| own.settled());
    let site = Location::caller();
    implicitly(name, || input.to_layout_at(&to, site))
}

/// The gradient of what an input was stretched to, as that of the input: summed over what was stretched, in its type.
#[track_caller]
pub(super) fn back_to(gradient: &DTensor, saved: &Saved<'_>, i: usize) -> Result<DTensor> {
    let shape = saved.shape(i);
    let new = gradient.rank() - shape.len();
    let stretched = |d: usize| d >= new && shape[d - new] == 1 && gradient.shape()[d] != 1;
    let kept: Vec<isize> = (0..gradient.rank()).filter(|&d| stretched(d)).map(|d| d as isize).collect();
    let mut summed = if kept.is_empty() { gradient.clone() } else { gradient.sum(&kept, true)? };
    if new > 0 {
        summed = summed.sum(&(0..new as isize).collect::<Vec<_>>(), false)?;
    }
    summed.to_dtype(saved.dtype(i))
}
