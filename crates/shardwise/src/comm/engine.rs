//! Building blocks for engines (transports) in other crates. Programs do not need them.
//!
//! An engine implements [`Communicator`](super::Communicator) for one rank of a group; that of the group of all ranks is passed to
//! [`World::new`](super::World::new). It checks calls with [`Call::check`](super::Call::check), compares the
//! [`fingerprint`]s of the ranks' calls, makes tensors contiguous with [`contiguous`], reads them with [`with_bytes`], receives
//! into a [`ReceiveBuffer`] and reduces with [`reduce`], which returns the same bits on every engine.

use candle_core::{DType, Tensor};

pub use super::check::{SAME_CALLS, SAME_VALUES, describe, fingerprint, meta_fingerprint};
pub use super::host::{
    available_cores, catch_panic, failure_text, launch_ended_error, limit_candle_threads, rank_pool, thread_number,
    wrong_thread_error,
};
pub use super::origin::CallOrigin;
pub use super::waiting::{WaitingTime, while_waiting};
pub use crate::fnv::fnv1a;
pub use shardwise_kernels::{concat, contiguous, immutable, split_packed, with_bytes};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::placement::ReduceOp;
use shardwise_kernels::{UninitBuffer, reduce_operands, with_type};

/// Uninitialized memory for a tensor that an engine receives.
///
/// ```
/// # use shardwise::{comm::engine::ReceiveBuffer, TensorMeta};
/// # use shardwise::candle_core::DType;
/// let mut buffer = ReceiveBuffer::new(TensorMeta::new(2, DType::U8))?;
/// // SAFETY: two elements of one byte, both written.
/// let tensor = unsafe {
///     buffer.first().copy_from([7, 9].as_ptr(), 2);
///     buffer.finish()
/// };
/// assert_eq!(tensor.to_vec1::<u8>().unwrap(), [7, 9]);
/// # Ok::<(), shardwise::Error>(())
/// ```
pub struct ReceiveBuffer {
    memory: UninitBuffer,
    shape: Vec<usize>,
}

impl ReceiveBuffer {
    /// Allocates memory for a tensor of this type and shape.
    pub fn new(meta: TensorMeta) -> Result<Self> {
        Ok(ReceiveBuffer { memory: UninitBuffer::new(meta.dtype, meta.elem_count())?, shape: meta.shape })
    }

    /// Address of the first element, aligned for the element type; [`empty_address`] if the tensor has no elements.
    pub fn first(&mut self) -> *mut u8 {
        if self.memory.count() == 0 { empty_address().cast_mut() } else { self.memory.first() }
    }

    /// Returns the tensor.
    ///
    /// # Safety
    /// Every element has been written.
    pub unsafe fn finish(self) -> Tensor {
        // SAFETY: the caller's promise; the buffer has one owner, so nobody else writes.
        unsafe { self.memory.finish(self.shape) }
    }
}

/// An address for empty memory: neither null nor a small number, which MPI libraries treat as special values.
pub fn empty_address() -> *const u8 {
    #[repr(align(64))]
    struct Aligned(u8);
    static NOWHERE: Aligned = Aligned(0);
    &raw const NOWHERE.0
}

/// Reduces `count` elements of each operand, in the order of the operands, and writes the result to `to`.
///
/// Half-precision types are summed in `f32` and rounded once. All engines use it, so that results are bitwise equal.
///
/// # Safety
/// There is at least one operand. The operands and `to` are aligned for the type and have room for `count` elements, the
/// operands are initialised, and `to` overlaps none of them. [`ReduceOp::check`] accepts the type.
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
