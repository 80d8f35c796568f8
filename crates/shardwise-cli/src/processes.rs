//! The processes that run the command together: this one alone, or one per rank that `mpirun` or `srun` started.
//!
//! The first of them speaks: it prints on the standard output, shows progress and writes files.

use shardwise::error::ErrorKind;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use shardwise::mesh::Network;
use shardwise::{Error, Result};
use shardwise_mpi::Settings;
pub(crate) use shardwise_mpi::{Launched, launched};

/// Whether this is the process that speaks.
pub(crate) fn is_first() -> bool {
    other_rank().is_none()
}

/// The rank of this process, if another one speaks.
fn other_rank() -> Option<usize> {
    launched().map(|job| job.rank).filter(|&rank| rank > 0)
}

/// The world sizes to measure: the number of processes, on threads those asked for or else the usual ones.
pub(crate) fn world_sizes(asked: Option<&[usize]>, usual: &[usize]) -> Result<Vec<usize>> {
    match (launched(), asked) {
        (None, asked) => Ok(asked.unwrap_or(usual).to_vec()),
        (Some(Launched { by, size, .. }), Some(asked)) if asked != [size] => Err(ErrorKind::Launch.error(
            "ranks",
            format!("{asked:?} in a job of {size} process(es)"),
            "one process per rank",
            format!("leave the option out, or start it without {by} to measure ranks that are threads"),
        )),
        (Some(Launched { size, .. }), _) => Ok(vec![size]),
    }
}

/// What this process has found, if all of them have found something; else the error of the first that has one, which is
/// then that of all. For what every process finds out by itself before ranks begin; the environment is looked at too.
pub(crate) fn agreed<T>(mine: Result<T>) -> Result<T> {
    if let Some(Launched { size, .. }) = launched().filter(|job| job.size > 1) {
        let found = mine.as_ref().map(drop).map_err(Error::clone).and_then(|()| Settings::from_env().map(drop));
        Settings::default().launch(size, move |world| world.all_ok(found.clone()))?;
    }
    mine
}

/// The network between the ranks that the command will run: between the processes of the job, or between threads.
///
/// Comes before anything that can fail on one process only, since all of them have to take part.
pub(crate) fn network() -> Result<Network> {
    let Some(Launched { size, .. }) = launched().filter(|job| job.size > 1) else { return Ok(Network::THREADS) };
    // What is wrong with the environment is an error of `agreed`, which names it once for all processes.
    Settings::from_env().unwrap_or_default().launch(size, |world| Ok(world.network().clone()))
}

/// Whether an error says that nobody reads the output any more.
pub(crate) fn is_closed_pipe(error: &Error) -> bool {
    match error {
        Error::Io(error) => error.kind() == std::io::ErrorKind::BrokenPipe,
        Error::Rank { source, .. } => is_closed_pipe(source),
        _ => false,
    }
}

/// Prints what went wrong: once if it is an error of all processes.
pub(crate) fn report(error: &Error) {
    let text = match (other_rank(), error) {
        (None, Error::OnRank { rank: 0, message, .. }) => format!("error: {message}\n"),
        (None, error) => format!("error: {error}\n"),
        // The first process has it too.
        (Some(_), Error::OnRank { .. } | Error::Rejected { .. } | Error::Mismatch { .. }) => return,
        // Without MPI there is but one, and all processes have it.
        (Some(_), _) if cfg!(not(feature = "mpi")) => return let_the_first_speak(),
        (Some(rank), error) => {
            let_the_first_speak();
            format!("rank {rank}: error: {error}\n")
        }
    };
    // One write, so that lines of several processes do not mix. There is no other place to tell of a failure.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Answers a command line that asks for help or that cannot be understood. All processes have the same one.
pub(crate) fn answer(error: &clap::Error) -> ExitCode {
    if is_first() {
        let _ = error.print();
    } else if error.exit_code() != 0 {
        let_the_first_speak();
    }
    ExitCode::from(error.exit_code().clamp(0, 255) as u8)
}

/// A launcher ends all processes as soon as one of them fails. What they fail of together the first one says, so the
/// others do not end before it.
fn let_the_first_speak() {
    std::thread::sleep(Duration::from_secs(1));
}
