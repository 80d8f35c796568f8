//! Executes plans. The steps of a rank are prepared once per pair of layouts (groups, sizes, ranges) and cached.

use std::collections::HashMap;
use std::rc::Rc;

use candle_core::{DType, Device, Tensor};

use super::exchange::BoxExchange;
use super::plan::RedistributeStep;
use super::planner;
use super::step::RedistributeStepKind;
use crate::comm::{Call, DeviceMesh, Group, MemoryKind, MeshIdentity, RankSizes, SpanKind, begin_span, name_operator};
use crate::error::{Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::module_scope::current_reason;
use crate::placement::{ReduceOp, is_idempotent};
use crate::rank_context::rank_context;
use shardwise_kernels::{Assembly, concat, contiguous, filled, placeholder};

/// Redistributes a local tensor from one layout to another on the same mesh. Collective over the mesh; ranks outside of it
/// return their tensor.
pub(crate) fn redistribute(
    mesh: &DeviceMesh,
    from: &Layout,
    to: &Layout,
    local: &Tensor,
    site: Site,
) -> Result<Tensor> {
    if from == to || !mesh.contains(mesh.world().rank()) {
        return Ok(local.clone());
    }
    let prepared = prepared(mesh, from, to, local.dtype())?;
    let span = begin_span(SpanKind::Redistribution, "redistribute", Some(site));
    span.fill(|span| {
        (span.inputs, span.outputs) = (vec![from.clone()], vec![to.clone()]);
        span.dtype = Some(local.dtype());
        span.reason = current_reason();
    });
    name_operator("redistribute", || {
        let mut local = local.clone();
        // Intermediate results count as memory; the last one is counted by the tensor that holds it.
        let mut held = None;
        for (i, step) in prepared.iter().enumerate() {
            local = step.run(mesh, &local, site)?;
            let bytes = local.elem_count() * local.dtype().size_in_bytes();
            held = (i + 1 < prepared.len()).then(|| mesh.world().memory().charge(bytes, MemoryKind::Buffers));
        }
        drop(held);
        Ok(local)
    })
}

/// The prepared steps of a plan, shared with the cache.
type PreparedSteps = Rc<Vec<PreparedStep>>;

/// Everything that prepared steps depend on.
type PreparedKey = (Layout, Layout, DType, MeshIdentity);

/// The number of cached plans at which the cache is emptied: far more than the pairs of layouts of a model, so that only
/// programs that keep creating new shapes reach it.
const MAX_PREPARED: usize = 4096;

/// The prepared plans of a rank. Holding the mesh keeps its identity unique: it is an address.
#[derive(Default)]
struct PreparedCache(HashMap<PreparedKey, (DeviceMesh, PreparedSteps)>);

fn prepared(mesh: &DeviceMesh, from: &Layout, to: &Layout, dtype: DType) -> Result<PreparedSteps> {
    let key = (from.clone(), to.clone(), dtype, mesh.identity());
    let find = |kept: &mut PreparedCache| kept.0.get(&key).map(|(_, prepared)| Rc::clone(prepared));
    if let Some(found) = rank_context(|context| context.redistributions.with(find)) {
        return Ok(found);
    }
    let plan = planner::candidates(from, to, dtype.size_in_bytes(), mesh.links())?.swap_remove(0);
    let mut steps: Vec<PreparedStep> = Vec::new();
    for step in plan.steps() {
        let step = PreparedStep::new(mesh, step, dtype)?;
        if !steps.last_mut().is_some_and(|last| last.keeps_only(&step)) {
            steps.push(step);
        }
    }
    let prepared = Rc::new(steps);
    let keep = |PreparedCache(kept): &mut PreparedCache| {
        if kept.len() >= MAX_PREPARED {
            kept.clear();
        }
        kept.insert(key, (mesh.clone(), Rc::clone(&prepared)));
    };
    rank_context(|context| context.redistributions.with(keep));
    Ok(prepared)
}

/// One step as this rank executes it.
enum PreparedStep {
    Nothing,
    /// Keeps some ranges (start, length) of each dimension.
    Narrow {
        ranges: Vec<Vec<(usize, usize)>>,
        after: TensorMeta,
    },
    Collective {
        group: Group,
        call: Call,
    },
    ExchangeBoxes {
        exchange: BoxExchange,
        after: TensorMeta,
    },
    MakePartial {
        stages: Vec<OperandStage>,
        /// Sizes of the operand.
        whole: Vec<usize>,
        /// The range (start, length) of each dimension that is kept of it.
        kept: Vec<(usize, usize)>,
        after: TensorMeta,
    },
}

/// How a rank turns its value into its operand on one axis that becomes partial.
enum OperandStage {
    /// Replaces the value by the neutral element: the rank with coordinate 0 contributes the value.
    Neutral(ReduceOp),
    /// Pads this rank's shard with neutral elements to the size of the dimension; the shard begins at `offset`.
    Pad { op: ReduceOp, dim: usize, offset: usize },
}

impl PreparedStep {
    fn new(mesh: &DeviceMesh, step: &RedistributeStep, dtype: DType) -> Result<Self> {
        let (rank, before, after) = (mesh.world().rank(), &step.before, &step.after);
        let meta = TensorMeta { shape: after.local_shape(rank), dtype };
        // The sizes of all ranks of a group along a dimension.
        let sizes = |layout: &Layout, group: &Group, dim: usize| -> RankSizes {
            let mesh = layout.mesh();
            let size = |&r: &usize| layout.owned(dim, &mesh.coordinate(r).expect("in the mesh")).len();
            group.ranks().iter().map(size).collect()
        };
        Ok(match &step.kind {
            RedistributeStepKind::Relabel => PreparedStep::Nothing,
            RedistributeStepKind::Narrow => {
                PreparedStep::Narrow { ranges: kept_ranges(before, after, rank), after: meta }
            }
            RedistributeStepKind::AllReduce { axes, op } => {
                PreparedStep::Collective { group: mesh.group_of(axes)?, call: Call::AllReduce { op: *op } }
            }
            RedistributeStepKind::ReduceScatter { axes, op, dim } => {
                let group = mesh.group_of(axes)?;
                let call = Call::ReduceScatter { op: *op, dim: *dim, sizes: sizes(after, &group, *dim) };
                PreparedStep::Collective { group, call }
            }
            RedistributeStepKind::AllGather { axes, dim } => {
                let group = mesh.group_of(axes)?;
                let call = Call::AllGather { dim: *dim, sizes: sizes(before, &group, *dim) };
                PreparedStep::Collective { group, call }
            }
            RedistributeStepKind::ExchangeDims { axes, from, to } => {
                let group = mesh.group_of(axes)?;
                let (from_sizes, to_sizes) = (sizes(before, &group, *from), sizes(after, &group, *to));
                let call = Call::ExchangeDims { from: *from, from_sizes, to: *to, to_sizes };
                PreparedStep::Collective { group, call }
            }
            RedistributeStepKind::ExchangeBoxes { axes } => {
                let (old, new) = (|r| before.boxes_of(r), |r| after.boxes_of(r));
                PreparedStep::ExchangeBoxes {
                    exchange: BoxExchange::new(mesh.group_of(axes)?, dtype, old, new),
                    after: meta,
                }
            }
            RedistributeStepKind::MakePartial => {
                let kept = meta.shape.iter().map(|&size| (0, size)).collect();
                let whole = meta.shape.clone();
                PreparedStep::MakePartial { stages: stages(before, after, rank), whole, kept, after: meta }
            }
        })
    }

    /// Whether this step now includes the next one: an operand of which one range is kept never exists as a whole.
    fn keeps_only(&mut self, next: &PreparedStep) -> bool {
        let (PreparedStep::MakePartial { kept, after, .. }, PreparedStep::Narrow { ranges, after: narrowed }) =
            (self, next)
        else {
            return false;
        };
        if ranges.iter().any(|ranges| ranges.len() != 1) {
            return false;
        }
        for (kept, range) in kept.iter_mut().zip(ranges) {
            *kept = (kept.0 + range[0].0, range[0].1);
        }
        after.clone_from(narrowed);
        true
    }

    fn run(&self, mesh: &DeviceMesh, local: &Tensor, site: Site) -> Result<Tensor> {
        let dry = mesh.world().is_dry();
        match self {
            PreparedStep::Nothing => Ok(local.clone()),
            PreparedStep::Narrow { after, .. } | PreparedStep::MakePartial { after, .. } if dry => {
                Ok(placeholder(after)?)
            }
            PreparedStep::Narrow { ranges, .. } => narrow(local, ranges),
            PreparedStep::Collective { group, call } => {
                Ok(group.run(call, std::slice::from_ref(local), site)?.swap_remove(0))
            }
            PreparedStep::ExchangeBoxes { exchange, after } => exchange.assemble(local, after, site),
            PreparedStep::MakePartial { stages, whole, kept, after } => operand(local, stages, whole, kept, after),
        }
    }
}

/// Per dimension the ranges (start, length) of the local tensor that a narrowed layout keeps.
fn kept_ranges(before: &Layout, after: &Layout, rank: usize) -> Vec<Vec<(usize, usize)>> {
    let coordinate = before.mesh().coordinate(rank).expect("ranks outside the mesh execute no steps");
    let ranges = |dim: usize| {
        let mut start = 0;
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        let new = after.owned(dim, &coordinate);
        for old in before.owned(dim, &coordinate).iter() {
            for run in new.iter().filter(|run| run.start >= old.start && run.end <= old.end) {
                let from = start + run.start - old.start;
                // Runs apart in the full tensor are adjacent in a local one that lacks what is between them.
                match ranges.last_mut() {
                    Some((first, len)) if *first + *len == from => *len += run.len(),
                    _ => ranges.push((from, run.len())),
                }
            }
            start += old.len();
        }
        ranges
    };
    (0..before.shape().len()).map(ranges).collect()
}

/// Copies some ranges of every dimension. A copy rather than a view: a shard must not keep the whole tensor alive.
fn narrow(local: &Tensor, ranges: &[Vec<(usize, usize)>]) -> Result<Tensor> {
    let mut kept = local.clone();
    // Views come first, so that what is copied is smaller.
    for (dim, ranges) in ranges.iter().enumerate() {
        match ranges[..] {
            [] => kept = kept.narrow(dim, 0, 0)?,
            [(start, len)] => kept = kept.narrow(dim, start, len)?,
            _ => {}
        }
    }
    let mut is_copy = false;
    for (dim, ranges) in ranges.iter().enumerate().filter(|(_, ranges)| ranges.len() > 1) {
        let parts = ranges.iter().map(|&(start, len)| Ok(kept.narrow(dim, start, len)?));
        (kept, is_copy) = (concat(&parts.collect::<Result<Vec<_>>>()?, dim)?, true);
    }
    if kept.dims() == local.dims() {
        return Ok(local.clone());
    }
    let is_view = !is_copy && kept.elem_count() > 0 && kept.is_contiguous();
    if is_view { Ok(kept.force_contiguous()?) } else { Ok(contiguous(&kept)?) }
}

/// How a rank turns its value into its operand, from the first axis to the last. The last axis is reduced first, so the
/// value that an earlier axis needs is what a later axis splits into operands.
fn stages(before: &Layout, after: &Layout, rank: usize) -> Vec<OperandStage> {
    let coordinate = before.mesh().coordinate(rank).expect("ranks outside the mesh execute no steps");
    let mut stages = Vec::new();
    let mut padded: Vec<usize> = Vec::new();
    for axis in 0..coordinate.len() {
        let (old, new) = (&before.placements()[axis], &after.placements()[axis]);
        let Some(op) = new.reduction() else { continue };
        if old == new || before.mesh().shape()[axis] == 1 {
            continue;
        }
        match old.shard_dim() {
            // Axes that shard the same dimension have the same reduction, and are padded at once.
            Some(dim) if padded.contains(&dim) => {}
            Some(dim) => {
                padded.push(dim);
                let (part, whole) = (before.owned(dim, &coordinate), after.owned(dim, &coordinate));
                // The offset is the number of elements of the new local tensor before the first one of the shard.
                let first = part.iter().next().map_or(0, |run| run.start);
                let before = |run: std::ops::Range<usize>| first.clamp(run.start, run.end) - run.start;
                stages.push(OperandStage::Pad { op, dim, offset: whole.iter().map(before).sum() });
            }
            None if coordinate[axis] > 0 && !is_idempotent(op) => stages.push(OperandStage::Neutral(op)),
            None => {}
        }
    }
    stages
}

/// Applies the stages to the value of this rank, and keeps some ranges of the operand of sizes `whole`. What they fill is written
/// directly into the result: the largest tensor of a redistribution must not exist twice.
fn operand(
    value: &Tensor,
    stages: &[OperandStage],
    whole: &[usize],
    kept: &[(usize, usize)],
    after: &TensorMeta,
) -> Result<Tensor> {
    if stages.is_empty() {
        return narrow(value, &kept.iter().map(|&range| vec![range]).collect::<Vec<_>>());
    }
    let result = Assembly::new(after.clone())?;
    // What is kept of a box of the operand: its ranges in the box, and its offsets in the result.
    let clip = |offsets: &[usize], sizes: &[usize]| -> (Vec<(usize, usize)>, Vec<usize>) {
        let dims = offsets.iter().zip(sizes).zip(kept);
        let clipped = dims.map(|((&offset, &size), &(start, len))| {
            let (first, end) = (offset.max(start), (offset + size).min(start + len));
            ((first.min(end).saturating_sub(offset), end.saturating_sub(first)), first - start)
        });
        clipped.unzip()
    };
    // The box that has been written so far.
    let (mut offsets, mut sizes) = (vec![0; whole.len()], value.dims().to_vec());
    let fill = |op: ReduceOp, offsets: &[usize], sizes: &[usize]| -> Result<()> {
        let (ranges, at) = clip(offsets, sizes);
        let shape: Vec<usize> = ranges.iter().map(|&(_, len)| len).collect();
        if !shape.contains(&0) {
            // SAFETY: one thread; the box is inside the result, of the same type.
            unsafe { result.paste(&repeated_neutral(op, &shape, after.dtype)?, &at) };
        }
        Ok(())
    };
    for stage in stages {
        if let OperandStage::Pad { dim, offset, .. } = stage {
            offsets[*dim] = *offset;
        }
    }
    if !stages.iter().any(|stage| matches!(stage, OperandStage::Neutral(_))) {
        let (ranges, at) = clip(&offsets, &sizes);
        let mut part = value.clone();
        for (dim, &(start, len)) in ranges.iter().enumerate() {
            part = part.narrow(dim, start, len)?;
        }
        if part.elem_count() > 0 {
            // SAFETY: one thread; the part is inside the result, of the same type.
            unsafe { result.paste(&part, &at) };
        }
    }
    for stage in stages {
        match *stage {
            OperandStage::Neutral(op) => fill(op, &offsets, &sizes)?,
            OperandStage::Pad { op, dim, offset } => {
                let behind = offset + sizes[dim];
                (offsets[dim], sizes[dim]) = (0, offset);
                fill(op, &offsets, &sizes)?;
                (offsets[dim], sizes[dim]) = (behind, whole[dim] - behind);
                fill(op, &offsets, &sizes)?;
                (offsets[dim], sizes[dim]) = (0, whole[dim]);
            }
        }
    }
    // SAFETY: the boxes that have been written tile the operand, and so what is kept of it.
    Ok(unsafe { result.finish() })
}

/// Neutral elements of a reduction: one row in memory, repeated.
fn repeated_neutral(op: ReduceOp, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let mut row = vec![1; shape.len()];
    if let (Some(size), Some(last)) = (row.last_mut(), shape.last()) {
        *size = *last;
    }
    Ok(neutral(op, &row, dtype)?.broadcast_as(shape)?)
}

/// A tensor of neutral elements of a reduction.
fn neutral(op: ReduceOp, shape: &[usize], dtype: DType) -> Result<Tensor> {
    if op == ReduceOp::Sum && dtype.is_float() {
        // Of the two zeros, -0.0 changes nothing that it is added to: -0.0 + 0.0 is 0.0.
        return Ok(filled(-0.0, &TensorMeta { shape: shape.to_vec(), dtype })?);
    }
    macro_rules! limits {
        ($T:ty, $lowest:expr, $highest:expr, $ones:expr) => {
            match op {
                ReduceOp::Sum | ReduceOp::BitOr | ReduceOp::BitXor => Tensor::zeros(shape, dtype, &Device::Cpu),
                ReduceOp::Product => Tensor::ones(shape, dtype, &Device::Cpu),
                ReduceOp::Max | ReduceOp::LogSumExp => Tensor::full::<$T, _>($lowest, shape, &Device::Cpu),
                ReduceOp::Min => Tensor::full::<$T, _>($highest, shape, &Device::Cpu),
                ReduceOp::BitAnd => Tensor::full::<$T, _>($ones, shape, &Device::Cpu),
                ReduceOp::Avg => unreachable!("the planner makes means partial only from replicas"),
            }
        };
    }
    let made = match dtype {
        DType::U8 => limits!(u8, u8::MIN, u8::MAX, u8::MAX),
        DType::U32 => limits!(u32, u32::MIN, u32::MAX, u32::MAX),
        DType::I16 => limits!(i16, i16::MIN, i16::MAX, -1),
        DType::I32 => limits!(i32, i32::MIN, i32::MAX, -1),
        DType::I64 => limits!(i64, i64::MIN, i64::MAX, -1),
        DType::F64 => limits!(f64, f64::NEG_INFINITY, f64::INFINITY, f64::NAN),
        _ => limits!(f32, f32::NEG_INFINITY, f32::INFINITY, f32::NAN),
    };
    Ok(made?.to_dtype(dtype)?)
}
