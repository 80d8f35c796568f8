//! The types in which the local terms of partial sums are computed and stored.
//!
//! If every rank rounded its term, a sum would depend on the layout: half precision loses digits and overflows, and f32 loses
//! what cancels between ranks. So terms are stored in a wider type than their tensor has, and the sum is rounded once.

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::tensor::{DTensor, accumulates, is_in_gradient};

/// In which type an operator computes its local term of a partial sum, mean or product, see [`Op::accumulation`](super::Op::accumulation).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Accumulation {
    /// Half precision accumulates in f32: the kernel gets its inputs converted to f32. f32 and f64 stay as they are.
    InF32,
    /// Types as with `InF32`, but the kernel gets its inputs unconverted, and returns its result in the type of
    /// [`KernelContext::output_dtype`](super::KernelContext::output_dtype): for kernels that read half precision and sum in f32.
    InF32FromAnyType,
    /// Half precision accumulates in f32 and, except in a backward pass, f32 in f64. The kernel gets its inputs unconverted and
    /// returns its result in the type of [`KernelContext::output_dtype`](super::KernelContext::output_dtype).
    Exact,
    /// At most one rank has a nonzero term, as in a lookup: the sum is exact in any type.
    Disjoint,
}

/// The wider of two floating-point types; f32 for the two half-precision types, of which neither holds the other.
fn wider(a: DType, b: DType) -> DType {
    match (a, b) {
        _ if a == b => a,
        _ if a.size_in_bytes() == b.size_in_bytes() => DType::F32,
        _ if a.size_in_bytes() > b.size_in_bytes() => a,
        _ => b,
    }
}

/// Per output the type in which this rank stores its local tensor: that of the tensor, or a wider one for terms of a partial sum.
pub(super) fn storage_types(
    accumulation: Accumulation,
    inputs: &[&DTensor],
    locals: &[Tensor],
    layouts: &[Layout],
    outputs: &[TensorMeta],
) -> SmallVec<[DType; 3]> {
    // Partial outputs computed from inputs that are stored in a wider type stay in that type.
    let wide =
        inputs.iter().zip(locals).filter(|(t, local)| local.dtype() != t.dtype()).map(|(_, local)| local.dtype());
    let wide = wide.reduce(wider);
    let storage = |(layout, meta): (&Layout, &TensorMeta)| {
        let own = match (accumulation, meta.dtype) {
            _ if !meta.dtype.is_float() || !accumulates(layout) => return meta.dtype,
            (Accumulation::Disjoint, dtype) => dtype,
            (_, DType::F16 | DType::BF16) => DType::F32,
            // A gradient of a weight is as large as the weight: in f64 it would take twice the memory and the bytes.
            (Accumulation::Exact, DType::F32) if !is_in_gradient() => DType::F64,
            (_, dtype) => dtype,
        };
        wide.map_or(own, |wide| wider(own, wide))
    };
    layouts.iter().zip(outputs).map(storage).collect()
}

/// Converts the inputs of a kernel to the types in which it computes outputs that are stored in the types `storage`.
pub(super) fn convert_inputs(
    accumulation: Accumulation,
    inputs: &[&DTensor],
    locals: &mut [Tensor],
    storage: &[DType],
    outputs: &[TensorMeta],
) -> Result<()> {
    let widened =
        storage.iter().zip(outputs).filter(|(storage, meta)| **storage != meta.dtype).map(|(storage, _)| *storage);
    let widened = widened.reduce(wider);
    for (input, local) in inputs.iter().zip(locals.iter_mut()) {
        let wanted = match widened {
            // The kernel accepts terms in the type in which they are stored.
            Some(_) if matches!(accumulation, Accumulation::Exact | Accumulation::InF32FromAnyType) => continue,
            Some(wide) if local.dtype().is_float() => wider(wide, local.dtype()),
            Some(_) => continue,
            // No output is stored in a wider type: inputs are converted to the type of their tensor.
            None => input.dtype(),
        };
        if local.dtype() != wanted {
            *local = local.to_dtype(wanted)?;
        }
    }
    Ok(())
}
