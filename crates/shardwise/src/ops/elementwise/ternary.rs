//! Elementwise functions of three tensors that broadcast: `where_cond`, `addcmul`, `clamp_tensor` and their kin.

use std::borrow::Cow;
use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::broadcast::{broadcast, broadcast_shape};
use crate::ops::arguments::scalar::Scalar;
use crate::ops::gradients::derivative::unbroadcast;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Operand, SaveForBackward};
use shardwise_kernels::{ComputeType, Number, PerType, ViaF64, pointwise};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Ternary {
    Where,
    Addcmul(Scalar),
    Addcdiv(Scalar),
    ClampTensor,
}

impl DTensor {
    /// Selects `a` where this tensor is nonzero, else `b`, as `torch.where(self, a, b)`; both are tensors or numbers.
    ///
    /// Elementwise: communicates only if the operands are sharded differently or the condition is partial.
    #[doc(alias = "torch.where")]
    #[track_caller]
    pub fn where_cond<'a, 'b>(&self, a: impl Into<Operand<'a>>, b: impl Into<Operand<'b>>) -> Result<DTensor> {
        let (a, b) = match (a.into(), b.into()) {
            (Operand::Tensor(a), b) => (Cow::Borrowed(a), b.tensor(a)?),
            (a, Operand::Tensor(b)) => (a.tensor(b)?, Cow::Borrowed(b)),
            (Operand::Number(a), Operand::Number(b)) => {
                let real = matches!(a, Number::Real(_)) || matches!(b, Number::Real(_));
                let number = |n: Number| Operand::from(if real { n.to_f64().into() } else { n });
                (number(a).tensor_alone(self)?, number(b).tensor_alone(self)?)
            }
        };
        call(Ternary::Where, [self, &a, &b])
    }

    /// Selects this tensor where `condition` is nonzero, else `other`, a tensor or a number.
    ///
    /// PyTorch's method `x.where(condition, other)`. Communicates as [`where_cond`](Self::where_cond) does.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::arange(-2.0..2.0, DType::F32, &mesh, [Shard(0)])?;
    ///     let y = x.where_(&x.gt(0.0)?, 0.5)?;
    ///     assert_eq!(y.full_tensor()?.to_vec1::<f32>()?, [0.5, 0.5, 0.5, 1.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "where")]
    #[track_caller]
    pub fn where_<'a>(&self, condition: &DTensor, other: impl Into<Operand<'a>>) -> Result<DTensor> {
        condition.where_cond(self, other)
    }

    /// Returns `self + value * a * b`. Elementwise.
    #[track_caller]
    pub fn addcmul(&self, a: &DTensor, b: &DTensor, value: f64) -> Result<DTensor> {
        call(Ternary::Addcmul(Scalar(value)), [self, a, b])
    }

    /// Returns `self + value * a / b`. Elementwise.
    #[track_caller]
    pub fn addcdiv(&self, a: &DTensor, b: &DTensor, value: f64) -> Result<DTensor> {
        call(Ternary::Addcdiv(Scalar(value)), [self, a, b])
    }

    /// Clamps each element between the elements of two tensors, PyTorch's `clamp(min, max)` with tensors. Elementwise.
    #[track_caller]
    pub fn clamp_tensor(&self, low: &DTensor, high: &DTensor) -> Result<DTensor> {
        call(Ternary::ClampTensor, [self, low, high])
    }

    /// Writes a number where `mask` is nonzero. Elementwise; tensor and mask broadcast.
    #[track_caller]
    pub fn masked_fill(&self, mask: &DTensor, value: impl Into<Number>) -> Result<DTensor> {
        let number = DTensor::full(
            value,
            (),
            self.dtype(),
            self.device_mesh(),
            vec![crate::placement::Placement::Replicate; self.device_mesh().ndim()],
        )?;
        call(Ternary::Where, [mask, &number, self])
    }

    /// Interpolates linearly: `self + weight * (b - self)` with a number or a tensor of weights. Elementwise.
    ///
    /// Weights from 0.5 on count from the other end, as in PyTorch: the result is exactly `b` where the weight is 1.
    #[track_caller]
    pub fn lerp<'a>(&self, b: &DTensor, weight: impl Into<Operand<'a>>) -> Result<DTensor> {
        let difference = b.sub(self)?;
        match weight.into() {
            Operand::Number(weight) => match weight.to_f64() {
                weight if weight.abs() < 0.5 => self.add(&difference.mul_scalar(weight)?),
                weight => b.sub(&difference.mul_scalar(1.0 - weight)?),
            },
            Operand::Tensor(weight) => {
                let near = weight.detach().abs()?.lt(0.5)?;
                let factor = weight.sub(&near.logical_not()?.to_dtype(weight.dtype())?)?;
                near.where_cond(self, b)?.add(&difference.mul(&factor)?)
            }
        }
    }
}

#[track_caller]
fn call(op: Ternary, inputs: [&DTensor; 3]) -> Result<DTensor> {
    Ok(dispatch(&op, &inputs, Location::caller())?.swap_remove(0))
}

impl Ternary {
    /// The type of the result.
    fn dtype(self, inputs: [DType; 3]) -> DType {
        let [x, a, b] = inputs;
        let all = || dtype::promote(dtype::promote(x, a), b);
        match self {
            Ternary::Where => dtype::promote(a, b),
            Ternary::ClampTensor => all(),
            Ternary::Addcmul(value) if value.0.fract() == 0.0 => all(),
            Ternary::Addcmul(_) | Ternary::Addcdiv(_) => dtype::real(all()),
        }
    }
}

impl Op for Ternary {
    fn name(&self) -> &'static str {
        match self {
            Ternary::Where => "where_cond",
            Ternary::Addcmul(_) => "addcmul",
            Ternary::Addcdiv(_) => "addcdiv",
            Ternary::ClampTensor => "clamp_tensor",
        }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = broadcast(self.name(), inputs)?;
        let dtype = self.dtype([inputs[0].dtype, inputs[1].dtype, inputs[2].dtype]);
        let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
        let mut signature = Signature::pointwise(&shapes, &shape);
        let same = inputs.iter().all(|m| m.dtype == dtype);
        let (sum, max, min) = (ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min);
        match self {
            // Linear in the addend and one factor together.
            Ternary::Addcmul(_) if same => {
                signature = signature
                    .allow_partial([Some(sum), Some(sum), None], sum)
                    .allow_partial([Some(sum), None, Some(sum)], sum);
            }
            // Increases with the clamped tensor.
            Ternary::ClampTensor if same => {
                signature =
                    signature.allow_partial([Some(max), None, None], max).allow_partial([Some(min), None, None], min);
            }
            _ => {}
        }
        if *self == Ternary::Where && inputs[1].dtype == dtype && inputs[2].dtype == dtype {
            // Every term is selected from the same side.
            for op in ReduceOp::ALL {
                signature = signature.allow_partial([None, Some(op), Some(op)], op);
            }
        }
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, a, b) = (&inputs[0], &inputs[1], &inputs[2]);
        let shape = broadcast_shape(&[x.dims(), a.dims(), b.dims()]).expect("parts of tensors that broadcast");
        let types = [x.dtype(), a.dtype(), b.dtype()];
        let dtype = self.dtype(types);
        let arithmetic = match self {
            _ if !dtype.is_float() => ComputeType::I64,
            // Whether an integer condition is zero survives any conversion, so its type does not matter.
            Ternary::Where if !types[0].is_float() => ComputeType::float_for([types[1], types[2]]),
            _ => ComputeType::float_for(types),
        };
        let choose = PerType(
            |[x, a, b]: [f32; 3]| if x != 0.0 { a } else { b },
            |[x, a, b]: [f64; 3]| if x != 0.0 { a } else { b },
            |[x, a, b]: [i64; 3]| if x != 0 { a } else { b },
        );
        let output = match *self {
            // A fraction is nonzero, but would be truncated to zero in integer arithmetic.
            Ternary::Where if arithmetic == ComputeType::I64 && types[0].is_float() => {
                let nonzero = ViaF64(|[x]: [f64; 1]| if x != 0.0 { 1.0 } else { 0.0 }, |[x]: [i64; 1]| x);
                let mask = pointwise(nonzero, [x], x.dims(), ComputeType::float_for([types[0]]), DType::U8)?;
                pointwise(choose, [&mask, a, b], &shape, arithmetic, dtype)?
            }
            Ternary::Where => pointwise(choose, [x, a, b], &shape, arithmetic, dtype)?,
            Ternary::ClampTensor => {
                let real = |[x, low, high]: [f64; 3]| {
                    // A bound that is NaN gives NaN.
                    let x = if x < low || low.is_nan() { low } else { x };
                    if x > high || high.is_nan() { high } else { x }
                };
                let integer = |[x, low, high]: [i64; 3]| x.max(low).min(high);
                pointwise(ViaF64(real, integer), [x, a, b], &shape, arithmetic, dtype)?
            }
            Ternary::Addcmul(Scalar(v)) => {
                let integer = move |[x, a, b]: [i64; 3]| x.wrapping_add((v as i64).wrapping_mul(a.wrapping_mul(b)));
                let f = ViaF64(move |[x, a, b]: [f64; 3]| x + v * a * b, integer);
                pointwise(f, [x, a, b], &shape, arithmetic, dtype)?
            }
            Ternary::Addcdiv(Scalar(v)) => {
                let f = ViaF64(move |[x, a, b]: [f64; 3]| x + v * a / b, |[x, _, _]: [i64; 3]| x);
                pointwise(f, [x, a, b], &shape, arithmetic, dtype)?
            }
        };
        Ok(vec![output])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(
            if *self == Ternary::Where { SaveForBackward::Input(0) } else { SaveForBackward::Inputs },
            |op, saved, gradients| {
                let Some(g) = &gradients[0] else { return Ok(vec![None; 3]) };
                let of = |i: usize| -> Result<DTensor> {
                    let x = |i: usize| saved.input(i);
                    match (op, i) {
                        (Ternary::Where, 1) => x(0).where_cond(g, &g.zeros_like()?),
                        (Ternary::Where, _) => x(0).where_cond(&g.zeros_like()?, g),
                        (Ternary::Addcmul(_) | Ternary::Addcdiv(_), 0) => Ok(g.clone()),
                        (Ternary::Addcmul(v), _) => g.mul(&x(3 - i))?.mul_scalar(v.0),
                        (Ternary::Addcdiv(v), 1) => g.div(&x(2))?.mul_scalar(v.0),
                        (Ternary::Addcdiv(v), _) => g.mul(&x(1).div(&x(2))?.div(&x(2))?)?.mul_scalar(-v.0),
                        (Ternary::ClampTensor, _) => {
                            let (below, above) = (x(0).lt(&x(1))?, x(0).gt(&x(2))?);
                            let chosen = match i {
                                0 => below.logical_or(&above)?.logical_not()?,
                                1 => below.logical_and(&x(1).le(&x(2))?)?,
                                _ => above.logical_or(&x(1).gt(&x(2))?)?,
                            };
                            chosen.where_cond(g, &g.zeros_like()?)
                        }
                    }
                };
                let one = |i: usize| saved.needs_input_grad(i).then(|| unbroadcast(&of(i)?, saved, i)).transpose();
                (0..3).map(one).collect()
            },
        )
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "where_cond", samples, apply: |x| Ok(vec![x[0].where_cond(&x[1], &x[2])?]) },
    OpEntry { name: "addcmul", samples, apply: |x| Ok(vec![x[0].addcmul(&x[1], &x[2], 2.0)?]) },
    OpEntry { name: "addcdiv", samples, apply: |x| Ok(vec![x[0].addcdiv(&x[1], &x[2], 0.5)?]) },
    OpEntry { name: "clamp_tensor", samples, apply: |x| Ok(vec![x[0].clamp_tensor(&x[1], &x[2])?]) },
    OpEntry { name: "masked_fill", samples: masks, apply: |x| Ok(vec![x[0].masked_fill(&x[1], 2)?]) },
    OpEntry { name: "lerp", samples: pairs, apply: |x| Ok(vec![x[0].lerp(&x[1], 0.25)?]) },
];

fn masks() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[5, 3], &[3]), (&[4], &[4]), (&[1], &[2, 3])];
    shapes.iter().map(|(x, mask)| vec![SampleInput::new(x, DType::I64), SampleInput::index(mask, 2)]).collect()
}

fn pairs() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 3] = [(&[5, 3], &[5, 3]), (&[4], &[2, 1]), (&[0, 2], &[2])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::F64), SampleInput::new(b, DType::F64)]).collect()
}

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [[&[usize]; 3]; 2] = [[&[5, 3], &[3], &[5, 1]], [&[1], &[4], &[0, 4]]];
    shapes.iter().map(|shapes| shapes.iter().map(|s| SampleInput::new(s, DType::I64)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::launch;
    use crate::placement::Placement::Replicate;

    #[test]
    fn a_fractional_condition_selects_integers() {
        launch(1, |world| {
            let mesh = world.mesh([("a", 1)])?;
            let cpu = &candle_core::Device::Cpu;
            let tensor = |t: Tensor| DTensor::distribute_tensor(&t, &mesh, [Replicate], None);
            let mask = tensor(Tensor::new(&[0.5f32, 0.0, -0.25], cpu)?)?;
            let (a, b) = (tensor(Tensor::new(&[1i64, 2, 3], cpu)?)?, tensor(Tensor::new(&[4i64, 5, 6], cpu)?)?);
            assert_eq!(mask.where_cond(&a, &b)?.to_local()?.to_vec1::<i64>()?, [1, 5, 3]);
            Ok(())
        })
        .unwrap();
    }
}
