//! No plan moves more bytes than the best sequence of elementary steps, found by an exhaustive search over layouts.
//!
//! Elementary steps: reduce-scatter one axis along any dimension; any exchange of boxes between shards and replicas (a
//! gather is one); narrow; make an axis partial, from a replica or from the last shard of a dimension. An all-reduce is a
//! reduce-scatter and a gather. Steps are priced here, not by the planner: the bytes that all ranks receive together.

use std::collections::HashMap;

use shardwise::prelude::*;
use shardwise::redistribute::{RedistributePlan, RedistributeStepKind};

const ELEM: usize = 4;

/// Placements and, per dimension, the axes that shard it in order.
type Node = Layout;

fn is_partial(placement: &Placement) -> Option<ReduceOp> {
    match placement {
        Partial(op) => Some(*op),
        _ => None,
    }
}

fn shard_orders(layout: &Layout) -> Vec<Vec<usize>> {
    (0..layout.shape().len()).map(|dim| layout.shard_order(dim).to_vec()).collect()
}

fn with(layout: &Layout, placements: Vec<Placement>, orders: &[Vec<usize>]) -> Layout {
    let mesh = layout.mesh();
    let names: Vec<(usize, Vec<&str>)> = orders
        .iter()
        .enumerate()
        .map(|(dim, axes)| (dim, axes.iter().map(|&a| mesh.axes()[a].name.as_str()).collect()))
        .collect();
    let order: Vec<(usize, &[&str])> = names.iter().map(|(dim, axes)| (*dim, axes.as_slice())).collect();
    Layout::with_shard_order(mesh, layout.shape(), placements, &order).unwrap()
}

/// All layouts over some placements per axis, in all shard orders.
fn all_layouts(mesh: &Mesh, shape: [usize; 2], kinds: &[&str]) -> Vec<Node> {
    let mut all: Vec<Vec<Placement>> = vec![Vec::new()];
    for _ in 0..mesh.ndim() {
        let with = |so_far: &Vec<Placement>, kind: &str| [so_far.as_slice(), &[kind.parse().unwrap()]].concat();
        all = all.iter().flat_map(|so_far| kinds.iter().map(move |kind| with(so_far, kind))).collect();
    }
    let mut layouts = Vec::new();
    for placements in all {
        let plain = Layout::new(mesh, shape.as_slice(), placements.clone()).unwrap();
        let orders: Vec<Vec<Vec<usize>>> = shard_orders(&plain).iter().map(|axes| permutations(axes)).collect();
        for first in &orders[0] {
            for second in &orders[1] {
                layouts.push(with(&plain, placements.clone(), &[first.clone(), second.clone()]));
            }
        }
    }
    layouts
}

fn permutations(axes: &[usize]) -> Vec<Vec<usize>> {
    if axes.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (i, &axis) in axes.iter().enumerate() {
        let rest = [&axes[..i], &axes[i + 1..]].concat();
        all.extend(permutations(&rest).into_iter().map(|later| [vec![axis], later].concat()));
    }
    all
}

/// Elements of its new shard that a rank lacks.
fn lacking(before: &Layout, after: &Layout, rank: usize) -> usize {
    let (old, new) = (before.boxes_of(rank), after.boxes_of(rank));
    let both = old.iter().flat_map(|o| new.iter().filter_map(move |n| o.global.intersect(&n.global)));
    new.iter().map(|n| n.global.volume()).sum::<usize>() - both.map(|b| b.volume()).sum::<usize>()
}

fn held(layout: &Layout, rank: usize) -> usize {
    layout.local_shape(rank).iter().product()
}

fn total(layout: &Layout, of: impl Fn(usize) -> usize) -> usize {
    layout.mesh().ranks().iter().map(|&rank| of(rank)).sum::<usize>() * ELEM
}

fn commute(a: ReduceOp, b: ReduceOp) -> bool {
    a == b
}

/// Where one elementary step leads, and the bytes that it moves; exchanges apart.
fn steps(from: &Layout, ops: &[ReduceOp]) -> Vec<(Layout, usize)> {
    let (placements, orders) = (from.placements(), shard_orders(from));
    let mut all = Vec::new();
    for axis in 0..placements.len() {
        let later_commute =
            |op: ReduceOp| placements[axis + 1..].iter().filter_map(is_partial).all(|other| commute(op, other));
        let to = |placement: Placement, orders: &[Vec<usize>]| {
            let mut changed = placements.to_vec();
            changed[axis] = placement;
            with(from, changed, orders)
        };
        let behind = |dim: usize| {
            let mut orders = orders.clone();
            orders[dim].push(axis);
            orders
        };
        match &placements[axis] {
            Partial(op) if later_commute(*op) => {
                for dim in 0..2 {
                    let after = to(Shard(dim as isize), &behind(dim));
                    let moved = total(from, |rank| held(from, rank) - held(&after, rank));
                    all.push((after, moved));
                }
            }
            Replicate => {
                all.extend((0..2).map(|dim| (to(Shard(dim as isize), &behind(dim)), 0)));
                // copies of a value are operands of a maximum or a mean as they are
                let made = ops.iter().filter(|&&op| op == ReduceOp::Max || op == ReduceOp::Avg || later_commute(op));
                all.extend(made.map(|&op| (to(Partial(op), &orders), 0)));
            }
            Shard(dim) if orders[*dim as usize].last() == Some(&axis) => {
                let mut orders = orders.clone();
                orders[*dim as usize].pop();
                let made = ops.iter().filter(|&&op| op != ReduceOp::Avg && later_commute(op));
                all.extend(made.map(|&op| (to(Partial(op), &orders), 0)));
            }
            _ => {}
        }
    }
    all
}

/// The bytes that a plan moves, priced here.
fn moved_by(plan: &RedistributePlan) -> usize {
    let step = |step: &shardwise::redistribute::RedistributeStep| match &step.kind {
        RedistributeStepKind::Relabel | RedistributeStepKind::Narrow | RedistributeStepKind::MakePartial => 0,
        RedistributeStepKind::AllReduce { axes, .. } => {
            let size: usize = axes.iter().map(|&a| step.before.mesh().shape()[a]).product();
            total(&step.before, |rank| held(&step.before, rank)) * 2 * (size - 1) / size
        }
        RedistributeStepKind::ReduceScatter { .. } => {
            total(&step.before, |rank| held(&step.before, rank) - held(&step.after, rank))
        }
        _ => total(&step.before, |rank| lacking(&step.before, &step.after, rank)),
    };
    plan.steps().iter().map(step).sum()
}

/// Cost of a path: bytes first, then rounds of messages and calls of collectives.
type Price = (usize, usize);

/// Rounds of a collective among all ranks of some axes, and the call.
fn latency(mesh: &Mesh, axes: &[usize]) -> usize {
    let size: usize = axes.iter().map(|&a| mesh.shape()[a]).product();
    if size == 1 { 0 } else { size.next_power_of_two().ilog2() as usize + 1 }
}

/// The axes that take part when boxes move between layouts.
fn involved(before: &Layout, after: &Layout) -> Vec<usize> {
    let dims = (0..before.shape().len()).filter(|&dim| before.shard_order(dim) != after.shard_order(dim));
    let mut axes: Vec<usize> = dims.flat_map(|d| [before.shard_order(d), after.shard_order(d)].concat()).collect();
    axes.sort_unstable();
    axes.dedup();
    axes
}

fn latency_of(plan: &RedistributePlan) -> usize {
    let step = |step: &shardwise::redistribute::RedistributeStep| match &step.kind {
        RedistributeStepKind::Relabel | RedistributeStepKind::Narrow | RedistributeStepKind::MakePartial => 0,
        RedistributeStepKind::AllReduce { axes, .. } => 2 * latency(step.before.mesh(), axes) - 1,
        RedistributeStepKind::ReduceScatter { axes, .. }
        | RedistributeStepKind::AllGather { axes, .. }
        | RedistributeStepKind::ExchangeDims { axes, .. }
        | RedistributeStepKind::ExchangeBoxes { axes } => latency(step.before.mesh(), axes),
    };
    plan.steps().iter().map(step).sum()
}

/// A pair of layouts whose plan moves more bytes than the best path.
struct Above {
    text: String,
    /// Whether the plan takes fewer rounds and calls instead.
    is_quicker: bool,
}

/// Compares the plans of all pairs of layouts with the best paths; returns the pairs that move more bytes.
fn compare(mesh: &str, shape: [usize; 2], kinds: &[&str]) -> Vec<Above> {
    let mesh: Mesh = mesh.parse().unwrap();
    let nodes = all_layouts(&mesh, shape, kinds);
    #[allow(clippy::mutable_key_type)] // a layout is one allocation, compared by its address
    let number: HashMap<&Layout, usize> = nodes.iter().enumerate().map(|(i, node)| (node, i)).collect();
    let ops: Vec<ReduceOp> = kinds.iter().filter_map(|kind| is_partial(&kind.parse().unwrap())).collect();
    let mut edges: Vec<Vec<(usize, Price)>> = Vec::new();
    for node in &nodes {
        let priced = |(to, moved): &(Layout, usize)| {
            let reduced = (0..mesh.ndim()).find(|&a| *moved > 0 && node.placements()[a] != to.placements()[a]);
            (number[to], (*moved, reduced.map_or(0, |axis| latency(&mesh, &[axis]))))
        };
        let mut own: Vec<(usize, Price)> = steps(node, &ops).iter().map(priced).collect();
        let same_partials = |other: &&Layout| {
            node.placements().iter().zip(other.placements()).all(|(a, b)| is_partial(a) == is_partial(b))
        };
        let exchanged = |to: &Layout| {
            let moved = total(node, |rank| lacking(node, to, rank));
            (number[to], (moved, if moved == 0 { 0 } else { latency(&mesh, &involved(node, to)) }))
        };
        own.extend(nodes.iter().filter(same_partials).map(exchanged));
        edges.push(own);
    }
    let plain = |l: &Layout| shard_orders(l).iter().all(|axes| axes.is_sorted());
    // Three axes have many shard orders: paths go through all of them, sources and targets are in mesh order.
    let looked_at = |layout: &Layout| mesh.ndim() < 3 || plain(layout);
    let (mut above, mut pairs) = (Vec::new(), 0);
    for (start, from) in nodes.iter().enumerate().filter(|(_, from)| looked_at(from)) {
        // Dijkstra on a dense graph.
        let mut best: Vec<Price> = vec![(usize::MAX, 0); nodes.len()];
        let mut open: Vec<usize> = (0..nodes.len()).collect();
        best[start] = (0, 0);
        while let Some(at) = open.iter().copied().filter(|&n| best[n].0 < usize::MAX).min_by_key(|&n| best[n]) {
            open.retain(|&n| n != at);
            for &(to, (moved, rounds)) in &edges[at] {
                best[to] = best[to].min((best[at].0 + moved, best[at].1 + rounds));
            }
        }
        for (end, to) in nodes.iter().enumerate().filter(|(_, to)| looked_at(to)) {
            let plan = RedistributePlan::new(from, to, ELEM).unwrap();
            let moved = moved_by(&plan);
            pairs += 1;
            assert_eq!(moved, plan.total_bytes(), "the plan says what it moves: {plan}");
            if moved > best[end].0 {
                let text = format!("{plan}\n{moved} bytes together, {} suffice", best[end].0);
                above.push(Above { text, is_quicker: latency_of(&plan) < best[end].1 });
            }
        }
    }
    println!("{pairs} pairs of {shape:?} on {mesh}: {} above the minimum", above.len());
    above
}

const KINDS: [&str; 5] = ["R", "S(0)", "S(1)", "P(sum)", "P(max)"];

#[test]
fn regressions_that_moved_too_many_bytes() {
    let mesh: Mesh = "a=2,b=2".parse().unwrap();
    let moved = |n: usize, from: &str, to: &str| {
        let layout = |text: &str| Layout::new(&mesh, (n, n), Placement::parse_list(text).unwrap()).unwrap();
        RedistributePlan::new(&layout(from), &layout(to), ELEM).unwrap().total_bytes() / (n * n * ELEM / 4)
    };
    // in quarters of the tensor, over all ranks
    for n in [12, 4096] {
        assert_eq!(moved(n, "S(1),S(1)", "P(sum),P(sum)"), 0);
        assert_eq!(moved(n, "S(0),R", "P(sum),S(0)"), 0);
    }
    // PyTorch reduces the halves on two ranks each and moves 8; more rounds move less, which pays if there is much to move
    assert!(moved(12, "S(0),P(sum)", "P(sum),S(0)") <= 8);
    assert_eq!(moved(4096, "S(0),P(sum)", "P(sum),S(0)"), 6);
    assert_eq!(moved(4096, "P(sum),R", "P(max),R"), 8); // an all-reduce would be 16
}

/// For large tensors all plans move the minimum; there are no exceptions.
#[test]
fn no_plan_for_a_large_tensor_moves_more_than_the_minimum() {
    for (mesh, n) in [("a=4", 4096), ("a=2,b=2", 4096), ("a=2,b=3", 6144), ("a=2,b=2,c=2", 4096)] {
        let above = compare(mesh, [n, n], &KINDS);
        let some: Vec<&str> = above.iter().take(20).map(|pair| pair.text.as_str()).collect();
        assert!(some.is_empty(), "{} pairs, such as\n{}", above.len(), some.join("\n"));
    }
}

/// An average is created from replicas, because scaling shards would round: the same rule on both sides.
#[test]
fn plans_for_averages_move_the_minimum() {
    let above = compare("a=2,b=2", [4096, 4096], &["R", "S(0)", "S(1)", "P(avg)"]);
    let some: Vec<&str> = above.iter().take(20).map(|pair| pair.text.as_str()).collect();
    assert!(some.is_empty(), "{} pairs, such as\n{}", above.len(), some.join("\n"));
}

/// Small tensors: a plan that moves more bytes than the minimum saves rounds of messages or calls.
#[test]
fn a_plan_for_a_small_tensor_moves_more_only_to_save_messages() {
    for (mesh, n) in [("a=4", 8), ("a=2,b=2", 8), ("a=2,b=3", 12)] {
        let above = compare(mesh, [n, n], &KINDS);
        let slow: Vec<&str> = above.iter().filter(|pair| !pair.is_quicker).map(|pair| pair.text.as_str()).collect();
        println!("{} of them without saving rounds", slow.len());
        assert!(slow.is_empty(), "{} pairs, such as\n{}", slow.len(), slow[..slow.len().min(20)].join("\n"));
    }
}
