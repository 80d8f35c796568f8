//! The elements of a contiguous tensor as a slice of their Rust type.

use candle_core::{Tensor, WithDType};

use super::with_bytes;
use crate::error::Result;

/// Runs `body` with the elements of a contiguous tensor of type `T`, without a copy.
///
/// # Errors
/// If the tensor is not contiguous or not on the CPU.
///
/// # Panics
/// If `T` is not the type of the tensor.
pub(crate) fn with_elements<T: WithDType, R>(tensor: &Tensor, body: impl FnOnce(&[T]) -> R) -> Result<R> {
    assert_eq!(tensor.dtype(), T::DTYPE, "elements of another type");
    // SAFETY: the bytes are those of as many elements of this type, aligned as a vector of them.
    with_bytes(tensor, |bytes| {
        body(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) })
    })
}
