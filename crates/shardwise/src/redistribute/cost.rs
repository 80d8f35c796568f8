//! The cost model of redistributions: bytes that a rank sends, and time estimated from the links of the mesh.
//!
//! Time is `rounds * latency + bytes / bandwidth`, the usual alpha-beta model, with the slowest link of the axes involved.

use super::step::RedistributeStepKind;
use crate::layout::Layout;
use crate::mesh::{Link, Links, Mesh};

/// Bytes and estimated time of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Bytes that the busiest rank sends with an optimal algorithm (that it receives, in an exchange of boxes).
    pub bytes: usize,
    /// Bytes that all ranks send together; on meshes of more than 32 ranks extrapolated from a sample of them.
    pub total: usize,
    /// Estimated time in microseconds.
    pub us: f64,
}

/// How many ranks are sampled for the maximum and the mean. Planning runs once per pair of layouts and must stay fast on
/// meshes of thousands of ranks, most of which hold equally much.
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
        // Which replica sends a box depends on all ranks; what a rank receives does not, and the sums are equal.
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

/// The sampled ranks: all, or every n-th of a large mesh, shifted by one each time so that they do not all have the same
/// coordinate on the last axes.
pub(super) fn sample(mesh: &Mesh) -> impl Iterator<Item = usize> + '_ {
    let ranks = mesh.ranks();
    let step = ranks.len().div_ceil(SAMPLE).max(1);
    let places = (0..ranks.len()).step_by(step).enumerate().map(move |(i, first)| first + i % step);
    places.filter_map(|at| ranks.get(at).copied())
}

/// The time of an exchange of boxes in which the busiest rank receives `busiest` bytes and ranks receive `mean` on average.
///
/// The mean counts 7/8: ranks that receive less leave their bandwidth to other ranks (thread ranks share one memory bus, ranks
/// of a host one network card), so the total decides more than the busiest rank. The rest keeps plans balanced.
pub(super) fn exchange_us(ranks: usize, busiest: usize, mean: usize, link: Link) -> f64 {
    collective_us(1, ranks, (busiest + 7 * mean) / 8, link)
}

/// The time in microseconds of a collective of `ranks` ranks, each of which sends `bytes`. `phases` is 2 for an all-reduce,
/// which is a reduce-scatter and an all-gather, else 1; each takes log2(ranks) rounds.
pub(crate) fn collective_us(phases: usize, ranks: usize, bytes: usize, link: Link) -> f64 {
    let rounds = usize::BITS - (ranks.max(1) - 1).leading_zeros();
    phases as f64 * f64::from(rounds) * link.latency_us + bytes as f64 / link.gb_per_s / 1e3
}

/// How many elements of its new local tensor a rank already has.
fn kept(before: &Layout, after: &Layout, rank: usize) -> usize {
    let (old, new) = (before.boxes_of(rank), after.boxes_of(rank));
    let pairs = old.iter().flat_map(|o| new.iter().map(move |n| o.global.intersect(&n.global)));
    pairs.flatten().map(|both| both.volume()).sum()
}
