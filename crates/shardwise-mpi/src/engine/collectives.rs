//! Execution of the calls of a group with MPI's collectives on contiguous memory.
//!
//! MPI splits and concatenates on the first dimension only. A tensor that is split on another dimension is first packed
//! piece by piece; pieces that are concatenated on another dimension are received one after the other and concatenated
//! then. Each takes one pass over memory.

use std::ffi::c_int;

use candle_core::Tensor;
use shardwise::comm::Call;
use shardwise::comm::engine::{ReceiveBuffer, concat, contiguous, immutable, split_packed, with_bytes};
use shardwise::{Result, TensorMeta};
use smallvec::SmallVec;

use super::comm::{Comm, collective, null_buffer};
use super::datatypes::datatype;
use super::message_buffer::{CollectiveLimits, Counts, MessageBuffer, displacements, packed_buffers, with_address};
use super::pairwise::exchange;
use super::reductions::Reduction;

/// Executes a call whose arguments are valid and on which all ranks agree. Collective.
pub(super) fn execute(comm: &Comm, limits: CollectiveLimits, call: &Call, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    if let Call::Barrier = call {
        comm.barrier()?;
        return Ok(Vec::new());
    }
    if comm.size() == 1 {
        return inputs.iter().map(|t| Ok(immutable(t)?)).collect();
    }
    let me = comm.rank();
    let input = || immutable(&inputs[0]);
    let one = |tensor: Result<Tensor>| tensor.map(|t| vec![t]);
    match call {
        Call::Barrier | Call::Agree { .. } | Call::Expose => Ok(Vec::new()),
        Call::AllReduce { op } => one(Reduction::new(comm, limits, *op, &input()?)?.all_reduce()),
        Call::Reduce { op, root } => {
            Ok(Reduction::new(comm, limits, *op, &input()?)?.reduce_to(*root)?.into_iter().collect())
        }
        Call::ReduceScatter { op, dim, sizes } => {
            let mut piece = TensorMeta::new(inputs[0].dims(), inputs[0].dtype());
            piece.shape[*dim] = 1;
            let counts: SmallVec<[usize; 8]> = sizes.iter().map(|size| size * piece.elem_count()).collect();
            piece.shape[*dim] = sizes[me];
            let pieces = split_packed(&input()?, *dim, sizes)?;
            one(Reduction::new(comm, limits, *op, &pieces)?.reduce_scatter(&counts, piece))
        }
        Call::AllGather { dim, sizes } => {
            let joined =
                GatheredPieces::of(&inputs[0], *dim, sizes).gather(comm, limits, &contiguous(&input()?)?, None)?;
            one(Ok(joined.expect("every rank is a receiver")))
        }
        Call::Gather { dim, sizes, root } => {
            let joined = GatheredPieces::of(&inputs[0], *dim, sizes).gather(
                comm,
                limits,
                &contiguous(&input()?)?,
                Some(*root),
            )?;
            Ok(joined.into_iter().collect())
        }
        Call::Scatter { whole, dim, sizes, root } => {
            one(scatter(comm, limits, inputs.first(), whole, *dim, sizes, *root))
        }
        Call::Broadcast { whole, root } => one(broadcast(comm, limits, inputs.first(), whole, *root)),
        Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
            let (input, mut piece) = (input()?, TensorMeta::new(inputs[0].dims(), inputs[0].dtype()));
            piece.shape[*to] = to_sizes[me];
            one(GatheredPieces::new(piece, *from, from_sizes).exchange(
                comm,
                &split_packed(&input, *to, to_sizes)?,
                to_sizes,
            ))
        }
        Call::AllToAll { expected } => all_to_all(comm, inputs, expected),
    }
}

/// A tensor that is concatenated from one piece per rank.
pub(super) struct GatheredPieces<'a> {
    dim: usize,
    sizes: &'a [usize],
    /// Shape and type of the concatenated tensor.
    whole: TensorMeta,
}

impl<'a> GatheredPieces<'a> {
    /// Pieces of the shape of `piece`, with `sizes` along `dim`.
    fn new(mut piece: TensorMeta, dim: usize, sizes: &'a [usize]) -> Self {
        piece.shape[dim] = sizes.iter().sum();
        GatheredPieces { dim, sizes, whole: piece }
    }

    pub(super) fn of(mine: &Tensor, dim: usize, sizes: &'a [usize]) -> Self {
        Self::new(TensorMeta::new(mine.dims(), mine.dtype()), dim, sizes)
    }

    /// Total bytes of all pieces.
    pub(super) fn bytes(&self) -> usize {
        self.whole.bytes()
    }

    /// Bytes of the pieces of all lower ranks.
    pub(super) fn bytes_before(&self, rank: usize) -> usize {
        (0..rank).map(|r| self.count(r)).sum::<usize>() * self.whole.dtype.size_in_bytes()
    }

    /// Number of elements in the piece of a rank.
    fn count(&self, rank: usize) -> usize {
        let rest = self.whole.shape.iter().enumerate().filter(|(d, _)| *d != self.dim).map(|(_, &n)| n);
        rest.product::<usize>() * self.sizes[rank]
    }

    /// Whether the pieces packed one after the other are already the concatenated tensor.
    fn is_packed(&self) -> bool {
        self.whole.shape[..self.dim].iter().all(|&n| n == 1) || self.whole.elem_count() == 0
    }

    /// Allocates memory for the pieces, packed in rank order.
    pub(super) fn buffer(&self) -> Result<ReceiveBuffer> {
        let flat = || TensorMeta::new(self.whole.elem_count(), self.whole.dtype);
        ReceiveBuffer::new(if self.is_packed() { self.whole.clone() } else { flat() })
    }

    /// Returns the concatenated tensor.
    ///
    /// # Safety
    /// All pieces have been received.
    pub(super) unsafe fn finish(&self, buffer: ReceiveBuffer) -> Result<Tensor> {
        // SAFETY: the caller's promise.
        let received = unsafe { buffer.finish() };
        if self.is_packed() {
            return Ok(received);
        }
        let counts: SmallVec<[usize; 8]> = (0..self.sizes.len()).map(|rank| self.count(rank)).collect();
        let starts = displacements(&counts);
        let piece = |rank: usize| {
            let mut shape = self.whole.shape.clone();
            shape[self.dim] = self.sizes[rank];
            Ok(received.narrow(0, starts[rank], counts[rank])?.reshape(shape)?)
        };
        let with_elements = (0..self.sizes.len()).filter(|&r| self.sizes[r] > 0);
        Ok(concat(&with_elements.map(piece).collect::<Result<Vec<_>>>()?, self.dim)?)
    }

    /// Gathers the pieces of all ranks, on every rank or on the root if there is one.
    fn gather(
        &self,
        comm: &Comm,
        limits: CollectiveLimits,
        mine: &Tensor,
        root: Option<usize>,
    ) -> Result<Option<Tensor>> {
        let receives = root.is_none_or(|root| root == comm.rank());
        let mut buffer = if receives { Some(self.buffer()?) } else { None };
        let to = buffer.as_mut().map_or(null_buffer(), |b| b.first().cast());
        with_address(mine, |from| -> Result<()> {
            let mine = mine.elem_count();
            if self.whole.elem_count() > limits.largest_count {
                return self.gather_in_pairs(comm, root, (from, mine), to.cast());
            }
            let (kind, from, mine) = (datatype(self.whole.dtype), from.cast(), mine as c_int);
            if root.is_none() && self.sizes.iter().all(|&size| size == self.sizes[0]) {
                // SAFETY: this rank's piece, and room for as many elements from all.
                return unsafe { collective!(comm, MPI_Allgather(from, mine, kind, to, mine, kind)) };
            }
            let counts: Counts = (0..comm.size()).map(|r| self.count(r) as c_int).collect();
            let starts = displacements(&counts);
            // SAFETY: this rank's piece, and room for the pieces of all where they are received.
            unsafe {
                match root {
                    None => {
                        collective!(comm, MPI_Allgatherv(from, mine, kind, to, counts.as_ptr(), starts.as_ptr(), kind))
                    }
                    Some(root) => {
                        let (counts, starts, root) = (counts.as_ptr(), starts.as_ptr(), root as c_int);
                        collective!(comm, MPI_Gatherv(from, mine, kind, to, counts, starts, kind, root))
                    }
                }
            }
        })??;
        // SAFETY: the pieces of all ranks fill it.
        buffer.map(|buffer| unsafe { self.finish(buffer) }).transpose()
    }

    fn gather_in_pairs(
        &self,
        comm: &Comm,
        root: Option<usize>,
        (from, mine): (*const u8, usize),
        to: *mut u8,
    ) -> Result<()> {
        let bytes = |count: usize| count * self.whole.dtype.size_in_bytes();
        let receives = |rank: usize| root.is_none_or(|root| root == rank);
        let send = |rank: usize| {
            let bytes = if receives(rank) { bytes(mine) } else { 0 };
            MessageBuffer { first: from, bytes }
        };
        let receive = |rank: usize| if receives(comm.rank()) { bytes(self.count(rank)) } else { 0 };
        let (send, receive): (Vec<_>, Vec<_>) =
            ((0..comm.size()).map(send).collect(), (0..comm.size()).map(receive).collect());
        // SAFETY: the pieces are packed in memory for all of them; all ranks know all sizes.
        unsafe { exchange(comm, &send, &packed_buffers(to, &receive)) }
    }

    /// Sends one piece to every rank and concatenates the pieces that it receives. The pieces to send are packed in
    /// `packed`, with sizes in the ratio of `shares`.
    fn exchange(&self, comm: &Comm, packed: &Tensor, shares: &[usize]) -> Result<Tensor> {
        let mut buffer = self.buffer()?;
        let element = self.whole.dtype.size_in_bytes();
        let share = packed.elem_count() * element / shares.iter().sum::<usize>().max(1);
        let send: SmallVec<[usize; 8]> = shares.iter().map(|n| n * share).collect();
        let send = with_address(packed, |first| packed_buffers(first.cast_mut(), &send))?;
        let send: SmallVec<[MessageBuffer<*const u8>; 8]> =
            send.iter().map(|part| MessageBuffer { first: part.first.cast_const(), bytes: part.bytes }).collect();
        let bytes: SmallVec<[usize; 8]> = (0..comm.size()).map(|rank| self.count(rank) * element).collect();
        let receive = packed_buffers(buffer.first(), &bytes);
        // SAFETY: the pieces live until the call returns; the received pieces are packed in memory for all of them.
        unsafe {
            exchange(comm, &send, &receive)?;
            self.finish(buffer)
        }
    }
}

/// The memory of contiguous tensors, which must outlive the messages.
fn buffers_of(tensors: &[Tensor]) -> Result<SmallVec<[MessageBuffer<*const u8>; 8]>> {
    let part = |t: &Tensor| Ok(with_bytes(t, |bytes| MessageBuffer { first: bytes.as_ptr(), bytes: bytes.len() })?);
    tensors.iter().map(part).collect()
}

/// Scatter: every rank gets its piece of the root's tensor.
fn scatter(
    comm: &Comm,
    limits: CollectiveLimits,
    input: Option<&Tensor>,
    whole: &TensorMeta,
    dim: usize,
    sizes: &[usize],
    root: usize,
) -> Result<Tensor> {
    let (me, element) = (comm.rank(), whole.dtype.size_in_bytes());
    let mut piece = whole.clone();
    piece.shape[dim] = 1;
    let row = piece.elem_count();
    piece.shape[dim] = sizes[me];
    let mut buffer = ReceiveBuffer::new(piece)?;
    let pieces = input.map(|t| split_packed(&immutable(t)?, dim, sizes)).transpose()?;
    let (to, mine) = (buffer.first(), sizes[me] * row);
    let run = |from: *const u8| {
        if whole.elem_count() > limits.largest_count {
            let bytes = |size: &usize| if me == root { size * row * element } else { 0 };
            let pieces = packed_buffers(from.cast_mut(), &sizes.iter().map(bytes).collect::<Vec<_>>());
            let send: Vec<_> =
                pieces.iter().map(|p| MessageBuffer { first: p.first.cast_const(), bytes: p.bytes }).collect();
            let bytes = |rank: usize| if rank == root { mine * element } else { 0 };
            let receive: Vec<_> = (0..comm.size()).map(|r| MessageBuffer { first: to, bytes: bytes(r) }).collect();
            // SAFETY: pieces of the root's tensor, and room for this rank's.
            return unsafe { exchange(comm, &send, &receive) };
        }
        let counts: Counts = sizes.iter().map(|s| (s * row) as c_int).collect();
        let (starts, kind, to) = (displacements(&counts), datatype(whole.dtype), to.cast());
        let (from, counts, starts, root) = (from.cast(), counts.as_ptr(), starts.as_ptr(), root as c_int);
        // SAFETY: pieces of the root's tensor, and room for this rank's.
        unsafe { collective!(comm, MPI_Scatterv(from, counts, starts, kind, to, mine as c_int, kind, root)) }
    };
    match &pieces {
        Some(pieces) => with_address(pieces, run)??,
        None => run(std::ptr::null())?,
    }
    // SAFETY: this rank's piece was received.
    Ok(unsafe { buffer.finish() })
}

/// Broadcast: every rank gets the root's tensor.
fn broadcast(
    comm: &Comm,
    limits: CollectiveLimits,
    input: Option<&Tensor>,
    whole: &TensorMeta,
    root: usize,
) -> Result<Tensor> {
    let element = whole.dtype.size_in_bytes();
    let run = |first: *mut u8| -> Result<()> {
        for start in (0..whole.elem_count()).step_by(limits.largest_count) {
            let count = limits.largest_count.min(whole.elem_count() - start) as c_int;
            let (kind, first) = (datatype(whole.dtype), first.wrapping_add(start * element).cast());
            // SAFETY: elements of the tensor, which the root only reads and the other ranks have room for.
            unsafe { collective!(comm, MPI_Bcast(first, count, kind, root as c_int))? };
        }
        Ok(())
    };
    if let Some(tensor) = input {
        let tensor = contiguous(&immutable(tensor)?)?;
        with_address(&tensor, |first| run(first.cast_mut()))??;
        return Ok(tensor);
    }
    let mut buffer = ReceiveBuffer::new(whole.clone())?;
    run(buffer.first())?;
    // SAFETY: all elements were received.
    Ok(unsafe { buffer.finish() })
}

/// All-to-all: every rank sends one tensor to every rank.
fn all_to_all(comm: &Comm, inputs: &[Tensor], expected: &[TensorMeta]) -> Result<Vec<Tensor>> {
    let inputs = inputs.iter().map(|t| Ok(contiguous(&immutable(t)?)?)).collect::<Result<Vec<_>>>()?;
    let mut buffers = expected.iter().map(|meta| ReceiveBuffer::new(meta.clone())).collect::<Result<Vec<_>>>()?;
    let receive: Vec<_> = buffers
        .iter_mut()
        .zip(expected)
        .map(|(b, meta)| MessageBuffer { first: b.first(), bytes: meta.bytes() })
        .collect();
    // SAFETY: live tensors, and room for what is expected from each rank.
    unsafe {
        exchange(comm, &buffers_of(&inputs)?, &receive)?;
        Ok(buffers.into_iter().map(|buffer| buffer.finish()).collect())
    }
}
