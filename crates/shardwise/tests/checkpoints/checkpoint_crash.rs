//! A saving process is killed at random moments: afterwards the directory holds the old checkpoint or the new one,
//! complete.
//!
//! `SHARDWISE_CRASH_CASES` sets the number of killed processes (default 200), `SHARDWISE_SEED` the first seed.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shardwise::checkpoint::{self, State, Value, verify};
use shardwise::prelude::*;
use shardwise_test_suites::own_process::test_command;
use shardwise_test_suites::settings::env_or;

/// Environment variable of the saving process: the path to save to.
const TARGET: &str = "SHARDWISE_CRASH_TARGET";

/// The saving process: saves one generation after the other until it is killed.
#[test]
fn child_process_that_saves() {
    let Some(target) = std::env::var_os(TARGET).map(PathBuf::from) else { return };
    let first = generation(&target).unwrap_or(0) + 1;
    launch(2, move |world| {
        let mesh = world.mesh([("all", 2)])?;
        for generation in first.. {
            let tensor = |i: usize| -> Result<(String, State)> {
                let placement = [Shard(0), Replicate, Shard(1)][i % 3].clone();
                let x = DTensor::full(generation as f64, (96, 64 + i), DType::F32, &mesh, [placement])?;
                Ok((format!("t{i}"), State::from(x)))
            };
            let mut entries = (0..6).map(tensor).collect::<Result<Vec<_>>>()?;
            entries.push(("generation".to_string(), State::from(generation)));
            checkpoint::save(&world, &target, &State::map(entries))?;
        }
        Ok(())
    })
    .unwrap();
}

/// The generation of the checkpoint, if there is one; asserts that all of it is of that generation.
fn generation(target: &Path) -> Option<i64> {
    let catalog = checkpoint::open(target).ok()?;
    let Some(Value::Int(generation)) = catalog.values.get("generation") else { panic!("no generation") };
    for key in catalog.tensors.keys() {
        let bytes = catalog.read(key).unwrap();
        assert!(bytes.chunks(4).all(|x| x == (*generation as f32).to_le_bytes()), "{key} is of another generation");
    }
    Some(*generation)
}

#[test]
fn a_process_killed_while_it_saves_leaves_the_old_checkpoint_or_the_new_one() {
    let (cases, seed) = (env_or("SHARDWISE_CRASH_CASES", 200usize), env_or("SHARDWISE_SEED", 0usize) as u64);
    let root = std::env::temp_dir().join(format!("shardwise-crash-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).unwrap();
    let target = root.join("state");
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut before, mut advanced, mut leftovers) = (None, 0, 0);
    for case in 0..cases {
        let mut child = test_command(module_path!(), "child_process_that_saves")
            .env(TARGET, &target)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The first process runs until there is a checkpoint, later ones for a random time around the duration of a save.
        let start = Instant::now();
        let pause = Duration::from_micros(rng.random_range(0..60_000));
        while before.is_none() && !target.exists() {
            assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint");
            std::thread::yield_now();
        }
        std::thread::sleep(pause);
        child.kill().unwrap();
        child.wait().unwrap();
        let verification = verify(&target, &|_| {});
        assert!(verification.is_intact(), "seed {seed}, case {case}: {:?}", verification.problems);
        let now = generation(&target);
        assert!(now >= before, "seed {seed}, case {case}: from {before:?} back to {now:?}");
        advanced += usize::from(now > before);
        leftovers += usize::from(std::fs::read_dir(&root).unwrap().count() > 1);
        before = now;
    }
    println!(
        "{cases} processes killed, seed {seed}: {advanced} after a new checkpoint, {leftovers} in the middle of a save"
    );
    assert!(advanced > 0 && leftovers > cases / 20, "kills must hit saves: {advanced}, {leftovers}");
    std::fs::remove_dir_all(&root).unwrap();
}
