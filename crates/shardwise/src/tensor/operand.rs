//! The second operand of an operator: a tensor or a plain number.

use std::borrow::Cow;

use candle_core::DType;

use super::{DTensor, Number};
use crate::error::Result;
use crate::placement::Placement;
use shardwise_kernels::integer_range;

/// A tensor or a plain number, where an operator accepts either: `x.gt(&y)`, `x.gt(0.0)`.
///
/// Type promotion is PyTorch's: a number takes the type of the tensor, so `x.gt(0.1)` of an f32 tensor compares with 0.1 in f32.
/// With an integer tensor, a number with a fraction promotes the result to f32, and an integer that the type does not hold
/// promotes it to i64.
#[doc(alias = "TensorOrScalar")]
#[derive(Clone, Copy)]
pub enum Operand<'a> {
    /// A distributed tensor, broadcast as usual.
    Tensor(&'a DTensor),
    /// A number, the same for all elements.
    Number(Number),
}

impl<'a> Operand<'a> {
    /// The operand as a tensor. A number becomes a replicated scalar on the mesh of `other`, in the type promoted with it.
    #[track_caller]
    pub(crate) fn tensor(self, other: &DTensor) -> Result<Cow<'a, DTensor>> {
        match self {
            Operand::Tensor(tensor) => Ok(Cow::Borrowed(tensor)),
            Operand::Number(number) => number_like(number, dtype_beside(number, other.dtype()), other).map(Cow::Owned),
        }
    }

    /// The operand as a tensor on the mesh of `on`. A number has PyTorch's default type: f32, or i64 for integers.
    #[track_caller]
    pub(crate) fn tensor_alone(self, on: &DTensor) -> Result<Cow<'a, DTensor>> {
        match self {
            Operand::Tensor(tensor) => Ok(Cow::Borrowed(tensor)),
            Operand::Number(number @ Number::Real(_)) => number_like(number, DType::F32, on).map(Cow::Owned),
            Operand::Number(number @ Number::Integer(_)) => number_like(number, DType::I64, on).map(Cow::Owned),
        }
    }
}

#[track_caller]
fn number_like(number: Number, dtype: DType, on: &DTensor) -> Result<DTensor> {
    DTensor::full(number, (), dtype, on.device_mesh(), vec![Placement::Replicate; on.placements().len()])
}

/// The type that a number is promoted to together with a tensor of a type.
fn dtype_beside(number: Number, dtype: DType) -> DType {
    match integer_range(dtype) {
        None => dtype,
        Some(_) if !number.is_integer() => DType::F32,
        Some((least, most)) if (least..=most).contains(&number.to_i64()) => dtype,
        Some(_) => DType::I64,
    }
}

impl<'a> From<&'a DTensor> for Operand<'a> {
    fn from(tensor: &'a DTensor) -> Self {
        Operand::Tensor(tensor)
    }
}

impl<'a> From<&&'a DTensor> for Operand<'a> {
    fn from(tensor: &&'a DTensor) -> Self {
        Operand::Tensor(tensor)
    }
}

macro_rules! numbers {
    ($($T:ty),*) => {$(
        impl From<$T> for Operand<'_> {
            fn from(number: $T) -> Self {
                Operand::Number(number.into())
            }
        }
    )*};
}
numbers!(f32, f64, u8, u32, i16, i32, i64, Number);
