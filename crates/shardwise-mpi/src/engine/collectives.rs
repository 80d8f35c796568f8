//! The calls of a group, carried out with MPI's collectives on memory without gaps.
//!
//! MPI cuts and joins along the first dimension only. A tensor that is to be cut along another is first copied, piece by
//! piece; pieces that are to be joined along another are received one after the other and then joined. Each takes one pass
//! over memory.

use std::ffi::c_int;

use candle_core::Tensor;
use shardwise::comm::Call;
use shardwise::comm::engine::{ReceiveBuffer, concat, contiguous, immutable, split_packed, with_bytes};
use shardwise::{Result, TensorMeta};
use smallvec::SmallVec;

use super::comm::{Comm, collective, nothing};
use super::element::datatype;
use super::pairs::exchange;
use super::parts::{Counts, Limits, Part, one_behind_the_other, starts, with_first};
use super::reductions::Reduction;

/// Carries out a call whose arguments are good and on which all ranks agree.
pub(super) fn carry_out(comm: &Comm, limits: Limits, call: &Call, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
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
        Call::AllReduce { op } => one(Reduction::new(comm, limits, *op, &input()?)?.all()),
        Call::Reduce { op, root } => {
            Ok(Reduction::new(comm, limits, *op, &input()?)?.to_root(*root)?.into_iter().collect())
        }
        Call::ReduceScatter { op, dim, sizes } => {
            let mut piece = TensorMeta::new(inputs[0].dims(), inputs[0].dtype());
            piece.shape[*dim] = 1;
            let counts: SmallVec<[usize; 8]> = sizes.iter().map(|size| size * piece.elem_count()).collect();
            piece.shape[*dim] = sizes[me];
            let pieces = split_packed(&input()?, *dim, sizes)?;
            one(Reduction::new(comm, limits, *op, &pieces)?.piece(&counts, piece))
        }
        Call::AllGather { dim, sizes } => {
            let joined = Join::of(&inputs[0], *dim, sizes).gather(comm, limits, &contiguous(&input()?)?, None)?;
            one(Ok(joined.expect("every rank is a receiver")))
        }
        Call::Gather { dim, sizes, root } => {
            let joined =
                Join::of(&inputs[0], *dim, sizes).gather(comm, limits, &contiguous(&input()?)?, Some(*root))?;
            Ok(joined.into_iter().collect())
        }
        Call::Scatter { whole, dim, sizes, root } => {
            one(scatter(comm, limits, inputs.first(), whole, *dim, sizes, *root))
        }
        Call::Broadcast { whole, root } => one(broadcast(comm, limits, inputs.first(), whole, *root)),
        Call::ExchangeDims { from, from_sizes, to, to_sizes } => {
            let (input, mut piece) = (input()?, TensorMeta::new(inputs[0].dims(), inputs[0].dtype()));
            piece.shape[*to] = to_sizes[me];
            one(Join::new(piece, *from, from_sizes).exchange(comm, &split_packed(&input, *to, to_sizes)?, to_sizes))
        }
        Call::AllToAll { expected } => all_to_all(comm, inputs, expected),
    }
}

/// Pieces of all ranks that become one tensor.
pub(super) struct Join<'a> {
    dim: usize,
    sizes: &'a [usize],
    /// The joined tensor.
    whole: TensorMeta,
}

impl<'a> Join<'a> {
    /// Pieces like this one but for their sizes along `dim`.
    fn new(mut piece: TensorMeta, dim: usize, sizes: &'a [usize]) -> Self {
        piece.shape[dim] = sizes.iter().sum();
        Join { dim, sizes, whole: piece }
    }

    pub(super) fn of(mine: &Tensor, dim: usize, sizes: &'a [usize]) -> Self {
        Self::new(TensorMeta::new(mine.dims(), mine.dtype()), dim, sizes)
    }

    /// Bytes of all pieces.
    pub(super) fn bytes(&self) -> usize {
        self.whole.bytes()
    }

    /// Bytes of the pieces of the ranks before this one.
    pub(super) fn bytes_before(&self, rank: usize) -> usize {
        (0..rank).map(|r| self.count(r)).sum::<usize>() * self.whole.dtype.size_in_bytes()
    }

    /// Elements of the piece of a rank.
    fn count(&self, rank: usize) -> usize {
        let rest = self.whole.shape.iter().enumerate().filter(|(d, _)| *d != self.dim).map(|(_, &n)| n);
        rest.product::<usize>() * self.sizes[rank]
    }

    /// Whether pieces one behind the other are the joined tensor.
    fn is_simple(&self) -> bool {
        self.whole.shape[..self.dim].iter().all(|&n| n == 1) || self.whole.elem_count() == 0
    }

    /// Memory for the pieces, one behind the other in rank order.
    pub(super) fn buffer(&self) -> Result<ReceiveBuffer> {
        let flat = || TensorMeta::new(self.whole.elem_count(), self.whole.dtype);
        ReceiveBuffer::new(if self.is_simple() { self.whole.clone() } else { flat() })
    }

    /// The joined tensor.
    ///
    /// # Safety
    /// All pieces have been received.
    pub(super) unsafe fn finish(&self, buffer: ReceiveBuffer) -> Result<Tensor> {
        // SAFETY: the caller's promise.
        let received = unsafe { buffer.finish() };
        if self.is_simple() {
            return Ok(received);
        }
        let counts: SmallVec<[usize; 8]> = (0..self.sizes.len()).map(|rank| self.count(rank)).collect();
        let starts = starts(&counts);
        let piece = |rank: usize| {
            let mut shape = self.whole.shape.clone();
            shape[self.dim] = self.sizes[rank];
            Ok(received.narrow(0, starts[rank], counts[rank])?.reshape(shape)?)
        };
        let with_elements = (0..self.sizes.len()).filter(|&r| self.sizes[r] > 0);
        Ok(concat(&with_elements.map(piece).collect::<Result<Vec<_>>>()?, self.dim)?)
    }

    /// Every rank, or the root if there is one, gets the pieces of all.
    fn gather(&self, comm: &Comm, limits: Limits, mine: &Tensor, root: Option<usize>) -> Result<Option<Tensor>> {
        let receives = root.is_none_or(|root| root == comm.rank());
        let mut buffer = if receives { Some(self.buffer()?) } else { None };
        let to = buffer.as_mut().map_or(nothing(), |b| b.first().cast());
        with_first(mine, |from| -> Result<()> {
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
            let starts = starts(&counts);
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
            Part { first: from, bytes }
        };
        let receive = |rank: usize| if receives(comm.rank()) { bytes(self.count(rank)) } else { 0 };
        let (send, receive): (Vec<_>, Vec<_>) =
            ((0..comm.size()).map(send).collect(), (0..comm.size()).map(receive).collect());
        // SAFETY: the pieces lie one behind the other in memory for all of them; all ranks know all sizes.
        unsafe { exchange(comm, &send, &one_behind_the_other(to, &receive)) }
    }

    /// Hands one piece to every rank and joins what comes from each. The pieces lie one behind the other in `cut`, in the
    /// ratio of `shares`.
    fn exchange(&self, comm: &Comm, cut: &Tensor, shares: &[usize]) -> Result<Tensor> {
        let mut buffer = self.buffer()?;
        let element = self.whole.dtype.size_in_bytes();
        let share = cut.elem_count() * element / shares.iter().sum::<usize>().max(1);
        let send: SmallVec<[usize; 8]> = shares.iter().map(|n| n * share).collect();
        let send = with_first(cut, |first| one_behind_the_other(first.cast_mut(), &send))?;
        let send: SmallVec<[Part<*const u8>; 8]> =
            send.iter().map(|part| Part { first: part.first.cast_const(), bytes: part.bytes }).collect();
        let bytes: SmallVec<[usize; 8]> = (0..comm.size()).map(|rank| self.count(rank) * element).collect();
        let receive = one_behind_the_other(buffer.first(), &bytes);
        // SAFETY: the pieces live until the call returns; what comes lies one behind the other in memory for all of it.
        unsafe {
            exchange(comm, &send, &receive)?;
            self.finish(buffer)
        }
    }
}

/// The memory of dense tensors, which must outlive what is done with it.
fn parts(tensors: &[Tensor]) -> Result<SmallVec<[Part<*const u8>; 8]>> {
    let part = |t: &Tensor| Ok(with_bytes(t, |bytes| Part { first: bytes.as_ptr(), bytes: bytes.len() })?);
    tensors.iter().map(part).collect()
}

/// Every rank gets its piece of the root's tensor.
fn scatter(
    comm: &Comm,
    limits: Limits,
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
            let pieces = one_behind_the_other(from.cast_mut(), &sizes.iter().map(bytes).collect::<Vec<_>>());
            let send: Vec<_> = pieces.iter().map(|p| Part { first: p.first.cast_const(), bytes: p.bytes }).collect();
            let bytes = |rank: usize| if rank == root { mine * element } else { 0 };
            let receive: Vec<_> = (0..comm.size()).map(|r| Part { first: to, bytes: bytes(r) }).collect();
            // SAFETY: pieces of the root's tensor, and room for this rank's.
            return unsafe { exchange(comm, &send, &receive) };
        }
        let counts: Counts = sizes.iter().map(|s| (s * row) as c_int).collect();
        let (starts, kind, to) = (starts(&counts), datatype(whole.dtype), to.cast());
        let (from, counts, starts, root) = (from.cast(), counts.as_ptr(), starts.as_ptr(), root as c_int);
        // SAFETY: pieces of the root's tensor, and room for this rank's.
        unsafe { collective!(comm, MPI_Scatterv(from, counts, starts, kind, to, mine as c_int, kind, root)) }
    };
    match &pieces {
        Some(pieces) => with_first(pieces, run)??,
        None => run(std::ptr::null())?,
    }
    // SAFETY: this rank's piece was received.
    Ok(unsafe { buffer.finish() })
}

/// Every rank gets the root's tensor.
fn broadcast(comm: &Comm, limits: Limits, input: Option<&Tensor>, whole: &TensorMeta, root: usize) -> Result<Tensor> {
    let element = whole.dtype.size_in_bytes();
    let run = |first: *mut u8| -> Result<()> {
        for start in (0..whole.elem_count()).step_by(limits.largest_count) {
            let count = limits.largest_count.min(whole.elem_count() - start) as c_int;
            let (kind, first) = (datatype(whole.dtype), first.wrapping_add(start * element).cast());
            // SAFETY: elements of the tensor, which the root only reads and the others have room for.
            unsafe { collective!(comm, MPI_Bcast(first, count, kind, root as c_int))? };
        }
        Ok(())
    };
    if let Some(tensor) = input {
        let tensor = contiguous(&immutable(tensor)?)?;
        with_first(&tensor, |first| run(first.cast_mut()))??;
        return Ok(tensor);
    }
    let mut buffer = ReceiveBuffer::new(whole.clone())?;
    run(buffer.first())?;
    // SAFETY: all elements were received.
    Ok(unsafe { buffer.finish() })
}

/// Every rank hands one tensor to every rank.
fn all_to_all(comm: &Comm, inputs: &[Tensor], expected: &[TensorMeta]) -> Result<Vec<Tensor>> {
    let inputs = inputs.iter().map(|t| Ok(contiguous(&immutable(t)?)?)).collect::<Result<Vec<_>>>()?;
    let mut buffers = expected.iter().map(|meta| ReceiveBuffer::new(meta.clone())).collect::<Result<Vec<_>>>()?;
    let receive: Vec<_> =
        buffers.iter_mut().zip(expected).map(|(b, meta)| Part { first: b.first(), bytes: meta.bytes() }).collect();
    // SAFETY: live tensors, and room for what is expected from each rank.
    unsafe {
        exchange(comm, &parts(&inputs)?, &receive)?;
        Ok(buffers.into_iter().map(|buffer| buffer.finish()).collect())
    }
}
