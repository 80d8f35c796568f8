//! Redistribution: every pair of layouts on small meshes, random pairs of meshes, and what plans promise.
//!
//! `SHARDWISE_PAIR_STRIDE` takes every n-th pair on the mesh of three axes (default 5; 1 takes all 262,144 per shape),
//! `SHARDWISE_CROSS_MESH_CASES` sets the number of random moves between meshes (default 500), `SHARDWISE_SEED` the first
//! seed.

#[path = "suites/values.rs"]
mod values;

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;
use shardwise::redistribute::{Plan, StepKind, explain};

const KINDS: [&str; 8] = ["R", "S(0)", "S(1)", "ragged", "P(sum)", "P(avg)", "P(max)", "P(min)"];

/// What integers have instead of means.
const INTEGER_KINDS: [&str; 8] = ["R", "S(0)", "S(1)", "P(sum)", "P(product)", "P(and)", "P(or)", "P(xor)"];

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |v| v.parse().expect(name))
}

/// All layouts over some kinds per axis.
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

/// Redistributes and checks value, local part, and that what ran is what was planned.
fn check_pair(mesh: &DeviceMesh, from: &Layout, to: &Layout, whole: &Tensor, dtype: DType) -> Result<()> {
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
        assert!(values::same(moved.to_local(), &values::local(to, rank)), "rank {rank}: {plan}\n{}", moved.to_local());
    }
    assert!(values::same(&moved.full_tensor()?, whole), "rank {rank}: {plan}");
    Ok(())
}

/// Name and group size of the collective that a step makes.
fn collective(kind: &StepKind, mesh: &DeviceMesh) -> Option<(&'static str, usize)> {
    let (name, axes) = match kind {
        StepKind::Relabel | StepKind::Narrow | StepKind::MakePartial => return None,
        StepKind::AllReduce { axes, .. } => ("all_reduce", axes),
        StepKind::ReduceScatter { axes, .. } => ("reduce_scatter", axes),
        StepKind::AllGather { axes, .. } => ("all_gather", axes),
        StepKind::ExchangeDims { axes, .. } => ("exchange_dims", axes),
        StepKind::Exchange { axes } => ("all_to_all", axes),
    };
    Some((name, axes.iter().map(|&a| mesh.shape()[a]).product()))
}

fn check_all_pairs(mesh_shape: &[usize], shapes: &[[usize; 2]], dtype: DType, stride: usize) {
    let (mesh_shape, shapes) = (mesh_shape.to_vec(), shapes.to_vec());
    let ranks = mesh_shape.iter().product();
    let run = move |world: World| {
        let mesh = world.mesh(mesh_shape.clone())?;
        let mut checked = 0;
        for shape in &shapes {
            let (all, whole) = (
                layouts(mesh.mesh(), shape, if dtype.is_float() { &KINDS } else { &INTEGER_KINDS }),
                values::whole(shape),
            );
            for pair in (0..all.len() * all.len()).step_by(stride) {
                check_pair(&mesh, &all[pair / all.len()], &all[pair % all.len()], &whole, dtype)?;
                checked += 1;
            }
        }
        Ok(checked)
    };
    let checked = ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    println!("{} pairs", checked[0]);
}

/// Sizes 0, 1 and primes.
const SHAPES: [[usize; 2]; 4] = [[5, 3], [0, 4], [1, 7], [11, 2]];

#[test]
fn all_pairs_on_one_axis() {
    for ranks in [2, 3, 4] {
        check_all_pairs(&[ranks], &SHAPES, DType::F64, 1);
        check_all_pairs(&[ranks], &SHAPES[..2], DType::I64, 1);
        check_all_pairs(&[ranks], &SHAPES[..1], DType::BF16, 1);
    }
}

#[test]
fn all_pairs_on_two_axes() {
    check_all_pairs(&[2, 2], &SHAPES, DType::F64, 1);
    check_all_pairs(&[2, 2], &SHAPES[..1], DType::I64, 1);
    check_all_pairs(&[2, 3], &SHAPES[..2], DType::F64, 1);
    check_all_pairs(&[2, 3], &SHAPES[..1], DType::I64, 1);
}

#[test]
fn all_pairs_on_three_axes() {
    // An odd stride has no factor in common with the 512 layouts, so that each comes up as a source and as a target.
    let stride = number("SHARDWISE_PAIR_STRIDE", 5);
    check_all_pairs(&[2, 2, 2], &SHAPES[..1], DType::F64, stride);
}

/// A random layout, strided shards and other orders of cuts included.
fn random_layout(rng: &mut StdRng, mesh: &Mesh, shape: &[usize]) -> Layout {
    let mut placements = vec![Replicate; mesh.ndim()];
    for axis in 0..mesh.ndim() {
        let dim = rng.random_range(0..shape.len());
        placements[axis] = match rng.random_range(0..8) {
            0 => Partial([ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min][rng.random_range(0..4)]),
            1 => Placement::StridedShard { dim: dim as isize, split_factor: rng.random_range(1..4) },
            2 => values::ragged(mesh, shape, &placements, dim, axis, rng.random_range(0..99)),
            3 => Replicate,
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

#[test]
fn any_layout_on_any_mesh_reaches_any_other() {
    const WORLD: usize = 6;
    let (cases, first) = (number("SHARDWISE_CROSS_MESH_CASES", 500), number("SHARDWISE_SEED", 0));
    let run = move |world: World| {
        for seed in first..first + cases {
            let rng = &mut StdRng::seed_from_u64(seed as u64);
            let shape: Vec<usize> =
                (0..rng.random_range(1..=3)).map(|_| [0, 1, 2, 3, 5, 7, 8][rng.random_range(0..7)]).collect();
            let whole = values::whole(&shape);
            let (a, b) = (random_mesh(rng, WORLD), random_mesh(rng, WORLD));
            let (from, to) = (random_layout(rng, &a, &shape), random_layout(rng, &b, &shape));
            let same_mesh = random_layout(rng, &a, &shape);
            let (a, b) = (world.device_mesh(a)?, world.device_mesh(b)?);
            let context = |what: &str| {
                format!("SHARDWISE_SEED={seed} rank {}: {what} {from} to {to} or {same_mesh}", world.rank())
            };
            let part = values::local(&from, world.rank());
            // Build in the plain order, then bring it to the layout in question and check that this is exact, too.
            let settled = DTensor::distribute_tensor(&whole, &a, vec![Replicate; a.ndim()], None)?.to_layout(&from)?;
            if a.my_coordinate().is_some() {
                assert_eq!(settled.to_local().dims(), part.dims(), "{}", context("distribute"));
                assert!(values::same(&settled.full_tensor()?, &whole), "{}", context("distribute"));
                let again = settled.to_layout(&same_mesh)?;
                assert!(values::same(&again.full_tensor()?, &whole), "{}", context("same mesh"));
                if !same_mesh.is_partial() {
                    assert!(
                        values::same(again.to_local(), &values::local(&same_mesh, world.rank())),
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
                        values::same(moved.to_local(), &values::local(&plain, world.rank())),
                        "{}",
                        context("other mesh")
                    );
                }
            } else {
                assert_eq!(moved.to_local().dims(), [0]);
            }
        }
        Ok(())
    };
    ThreadWorld::new(WORLD).unwrap().run(run).unwrap();
}

#[test]
fn adjacent_axes_merge_and_data_shrinks_before_it_moves() {
    let mesh: Mesh = "a=2,b=3".parse().unwrap();
    let layout = |text: &str| Layout::new(&mesh, (12, 6), Placement::parse_list(text).unwrap()).unwrap();
    let steps = |from: &str, to: &str| -> Vec<String> {
        let plan = Plan::new(&layout(from), &layout(to), 4).unwrap();
        plan.steps().iter().map(|s| s.to_string().split(" -> ").next().unwrap().to_string()).collect()
    };
    assert_eq!(steps("P(sum),P(sum)", "R,R"), ["all_reduce(sum) over a,b"]);
    assert_eq!(steps("P(sum),P(avg)", "R,R"), ["all_reduce(avg) over b", "all_reduce(sum) over a"]);
    assert_eq!(steps("P(sum),P(max)", "R,R"), ["all_reduce(max) over b", "all_reduce(sum) over a"]);
    assert_eq!(steps("P(sum),P(sum)", "S(0),S(0)"), ["reduce_scatter(sum) over a,b along dim 0"]);
    assert_eq!(steps("S(0),S(0)", "R,R"), ["all_gather over a,b along dim 0"]);
    assert_eq!(steps("S(0),S(1)", "R,R"), ["exchange of boxes over a,b"]);
    assert_eq!(steps("R,P(sum)", "S(0),R"), ["narrow", "all_reduce(sum) over b"]);
    assert_eq!(steps("P(sum),R", "S(0),S(0)"), ["reduce_scatter(sum) over a along dim 0", "narrow"]);
    assert_eq!(steps("S(0),R", "S(1),R"), ["exchange_dims over a from dim 0 to dim 1"]);
    assert_eq!(steps("S(0),S(0)", "S(1),S(1)"), ["exchange_dims over a,b from dim 0 to dim 1"]);
    assert_eq!(steps("S(0),R", "P(sum),R"), ["make partial"]);
    assert_eq!(steps("R,R", "P(sum),P(max)"), ["make partial"]);
    assert_eq!(steps("R,P(sum)", "P(max),P(sum)"), ["make partial"]);
    assert_eq!(steps("S(0),R", "S(1),S(0)"), ["exchange_dims over a from dim 0 to dim 1", "narrow"]);
    assert!(steps("R,S(1)", "R,S(1)").is_empty());
}

#[test]
fn links_set_the_cost_and_explain_shows_what_was_rejected() {
    use shardwise::mesh::Link;
    launch(4, |world| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let layout = |text: &str| Layout::new(mesh.mesh(), (64, 64), Placement::parse_list(text).unwrap()).unwrap();
        let (from, to) = (layout("P(sum),S(0)"), layout("S(0),R"));
        let explanation = explain(&mesh, &from, &to, DType::F32)?;
        assert!(!explanation.rejected.is_empty());
        assert!(explanation.rejected.iter().all(|p| p.us() >= explanation.chosen.us()));
        let text = explanation.to_string();
        assert!(text.contains("rejected") && text.contains("bytes"), "{text}");
        let slow = mesh.with_links(&[Link { latency_us: 1e4, gb_per_s: 8.0 }, Link::THREADS])?;
        let other = explain(&slow, &from, &to, DType::F32)?.chosen;
        assert!(other.us() > 1e4);
        for links in [
            &[][..],
            &[Link::THREADS; 3],
            &[Link { latency_us: -1.0, gb_per_s: 1.0 }; 2],
            &[Link { latency_us: 0.0, gb_per_s: 0.0 }; 2],
        ] {
            assert!(mesh.with_links(links).is_err());
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn planning_on_four_axes_is_quick_when_cold() {
    let mesh = Mesh::new([2, 2, 2, 2]).unwrap();
    let kinds = ["R", "S(0)", "S(1)", "S(2)", "P(sum)", "P(max)"];
    let mut rng = StdRng::seed_from_u64(5);
    let mut pick = |n: usize| -> Layout {
        let placements = (0..4).map(|_| kinds[rng.random_range(0..kinds.len())].parse().unwrap());
        Layout::new(&mesh, (16 + n, 24, 8), placements).unwrap()
    };
    let pairs: Vec<(Layout, Layout)> = (0..200).map(|n| (pick(n), pick(n))).collect();
    let start = std::time::Instant::now();
    for (from, to) in &pairs {
        Plan::new(from, to, 4).unwrap();
    }
    let each = start.elapsed() / pairs.len() as u32;
    println!("{each:?} per plan");
    // "Well under a millisecond", with room for a busy machine and a build that is not fully optimised.
    assert!(each < std::time::Duration::from_millis(1), "{each:?} per plan");
}

#[test]
fn bad_input_is_refused_with_the_reason() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2), ("b", 1)])?;
        let x = DTensor::zeros((4, 4), DType::F32, &mesh, [Shard(0), Replicate])?;
        let ints = DTensor::zeros(4, DType::I64, &mesh, [Shard(0), Replicate])?;
        let other: Mesh = "z=2".parse()?;
        let cases = [
            (x.redistribute([Shard(0)]).map(drop), "2, one per mesh axis"),
            (x.redistribute([Shard(2), Replicate]).map(drop), "from -2 to 1"),
            (x.redistribute([Partial(ReduceOp::BitOr), Replicate]).map(drop), "or of f32"),
            (ints.redistribute([Partial(ReduceOp::Avg), Replicate]).map(drop), "avg of i64"),
            (x.to_layout(&Layout::replicated(&other, (4, 4))?).map(drop), "use to_mesh"),
            (x.to_layout(&Layout::replicated(mesh.mesh(), (4, 5))?).map(drop), "shape [4, 4]"),
            (x.item::<f32>().map(drop), "one element"),
            (DTensor::zeros(1, DType::F32, &mesh, [Replicate, Replicate])?.item::<f64>().map(drop), "f64"),
            (DTensor::arange(0.0, 1.0, 0.0, DType::F32, &mesh, [Replicate, Replicate]).map(drop), "step"),
            (
                DTensor::random(Distribution::Permutation { n: 5 }, 100, DType::I64, &mesh, [Replicate, Replicate])
                    .map(drop),
                "one per element",
            ),
            (
                DTensor::random(
                    Distribution::Integers { low: 0, high: 300 },
                    4,
                    DType::U8,
                    &mesh,
                    [Replicate, Replicate],
                )
                .map(drop),
                "255",
            ),
            (DTensor::zeros(1 << 50, DType::F64, &mesh, [Replicate, Replicate]).map(drop), "memory for it"),
            (DTensor::zeros((usize::MAX, 2), DType::F64, &mesh, [Replicate, Replicate]).map(drop), "overflow"),
            (Plan::new(x.layout(), &Layout::replicated(&other, (4, 4))?, 4).map(drop), "one mesh"),
            (DTensor::randint(3, 3, 4, &mesh, [Replicate, Replicate]).map(drop), "low < high"),
            (DTensor::zeros(4, DType::F8E4M3, &mesh, [Replicate, Replicate]).map(drop), "f8e4m3"),
            (x.clone().assign(&[0..2], &x), "one range within each dimension"),
            (x.clone().assign(&[0..2, 0..4], &x), "[2, 4]"),
            (x.clone().fill_range(&[0..5, 0..4], 1.0), "one range within each dimension"),
        ];
        for (result, part) in cases {
            let message = result.expect_err(part).to_string();
            assert!(message.contains(part), "{part} missing in {message}");
        }
        let part = Tensor::zeros((3, 4), DType::F32, &Device::Cpu)?;
        let wrong =
            DTensor::from_local_with_shape(&part, &mesh, [Shard(0), Replicate], (4, 4)).unwrap_err().to_string();
        assert!(wrong.contains("[3, 4]") && wrong.contains("[2, 4]"), "{wrong}");
        // a replicated claim that does not hold, and types that differ: the same error on both ranks, ranks named
        let uneven = Tensor::zeros((3 + world.rank(), 4), DType::F32, &Device::Cpu)?;
        let wrong = DTensor::from_local(&uneven, &mesh, [Replicate, Replicate]).unwrap_err().to_string();
        assert!(wrong.contains("[4, 4] on rank 1") && wrong.contains("rank 0"), "{wrong}");
        let mixed = Tensor::zeros(3, if world.rank() == 0 { DType::F32 } else { DType::F64 }, &Device::Cpu)?;
        let wrong = DTensor::from_local(&mixed, &mesh, [Shard(0), Replicate]).unwrap_err().to_string();
        assert!(wrong.contains("element type") && wrong.contains("rank 1"), "{wrong}");
        let wrong = DTensor::distribute_tensor(&part, &mesh, [Shard(0), Replicate], Some(7)).unwrap_err().to_string();
        assert!(wrong.contains("below 2"), "{wrong}");
        Ok(())
    };
    ThreadWorld::new(2).unwrap().run(run).unwrap();
}

#[test]
fn a_shard_behind_a_strided_one_becomes_partial_where_it_lies() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let layout = |text: &str| Layout::new(mesh.mesh(), 8, Placement::parse_list(text).unwrap()).unwrap();
        let whole = values::whole(&[8]);
        for to in ["SS(0,2),P(sum)", "SS(0,2),P(max)", "P(sum),S(0)", "SS(0,2),P(avg)"] {
            check_pair(&mesh, &layout("SS(0,2),S(0)"), &layout(to), &whole, DType::F64)?;
        }
        Ok(())
    };
    ThreadWorld::new(4).unwrap().run(run).unwrap();
}

#[test]
fn a_closed_world_is_an_error_and_not_a_hang() {
    let kept = ThreadWorld::new(2).unwrap().run(|world| {
        let mesh = world.mesh([("a", 2)])?;
        DTensor::ones(4, DType::F32, &mesh, [Shard(0)])
    });
    let message = kept.unwrap()[0].full_tensor().unwrap_err().to_string();
    assert!(message.contains("rank 1") && message.contains("already returned"), "{message}");
}
