//! Shardwise on MPI: the same program on many machines, one process per rank.
//!
//! [`launch`] has the signature of [`shardwise::launch`]. In a process that `mpirun` or `srun` started, it runs the program
//! as the rank of this process; otherwise it runs all ranks on threads. Nothing else in a program changes.
//!
//! ```
//! use shardwise_mpi::launch;
//!
//! let sum = launch(4, |world| {
//!     let mine = candle_core::Tensor::new(&[world.rank() as i64], &candle_core::Device::Cpu)?;
//!     let sum = world.all_reduce(&mine, shardwise::ReduceOp::Sum)?;
//!     Ok(sum.to_vec1::<i64>()?[0])
//! })?;
//! assert_eq!(sum, 6); // on 4 threads, and under `mpirun -n 4` in every process
//! # Ok::<(), shardwise::Error>(())
//! ```
//!
//! The MPI engine needs the feature `mpi`, and an MPI library (Open MPI or MPICH) and libclang on the machine that builds.
//! `docs/mpi.md` in the repository describes how to build, and how to run on two machines, under Slurm and in a container.
//!
//! # Waiting
//!
//! MPI does not say which part of a collective was spent waiting for other ranks. So `waiting` of a
//! [`CommRecord`](shardwise::comm::CommRecord) counts receives and reads of remote shards here, and is zero for collectives, whose whole
//! time is in `duration`. On threads it counts all waits.
//!
//! # Failures
//!
//! MPI cannot cancel a collective that waits for other ranks. So a rank that fails gives the other ranks 3 seconds to return, then
//! prints its error and ends the job; a rank that waits longer than the deadline, or for a rank that has already returned,
//! ends the job too. An error that all ranks get and return ends the launch on every rank without ending the processes. The
//! errors of the comparison of calls ([`Settings::check`]) are of this kind.

mod launcher;
mod settings;

#[cfg(feature = "mpi")]
mod engine;

pub use launcher::{Launched, launched};
pub use settings::Settings;

use shardwise::error::ErrorKind;
use shardwise::{Result, World};

/// Runs `program` on `ranks` ranks: as the rank of this process if `mpirun` or `srun` started it, else on that many threads.
///
/// Collective under MPI: every process of the job must call it, with the number of processes as `ranks`. Returns the value of
/// this process's rank; on threads that of rank 0. Settings come from the environment ([`Settings::from_env`]).
///
/// # Errors
/// [`ErrorKind::Launch`] if the number of processes is not `ranks`, if the program was built without the feature `mpi`, or if a
/// variable is invalid; otherwise the error of this rank's program, or that of another rank if this one succeeded.
pub fn launch<T, F>(ranks: usize, program: F) -> Result<T>
where
    T: Send + 'static,
    F: Fn(World) -> Result<T> + Send + Sync + 'static,
{
    Settings::from_env()?.launch(ranks, program)
}

impl Settings {
    /// Runs `program` on `ranks` ranks with these settings; see [`launch`](crate::launch).
    pub fn launch<T, F>(&self, ranks: usize, program: F) -> Result<T>
    where
        T: Send + 'static,
        F: Fn(World) -> Result<T> + Send + Sync + 'static,
    {
        match launched() {
            Some(launched) if launched.size != ranks => Err(ErrorKind::Launch.error(
                "number of ranks",
                format!("{ranks} ranks in a job of {} processes", launched.size),
                "one process per rank",
                format!("start it with {} -n {ranks}, or ask for {} ranks", launched.by, launched.size),
            )),
            // A single process needs no communication, so a program without MPI runs it on one thread.
            Some(launched) if launched.size > 1 || cfg!(feature = "mpi") => self.launch_process(&launched, program),
            _ => {
                let mut world = shardwise::ThreadWorld::new(ranks)?.deadline(self.deadline);
                if let Some(threads) = self.kernel_threads {
                    world = world.kernel_threads(threads);
                }
                if let Some(directory) = &self.dump_dir {
                    world = world.dump_dir(directory);
                }
                Ok(world.run(program)?.swap_remove(0))
            }
        }
    }

    #[cfg(feature = "mpi")]
    fn launch_process<T: Send>(
        &self,
        launched: &Launched,
        program: impl FnOnce(World) -> Result<T> + Send,
    ) -> Result<T> {
        engine::run(self, launched, program)
    }

    #[cfg(not(feature = "mpi"))]
    fn launch_process<T>(&self, launched: &Launched, _program: impl FnOnce(World) -> Result<T>) -> Result<T> {
        Err(ErrorKind::Launch.error(
            "program",
            format!("one that was built without MPI, started by {} as one of {}", launched.by, launched.size),
            "a program that can communicate with the other processes",
            "build it with the feature `mpi` of shardwise-mpi, or start it without a launcher to run on threads",
        ))
    }
}
