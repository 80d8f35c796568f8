//! The peak memory of redistributions between all pairs of placements on four ranks, as the allocator counts it.
//!
//! `--nocapture` prints the tables.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use shardwise::prelude::*;
use shardwise::redistribute::{RedistributePlan, RedistributeStep, RedistributeStepKind, explain};
use shardwise_test_suites::counted_memory::{CountedMemory, count_for, peak_of, without_rank};
use shardwise_test_suites::own_process::is_alone;

#[global_allocator]
static MEMORY: CountedMemory = CountedMemory;

const DTYPE: DType = DType::F32;

/// What a call allocates apart from tensors, such as the list of boxes of an exchange; far below the smallest shard.
const OVERHEAD: usize = 24 << 10;

/// The most that any rank may hold on a mesh of one axis, source included, in proportion to its source and its result, whatever the plan:
/// once more as much for blocks on their way. With every axis it is once more, for what other ranks may still be reading.
const MOST_TIMES: usize = 2;

/// Shorter runs of elements are copied before they are reduced.
const SHORT_RUN: usize = 256;

fn bytes(layout: &Layout, rank: usize) -> usize {
    layout.local_shape(rank).iter().product::<usize>() * DTYPE.size_in_bytes()
}

/// The bytes that a plan needs in addition to the source, which the caller holds, and the result: intermediate tensors, and
/// blocks that are packed to be sent.
fn arithmetic(plan: &RedistributePlan, rank: usize) -> usize {
    // What is sent is freed when the last rank has read it, which may be during a later step.
    let (mut peak, mut held, mut lent) = (0, 0, 0);
    for step in written_steps(plan) {
        let (before, after) = (bytes(&step.before, rank), bytes(&step.after, rank));
        let (packed, created) = match &step.kind {
            RedistributeStepKind::Relabel => (0, 0),
            // A rank with several blocks for another one sends them as one tensor. Nothing is packed twice.
            RedistributeStepKind::ExchangeBoxes { .. } => (before, after),
            // Ranges along two dimensions are taken one dimension after the other.
            RedistributeStepKind::Narrow if runs(&step.before, &step.after, rank) > 1 => (before / 2, after),
            // Where the terms of a result are short runs, a rank copies all of them together before it adds them.
            RedistributeStepKind::ReduceScatter { axes, dim, .. }
                if step.after.local_shape(rank)[*dim..].iter().product::<usize>() < SHORT_RUN =>
            {
                (axes.iter().map(|&axis| step.after.mesh().shape()[axis]).product::<usize>() * after, after)
            }
            _ => (0, after),
        };
        peak = peak.max(held + lent + packed + created);
        if step.cost.us > 0.0 {
            lent += packed + held;
        }
        held = if created == 0 { held } else { created };
    }
    peak
}

/// The steps whose results are written: of an operand that is narrowed only what is kept is.
fn written_steps(plan: &RedistributePlan) -> impl Iterator<Item = &RedistributeStep> {
    let steps = plan.steps();
    let narrows = |at: usize| steps.get(at).is_some_and(|next| matches!(next.kind, RedistributeStepKind::Narrow));
    let is_written = move |at: usize| !(matches!(steps[at].kind, RedistributeStepKind::MakePartial) && narrows(at + 1));
    steps.iter().enumerate().filter(move |(at, _)| is_written(*at)).map(|(_, step)| step)
}

/// The number of dimensions along which a rank keeps more than one range.
fn runs(before: &Layout, after: &Layout, rank: usize) -> usize {
    let breaks = |dim: &usize| {
        let (old, new) = (before.global_indices(rank, *dim), after.global_indices(rank, *dim));
        let places: Vec<usize> = new.iter().filter_map(|index| old.binary_search(index).ok()).collect();
        places.windows(2).any(|pair| pair[1] != pair[0] + 1)
    };
    (0..before.shape().len()).filter(breaks).count()
}

struct Measured {
    from: String,
    to: String,
    /// Peak, with the source, in proportion to source and result: the worst rank.
    ratio: f64,
    plan: String,
    failure: Option<String>,
}

/// Measures all pairs of layouts of these placements per axis, on a mesh over the world.
fn measure(world: &World, mesh: &[usize], shape: [usize; 2], kinds: &[&str]) -> Result<Vec<Measured>> {
    let mesh = world.mesh(mesh)?;
    let rank = world.rank();
    count_for(rank);
    let mut names = vec![String::new()];
    for _ in 0..mesh.ndim() {
        let joined = |name: &String| if name.is_empty() { String::new() } else { format!("{name},") };
        names = names.iter().flat_map(|name| kinds.iter().map(move |kind| joined(name) + kind)).collect();
    }
    let layouts: Vec<(String, Layout)> = names
        .into_iter()
        .map(|name| Ok((name.clone(), Layout::new(mesh.mesh(), shape.as_slice(), Placement::parse_list(&name)?)?)))
        .collect::<Result<_>>()?;
    let mut all = Vec::new();
    for (from_name, from) in &layouts {
        let local = Tensor::ones(from.local_shape(rank), DTYPE, &Device::Cpu)?;
        let source = DTensor::from_local_with_shape(&local, &mesh, from.placements().to_vec(), shape.as_slice())?;
        for (to_name, to) in &layouts {
            // The first time plans, and finds the groups.
            drop(source.to_layout(to)?);
            world.trace().clear();
            world.barrier()?;
            let threads = without_rank();
            let (peak, moved) = peak_of(rank, || source.to_layout(to));
            let moved = moved?;
            // Nobody frees memory of another rank before all have read their counters.
            world.barrier()?;
            drop(moved);
            world.barrier()?;
            assert!(without_rank() <= threads + OVERHEAD, "threads of a pool allocate nothing large");
            let plan = explain(&mesh, from, to, DTYPE)?.chosen;
            let (before, after) = (bytes(from, rank), bytes(to, rank));
            let bound = arithmetic(&plan, rank);
            // Apart from what is packed, no step holds more than one of both ends.
            let most = written_steps(&plan).map(|step| bytes(&step.after, rank)).max().unwrap_or(0);
            let steps = plan.steps().iter().map(|step| step.to_string()).collect::<Vec<_>>().join("; ");
            let is_much = before + peak > (MOST_TIMES + mesh.ndim() - 1) * (before + after) + OVERHEAD;
            let failure = (is_much || peak > bound + OVERHEAD || most > before.max(after)).then(|| {
                format!(
                    "rank {rank}, {from_name} to {to_name}: a peak of {peak} bytes above the source of {before}; the steps \
                     need {bound}, the result is {after} ({steps})"
                )
            });
            let ratio = (before + peak) as f64 / (before + after) as f64;
            all.push(Measured { from: from_name.clone(), to: to_name.clone(), ratio, plan: steps, failure });
        }
    }
    Ok(all)
}

/// Measures on four ranks; the worst rank of every pair.
fn worst(mesh: &'static [usize], shape: [usize; 2], kinds: &'static [&'static str]) -> Vec<Measured> {
    let ranks = ThreadWorld::new(4).unwrap().run(move |world| measure(&world, mesh, shape, kinds)).unwrap();
    let failures: Vec<String> = ranks.iter().flatten().filter_map(|measured| measured.failure.clone()).collect();
    let mut ranks = ranks.into_iter();
    let mut all = ranks.next().expect("four ranks");
    for other in ranks {
        for (worst, measured) in all.iter_mut().zip(other) {
            if measured.ratio > worst.ratio {
                *worst = measured;
            }
        }
    }
    let mut by_ratio: Vec<&Measured> = all.iter().collect();
    by_ratio.sort_by(|a, b| b.ratio.total_cmp(&a.ratio));
    println!("{mesh:?}, {} pairs; the largest peaks in proportion to source and result:", all.len());
    for worst in by_ratio.iter().take(12) {
        println!("  {:.2}  {} to {}: {}", worst.ratio, worst.from, worst.to, worst.plan);
    }
    let shown = failures.iter().take(40).cloned().collect::<Vec<_>>().join("\n");
    assert!(failures.is_empty(), "{} of {} pairs:\n{shown}", failures.len(), all.len());
    all
}

/// A placement in a column of the table: of ragged sizes the first.
fn short(kind: &str) -> String {
    kind.split_once(',').filter(|_| kind.contains(';')).map_or(kind.to_string(), |(start, _)| format!("{start},"))
}

fn print_table(all: &[Measured], kinds: &[&str]) {
    let ratios: BTreeMap<(&str, &str), f64> = all.iter().map(|m| ((m.from.as_str(), m.to.as_str()), m.ratio)).collect();
    let line = |name: &str, cells: Vec<String>| println!("{name:>21} {}", cells.join(" "));
    line("from, to", kinds.iter().map(|kind| format!("{:>10}", short(kind))).collect());
    for from in kinds {
        line(from, kinds.iter().map(|to| format!("{:>10.2}", ratios[&(*from, *to)])).collect());
    }
}

#[test]
fn all_pairs_of_placements_on_four_ranks_stay_within_their_bytes() {
    if !is_alone(module_path!(), "all_pairs_of_placements_on_four_ranks_stay_within_their_bytes") {
        return;
    }
    const ONE_AXIS: &[&str] = &[
        "R",
        "S(0)",
        "S(1)",
        "S(0;60,200,0,252)",
        "S(1;512,1024,300,212)",
        "SS(0,2)",
        "SS(1,4)",
        "BC(0,16)",
        "BC(1,8)",
        "P(sum)",
        "P(max)",
        "P(min)",
        "P(product)",
        "P(avg)",
    ];
    let all = worst(&[4], [512, 2048], ONE_AXIS);
    print_table(&all, ONE_AXIS);
    for measured in &all {
        let pair = (measured.from.as_str(), measured.to.as_str());
        if let ("S(0)", "S(1)") | ("S(1)", "S(0)") = pair {
            assert!(measured.plan.starts_with("exchange_dims"), "{}", measured.plan);
            assert!(measured.ratio < 1.1, "{pair:?}: {}", measured.ratio);
        }
    }
    worst(&[2, 2], [128, 2048], &["R", "S(0)", "S(1)", "BC(1,16)", "P(sum)"]);
}
