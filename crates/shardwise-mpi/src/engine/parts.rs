//! Parts of memory, one per rank, as the functions of MPI take them.

use std::ffi::c_int;

use candle_core::Tensor;
use shardwise::Result;
use shardwise::comm::engine::{empty_address, with_bytes};
use smallvec::SmallVec;

/// One number per rank.
pub(super) type Counts = SmallVec<[c_int; 8]>;

/// Settings that the collectives look at.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) deterministic: bool,
    pub(super) segment: usize,
    pub(super) largest_count: usize,
}

/// Memory of a message: address and bytes.
#[derive(Clone, Copy)]
pub(super) struct Part<P> {
    pub(super) first: P,
    pub(super) bytes: usize,
}

/// Where the parts of the ranks begin, if they lie one behind the other.
pub(super) fn starts<N: Copy + Default + std::ops::Add<Output = N>>(counts: &[N]) -> SmallVec<[N; 8]> {
    let next = |next: &mut N, &count: &N| {
        let start = *next;
        *next = start + count;
        Some(start)
    };
    counts.iter().scan(N::default(), next).collect()
}

/// Parts of some bytes each that lie one behind the other.
pub(super) fn one_behind_the_other(first: *mut u8, bytes: &[usize]) -> SmallVec<[Part<*mut u8>; 8]> {
    let part = |(start, &bytes): (usize, &usize)| Part { first: first.wrapping_add(start), bytes };
    starts(bytes).into_iter().zip(bytes).map(part).collect()
}

/// Runs `body` with the address of the elements of a dense tensor.
pub(super) fn with_first<R>(tensor: &Tensor, body: impl FnOnce(*const u8) -> R) -> Result<R> {
    Ok(with_bytes(tensor, |bytes| body(if bytes.is_empty() { empty_address() } else { bytes.as_ptr() }))?)
}
