//! Lockfiles of communication: a change of what a step communicates fails with the lines that changed.

use shardwise::comm::{self, CommLock};
use shardwise::error::ErrorKind;
use shardwise::prelude::*;

/// A row-parallel product and its gradient; `extra` plants another all-gather.
fn step(world: &World, extra: bool) -> Result<()> {
    let mesh = world.mesh([("tp", 2)])?;
    let x = DTensor::ones((4, 8), DType::F32, &mesh, [Shard(1)])?;
    let w = DTensor::ones((8, 4), DType::F32, &mesh, [Shard(0)])?.requires_grad();
    let y = x.matmul(&w)?.redistribute([Shard(0)])?;
    if extra {
        x.redistribute([Replicate])?;
    }
    y.square()?.sum_all()?.backward()?;
    Ok(())
}

#[test]
fn the_communication_of_a_step_is_that_of_its_lockfile() {
    launch(2, |world| comm::lock!("tests/data/locks/row_parallel.lock", || step(&world, false))).unwrap();
}

#[test]
fn an_extra_all_gather_fails_with_the_changed_lines() {
    if std::env::var_os(comm::UPDATE_LOCK).is_some() {
        return println!("not run: files are being written");
    }
    let error =
        launch(2, |world| comm::lock!("tests/data/locks/row_parallel.lock", || step(&world, true))).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("+ forward - redistribute tp all_gather 64B x1"), "{text}");
    assert!(!text.contains("\n  - "), "nothing is missing: {text}");
    assert!(text.contains("SHARDWISE_UPDATE_LOCK=1"), "{text}");
    assert!(matches!(error.kind(), Some(ErrorKind::Path { .. })), "{error}");
}

#[test]
fn a_missing_file_is_an_error_and_is_not_written() {
    if std::env::var_os(comm::UPDATE_LOCK).is_some() {
        return println!("not run: files are being written");
    }
    let path = std::env::temp_dir().join(format!("shardwise-{}-missing.lock", std::process::id()));
    let error = launch(2, {
        let path = path.clone();
        move |world| comm::check_communication(&path, || step(&world, false))
    });
    assert!(error.unwrap_err().to_string().contains("run once with SHARDWISE_UPDATE_LOCK=1"));
    assert!(!path.exists());
}

/// A dry run is compared as the real one is, by whichever rank it is.
#[test]
fn a_dry_run_has_the_same_lock() {
    if std::env::var_os(comm::UPDATE_LOCK).is_some() {
        return println!("not run: files are being written");
    }
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/locks/row_parallel.lock")).unwrap();
    let dry = shardwise::DryWorld::new(2).unwrap().as_rank(1).unwrap();
    let run = dry.run(|world| Ok(comm::record_communication(|| step(&world, false)).1)).unwrap();
    let lock: CommLock = run.value.iter().map(comm::LockedCall::from).collect();
    assert_eq!(lock.changes_since(&text.parse().unwrap()), Vec::<String>::new());
    dry.run(|world| comm::lock!("tests/data/locks/row_parallel.lock", || step(&world, false))).unwrap();
    let error = dry.run(|world| comm::lock!("tests/data/locks/row_parallel.lock", || step(&world, true))).unwrap_err();
    assert!(error.to_string().contains("+ forward"), "{error}");
}
