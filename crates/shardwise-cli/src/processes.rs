//! The processes of the job: only this one, or one per rank under `mpirun` or `srun`.
//!
//! Only the first process prints to standard output, shows progress and writes files that all ranks share.

use shardwise::error::ErrorKind;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use shardwise::comm::engine::available_cores;
use shardwise::mesh::Network;
use shardwise::{Error, Mesh, Result, ThreadWorld};
use shardwise_mpi::Settings;
pub(crate) use shardwise_mpi::{Launched, launched};

use crate::lines;

/// Whether this is the first process of the job, which does the printing.
pub(crate) fn is_first() -> bool {
    nonzero_rank().is_none()
}

/// The rank of this process if it is not the first one.
fn nonzero_rank() -> Option<usize> {
    launched().map(|job| job.rank).filter(|&rank| rank > 0)
}

/// The world sizes to measure: the number of processes of the job; on threads `asked`, by default `usual`.
pub(crate) fn world_sizes(asked: Option<&[usize]>, usual: &[usize]) -> Result<Vec<usize>> {
    match (launched(), asked) {
        (None, asked) => Ok(asked.unwrap_or(usual).to_vec()),
        (Some(Launched { by, size, .. }), Some(asked)) if asked != [size] => Err(ErrorKind::Launch.error(
            "ranks",
            format!("{asked:?} in a job of {size} process(es)"),
            "one process per rank",
            format!("leave the option out, or run without {by} to measure thread ranks"),
        )),
        (Some(Launched { size, .. }), _) => Ok(vec![size]),
    }
}

/// The mesh that was asked for; otherwise `on_threads`, or the processes of the job along `axis`.
pub(crate) fn mesh(asked: Option<&str>, on_threads: &str, axis: &str) -> Result<Mesh> {
    let Some(Launched { by, size, .. }) = launched() else {
        let mesh: Mesh = asked.unwrap_or(on_threads).parse()?;
        ThreadWorld::new(mesh.size())?;
        return Ok(mesh);
    };
    let mesh: Mesh = asked.map_or_else(|| format!("{axis}={size}"), str::to_string).parse()?;
    if mesh.size() == size {
        return Ok(mesh);
    }
    let ranks = mesh.size();
    let found = format!("{mesh} for {ranks} rank(s) in a job of {size} process(es)");
    let fix = format!("run with {by} -n {ranks}, or use a mesh of {size} rank(s) such as --mesh {axis}={size}");
    Err(ErrorKind::Launch.error("mesh", found, "one process per rank", fix))
}

/// Thread ranks that every machine may start: enough to try any mesh of a host or two.
const USUAL_THREAD_RANKS: usize = 64;

/// Thread ranks per core beyond which a run is slower than a user would wait for.
const THREAD_RANKS_PER_CORE: usize = 4;

/// Refuses a mesh of more thread ranks than this machine can run in a reasonable time. Processes of a job are not counted.
pub(crate) fn check_thread_ranks(mesh: &Mesh) -> Result<()> {
    let cores = available_cores();
    let most = USUAL_THREAD_RANKS.max(THREAD_RANKS_PER_CORE * cores);
    if launched().is_some() || mesh.size() <= most {
        return Ok(());
    }
    let found = format!("{mesh}, which is {} ranks as threads of {cores} core(s)", mesh.size());
    let fix =
        "use a smaller mesh, start processes on more machines with mpirun, or plan the step with `shardwise plan`";
    Err(ErrorKind::Launch.error("mesh", found, format!("at most {most} thread ranks on this machine"), fix))
}

/// Returns `mine` if it is `Ok` on all processes; otherwise the error of the first process that has one, on all of them.
///
/// Collective. For checks that every process makes before the ranks start; the settings of the environment are checked too.
pub(crate) fn all_ok<T>(mine: Result<T>) -> Result<T> {
    if let Some(Launched { size, .. }) = launched().filter(|job| job.size > 1) {
        let found = mine.as_ref().map(drop).map_err(Error::clone).and_then(|()| Settings::from_env().map(drop));
        Settings::default().launch(size, move |world| world.all_ok(found.clone()))?;
    }
    mine
}

/// The text that `read` returns in the first process, in all of them: standard input is that of the first one. Collective.
pub(crate) fn read_in_first(read: fn() -> Result<String>) -> Result<String> {
    let Some(Launched { size, .. }) = launched().filter(|job| job.size > 1) else { return read() };
    Settings::from_env().unwrap_or_default().launch(size, move |world| {
        let text = world.on_first_rank(read)?;
        Ok(lines::broadcast(&world, text.as_deref())?.unwrap_or_default())
    })
}

/// The network between the ranks: between the processes of the job, or between threads.
///
/// Collective, so it comes before any check that can fail on one process only.
pub(crate) fn network() -> Result<Network> {
    let Some(Launched { size, .. }) = launched().filter(|job| job.size > 1) else { return Ok(Network::THREADS) };
    // Errors of the environment are reported by `all_ok`, once for all processes.
    Settings::from_env().unwrap_or_default().launch(size, |world| Ok(world.network().clone()))
}

/// Whether an error means that the reader of the output has closed it.
pub(crate) fn is_closed_pipe(error: &Error) -> bool {
    match error {
        Error::Io(error) => error.kind() == std::io::ErrorKind::BrokenPipe,
        Error::Rank { source, .. } => is_closed_pipe(source),
        _ => false,
    }
}

/// Prints an error to standard error: once per job if all processes have it.
pub(crate) fn report(error: &Error) {
    let text = match (nonzero_rank(), error) {
        (None, Error::OnRank { rank: 0, message, .. }) => format!("error: {message}\n"),
        (None, error) => format!("error: {error}\n"),
        // The first process prints it too.
        (Some(_), Error::OnRank { .. } | Error::Rejected { .. } | Error::Mismatch { .. }) => return,
        // Without MPI the only error is that there is no MPI, and the first process prints it.
        (Some(_), _) if cfg!(not(feature = "mpi")) => return wait_for_first_process(),
        (Some(rank), error) => {
            wait_for_first_process();
            format!("rank {rank}: error: {error}\n")
        }
    };
    // One write, so that lines of several processes do not mix. A failure to write cannot be reported anywhere.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Prints help, or the error of a command line that does not parse, once per job.
pub(crate) fn print_clap_error(error: &clap::Error) -> ExitCode {
    if is_first() {
        let _ = error.print();
    } else if error.exit_code() != 0 {
        wait_for_first_process();
    }
    ExitCode::from(error.exit_code().clamp(0, 255) as u8)
}

/// Waits so that the first process can print an error that all processes have: a launcher kills the job as soon as one
/// process fails. A second is far longer than printing takes, and nobody waits for it after success.
fn wait_for_first_process() {
    std::thread::sleep(Duration::from_secs(1));
}
