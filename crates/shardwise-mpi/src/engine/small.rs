//! Small calls, whose data travel in the packet with which every call begins.

use candle_core::{DType, Tensor};
use shardwise::comm::Call;
use shardwise::comm::engine::{ReceiveBuffer, contiguous, immutable, reduce, with_bytes};
use shardwise::{ReduceOp, Result, TensorMeta};
use smallvec::SmallVec;

use super::collectives::Join;
use super::element::finish;
use super::packet::{Packet, ROOM};

/// What a small call does with the data of its packet. All ranks that make the same call find the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Small {
    /// There are none.
    NoData,
    /// Every rank has an operand, and MPI combines them on the way.
    Reduce,
    /// Every rank has an operand at a place of its own, and all ranks reduce them in rank order.
    ReduceInOrder,
    /// Every rank has a piece at a place of its own.
    Gather,
    /// The root has a tensor.
    FromRoot,
}

fn bytes_of(t: &Tensor) -> usize {
    t.elem_count().saturating_mul(t.dtype().size_in_bytes())
}

/// Whether two operands may be combined before a third joins them: not where that rounds more than once, or in another order
/// than the one that was asked for.
fn may_be_paired(op: ReduceOp, dtype: DType, deterministic: bool) -> bool {
    let rounds = dtype.is_float() && matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product);
    !rounds || !deterministic && !matches!(dtype, DType::F16 | DType::BF16)
}

impl Small {
    /// What a call whose arguments are good does with a packet; `None` if it does not fit.
    pub(super) fn of(call: &Call, inputs: &[Tensor], size: usize, deterministic: bool) -> Option<Self> {
        let fits = |bytes: usize, small: Small| (bytes <= ROOM).then_some(small);
        match call {
            Call::Barrier | Call::Agree { .. } => Some(Small::NoData),
            Call::AllReduce { op } | Call::Reduce { op, .. } | Call::ReduceScatter { op, .. } => {
                let bytes = bytes_of(&inputs[0]);
                match may_be_paired(*op, inputs[0].dtype(), deterministic) {
                    true => fits(bytes, Small::Reduce),
                    false => fits(bytes.saturating_mul(size), Small::ReduceInOrder),
                }
            }
            Call::AllGather { dim, sizes }
            | Call::Gather { dim, sizes, .. }
            | Call::ExchangeDims { from: dim, from_sizes: sizes, .. } => {
                fits(Join::of(&inputs[0], *dim, sizes).bytes(), Small::Gather)
            }
            Call::Broadcast { whole, .. } | Call::Scatter { whole, .. } => fits(whole.bytes(), Small::FromRoot),
            Call::Expose | Call::AllToAll { .. } => None,
        }
    }

    /// Puts this rank's data into its packet.
    pub(super) fn pack(self, call: &Call, inputs: &[Tensor], me: usize, packet: &mut Packet) -> Result<()> {
        let Some(input) = inputs.first() else { return Ok(()) };
        let copied;
        // Copied into the packet at once: no need for memory that nobody can change.
        let input = match input.is_contiguous() {
            true => input,
            false => {
                copied = contiguous(input)?;
                &copied
            }
        };
        Ok(with_bytes(input, |bytes| match self {
            Small::NoData => {}
            Small::Reduce => {
                if let Call::AllReduce { op } | Call::Reduce { op, .. } | Call::ReduceScatter { op, .. } = call {
                    // A mean is its sum until all operands are there.
                    let op = if *op == ReduceOp::Avg { ReduceOp::Sum } else { *op };
                    packet.put_operand(op, input.dtype(), bytes);
                }
            }
            Small::ReduceInOrder => packet.put(me * bytes.len(), bytes),
            Small::Gather => {
                if let Call::AllGather { dim, sizes }
                | Call::Gather { dim, sizes, .. }
                | Call::ExchangeDims { from: dim, from_sizes: sizes, .. } = call
                {
                    packet.put(Join::of(input, *dim, sizes).bytes_before(me), bytes);
                }
            }
            Small::FromRoot => packet.put(0, bytes),
        })?)
    }

    /// What rank `me` of `size` gets from the packet of all ranks.
    pub(super) fn unpack(
        self,
        call: &Call,
        inputs: &[Tensor],
        (me, size): (usize, usize),
        packet: &Packet,
    ) -> Result<Vec<Tensor>> {
        let one = |tensor: Tensor| Ok(vec![tensor]);
        let piece = |whole: &Tensor, dim: usize, sizes: &[usize]| {
            contiguous(&whole.narrow(dim, sizes[..me].iter().sum(), sizes[me])?).map(|piece| vec![piece])
        };
        match call {
            Call::Reduce { root, .. } | Call::Gather { root, .. } if *root != me => Ok(Vec::new()),
            Call::AllReduce { op } | Call::Reduce { op, .. } => one(self.reduced(*op, &inputs[0], size, packet)?),
            Call::ReduceScatter { op, dim, sizes } => {
                Ok(piece(&self.reduced(*op, &inputs[0], size, packet)?, *dim, sizes)?)
            }
            Call::AllGather { dim, sizes } | Call::Gather { dim, sizes, .. } => {
                one(joined(&Join::of(&inputs[0], *dim, sizes), packet)?)
            }
            Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
                Ok(piece(&joined(&Join::of(&inputs[0], *from, from_sizes), packet)?, *to, to_sizes)?)
            }
            Call::Broadcast { whole, root } => match inputs.first() {
                Some(input) if me == *root => one(contiguous(&immutable(input)?)?),
                _ => one(tensor(whole.clone(), packet)?),
            },
            Call::Scatter { whole, dim, sizes, .. } => Ok(piece(&tensor(whole.clone(), packet)?, *dim, sizes)?),
            Call::Barrier | Call::Agree { .. } | Call::Expose | Call::AllToAll { .. } => Ok(Vec::new()),
        }
    }

    /// The reduction of operands like this one.
    fn reduced(self, op: ReduceOp, like: &Tensor, size: usize, packet: &Packet) -> Result<Tensor> {
        let (dtype, count) = (like.dtype(), like.elem_count());
        let mut buffer = ReceiveBuffer::new(TensorMeta::new(like.dims(), dtype))?;
        let (first, bytes) = (packet.data.as_ptr(), count * dtype.size_in_bytes());
        // SAFETY: the data of a packet are aligned for every type, and hold one operand, or one of every rank, as was checked
        // when the packet was chosen. All elements of the buffer are written.
        unsafe {
            if self == Small::ReduceInOrder {
                let operands: SmallVec<[*const u8; 8]> = (0..size).map(|rank| first.add(rank * bytes)).collect();
                reduce(op, dtype, &operands, count, buffer.first());
            } else {
                buffer.first().copy_from_nonoverlapping(first, bytes);
                finish(op, dtype, buffer.first(), count, size);
            }
            Ok(buffer.finish())
        }
    }
}

/// A tensor whose elements are the first data of a packet, which has them all.
fn tensor(meta: TensorMeta, packet: &Packet) -> Result<Tensor> {
    let bytes = &packet.data[..meta.bytes()];
    let mut buffer = ReceiveBuffer::new(meta)?;
    // SAFETY: all bytes of the buffer are written.
    unsafe {
        buffer.first().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        Ok(buffer.finish())
    }
}

/// The pieces of all ranks as one tensor.
fn joined(join: &Join<'_>, packet: &Packet) -> Result<Tensor> {
    let bytes = &packet.data[..join.bytes()];
    let mut buffer = join.buffer()?;
    // SAFETY: the pieces of all ranks fill the buffer.
    unsafe {
        buffer.first().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        join.finish(buffer)
    }
}
