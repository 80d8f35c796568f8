//! Small calls, whose data fit into the packet that starts every call and need no further message.

use candle_core::{DType, Tensor};
use shardwise::comm::Call;
use shardwise::comm::engine::{ReceiveBuffer, contiguous, immutable, reduce, with_bytes};
use shardwise::{ReduceOp, Result, TensorMeta};
use smallvec::SmallVec;

use super::collectives::GatheredPieces;
use super::datatypes::divide_for_avg;
use super::packet::{DATA_BYTES, Packet};

/// How a small call uses the data of its packet. All ranks that make the same call choose the same variant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PacketCall {
    /// The call has no data.
    NoData,
    /// Every rank has an operand; operands are combined pair by pair while the packets are exchanged.
    Reduce,
    /// Every rank has an operand at a separate offset, and every rank reduces all of them in rank order.
    ReduceInOrder,
    /// Every rank has a piece at a separate offset.
    Gather,
    /// Only the root has data.
    FromRoot,
}

fn bytes_of(t: &Tensor) -> usize {
    t.elem_count().saturating_mul(t.dtype().size_in_bytes())
}

/// Whether operands may be combined pair by pair: not if that rounds f16 or bf16 more than once, or if rounding would depend
/// on the order although rank order was requested.
fn may_combine_pairwise(op: ReduceOp, dtype: DType, deterministic: bool) -> bool {
    let rounds = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::LogSumExp);
    let rounds = rounds && dtype.is_float();
    !rounds || !deterministic && !matches!(dtype, DType::F16 | DType::BF16)
}

impl PacketCall {
    /// How a call with valid arguments uses a packet; `None` if its data do not fit into one.
    pub(super) fn of(call: &Call, inputs: &[Tensor], size: usize, deterministic: bool) -> Option<Self> {
        let fits = |bytes: usize, kind: PacketCall| (bytes <= DATA_BYTES).then_some(kind);
        match call {
            Call::Barrier | Call::Agree { .. } => Some(PacketCall::NoData),
            Call::AllReduce { op } | Call::Reduce { op, .. } | Call::ReduceScatter { op, .. } => {
                let bytes = bytes_of(&inputs[0]);
                match may_combine_pairwise(*op, inputs[0].dtype(), deterministic) {
                    true => fits(bytes, PacketCall::Reduce),
                    false => fits(bytes.saturating_mul(size), PacketCall::ReduceInOrder),
                }
            }
            Call::AllGather { dim, sizes }
            | Call::Gather { dim, sizes, .. }
            | Call::ExchangeDims { from: dim, from_sizes: sizes, .. } => {
                fits(GatheredPieces::of(&inputs[0], *dim, sizes).bytes(), PacketCall::Gather)
            }
            Call::Broadcast { whole, .. } | Call::Scatter { whole, .. } => fits(whole.bytes(), PacketCall::FromRoot),
            Call::Expose | Call::AllToAll { .. } => None,
        }
    }

    /// Writes this rank's data into its packet.
    pub(super) fn pack(self, call: &Call, inputs: &[Tensor], me: usize, packet: &mut Packet) -> Result<()> {
        let Some(input) = inputs.first() else { return Ok(()) };
        let copied;
        // Copied into the packet right here, so it does not have to be detached or copied against later changes.
        let input = match input.is_contiguous() {
            true => input,
            false => {
                copied = contiguous(input)?;
                &copied
            }
        };
        Ok(with_bytes(input, |bytes| match self {
            PacketCall::NoData => {}
            PacketCall::Reduce => {
                if let Call::AllReduce { op } | Call::Reduce { op, .. } | Call::ReduceScatter { op, .. } = call {
                    // An average is a sum until `unpack` divides it.
                    let op = if *op == ReduceOp::Avg { ReduceOp::Sum } else { *op };
                    packet.put_operand(op, input.dtype(), bytes);
                }
            }
            PacketCall::ReduceInOrder => packet.put(me * bytes.len(), bytes),
            PacketCall::Gather => {
                if let Call::AllGather { dim, sizes }
                | Call::Gather { dim, sizes, .. }
                | Call::ExchangeDims { from: dim, from_sizes: sizes, .. } = call
                {
                    packet.put(GatheredPieces::of(input, *dim, sizes).bytes_before(me), bytes);
                }
            }
            PacketCall::FromRoot => packet.put(0, bytes),
        })?)
    }

    /// The outputs of rank `me` of `size`, from the combined packet of all ranks.
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
                one(concatenated(&GatheredPieces::of(&inputs[0], *dim, sizes), packet)?)
            }
            Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
                Ok(piece(&concatenated(&GatheredPieces::of(&inputs[0], *from, from_sizes), packet)?, *to, to_sizes)?)
            }
            Call::Broadcast { whole, root } => match inputs.first() {
                Some(input) if me == *root => one(contiguous(&immutable(input)?)?),
                _ => one(tensor(whole.clone(), packet)?),
            },
            Call::Scatter { whole, dim, sizes, .. } => Ok(piece(&tensor(whole.clone(), packet)?, *dim, sizes)?),
            Call::Barrier | Call::Agree { .. } | Call::Expose | Call::AllToAll { .. } => Ok(Vec::new()),
        }
    }

    /// The reduced tensor, of the shape and type of `like`.
    fn reduced(self, op: ReduceOp, like: &Tensor, size: usize, packet: &Packet) -> Result<Tensor> {
        let (dtype, count) = (like.dtype(), like.elem_count());
        let mut buffer = ReceiveBuffer::new(TensorMeta::new(like.dims(), dtype))?;
        let (first, bytes) = (packet.data.as_ptr(), count * dtype.size_in_bytes());
        // SAFETY: the data of a packet are aligned for every type and hold one operand, or one of every rank, which `of`
        // checked. All elements of the buffer are written.
        unsafe {
            if self == PacketCall::ReduceInOrder {
                let operands: SmallVec<[*const u8; 8]> = (0..size).map(|rank| first.add(rank * bytes)).collect();
                reduce(op, dtype, &operands, count, buffer.first());
            } else {
                buffer.first().copy_from_nonoverlapping(first, bytes);
                divide_for_avg(op, dtype, buffer.first(), count, size);
            }
            Ok(buffer.finish())
        }
    }
}

/// The tensor at the start of the data of a packet.
fn tensor(meta: TensorMeta, packet: &Packet) -> Result<Tensor> {
    let bytes = &packet.data[..meta.bytes()];
    let mut buffer = ReceiveBuffer::new(meta)?;
    // SAFETY: all bytes of the buffer are written.
    unsafe {
        buffer.first().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        Ok(buffer.finish())
    }
}

/// The tensor concatenated from the pieces of all ranks.
fn concatenated(pieces: &GatheredPieces<'_>, packet: &Packet) -> Result<Tensor> {
    let bytes = &packet.data[..pieces.bytes()];
    let mut buffer = pieces.buffer()?;
    // SAFETY: the pieces of all ranks fill the buffer.
    unsafe {
        buffer.first().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        pieces.finish(buffer)
    }
}
