//! Plans redistributions on one mesh: which steps, in which order. Pure: no communication, no data.
//!
//! Steps that shrink data come first, steps that grow it last: narrow replicas for free, reduce partial axes (scattered
//! where the target is sharded), move boxes between shards in one exchange, make axes partial. Where a choice remains, all
//! combinations are priced and the cheapest is taken; their number is bounded. A [search](super::search) looks for plans
//! outside of this scheme, and its result is taken if it is cheaper.

use super::cost::cost;
use super::plan::{RedistributePlan, RedistributeStep};
use super::search::{self, LayoutSketch, SearchStep};
use super::step::RedistributeStepKind;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::mesh::{Link, Links};
use crate::placement::{Placement, ReduceOp, commute, is_idempotent};

/// The open decisions of a plan: `bits` has one bit per axis whose reduction may be scattered (0) or full (1).
#[derive(Clone, Copy)]
struct PlanChoice {
    bits: usize,
    moves: MoveStrategy,
}

/// How shards get to the layout of the target.
#[derive(Clone, Copy, PartialEq)]
enum MoveStrategy {
    /// One exchange to the target.
    Direct,
    /// An exchange over the axes that are sharded now; replicated axes are narrowed afterwards.
    NarrowLast,
    /// Gathers the dimensions that are sharded differently, then narrows them.
    GatherFirst,
}

/// The number of axes whose reductions are tried both scattered and full: 2^5 combinations times 3 strategies bound the
/// time of planning. The reductions of further axes are scattered, which moves fewer bytes.
const MAX_CHOICES: usize = 5;

impl RedistributePlan {
    /// Plans a redistribution of elements of `elem` bytes between thread ranks, with [`Link::THREADS`] on every axis.
    ///
    /// Local. [`explain`](super::explain) plans by the links of a mesh.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the layouts are not of one shape on one mesh.
    pub fn new(from: &Layout, to: &Layout, elem: usize) -> Result<Self> {
        let links = Links::uniform(from.mesh().ndim(), Link::THREADS);
        Ok(candidates(from, to, elem, &links)?.swap_remove(0))
    }
}

/// All plans considered, cheapest first.
pub(super) fn candidates(from: &Layout, to: &Layout, elem: usize, links: &Links) -> Result<Vec<RedistributePlan>> {
    if from.mesh() != to.mesh() || from.shape() != to.shape() {
        return Err(ErrorKind::Layout.error(
            "layouts",
            format!("{from} and {to}"),
            "two layouts of one shape on one mesh",
            "plan moves between meshes or shapes in steps",
        ));
    }
    // A strided shard may be another name of shards in another order.
    let strided = |layout: &Layout| layout.placements().iter().any(|p| p.split_factor().is_some());
    if from != to && (strided(from) || strided(to)) && from.names_same_as(to) {
        let cost = cost(&RedistributeStepKind::Relabel, from, to, elem, links);
        let step =
            RedistributeStep { kind: RedistributeStepKind::Relabel, before: from.clone(), after: to.clone(), cost };
        return Ok(vec![RedistributePlan { from: from.clone(), to: to.clone(), steps: vec![step] }]);
    }
    let mut plans: Vec<(MoveStrategy, RedistributePlan)> = Vec::new();
    let open = PlanBuilder::new(from, to, elem, links).open_choices();
    for bits in 0..1usize << open.min(MAX_CHOICES) {
        for moves in [MoveStrategy::Direct, MoveStrategy::NarrowLast, MoveStrategy::GatherFirst] {
            let builder = PlanBuilder::new(from, to, elem, links);
            let Some(plan) = builder.build(PlanChoice { bits, moves })? else { continue };
            let same = |(_, p): &(MoveStrategy, RedistributePlan)| {
                p.steps.iter().map(|s| &s.kind).eq(plan.steps.iter().map(|s| &s.kind))
            };
            if !plans.iter().any(same) {
                plans.push((moves, plan));
            }
        }
    }
    if let Some(plan) = searched(from, to, elem, links, &plans)? {
        plans.push((MoveStrategy::Direct, plan));
    }
    let order =
        |a: &RedistributePlan, b: &RedistributePlan| a.us().total_cmp(&b.us()).then(a.steps.len().cmp(&b.steps.len()));
    // A gather may save a round of messages, but must not move more bytes: estimated latencies are less reliable than byte
    // counts, and gathered tensors take memory.
    let exchanged = plans.iter().filter(|(moves, _)| *moves != MoveStrategy::GatherFirst).map(|(_, plan)| plan);
    let limit = exchanged.min_by(|a, b| order(a, b)).map_or(usize::MAX, RedistributePlan::bytes);
    let wasteful =
        |(moves, plan): &(MoveStrategy, RedistributePlan)| *moves == MoveStrategy::GatherFirst && plan.bytes() > limit;
    plans.sort_by(|a, b| wasteful(a).cmp(&wasteful(b)).then_with(|| order(&a.1, &b.1)));
    Ok(plans.into_iter().map(|(_, plan)| plan).collect())
}

/// The plan that the search finds, if it is cheaper than all other plans.
fn searched(
    from: &Layout,
    to: &Layout,
    elem: usize,
    links: &Links,
    plans: &[(MoveStrategy, RedistributePlan)],
) -> Result<Option<RedistributePlan>> {
    let calls = |plan: &RedistributePlan| plan.steps.iter().filter(|step| step.cost.us > 0.0).count();
    let Some((_, best)) = plans.iter().min_by(|a, b| a.1.us().total_cmp(&b.1.us())) else { return Ok(None) };
    let mut builder = PlanBuilder::new(from, to, elem, links);
    let to_reduce = builder.axes_to_reduce();
    let all: Vec<usize> = (0..to.placements().len()).collect();
    let latency = links.slowest(&all).latency_us;
    // A single collective of one or two rounds cannot get cheaper, only be avoided, which happens where axes become
    // partial. 3 latencies are more than two rounds.
    let makes = |axis: usize| to.placements()[axis].is_partial() && from.placements()[axis] != to.placements()[axis];
    let small = calls(best) == 1 && best.us() < 3.0 * latency && !all.iter().any(|&a| makes(a));
    if calls(best) == 0 || small {
        return Ok(None);
    }
    let Some(steps) = search::cheapest(from, to, &to_reduce, elem, links, best.us()) else { return Ok(None) };
    builder.follow(&steps)?;
    let plan = builder.done();
    // A collective has overhead beyond the cost model: each additional one must save at least one latency.
    let more = calls(&plan).saturating_sub(calls(best));
    Ok((plan.us() + more as f64 * latency < best.us()).then_some(plan))
}

/// A plan under construction: `current` is the layout after the steps so far.
struct PlanBuilder<'a> {
    to: &'a Layout,
    elem: usize,
    links: &'a Links,
    from: Layout,
    current: Layout,
    steps: Vec<RedistributeStep>,
}

impl<'a> PlanBuilder<'a> {
    fn new(from: &Layout, to: &'a Layout, elem: usize, links: &'a Links) -> Self {
        PlanBuilder { to, elem, links, from: from.clone(), current: from.clone(), steps: Vec::new() }
    }

    /// Builds the plan of a choice; `None` if the choice cannot reach the target.
    fn build(mut self, choice: PlanChoice) -> Result<Option<RedistributePlan>> {
        if self.from != *self.to {
            self.relabel()?;
            self.narrow()?;
            self.reduce(choice)?;
            if !self.move_boxes(choice)? {
                return Ok(None);
            }
            self.make_partial()?;
        }
        Ok(Some(self.done()))
    }

    fn done(self) -> RedistributePlan {
        assert_eq!(self.current, *self.to, "a plan ends where it should");
        RedistributePlan { from: self.from, to: self.to.clone(), steps: self.steps }
    }

    /// Appends the steps that the search has found; consecutive steps of one kind are merged where possible.
    fn follow(&mut self, steps: &[(SearchStep, LayoutSketch)]) -> Result<()> {
        self.relabel()?;
        let mut rest = steps;
        while let Some((step, _)) = rest.first() {
            let alike = rest.iter().take_while(|(next, _)| step.merges_with(next)).count().max(1);
            let axes = rest[..alike].iter().filter_map(|(step, _)| match step {
                SearchStep::Scatter { axis, .. } => Some(*axis),
                _ => None,
            });
            let axes: Vec<usize> = axes.collect();
            let sketch = &rest[alike - 1].1;
            let small = |dim: usize| self.to.shard_order(dim).iter().copied().filter(|&a| self.size(a) == 1);
            let orders =
                sketch.orders.iter().enumerate().map(|(dim, axes)| small(dim).chain(axes.iter().copied()).collect());
            let orders: Vec<Vec<usize>> = orders.collect();
            let kind = match *step {
                SearchStep::Narrow => RedistributeStepKind::Narrow,
                SearchStep::Scatter { op, dim, .. } => RedistributeStepKind::ReduceScatter { axes, op, dim },
                SearchStep::Move => self.move_kind(&Layout::from_shard_orders(
                    self.to.mesh(),
                    self.to.shape(),
                    &sketch.placements,
                    &orders,
                )?),
                SearchStep::MakePartial { .. } => RedistributeStepKind::MakePartial,
            };
            self.push(kind, &sketch.placements, &orders)?;
            rest = &rest[alike..];
        }
        Ok(())
    }

    fn size(&self, axis: usize) -> usize {
        self.to.mesh().shape()[axis]
    }

    /// The axes that shard `dim` in a layout, without those of size 1, which divide nothing.
    fn real_order(&self, layout: &Layout, dim: usize) -> Vec<usize> {
        layout.shard_order(dim).iter().copied().filter(|&a| self.size(a) > 1).collect()
    }

    fn push(&mut self, kind: RedistributeStepKind, placements: &[Placement], orders: &[Vec<usize>]) -> Result<()> {
        let after = Layout::from_shard_orders(self.to.mesh(), self.to.shape(), placements, orders)?;
        if after != self.current {
            let cost = cost(&kind, &self.current, &after, self.elem, self.links);
            self.steps.push(RedistributeStep { kind, before: self.current.clone(), after: after.clone(), cost });
            self.current = after;
        }
        Ok(())
    }

    fn current_orders(&self) -> Vec<Vec<usize>> {
        (0..self.to.shape().len()).map(|dim| self.current.shard_order(dim).to_vec()).collect()
    }

    /// Takes the target's placements on axes of size 1, where every placement means the same data.
    fn relabel(&mut self) -> Result<()> {
        let mut placements = self.current.placements().to_vec();
        let mut orders = Vec::new();
        for (axis, placement) in placements.iter_mut().enumerate() {
            if self.size(axis) == 1 {
                placement.clone_from(&self.to.placements()[axis]);
            }
        }
        for dim in 0..self.to.shape().len() {
            let new = self.to.shard_order(dim).iter().copied().filter(|&a| self.size(a) == 1);
            orders.push(new.chain(self.real_order(&self.current, dim)).collect());
        }
        self.push(RedistributeStepKind::Relabel, &placements, &orders)
    }

    /// The axes that still have to shard `dim`, if the axes that shard it now are a prefix of the target's order.
    fn axes_to_shard(&self, dim: usize) -> Vec<usize> {
        let (now, target) = (self.real_order(&self.current, dim), self.real_order(self.to, dim));
        let same = |&a: &usize| self.current.placements()[a] == self.to.placements()[a];
        if target.starts_with(&now) && now.iter().all(same) { target[now.len()..].to_vec() } else { Vec::new() }
    }

    /// Narrows replicated axes to the target's shards, where that needs no communication.
    fn narrow(&mut self) -> Result<()> {
        let (mut placements, mut orders) = (self.current.placements().to_vec(), self.current_orders());
        for (dim, orders) in orders.iter_mut().enumerate() {
            let replicated = |a: &usize| self.current.placements()[*a].is_replicate();
            for axis in self.axes_to_shard(dim).into_iter().take_while(replicated) {
                placements[axis] = self.to.placements()[axis].clone();
                orders.push(axis);
            }
        }
        self.push(RedistributeStepKind::Narrow, &placements, &orders)
    }

    /// The partial axes that must be reduced: those whose placement changes, and axes that block an earlier axis, because
    /// the last axis is reduced first and not all reductions commute.
    fn axes_to_reduce(&self) -> Vec<usize> {
        let partial = |axis: usize| self.current.placements()[axis].reduction().filter(|_| self.size(axis) > 1);
        let changes = |axis: usize| self.current.placements()[axis] != self.to.placements()[axis];
        let axes = 0..self.current.placements().len();
        let mut to_reduce: Vec<usize> = axes.clone().filter(|&a| partial(a).is_some() && changes(a)).collect();
        let mut touched: Vec<(usize, ReduceOp)> = to_reduce.iter().filter_map(|&a| Some((a, partial(a)?))).collect();
        // Axes that become partial, except where a replicated value is already a valid operand.
        let made = |a: usize| {
            let op = self.to.placements()[a].reduction()?;
            (!(is_idempotent(op) && self.current.placements()[a].is_replicate())).then_some((a, op))
        };
        touched.extend(axes.filter(|&a| changes(a) && self.size(a) > 1).filter_map(made));
        while let Some((axis, op)) = touched.pop() {
            for later in axis + 1..self.current.placements().len() {
                if let Some(other) = partial(later).filter(|o| !commute(op, *o) && !to_reduce.contains(&later)) {
                    to_reduce.push(later);
                    touched.push((later, other));
                }
            }
        }
        to_reduce.sort_unstable();
        to_reduce
    }

    /// Axes whose reduction may be scattered or full, up to [`MAX_CHOICES`].
    fn scatterable(&self) -> Vec<usize> {
        let sharded = |a: &usize| self.to.placements()[*a].is_shard(None);
        self.axes_to_reduce().into_iter().filter(sharded).take(MAX_CHOICES).collect()
    }

    /// The number of [`scatterable`](Self::scatterable) axes.
    fn open_choices(&self) -> usize {
        self.scatterable().len()
    }

    fn reduce(&mut self, choice: PlanChoice) -> Result<()> {
        let open = self.scatterable();
        let scattered = |axis: usize| open.iter().position(|&a| a == axis).is_none_or(|i| choice.bits >> i & 1 == 0);
        loop {
            let to_reduce = self.axes_to_reduce();
            let Some(&last) = to_reduce.last() else { return Ok(()) };
            // Axes that may be reduced now: the last, and earlier ones that commute with all later ones.
            let free = |&a: &usize| {
                let later = to_reduce.iter().filter(|&&b| b > a);
                later.into_iter().all(|&b| commute(self.op_of(a), self.op_of(b)))
            };
            let free: Vec<usize> = to_reduce.iter().copied().filter(free).collect();
            if !self.scatter_in_place(&free, &scattered)? && !self.scatter_at_end(&free, &scattered)? {
                let op = self.op_of(last);
                let axes: Vec<usize> = free.into_iter().filter(|&a| self.op_of(a) == op).collect();
                let mut placements = self.current.placements().to_vec();
                axes.iter().for_each(|&a| placements[a] = Placement::Replicate);
                let orders = self.current_orders();
                self.push(RedistributeStepKind::AllReduce { axes, op }, &placements, &orders)?;
            }
            self.narrow()?;
        }
    }

    /// The reduction of a partial axis.
    fn op_of(&self, axis: usize) -> ReduceOp {
        self.current.placements()[axis].reduction().expect("only partial axes are reduced")
    }

    /// Reduce-scatters axes that come next in the target's order of some dimension; whether there were any.
    fn scatter_in_place(&mut self, free: &[usize], scattered: &impl Fn(usize) -> bool) -> Result<bool> {
        for dim in 0..self.to.shape().len() {
            let fits = |a: &usize| free.contains(a) && self.to.placements()[*a].is_contiguous() && scattered(*a);
            let mut axes: Vec<usize> = self.axes_to_shard(dim).into_iter().take_while(fits).collect();
            if let Some(&first) = axes.first() {
                let op = self.op_of(first);
                let alike = axes.iter().take_while(|&&a| self.op_of(a) == op).count();
                axes.truncate(alike);
                let targets: Vec<Placement> = axes.iter().map(|&a| self.to.placements()[a].clone()).collect();
                self.scatter(axes, op, &targets, dim)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reduce-scatters an axis that the target shards, but not next in its order: it is put after the current axes of the
    /// dimension, and an exchange moves it later. Whether there was one.
    fn scatter_at_end(&mut self, free: &[usize], scattered: &impl Fn(usize) -> bool) -> Result<bool> {
        let sharded = free.iter().copied().find(|&a| self.to.placements()[a].is_shard(None) && scattered(a));
        let Some(axis) = sharded else { return Ok(false) };
        let (dim, op) = (self.to.placements()[axis].shard_dim().expect("a shard"), self.op_of(axis));
        self.scatter(vec![axis], op, &[Placement::Shard(dim as isize)], dim)?;
        Ok(true)
    }

    fn scatter(&mut self, axes: Vec<usize>, op: ReduceOp, targets: &[Placement], dim: usize) -> Result<()> {
        let (mut placements, mut orders) = (self.current.placements().to_vec(), self.current_orders());
        for (&axis, target) in axes.iter().zip(targets) {
            placements[axis] = target.clone();
            orders[dim].push(axis);
        }
        self.push(RedistributeStepKind::ReduceScatter { axes, op, dim }, &placements, &orders)
    }

    /// Whether a sharded axis can become partial in place, by padding with neutral elements: plain shards that come last
    /// in their dimension. Not for means, whose operands would have to be scaled.
    fn pads(&self, axis: usize) -> bool {
        let (now, then) = (&self.current.placements()[axis], &self.to.placements()[axis]);
        let (Some(dim), Some(op)) = (now.chunk_dim(), then.reduction()) else { return false };
        let mut without = self.real_order(&self.current, dim);
        let last = without.pop() == Some(axis);
        last && op != ReduceOp::Avg && without == self.real_order(self.to, dim)
    }

    /// Moves every shard to the layout of the target. `false` if the choice cannot reach it.
    fn move_boxes(&mut self, choice: PlanChoice) -> Result<bool> {
        let mut placements = self.to.placements().to_vec();
        let mut orders: Vec<Vec<usize>> = (0..self.to.shape().len()).map(|d| self.to.shard_order(d).to_vec()).collect();
        for axis in 0..placements.len() {
            if placements[axis].is_partial() && placements[axis] != self.current.placements()[axis] {
                placements[axis] = Placement::Replicate;
                if self.pads(axis) {
                    placements[axis] = self.current.placements()[axis].clone();
                    orders[placements[axis].shard_dim().expect("a shard")].push(axis);
                }
            }
        }
        let target = Layout::from_shard_orders(self.to.mesh(), self.to.shape(), &placements, &orders)?;
        let reached = match choice.moves {
            MoveStrategy::Direct => true,
            MoveStrategy::NarrowLast => self.move_sharded(&target)?,
            MoveStrategy::GatherFirst => self.gather_differences(&target)?,
        };
        if reached && self.current != target {
            let kind = if choice.moves == MoveStrategy::Direct {
                self.move_kind(&target)
            } else {
                RedistributeStepKind::Narrow
            };
            self.push(kind, &placements, &orders)?;
        }
        Ok(reached)
    }

    /// Moves the axes that are sharded now and leaves replicated axes to be narrowed afterwards. `false` unless these come
    /// last in the order of every dimension.
    fn move_sharded(&mut self, target: &Layout) -> Result<bool> {
        let mut placements = target.placements().to_vec();
        let mut orders: Vec<Vec<usize>> = Vec::new();
        for dim in 0..target.shape().len() {
            let axes = self.real_order(target, dim);
            let replicated = |a: &&usize| self.current.placements()[**a].is_replicate();
            let first = axes.iter().position(|a| replicated(&a)).unwrap_or(axes.len());
            if !axes[first..].iter().all(|a| replicated(&a)) {
                return Ok(false);
            }
            axes[first..].iter().for_each(|&a| placements[a] = Placement::Replicate);
            orders.push(target.shard_order(dim).iter().copied().filter(|a| !axes[first..].contains(a)).collect());
        }
        let middle = Layout::from_shard_orders(target.mesh(), target.shape(), &placements, &orders)?;
        if middle != self.current {
            self.push(self.move_kind(&middle), &placements, &orders)?;
        }
        Ok(true)
    }

    /// The dimensions that are sharded differently in the target.
    fn changed_dims(&self, target: &Layout) -> Vec<usize> {
        let differs = |&dim: &usize| {
            let (now, then) = (self.real_order(&self.current, dim), self.real_order(target, dim));
            now != then || now.iter().any(|&a| self.current.placements()[a] != target.placements()[a])
        };
        (0..self.to.shape().len()).filter(differs).collect()
    }

    /// The collective that moves all boxes to the layout of the target: an all-gather or an exchange of dimensions where one
    /// suffices, else an exchange of boxes.
    fn move_kind(&self, target: &Layout) -> RedistributeStepKind {
        let changed = self.changed_dims(target);
        let orders = |layout: &Layout, dim: usize| self.real_order(layout, dim);
        // The axes of `longer` after those of `shorter`, if the latter are a prefix.
        let extra = |longer: &Layout, shorter: &Layout, dim: usize| -> Option<Vec<usize>> {
            let (long, short) = (orders(longer, dim), orders(shorter, dim));
            let same = short.iter().all(|&a| longer.placements()[a] == shorter.placements()[a]);
            let rest = long.strip_prefix(short.as_slice())?.to_vec();
            let contiguous = rest.iter().all(|&a| longer.placements()[a].is_contiguous());
            (same && contiguous && !rest.is_empty()).then_some(rest)
        };
        match changed[..] {
            [dim] => {
                if let Some(axes) = extra(&self.current, target, dim) {
                    return RedistributeStepKind::AllGather { axes, dim };
                }
            }
            [a, b] => {
                for (from, to) in [(a, b), (b, a)] {
                    if let (Some(old), Some(new)) =
                        (extra(&self.current, target, from), extra(target, &self.current, to))
                        && old == new
                    {
                        return RedistributeStepKind::ExchangeDims { axes: old, from, to };
                    }
                }
            }
            _ => {}
        }
        let involved = |axis: &usize| {
            changed.iter().any(|&dim| orders(&self.current, dim).contains(axis) || orders(target, dim).contains(axis))
        };
        RedistributeStepKind::ExchangeBoxes { axes: (0..target.placements().len()).filter(involved).collect() }
    }

    /// Gathers all dimensions that are sharded differently in the target. `false` if one of them takes more than a gather.
    fn gather_differences(&mut self, target: &Layout) -> Result<bool> {
        for dim in self.changed_dims(target) {
            let (now, then) = (self.real_order(&self.current, dim), self.real_order(target, dim));
            let same = |(a, b): &(&usize, &usize)| a == b && self.current.placements()[**a] == target.placements()[**b];
            let keep = now.iter().zip(&then).take_while(same).count();
            let axes = now[keep..].to_vec();
            let (mut placements, mut orders) = (self.current.placements().to_vec(), self.current_orders());
            if !axes.iter().all(|&a| placements[a].is_contiguous()) {
                return Ok(false);
            }
            axes.iter().for_each(|&a| placements[a] = Placement::Replicate);
            orders[dim].retain(|a| !axes.contains(a));
            self.push(RedistributeStepKind::AllGather { axes, dim }, &placements, &orders)?;
        }
        Ok(true)
    }

    fn make_partial(&mut self) -> Result<()> {
        let orders: Vec<Vec<usize>> = (0..self.to.shape().len()).map(|d| self.to.shard_order(d).to_vec()).collect();
        self.push(RedistributeStepKind::MakePartial, self.to.placements(), &orders)
    }
}
