//! Random programs of operators over random layouts; every value is compared with the unsharded run.
//!
//! Every rank generates the same program from its seed: some leaves in random layouts, then operators on earlier values.
//! Every operator runs twice, on the mesh and on a mesh of this rank only.
//!
//! Gradients are taken through a second set of programs, and compared too.
//!
//! `SHARDWISE_PROGRAM_CASES` sets the number of programs (default 6000; 10000 is the full count),
//! `SHARDWISE_GRADIENT_CASES` that of programs with gradients (default 2000, the full count), `SHARDWISE_SEED` the
//! first seed.

mod composed;
mod program;
mod products;
mod shapes;
mod steps;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use candle_core::Tensor;
use program::Program;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;
use shardwise_test_suites::settings::env_or;

const MESHES: [&[usize]; 9] = [&[2], &[3], &[4], &[2, 2], &[2, 3], &[3, 2], &[2, 2, 2], &[1, 3], &[6]];

/// Programs per world: creating one takes longer than running a program.
const BATCH: u64 = 25;

/// Far longer than a program takes: only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn random_programs_give_the_unsharded_values() {
    let (cases, first) = (env_or("SHARDWISE_PROGRAM_CASES", 6000u64), env_or("SHARDWISE_SEED", 0u64));
    let end = first + cases;
    let mut operators = 0;
    let starts: Vec<u64> = (first / BATCH..end.div_ceil(BATCH)).map(|batch| batch * BATCH).collect();
    for start in starts {
        operators += run_batch(start.max(first)..(start + BATCH).min(end), start / BATCH);
    }
    writeln!(std::io::stdout(), "random programs: {cases} equal, {operators} operators").unwrap();
}

/// Runs programs on one world. The mesh follows from the number of the batch, so that only a seed is needed to repeat its program.
fn run_batch(seeds: std::ops::Range<u64>, batch: u64) -> usize {
    let axes = MESHES[(batch % MESHES.len() as u64) as usize];
    let size: usize = axes.iter().product();
    // now and then a rank is outside the mesh
    let ranks = size + usize::from(batch % 4 == 3);
    let world = ThreadWorld::new(ranks).unwrap().deadline(DEADLINE).kernel_threads(1);
    let done = world.run(move |world| {
        let mut operators = 0;
        for seed in seeds.clone() {
            operators += run_program(&world, axes, seed)?;
        }
        Ok(operators)
    });
    done.unwrap_or_else(|error| panic!("{error}"))[0]
}

#[test]
fn random_programs_give_the_unsharded_gradients() {
    let (cases, first) = (env_or("SHARDWISE_GRADIENT_CASES", 2000u64), env_or("SHARDWISE_SEED", 0u64));
    let (mut taken, mut unstable) = (0, 0);
    for batch in 0..cases.div_ceil(BATCH) {
        let axes = MESHES[(batch % MESHES.len() as u64) as usize];
        let ranks = axes.iter().product::<usize>() + usize::from(batch % 4 == 3);
        let seeds = first + batch * BATCH..first + ((batch + 1) * BATCH).min(cases);
        let world = ThreadWorld::new(ranks).unwrap().deadline(DEADLINE).kernel_threads(1);
        let run = move |world: World| {
            let mut counts = (0, 0);
            for seed in seeds.clone() {
                let gradients = gradients_of(&world, axes, seed, 0.0)?;
                // On a kink or in a tie the rounding of another order of summation decides: then a small move of the
                // leaves changes the unsharded gradient as much. All ranks look at it, so that all go the same way.
                let worst = gradients.iter().map(|(a, b)| difference(a, b)).fold(0.0, f64::max);
                let moved = gradients_of(&world, axes, seed, 1e-9)?;
                let shaken = gradients.iter().zip(&moved).map(|((_, a), (_, b))| difference(b, a)).fold(0.0, f64::max);
                if shaken > 1e-5 {
                    counts.1 += 1;
                } else if worst > 1e-6 {
                    let text =
                        format!("SHARDWISE_SEED={seed} on {axes:?}: gradients differ by {worst:e}: {gradients:?}");
                    return Err(Error::other(text));
                } else {
                    counts.0 += gradients.len();
                }
            }
            Ok(counts)
        };
        let counts = world.run(run).unwrap_or_else(|error| panic!("{error}"));
        (taken, unstable) = (taken + counts[0].0, unstable + counts[0].1);
    }
    writeln!(std::io::stdout(), "random programs: {cases} with {taken} gradients equal, {unstable} on a kink").unwrap();
    assert!(unstable * 10 <= cases, "{unstable} of {cases} programs say nothing");
}

/// How far two gradients differ, in units of the larger one's largest element (or 1).
fn difference(a: &Tensor, b: &Tensor) -> f64 {
    // A rank outside the mesh has nothing to compare.
    if a.dims() != b.dims() || a.elem_count() == 0 {
        return 0.0;
    }
    let values = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
    let (a, b) = (values(a), values(b));
    let scale = b.iter().filter(|x| x.is_finite()).fold(1.0, |scale: f64, x| scale.max(x.abs()));
    let each = a.iter().zip(&b).map(|(a, b)| if a == b || a.is_nan() && b.is_nan() { 0.0 } else { (a - b).abs() });
    each.fold(0.0, |worst: f64, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) }) / scale
}

/// The gradients of a program's leaves, sharded and unsharded.
fn gradients_of(world: &World, axes: &[usize], seed: u64, moved: f64) -> Result<Vec<(Tensor, Tensor)>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let ranks: Vec<usize> = (0..axes.iter().product()).collect();
    let named = axes.iter().zip(["a", "b", "c"]).map(|(&n, name)| (name, n));
    let mesh = world.device_mesh(Mesh::from_ranks(named.collect::<Vec<_>>(), ranks)?)?;
    let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
    let wanted = rng.random_range(3..=12);
    let mut program = Program::with_gradients(rng, mesh, alone, moved);
    let run = |program: &mut Program| -> Result<Vec<(Tensor, Tensor)>> {
        program.leaves()?;
        while program.operators() < wanted {
            let family = [steps::STEPS, shapes::STEPS, shapes::STEPS, products::STEPS][program.below(4)];
            family.choose(program.rng()).expect("some steps")(program)?;
        }
        program.gradients()
    };
    let outcome = run(&mut program);
    outcome.map_err(|e| Error::other(format!("SHARDWISE_SEED={seed} with gradients\n{}{e}", program.text())))
}

fn run_program(world: &World, axes: &[usize], seed: u64) -> Result<usize> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut ranks: Vec<usize> = (0..world.size()).collect();
    if rng.random_bool(0.5) {
        ranks.shuffle(&mut rng);
    }
    ranks.truncate(axes.iter().product());
    let named = axes.iter().zip(["a", "b", "c"]).map(|(&n, name)| (name, n));
    let mesh = world.device_mesh(Mesh::from_ranks(named.collect::<Vec<_>>(), ranks)?)?;
    let alone = world.device_mesh(Mesh::from_ranks([("one", 1)], vec![world.rank()])?)?;
    let wanted = rng.random_range(3..=12);
    let mut program = Program::new(rng, mesh, alone);
    // An error or panic is reported with the program that caused it.
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<usize> {
        program.leaves()?;
        while program.operators() < wanted {
            let families = [steps::STEPS, shapes::STEPS, shapes::STEPS, products::STEPS, composed::STEPS];
            let family = families[program.below(families.len())];
            family.choose(program.rng()).expect("some steps")(&mut program)?;
        }
        Ok(program.operators())
    }));
    let problem = match outcome {
        Ok(Ok(operators)) => return Ok(operators),
        Ok(Err(error)) => error.to_string(),
        Err(payload) => match payload.downcast_ref::<String>() {
            Some(text) => format!("panicked: {text}"),
            None => format!("panicked: {:?}", payload.downcast_ref::<&str>()),
        },
    };
    Err(Error::other(format!("SHARDWISE_SEED={seed} SHARDWISE_PROGRAM_CASES=1\n{}{problem}", program.text())))
}
