//! Memory of messages: one buffer per rank, and counts and displacements as MPI takes them.

use std::ffi::c_int;

use candle_core::Tensor;
use shardwise::Result;
use shardwise::comm::engine::{empty_address, with_bytes};
use smallvec::SmallVec;

/// Element counts or displacements, one per rank.
pub(super) type Counts = SmallVec<[c_int; 8]>;

/// Settings that decide how collectives are executed; the same on all ranks.
#[derive(Clone, Copy)]
pub(super) struct CollectiveLimits {
    pub(super) deterministic: bool,
    pub(super) segment: usize,
    pub(super) largest_count: usize,
}

/// Address and size in bytes of a message.
#[derive(Clone, Copy)]
pub(super) struct MessageBuffer<P> {
    pub(super) first: P,
    pub(super) bytes: usize,
}

/// Displacements of buffers of `counts` elements that are packed one after the other.
pub(super) fn displacements<N: Copy + Default + std::ops::Add<Output = N>>(counts: &[N]) -> SmallVec<[N; 8]> {
    let next = |next: &mut N, &count: &N| {
        let start = *next;
        *next = start + count;
        Some(start)
    };
    counts.iter().scan(N::default(), next).collect()
}

/// Buffers of `bytes` bytes each that are packed one after the other from `first`.
pub(super) fn packed_buffers(first: *mut u8, bytes: &[usize]) -> SmallVec<[MessageBuffer<*mut u8>; 8]> {
    let buffer = |(start, &bytes): (usize, &usize)| MessageBuffer { first: first.wrapping_add(start), bytes };
    displacements(bytes).into_iter().zip(bytes).map(buffer).collect()
}

/// Runs `body` with the address of the elements of a contiguous tensor; a non-null dummy address if it has none.
pub(super) fn with_address<R>(tensor: &Tensor, body: impl FnOnce(*const u8) -> R) -> Result<R> {
    Ok(with_bytes(tensor, |bytes| body(if bytes.is_empty() { empty_address() } else { bytes.as_ptr() }))?)
}
