//! The types in which the local parts of partial sums are computed and held.
//!
//! A term of a sum that is rounded before it is added makes the sum depend on the layout: the half-precision types lose
//! digits and overflow, and f32 loses what cancels between ranks. So terms are held in a wider type than their tensor
//! has, and the sum is rounded once.

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::tensor::{DTensor, accumulates, is_in_gradient};

/// In which type an operator computes its part of an output that becomes a partial sum, mean or product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Accumulation {
    /// Half precision in f32: the kernel runs on inputs that are converted to f32, and other types stay as they are.
    InF32,
    /// Half precision in f32 and, except in a backward pass, f32 in f64: the kernel reads its inputs as they are and gives its result in the type that
    /// [`Place::output_dtype`](super::Place::output_dtype) says.
    Exact,
    /// At most one rank has a term that is not zero: the sum is exact in any type.
    OneTerm,
}

/// The type of a number in which neither of two floating-point types loses anything that the wider one holds.
fn wider(a: DType, b: DType) -> DType {
    match (a, b) {
        _ if a == b => a,
        _ if a.size_in_bytes() == b.size_in_bytes() => DType::F32,
        _ if a.size_in_bytes() > b.size_in_bytes() => a,
        _ => b,
    }
}

/// Per output the type of this rank's part: that of the tensor, or a wider one where terms are pending.
pub(super) fn held_types(
    accumulation: Accumulation,
    inputs: &[&DTensor],
    locals: &[Tensor],
    layouts: &[Layout],
    outputs: &[TensorMeta],
) -> SmallVec<[DType; 3]> {
    // Inputs whose terms are held in a wider type than the tensor's: the outputs that are made of them stay in it.
    let wide =
        inputs.iter().zip(locals).filter(|(t, local)| local.dtype() != t.dtype()).map(|(_, local)| local.dtype());
    let wide = wide.reduce(wider);
    let held = |(layout, meta): (&Layout, &TensorMeta)| {
        let own = match (accumulation, meta.dtype) {
            _ if !meta.dtype.is_float() || !accumulates(layout) => return meta.dtype,
            (Accumulation::InF32 | Accumulation::Exact, DType::F16 | DType::BF16) => DType::F32,
            // A gradient of a weight is as large as the weight: in f64 it would take twice the memory and the bytes.
            (Accumulation::Exact, DType::F32) if !is_in_gradient() => DType::F64,
            (_, dtype) => dtype,
        };
        wide.map_or(own, |wide| wider(own, wide))
    };
    layouts.iter().zip(outputs).map(held).collect()
}

/// The inputs of a kernel in the types in which it shall compute outputs that are held so.
pub(super) fn prepare(
    accumulation: Accumulation,
    inputs: &[&DTensor],
    locals: &mut [Tensor],
    held: &[DType],
    outputs: &[TensorMeta],
) -> Result<()> {
    let widened = held.iter().zip(outputs).filter(|(held, meta)| **held != meta.dtype).map(|(held, _)| *held);
    let widened = widened.reduce(wider);
    for (input, local) in inputs.iter().zip(locals.iter_mut()) {
        let wanted = match widened {
            // The kernel takes terms as they are held.
            Some(_) if accumulation == Accumulation::Exact => continue,
            Some(wide) if local.dtype().is_float() => wider(wide, local.dtype()),
            Some(_) => continue,
            // Nothing wide is made of wide terms: they are what the tensor says.
            None => input.dtype(),
        };
        if local.dtype() != wanted {
            *local = local.to_dtype(wanted)?;
        }
    }
    Ok(())
}
