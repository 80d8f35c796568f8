//! MPI in this process: begun with the first launch, ended with the process.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use shardwise::comm::engine::cores;
use shardwise::{Error, Result};

use super::comm::{self, Comm};
use super::groups::Groups;
use super::service::Service;
use crate::launcher::Launched;

/// What lives as long as the process.
pub(super) struct Process {
    /// All processes, for groups and for ending the job.
    pub(super) world: Comm,
    /// Messages from rank to rank.
    pub(super) mail: Comm,
    pub(super) service: Arc<Service>,
    /// This process's share of the cores of its machine.
    pub(super) share_of_cores: usize,
    pub(super) groups: Arc<Groups>,
    /// Held during a launch.
    pub(super) launches: Mutex<Launches>,
}

/// Launches so far.
#[derive(Default)]
pub(super) struct Launches {
    pub(super) count: u64,
    /// What went wrong in one of them.
    pub(super) failed: Option<String>,
}

static PROCESS: OnceLock<Result<Process>> = OnceLock::new();

impl Process {
    /// The process, brought up by the first who asks.
    pub(super) fn get(launched: &Launched) -> Result<&'static Process> {
        PROCESS.get_or_init(|| Process::begin(launched)).as_ref().map_err(Clone::clone)
    }

    fn begin(launched: &Launched) -> Result<Self> {
        comm::initialize()?;
        let world = Comm::world()?;
        if world.size() != launched.size {
            // Ending in peace takes all processes, which do not know of each other.
            return Err(Error::invalid(
                "MPI",
                format!("{} process(es) where {} started {}", world.size(), launched.by, launched.size),
                "the MPI library of the launcher",
                "use the mpirun of the library that the program was built with, or srun --mpi=pmix (or pmi2)",
            ));
        }
        let mail = world.duplicate()?;
        let share_of_cores = share_of_cores(&world)?;
        let groups = Arc::new(Groups::default());
        let service = Service::begin(world.duplicate()?, world.duplicate()?, Arc::clone(&groups))?;
        let world = world.duplicate()?;
        // SAFETY: a function without arguments that does not unwind.
        unsafe { libc::atexit(end) };
        Ok(Process { world, mail, service, share_of_cores, groups, launches: Mutex::default() })
    }
}

/// The cores that this process is bound to, or its share of them where processes are bound to the same.
fn share_of_cores(world: &Comm) -> Result<usize> {
    let host = world.on_this_host()?;
    let wanted: u64 = host.numbers(cores() as u64)?.iter().sum();
    // SAFETY: a number of the system.
    let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as u64;
    Ok(if wanted <= online { cores() } else { ((cores() as u64 * online / wanted) as usize).max(1) })
}

/// Ends MPI when the process ends, together with the other processes.
extern "C" fn end() {
    if let Some(Ok(process)) = PROCESS.get()
        && process.service.end()
    {
        comm::finalize();
    }
}
