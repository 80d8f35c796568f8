//! What an engine outside this crate is built with. Programs need none of it.
//!
//! An engine implements [`Communicator`](super::Communicator) for one rank of a group and hands the group of all ranks to
//! [`World::new`](super::World::new). It checks calls with [`Call::check`](super::Call::check), finds out with
//! [`fingerprint`] whether all ranks make the same one, brings tensors into one piece with [`contiguous`], reads them with
//! [`with_bytes`], receives into a [`Buffer`] and reduces with [`reduce`], which gives the same bits as every other
//! engine.

use candle_core::{DType, Tensor};

pub use super::check::{SAME_CALLS, SAME_VALUES, describe, fingerprint, fingerprint_of};
pub use super::host::{
    caught, confine_candle_to, cores, how_it_failed, launch_is_over, pool, second_thread, this_thread,
};
pub use super::purpose::Purpose;
pub use crate::fnv::fnv1a;
pub use shardwise_kernels::{concat, contiguous, immutable, split_packed, with_bytes};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::placement::ReduceOp;
use shardwise_kernels::{UninitBuffer, reduce_operands, with_type};

/// Memory of a tensor that is still to be received.
///
/// ```
/// # use shardwise::{comm::engine::Buffer, TensorMeta};
/// # use candle_core::DType;
/// let mut buffer = Buffer::new(TensorMeta::new(2, DType::U8))?;
/// // SAFETY: two elements of one byte, both written.
/// let tensor = unsafe {
///     buffer.first().copy_from([7, 9].as_ptr(), 2);
///     buffer.finish()
/// };
/// assert_eq!(tensor.to_vec1::<u8>().unwrap(), [7, 9]);
/// # Ok::<(), shardwise::Error>(())
/// ```
pub struct Buffer {
    memory: UninitBuffer,
    shape: Vec<usize>,
}

impl Buffer {
    /// Reserves memory for a tensor.
    pub fn new(meta: TensorMeta) -> Result<Self> {
        Ok(Buffer { memory: UninitBuffer::new(meta.dtype, meta.elem_count())?, shape: meta.shape })
    }

    /// Address of the first element, aligned for the element type; [`nowhere`] if there are no elements.
    pub fn first(&mut self) -> *mut u8 {
        if self.memory.count() == 0 { nowhere().cast_mut() } else { self.memory.first() }
    }

    /// The tensor.
    ///
    /// # Safety
    /// Every element has been written.
    pub unsafe fn finish(self) -> Tensor {
        // SAFETY: the caller's promise; the buffer has one owner, so nobody else writes.
        unsafe { self.memory.finish(self.shape) }
    }
}

/// An address for memory of no bytes: not null and not a small number, since libraries give such addresses meanings of
/// their own.
pub fn nowhere() -> *const u8 {
    #[repr(align(64))]
    struct Aligned(u8);
    static NOWHERE: Aligned = Aligned(0);
    &raw const NOWHERE.0
}

/// Writes the reduction of `count` elements from each of `operands` to `to`, first operand first. Half-precision types are
/// summed in `f32` and rounded once.
///
/// # Safety
/// There is an operand; all of them and `to` are aligned for the type and have room for `count` elements, those of the
/// operands are initialised, and `to` overlaps none of them. The operation serves the type
/// ([`ReduceOp::check`]).
pub unsafe fn reduce(op: ReduceOp, dtype: DType, operands: &[*const u8], count: usize, to: *mut u8) {
    if count == 0 {
        return;
    }
    with_type!(dtype, T => {
        // SAFETY: the caller's promise.
        let slice = |first: &*const u8| unsafe { std::slice::from_raw_parts(first.cast::<T>(), count) };
        let operands: smallvec::SmallVec<[&[T]; 8]> = operands.iter().map(slice).collect();
        // SAFETY: the caller's promise.
        unsafe { reduce_operands::<T>(op, &operands, to.cast()) };
    }, otherwise unreachable!("ReduceOp::check refuses it"));
}
