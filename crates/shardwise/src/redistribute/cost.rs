//! What a step of a plan costs: bytes that a rank sends, and time by the links of the mesh.

use super::plan::StepKind;
use crate::layout::Layout;
use crate::mesh::{Link, Links};

/// Bytes and time of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Bytes that the busiest rank sends at least (receives, in an exchange of boxes).
    pub bytes: usize,
    /// Estimated time in microseconds.
    pub us: f64,
}

/// How many ranks are looked at to find the busiest one.
const SAMPLE: usize = 32;

/// The cost of a step from `before` to `after` on elements of `elem` bytes.
pub(super) fn cost(kind: &StepKind, before: &Layout, after: &Layout, elem: usize, links: &Links) -> Cost {
    let axes = match kind {
        StepKind::Relabel | StepKind::Narrow | StepKind::MakePartial => return Cost::default(),
        StepKind::AllReduce { axes, .. }
        | StepKind::ReduceScatter { axes, .. }
        | StepKind::AllGather { axes, .. }
        | StepKind::ExchangeDims { axes, .. }
        | StepKind::Exchange { axes } => axes,
    };
    let size: usize = axes.iter().map(|&a| before.mesh().shape()[a]).product();
    let elements = |layout: &Layout, rank: usize| layout.local_shape(rank).iter().product::<usize>();
    let bytes_of = |rank: usize| match kind {
        StepKind::AllReduce { .. } => 2 * elements(before, rank) * elem * (size - 1) / size,
        StepKind::ReduceScatter { .. } => (elements(before, rank) - elements(after, rank)) * elem,
        StepKind::AllGather { .. } => elements(before, rank) * elem * (size - 1),
        StepKind::ExchangeDims { .. } => (elements(before, rank) - kept(before, after, rank)) * elem,
        // What a rank sends is hard to see from its boxes alone; what it receives is not, and the sums are equal.
        _ => (elements(after, rank) - kept(before, after, rank)) * elem,
    };
    let ranks = before.mesh().ranks();
    let step = ranks.len().div_ceil(SAMPLE);
    let bytes = ranks.iter().step_by(step).map(|&rank| bytes_of(rank)).max().unwrap_or(0);
    let phases = if matches!(kind, StepKind::AllReduce { .. }) { 2 } else { 1 };
    Cost { bytes, us: collective_us(phases, size, bytes, links.slowest(axes)) }
}

/// The time of a collective of so many ranks, each of which sends so many bytes, in microseconds. One that reduces and
/// spreads the result has two phases.
pub(crate) fn collective_us(phases: usize, ranks: usize, bytes: usize, link: Link) -> f64 {
    let rounds = usize::BITS - (ranks.max(1) - 1).leading_zeros();
    phases as f64 * f64::from(rounds) * link.latency_us + bytes as f64 / link.gb_per_s / 1e3
}

/// How many elements of its new part a rank has already.
fn kept(before: &Layout, after: &Layout, rank: usize) -> usize {
    let (old, new) = (before.boxes_of(rank), after.boxes_of(rank));
    let pairs = old.iter().flat_map(|o| new.iter().map(move |n| o.global.intersect(&n.global)));
    pairs.flatten().map(|both| both.volume()).sum()
}
