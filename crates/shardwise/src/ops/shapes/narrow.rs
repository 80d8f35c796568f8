//! Slices of a tensor along a dimension. Every rank keeps what it holds of the slice, so nothing moves: a slice of a sharded
//! dimension is a ragged shard.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, Runs, TensorMeta};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpKind, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{contiguous, index_select, reserve};

/// Every `step`-th index of `start..start + step * len` along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Narrow {
    dim: usize,
    start: usize,
    len: usize,
    step: usize,
}

impl DTensor {
    /// Returns the slice `start..start + len` of a dimension.
    ///
    /// Local: if the dimension is sharded, every rank keeps what it holds of the slice, and the result is sharded with the sizes
    /// that are left (a ragged shard). PyTorch's DTensor would gather the dimension.
    #[track_caller]
    pub fn narrow(&self, dim: isize, start: usize, len: usize) -> Result<DTensor> {
        let at = self.resolve_dim("narrow", dim)?;
        if start.checked_add(len).is_none_or(|end| end > self.shape()[at]) {
            return Err(self.bad_slice("narrow", &format!("{len} from {start}"), at));
        }
        self.sliced(Narrow { dim: at, start, len, step: 1 })
    }

    /// Returns the slice `[start:end:step]` of a dimension; negative ends count from the end, and ends beyond the tensor are
    /// clamped.
    ///
    /// Local, as [`narrow`](Self::narrow).
    #[track_caller]
    pub fn slice(&self, dim: isize, start: isize, end: Option<isize>, step: usize) -> Result<DTensor> {
        let at = self.resolve_dim("slice", dim)?;
        if step == 0 {
            return Err(self.bad_slice("slice", "step 0", at));
        }
        let n = self.shape()[at] as isize;
        let step = step.min(self.shape()[at].max(1)); // a longer one picks the first element too
        let edge = |i: isize| (if i < 0 { i.saturating_add(n) } else { i }).clamp(0, n) as usize;
        let (start, end) = (edge(start), edge(end.unwrap_or(n)));
        self.sliced(Narrow { dim: at, start, len: end.saturating_sub(start).div_ceil(step), step })
    }

    /// Returns the slice at one index of a dimension, without that dimension; a negative index counts from the end.
    ///
    /// If the dimension is sharded, the rank that holds the slice sends it to the other ranks along the sharding axes.
    #[track_caller]
    pub fn select(&self, dim: isize, index: isize) -> Result<DTensor> {
        let at = self.resolve_dim("select", dim)?;
        let n = self.shape()[at] as isize;
        let from_front = if index < 0 { index.saturating_add(n) } else { index };
        if !(0..n).contains(&from_front) {
            return Err(self.bad_slice("select", &format!("index {index}"), at));
        }
        self.sliced(Narrow { dim: at, start: from_front as usize, len: 1, step: 1 })?.squeeze(Some(at as isize))
    }

    /// Splits a dimension into pieces of the given sizes, whose sum is the size of the dimension.
    ///
    /// Local, as [`narrow`](Self::narrow). PyTorch's `split` with a list.
    #[track_caller]
    pub fn split_sizes(&self, sizes: &[usize], dim: isize) -> Result<Vec<DTensor>> {
        let at = self.resolve_dim("split", dim)?;
        if sizes.iter().try_fold(0usize, |sum, &s| sum.checked_add(s)) != Some(self.shape()[at]) {
            return Err(self.bad_slice("split", &format!("sizes {sizes:?}"), at));
        }
        let mut start = 0;
        let mut pieces = reserve(sizes.len())?;
        for &len in sizes {
            pieces.push(self.sliced(Narrow { dim: at, start, len, step: 1 })?);
            start += len;
        }
        Ok(pieces)
    }

    /// Splits a dimension into pieces of one size; the last may be smaller.
    ///
    /// Local, as [`narrow`](Self::narrow).
    #[track_caller]
    pub fn split(&self, size: usize, dim: isize) -> Result<Vec<DTensor>> {
        let at = self.resolve_dim("split", dim)?;
        let n = self.shape()[at];
        if size == 0 && n > 0 {
            return Err(self.bad_slice("split", "size 0", at));
        }
        let pieces = n.div_ceil(size.max(1)).max(1);
        let sizes: Vec<usize> = (0..pieces).map(|i| size.min(n - (i * size).min(n))).collect();
        self.split_sizes(&sizes, dim)
    }

    /// Splits a dimension into at most `chunks` pieces of equal size; the last may be smaller.
    ///
    /// Local, as [`narrow`](Self::narrow).
    #[track_caller]
    pub fn chunk(&self, chunks: usize, dim: isize) -> Result<Vec<DTensor>> {
        let at = self.resolve_dim("chunk", dim)?;
        if chunks == 0 {
            return Err(self.bad_slice("chunk", "0 pieces", at));
        }
        match self.shape()[at] {
            0 => {
                // An empty dimension gives as many empty tensors as were asked for, as in PyTorch.
                let mut sizes = reserve(chunks)?;
                sizes.resize(chunks, 0);
                self.split_sizes(&sizes, dim)
            }
            n => self.split(n.div_ceil(chunks), dim),
        }
    }

    /// Returns all slices of a dimension, without that dimension.
    ///
    /// Local if the dimension is not sharded; else one exchange moves the shards to another dimension, for all slices together.
    #[track_caller]
    pub fn unbind(&self, dim: isize) -> Result<Vec<DTensor>> {
        let at = self.resolve_dim("unbind", dim)?;
        if self.shape()[at] == 0 {
            return Ok(Vec::new());
        }
        dispatch(&Unbind { dim: at }, &[self], Location::caller())
    }

    #[track_caller]
    fn sliced(&self, op: Narrow) -> Result<DTensor> {
        if op.start == 0 && op.step == 1 && op.len == self.shape()[op.dim] {
            return Ok(self.clone());
        }
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }

    fn bad_slice(&self, name: &str, found: &str, dim: usize) -> Error {
        let found = format!("{found} along dimension {dim} in {name} of {}", self.layout());
        let needed = format!("a slice of a dimension of size {}", self.shape()[dim]);
        ErrorKind::Argument.error("slice", found, needed, "correct the arguments")
    }
}

impl Narrow {
    /// How many of these indices are in the slice.
    fn count(&self, runs: &Runs) -> usize {
        runs.iter().map(|run| self.picked(run.start, run.end).1).sum()
    }

    /// The first index of the slice at `from` or later, and how many there are before `to`.
    fn picked(&self, from: usize, to: usize) -> (usize, usize) {
        let end = self.start + self.len * self.step;
        let first = self.start + from.saturating_sub(self.start).div_ceil(self.step) * self.step;
        let last = to.min(end);
        (first, if first < last { (last - first).div_ceil(self.step) } else { 0 })
    }
}

impl Op for Narrow {
    fn name(&self) -> &'static str {
        if self.step == 1 { "narrow" } else { "slice" }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let signature =
            Signature::new(dims.iter().map(|_| DimSharding::Free), [dims.clone()], [dims.clone()]).allow_all_partial();
        let mut shape = x.shape.clone();
        shape[self.dim] = self.len;
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let from = inputs[0].unstrided(&|dim| dim == self.dim)?;
        let to = from.resized(self.dim, self.len, &|runs| self.count(runs))?;
        Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: vec![to] })
    }

    /// Every other element is a selection by index.
    fn kind(&self) -> OpKind {
        if self.step == 1 { OpKind::AnyType } else { OpKind::Arithmetic }
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let held = context.input_runs(0, self.dim);
        let Some(run) = held.iter().next() else { return Ok(vec![inputs[0].clone()]) };
        let (first, count) = self.picked(run.start, run.end);
        if self.step == 1 {
            let start = if count == 0 { 0 } else { first - run.start };
            return Ok(vec![contiguous(&inputs[0].narrow(self.dim, start, count)?)?]);
        }
        let positions: Vec<usize> = (0..count).map(|i| first + i * self.step - run.start).collect();
        Ok(vec![index_select(&inputs[0], self.dim, &positions)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let n = saved.shape(0)[op.dim];
            let (dim, behind) = (op.dim as isize, saved.shape(0).len() - 1 - op.dim);
            let along =
                |before: usize, after: usize, behind: usize| [vec![(0, 0); behind], vec![(before, after)]].concat();
            let mut spread = gradient.clone();
            if op.step > 1 {
                // Zeros between the elements; zeros after the last one that exceed the tensor are removed again.
                spread = spread.unsqueeze(dim + 1)?.pad(&along(0, op.step - 1, behind), 0.0)?.flatten(dim, dim + 1)?;
                spread = spread.narrow(dim, 0, (op.len * op.step).min(n - op.start))?;
            }
            let after = n - op.start - spread.shape()[op.dim];
            Ok(vec![Some(spread.pad(&along(op.start, after, behind), 0.0)?)])
        })
    }
}

/// All slices of a dimension, without that dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Unbind {
    dim: usize,
}

impl Op for Unbind {
    fn name(&self) -> &'static str {
        "unbind"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let (n, ndim) = (x.shape[self.dim], x.shape.len());
        let sharding = (0..ndim).map(|d| if d == self.dim { DimSharding::Never } else { DimSharding::Free });
        let kept: Vec<usize> = (0..ndim).filter(|&d| d != self.dim).collect();
        let mut names = reserve(n)?;
        names.resize(n, kept.iter().map(|&d| Some(d)).collect());
        let signature = Signature::new(sharding, [(0..ndim).map(Some).collect()], names).allow_all_partial();
        let mut outputs = reserve(n)?;
        outputs.resize(n, TensorMeta { shape: kept.iter().map(|&d| x.shape[d]).collect(), dtype: x.dtype });
        Ok(OpPlan { signature, outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let slice = |index| Ok(contiguous(&inputs[0].narrow(self.dim, index, 1)?.squeeze(self.dim)?)?);
        (0..inputs[0].dims()[self.dim]).map(slice).collect()
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, _, gradients| {
            let Some(known) = gradients.iter().flatten().next() else { return Ok(vec![None]) };
            let zero = known.zeros_like()?;
            let all: Vec<&DTensor> = gradients.iter().map(|g| g.as_ref().unwrap_or(&zero)).collect();
            Ok(vec![Some(DTensor::stack(&all, op.dim as isize)?)])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "narrow", samples, apply: |x| Ok(vec![x[0].narrow(0, 1, 3)?, x[0].narrow(-1, 0, 1)?]) },
    OpEntry {
        name: "slice",
        samples,
        apply: |x| Ok(vec![x[0].slice(0, 1, Some(-1), 2)?, x[0].slice(1, -2, None, 1)?, x[0].slice(0, 3, Some(2), 1)?]),
    },
    OpEntry { name: "select", samples, apply: |x| Ok(vec![x[0].select(0, -1)?, x[0].select(1, 0)?]) },
    OpEntry { name: "split", samples, apply: |x| x[0].split(2, 0) },
    OpEntry { name: "split_sizes", samples, apply: |x| x[0].split_sizes(&[1, 0, x[0].shape()[0] - 1], 0) },
    OpEntry { name: "chunk", samples, apply: |x| x[0].chunk(3, 0) },
    OpEntry { name: "unbind", samples, apply: |x| x[0].unbind(1) },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[8, 1], &[4, 2, 3]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect()
}
