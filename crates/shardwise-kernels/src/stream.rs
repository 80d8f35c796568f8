//! Stores past the caches, for results that are not read again soon.
//!
//! An ordinary store reads the line of the cache that it changes from memory first, and writes it back later. A streaming store
//! writes only. The processor combines them into lines as long as few other things happen between them: a kernel that stored
//! blocks of its results this way, from a buffer, was slower than with ordinary stores.

/// Whether [`store`] may be used from an address on, in steps of a multiple of 32 bytes. `FMA` as in [`simd`](super::simd).
#[inline(always)]
pub(crate) fn is_possible<T, const FMA: bool>(to: *const T) -> bool {
    cfg!(target_arch = "x86_64") && FMA && to.addr().is_multiple_of(32)
}

/// Stores elements past the caches. [`finish`] must follow before another thread reads them.
///
/// # Safety
/// The elements can be written, [`is_possible`] holds for the address, and all of them are a multiple of 32 bytes.
#[inline(always)]
pub(crate) unsafe fn store<T: Copy, const L: usize>(elements: [T; L], to: *mut T) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
        let from = elements.as_ptr().cast::<u8>();
        for at in (0..size_of_val(&elements)).step_by(32) {
            // SAFETY: the caller's promise; the processor has AVX, without which it is not possible.
            unsafe { _mm256_stream_si256(to.cast::<u8>().add(at).cast(), _mm256_loadu_si256(from.add(at).cast())) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's promise.
    unsafe {
        to.cast::<[T; L]>().write_unaligned(elements);
    }
}

/// Makes what this thread has stored visible to other threads in the order of the program, as ordinary stores are.
#[inline]
pub(crate) fn finish() {
    // SAFETY: every x86-64 processor has the instruction.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}
