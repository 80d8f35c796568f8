//! What a step of a plan costs: bytes that a rank sends, and time by the links of the mesh.

use super::step::RedistributeStepKind;
use crate::layout::Layout;
use crate::mesh::{Link, Links, Mesh};

/// Bytes and time of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Bytes that the busiest rank sends at least (receives, in an exchange of boxes).
    pub bytes: usize,
    /// Bytes that all ranks send together; on large meshes estimated from some of them.
    pub total: usize,
    /// Estimated time in microseconds.
    pub us: f64,
}

/// How many ranks are looked at to find the busiest one and the mean.
const SAMPLE: usize = 32;

/// The cost of a step from `before` to `after` on elements of `elem` bytes.
pub(super) fn cost(kind: &RedistributeStepKind, before: &Layout, after: &Layout, elem: usize, links: &Links) -> Cost {
    let axes = match kind {
        RedistributeStepKind::Relabel | RedistributeStepKind::Narrow | RedistributeStepKind::MakePartial => {
            return Cost::default();
        }
        RedistributeStepKind::AllReduce { axes, .. }
        | RedistributeStepKind::ReduceScatter { axes, .. }
        | RedistributeStepKind::AllGather { axes, .. }
        | RedistributeStepKind::ExchangeDims { axes, .. }
        | RedistributeStepKind::ExchangeBoxes { axes } => axes,
    };
    let size: usize = axes.iter().map(|&a| before.mesh().shape()[a]).product();
    let elements = |layout: &Layout, rank: usize| layout.local_shape(rank).iter().product::<usize>();
    let bytes_of = |rank: usize| match kind {
        RedistributeStepKind::AllReduce { .. } => 2 * elements(before, rank) * elem * (size - 1) / size,
        RedistributeStepKind::ReduceScatter { .. } => (elements(before, rank) - elements(after, rank)) * elem,
        RedistributeStepKind::AllGather { .. } => elements(before, rank) * elem * (size - 1),
        RedistributeStepKind::ExchangeDims { .. } => (elements(before, rank) - kept(before, after, rank)) * elem,
        // What a rank sends is hard to see from its boxes alone; what it receives is not, and the sums are equal.
        _ => (elements(after, rank) - kept(before, after, rank)) * elem,
    };
    let (mut bytes, mut sum, mut looked_at) = (0, 0, 0);
    for rank in sample(before.mesh()) {
        let own = bytes_of(rank);
        (bytes, sum, looked_at) = (bytes.max(own), sum + own, looked_at + 1);
    }
    let (link, mean) = (links.slowest(axes), sum / looked_at.max(1));
    let us = match kind {
        RedistributeStepKind::AllReduce { .. } => collective_us(2, size, bytes, link),
        RedistributeStepKind::ExchangeBoxes { .. } => exchange_us(size, bytes, mean, link),
        _ => collective_us(1, size, bytes, link),
    };
    Cost { bytes, total: sum * before.mesh().ranks().len() / looked_at.max(1), us }
}

/// The ranks that are looked at: all, or some of a large mesh, not all at the same place on its last axes.
pub(super) fn sample(mesh: &Mesh) -> impl Iterator<Item = usize> + '_ {
    let ranks = mesh.ranks();
    let step = ranks.len().div_ceil(SAMPLE).max(1);
    let places = (0..ranks.len()).step_by(step).enumerate().map(move |(i, first)| first + i % step);
    places.filter_map(|at| ranks.get(at).copied())
}

/// The time of an exchange of boxes in which the busiest rank gets so many bytes and all do on average. Ranks that get
/// less leave the links to the others, so what all move counts more than what the busiest does.
pub(super) fn exchange_us(ranks: usize, busiest: usize, mean: usize, link: Link) -> f64 {
    collective_us(1, ranks, (busiest + 7 * mean) / 8, link)
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
