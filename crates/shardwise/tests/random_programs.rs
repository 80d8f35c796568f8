//! Random programs of operators over random layouts, every value of which is compared with the unsharded run.
//!
//! A program is made from its seed on every rank alike: some leaves in random layouts, then operators on earlier values.
//! Every operator runs twice, on the mesh and on a mesh of this rank alone, which has everything.
//!
//! `SHARDWISE_PROGRAM_CASES` sets the number of programs (default 6000; 10000 is the full count), `SHARDWISE_SEED` the
//! first seed.

#[path = "suites/program.rs"]
mod program;
#[path = "suites/program_products.rs"]
mod products;
#[path = "suites/program_shapes.rs"]
mod shapes;
#[path = "suites/program_steps.rs"]
mod steps;
#[path = "suites/values.rs"]
mod values;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use program::Program;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use shardwise::prelude::*;

const MESHES: [&[usize]; 9] = [&[2], &[3], &[4], &[2, 2], &[2, 3], &[3, 2], &[2, 2, 2], &[1, 3], &[6]];

/// A world is made once for so many programs.
const BATCH: u64 = 25;

/// Far longer than a program takes: only a hang gets there.
const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn random_programs_give_the_unsharded_values() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |v| v.parse().expect(name));
    let (cases, first) = (number("SHARDWISE_PROGRAM_CASES", 6000), number("SHARDWISE_SEED", 0));
    let end = first + cases;
    let mut operators = 0;
    let starts: Vec<u64> = (first / BATCH..end.div_ceil(BATCH)).map(|batch| batch * BATCH).collect();
    for start in starts {
        operators += run_batch(start.max(first)..(start + BATCH).min(end), start / BATCH);
    }
    writeln!(std::io::stdout(), "random programs: {cases} equal, {operators} operators").unwrap();
}

/// Runs programs on one world. The mesh follows from the number of the batch, so that a seed alone repeats its program.
fn run_batch(seeds: std::ops::Range<u64>, batch: u64) -> usize {
    let axes = MESHES[(batch % MESHES.len() as u64) as usize];
    let size: usize = axes.iter().product();
    // now and then a rank stands beside the mesh
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
    // What goes wrong inside shall come out with the program that did it.
    let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<usize> {
        program.leaves()?;
        while program.operators() < wanted {
            let family = [steps::STEPS, shapes::STEPS, shapes::STEPS, products::STEPS][program.below(4)];
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
