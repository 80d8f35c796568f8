//! New memory for the elements of a tensor, written before it is read.

use std::mem::MaybeUninit;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Shape, Storage, Tensor, WithDType};

use super::{check_dtype, reserve, with_type};
use crate::error::Result;

/// Memory for so many elements of a type, not yet written.
pub struct Fresh {
    dtype: DType,
    count: usize,
    first: *mut u8,
    /// Vector of length 0 with the capacity of the whole tensor.
    storage: CpuStorage,
}

// SAFETY: `first` points into the heap buffer that `storage` owns; writes through it follow the contract of whoever asks
// for the address.
unsafe impl Send for Fresh {}

impl Fresh {
    /// Reserves memory. Its pages are not touched, so that whoever fills a part pays for that part.
    pub fn new(dtype: DType, count: usize) -> Result<Self> {
        check_dtype(dtype)?;
        let (first, storage) = with_type!(dtype, T => {
            let mut buffer: Vec<T> = reserve(count)?;
            ask_for_large_pages(buffer.as_mut_ptr().cast(), count * size_of::<T>());
            (buffer.as_mut_ptr().cast(), T::to_cpu_storage_owned(buffer))
        }, otherwise unreachable!("checked above"));
        Ok(Fresh { dtype, count, first, storage })
    }

    /// How many elements there is room for.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The address of the first element.
    pub fn first(&self) -> *mut u8 {
        self.first
    }

    /// The elements as memory to be written, if `T` is their type.
    pub(super) fn elements<T: WithDType>(&mut self) -> Option<&mut [MaybeUninit<T>]> {
        let same = self.dtype == T::DTYPE;
        // SAFETY: the buffer has room for `count` elements of this type, and the borrow is exclusive.
        same.then(|| unsafe { std::slice::from_raw_parts_mut(self.first.cast(), self.count) })
    }

    /// The tensor of all elements.
    ///
    /// # Safety
    /// Every element has been written, and the writes happened before this call.
    pub unsafe fn finish(self, shape: impl Into<Shape>) -> Tensor {
        let storage = with_type!(self.dtype, T => {
            let mut buffer = T::cpu_storage_data(self.storage).expect("allocated with this type");
            // SAFETY: the capacity is `count`, and the caller promises that all elements are written.
            unsafe { buffer.set_len(self.count) };
            T::to_cpu_storage_owned(buffer)
        }, otherwise unreachable!("checked when allocated"));
        Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
    }
}

/// Large new memory costs most of its time in page faults; with large pages it takes 512 times fewer of them.
#[cfg(target_os = "linux")]
fn ask_for_large_pages(first: *mut u8, bytes: usize) {
    const LARGE_PAGE: usize = 2 << 20;
    let aligned = first.align_offset(LARGE_PAGE);
    if bytes >= 2 * LARGE_PAGE && aligned < bytes {
        // SAFETY: the range lies inside one live allocation, and this advice does not change what memory holds. Where
        // the kernel does not take it, nothing is lost, so the result does not matter.
        unsafe { libc::madvise(first.add(aligned).cast(), bytes - aligned, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: *mut u8, _: usize) {}
