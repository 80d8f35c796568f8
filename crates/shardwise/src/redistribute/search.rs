//! The cheapest way between two layouts of plain shards, found by search. Pure arithmetic on small descriptions of layouts.
//!
//! A way has three parts. First pending reductions are scattered, along any dimension and with replicas narrowed before, so
//! that less is reduced. Then boxes move, once. At last come steps that cost nothing: narrowing, and making operands, of
//! replicas or of shards where they are. Reductions that spread their result and gathers in rounds of their own are not
//! looked at: they move no fewer bytes, and [the planner](super::planner) tries them.

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap};

use super::cost::{collective_us, exchange_us, sample};
use crate::layout::Layout;
use crate::mesh::Links;
use crate::placement::{Placement, ReduceOp, commute, is_idempotent};

/// What one part of a way does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum SearchStep {
    Narrow,
    Scatter { axis: usize, op: ReduceOp, dim: usize },
    Move,
    MakePartial { op: ReduceOp },
}

impl SearchStep {
    /// Whether one step does this leg and another that follows.
    pub(super) fn takes(&self, next: &SearchStep) -> bool {
        match (*self, *next) {
            (SearchStep::Narrow, SearchStep::Narrow) => true,
            (SearchStep::Scatter { op, dim, .. }, SearchStep::Scatter { op: other_op, dim: other, .. }) => {
                (op, dim) == (other_op, other)
            }
            (SearchStep::MakePartial { op }, SearchStep::MakePartial { op: other }) => op == other,
            _ => false,
        }
    }
}

/// Where a leg leads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct LayoutSketch {
    pub(super) placements: Vec<Placement>,
    /// Per dimension the axes that cut it, in order, without those of size 1.
    pub(super) orders: Vec<Vec<usize>>,
}

/// How many layouts are looked at on either side of the move of boxes, which bounds the time that a search takes: all on
/// few axes; on more, those that are reached first.
const MAX_STOPS: [usize; 2] = [32, 256];

/// Up to so many axes, everything that may pay is tried; with more, what pays often.
const WIDE_AXES: usize = 3;

/// The legs of the cheapest way that takes less time than `limit`, if there is one. `pending` are the axes to reduce.
pub(super) fn cheapest(
    from: &Layout,
    to: &Layout,
    pending: &[usize],
    elem: usize,
    links: &Links,
    limit: f64,
) -> Option<Vec<(SearchStep, LayoutSketch)>> {
    let space = RedistributeSearch::new(from, to, pending, elem, links)?;
    let ends = space.ends();
    let mut nodes = vec![SearchNode { place: space.place(space.stop(from)), us: 0.0, by: None }];
    let mut number: HashMap<LayoutSketch, usize> = HashMap::from([(nodes[0].place.stop.clone(), 0)]);
    let mut open = BinaryHeap::from([Reverse((0u64, 0usize))]);
    // Differences that are nothing but rounding are no reason for another plan.
    let mut best = (limit * (1.0 - 1e-9), None);
    while let Some(Reverse((bits, at))) = open.pop() {
        let us = f64::from_bits(bits);
        if us >= best.0 || us > nodes[at].us {
            continue;
        }
        for (i, end) in ends.iter().enumerate().filter(|(_, end)| end.partials == nodes[at].place.partials) {
            let whole = us + space.move_us(&nodes[at].place, end, best.0 - us);
            if whole < best.0 {
                best = (whole, Some((at, i)));
            }
        }
        for (leg, stop) in space.shrinking(&nodes[at].place.stop) {
            let place = space.place(stop);
            let us = us + space.scatter_us(leg, &nodes[at].place, &place);
            if us >= best.0 {
                continue;
            }
            let new = match number.entry(place.stop.clone()) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(_) if nodes.len() == space.max_stops() => continue,
                Entry::Vacant(free) => {
                    free.insert(nodes.len());
                    nodes.push(SearchNode { place, us: f64::INFINITY, by: None });
                    nodes.len() - 1
                }
            };
            if us < nodes[new].us {
                (nodes[new].us, nodes[new].by) = (us, Some((at, leg)));
                // Times are not negative, so their bits are ordered as they are.
                open.push(Reverse((us.to_bits(), new)));
            }
        }
    }
    best.1.map(|(at, end)| way(&nodes, at, &ends, end))
}

/// The legs to node `at`, the move of boxes from there to `end`, and those from there to the target.
fn way(nodes: &[SearchNode], at: usize, ends: &[SearchLayout], end: usize) -> Vec<(SearchStep, LayoutSketch)> {
    let mut legs = Vec::new();
    let mut back = at;
    while let Some((previous, leg)) = nodes[back].by {
        legs.push((leg, nodes[back].place.stop.clone()));
        back = previous;
    }
    legs.reverse();
    legs.push((SearchStep::Move, ends[end].stop.clone()));
    let mut on = end;
    while let Some((next, leg)) = ends[on].next {
        legs.push((leg, ends[next].stop.clone()));
        on = next;
    }
    legs
}

/// A layout on the way, with what its price depends on.
struct SearchLayout {
    stop: LayoutSketch,
    /// Per rank that is looked at and per dimension the range that it holds: begin and length.
    parts: OnceCell<Vec<(usize, usize)>>,
    partials: Vec<Option<ReduceOp>>,
    /// For layouts behind the move of boxes: the one that follows.
    next: Option<(usize, SearchStep)>,
}

struct SearchNode {
    place: SearchLayout,
    us: f64,
    by: Option<(usize, SearchStep)>,
}

/// What a search is about.
struct RedistributeSearch<'a> {
    from: &'a Layout,
    to: &'a Layout,
    pending: &'a [usize],
    elem: usize,
    links: &'a Links,
    coordinates: Vec<Vec<usize>>,
    /// Whether the mesh has so few axes that all that may pay is tried.
    wide: bool,
}

impl<'a> RedistributeSearch<'a> {
    /// `None` if there are other than plain shards, which this arithmetic does not describe.
    fn new(from: &'a Layout, to: &'a Layout, pending: &'a [usize], elem: usize, links: &'a Links) -> Option<Self> {
        let sizes = from.mesh().shape();
        let plain = |layout: &Layout| {
            let mut real = layout.placements().iter().zip(sizes).filter(|&(_, &size)| size > 1);
            real.all(|(p, _)| p.shard_dim() == p.chunk_dim())
        };
        if !plain(from) || !plain(to) || from.shape().contains(&0) {
            return None;
        }
        let coordinates = sample(from.mesh()).map(|rank| from.mesh().coordinate(rank).expect("in the mesh")).collect();
        let wide = sizes.iter().filter(|&&size| size > 1).count() <= WIDE_AXES;
        Some(RedistributeSearch { from, to, pending, elem, links, coordinates, wide })
    }

    fn size(&self, axis: usize) -> usize {
        self.from.mesh().shape()[axis]
    }

    fn max_stops(&self) -> usize {
        MAX_STOPS[usize::from(self.wide)]
    }

    fn dims(&self) -> usize {
        self.from.shape().len()
    }

    /// A layout as a stop: axes of size 1 are as in the target, whatever they are.
    fn stop(&self, layout: &Layout) -> LayoutSketch {
        let axes = 0..layout.placements().len();
        let real = |a: usize| if self.size(a) > 1 { layout } else { self.to };
        let orders = |dim| layout.shard_order(dim).iter().copied().filter(|&a| self.size(a) > 1).collect();
        LayoutSketch {
            placements: axes.map(|a| real(a).placements()[a].clone()).collect(),
            orders: (0..self.dims()).map(orders).collect(),
        }
    }

    fn place(&self, stop: LayoutSketch) -> SearchLayout {
        let partials = stop.placements.iter().map(Placement::reduction).collect();
        SearchLayout { stop, parts: OnceCell::new(), partials, next: None }
    }

    /// What the ranks hold, found when it is asked for: most layouts are too many rounds away.
    fn parts<'p>(&self, place: &'p SearchLayout) -> &'p [(usize, usize)] {
        place.parts.get_or_init(|| self.held(&place.stop))
    }

    fn held(&self, stop: &LayoutSketch) -> Vec<(usize, usize)> {
        let mut parts = Vec::with_capacity(self.coordinates.len() * self.dims());
        for coordinate in &self.coordinates {
            for (axes, &size) in stop.orders.iter().zip(self.from.shape()) {
                let (mut begin, mut len) = (0, size);
                for &axis in axes {
                    let chunk = len.div_ceil(self.size(axis));
                    let skipped = (coordinate[axis] * chunk).min(len);
                    (begin, len) = (begin + skipped, chunk.min(len - skipped));
                }
                parts.push((begin, len));
            }
        }
        parts
    }

    /// Whether an operation on an axis may come before those that are pending on later axes.
    fn is_free(&self, stop: &LayoutSketch, axis: usize, op: ReduceOp) -> bool {
        let mut later = (axis + 1..stop.placements.len()).filter(|&a| self.size(a) > 1);
        later.all(|a| stop.placements[a].reduction().is_none_or(|other| commute(op, other)))
    }

    /// Legs that leave less on every rank: pending reductions are scattered and replicas narrowed. As long as something is
    /// to be reduced, that pays even where shards are gathered afterwards: on few axes all are tried.
    fn shrinking(&self, stop: &LayoutSketch) -> Vec<(SearchStep, LayoutSketch)> {
        let mut legs = Vec::new();
        let all = self.wide && (0..stop.placements.len()).any(|a| stop.placements[a].is_partial() && self.reduces(a));
        let cut = |axis: usize, dim: usize| {
            let mut cut = stop.clone();
            cut.placements[axis] = Placement::Shard(dim as isize);
            cut.orders[dim].push(axis);
            cut
        };
        let dims = (0..self.dims()).filter(|&dim| self.from.shape()[dim] > 1);
        for axis in (0..stop.placements.len()).filter(|&a| self.size(a) > 1) {
            let (now, to) = (&stop.placements[axis], &self.to.placements()[axis]);
            if let Some(op) = now.reduction().filter(|&op| self.reduces(axis) && self.is_free(stop, axis, op)) {
                legs.extend(dims.clone().map(|dim| (SearchStep::Scatter { axis, op, dim }, cut(axis, dim))));
            } else if now.is_replicate() {
                let useful = |dim: &usize| {
                    let sharded = to.chunk_dim() == Some(*dim) && !self.pending.is_empty();
                    all || sharded || to.reduction().is_some_and(|op| op != ReduceOp::Avg)
                };
                legs.extend(dims.clone().filter(useful).map(|dim| (SearchStep::Narrow, cut(axis, dim))));
            }
        }
        legs
    }

    /// Whether a partial value may be reduced: if it must be, or if it can become partial again.
    fn reduces(&self, axis: usize) -> bool {
        self.pending.contains(&axis) || self.wide
    }

    /// The layouts from which the target is reached without communication, the target first.
    fn ends(&self) -> Vec<SearchLayout> {
        let mut ends = vec![self.place(self.stop(self.to))];
        let mut known: HashMap<LayoutSketch, ()> = HashMap::from([(ends[0].stop.clone(), ())]);
        let mut at = 0;
        while at < ends.len() {
            for (leg, stop) in self.leading_to(&ends[at].stop) {
                if ends.len() < self.max_stops() && known.insert(stop.clone(), ()).is_none() {
                    ends.push(SearchLayout { next: Some((at, leg)), ..self.place(stop) });
                }
            }
            at += 1;
        }
        ends
    }

    /// Free legs backwards: a shard may be narrowed of a replica, operands made of replicas or of shards. What a mean is of
    /// would have to be scaled, which rounds: it is made of replicas.
    fn leading_to(&self, stop: &LayoutSketch) -> Vec<(SearchStep, LayoutSketch)> {
        let mut legs = Vec::new();
        for axis in (0..stop.placements.len()).filter(|&a| self.size(a) > 1) {
            let source = &self.from.placements()[axis];
            let other = |placement: Placement| {
                let mut other = stop.clone();
                other.placements[axis] = placement;
                other
            };
            let made = &stop.placements[axis];
            if let Some(dim) = made.chunk_dim().filter(|&dim| stop.orders[dim].last() == Some(&axis)) {
                let mut whole = other(Placement::Replicate);
                whole.orders[dim].pop();
                legs.push((SearchStep::Narrow, whole));
            }
            if let Some(op) = made.reduction().filter(|_| source != made || self.reduces(axis)) {
                let is_free = self.is_free(stop, axis, op);
                if is_free && op != ReduceOp::Avg {
                    for dim in (0..self.dims()).filter(|&dim| self.from.shape()[dim] > 1) {
                        let mut shard = other(Placement::Shard(dim as isize));
                        shard.orders[dim].push(axis);
                        legs.push((SearchStep::MakePartial { op }, shard));
                    }
                }
                if is_free || is_idempotent(op) {
                    legs.push((SearchStep::MakePartial { op }, other(Placement::Replicate)));
                }
            }
        }
        legs
    }

    fn scatter_us(&self, leg: SearchStep, before: &SearchLayout, after: &SearchLayout) -> f64 {
        let SearchStep::Scatter { axis, .. } = leg else { return 0.0 };
        let held = |part: &[(usize, usize)]| part.iter().map(|&(_, len)| len).product::<usize>();
        let ranks = self.parts(before).chunks(self.dims()).zip(self.parts(after).chunks(self.dims()));
        let bytes = ranks.map(|(old, new)| held(old) - held(new)).max().unwrap_or(0) * self.elem;
        collective_us(1, self.size(axis), bytes, self.links.slowest(&[axis]))
    }

    /// The time of moving boxes from one layout to another, or anything that is not below `limit`.
    fn move_us(&self, before: &SearchLayout, after: &SearchLayout, limit: f64) -> f64 {
        let (old, new) = (&before.stop.orders, &after.stop.orders);
        if old == new {
            return 0.0;
        }
        let changed = (0..self.dims()).filter(|&dim| old[dim] != new[dim]);
        let mut axes: Vec<usize> = changed.flat_map(|dim| old[dim].iter().chain(&new[dim]).copied()).collect();
        axes.sort_unstable();
        axes.dedup();
        let link = self.links.slowest(&axes);
        let size = axes.iter().map(|&a| self.size(a)).product();
        if exchange_us(size, 0, 0, link) >= limit {
            return limit;
        }
        let (mut busiest, mut sum) = (0, 0);
        for (old, new) in self.parts(before).chunks(self.dims()).zip(self.parts(after).chunks(self.dims())) {
            let (mut whole, mut kept) = (1, 1);
            for (&(old, had), &(new, has)) in old.iter().zip(new) {
                whole *= has;
                kept *= (old + had).min(new + has).saturating_sub(old.max(new));
            }
            (busiest, sum) = (busiest.max(whole - kept), sum + whole - kept);
        }
        let ranks = self.coordinates.len();
        exchange_us(size, busiest * self.elem, sum * self.elem / ranks, link)
    }
}
