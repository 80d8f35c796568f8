//! Threads of a rank's program, for any engine: the thread pool, panics, and errors about threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::error::{Error, ErrorKind, Result};

/// Stack of a rank's threads: deep models recurse deeply, and only touched pages take memory.
const STACK_BYTES: usize = 16 << 20;

/// A bound above the cores of any machine: a larger number is a typing error, and starting so many threads would take
/// forever.
const MAX_KERNEL_THREADS: usize = 4096;

/// Creates the thread pool on which a rank's program and its parallel kernels run, so that they stay within the rank's
/// share of the cores.
pub fn rank_pool(rank: usize, kernel_threads: usize) -> Result<rayon::ThreadPool> {
    if kernel_threads > MAX_KERNEL_THREADS {
        return Err(ErrorKind::Launch.error(
            "kernel threads",
            kernel_threads,
            format!("at most {MAX_KERNEL_THREADS}"),
            "use as many as the rank has cores",
        ));
    }
    rayon::ThreadPoolBuilder::new()
        .num_threads(kernel_threads)
        .stack_size(STACK_BYTES)
        .thread_name(move |i| if i == 0 { format!("rank {rank}") } else { format!("rank {rank} kernel {i}") })
        .build()
        .map_err(Error::other)
}

/// Runs a rank's program; a panic becomes [`Error::Panicked`].
pub fn catch_panic<T>(rank: usize, program: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(program)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<&str>().map(|s| (*s).to_string());
        let message = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Err(Error::Panicked { rank, message: message.unwrap_or_else(|| "no message".into()) })
    })
}

/// The failure of a rank as other ranks read it, after `rank N `.
pub fn failure_text(error: &Error) -> String {
    match error {
        Error::Panicked { message, .. } => format!("panicked: {message}"),
        error => format!("failed: {error}"),
    }
}

/// Number of cores that this process may use.
pub fn available_cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Limits candle's own thread pool, by setting `CANDLE_NUM_THREADS` once per process unless it is already set.
///
/// Candle runs large elementwise operations on one pool for the whole process, behind a lock. Where ranks share a machine,
/// that pool must be no larger than a rank's share. Candle reads the variable when it first needs the pool.
pub fn limit_candle_threads(threads: usize) {
    static ONCE: Once = Once::new();
    const VARIABLE: &str = "CANDLE_NUM_THREADS";
    ONCE.call_once(|| {
        if std::env::var_os(VARIABLE).is_none() {
            // SAFETY: Rust's own accesses to the environment are synchronised with this one. It happens once per
            // process, before the ranks of the first launch start; a program that reads the environment from C at the
            // same time must set the variable itself, as the documentation of the crate says.
            unsafe { std::env::set_var(VARIABLE, threads.to_string()) };
        }
    });
}

/// A number of the calling thread that is unique among the threads alive.
pub fn thread_number() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| &raw const *mark as usize)
}

/// The error of a collective that was not made by the thread that runs the rank's program.
pub fn wrong_thread_error(rank: usize) -> Error {
    ErrorKind::Launch.error(
        "thread",
        format!("a collective of rank {rank} made by another thread than the one that runs its program"),
        "the thread that launch started",
        "pass data between threads and make all collectives on the thread of the program",
    )
}

/// The error of a call after its launch has ended.
pub fn launch_ended_error() -> Error {
    ErrorKind::Launch.error(
        "call",
        "one after the launch had ended",
        "a world whose ranks still run",
        "communicate inside the launched program",
    )
}
