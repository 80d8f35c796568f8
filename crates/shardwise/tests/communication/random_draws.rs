//! Random tensors have the same bits in every layout, mesh and world size, and generators of ranks cannot diverge
//! unnoticed.
//!
//! `SHARDWISE_DRAW_CASES` sets the number of random layouts (default 300), `SHARDWISE_SEED` the first seed.

use candle_core::{DType, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::Generator;
use shardwise::prelude::*;
use shardwise::random::GeneratorState;
use shardwise::tensor::RandomOptions;
use shardwise_test_suites::settings::env_or;
use shardwise_test_suites::values;

fn bits(t: &Tensor) -> Vec<u64> {
    if t.elem_count() == 0 {
        return Vec::new();
    }
    t.flatten_all()
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap()
        .to_vec1::<f64>()
        .unwrap()
        .into_iter()
        .map(f64::to_bits)
        .collect()
}

#[test]
fn draws_are_equal_to_those_of_one_rank() {
    let (cases, first) = (env_or("SHARDWISE_DRAW_CASES", 300usize), env_or("SHARDWISE_SEED", 0usize));
    for ranks in 1..=8 {
        let run = move |world: World| {
            for seed in (first..first + cases).filter(|seed| 1 + seed % 8 == ranks) {
                check_draw(&world, seed)?;
            }
            Ok(())
        };
        ThreadWorld::new(ranks).unwrap().run(run).unwrap();
    }
}

fn check_draw(world: &World, seed: usize) -> Result<()> {
    let rng = &mut StdRng::seed_from_u64(seed as u64);
    let ranks = world.size();
    let outer = (1..=ranks).filter(|d| ranks.is_multiple_of(*d)).nth(rng.random_range(0..2) % 2).unwrap_or(1);
    let mesh = world.mesh([("a", outer), ("b", ranks / outer)])?;
    let shape: Vec<usize> = (0..rng.random_range(1..=3)).map(|_| [0, 1, 3, 5, 8, 13][rng.random_range(0..6)]).collect();
    let mut placements = vec![Replicate; 2];
    for axis in 0..2 {
        let dim = rng.random_range(0..shape.len());
        placements[axis] = match rng.random_range(0..5) {
            0 => Replicate,
            1 => values::ragged(mesh.mesh(), &shape, &placements, dim, axis, seed),
            2 => Placement::StridedShard { dim: dim as isize, split_factor: rng.random_range(1..4) },
            3 => Partial([ReduceOp::Max, ReduceOp::Sum][rng.random_range(0..2)]),
            _ => Shard(dim as isize),
        };
    }
    let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
    let state = GeneratorState { seed: rng.random(), offset: rng.random_range(0..1000) };
    let (low, high) = (-rng.random_range(0..100), rng.random_range(1..100));
    for distribution in [
        Distribution::Uniform { low: f64::from(low), high: f64::from(high) },
        Distribution::Normal { mean: 1.0, std: 2.0 },
        Distribution::Bernoulli { p: 0.4 },
        Distribution::Integers { low: i64::from(low), high: i64::from(high) },
        Distribution::Permutation { n: shape.iter().product::<usize>() as u64 },
    ] {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::I64] {
            let numbers = shape.iter().product::<usize>();
            if matches!(distribution, Distribution::Permutation { .. }) && dtype == DType::BF16 && numbers > 256 {
                continue; // more than the type can represent
            }
            mesh.generator().set_state(state);
            alone.generator().set_state(state);
            let spread = DTensor::random(distribution, shape.as_slice(), dtype, &mesh, placements.clone())?;
            let whole = DTensor::random(distribution, shape.as_slice(), dtype, &alone, [Replicate])?;
            let context = format!("SHARDWISE_SEED={seed} {distribution:?} {dtype:?} {}", spread.layout());
            assert_eq!(bits(&spread.full_tensor()?), bits(&whole.to_local()?), "{context}");
            assert_eq!(mesh.generator().state().offset, state.offset + 1);
        }
    }
    Ok(())
}

#[test]
fn consecutive_draws_differ_and_generator_states_restore_them() {
    launch(2, |world| {
        let mesh = world.mesh([("a", 2)])?;
        mesh.manual_seed(42);
        let first = DTensor::randn((3, 5), &mesh, [Shard(0)])?;
        let state = mesh.generator().state();
        let second = DTensor::randn((3, 5), &mesh, [Shard(1)])?;
        assert!(!first.equal(&second)?);
        mesh.generator().set_state(state);
        assert!(DTensor::randn((3, 5), &mesh, [Replicate])?.equal(&second)?);
        mesh.manual_seed(42);
        assert!(first.randn_like()?.equal(&first)?);
        let stored = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<GeneratorState>(&stored).unwrap(), state);
        // two generators with one seed draw the same
        let (a, b) = (Generator::new(9), Generator::new(9));
        let uniform = Distribution::Uniform { low: 0.0, high: 1.0 };
        let x = DTensor::random(
            RandomOptions { distribution: uniform, generator: Some(&a) },
            7,
            DType::F64,
            &mesh,
            [Shard(0)],
        )?;
        assert!(x.equal(&DTensor::random(
            RandomOptions { distribution: uniform, generator: Some(&b) },
            7,
            DType::F64,
            &mesh,
            [Replicate]
        )?)?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_with_different_generator_states_get_an_error() {
    let run = |world: World| {
        let mesh = world.mesh([("a", 3)])?;
        if world.rank() == 1 {
            mesh.manual_seed(8);
        }
        DTensor::rand(6, &mesh, [Shard(0)])
    };
    for result in ThreadWorld::new(3).unwrap().run_each(run) {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("generator seed and offset [8, 0]") && message.contains("rank 1"), "{message}");
    }
}
