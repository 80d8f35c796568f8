//! Searches for the cheapest plan between two layouts of plain shards: Dijkstra's algorithm over small descriptions of
//! layouts.
//!
//! A path has three parts. First, partial axes are reduce-scattered, on any dimension and with replicas narrowed before, so
//! that less is reduced. Then boxes move, once. Last come steps that cost nothing: narrowing, and making axes partial, from
//! replicas or from shards in place. All-reduces and separate gathers are not searched: they move no fewer bytes, and
//! [the planner](super::planner) tries them.

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap};

use super::cost::{collective_us, exchange_us, sample};
use crate::layout::Layout;
use crate::mesh::Links;
use crate::placement::{Placement, ReduceOp, commute, is_idempotent};

/// One edge of a path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum SearchStep {
    Narrow,
    Scatter { axis: usize, op: ReduceOp, dim: usize },
    Move,
    MakePartial { op: ReduceOp },
}

impl SearchStep {
    /// Whether this step and the next can be one step of a plan.
    pub(super) fn merges_with(&self, next: &SearchStep) -> bool {
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

/// A layout as the search compares it: without mesh and shape, which are the same for all.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct LayoutSketch {
    pub(super) placements: Vec<Placement>,
    /// Per dimension the axes that shard it, in order, without those of size 1.
    pub(super) orders: Vec<Vec<usize>>,
}

/// How many layouts are visited on either side of the exchange of boxes, to bound the time of a search: with few axes 256,
/// which is all of them in practice; with more axes the 32 that are reached first.
const MAX_LAYOUTS: [usize; 2] = [32, 256];

/// Up to this many axes larger than 1, every step that may pay is tried; with more, the number of layouts explodes, and
/// only steps that pay often are.
const EXHAUSTIVE_AXES: usize = 3;

/// The steps of the cheapest path that takes less than `limit` microseconds, if there is one. `to_reduce` are the axes that
/// must be reduced.
pub(super) fn cheapest(
    from: &Layout,
    to: &Layout,
    to_reduce: &[usize],
    elem: usize,
    links: &Links,
    limit: f64,
) -> Option<Vec<(SearchStep, LayoutSketch)>> {
    let search = RedistributeSearch::new(from, to, to_reduce, elem, links)?;
    let ends = search.end_layouts();
    let mut nodes = vec![SearchNode { layout: search.search_layout(search.sketch(from)), us: 0.0, by: None }];
    let mut number: HashMap<LayoutSketch, usize> = HashMap::from([(nodes[0].layout.sketch.clone(), 0)]);
    let mut open = BinaryHeap::from([Reverse((0u64, 0usize))]);
    // A plan must be better by more than rounding errors: otherwise equal costs would alternate between plans.
    let mut best = (limit * (1.0 - 1e-9), None);
    while let Some(Reverse((bits, at))) = open.pop() {
        let us = f64::from_bits(bits);
        if us >= best.0 || us > nodes[at].us {
            continue;
        }
        for (i, end) in ends.iter().enumerate().filter(|(_, end)| end.partials == nodes[at].layout.partials) {
            let whole = us + search.move_us(&nodes[at].layout, end, best.0 - us);
            if whole < best.0 {
                best = (whole, Some((at, i)));
            }
        }
        for (step, sketch) in search.shrinking_steps(&nodes[at].layout.sketch) {
            let layout = search.search_layout(sketch);
            let us = us + search.scatter_us(step, &nodes[at].layout, &layout);
            if us >= best.0 {
                continue;
            }
            let new = match number.entry(layout.sketch.clone()) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(_) if nodes.len() == search.max_layouts() => continue,
                Entry::Vacant(free) => {
                    free.insert(nodes.len());
                    nodes.push(SearchNode { layout, us: f64::INFINITY, by: None });
                    nodes.len() - 1
                }
            };
            if us < nodes[new].us {
                (nodes[new].us, nodes[new].by) = (us, Some((at, step)));
                // The bits of non-negative floats are ordered like the floats.
                open.push(Reverse((us.to_bits(), new)));
            }
        }
    }
    best.1.map(|(at, end)| path(&nodes, at, &ends, end))
}

/// The steps to node `at`, the exchange of boxes from there to `end`, and the free steps from there to the target.
fn path(nodes: &[SearchNode], at: usize, ends: &[SearchLayout], end: usize) -> Vec<(SearchStep, LayoutSketch)> {
    let mut steps = Vec::new();
    let mut back = at;
    while let Some((previous, step)) = nodes[back].by {
        steps.push((step, nodes[back].layout.sketch.clone()));
        back = previous;
    }
    steps.reverse();
    steps.push((SearchStep::Move, ends[end].sketch.clone()));
    let mut on = end;
    while let Some((next, step)) = ends[on].next {
        steps.push((step, ends[next].sketch.clone()));
        on = next;
    }
    steps
}

/// A layout with what costs depend on.
struct SearchLayout {
    sketch: LayoutSketch,
    /// Per sampled rank and dimension the range that the rank holds: begin and length. Computed on first use.
    parts: OnceCell<Vec<(usize, usize)>>,
    partials: Vec<Option<ReduceOp>>,
    /// For layouts after the exchange of boxes: the next layout on the way to the target.
    next: Option<(usize, SearchStep)>,
}

struct SearchNode {
    layout: SearchLayout,
    us: f64,
    by: Option<(usize, SearchStep)>,
}

/// The inputs of a search.
struct RedistributeSearch<'a> {
    from: &'a Layout,
    to: &'a Layout,
    to_reduce: &'a [usize],
    elem: usize,
    links: &'a Links,
    coordinates: Vec<Vec<usize>>,
    /// Whether the mesh has at most [`EXHAUSTIVE_AXES`] axes.
    exhaustive: bool,
}

impl<'a> RedistributeSearch<'a> {
    /// `None` if a layout has shards other than plain ones, which a [`LayoutSketch`] cannot describe.
    fn new(from: &'a Layout, to: &'a Layout, to_reduce: &'a [usize], elem: usize, links: &'a Links) -> Option<Self> {
        let sizes = from.mesh().shape();
        let plain = |layout: &Layout| {
            let mut real = layout.placements().iter().zip(sizes).filter(|&(_, &size)| size > 1);
            real.all(|(p, _)| p.shard_dim() == p.chunk_dim())
        };
        if !plain(from) || !plain(to) || from.shape().contains(&0) {
            return None;
        }
        let coordinates = sample(from.mesh()).map(|rank| from.mesh().coordinate(rank).expect("in the mesh")).collect();
        let exhaustive = sizes.iter().filter(|&&size| size > 1).count() <= EXHAUSTIVE_AXES;
        Some(RedistributeSearch { from, to, to_reduce, elem, links, coordinates, exhaustive })
    }

    fn size(&self, axis: usize) -> usize {
        self.from.mesh().shape()[axis]
    }

    fn max_layouts(&self) -> usize {
        MAX_LAYOUTS[usize::from(self.exhaustive)]
    }

    fn dims(&self) -> usize {
        self.from.shape().len()
    }

    /// The sketch of a layout, with the target's placements on axes of size 1.
    fn sketch(&self, layout: &Layout) -> LayoutSketch {
        let axes = 0..layout.placements().len();
        let real = |a: usize| if self.size(a) > 1 { layout } else { self.to };
        let orders = |dim| layout.shard_order(dim).iter().copied().filter(|&a| self.size(a) > 1).collect();
        LayoutSketch {
            placements: axes.map(|a| real(a).placements()[a].clone()).collect(),
            orders: (0..self.dims()).map(orders).collect(),
        }
    }

    fn search_layout(&self, sketch: LayoutSketch) -> SearchLayout {
        let partials = sketch.placements.iter().map(Placement::reduction).collect();
        SearchLayout { sketch, parts: OnceCell::new(), partials, next: None }
    }

    /// The ranges that the ranks hold. Lazy: most layouts are discarded by their latency alone.
    fn parts<'p>(&self, layout: &'p SearchLayout) -> &'p [(usize, usize)] {
        layout.parts.get_or_init(|| self.held(&layout.sketch))
    }

    fn held(&self, sketch: &LayoutSketch) -> Vec<(usize, usize)> {
        let mut parts = Vec::with_capacity(self.coordinates.len() * self.dims());
        for coordinate in &self.coordinates {
            for (axes, &size) in sketch.orders.iter().zip(self.from.shape()) {
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

    /// Whether the reduction of an axis commutes with those of all later partial axes.
    fn may_reduce_now(&self, sketch: &LayoutSketch, axis: usize, op: ReduceOp) -> bool {
        let mut later = (axis + 1..sketch.placements.len()).filter(|&a| self.size(a) > 1);
        later.all(|a| sketch.placements[a].reduction().is_none_or(|other| commute(op, other)))
    }

    /// Steps that shrink the local tensors: partial axes are reduce-scattered and replicas narrowed. While an axis is still to
    /// be reduced, narrowing pays even if the shards are gathered afterwards.
    fn shrinking_steps(&self, sketch: &LayoutSketch) -> Vec<(SearchStep, LayoutSketch)> {
        let mut steps = Vec::new();
        let all = self.exhaustive
            && (0..sketch.placements.len()).any(|a| sketch.placements[a].is_partial() && self.reduces(a));
        let shard_on = |axis: usize, dim: usize| {
            let mut smaller = sketch.clone();
            smaller.placements[axis] = Placement::Shard(dim as isize);
            smaller.orders[dim].push(axis);
            smaller
        };
        let dims = (0..self.dims()).filter(|&dim| self.from.shape()[dim] > 1);
        for axis in (0..sketch.placements.len()).filter(|&a| self.size(a) > 1) {
            let (now, to) = (&sketch.placements[axis], &self.to.placements()[axis]);
            if let Some(op) = now.reduction().filter(|&op| self.reduces(axis) && self.may_reduce_now(sketch, axis, op))
            {
                steps.extend(dims.clone().map(|dim| (SearchStep::Scatter { axis, op, dim }, shard_on(axis, dim))));
            } else if now.is_replicate() {
                let useful = |dim: &usize| {
                    let sharded = to.chunk_dim() == Some(*dim) && !self.to_reduce.is_empty();
                    all || sharded || to.reduction().is_some_and(|op| op != ReduceOp::Avg)
                };
                steps.extend(dims.clone().filter(useful).map(|dim| (SearchStep::Narrow, shard_on(axis, dim))));
            }
        }
        steps
    }

    /// Whether a partial axis may be reduced: if it must be, or (tried on few axes only) to become partial again later.
    fn reduces(&self, axis: usize) -> bool {
        self.to_reduce.contains(&axis) || self.exhaustive
    }

    /// The layouts from which the target can be reached without communication, the target first.
    fn end_layouts(&self) -> Vec<SearchLayout> {
        let mut ends = vec![self.search_layout(self.sketch(self.to))];
        let mut known: HashMap<LayoutSketch, ()> = HashMap::from([(ends[0].sketch.clone(), ())]);
        let mut at = 0;
        while at < ends.len() {
            for (step, sketch) in self.predecessors(&ends[at].sketch) {
                if ends.len() < self.max_layouts() && known.insert(sketch.clone(), ()).is_none() {
                    ends.push(SearchLayout { next: Some((at, step)), ..self.search_layout(sketch) });
                }
            }
            at += 1;
        }
        ends
    }

    /// The free steps that lead to a layout: a shard is narrowed from a replica; a partial axis is derived from a replica or
    /// from a shard. A mean only from a replica: operands derived from shards would have to be scaled, which rounds.
    fn predecessors(&self, sketch: &LayoutSketch) -> Vec<(SearchStep, LayoutSketch)> {
        let mut steps = Vec::new();
        for axis in (0..sketch.placements.len()).filter(|&a| self.size(a) > 1) {
            let source = &self.from.placements()[axis];
            let other = |placement: Placement| {
                let mut other = sketch.clone();
                other.placements[axis] = placement;
                other
            };
            let made = &sketch.placements[axis];
            if let Some(dim) = made.chunk_dim().filter(|&dim| sketch.orders[dim].last() == Some(&axis)) {
                let mut whole = other(Placement::Replicate);
                whole.orders[dim].pop();
                steps.push((SearchStep::Narrow, whole));
            }
            if let Some(op) = made.reduction().filter(|_| source != made || self.reduces(axis)) {
                let may_reduce_now = self.may_reduce_now(sketch, axis, op);
                if may_reduce_now && op != ReduceOp::Avg {
                    for dim in (0..self.dims()).filter(|&dim| self.from.shape()[dim] > 1) {
                        let mut shard = other(Placement::Shard(dim as isize));
                        shard.orders[dim].push(axis);
                        steps.push((SearchStep::MakePartial { op }, shard));
                    }
                }
                if may_reduce_now || is_idempotent(op) {
                    steps.push((SearchStep::MakePartial { op }, other(Placement::Replicate)));
                }
            }
        }
        steps
    }

    fn scatter_us(&self, step: SearchStep, before: &SearchLayout, after: &SearchLayout) -> f64 {
        let SearchStep::Scatter { axis, .. } = step else { return 0.0 };
        let held = |part: &[(usize, usize)]| part.iter().map(|&(_, len)| len).product::<usize>();
        let ranks = self.parts(before).chunks(self.dims()).zip(self.parts(after).chunks(self.dims()));
        let bytes = ranks.map(|(old, new)| held(old) - held(new)).max().unwrap_or(0) * self.elem;
        collective_us(1, self.size(axis), bytes, self.links.slowest(&[axis]))
    }

    /// The time of moving boxes from one layout to another; any value of at least `limit` if it is not below `limit`.
    fn move_us(&self, before: &SearchLayout, after: &SearchLayout, limit: f64) -> f64 {
        let (old, new) = (&before.sketch.orders, &after.sketch.orders);
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
