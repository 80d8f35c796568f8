//! The threads on which the program of one rank runs, whichever engine the rank belongs to.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::error::{Error, ErrorKind, Result};

/// Room for deep programs; only the part in use takes memory.
const STACK_BYTES: usize = 16 << 20;

/// More threads than any machine has cores; a larger number is a typing error, and starting so many would not end.
const MAX_KERNEL_THREADS: usize = 4096;

/// A pool for the program of a rank, so that its parallel kernels stay within its share of the cores.
pub fn pool(rank: usize, kernel_threads: usize) -> Result<rayon::ThreadPool> {
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

/// What the program of a rank returns; a panic becomes an error.
pub fn caught<T>(rank: usize, program: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(program)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<&str>().map(|s| (*s).to_string());
        let message = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Err(Error::Panicked { rank, message: message.unwrap_or_else(|| "no message".into()) })
    })
}

/// How an error of a rank's program reads behind the name of the rank.
pub fn how_it_failed(error: &Error) -> String {
    match error {
        Error::Panicked { message, .. } => format!("panicked: {message}"),
        error => format!("failed: {error}"),
    }
}

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Candle runs large elementwise operations on one pool for the whole process, behind a lock. Where several ranks share
/// a machine, that pool has to be no larger than a rank's share; candle reads its size from the environment when it first
/// needs it.
pub fn confine_candle_to(threads: usize) {
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

/// A number of the calling thread that no other thread has while it lives.
pub fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| &raw const *mark as usize)
}

/// Why a collective that was not made by the thread that runs the program of a rank is refused.
pub fn second_thread(rank: usize) -> Error {
    ErrorKind::Launch.error(
        "thread",
        format!("a collective of rank {rank} made by another thread than the one that runs its program"),
        "the thread that launch started",
        "pass data between threads and make all collectives on the thread of the program",
    )
}

/// Why a call that was made after the end of its launch is refused.
pub fn launch_is_over() -> Error {
    ErrorKind::Launch.error(
        "call",
        "one after the launch had ended",
        "a world whose ranks are still there",
        "communicate inside the program that is launched",
    )
}
