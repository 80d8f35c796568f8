//! The engine: processes that talk through MPI.

// In this order: each may use those above it.
mod comm;
mod element;
mod parts;
mod pairs;
mod reductions;
mod collectives;
mod packet;
mod small;
mod agreement;
mod watch;
mod groups;
mod shelf;
mod circle;
mod service;
mod process;
mod mail;
mod launch;
mod exposed;
mod member;

use shardwise::error::ErrorKind;
use std::sync::Arc;

use shardwise::comm::engine::{catch_panic, failure_text, fnv1a, limit_candle_threads, rank_pool};
use shardwise::{Error, Result, World};

use comm::Comm;
use launch::Launch;
use member::Member;
use process::Process;
use service::Left;

use crate::launcher::Launched;
use crate::settings::Settings;

impl Settings {
    /// An error on every rank unless all have the same of those settings that decide what they call.
    fn agree(&self, world: &Comm) -> Result<()> {
        let Settings { check, deterministic, segment, largest_count, inside, across, .. } = self;
        let said = format!(
            "check: {check}, deterministic: {deterministic}, segment: {segment}, largest_count: {largest_count}, \
             links: {inside} inside a host and {across} across"
        );
        let mine = fnv1a(said.as_bytes());
        let [largest, least] = world.greatest(&[mine, !mine])?;
        if largest == !least {
            return Ok(());
        }
        let all = world.texts(&said)?;
        let other = all.iter().position(|text| *text != all[0]).unwrap_or(0);
        Err(ErrorKind::Disagreement.error(
            "settings",
            format!("{} on rank 0, {} on rank {other}", all[0], all[other]),
            "the same on all ranks",
            "pass SHARDWISE_* variables to all machines (mpirun -x NAME for Open MPI)",
        ))
    }
}

/// Runs the program as the rank of this process.
pub(crate) fn run<T: Send>(
    settings: &Settings,
    launched: &Launched,
    program: impl FnOnce(World) -> Result<T> + Send,
) -> Result<T> {
    let process = Process::get(launched)?;
    let Some(mut launches) = process.launches.try_lock() else {
        return Err(ErrorKind::Launch.error(
            "launch",
            "one inside another",
            "one at a time in a process",
            "use the world that the program has, or shardwise::launch for ranks that are threads",
        ));
    };
    if let Some(reason) = &launches.failed {
        return Err(ErrorKind::Launch.error(
            "launch",
            format!("one after a launch in which {reason}"),
            "ranks that are in step with each other",
            "end the process after a launch has failed",
        ));
    }
    settings.agree(&process.world)?;
    let launch = Launch::new(process, settings)?;
    launches.count += 1;
    let rank = process.world.rank();
    process.service.enter(launches.count);
    let threads = settings.kernel_threads.unwrap_or(process.share_of_cores);
    limit_candle_threads(threads);
    let launch = Arc::new(launch);
    let run = || {
        launch.enter();
        program(World::new(Arc::new(Member::of_world(Arc::clone(&launch)))))
    };
    let result = rank_pool(rank, threads).and_then(|pool| pool.install(|| catch_panic(rank, run)));
    let mine = Left {
        launch: launches.count,
        failed: result.as_ref().err().map(failure_text),
        begun: process.groups.begun(),
        sent: launch.mail.sent(),
    };
    let all = process.service.leave(&mine)?;
    launch.close();
    process.service.shelf.clear();
    let unreceived = launch.mail.unreceived(&process.mail, |from| all[from].sent[rank])?;
    let failed = all.iter().enumerate().find_map(|(rank, left)| Some((rank, left.failed.clone()?)));
    launches.failed = failed.as_ref().map(|(rank, how)| format!("rank {rank} {how}"));
    match (result, failed, unreceived) {
        // A mistake that all ranks make is one error, that of the first of them.
        (
            Err(error @ (Error::Invalid(_) | Error::Candle(_) | Error::Io(_) | Error::Other(_))),
            Some((first, how)),
            _,
        ) if first < rank && how == failure_text(&error) => {
            Err(Error::OnRank { rank: first, kind: error.kind().cloned().map(Box::new), message: how.into() })
        }
        (Err(error), _, _) => Err(error.of_rank(rank)),
        (Ok(_), Some((rank, how)), _) => Err(Error::OnRank { rank, kind: None, message: how.into() }),
        (Ok(_), None, Some(error)) => Err(error),
        (Ok(value), None, None) => Ok(value),
    }
}
