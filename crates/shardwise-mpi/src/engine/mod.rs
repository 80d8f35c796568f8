//! The MPI engine: one process per rank.
//!
//! | file | contents |
//! |---|---|
//! | `comm` | one MPI communicator; every MPI function is called through `checked!` or `collective!`, which check its code |
//! | `datatypes`, `message_buffer`, `pairwise` | MPI datatypes; buffers, counts, displacements; messages between all pairs |
//! | `reductions`, `collectives` | execution of each call with MPI |
//! | `packet`, `packet_call` | the packet that starts every call; calls that are complete with it |
//! | `agreement` | check that all ranks make the same call: one packet, texts only after a mismatch |
//! | `pending_call`, `groups` | the call that this rank is in, published for the service; communicators of groups |
//! | `exposed_tensors`, `deadlock`, `service` | tensors exposed to other ranks; cycles of waiting ranks; the service thread |
//! | `process`, `messages`, `launch` | MPI in this process; point-to-point messages; one launch |
//! | `remote_read`, `communicator` | one-sided reads of exposed tensors; the `Communicator` |
//!
//! A rank that blocks inside MPI cannot be interrupted, so what the hub does for threads is done by the service thread. It
//! reads from `pending_call` which collective of which group this rank is in, by number, and every rank that leaves reports
//! how many it has started. If a rank left before that number, the call cannot complete, and the job ends with the error that
//! a thread would have returned. Waits for messages and for exposed tensors poll with a deadline and return typed errors.

// In this order: a module may use the modules above it.
mod comm;
mod datatypes;
mod message_buffer;
mod pairwise;
mod reductions;
mod collectives;
mod packet;
mod packet_call;
mod agreement;
mod pending_call;
mod groups;
mod exposed_tensors;
mod deadlock;
mod service;
mod process;
mod messages;
mod launch;
mod remote_read;
mod communicator;

use shardwise::error::ErrorKind;
use std::sync::{Arc, OnceLock};

use shardwise::comm::RankDump;
use shardwise::comm::engine::{catch_panic, failure_text, fnv1a, limit_candle_threads, rank_pool};
use shardwise::{Error, Result, World};

use comm::Comm;
use communicator::MpiCommunicator;
use launch::Launch;
use process::Process;
use service::LaunchExit;

use crate::launcher::Launched;
use crate::settings::Settings;

impl Settings {
    /// Checks that all ranks have the same settings, as far as they decide which MPI functions are called. Collective.
    fn agree(&self, world: &Comm) -> Result<()> {
        let Settings { check, deterministic, segment, largest_count, inside, across, .. } = self;
        let described = format!(
            "check: {check}, deterministic: {deterministic}, segment: {segment}, largest_count: {largest_count}, \
             links: {inside} inside a host and {across} across"
        );
        let mine = fnv1a(described.as_bytes());
        let [largest, least] = world.all_reduce_max(&[mine, !mine])?;
        if largest == !least {
            return Ok(());
        }
        let all = world.all_gather_text(&described)?;
        let other = all.iter().position(|text| *text != all[0]).unwrap_or(0);
        Err(ErrorKind::Disagreement.error(
            "settings",
            format!("{} on rank 0, {} on rank {other}", all[0], all[other]),
            "the same on all ranks",
            "pass SHARDWISE_* variables to all machines (mpirun -x NAME for Open MPI)",
        ))
    }
}

/// Runs the program as the rank of this process. Collective: returns when the program has returned on all ranks.
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
    process.service.enter(launches.count, &launch.messages);
    let threads = settings.kernel_threads.unwrap_or(process.share_of_cores);
    limit_candle_threads(threads);
    let launch = Arc::new(launch);
    let trace = OnceLock::new();
    let run = || {
        launch.enter();
        let world = World::new(Arc::new(MpiCommunicator::of_world(Arc::clone(&launch))));
        trace.get_or_init(|| world.trace().clone());
        program(world)
    };
    let result = rank_pool(rank, threads).and_then(|pool| pool.install(|| catch_panic(rank, run)));
    if let (Err(error), Some(directory)) = (&result, settings.dump_dir.as_ref().filter(|d| RankDump::has_place(d))) {
        let dump = RankDump::new(rank, launched.size, Some(error), trace.get());
        if let Err(problem) = dump.write(directory) {
            eprintln!("the dump of rank {rank} could not be written to {}: {problem}", directory.display());
        }
    }
    let mine = LaunchExit {
        launch: launches.count,
        failed: result.as_ref().err().map(failure_text),
        begun: process.groups.begun(),
        sent: launch.messages.sent(),
    };
    let all = process.service.leave(&mine, matches!(result, Err(Error::PeerFailed { .. })))?;
    launch.close();
    process.service.exposed.clear();
    let unreceived = launch.messages.unreceived(&process.message_comm, |from| all[from].sent[rank])?;
    let failed = all.iter().enumerate().find_map(|(rank, left)| Some((rank, left.failed.clone()?)));
    launches.failed = failed.as_ref().map(|(rank, how)| format!("rank {rank} {how}"));
    match (result, failed, unreceived) {
        // An error that several ranks return with the same text is reported as that of the lowest rank.
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
