//! Shardwise on MPI: the same program on many machines.
//!
//! [`launch`] has the form of [`shardwise::launch`]. In a process that `mpirun` or `srun` started it runs the program as
//! this process's rank; otherwise on threads. Nothing else in a program changes.
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
//! The engine is there with the feature `mpi`, which needs an MPI library (Open MPI or MPICH) and libclang on the machine
//! that builds. `docs/mpi.md` in the repository says how to build, run on two machines, under Slurm and in a container.
//!
//! # When something goes wrong
//!
//! MPI cannot take back a call that waits for others. So a rank that fails gives the others 3 seconds to return, then
//! prints its error and ends the job; a rank that waits longer than the deadline, or for a rank that has already returned,
//! ends it too. An error that all ranks get and return together ends the launch on every rank without ending the processes.
//! What was found by comparing the calls of all ranks ([`Settings::check`]) is of that kind.

mod launcher;
mod settings;

#[cfg(feature = "mpi")]
mod engine;

pub use launcher::{Launched, launched};
pub use settings::Settings;

use shardwise::error::ErrorKind;
use shardwise::{Result, World};

/// Runs `program` as one of `ranks` ranks: on this process's rank if `mpirun` or `srun` started the process, else on
/// that many threads.
///
/// Returns what this process's rank returned, on threads what rank 0 returned. Settings come from the environment
/// ([`Settings::from_env`]).
pub fn launch<T, F>(ranks: usize, program: F) -> Result<T>
where
    T: Send + 'static,
    F: Fn(World) -> Result<T> + Send + Sync + 'static,
{
    Settings::from_env()?.launch(ranks, program)
}

impl Settings {
    /// As [`launch`](crate::launch), with these settings.
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
            // A single process needs nobody to talk to.
            Some(launched) if launched.size > 1 || cfg!(feature = "mpi") => self.launch_process(&launched, program),
            _ => {
                let mut world = shardwise::ThreadWorld::new(ranks)?.deadline(self.deadline);
                if let Some(threads) = self.kernel_threads {
                    world = world.kernel_threads(threads);
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
            "a program that can talk to the others",
            "build it with the feature `mpi` of shardwise-mpi, or start it without a launcher to run on threads",
        ))
    }
}
