//! Running sums, products and extremes. Where the dimension is cut, every rank scans its part, and only the totals of the
//! parts are exchanged.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{OpEntry, Sample};
use crate::error::Result;
use crate::layout::{Layout, Runs, TensorMeta, coordinates};
use crate::op::{Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, Need, Shared, Signature};
use crate::tensor::{DTensor, Keeps, is_in_gradient};
use shardwise_kernels::{contiguous, from_f64_vec, from_i64_vec, to_f64_vec, to_i64_vec};

/// A running total along a dimension, with the index of the running extreme where there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Scan {
    pub(super) dim: usize,
    pub(super) kind: Kind,
    /// From the last element to the first; sums and products only.
    pub(super) reverse: bool,
    /// The total of what comes before an element, without the element itself; products only.
    pub(super) exclusive: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Sum,
    Prod,
    Max,
    Min,
}

/// The totals before a rank's part, put to its own running totals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Carry(Scan);

impl DTensor {
    /// The running sum along a dimension; integers give i64.
    #[track_caller]
    pub fn cumsum(&self, dim: isize) -> Result<DTensor> {
        Ok(self.scan("cumsum", dim, Kind::Sum)?.swap_remove(0))
    }

    /// The running product along a dimension; integers give i64.
    #[track_caller]
    pub fn cumprod(&self, dim: isize) -> Result<DTensor> {
        Ok(self.scan("cumprod", dim, Kind::Prod)?.swap_remove(0))
    }

    /// The running maximum along a dimension and the last index where it is; NaN wins from where it stands on.
    #[track_caller]
    pub fn cummax(&self, dim: isize) -> Result<(DTensor, DTensor)> {
        pair(self.scan("cummax", dim, Kind::Max)?)
    }

    /// The running minimum along a dimension and the last index where it is; NaN wins from where it stands on.
    #[track_caller]
    pub fn cummin(&self, dim: isize) -> Result<(DTensor, DTensor)> {
        pair(self.scan("cummin", dim, Kind::Min)?)
    }

    /// Per element the product of all that come before it along a dimension.
    #[track_caller]
    pub(super) fn products_before(&self, dim: usize) -> Result<DTensor> {
        let op = Scan { dim, kind: Kind::Prod, reverse: false, exclusive: true };
        Ok(self.scanned(op)?.swap_remove(0))
    }

    /// Per element the product of all that come after it along a dimension.
    #[track_caller]
    pub(super) fn products_after(&self, dim: usize) -> Result<DTensor> {
        let op = Scan { dim, kind: Kind::Prod, reverse: true, exclusive: true };
        Ok(self.scanned(op)?.swap_remove(0))
    }

    #[track_caller]
    fn scan(&self, name: &'static str, dim: isize, kind: Kind) -> Result<Vec<DTensor>> {
        self.scanned(Scan { dim: self.resolve_dim(name, dim)?, kind, reverse: false, exclusive: false })
    }

    /// The running totals and, for extremes, their indices.
    #[track_caller]
    pub(super) fn scanned(&self, op: Scan) -> Result<Vec<DTensor>> {
        let site = Location::caller();
        // Totals that are exchanged must not be rounded before the last one is known.
        if matches!(op.kind, Kind::Sum | Kind::Prod) && !self.layout().shard_order(op.dim).is_empty() {
            let layout = self.layout();
            // The total of one element is exact; pending terms of f32 are seen to below.
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
        // Pending terms of f32 are scanned and exchanged in f64, and stay pending.
        let terms =
            (self.dtype() == DType::F32 && !is_in_gradient() && op.kind == Kind::Sum && self.layout().is_partial())
                .then(|| self.with_terms_in_f64())
                .transpose()?;
        let mut scanned = dispatch(&op, &[terms.as_ref().unwrap_or(self)], site)?;
        if scanned[0].layout().shard_order(op.dim).is_empty() {
            scanned.truncate(op.kind.outputs());
        } else {
            scanned = dispatch(&Carry(op), &scanned.iter().collect::<Vec<_>>(), site)?;
        }
        let keeps = match op.kind {
            Kind::Sum => Keeps::Nothing,
            Kind::Prod => Keeps::Inputs,
            Kind::Max | Kind::Min => Keeps::Outputs,
        };
        Ok(DTensor::recorded(scanned, &[self], keeps, || Box::new(op)))
    }
}

fn pair(mut outputs: Vec<DTensor>) -> Result<(DTensor, DTensor)> {
    let indices = outputs.pop().expect("two outputs");
    Ok((outputs.pop().expect("two outputs"), indices))
}

impl Kind {
    /// The total of nothing, for kinds that have one.
    fn neutral(self) -> i8 {
        i8::from(self == Kind::Prod)
    }

    /// How many tensors tell a total: extremes have an index too.
    fn outputs(self) -> usize {
        if matches!(self, Kind::Max | Kind::Min) { 2 } else { 1 }
    }

    fn dtype(self, input: DType) -> DType {
        match self {
            Kind::Sum | Kind::Prod if !input.is_float() => DType::I64,
            _ => input,
        }
    }

    /// The total after one more element, and whether the element is the new extreme.
    fn real(self, total: f64, x: f64) -> (f64, bool) {
        match self {
            Kind::Sum => (total + x, false),
            Kind::Prod => (total * x, false),
            Kind::Max if total.is_nan() && !x.is_nan() || x < total => (total, false),
            Kind::Min if total.is_nan() && !x.is_nan() || x > total => (total, false),
            Kind::Max | Kind::Min => (x, true),
        }
    }

    fn whole(self, total: i64, x: i64) -> (i64, bool) {
        match self {
            Kind::Sum => (total.wrapping_add(x), false),
            Kind::Prod => (total.wrapping_mul(x), false),
            Kind::Max if x < total => (total, false),
            Kind::Min if x > total => (total, false),
            Kind::Max | Kind::Min => (x, true),
        }
    }
}

impl Op for Scan {
    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Sum => "cumsum",
            Kind::Prod => "cumprod",
            Kind::Max => "cummax",
            Kind::Min => "cummin",
        }
    }

    /// Outputs: running totals (with their indices for extremes), and the same for the end of every part.
    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let all = vec![dims.clone(); 2 * self.kind.outputs()];
        let signature = Signature::new(dims.iter().map(|_| Shared::Free), [dims.clone()], all);
        let of = |dtype: DType| TensorMeta { shape: x.shape.clone(), dtype };
        let one = [of(self.kind.dtype(x.dtype)), of(DType::I64)];
        let one = &one[..self.kind.outputs()];
        Ok(OpPlan { signature, outputs: [one, one].concat() })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        // A running sum is linear in what it adds up, as long as it is not widened on the way.
        let passes = |p: &Placement| {
            let sum = matches!(p, Placement::Partial(ReduceOp::Sum | ReduceOp::Avg));
            sum && self.kind == Kind::Sum && plan.outputs[0].dtype.is_float()
        };
        let pending: Vec<usize> = (0..inputs[0].mesh().ndim())
            .filter(|&a| inputs[0].placements()[a].is_partial() && !passes(&inputs[0].placements()[a]))
            .collect();
        let from = inputs[0].without_axes(&pending)?.unstrided(&|dim| dim == self.dim)?;
        let (running, ends) =
            (vec![from.clone(); self.kind.outputs()], vec![totals(&from, self.dim)?; self.kind.outputs()]);
        Ok(Decision { inputs: vec![Need::As(from)], outputs: [running, ends].concat() })
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let first = at.input(0, self.dim).iter().next().map_or(0, |run| run.start);
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
            true => scan!(to_f64_vec(x)?, real, from_f64_vec),
            false => scan!(to_i64_vec(x)?, whole, from_i64_vec),
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

/// The layout of one total per part that holds anything.
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

    /// The same lines, counted from their ends if `reverse`.
    pub(super) fn reversed(self, reverse: bool) -> Self {
        Lines { reverse, ..self }
    }

    pub(super) fn at(&self, line: usize, j: usize) -> usize {
        let j = if self.reverse { self.n - 1 - j } else { j };
        (line / self.inner * self.n + j) * self.inner + line % self.inner
    }
}

/// How many of the shards along `dim` of an input, of which `parts` hold anything, are scanned before the one that this
/// rank holds.
pub(super) fn scanned_before(at: &Place<'_>, input: usize, dim: usize, parts: usize, reverse: bool) -> usize {
    let Some(start) = at.input(input, dim).first() else { return 0 };
    let before = at.parts_before(input, dim, start);
    if reverse { parts.saturating_sub(1 + before) } else { before }
}

impl Op for Carry {
    fn name(&self) -> &'static str {
        Op::name(&self.0)
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let dims: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
        let count = self.0.kind.outputs();
        let signature =
            Signature::new(dims.iter().map(|_| Shared::Free), vec![dims.clone(); 2 * count], vec![dims.clone(); count]);
        Ok(OpPlan { signature, outputs: inputs[..count].to_vec() })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let (running, ends) = inputs.split_at(self.0.kind.outputs());
        let whole = ends[0].without_axes(running[0].shard_order(self.0.dim))?;
        let outputs: Vec<Layout> = running.iter().map(|&l| l.clone()).collect();
        let needs = outputs.iter().cloned().chain(ends.iter().map(|_| whole.clone())).map(Need::As);
        Ok(Decision { inputs: needs.collect(), outputs })
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let Scan { dim, kind, reverse, .. } = self.0;
        let (running, ends) = inputs.split_at(kind.outputs());
        let (x, totals) = (&running[0], &ends[0]);
        let before = scanned_before(at, 0, dim, totals.dims()[dim], reverse);
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
            true => carry!(to_f64_vec, real, from_f64_vec),
            false => carry!(to_i64_vec, whole, from_i64_vec),
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

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 3] = [&[7, 2], &[1, 8], &[0, 2]];
    let mut all: Vec<Vec<Sample>> = shapes.iter().map(|shape| vec![Sample::new(shape, DType::I64)]).collect();
    all.push(vec![Sample::index(&[9, 2], 3)]);
    all.push(vec![Sample::new(&[3, 5, 2], DType::F64)]);
    all
}
