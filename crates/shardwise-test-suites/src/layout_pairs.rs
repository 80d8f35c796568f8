//! Redistribution of tensors with known elements between all pairs of layouts, on a world of any engine.

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;
use shardwise::redistribute::{RedistributeStepKind, explain};

use crate::values;

const KINDS: [&str; 8] = ["R", "S(0)", "S(1)", "ragged", "P(sum)", "P(avg)", "P(max)", "P(min)"];

/// The same for integers, which have bitwise reductions instead of averages.
const INTEGER_KINDS: [&str; 8] = ["R", "S(0)", "S(1)", "P(sum)", "P(product)", "P(and)", "P(or)", "P(xor)"];

/// Checks every `stride`-th pair of layouts for each shape, on a mesh over the whole world, and returns the number of
/// pairs. Collective: every rank of the world calls it.
pub fn all_pairs(
    world: &World,
    mesh_shape: &[usize],
    shapes: &[[usize; 2]],
    dtype: DType,
    stride: usize,
) -> Result<usize> {
    let mesh = world.mesh(mesh_shape)?;
    assert_eq!(mesh.mesh().size(), world.size(), "the mesh covers the world");
    let kinds = if dtype.is_float() { &KINDS } else { &INTEGER_KINDS };
    let mut checked = 0;
    for shape in shapes {
        let (all, whole) = (layouts(mesh.mesh(), shape, kinds), values::full_tensor(shape));
        for pair in (0..all.len() * all.len()).step_by(stride) {
            check_pair(&mesh, &all[pair / all.len()], &all[pair % all.len()], &whole, dtype)?;
            checked += 1;
        }
    }
    Ok(checked)
}

/// Checks all pairs of layouts that use only these `kinds` of placements (`"ragged"`, or a placement's text).
pub fn pairs_of(world: &World, mesh_shape: &[usize], shape: &[usize], kinds: &[&str]) -> Result<usize> {
    let mesh = world.mesh(mesh_shape)?;
    let (all, whole) = (layouts(mesh.mesh(), shape, kinds), values::full_tensor(shape));
    for from in &all {
        for to in &all {
            check_pair(&mesh, from, to, &whole, DType::F64)?;
        }
    }
    Ok(all.len() * all.len())
}

/// Redistributes tensors between random layouts on random meshes over some ranks of the world, one case per seed.
pub fn any_layout_on_any_mesh(world: &World, first_seed: usize, cases: usize) -> Result<()> {
    for seed in first_seed..first_seed + cases {
        any_layout_of_seed(world, seed)?;
    }
    Ok(())
}

fn any_layout_of_seed(world: &World, seed: usize) -> Result<()> {
    let rng = &mut StdRng::seed_from_u64(seed as u64);
    let shape: Vec<usize> =
        (0..rng.random_range(1..=3)).map(|_| [0, 1, 2, 3, 5, 7, 8][rng.random_range(0..7)]).collect();
    let whole = values::full_tensor(&shape);
    let (a, b) = (random_mesh(rng, world.size()), random_mesh(rng, world.size()));
    let (from, to) = (random_layout(rng, &a, &shape), random_layout(rng, &b, &shape));
    let same_mesh = random_layout(rng, &a, &shape);
    let (a, b) = (world.device_mesh(a)?, world.device_mesh(b)?);
    let context =
        |what: &str| format!("SHARDWISE_SEED={seed} rank {}: {what} {from} to {to} or {same_mesh}", world.rank());
    let part = values::local(&from, world.rank());
    // Starts replicated and redistributes to the source layout: that step is checked, too.
    let settled = DTensor::distribute_tensor(&whole, &a, vec![Replicate; a.ndim()], None)?.to_layout(&from)?;
    if a.my_coordinate().is_some() {
        assert_eq!(settled.local_shape(), part.dims(), "{}", context("distribute"));
        assert!(values::same(&settled.full_tensor()?, &whole), "{}", context("distribute"));
        let again = settled.to_layout(&same_mesh)?;
        assert!(values::same(&again.full_tensor()?, &whole), "{}", context("same mesh"));
        if !same_mesh.is_partial() {
            assert!(
                values::same(&again.to_local()?, &values::local(&same_mesh, world.rank())),
                "{}",
                context("same mesh")
            );
        }
    }
    let moved = settled.to_mesh(&b, to.placements().to_vec())?;
    let plain = Layout::new(b.mesh(), shape.as_slice(), to.placements().to_vec())?;
    if b.my_coordinate().is_some() {
        assert!(values::same(&moved.full_tensor()?, &whole), "{}", context("other mesh"));
        if !plain.is_partial() {
            assert!(
                values::same(&moved.to_local()?, &values::local(&plain, world.rank())),
                "{}",
                context("other mesh")
            );
        }
    } else {
        assert_eq!(moved.local_shape(), [0]);
    }
    Ok(())
}

/// All layouts that combine these kinds of placements, one per mesh axis.
fn layouts(mesh: &Mesh, shape: &[usize], kinds: &[&str]) -> Vec<Layout> {
    let mut all = vec![Vec::new()];
    for axis in 0..mesh.ndim() {
        let with = |so_far: &Vec<Placement>, kind: &str| {
            let mut padded = so_far.clone();
            padded.resize(mesh.ndim(), Replicate);
            let next = match kind {
                "ragged" => values::ragged(mesh, shape, &padded, axis % 2, axis, axis + so_far.len()),
                plain => plain.parse().unwrap(),
            };
            [so_far.as_slice(), &[next]].concat()
        };
        all = all.iter().flat_map(|so_far| kinds.iter().map(move |kind| with(so_far, kind))).collect();
    }
    all.into_iter().map(|placements| Layout::new(mesh, shape, placements).unwrap()).collect()
}

/// Redistributes and checks the full tensor, the local part, and that the collectives that ran are those of the plan.
pub fn check_pair(mesh: &DeviceMesh, from: &Layout, to: &Layout, whole: &Tensor, dtype: DType) -> Result<()> {
    let (world, rank) = (mesh.world(), mesh.world().rank());
    let source = DTensor::from_local_with_shape(
        &values::local(from, rank).to_dtype(dtype)?,
        mesh,
        from.placements().to_vec(),
        from.shape(),
    )?;
    world.trace().clear();
    let moved = source.to_layout(to)?;
    let ran: Vec<(&str, usize)> = world.trace().records().iter().map(|r| (r.call, r.group.len())).collect();
    let plan = explain(mesh, from, to, dtype)?.chosen;
    let planned: Vec<(&str, usize)> = plan.steps().iter().filter_map(|s| collective(&s.kind, mesh)).collect();
    assert_eq!(ran, planned, "{plan}");
    if !to.is_partial() {
        assert!(
            values::same(&moved.to_local()?, &values::local(to, rank)),
            "rank {rank}: {plan}\n{}",
            moved.to_local()?
        );
    }
    assert!(values::same(&moved.full_tensor()?, whole), "rank {rank}: {plan}");
    Ok(())
}

/// Name and group size of the collective that a step of a plan runs, if any.
fn collective(kind: &RedistributeStepKind, mesh: &DeviceMesh) -> Option<(&'static str, usize)> {
    let (name, axes) = match kind {
        RedistributeStepKind::Relabel | RedistributeStepKind::Narrow | RedistributeStepKind::MakePartial => {
            return None;
        }
        RedistributeStepKind::AllReduce { axes, .. } => ("all_reduce", axes),
        RedistributeStepKind::ReduceScatter { axes, .. } => ("reduce_scatter", axes),
        RedistributeStepKind::AllGather { axes, .. } => ("all_gather", axes),
        RedistributeStepKind::ExchangeDims { axes, .. } => ("exchange_dims", axes),
        RedistributeStepKind::ExchangeBoxes { axes } => ("all_to_all", axes),
    };
    Some((name, axes.iter().map(|&a| mesh.shape()[a]).product()))
}

/// A random layout, which may include strided and block-cyclic shards and another shard order than the default.
fn random_layout(rng: &mut StdRng, mesh: &Mesh, shape: &[usize]) -> Layout {
    let mut placements = vec![Replicate; mesh.ndim()];
    for axis in 0..mesh.ndim() {
        let dim = rng.random_range(0..shape.len());
        placements[axis] = match rng.random_range(0..9) {
            0 => Partial([ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min][rng.random_range(0..4)]),
            1 => Placement::StridedShard { dim: dim as isize, split_factor: rng.random_range(1..4) },
            2 => values::ragged(mesh, shape, &placements, dim, axis, rng.random_range(0..99)),
            3 => Replicate,
            4 => Placement::block_cyclic(dim as isize, rng.random_range(1..4)),
            _ => Shard(dim as isize),
        };
    }
    let plain = placements.iter().all(|p| !matches!(p, Placement::Ragged { .. }));
    let layout = Layout::new(mesh, shape, placements.clone()).unwrap();
    if !plain {
        return layout;
    }
    let shuffled: Vec<(usize, Vec<&str>)> = (0..shape.len())
        .map(|dim| {
            let mut axes: Vec<&str> = layout.shard_order(dim).iter().map(|&a| mesh.axes()[a].name.as_str()).collect();
            axes.shuffle(rng);
            (dim, axes)
        })
        .collect();
    let order: Vec<(usize, &[&str])> = shuffled.iter().map(|(dim, axes)| (*dim, axes.as_slice())).collect();
    Layout::with_shard_order(mesh, shape, placements, &order).unwrap()
}

fn random_mesh(rng: &mut StdRng, world: usize) -> Mesh {
    loop {
        let axes: Vec<usize> = (0..rng.random_range(1..=3)).map(|_| rng.random_range(1..=3)).collect();
        let size: usize = axes.iter().product();
        if size <= world {
            let mut ranks: Vec<usize> = (0..world).collect();
            ranks.shuffle(rng);
            ranks.truncate(size);
            return Mesh::from_ranks(axes, ranks).unwrap();
        }
    }
}
