//! Reductions: MPI's where it may choose the order of the operands, else ours in rank order.
//!
//! In rank order, a tensor is split into one chunk per rank; each rank receives its chunk from all ranks, reduces the
//! operands with the kernel that the thread engine uses, and sends the result on. That moves as many bytes as a ring, the
//! optimum, and allocates a segment beyond the result (and a contiguous copy of the operand, if it has gaps or is split on a
//! dimension other than the first).

use std::ffi::c_int;

use candle_core::{DType, Tensor};
use mpi::ffi;
use shardwise::comm::engine::{ReceiveBuffer, contiguous, reduce};
use shardwise::{ReduceOp, Result, TensorMeta};
use smallvec::SmallVec;

use super::comm::{Comm, collective, null_buffer};
use super::datatypes::{datatype, divide_for_avg, mpi_op};
use super::message_buffer::{CollectiveLimits, Counts, MessageBuffer, displacements, with_address};
use super::pairwise::exchange;

/// Up to this many bytes of all operands together, every rank gathers all of them and reduces them itself: latency dominates
/// there, and this takes one round of messages instead of two.
const GATHER_UP_TO: usize = 16 << 10;

/// From this many bytes on, our reduce_scatter in rank order is faster than MPI's: on two processes Open MPI 4.1 took up to
/// 2.8 times as long for 1 MB and 14 times as long for 64 MB.
const OWN_REDUCE_SCATTER_FROM: usize = 256 << 10;

/// A reduction of this rank's tensor with those of the other ranks.
pub(super) struct Reduction<'a> {
    comm: &'a Comm,
    limits: CollectiveLimits,
    op: ReduceOp,
    input: Tensor,
    dtype: DType,
    kind: ffi::MPI_Datatype,
    /// MPI's operation, if MPI may execute the reduction.
    own: Option<ffi::MPI_Op>,
}

impl<'a> Reduction<'a> {
    pub(super) fn new(comm: &'a Comm, limits: CollectiveLimits, op: ReduceOp, input: &Tensor) -> Result<Self> {
        let dtype = input.dtype();
        let own = if limits.deterministic { None } else { mpi_op(op, dtype) };
        Ok(Reduction { comm, limits, op, input: contiguous(input)?, dtype, kind: datatype(dtype), own })
    }

    fn count(&self) -> usize {
        self.input.elem_count()
    }

    fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size_in_bytes()
    }

    fn at(&self, first: *const u8, element: usize) -> *const u8 {
        first.wrapping_add(self.bytes(element))
    }

    fn buffer(&self, elements: usize) -> Result<ReceiveBuffer> {
        ReceiveBuffer::new(TensorMeta::new(elements, self.dtype))
    }

    /// Elements of one segment.
    fn segment(&self) -> usize {
        (self.limits.segment / self.dtype.size_in_bytes()).clamp(1, self.limits.largest_count)
    }

    /// First element and length of every segment.
    fn segments(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (segment, count) = (self.segment(), self.count());
        (0..count).step_by(segment).map(move |start| (start, segment.min(count - start)))
    }

    /// All-reduce: every rank gets the reduction.
    pub(super) fn all_reduce(&self) -> Result<Tensor> {
        let mut output = ReceiveBuffer::new(TensorMeta::new(self.input.dims(), self.dtype))?;
        let to = output.first();
        with_address(&self.input, |from| match self.own {
            Some(own) => {
                for (start, count) in self.segments() {
                    let (from, to, count) = (self.at(from, start), self.at(to, start).cast_mut(), count as c_int);
                    // SAFETY: a range of the input and the same range of the output.
                    unsafe { collective!(self.comm, MPI_Allreduce(from.cast(), to.cast(), count, self.kind, own))? };
                }
                // SAFETY: the output is written.
                unsafe { divide_for_avg(self.op, self.dtype, to, self.count(), self.comm.size()) };
                Ok(())
            }
            None if self.bytes(self.count()) * self.comm.size() <= GATHER_UP_TO => self.gather_and_reduce(from, to),
            None => self.in_rank_order(from, |start, part, counts| {
                let (to, starts) = (self.at(to, start).cast_mut().cast(), displacements(counts));
                let (mine, counts) = (counts[self.comm.rank()], counts.as_ptr());
                let kind = self.kind;
                // SAFETY: this rank's part, and room for the parts of all in the output.
                unsafe {
                    collective!(self.comm, MPI_Allgatherv(part.cast(), mine, kind, to, counts, starts.as_ptr(), kind))
                }
            }),
        })??;
        // SAFETY: the segments cover the output.
        Ok(unsafe { output.finish() })
    }

    /// Reduce: the root gets the reduction.
    pub(super) fn reduce_to(&self, root: usize) -> Result<Option<Tensor>> {
        let receives = self.comm.rank() == root;
        let mut output =
            if receives { Some(ReceiveBuffer::new(TensorMeta::new(self.input.dims(), self.dtype))?) } else { None };
        let to: *mut u8 = output.as_mut().map_or(null_buffer().cast(), ReceiveBuffer::first);
        let root = root as c_int;
        with_address(&self.input, |from| match self.own {
            Some(own) => {
                for (start, count) in self.segments() {
                    let (from, to, count) = (self.at(from, start), self.at(to, start).cast_mut(), count as c_int);
                    let kind = self.kind;
                    // SAFETY: a range of the input and, on the root, the same range of the output.
                    unsafe { collective!(self.comm, MPI_Reduce(from.cast(), to.cast(), count, kind, own, root))? };
                }
                if receives {
                    // SAFETY: the output is written.
                    unsafe { divide_for_avg(self.op, self.dtype, to, self.count(), self.comm.size()) };
                }
                Ok(())
            }
            None => self.in_rank_order(from, |start, part, counts| {
                let (to, starts) = (self.at(to, start).cast_mut().cast(), displacements(counts));
                let (mine, counts) = (counts[self.comm.rank()], counts.as_ptr());
                let kind = self.kind;
                // SAFETY: this rank's part, and on the root room for the parts of all in the output.
                unsafe {
                    collective!(
                        self.comm,
                        MPI_Gatherv(part.cast(), mine, kind, to, counts, starts.as_ptr(), kind, root)
                    )
                }
            }),
        })??;
        // SAFETY: the segments cover the output.
        Ok(output.map(|output| unsafe { output.finish() }))
    }

    /// Reduce-scatter: every rank gets its piece of the reduction; `counts` are the elements of the pieces in rank order.
    pub(super) fn reduce_scatter(&self, counts: &[usize], mine: TensorMeta) -> Result<Tensor> {
        let me = self.comm.rank();
        let mut output = ReceiveBuffer::new(mine)?;
        let to = output.first();
        with_address(&self.input, |from| -> Result<()> {
            match self.own {
                Some(own)
                    if self.bytes(self.count()) < OWN_REDUCE_SCATTER_FROM
                        && self.count() <= self.limits.largest_count =>
                {
                    let mine = counts[me];
                    let counts: Counts = counts.iter().map(|&n| n as c_int).collect();
                    let (to_, counts, kind) = (to.cast(), counts.as_ptr(), self.kind);
                    // SAFETY: the input has all pieces, the output this rank's.
                    unsafe {
                        collective!(self.comm, MPI_Reduce_scatter(from.cast(), to_, counts, kind, own))?;
                        divide_for_avg(self.op, self.dtype, to, mine, self.comm.size());
                    }
                    Ok(())
                }
                _ => {
                    let begins = displacements(counts);
                    // Each round reduces a part of every rank's piece.
                    let round = (self.segment() / self.comm.size()).max(1);
                    let longest = counts.iter().copied().max().unwrap_or(0);
                    let mut operands = self.buffer(self.comm.size() * round.min(longest))?;
                    for done in (0..longest).step_by(round) {
                        let part: Counts = counts.iter().map(|&n| round.min(n.saturating_sub(done)) as c_int).collect();
                        let at = |rank: usize| self.at(from, begins[rank] + done.min(counts[rank]));
                        self.reduce_own_chunk(
                            &at,
                            &part,
                            operands.first(),
                            self.at(to, done.min(counts[me])).cast_mut(),
                        )?;
                    }
                    Ok(())
                }
            }
        })??;
        // SAFETY: the rounds cover the output.
        Ok(unsafe { output.finish() })
    }

    /// Reduces segment by segment in rank order. `distribute` gets the first element of the segment, this rank's reduced
    /// chunk of it, and the element counts of the chunks of all ranks.
    fn in_rank_order(
        &self,
        from: *const u8,
        mut distribute: impl FnMut(usize, *const u8, &Counts) -> Result<()>,
    ) -> Result<()> {
        let (me, size) = (self.comm.rank(), self.comm.size());
        let largest = self.segment().min(self.count()).div_ceil(size);
        let (mut operands, mut reduced) = (self.buffer(largest * size)?, self.buffer(largest)?);
        for (start, count) in self.segments() {
            let each = count.div_ceil(size);
            let part: Counts = (0..size).map(|r| each.min(count.saturating_sub(r * each)) as c_int).collect();
            let at = |rank: usize| self.at(from, start + (rank * each).min(count));
            self.reduce_own_chunk(&at, &part, operands.first(), reduced.first())?;
            debug_assert!(part[me] as usize <= largest);
            distribute(start, reduced.first(), &part)?;
        }
        Ok(())
    }

    /// Sends every rank its chunk of the operand, and reduces this rank's chunk of all operands.
    fn reduce_own_chunk(
        &self,
        part_of: &dyn Fn(usize) -> *const u8,
        counts: &Counts,
        operands: *mut u8,
        to: *mut u8,
    ) -> Result<()> {
        let (me, size) = (self.comm.rank(), self.comm.size());
        let mine = counts[me] as usize;
        if self.count() > self.limits.largest_count {
            let send = |r: usize| MessageBuffer { first: part_of(r), bytes: self.bytes(counts[r] as usize) };
            let place = |r: usize| self.at(operands.cast_const(), r * mine).cast_mut();
            let receive = |r: usize| MessageBuffer { first: place(r), bytes: self.bytes(mine) };
            let (send, receive): (Vec<_>, Vec<_>) = ((0..size).map(send).collect(), (0..size).map(receive).collect());
            // SAFETY: parts of the input, and room for this rank's part from every rank.
            unsafe { exchange(self.comm, &send, &receive)? };
            self.reduce_operands(operands, mine, to);
            return Ok(());
        }
        let first = part_of(0);
        let offset = |rank: usize| ((part_of(rank) as usize - first as usize) / self.dtype.size_in_bytes()) as c_int;
        let offsets: Counts = (0..size).map(offset).collect();
        let received: Counts = std::iter::repeat_n(mine as c_int, size).collect();
        let places: Counts = (0..size).map(|r| (r * mine) as c_int).collect();
        let (kind, first) = (self.kind, first.cast());
        let (counts, offsets) = (counts.as_ptr(), offsets.as_ptr());
        let (received, places) = (received.as_ptr(), places.as_ptr());
        // SAFETY: parts of the input, and room for this rank's part from every rank.
        unsafe {
            collective!(
                self.comm,
                MPI_Alltoallv(first, counts, offsets, kind, operands.cast(), received, places, kind)
            )?;
        }
        self.reduce_operands(operands, mine, to);
        Ok(())
    }

    /// Reduces operands of `count` elements that are packed one after the other in rank order.
    fn reduce_operands(&self, first: *mut u8, count: usize, to: *mut u8) {
        let at = |r: usize| self.at(first.cast_const(), r * count);
        let operands: SmallVec<[*const u8; 8]> = (0..self.comm.size()).map(at).collect();
        // SAFETY: the callers have received the operands of all ranks there, and have room for the result.
        unsafe { reduce(self.op, self.dtype, &operands, count, to) };
    }

    /// Every rank gathers all operands and reduces them.
    fn gather_and_reduce(&self, from: *const u8, to: *mut u8) -> Result<()> {
        let (size, count) = (self.comm.size(), self.count());
        let mut operands = self.buffer(size * count)?;
        let (all, each, kind) = (operands.first(), count as c_int, self.kind);
        // SAFETY: the input, room for that of every rank, and the output.
        unsafe {
            collective!(self.comm, MPI_Allgather(from.cast(), each, kind, all.cast(), each, kind))?;
        }
        self.reduce_operands(all, count, to);
        Ok(())
    }
}
