//! MPI datatypes and operations for element types and reductions.

use candle_core::DType;
use mpi::ffi;
use shardwise::ReduceOp;

/// The MPI datatype that transfers elements of `dtype`; f16 and bf16, which MPI does not have, are sent as u16.
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

/// The MPI operation for a reduction, if it gives the same result up to the order of the operands; the sum for an average.
///
/// `None` for f16 and bf16, which MPI does not have, and for max and min of floats, where MPI leaves NaN unspecified.
pub(super) fn mpi_op(op: ReduceOp, dtype: DType) -> Option<ffi::MPI_Op> {
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
            // MPI does not have logarithms of sums either.
            ReduceOp::Max | ReduceOp::Min | ReduceOp::LogSumExp => return None,
            ReduceOp::BitAnd => ffi::RSMPI_BAND,
            ReduceOp::BitOr => ffi::RSMPI_BOR,
            ReduceOp::BitXor => ffi::RSMPI_BXOR,
        })
    }
}

/// Divides sums by the number of operands if the reduction is an average; does nothing otherwise.
///
/// # Safety
/// `first` is the address of `count` elements of the type, which nobody else accesses.
pub(super) unsafe fn divide_for_avg(op: ReduceOp, dtype: DType, first: *mut u8, count: usize, operands: usize) {
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
            other => unreachable!("averages of {other:?} are not reduced by MPI"),
        }
    }
}
