//! Uninitialised memory for a new tensor: kernels write every element once, without filling it with zeros first.

use std::alloc::Layout;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Shape, Storage, Tensor, WithDType};

use super::memory_limit::{check_bytes, out_of_memory};
use super::{check_dtype, reserve, with_stored_type};
use crate::error::Result;

/// Memory for a number of elements of one type that becomes a tensor once all of them are written.
pub struct UninitBuffer {
    dtype: DType,
    count: usize,
    first: *mut u8,
    /// A vector of length 0 with capacity for `count` elements.
    storage: CpuStorage,
}

// SAFETY: `first` points into the heap buffer that `storage` owns; writes through it follow the contract of whoever asks
// for the address.
unsafe impl Send for UninitBuffer {}

impl UninitBuffer {
    /// Reserves memory without touching its pages: page faults happen on the thread that writes a part first.
    ///
    /// # Errors
    /// If the kernels do not support the element type ([`check_dtype`]) or memory does not suffice.
    pub fn new(dtype: DType, count: usize) -> Result<Self> {
        check_dtype(dtype)?;
        let (first, storage) = with_stored_type!(dtype, T => {
            let mut buffer: Vec<T> = reserve(count)?;
            advise_huge_pages(buffer.as_mut_ptr().cast(), count * size_of::<T>());
            (buffer.as_mut_ptr().cast(), T::to_cpu_storage_owned(buffer))
        }, otherwise unreachable!("checked above"));
        Ok(UninitBuffer { dtype, count, first, storage })
    }

    /// Allocates memory that holds zeros, without touching its pages: the system provides zeroed ones when they are used.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn zeroed(dtype: DType, count: usize) -> Result<Self> {
        check_dtype(dtype)?;
        let (first, storage) = with_stored_type!(dtype, T => {
            check_bytes(count, size_of::<T>())?;
            let mut buffer: Vec<T> = match count {
                0 => Vec::new(),
                _ => {
                    let layout = Layout::array::<T>(count).expect("checked with the memory of the machine");
                    // SAFETY: the layout has a size.
                    let first = unsafe { std::alloc::alloc_zeroed(layout) };
                    if first.is_null() {
                        return Err(out_of_memory(count, size_of::<T>(), "memory that is free now"));
                    }
                    // SAFETY: allocated by the global allocator with this layout. The length stays 0 until `finish`.
                    unsafe { Vec::from_raw_parts(first.cast(), 0, count) }
                }
            };
            advise_huge_pages(buffer.as_mut_ptr().cast(), count * size_of::<T>());
            (buffer.as_mut_ptr().cast(), T::to_cpu_storage_owned(buffer))
        }, otherwise unreachable!("checked above"));
        Ok(UninitBuffer { dtype, count, first, storage })
    }

    /// Advises the kernel to use huge pages for memory that is kept and read often, such as weights, also if it is small.
    ///
    /// Call it before the memory is written. Weights of a few megabytes are next to each other, so their pages are shared:
    /// the advice covers whole pages around the memory. Reading them in order is a third faster (measured).
    pub(super) fn advise_for_reading(&self) {
        let bytes = self.count * self.dtype.size_in_bytes();
        // Below, a system call costs more than it saves.
        if bytes >= 64 << 10 {
            advise_huge_pages_around(self.first, bytes);
        }
    }

    /// Number of elements that the memory holds.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Type of the elements.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Address of the first element.
    pub fn first(&self) -> *mut u8 {
        self.first
    }

    /// Turns the memory into a contiguous tensor of `shape` without copying. The shape must have as many elements.
    ///
    /// # Safety
    /// Every element has been written, and the writes happened before this call.
    pub unsafe fn finish(self, shape: impl Into<Shape>) -> Tensor {
        let storage = with_stored_type!(self.dtype, T => {
            let mut buffer = T::cpu_storage_data(self.storage).expect("allocated with this type");
            // SAFETY: the capacity is `count`, and the caller promises that all elements are written.
            unsafe { buffer.set_len(self.count) };
            T::to_cpu_storage_owned(buffer)
        }, otherwise unreachable!("checked when allocated"));
        Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), false)
    }
}

#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Advises the kernel to use huge pages. Writing large new memory spends most of its time in page faults, and pages of 2 MiB
/// take 512 times fewer of them than pages of 4 KiB.
#[cfg(target_os = "linux")]
fn advise_huge_pages(first: *mut u8, bytes: usize) {
    let aligned = first.align_offset(HUGE_PAGE);
    // Less than two pages may not contain a whole aligned one.
    if bytes >= 2 * HUGE_PAGE && aligned < bytes {
        // SAFETY: the range is inside one live allocation, and this advice does not change what memory holds. The result is
        // ignored: where the kernel does not follow the advice, pages of 4 KiB are used.
        unsafe { libc::madvise(first.add(aligned).cast(), bytes - aligned, libc::MADV_HUGEPAGE) };
    }
}

/// As [`advise_huge_pages`], for all huge pages that the range touches.
#[cfg(target_os = "linux")]
fn advise_huge_pages_around(first: *mut u8, bytes: usize) {
    let start = first.map_addr(|address| address / HUGE_PAGE * HUGE_PAGE);
    let length = (first.addr() - start.addr() + bytes).next_multiple_of(HUGE_PAGE);
    // SAFETY: this advice does not change what memory holds, whoever owns it, and skips what is not mapped.
    unsafe { libc::madvise(start.cast(), length, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut u8, _: usize) {}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages_around(_: *mut u8, _: usize) {}
