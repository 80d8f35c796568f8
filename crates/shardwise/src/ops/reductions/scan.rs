//! Cumulative sums, products, maxima and minima. If the dimension is sharded, every rank scans its shard, and only the totals of
//! the shards are exchanged.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::{Layout, Runs, TensorMeta, coordinates};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward, is_in_gradient};
use shardwise_kernels::{ScannedExtremes, carry_extremes, carry_totals, scan_extremes, scan_totals};

pub(in crate::ops) use shardwise_kernels::ScanKind;

/// A cumulative operation along a dimension; `cummax` and `cummin` also return indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops) struct Scan {
    pub(in crate::ops) dim: usize,
    pub(in crate::ops) kind: ScanKind,
    /// Scans from the last element to the first; sums and products only.
    pub(in crate::ops) reverse: bool,
    /// Excludes the element itself (an exclusive scan); products only.
    pub(in crate::ops) exclusive: bool,
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
    pub(in crate::ops) fn products_before(&self, dim: usize) -> Result<DTensor> {
        let op = Scan { dim, kind: ScanKind::Prod, reverse: false, exclusive: true };
        Ok(self.scanned(op)?.swap_remove(0))
    }

    /// Per element the product of all elements after it along a dimension.
    #[track_caller]
    pub(in crate::ops) fn products_after(&self, dim: usize) -> Result<DTensor> {
        let op = Scan { dim, kind: ScanKind::Prod, reverse: true, exclusive: true };
        Ok(self.scanned(op)?.swap_remove(0))
    }

    #[track_caller]
    fn scan(&self, name: &'static str, dim: isize, kind: ScanKind) -> Result<Vec<DTensor>> {
        if let Some(scanned) = self.as_vector(dim, |x| x.scan(name, 0, kind)) {
            return scanned?.iter().map(|t| t.squeeze(Some(0))).collect();
        }
        self.scanned(Scan { dim: self.resolve_dim(name, dim)?, kind, reverse: false, exclusive: false })
    }

    /// Runs a scan; returns the cumulative values and, for maxima and minima, their indices.
    #[track_caller]
    pub(in crate::ops) fn scanned(&self, op: Scan) -> Result<Vec<DTensor>> {
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
        // Both operators are recorded as one call below.
        let mut scanned = dispatch(&op, &[&terms.as_ref().unwrap_or(self).detach()], site)?;
        if scanned[0].layout().shard_order(op.dim).is_empty() {
            scanned.truncate(op.outputs());
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

impl Scan {
    /// The number of output tensors: maxima and minima have indices too.
    fn outputs(&self) -> usize {
        if matches!(self.kind, ScanKind::Max | ScanKind::Min) { 2 } else { 1 }
    }

    fn dtype(&self, input: DType) -> DType {
        match self.kind {
            ScanKind::Sum | ScanKind::Prod if !input.is_float() => DType::I64,
            _ => input,
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
        let all = vec![dims.clone(); 2 * self.outputs()];
        let signature = Signature::new(dims.iter().map(|_| DimSharding::Free), [dims.clone()], all);
        let of = |dtype: DType| TensorMeta { shape: x.shape.clone(), dtype };
        let one = [of(self.dtype(x.dtype)), of(DType::I64)];
        let one = &one[..self.outputs()];
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
        let (running, ends) = (vec![from.clone(); self.outputs()], vec![totals(&from, self.dim)?; self.outputs()]);
        Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: [running, ends].concat() })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        if self.outputs() == 1 {
            let (values, totals) = scan_totals(&inputs[0], self.dim, self.kind, self.reverse, self.exclusive)?;
            return Ok(vec![values, totals]);
        }
        let first = context.input_runs(0, self.dim).first().unwrap_or(0);
        let scanned = scan_extremes(&inputs[0], self.dim, self.kind, first as i64)?;
        Ok(vec![scanned.values, scanned.indices, scanned.last_values, scanned.last_indices])
    }

    /// `scanned` records the two operators as one call, which is a [`Backward`](crate::tensor::Backward) in `scan_gradient`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// The layout of one total per shard that is not empty.
pub(in crate::ops) fn totals(from: &Layout, dim: usize) -> Result<Layout> {
    let one = |runs: &Runs| runs.len().min(1);
    let axes = from.shard_order(dim);
    let parts = coordinates(from.mesh(), axes).map(|c| one(&from.owned(dim, &c))).sum();
    from.resized(dim, parts, &one)
}

/// How many shards along `dim` of an input, of which `parts` are not empty, are scanned before the shard of this rank.
pub(in crate::ops) fn scanned_before(
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
        let count = self.0.outputs();
        let signature = Signature::new(
            dims.iter().map(|_| DimSharding::Free),
            vec![dims.clone(); 2 * count],
            vec![dims.clone(); count],
        );
        Ok(OpPlan { signature, outputs: inputs[..count].to_vec() })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let (running, ends) = inputs.split_at(self.0.outputs());
        let whole = ends[0].without_axes(running[0].shard_order(self.0.dim))?;
        let outputs: Vec<Layout> = running.iter().map(|&l| l.clone()).collect();
        let needs = outputs.iter().cloned().chain(ends.iter().map(|_| whole.clone())).map(RequiredInput::Layout);
        Ok(Decision { inputs: needs.collect(), outputs })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let Scan { dim, kind, reverse, .. } = self.0;
        let (running, ends) = inputs.split_at(self.0.outputs());
        let before = scanned_before(context, 0, dim, ends[0].dims()[dim], reverse);
        if before == 0 || running[0].elem_count() == 0 {
            return Ok(running.to_vec());
        }
        if let ([x], [totals]) = (running, ends) {
            return Ok(vec![carry_totals(x, totals, dim, kind, before, reverse)?]);
        }
        let [values, indices, last_values, last_indices] = [0, 1, 2, 3].map(|i| inputs[i].clone());
        let scanned = ScannedExtremes { values, indices, last_values, last_indices };
        let (values, indices) = carry_extremes(&scanned, dim, kind, before)?;
        Ok(vec![values, indices])
    }

    /// `scanned` records the two operators as one call, which is a [`Backward`](crate::tensor::Backward) in `scan_gradient`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
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
