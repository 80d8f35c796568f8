//! The work of a collective after the rendezvous: every rank reads the other ranks' tensors in place.
//!
//! Every rank computes a small result for itself. For a large one, each rank fills its part of one output, and after a
//! second phase all ranks hold that same output.

use std::sync::Arc;

use candle_core::{Storage, Tensor, WithDType};

use super::meeting::PostedEntry;
use crate::comm::Call;
use crate::comm::check::CallEntry;
use crate::error::Result;
use crate::layout::{TensorMeta, chunk};
use crate::placement::ReduceOp;
use shardwise_kernels::{Assembly, Reducible, concat, contiguous, immutable, own_copy, reduce_operands, with_type};

/// Parts of a shared reduction begin at multiples of this many elements, so that no cache line has two writers, and
/// vectorized loops have few remainders.
const GRAIN: usize = 1024;

/// Runs of fewer elements are first copied into one contiguous tensor: the overhead per run would exceed the reduction.
const MIN_RUN: usize = 256;

/// Prepares an entry for reads by other ranks; on the first rank, allocates the output that all ranks fill, if any.
pub(super) fn prepare(entry: &mut CallEntry, me: usize, size: usize) -> Option<Assembly> {
    if entry.refused.is_some() {
        return None;
    }
    prepare_inputs(entry).and_then(|()| prepare_output(entry, me, size)).unwrap_or_else(|error| {
        entry.refused = Some(error);
        None
    })
}

/// Makes operands of reductions contiguous, since they are read as slices, and replaces empty views by empty tensors.
fn prepare_inputs(entry: &mut CallEntry) -> Result<()> {
    let reduces = matches!(entry.call, Call::AllReduce { .. } | Call::Reduce { .. } | Call::ReduceScatter { .. });
    for input in &mut entry.inputs {
        *input = immutable(input)?;
        if reduces || input.elem_count() == 0 {
            *input = contiguous(input)?;
        }
    }
    Ok(())
}

fn prepare_output(entry: &CallEntry, me: usize, size: usize) -> Result<Option<Assembly>> {
    let (mut shape, dtype) = match entry.inputs.first() {
        Some(input) if me == 0 && size > 1 => (input.dims().to_vec(), input.dtype()),
        _ => return Ok(None),
    };
    match &entry.call {
        Call::AllReduce { .. } | Call::Reduce { .. } => {}
        Call::AllGather { dim, sizes } => shape[*dim] = sizes.iter().sum(),
        _ => return Ok(None),
    }
    let output = TensorMeta { shape, dtype };
    Ok((output.bytes() >= Call::SHARED_OUTPUT_MIN_BYTES).then(|| Assembly::new(output)).transpose()?)
}

/// Executes a call on which all ranks agree. `pass` waits for all ranks to reach the second phase.
pub(super) fn execute(all: &[Arc<PostedEntry>], me: usize, pass: impl FnOnce() -> Result<()>) -> Result<Vec<Tensor>> {
    let shared = all[0].output.as_ref();
    let input = |rank: usize| &all[rank].entry.inputs[0];
    let inputs = || (0..all.len()).map(input).collect::<Vec<_>>();
    let only = |tensor: Result<Tensor>| tensor.map(|t| vec![t]);
    match &all[me].entry.call {
        Call::Barrier | Call::Agree { .. } | Call::Expose => Ok(Vec::new()),
        Call::AllReduce { op } => only(all_reduce(&inputs(), *op, me, shared, pass)),
        Call::Reduce { op, root } if shared.is_some() || me == *root => {
            let reduced = all_reduce(&inputs(), *op, me, shared, pass)?;
            Ok(if me == *root { vec![reduced] } else { Vec::new() })
        }
        Call::AllGather { dim, sizes } => match shared {
            Some(output) => only(gather_into(output, input(me), *dim, sizes[..me].iter().sum(), pass)),
            None => only(Ok(concat(&(0..all.len()).map(|r| input(r).clone()).collect::<Vec<_>>(), *dim)?)),
        },
        Call::Reduce { .. } => Ok(Vec::new()),
        call if call.has_second_phase(&all[me].entry.inputs) => {
            let read = read_others(call, all, me);
            // Even after an error: the other ranks wait for this one here.
            pass()?;
            read
        }
        call => read_others(call, all, me),
    }
}

/// The results that a rank computes from the other ranks' tensors, or shares with them.
fn read_others(call: &Call, all: &[Arc<PostedEntry>], me: usize) -> Result<Vec<Tensor>> {
    let input = |rank: usize| &all[rank].entry.inputs[0];
    let inputs = || (0..all.len()).map(input).collect::<Vec<_>>();
    let only = |tensor: Result<Tensor>| tensor.map(|t| vec![t]);
    match call {
        Call::Gather { dim, root, .. } if me == *root => {
            only(Ok(concat(&(0..all.len()).map(|r| input(r).clone()).collect::<Vec<_>>(), *dim)?))
        }
        Call::Gather { .. } => Ok(Vec::new()),
        Call::ReduceScatter { op, dim, sizes } => {
            only(reduce_piece(&inputs(), *op, *dim, sizes[..me].iter().sum(), sizes[me]))
        }
        Call::Scatter { dim, sizes, root, .. } => {
            let piece = input(*root).narrow(*dim, sizes[..me].iter().sum(), sizes[me])?;
            // Copied: the root may overwrite its tensor, and a view would keep all of it alive.
            only(Ok(own_copy(&piece)?))
        }
        Call::Broadcast { root, .. } => Ok(vec![input(*root).clone()]),
        Call::ExchangeDims { from, to, to_sizes, .. } => {
            let start = to_sizes[..me].iter().sum();
            let pieces = inputs().into_iter().map(|t| Ok(t.narrow(*to, start, to_sizes[me])?));
            only(Ok(concat(&pieces.collect::<Result<Vec<_>>>()?, *from)?))
        }
        Call::AllToAll { .. } => Ok(all.iter().map(|p| p.entry.inputs[me].clone()).collect()),
        Call::Barrier | Call::Agree { .. } | Call::Expose | Call::AllReduce { .. } | Call::Reduce { .. } => {
            unreachable!("executed above")
        }
        Call::AllGather { .. } => unreachable!("executed above"),
    }
}

/// Copies this rank's input into the shared output, at `start` along `dim`.
fn gather_into(
    output: &Assembly,
    input: &Tensor,
    dim: usize,
    start: usize,
    pass: impl FnOnce() -> Result<()>,
) -> Result<Tensor> {
    let mut offsets = vec![0; input.rank()];
    offsets[dim] = start;
    // SAFETY: all ranks agree on shapes and sizes, so their parts are disjoint and cover the output; each rank writes its
    // own part. No rank calls finish before all have passed.
    unsafe { output.paste(input, &offsets) };
    pass()?;
    // SAFETY: every rank has written its part before the phase that just ended.
    Ok(unsafe { output.finish() })
}

/// Reduces tensors of one shape: all elements, or this rank's share of them into the shared output.
fn all_reduce(
    inputs: &[&Tensor],
    op: ReduceOp,
    me: usize,
    shared: Option<&Assembly>,
    pass: impl FnOnce() -> Result<()>,
) -> Result<Tensor> {
    if inputs.len() == 1 {
        return Ok(inputs[0].clone());
    }
    let count = inputs[0].elem_count();
    let Some(output) = shared else {
        return reduce_piece(inputs, op, 0, 0, inputs[0].dims().first().copied().unwrap_or(1));
    };
    let grains = chunk(count.div_ceil(GRAIN), inputs.len(), me);
    let (from, to) = (count.min(grains.start * GRAIN), count.min(grains.end * GRAIN));
    // SAFETY: the ranges of the ranks are disjoint and cover the output; no rank calls finish before all have passed.
    unsafe { reduce_runs(inputs, op, output, &[(from, from)], to - from) };
    pass()?;
    // SAFETY: every rank has written its range before the phase that just ended.
    Ok(unsafe { output.finish() })
}

/// Reduces the indices `start..start + size` along `dim`.
fn reduce_piece(inputs: &[&Tensor], op: ReduceOp, dim: usize, start: usize, size: usize) -> Result<Tensor> {
    let shape = inputs[0].dims();
    let (extent, inner) = match shape {
        [] => (1, 1),
        _ => (shape[dim], shape[dim + 1..].iter().product::<usize>()),
    };
    let outer: usize = shape[..dim].iter().product();
    let mut piece = shape.to_vec();
    if let Some(n) = piece.get_mut(dim) {
        *n = size;
    }
    if outer > 1 && size < extent && size * inner < MIN_RUN {
        let narrow = |t: &&Tensor| Ok(contiguous(&t.narrow(dim, start, size)?)?);
        let narrowed = inputs.iter().map(narrow).collect::<Result<Vec<_>>>()?;
        return reduce_piece(&narrowed.iter().collect::<Vec<_>>(), op, dim, 0, size);
    }
    let output = Assembly::new(TensorMeta { shape: piece, dtype: inputs[0].dtype() })?;
    let (outer, run) = if size == extent { (1, outer * size * inner) } else { (outer, size * inner) };
    let runs: Vec<(usize, usize)> = (0..outer).map(|o| ((o * extent + start) * inner, o * run)).collect();
    // SAFETY: one thread; the runs are disjoint and fill the output.
    unsafe {
        reduce_runs(inputs, op, &output, &runs, run);
        Ok(output.finish())
    }
}

/// Reduces runs of `len` elements, given as (position in the inputs, position in the output).
///
/// # Safety
/// The inputs are contiguous, of one type and shape; the runs are inside inputs and output; no other thread writes there.
unsafe fn reduce_runs(inputs: &[&Tensor], op: ReduceOp, output: &Assembly, runs: &[(usize, usize)], len: usize) {
    fn typed<T: WithDType + Reducible>(
        inputs: &[&Tensor],
        op: ReduceOp,
        output: &Assembly,
        runs: &[(usize, usize)],
        len: usize,
    ) {
        if len == 0 {
            return;
        }
        let guards: Vec<_> = inputs.iter().map(|t| t.storage_and_layout()).collect();
        let whole = guards.iter().map(|(storage, layout)| {
            let Storage::Cpu(cpu) = &**storage else { unreachable!("checked on entry") };
            &T::cpu_storage_as_slice(cpu).expect("one type, checked on entry")[layout.start_offset()..]
        });
        let whole: Vec<&[T]> = whole.collect();
        let mut srcs = Vec::with_capacity(whole.len());
        for &(from, to) in runs {
            srcs.clear();
            srcs.extend(whole.iter().map(|s| &s[from..from + len]));
            // SAFETY: the promise of the outer function.
            unsafe { reduce_operands(op, &srcs, output.range::<T>(to)) };
        }
    }
    with_type!(inputs[0].dtype(), T => typed::<T>(inputs, op, output, runs, len), otherwise unreachable!("checked on entry"));
}
