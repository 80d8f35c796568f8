//! Random programs with one faulty rank: each ends in an error that names that rank, on every rank that was still waiting,
//! and none hangs.
//!
//! `SHARDWISE_MISUSE_CASES` sets the number of programs (default 1500), `SHARDWISE_SEED` the first seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use shardwise::{Error, ReduceOp, TensorMeta, ThreadWorld, World};
use shardwise_test_suites::misuse::{FAULTS, Fault, FaultyProgram};
use shardwise_test_suites::settings::env_or;

/// Far longer than any of these programs takes: only a hang reaches it.
const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn every_faulty_program_ends_in_an_error_that_names_the_faulty_rank() {
    silence_injected_panics();
    let (cases, first) = (env_or("SHARDWISE_MISUSE_CASES", 1500u64), env_or("SHARDWISE_SEED", 0u64));
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for seed in first..first + cases {
        let case = Arc::new(FaultyProgram::random(seed));
        let program = Arc::clone(&case);
        let start = Instant::now();
        let world = ThreadWorld::new(case.ranks).unwrap().deadline(DEADLINE);
        let results = world.run_each(move |world| program.run(&world));
        let context = format!("SHARDWISE_SEED={seed} {case:?}: {results:?}");
        assert!(start.elapsed() < DEADLINE, "took {:?}: {context}", start.elapsed());
        case.judge(&results).unwrap_or_else(|problem| panic!("{problem}\n{context}"));
        *seen.entry(format!("{:?}", case.fault)).or_default() += 1;
    }
    println!("{cases} programs by fault: {seen:?}");
    assert!(cases < 500 || seen.len() == FAULTS.len(), "a fault never came up: {seen:?}");
}

#[test]
fn the_same_programs_without_a_fault_succeed() {
    for seed in 0..100 {
        let mut case = FaultyProgram::random(seed);
        case.fault = Fault::None;
        let world = ThreadWorld::new(case.ranks).unwrap().deadline(DEADLINE);
        world.run(move |world| case.run(&world)).unwrap();
    }
}

#[test]
fn a_silent_rank_is_an_error_on_every_rank_after_the_deadline() {
    let deadline = Duration::from_millis(300);
    let start = Instant::now();
    let results = ThreadWorld::new(3).unwrap().deadline(deadline).run_each(move |world| {
        if world.rank() == 1 {
            std::thread::sleep(2 * deadline);
        }
        world.barrier()
    });
    assert!(start.elapsed() < 20 * deadline);
    for result in &results {
        let error = result.as_ref().expect_err("the barrier cannot complete").to_string();
        for part in ["barrier", "[1]", "300ms", "misuse.rs"] {
            assert!(error.contains(part), "{part} missing in {error}");
        }
    }
}

#[test]
fn a_rank_that_never_returns_is_abandoned_and_named() {
    let deadline = Duration::from_millis(300);
    let release = Arc::new(AtomicBool::new(false));
    let held = Arc::clone(&release);
    let start = Instant::now();
    let world = ThreadWorld::new(3).unwrap().deadline(deadline);
    let results = world.run_each(move |world| {
        while world.rank() == 2 && !held.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        world.barrier()
    });
    assert!(start.elapsed() < 20 * deadline, "{:?}", start.elapsed());
    assert!(matches!(results[2], Err(Error::Stuck { rank: 2, .. })), "{:?}", results[2]);
    assert!(matches!(results[0], Err(Error::Timeout { .. })), "{:?}", results[0]);
    release.store(true, SeqCst);
}

#[test]
fn a_mismatch_names_both_ranks_both_calls_and_both_call_sites() {
    let run = |world: World| {
        let tensor = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
        if world.rank() == 2 { world.barrier() } else { world.all_reduce(&tensor, ReduceOp::Max).map(drop) }
    };
    let results = ThreadWorld::new(3).unwrap().run_each(run);
    let texts: Vec<String> = results.iter().map(|r| r.as_ref().unwrap_err().to_string()).collect();
    assert!(texts.iter().all(|t| *t == texts[0]), "{texts:?}");
    for part in ["rank 0 called all_reduce(max) of f32 [2, 3]", "rank 2 called barrier", "[0, 1, 2]"] {
        assert!(texts[0].contains(part), "{part} missing in {}", texts[0]);
    }
    assert_eq!(texts[0].matches("misuse.rs:").count(), 2, "{}", texts[0]);
}

#[test]
fn a_group_is_usable_after_a_mismatch_that_all_ranks_handle() {
    let run = |world: World| {
        let sizes = [1 + world.rank(), 2];
        let tensor = Tensor::new(&[world.rank() as u32], &Device::Cpu)?;
        assert!(world.all_gather(&tensor, 0, &sizes).is_err());
        Ok(world.all_gather(&tensor, 0, &[1, 1])?.to_vec1::<u32>()?)
    };
    assert_eq!(ThreadWorld::new(2).unwrap().run(run).unwrap(), [[0, 1], [0, 1]]);
}

#[test]
fn a_deadlock_of_receives_is_detected_at_once() {
    let run = |world: World| world.recv(&TensorMeta::new(1, DType::F32), 1 - world.rank(), 0).map(drop);
    let start = Instant::now();
    let error = ThreadWorld::new(2).unwrap().deadline(DEADLINE).run(run).unwrap_err().to_string();
    assert!(start.elapsed() < DEADLINE / 2);
    assert!(error.contains("rank 0 called recv") && error.contains("rank 1 called recv"), "{error}");
}

#[test]
fn launch_returns_the_error_of_the_rank_that_failed_first() {
    let error = shardwise::launch(4, |world| {
        if world.rank() == 3 {
            return Err(Error::other("out of luck"));
        }
        world.barrier()
    });
    assert_eq!(error.unwrap_err().to_string(), "rank 3 failed: out of luck");
}

/// Panics that tests cause on purpose need not fill the screen.
fn silence_injected_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&"injected panic") {
            usual(info);
        }
    }));
}
