//! Element types and reductions as MPI knows them.

use candle_core::DType;
use mpi::ffi;
use shardwise::ReduceOp;

/// The type under which MPI moves elements; half-precision numbers travel as pairs of bytes.
pub(super) fn datatype(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: constants of the library.
    unsafe {
        match dtype {
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::I64 => ffi::RSMPI_INT64_T,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::I16 => ffi::RSMPI_INT16_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::F16 | DType::BF16 => ffi::RSMPI_UINT16_T,
            _ => ffi::RSMPI_UINT8_T,
        }
    }
}

/// MPI's own operation for a reduction, if it does the same up to the order of the operands. A mean is its sum.
///
/// Half-precision numbers are not among its types, and what its maximum does with not-a-number is its own affair.
pub(super) fn own_operation(op: ReduceOp, dtype: DType) -> Option<ffi::MPI_Op> {
    if matches!(dtype, DType::F16 | DType::BF16) {
        return None;
    }
    // SAFETY: constants of the library.
    unsafe {
        Some(match op {
            ReduceOp::Sum | ReduceOp::Avg => ffi::RSMPI_SUM,
            ReduceOp::Product => ffi::RSMPI_PROD,
            ReduceOp::Max if dtype.is_int() => ffi::RSMPI_MAX,
            ReduceOp::Min if dtype.is_int() => ffi::RSMPI_MIN,
            ReduceOp::Max | ReduceOp::Min => return None,
            ReduceOp::BitAnd => ffi::RSMPI_BAND,
            ReduceOp::BitOr => ffi::RSMPI_BOR,
            ReduceOp::BitXor => ffi::RSMPI_BXOR,
        })
    }
}

/// Turns sums into means, where that is what was asked for.
///
/// # Safety
/// `first` is the address of `count` elements of the type, which nobody else touches.
pub(super) unsafe fn finish(op: ReduceOp, dtype: DType, first: *mut u8, count: usize, operands: usize) {
    if op != ReduceOp::Avg {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F64 => {
                std::slice::from_raw_parts_mut(first.cast::<f64>(), count)
                    .iter_mut()
                    .for_each(|x| *x /= operands as f64);
            }
            DType::F32 => {
                std::slice::from_raw_parts_mut(first.cast::<f32>(), count)
                    .iter_mut()
                    .for_each(|x| *x /= operands as f32);
            }
            other => unreachable!("means of {other:?} are not left to MPI"),
        }
    }
}
