//! The default engine: ranks are threads of this process, with nothing to install.
//!
//! A collective is one or two rendezvous of the ranks; transferring a tensor is sharing a reference. A waiting rank spins
//! briefly and then sleeps, so that more ranks than cores run well.

mod collectives;
mod hub;
mod mailbox;
mod meeting;
mod member;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use hub::Hub;
use member::Member;

use super::World;
use super::dump::{self, DUMP_DIR_VARIABLE, RankDump};
use super::host::{available_cores, catch_panic, failure_text, limit_candle_threads, rank_pool};
use crate::error::{Error, ErrorKind, Result};

/// Runs `program` on `ranks` ranks, each a thread of this process, and returns the value of rank 0.
///
/// Corresponds to `torchrun` or `mp.spawn`, without processes. If ranks fail, the error is that of the rank that failed
/// first, with its number; the other ranks get an error from their next collective. Use [`ThreadWorld`] for the values of
/// all ranks and for settings, [`launch_scoped`] for a program that borrows.
///
/// # Errors
/// [`Error::Invalid`] for 0 ranks or more than 4096; else the error of the first failed rank.
///
/// ```
/// let sum = shardwise::launch(4, |world| {
///     let mine = candle_core::Tensor::new(&[world.rank() as i64], &candle_core::Device::Cpu)?;
///     let sum = world.all_reduce(&mine, shardwise::ReduceOp::Sum)?;
///     Ok(sum.to_vec1::<i64>()?[0])
/// })?;
/// assert_eq!(sum, 6);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "torchrun")]
#[doc(alias = "mp.spawn")]
pub fn launch<T, F>(ranks: usize, program: F) -> Result<T>
where
    T: Send + 'static,
    F: Fn(World) -> Result<T> + Send + Sync + 'static,
{
    let mut values = ThreadWorld::new(ranks)?.run(program)?;
    Ok(values.swap_remove(0))
}

/// As [`launch`], for a program that borrows from its caller.
///
/// A rank that never returns cannot be abandoned, since it may use what it borrowed: if one still runs when another has
/// failed and the deadline has passed, the process is aborted with a message that names the rank.
///
/// ```
/// let weights = vec![0.5f32; 4];
/// let sum = shardwise::launch_scoped(2, |world| {
///     let mine = candle_core::Tensor::new(&weights[2 * world.rank()..][..2], &candle_core::Device::Cpu)?;
///     let sum = world.all_reduce(&mine.sum_all()?, shardwise::ReduceOp::Sum)?;
///     Ok(sum.to_scalar::<f32>()?)
/// })?;
/// assert_eq!((sum, weights.len()), (2.0, 4));
/// # Ok::<(), shardwise::Error>(())
/// ```
pub fn launch_scoped<T, F>(ranks: usize, program: F) -> Result<T>
where
    T: Send,
    F: Fn(World) -> Result<T> + Sync,
{
    let mut values = ThreadWorld::new(ranks)?.run_scoped(program)?;
    Ok(values.swap_remove(0))
}

/// Settings of a launch on threads: deadline and kernel threads, and the values of all ranks.
///
/// ```
/// # use shardwise::ThreadWorld;
/// # use std::time::Duration;
/// let ranks = ThreadWorld::new(3)?.deadline(Duration::from_secs(10)).run(|world| Ok(world.rank()))?;
/// assert_eq!(ranks, [0, 1, 2]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ThreadWorld {
    ranks: usize,
    deadline: Duration,
    kernel_threads: usize,
    dump_dir: Option<PathBuf>,
}

/// The default deadline: longer than any healthy step or checkpoint of one rank, short enough to notice a hang.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(300);

/// A bound on thread ranks: more is a typing error.
const MAX_RANKS: usize = 4096;

impl ThreadWorld {
    /// A world of `ranks` threads that share the cores of the machine evenly.
    ///
    /// # Errors
    /// [`Error::Invalid`] for 0 ranks or more than 4096.
    pub fn new(ranks: usize) -> Result<Self> {
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(ErrorKind::Launch.error(
                "world",
                format!("{ranks} ranks"),
                format!("1 to {MAX_RANKS} ranks"),
                "launch at least one rank",
            ));
        }
        let kernel_threads = (available_cores() / ranks).max(1);
        let dump_dir = std::env::var_os(DUMP_DIR_VARIABLE).map(PathBuf::from);
        Ok(ThreadWorld { ranks, deadline: DEFAULT_DEADLINE, kernel_threads, dump_dir })
    }

    /// Sets how long a rank waits in one call for another rank before all ranks get [`Error::Timeout`]; 300 s by default.
    #[doc(alias = "timeout")]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how many threads the kernels of each rank may use: by default the cores divided by the ranks, at least one.
    pub fn kernel_threads(mut self, threads: usize) -> Self {
        self.kernel_threads = threads.max(1);
        self
    }

    /// Sets the directory to which a run that fails writes a [dump](super::RankDump) of every rank: its last collectives, the one that
    /// it was in, messages that were not received. By default that of the environment variable `SHARDWISE_DUMP_DIR`, else none.
    /// `shardwise report DIR` shows dumps. The parent of the directory must exist, or no dump is written.
    #[doc(alias = "TORCH_NCCL_DUMP_ON_TIMEOUT")]
    #[doc(alias = "flight recorder")]
    pub fn dump_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.dump_dir = Some(directory.into());
        self
    }

    /// Runs `program` on every rank and returns all values in rank order; if ranks fail, the error of the first.
    pub fn run<T, F>(&self, program: F) -> Result<Vec<T>>
    where
        T: Send + 'static,
        F: Fn(World) -> Result<T> + Send + Sync + 'static,
    {
        let (results, first_failed) = self.run_to_end(program);
        all_or_first_error(results, first_failed)
    }

    /// As [`run`](Self::run), for a program that borrows from its caller; see [`launch_scoped`].
    pub fn run_scoped<T, F>(&self, program: F) -> Result<Vec<T>>
    where
        T: Send,
        F: Fn(World) -> Result<T> + Sync,
    {
        let hub = self.hub();
        let (report, reports) = channel();
        let mut results: Vec<Option<Result<T>>> = (0..self.ranks).map(|_| None).collect();
        std::thread::scope(|scope| {
            for (rank, result) in results.iter_mut().enumerate() {
                let (hub, program, report) = (&hub, &program, report.clone());
                match rank_pool(rank, self.kernel_threads) {
                    Ok(pool) => {
                        scope.spawn(move || {
                            let result = pool.install(|| run_rank(hub, rank, program));
                            // The receiver is dropped after this scope.
                            let _ = report.send((rank, result));
                        });
                    }
                    Err(error) => *result = Some(Err(not_started(hub, rank, error))),
                }
            }
            collect(&hub, &mut results, &reports);
            self.dump_failure(&hub, results.iter().map(|result| result.as_ref().and_then(|r| r.as_ref().err())));
            if let Some(stuck) = results.iter().flatten().find_map(|r| r.as_ref().err().filter(|e| is_stuck(e))) {
                eprintln!("{stuck}; it may use what it borrowed, so the process ends here");
                std::process::abort();
            }
        });
        let (results, first_failed) = ended(&hub, results);
        all_or_first_error(results, first_failed)
    }

    /// Runs `program` on every rank and returns the result of each rank, in rank order.
    ///
    /// After a failure the other ranks have the time of the deadline to return. The thread of a rank that still runs is
    /// abandoned, and the result of that rank is [`Error::Stuck`].
    pub fn run_each<T, F>(&self, program: F) -> Vec<Result<T>>
    where
        T: Send + 'static,
        F: Fn(World) -> Result<T> + Send + Sync + 'static,
    {
        self.run_to_end(program).0
    }

    /// Each rank's result, and the rank whose own failure came first, if any.
    fn run_to_end<T, F>(&self, program: F) -> (Vec<Result<T>>, Option<usize>)
    where
        T: Send + 'static,
        F: Fn(World) -> Result<T> + Send + Sync + 'static,
    {
        let hub = self.hub();
        let program = Arc::new(program);
        let (report, reports) = channel();
        let mut results: Vec<Option<Result<T>>> = (0..self.ranks).map(|_| None).collect();
        for (rank, result) in results.iter_mut().enumerate() {
            let (hub_of_rank, program, report) = (Arc::clone(&hub), Arc::clone(&program), report.clone());
            match rank_pool(rank, self.kernel_threads) {
                Ok(pool) => pool.spawn(move || {
                    let result = run_rank(&hub_of_rank, rank, &*program);
                    // The receiver is gone if this rank was abandoned.
                    let _ = report.send((rank, result));
                }),
                Err(error) => *result = Some(Err(not_started(&hub, rank, error))),
            }
        }
        drop(report);
        collect(&hub, &mut results, &reports);
        self.dump_failure(&hub, results.iter().map(|result| result.as_ref().and_then(|r| r.as_ref().err())));
        ended(&hub, results)
    }

    /// Writes the dumps of all ranks if one has failed.
    fn dump_failure<'a>(&self, hub: &Hub, errors: impl Iterator<Item = Option<&'a Error>> + Clone) {
        let Some(directory) = self.dump_dir.as_ref().filter(|_| errors.clone().any(|error| error.is_some())) else {
            return;
        };
        let dumps: Vec<RankDump> = errors.enumerate().map(|(rank, error)| hub.dump(rank, error)).collect();
        dump::write_all(directory, &dumps);
    }

    fn hub(&self) -> Arc<Hub> {
        if self.ranks > 1 {
            limit_candle_threads(self.kernel_threads);
        }
        Arc::new(Hub::new(self.ranks, self.deadline, self.ranks <= available_cores()))
    }
}

/// Records that a rank could not be started, which fails the other ranks' collectives.
fn not_started(hub: &Hub, rank: usize, error: Error) -> Error {
    hub.fail(rank, format!("could not be started: {error}"));
    hub.leave(rank);
    error
}

fn is_stuck(error: &Error) -> bool {
    matches!(error, Error::Stuck { .. })
}

/// Each rank's result, and the rank whose own failure came first, if any. A message that was never received is an error of
/// its sender.
fn ended<T>(hub: &Hub, results: Vec<Option<Result<T>>>) -> (Vec<Result<T>>, Option<usize>) {
    let unreceived = hub.mailbox.unreceived();
    let mut results: Vec<Result<T>> = results.into_iter().map(|r| r.expect("collected")).collect();
    if let Some((from, error)) = unreceived
        && results.iter().all(Result::is_ok)
    {
        results[from] = Err(error);
    }
    (results, hub.first_failed())
}

/// The values of all ranks, or the error of the rank that failed first.
fn all_or_first_error<T>(results: Vec<Result<T>>, first_failed: Option<usize>) -> Result<Vec<T>> {
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect();
    }
    let errors = results.into_iter().enumerate().filter_map(|(rank, result)| Some((rank, result.err()?)));
    let (rank, error) = errors
        .min_by_key(|(rank, error)| (first_failed != Some(*rank), error.is_consequence()))
        .expect("one has failed");
    Err(error.of_rank(rank))
}

/// Runs the program of one rank, catches panics, and records how it ended for the other ranks.
fn run_rank<T>(hub: &Arc<Hub>, rank: usize, program: &(impl Fn(World) -> Result<T> + ?Sized)) -> Result<T> {
    let world = World::new(Arc::new(Member::of_world(Arc::clone(hub), rank)));
    hub.keep_trace(rank, world.trace());
    let result = catch_panic(rank, || program(world));
    if let Err(error) = &result {
        hub.fail(rank, failure_text(error));
    }
    hub.leave(rank);
    result
}

/// Waits for the ranks' results; after a failure no longer than the deadline.
fn collect<T>(hub: &Hub, results: &mut [Option<Result<T>>], reports: &std::sync::mpsc::Receiver<(usize, Result<T>)>) {
    while results.iter().any(Option::is_none) {
        // Results arrive through the channel at once; this only bounds how late an expired deadline is noticed.
        let patience = Duration::from_millis(50);
        match reports.recv_timeout(patience) {
            Ok((rank, result)) => results[rank] = Some(result),
            Err(RecvTimeoutError::Disconnected) => unreachable!("every rank reports before it drops its sender"),
            Err(RecvTimeoutError::Timeout) => {
                if hub.failed_since().is_some_and(|elapsed| elapsed > hub.deadline.saturating_add(patience)) {
                    for rank in (0..results.len()).filter(|&r| results[r].is_none()).collect::<Vec<_>>() {
                        results[rank] = Some(Err(Error::Stuck { rank, waited: hub.deadline }));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
