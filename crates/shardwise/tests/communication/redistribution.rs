//! Redistribution: every pair of layouts on small meshes, random pairs of meshes, and properties of plans.
//!
//! `SHARDWISE_PAIR_STRIDE` takes every n-th pair on the mesh of three axes (default 5; 1 takes all 262,144 per shape),
//! `SHARDWISE_CROSS_MESH_CASES` sets the number of random redistributions between meshes (default 500),
//! `SHARDWISE_SEED` the first seed.

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;
use shardwise::redistribute::{RedistributePlan, explain};
use shardwise::tensor::Arange;
use shardwise_test_suites::settings::env_or;
use shardwise_test_suites::{layout_pairs, own_process, values};

fn check_all_pairs(mesh_shape: &[usize], shapes: &[[usize; 2]], dtype: DType, stride: usize) {
    let (mesh_shape, shapes) = (mesh_shape.to_vec(), shapes.to_vec());
    let ranks = mesh_shape.iter().product();
    let run = move |world: World| layout_pairs::all_pairs(&world, &mesh_shape, &shapes, dtype, stride);
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
fn all_pairs_with_block_cyclic_shards() {
    const CYCLIC: [&str; 9] = ["R", "S(0)", "S(1)", "SS(0,2)", "BC(0,1)", "BC(0,2)", "BC(1,1)", "P(sum)", "P(max)"];
    let mut pairs = 0;
    for (mesh, shapes) in [(&[2][..], &SHAPES[..]), (&[3], &SHAPES), (&[2, 2], &SHAPES[..1]), (&[3, 2], &SHAPES[3..])] {
        for shape in shapes {
            let run = move |world: World| layout_pairs::pairs_of(&world, mesh, shape, &CYCLIC);
            pairs += ThreadWorld::new(mesh.iter().product()).unwrap().run(run).unwrap()[0];
        }
    }
    assert_eq!(pairs, 8 * 81 + 2 * 81 * 81);
}

#[test]
fn all_pairs_on_three_axes() {
    // An odd stride has no factor in common with the 512 layouts, so that each comes up as a source and as a target.
    let stride = env_or("SHARDWISE_PAIR_STRIDE", 5usize);
    check_all_pairs(&[2, 2, 2], &SHAPES[..1], DType::F64, stride);
}

#[test]
fn any_layout_on_any_mesh_redistributes_to_any_other() {
    let (cases, first) = (env_or("SHARDWISE_CROSS_MESH_CASES", 500usize), env_or("SHARDWISE_SEED", 0usize));
    // The one world of an engine may have any size, so a few cases run on sizes other than the one with the most meshes.
    for (ranks, cases) in [(6, cases), (4, cases / 10), (1, cases / 10)] {
        let run = move |world: World| layout_pairs::any_layout_on_any_mesh(&world, first, cases);
        ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    }
}

/// Messages that take no time make small tensors move as large ones do: with the fewest bytes, in as many steps as it
/// takes.
#[test]
fn plans_with_the_fewest_bytes_give_the_same_values() {
    use shardwise::mesh::Link;
    let first = env_or("SHARDWISE_SEED", 0usize) as u64;
    for axes in [&[2, 2][..], &[2, 3], &[2, 2, 2]] {
        let run = move |world: World| {
            let links = vec![Link { latency_us: 0.0, gb_per_s: 8.0 }; axes.len()];
            let mesh = world.mesh(axes)?.with_links(&links)?;
            let kinds = ["R", "S(0)", "S(1)", "P(sum)", "P(max)", "P(avg)", "P(min)"];
            for seed in first..first + 400 {
                let mut rng = StdRng::seed_from_u64(seed);
                let shape = [[8, 6], [5, 3], [1, 7], [12, 12]][rng.random_range(0..4)];
                let mut pick = || {
                    let places = (0..axes.len()).map(|_| kinds[rng.random_range(0..kinds.len())].parse().unwrap());
                    Layout::new(mesh.mesh(), shape.as_slice(), places).unwrap()
                };
                let (from, to) = (pick(), pick());
                layout_pairs::check_pair(&mesh, &from, &to, &values::full_tensor(&shape), DType::F64)?;
            }
            Ok(())
        };
        println!("SHARDWISE_SEED={first}");
        ThreadWorld::new(axes.iter().product()).unwrap().run(run).unwrap();
    }
}

#[test]
fn adjacent_axes_merge_and_data_shrinks_before_it_moves() {
    let mesh: Mesh = "a=2,b=3".parse().unwrap();
    let layout = |text: &str| Layout::new(&mesh, (12, 6), Placement::parse_list(text).unwrap()).unwrap();
    let steps = |from: &str, to: &str| -> Vec<String> {
        let plan = RedistributePlan::new(&layout(from), &layout(to), 4).unwrap();
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
    // Other tests intern layouts at the same time, under the same lock.
    if !own_process::is_alone(module_path!(), "planning_on_four_axes_is_quick_when_cold") {
        return;
    }
    let mesh = Mesh::new([2, 2, 2, 2]).unwrap();
    let kinds = ["R", "S(0)", "S(1)", "S(2)", "P(sum)", "P(max)"];
    let mut rng = StdRng::seed_from_u64(5);
    let mut pick = |n: usize| -> Layout {
        let placements = (0..4).map(|_| kinds[rng.random_range(0..kinds.len())].parse().unwrap());
        Layout::new(&mesh, (16 + n, 24, 8), placements).unwrap()
    };
    // The best of five rounds, each with different layouts: other tests run at the same time.
    let mut round = |round: usize| {
        let pairs: Vec<(Layout, Layout)> = (0..200).map(|n| 200 * round + n).map(|n| (pick(n), pick(n))).collect();
        let start = std::time::Instant::now();
        for (from, to) in &pairs {
            RedistributePlan::new(from, to, 4).unwrap();
        }
        start.elapsed() / pairs.len() as u32
    };
    let each = (0..5).map(&mut round).min().expect("five rounds");
    println!("{each:?} per plan");
    // "Well under a millisecond", with room for a busy machine and a build that is not fully optimised.
    assert!(each < std::time::Duration::from_millis(1), "{each:?} per plan");
}

#[test]
fn invalid_targets_are_rejected_with_the_reason() {
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
            (DTensor::arange(Arange::new(0.0, 1.0, 0.0), DType::F32, &mesh, [Replicate, Replicate]).map(drop), "step"),
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
            (
                DTensor::zeros(1 << 50, DType::F64, &mesh, [Replicate, Replicate]).map(drop),
                "the memory of this machine",
            ),
            (DTensor::zeros((usize::MAX, 2), DType::F64, &mesh, [Replicate, Replicate]).map(drop), "overflow"),
            (RedistributePlan::new(x.layout(), &Layout::replicated(&other, (4, 4))?, 4).map(drop), "one mesh"),
            (DTensor::randint(3..3, 4, &mesh, [Replicate, Replicate]).map(drop), "low < high"),
            (DTensor::zeros(4, DType::F4, &mesh, [Replicate, Replicate]).map(drop), "f4"),
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
        // replicas that differ, and dtypes that differ: the same error on both ranks, with the ranks
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
fn a_shard_after_a_strided_shard_becomes_partial_without_communication() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 2), ("b", 2)])?;
        let layout = |text: &str| Layout::new(mesh.mesh(), 8, Placement::parse_list(text).unwrap()).unwrap();
        let whole = values::full_tensor(&[8]);
        for to in ["SS(0,2),P(sum)", "SS(0,2),P(max)", "P(sum),S(0)", "SS(0,2),P(avg)"] {
            layout_pairs::check_pair(&mesh, &layout("SS(0,2),S(0)"), &layout(to), &whole, DType::F64)?;
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
    assert!(message.contains("after the launch had ended"), "{message}");
}
