//! Cumulative sums, products, maxima and minima. If the dimension is sharded, every rank scans its shard, and only the totals of
//! the shards are exchanged.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{OpEntry, SampleInput};
use crate::error::Result;
use crate::layout::{Layout, Runs, TensorMeta, coordinates};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward, is_in_gradient};
use shardwise_kernels::{contiguous, from_f64_vec, from_i64_vec, to_f64_vec, to_i64_vec};

/// A cumulative operation along a dimension; `cummax` and `cummin` also return indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Scan {
    pub(super) dim: usize,
    pub(super) kind: ScanKind,
    /// Scans from the last element to the first; sums and products only.
    pub(super) reverse: bool,
    /// Excludes the element itself (an exclusive scan); products only.
    pub(super) exclusive: bool,
}

/// What a scan accumulates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ScanKind {
    Sum,
    Prod,
    Max,
    Min,
}

/// The second half of a scan: combines the scan of a shard with the totals of the shards before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Carry(Scan);

impl DTensor {
    /// Computes the cumulative sum along a dimension; integers give i64.
    ///
    /// If the dimension is sharded, ranks exchange one total per line and shard.
    #[track_caller]
    pub fn cumsum(&self, dim: isize) -> Result<DTensor> {
        Ok(self.scan("cumsum", dim, ScanKind::Sum)?.swap_remove(0))
    }

    /// Computes the cumulative product along a dimension; integers give i64.
    ///
    /// If the dimension is sharded, ranks exchange one total per line and shard. The second derivative is not supported.
    #[track_caller]
    pub fn cumprod(&self, dim: isize) -> Result<DTensor> {
        Ok(self.scan("cumprod", dim, ScanKind::Prod)?.swap_remove(0))
    }

    /// Computes the cumulative maximum along a dimension and its last index (i64); NaN from the first NaN on.
    ///
    /// If the dimension is sharded, ranks exchange one maximum and index per line and shard.
    #[track_caller]
    pub fn cummax(&self, dim: isize) -> Result<(DTensor, DTensor)> {
        pair(self.scan("cummax", dim, ScanKind::Max)?)
    }

    /// Computes the cumulative minimum along a dimension and its last index (i64); NaN from the first NaN on.
    ///
    /// If the dimension is sharded, ranks exchange one minimum and index per line and shard.
    #[track_caller]
    pub fn cummin(&self, dim: isize) -> Result<(DTensor, DTensor)> {
        pair(self.scan("cummin", dim, ScanKind::Min)?)
    }

    /// Per element the product of all elements before it along a dimension.
    #[track_caller]
    pub(super) fn products_before(&self, dim: usize) -> Result<DTensor> {
        let op = Scan { dim, kind: ScanKind::Prod, reverse: false, exclusive: true };
        Ok(self.scanned(op)?.swap_remove(0))
    }

    /// Per element the product of all elements after it along a dimension.
    #[track_caller]
    pub(super) fn products_after(&self, dim: usize) -> Result<DTensor> {
        let op = Scan { dim, kind: ScanKind::Prod, reverse: true, exclusive: true };
        Ok(self.scanned(op)?.swap_remove(0))
    }

    #[track_caller]
    fn scan(&self, name: &'static str, dim: isize, kind: ScanKind) -> Result<Vec<DTensor>> {
        self.scanned(Scan { dim: self.resolve_dim(name, dim)?, kind, reverse: false, exclusive: false })
    }

    /// Runs a scan; returns the cumulative values and, for maxima and minima, their indices.
    #[track_caller]
    pub(super) fn scanned(&self, op: Scan) -> Result<Vec<DTensor>> {
        let site = Location::caller();
        // Totals are exchanged in a wider type, so that they are rounded once, at the end.
        if matches!(op.kind, ScanKind::Sum | ScanKind::Prod) && !self.layout().shard_order(op.dim).is_empty() {
            let layout = self.layout();
            // The total of one element is exact. f32 partial sums are handled below.
            let exact = |c: Vec<usize>| layout.owned(op.dim, &c).len() <= 1;
            let exact = coordinates(layout.mesh(), layout.shard_order(op.dim)).all(exact);
            let wide = match self.dtype() {
                DType::F16 | DType::BF16 => Some(DType::F32),
                DType::F32 if !exact && !layout.is_partial() && !is_in_gradient() => Some(DType::F64),
                _ => None,
            };
            if let Some(wide) = wide {
                let scanned = self.to_dtype(wide)?.scanned(op)?;
                return scanned.iter().map(|t| t.to_dtype(self.dtype())).collect();
            }
        }
        // Terms of f32 partial sums are scanned and exchanged in f64, and stay partial.
        let terms =
            (self.dtype() == DType::F32 && !is_in_gradient() && op.kind == ScanKind::Sum && self.layout().is_partial())
                .then(|| self.with_terms_in_f64())
                .transpose()?;
        let mut scanned = dispatch(&op, &[terms.as_ref().unwrap_or(self)], site)?;
        if scanned[0].layout().shard_order(op.dim).is_empty() {
            scanned.truncate(op.kind.outputs());
        } else {
            scanned = dispatch(&Carry(op), &scanned.iter().collect::<Vec<_>>(), site)?;
        }
        let saves = match op.kind {
            ScanKind::Sum => SaveForBackward::Nothing,
            ScanKind::Prod => SaveForBackward::Inputs,
            ScanKind::Max | ScanKind::Min => SaveForBackward::Outputs,
        };
        Ok(DTensor::recorded(scanned, &[self], saves, || Box::new(op)))
    }
}

fn pair(mut outputs: Vec<DTensor>) -> Result<(DTensor, DTensor)> {
    let indices = outputs.pop().expect("two outputs");
    Ok((outputs.pop().expect("two outputs"), indices))
}

impl ScanKind {
    /// The neutral element of sums and products.
    fn neutral(self) -> i8 {
        i8::from(self == ScanKind::Prod)
    }

    /// The number of output tensors: maxima and minima have indices too.
    fn outputs(self) -> usize {
        if matches!(self, ScanKind::Max | ScanKind::Min) { 2 } else { 1 }
    }

    fn dtype(self, input: DType) -> DType {
        match self {
            ScanKind::Sum | ScanKind::Prod if !input.is_float() => DType::I64,
            _ => input,
        }
    }

    /// The total after one more element, and whether that element is the new maximum or minimum.
    fn step_float(self, total: f64, x: f64) -> (f64, bool) {
        match self {
            ScanKind::Sum => (total + x, false),
            ScanKind::Prod => (total * x, false),
            ScanKind::Max if total.is_nan() && !x.is_nan() || x < total => (total, false),
            ScanKind::Min if total.is_nan() && !x.is_nan() || x > total => (total, false),
            ScanKind::Max | ScanKind::Min => (x, true),
        }
    }

    fn step_integer(self, total: i64, x: i64) -> (i64, bool) {
        match self {
            ScanKind::Sum => (total.wrapping_add(x), false),
            ScanKind::Prod => (total.wrapping_mul(x), false),
            ScanKind::Max if x < total => (total, false),
            ScanKind::Min if x > total => (total, false),
            ScanKind::Max | ScanKind::Min => (x, true),
        }
    }
}

impl Op for Scan {
    fn name(&self) -> &'static str {
        match self.kind {
            ScanKind::Sum => "cumsum",
            ScanKind::Prod => "cumprod",
            ScanKind::Max => "cummax",
            ScanKind::Min => "cummin",
        }
    }

    /// Outputs: the cumulative values of each shard (and their indices for maxima and minima), then the same for its last element.
    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let all = vec![dims.clone(); 2 * self.kind.outputs()];
        let signature = Signature::new(dims.iter().map(|_| DimSharding::Free), [dims.clone()], all);
        let of = |dtype: DType| TensorMeta { shape: x.shape.clone(), dtype };
        let one = [of(self.kind.dtype(x.dtype)), of(DType::I64)];
        let one = &one[..self.kind.outputs()];
        Ok(OpPlan { signature, outputs: [one, one].concat() })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        // A cumulative sum is linear, so partial sums pass, unless integers are widened to i64.
        let passes = |p: &Placement| {
            let sum = matches!(p, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg));
            sum && self.kind == ScanKind::Sum && plan.outputs[0].dtype.is_float()
        };
        let reduced: Vec<usize> = (0..inputs[0].mesh().ndim())
            .filter(|&a| inputs[0].placements()[a].is_partial() && !passes(&inputs[0].placements()[a]))
            .collect();
        let from = inputs[0].without_axes(&reduced)?.unstrided(&|dim| dim == self.dim)?;
        let (running, ends) =
            (vec![from.clone(); self.kind.outputs()], vec![totals(&from, self.dim)?; self.kind.outputs()]);
        Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: [running, ends].concat() })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let first = context.input_runs(0, self.dim).iter().next().map_or(0, |run| run.start);
        let lines = Lines::new(x.dims(), self.dim).reversed(self.reverse);
        let mut indices = vec![0i64; x.elem_count()];
        let mut shape = x.dims().to_vec();
        shape[self.dim] = shape[self.dim].min(1);
        let count = shape.iter().product();
        let mut last = vec![0i64; count];
        let dtype = self.kind.dtype(x.dtype());
        macro_rules! scan {
            ($values:expr, $step:ident, $from:ident) => {{
                let mut values = $values;
                let mut totals = Vec::with_capacity(count);
                for line in 0..count {
                    for j in 1..lines.n {
                        let (before, here) = (lines.at(line, j - 1), lines.at(line, j));
                        let (total, new) = self.kind.$step(values[before], values[here]);
                        values[here] = total;
                        indices[here] = if new { j as i64 } else { indices[before] };
                    }
                    let end = lines.at(line, lines.n - 1);
                    totals.push(values[end]);
                    last[line] = indices[end] + first as i64;
                    if self.exclusive {
                        for j in (1..lines.n).rev() {
                            values[lines.at(line, j)] = values[lines.at(line, j - 1)];
                        }
                        values[lines.at(line, 0)] = self.kind.neutral().into();
                    }
                }
                indices.iter_mut().for_each(|i| *i += first as i64);
                ($from(values, x.dims(), dtype)?, $from(totals, &shape, dtype)?)
            }};
        }
        let (values, totals) = match x.dtype().is_float() {
            true => scan!(to_f64_vec(x)?, step_float, from_f64_vec),
            false => scan!(to_i64_vec(x)?, step_integer, from_i64_vec),
        };
        if self.kind.outputs() == 1 {
            return Ok(vec![values, totals]);
        }
        Ok(vec![values, from_i64_vec(indices, x.dims(), DType::I64)?, totals, from_i64_vec(last, &shape, DType::I64)?])
    }

    /// `scanned` records the two operators as one call, which is a [`Backward`](crate::tensor::Backward) in `scan_gradient`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// The layout of one total per shard that is not empty.
pub(super) fn totals(from: &Layout, dim: usize) -> Result<Layout> {
    let one = |runs: &Runs| runs.len().min(1);
    let axes = from.shard_order(dim);
    let parts = coordinates(from.mesh(), axes).map(|c| one(&from.owned(dim, &c))).sum();
    from.resized(dim, parts, &one)
}

/// Where the elements of the lines along a dimension are in memory.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    pub(super) n: usize,
    inner: usize,
    reverse: bool,
}

impl Lines {
    pub(super) fn new(dims: &[usize], dim: usize) -> Self {
        Lines { n: dims[dim], inner: dims[dim + 1..].iter().product(), reverse: false }
    }

    /// These lines, indexed from their ends if `reverse`.
    pub(super) fn reversed(self, reverse: bool) -> Self {
        Lines { reverse, ..self }
    }

    pub(super) fn at(&self, line: usize, j: usize) -> usize {
        let j = if self.reverse { self.n - 1 - j } else { j };
        (line / self.inner * self.n + j) * self.inner + line % self.inner
    }
}

/// How many shards along `dim` of an input, of which `parts` are not empty, are scanned before the shard of this rank.
pub(super) fn scanned_before(
    context: &KernelContext<'_>,
    input: usize,
    dim: usize,
    parts: usize,
    reverse: bool,
) -> usize {
    let Some(start) = context.input_runs(input, dim).first() else { return 0 };
    let before = context.shards_before(input, dim, start);
    if reverse { parts.saturating_sub(1 + before) } else { before }
}

impl Op for Carry {
    fn name(&self) -> &'static str {
        Op::name(&self.0)
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let dims: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
        let count = self.0.kind.outputs();
        let signature = Signature::new(
            dims.iter().map(|_| DimSharding::Free),
            vec![dims.clone(); 2 * count],
            vec![dims.clone(); count],
        );
        Ok(OpPlan { signature, outputs: inputs[..count].to_vec() })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let (running, ends) = inputs.split_at(self.0.kind.outputs());
        let whole = ends[0].without_axes(running[0].shard_order(self.0.dim))?;
        let outputs: Vec<Layout> = running.iter().map(|&l| l.clone()).collect();
        let needs = outputs.iter().cloned().chain(ends.iter().map(|_| whole.clone())).map(RequiredInput::Layout);
        Ok(Decision { inputs: needs.collect(), outputs })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let Scan { dim, kind, reverse, .. } = self.0;
        let (running, ends) = inputs.split_at(kind.outputs());
        let (x, totals) = (&running[0], &ends[0]);
        let before = scanned_before(context, 0, dim, totals.dims()[dim], reverse);
        if before == 0 || x.elem_count() == 0 {
            return Ok(running.to_vec());
        }
        let lines = Lines::new(x.dims(), dim).reversed(reverse);
        let heads = Lines::new(totals.dims(), dim).reversed(reverse);
        let count = x.elem_count() / lines.n;
        let of = |tensors: &[Tensor]| tensors.get(1).map_or(Ok(Vec::new()), to_i64_vec);
        let (mut index, place) = (of(running)?, of(ends)?);
        macro_rules! carry {
            ($read:ident, $step:ident, $from:ident) => {{
                let (mut values, totals) = ($read(&contiguous(x)?)?, $read(&contiguous(totals)?)?);
                for line in 0..count {
                    let (mut total, mut from) = (totals[heads.at(line, 0)], heads.at(line, 0));
                    for part in 1..before {
                        let here = heads.at(line, part);
                        let (next, new) = kind.$step(total, totals[here]);
                        (total, from) = (next, if new { here } else { from });
                    }
                    for j in 0..lines.n {
                        let here = lines.at(line, j);
                        let (next, new) = kind.$step(total, values[here]);
                        values[here] = next;
                        if !new && !index.is_empty() {
                            index[here] = place[from];
                        }
                    }
                }
                $from(values, x.dims(), x.dtype())?
            }};
        }
        let values = match x.dtype().is_float() {
            true => carry!(to_f64_vec, step_float, from_f64_vec),
            false => carry!(to_i64_vec, step_integer, from_i64_vec),
        };
        if kind.outputs() == 1 {
            return Ok(vec![values]);
        }
        Ok(vec![values, from_i64_vec(index, x.dims(), DType::I64)?])
    }

    /// `scanned` records the two operators as one call, which is a [`Backward`](crate::tensor::Backward) in `scan_gradient`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "cumsum", samples, apply: |x| Ok(vec![x[0].cumsum(0)?, x[0].cumsum(-1)?]) },
    OpEntry { name: "cumprod", samples, apply: |x| Ok(vec![x[0].cumprod(0)?]) },
    OpEntry { name: "cummax", samples, apply: |x| x[0].cummax(0).map(|(values, indices)| vec![values, indices]) },
    OpEntry { name: "cummin", samples, apply: |x| x[0].cummin(0).map(|(values, indices)| vec![values, indices]) },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[7, 2], &[1, 8], &[0, 2]];
    let mut all: Vec<Vec<SampleInput>> = shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect();
    all.push(vec![SampleInput::index(&[9, 2], 3)]);
    all.push(vec![SampleInput::new(&[3, 5, 2], DType::F64)]);
    all
}
