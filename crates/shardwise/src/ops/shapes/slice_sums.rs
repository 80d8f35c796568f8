//! Weighted sums of slices along a dimension, by a table that every rank has: windows, interpolation, repeated borders and their
//! gradients are such sums. If the dimension is sharded, ranks exchange borders: the slices that rows of their own need of
//! other shards.

use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::{Layout, TensorBox, TensorMeta, coordinates, ragged};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{NO_INDEX, Number, SliceTable, concat, filled, index_select, integer_range, weighted_slices};

/// What a row without terms is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops) enum EmptyRow {
    Zero,
    /// The least number of the type, which is never a maximum.
    Lowest,
}

/// Weighted sums of slices of a dimension.
///
/// Rows and slices may come in groups, such as the elements of a window: then a dimension of the size of a group follows, and groups are
/// what is sharded.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SliceSums {
    name: &'static str,
    dim: usize,
    table: Arc<SliceTable>,
    /// The sizes of the groups of slices, and of rows; `None`: no groups, and no such dimension.
    groups: [Option<usize>; 2],
    empty: EmptyRow,
    /// The layout that the result of a backward pass is for.
    target: Option<Layout>,
}

impl DTensor {
    /// Replaces a dimension by weighted sums of its slices.
    #[track_caller]
    pub(in crate::ops) fn slice_sums(&self, name: &'static str, dim: usize, table: SliceTable) -> Result<DTensor> {
        let op =
            SliceSums { name, dim, table: Arc::new(table), groups: [None, None], empty: EmptyRow::Zero, target: None };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }

    /// Replaces a dimension by groups of `width` of its slices, `[.., groups, width, ..]`; `rows` lists the slices of all groups,
    /// or none for what is filled with `empty`.
    #[track_caller]
    pub(in crate::ops) fn slice_groups(
        &self,
        name: &'static str,
        dim: usize,
        width: usize,
        rows: impl IntoIterator<Item = Option<usize>>,
        empty: EmptyRow,
    ) -> Result<DTensor> {
        let rows = rows.into_iter().map(|place| place.map(|place| (place, 1.0)));
        let table = Arc::new(SliceTable::new(self.shape()[dim], rows));
        let op = SliceSums { name, dim, table, groups: [None, Some(width)], empty, target: None };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }
}

impl SliceSums {
    /// The number of slices, or of rows, in units of groups.
    fn count(&self, side: usize) -> usize {
        let all = if side == 0 { self.table.slices() } else { self.table.rows() };
        all / self.groups[side].unwrap_or(1).max(1)
    }

    /// The groups of slices that groups of rows need, as the one range around them.
    fn needed(&self, groups: Range<usize>) -> Range<usize> {
        let (of_slices, of_rows) = (self.groups[0].unwrap_or(1), self.groups[1].unwrap_or(1));
        let rows = groups.start * of_rows..groups.end * of_rows;
        let places = || rows.clone().flat_map(|row| self.table.places(row)).map(|place| place / of_slices);
        match (places().min(), places().max()) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }

    /// Per group of rows the furthest group of slices in the middle of it or of one before: a rank computes the groups whose middle
    /// it holds, and ranks in order compute groups in order.
    fn middles(&self) -> Vec<usize> {
        let mut furthest = 0;
        let group = |row: usize| {
            let needed = self.needed(row..row + 1);
            furthest = furthest.max(needed.start + needed.len() / 2);
            furthest
        };
        (0..self.count(1)).map(group).collect()
    }

    /// Whether terms of a partial tensor can be selected and added before they are reduced.
    fn passes(&self, op: ReduceOp) -> bool {
        let fills = self.table.has_empty_rows();
        match op {
            ReduceOp::Sum | ReduceOp::Avg => !fills || self.empty == EmptyRow::Zero,
            _ => self.table.is_copy() && !fills,
        }
    }

    /// Sizes of the shards of the result, per coordinate along `axes`.
    fn shards(&self, from: &Layout, axes: &[usize]) -> Vec<usize> {
        if let Some(target) = self.target.as_ref().filter(|t| t.shard_order(self.dim) == axes) {
            return coordinates(from.mesh(), axes).map(|c| target.owned(self.dim, &c).len()).collect();
        }
        let middles = self.middles();
        let mut done = 0;
        let mut shard = |c: Vec<usize>| {
            let Some(end) = from.owned(self.dim, &c).iter().last().map(|run| run.end) else { return 0 };
            // What comes after the last slice belongs to its rank.
            let all = match end == self.count(0) {
                true => middles.len(),
                false => middles.partition_point(|&middle| middle < end),
            };
            all - std::mem::replace(&mut done, all)
        };
        coordinates(from.mesh(), axes).map(&mut shard).collect()
    }
}

impl Op for SliceSums {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let behind = self.dim + 1 + usize::from(self.groups[0].is_some());
        let named = |group: Option<usize>, of_dim: Option<usize>| -> Vec<Option<usize>> {
            let own = std::iter::once(of_dim).chain(group.map(|_| None));
            (0..self.dim).map(Some).chain(own).chain((behind..x.shape.len()).map(Some)).collect()
        };
        let sharding = (0..x.shape.len()).map(|d| match d < self.dim || d >= behind {
            true => DimSharding::Free,
            false => DimSharding::Never,
        });
        let mut signature =
            Signature::new(sharding, [named(self.groups[0], Some(self.dim))], [named(self.groups[1], None)]);
        for op in ReduceOp::ALL.into_iter().filter(|&op| self.passes(op)) {
            signature = signature.allow_partial([Some(op)], op);
        }
        let own = std::iter::once(self.count(1)).chain(self.groups[1]);
        let shape = x.shape[..self.dim].iter().copied().chain(own).chain(x.shape[behind..].iter().copied()).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let x = inputs[0];
        let shape = plan.outputs[0].shape.as_slice();
        let axes = x.shard_order(self.dim).to_vec();
        if axes.is_empty() || self.count(0) == 0 || self.count(1) == 0 {
            return plan.signature.decide(inputs, elem, &[shape]);
        }
        let whole = |axis: &usize| match &x.placements()[*axis] {
            Placement::Partial(op) => !self.passes(*op),
            placement => self.groups[0].is_some() && placement.is_shard(Some(self.dim + 1)),
        };
        let whole: Vec<usize> = (0..x.placements().len()).filter(whole).collect();
        let from = x.without_axes(&whole)?.unstrided(&|_| true)?;
        // The dimensions after it have other numbers in the result.
        let moved = |d: usize| match d > self.dim {
            true => d + usize::from(self.groups[1].is_some()) - usize::from(self.groups[0].is_some()),
            false => d,
        };
        let mut placements: Vec<Placement> = from
            .placements()
            .iter()
            .map(|p| p.shard_dim().map_or_else(|| p.clone(), |d| p.with_dim(moved(d))))
            .collect();
        for (axis, placement) in ragged(from.mesh(), self.dim, &axes, &self.shards(&from, &axes)) {
            placements[axis] = placement;
        }
        let mut orders = vec![Vec::new(); shape.len()];
        for d in 0..from.shape().len() {
            if d <= self.dim || d > self.dim + usize::from(self.groups[0].is_some()) {
                orders[moved(d)] = from.shard_order(d).to_vec();
            }
        }
        let to = Layout::from_shard_orders(from.mesh(), shape, &placements, &orders)?;
        let part = |&rank: &usize| {
            let (mut offsets, mut sizes) = (from.global_offset(rank), from.local_shape(rank));
            let (first, count) = (to.global_offset(rank)[self.dim], to.local_shape(rank)[self.dim]);
            let needed = self.needed(first..first + count);
            (offsets[self.dim], sizes[self.dim]) = (needed.start, needed.len());
            TensorBox { offsets, sizes }
        };
        let boxes = from.mesh().ranks().iter().map(part).collect();
        Ok(Decision { inputs: vec![RequiredInput::Boxes { from, axes, boxes }], outputs: vec![to] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (of_slices, of_rows) = (self.groups[0].unwrap_or(1), self.groups[1].unwrap_or(1));
        let x = match self.groups[0] {
            Some(_) => inputs[0].flatten(self.dim, self.dim + 1)?,
            None => inputs[0].clone(),
        };
        let first = context.input_runs(0, self.dim).first().unwrap_or(0) * of_slices;
        let groups = context.output_runs(0, self.dim);
        let start = groups.first().unwrap_or(0);
        let rows = start * of_rows..(start + groups.len()) * of_rows;
        let made = match self.table.is_copy() {
            false => weighted_slices(&x, self.dim, &self.table, rows, first)?,
            true => {
                let place = |row: usize| self.table.places(row).first().map(|place| place - first);
                let places: Vec<Option<usize>> = rows.map(place).collect();
                let (x, absent) = match self.empty == EmptyRow::Lowest && places.contains(&None) {
                    true => with_lowest(&x, self.dim)?,
                    false => (x, NO_INDEX),
                };
                let places: Vec<usize> = places.into_iter().map(|place| place.unwrap_or(absent)).collect();
                index_select(&x, self.dim, &places)?
            }
        };
        Ok(vec![made.reshape(context.local_shape(0))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let back = SliceSums {
                table: Arc::new(op.table.transposed()),
                groups: [op.groups[1], op.groups[0]],
                empty: EmptyRow::Zero,
                target: Some(saved.layout(0).reduced().unstrided(&|_| true)?),
                ..op.clone()
            };
            Ok(vec![Some(dispatch(&back, &[gradient], Location::caller())?.swap_remove(0))])
        })
    }
}

/// The tensor with one more slice of the least number of its type, and the index of that slice.
fn with_lowest(x: &Tensor, dim: usize) -> Result<(Tensor, usize)> {
    let mut shape = x.dims().to_vec();
    let n = std::mem::replace(&mut shape[dim], 1);
    let lowest = integer_range(x.dtype()).map_or(Number::from(f64::NEG_INFINITY), |(least, _)| Number::from(least));
    let slice = filled(lowest, &TensorMeta { shape, dtype: x.dtype() })?;
    Ok((concat(&[x.clone(), slice], dim)?, n))
}

/// The type in which sums of elements of a type are computed: f32 for half precision, i64 for integers.
pub(in crate::ops) fn sum_type(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        float if float.is_float() => float,
        _ => DType::I64,
    }
}
