//! Failures that end the job: it must end soon, with an error that names the failed rank.

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use shardwise::error::ErrorKind;
use shardwise::{ReduceOp, Result, World};
use shardwise_mpi::{Settings, launched};

use crate::job::{Ended, Job};

fn run(program: impl Fn(World) -> Result<()> + Send + Sync + 'static) {
    let processes = launched().expect("started by a launcher").size;
    let result = Settings::from_env().expect("good settings").launch(processes, program);
    panic!("the job should have ended before: {result:?}");
}

fn sum(world: &World) -> Result<()> {
    world.all_reduce(&Tensor::new(1f32, &Device::Cpu)?, ReduceOp::Sum).map(drop)
}

/// One rank returns an error while the other ranks wait for it.
pub(crate) fn one_rank_fails() {
    run(|world| {
        sum(&world)?;
        match world.rank() {
            1 => Err(ErrorKind::Argument.error("batch", "no tokens", "some", "look at the data")),
            _ => sum(&world),
        }
    });
}

pub(crate) fn one_rank_panics() {
    run(|world| {
        sum(&world)?;
        assert_ne!(world.rank(), 1, "a deliberate panic");
        sum(&world)
    });
}

/// One rank computes for longer than the deadline.
pub(crate) fn one_rank_is_silent() {
    run(|world| {
        sum(&world)?;
        let since = Instant::now();
        while world.rank() == 1 && since.elapsed() < Duration::from_secs(60) {
            std::hint::spin_loop();
        }
        sum(&world)
    });
}

/// A deadlock: ranks that wait in a cycle, each in a collective of another group.
pub(crate) fn ranks_in_other_groups() {
    run(|world| {
        sum(&world)?;
        let (me, size) = (world.rank(), world.size());
        let mut pair = [me, (me + 1) % size];
        pair.sort_unstable();
        // Every rank waits for its successor, which is in the group with its own successor.
        world.subgroup(&pair)?.barrier()
    });
}

/// One rank returns while the other ranks still need it.
pub(crate) fn one_rank_leaves() {
    run(|world| {
        sum(&world)?;
        if world.rank() == 1 { Ok(()) } else { sum(&world) }
    });
}

/// One rank ends its process inside the program.
pub(crate) fn one_rank_exits() {
    run(|world| {
        sum(&world)?;
        if world.rank() == 1 {
            std::process::exit(0);
        }
        sum(&world)
    });
}

pub(crate) fn one_rank_aborts() {
    run(|world| {
        if world.rank() == 1 {
            world.abort("the disk is full");
        }
        sum(&world)
    });
}

/// One rank is killed.
pub(crate) fn one_rank_is_killed() {
    run(|world| {
        for step in 0.. {
            sum(&world)?;
            if step == 100 && world.rank() == world.size() - 1 {
                println!("killing myself");
                // SAFETY: sends a signal to this process.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
        }
        Ok(())
    });
}

/// Checks that the job failed within 30 s and printed all of `parts`.
fn expect(ended: Ended, parts: &[&str]) {
    let Ended { success, output, took } = ended;
    assert!(!success, "the job did not fail:\n{output}");
    assert!(took < Duration::from_secs(30), "took {took:?}:\n{output}");
    for part in parts {
        assert!(output.contains(part), "{part:?} is missing in:\n{output}");
    }
}

pub(crate) fn a_rank_that_fails_prints_its_error_and_ends_the_job() {
    for size in [2, 4] {
        let ended = Job::new("one_rank_fails", size).run();
        // If all other ranks learn of the failure before they wait for rank 1, all return its error and nobody ends the job.
        let who = ended.output.lines().find(|line| line.ends_with("ends the job"));
        assert_eq!(
            who.unwrap_or("shardwise: rank 1 ends the job"),
            "shardwise: rank 1 ends the job",
            "{}",
            ended.output
        );
        expect(ended, &["rank 1 failed: invalid batch: found no tokens"]);
        expect(Job::new("one_rank_panics", size).run(), &["rank 1 panicked", "a deliberate panic"]);
    }
}

pub(crate) fn a_silent_rank_is_named_after_the_deadline() {
    for check in ["0", "1"] {
        let job = Job::new("one_rank_is_silent", 3).set("SHARDWISE_DEADLINE", "2").set("SHARDWISE_CHECK", check);
        expect(
            job.run(),
            &["called all_reduce(sum) of f32 []", "for rank(s) [1]", "failing.rs:", "rank 1 is in no call"],
        );
    }
}

pub(crate) fn ranks_that_wait_for_each_other_are_named_soon() {
    // With the default deadline of five minutes.
    expect(
        Job::new("ranks_in_other_groups", 3).run(),
        &["rank 0 called barrier in group [0, 1]", "each waits for the next and the last for the first"],
    );
}

pub(crate) fn a_rank_that_left_is_named() {
    for case in ["one_rank_leaves", "one_rank_exits"] {
        expect(Job::new(case, 3).run(), &["waits for rank 1, which has already returned", "all_reduce(sum)"]);
    }
}

pub(crate) fn an_abort_carries_its_reason() {
    expect(Job::new("one_rank_aborts", 3).run(), &["rank 1 aborted: the disk is full"]);
}

pub(crate) fn a_killed_rank_ends_the_job() {
    let ended = Job::new("one_rank_is_killed", 4).run();
    // Open MPI names the rank, MPICH the process and the signal.
    let parts: &[&str] = if crate::job::is_open_mpi() { &["rank 3", "signal 9"] } else { &["EXIT CODE: 9"] };
    expect(ended, parts);
}
