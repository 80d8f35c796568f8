//! Gradients of elementwise functions: derivatives of functions of one number, and gradients of functions of two tensors that
//! broadcast.

use std::panic::Location;

use candle_core::Tensor;

use crate::comm::record_implicit_operator;
use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::Signature;
use crate::tensor::{DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::{ComputeType, ViaF64, pointwise};

/// The derivative of a function of one number.
pub(in crate::ops) struct Derivative {
    /// The derivative at a number.
    pub(in crate::ops) at: fn(f64) -> f64,
    /// The derivative of a tensor in terms of operators, which are differentiable themselves (double backward).
    pub(in crate::ops) formula: fn(&DTensor) -> Result<DTensor>,
    /// An f32 kernel: the derivative at the first tensor, times the second. `None`: computed in f64 with `at`.
    pub(in crate::ops) kernel: Option<fn(&Tensor, &Tensor) -> Result<Tensor>>,
}

impl Derivative {
    /// Multiplies `g` elementwise by the derivative at `x`.
    pub(in crate::ops) fn times(&self, x: &Tensor, g: &Tensor) -> Result<Tensor> {
        if let Some(kernel) = self.kernel {
            return kernel(x, g);
        }
        let at = self.at;
        let product = ViaF64(move |[x, g]: [f64; 2]| g * at(x), |[_, g]: [i64; 2]| g);
        Ok(pointwise(product, [x, g], x.dims(), ComputeType::float_for([x.dtype(), g.dtype()]), g.dtype())?)
    }
}

/// An elementwise operator of one tensor with a [`Derivative`], which is its backward pass.
pub(in crate::ops) trait Differentiable: Op + Copy {
    /// `None` if it is not differentiable.
    fn derivative(self) -> Option<&'static Derivative>;

    /// The gradient of the argument `x` from that of the result.
    ///
    /// # Panics
    /// If the operator is not differentiable.
    #[track_caller]
    fn input_gradient(self, x: &DTensor, g: &DTensor) -> Result<DTensor> {
        if is_recording() {
            let derivative = self.derivative().expect("of functions that are differentiable");
            return g.mul(&(derivative.formula)(x)?);
        }
        Ok(dispatch(&DerivativeTimes(self), &[x, g], Location::caller())?.swap_remove(0))
    }

    /// What [`Op::gradient`] returns for it.
    fn gradient_by_derivative(self) -> Gradient<Self> {
        if self.derivative().is_none() {
            return Gradient::NotDifferentiable;
        }
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            Ok(vec![Some(op.input_gradient(&saved.input(0), g)?)])
        })
    }
}

/// Backward pass of a [`Differentiable`] operator in one pass over memory: the derivative at the first input, times the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DerivativeTimes<F>(F);

impl<F: Differentiable> Op for DerivativeTimes<F> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, g) = (&inputs[0], &inputs[1]);
        // Linear in the gradient, so its partial sums pass.
        let signature = Signature::pointwise(&[&x.shape, &g.shape], &x.shape)
            .allow_partial([None, Some(ReduceOp::Sum)], ReduceOp::Sum)
            .allow_partial([None, Some(ReduceOp::Avg)], ReduceOp::Avg);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype: g.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let derivative = self.0.derivative().expect("run for functions that have one");
        Ok(vec![derivative.times(&inputs[0], &inputs[1])?])
    }

    /// Runs in backward passes that are not recorded; recorded ones use [`Derivative::formula`].
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// Zeros in the shape and layout of a tensor; replicated along axes where the tensor is partial.
pub(in crate::ops) fn zero(x: &DTensor) -> Result<DTensor> {
    DTensor::full_in(&x.layout().reduced(), 0.0, x.dtype(), x.device_mesh())
}

/// Computes the gradient with respect to one operand, from both operands and the gradient of the result.
pub(in crate::ops) type OperandGradientFn = fn(&DTensor, &DTensor, &DTensor) -> Result<DTensor>;

/// How the gradient with respect to one operand of a function of two tensors is computed.
#[derive(Clone, Copy)]
pub(in crate::ops) enum OperandGradient {
    /// Only from the gradient of the result.
    GradientOnly(fn(&DTensor) -> Result<DTensor>),
    /// From a formula that is linear in each operand it uses, so that partial operands can be used unreduced.
    LinearInOperands(OperandGradientFn),
    /// From a formula that uses operands several times. They are redistributed to the layout of the gradient once, up front.
    Nonlinear(OperandGradientFn),
}

/// Which tensors the gradients of a function of two tensors need.
pub(in crate::ops) fn saved_operands(of: &[OperandGradient; 2]) -> SaveForBackward {
    let alone = of.iter().all(|of| matches!(of, OperandGradient::GradientOnly(_)));
    if alone { SaveForBackward::Nothing } else { SaveForBackward::Inputs }
}

/// Computes the gradients of a function of two tensors that broadcast; `None` for operands without gradient.
#[track_caller]
pub(in crate::ops) fn operand_gradients(
    name: &'static str,
    of: &[OperandGradient; 2],
    saved: &SavedTensors<'_>,
    gradient: &DTensor,
) -> Result<Vec<Option<DTensor>>> {
    let mut found = Vec::new();
    for (i, of) in of.iter().enumerate() {
        if !saved.needs_input_grad(i) {
            found.push(None);
            continue;
        }
        let stretched = match of {
            OperandGradient::GradientOnly(of) => of(gradient)?,
            OperandGradient::LinearInOperands(of) => of(&saved.input(0), &saved.input(1), gradient)?,
            OperandGradient::Nonlinear(of) => of(
                &placed_like_gradient(name, saved, 0, gradient)?,
                &placed_like_gradient(name, saved, 1, gradient)?,
                gradient,
            )?,
        };
        found.push(Some(unbroadcast(&stretched, saved, i)?));
    }
    Ok(found)
}

/// Redistributes a saved input once for a formula that uses it several times: partial placements are reduced, and an input
/// smaller than the gradient is sharded like the gradient.
#[track_caller]
fn placed_like_gradient(name: &'static str, saved: &SavedTensors<'_>, i: usize, gradient: &DTensor) -> Result<DTensor> {
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
    // Ragged sizes of the gradient may not fit the other shards of the input.
    let to = Layout::new(own.mesh(), own.shape(), placements).unwrap_or_else(|_| own.reduced());
    let site = Location::caller();
    record_implicit_operator(name, || input.to_layout_at(&to, site))
}

/// Turns the gradient of a broadcast input into that of the input: summed over the broadcast dimensions, in the type of the
/// input.
#[track_caller]
pub(in crate::ops) fn unbroadcast(gradient: &DTensor, saved: &SavedTensors<'_>, i: usize) -> Result<DTensor> {
    let shape = saved.shape(i);
    let new = gradient.ndim() - shape.len();
    let stretched = |d: usize| d >= new && shape[d - new] == 1 && gradient.shape()[d] != 1;
    let kept: Vec<isize> = (0..gradient.ndim()).filter(|&d| stretched(d)).map(|d| d as isize).collect();
    let mut summed = if kept.is_empty() { gradient.clone() } else { gradient.sum(&kept, true)? };
    if new > 0 {
        summed = summed.sum(&(0..new as isize).collect::<Vec<_>>(), false)?;
    }
    summed.to_dtype(saved.dtype(i))
}
