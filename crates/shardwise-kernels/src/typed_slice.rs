//! Typed views of contiguous tensors, and new tensors that a kernel fills through an address.

use std::mem::MaybeUninit;

use candle_core::{Tensor, WithDType};

use super::parallel::SharedPtr;
use super::uninit_buffer::UninitBuffer;
use super::{contiguous, with_bytes};
use crate::error::Result;

/// Runs `body` with the elements of a tensor in row-major order, without a copy if it is contiguous.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor.
///
/// # Panics
/// If `T` is not the element type.
pub fn with_slice<T: WithDType, R>(tensor: &Tensor, body: impl FnOnce(&[T]) -> R) -> Result<R> {
    assert_eq!(tensor.dtype(), T::DTYPE, "elements of another type");
    let tensor = contiguous(tensor)?;
    let count = tensor.elem_count();
    // SAFETY: the bytes are those of `count` elements of this type, in memory that is aligned to them.
    with_bytes(&tensor, |bytes| body(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), count) }))
}

/// Builds a contiguous tensor of `shape` whose elements `fill` writes.
///
/// # Errors
/// If memory does not suffice.
///
/// # Safety
/// `fill` writes every element, and nothing outside.
pub(super) unsafe fn filled_by<T: WithDType>(shape: &[usize], fill: impl FnOnce(SharedPtr<T>)) -> Result<Tensor> {
    let memory = UninitBuffer::new(T::DTYPE, shape.iter().product())?;
    fill(SharedPtr::new(memory.first().cast()));
    // SAFETY: the caller's promise.
    Ok(unsafe { memory.finish(shape) })
}

/// Fills memory with one value. Buffers on the stack are uninitialised, because small tensors use little of them.
#[inline(always)]
pub(super) fn filled_with<T: Copy>(memory: &mut [MaybeUninit<T>], value: T) -> &mut [T] {
    memory.fill(MaybeUninit::new(value));
    // SAFETY: every element was just written.
    unsafe { memory.assume_init_mut() }
}

/// Sizes of a contiguous tensor seen as `[outer, n, inner]`, of which the middle is the dimension that a kernel works along.
#[derive(Debug, Clone, Copy)]
pub(super) struct LineShape {
    pub(super) outer: usize,
    pub(super) n: usize,
    pub(super) inner: usize,
}

impl LineShape {
    pub(super) fn new(dims: &[usize], dim: usize) -> Self {
        LineShape { outer: dims[..dim].iter().product(), n: dims[dim], inner: dims[dim + 1..].iter().product() }
    }
}
