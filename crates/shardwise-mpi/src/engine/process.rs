//! MPI in this process: initialised by the first launch, finalized when the process ends.

use shardwise::error::ErrorKind;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use shardwise::Result;
use shardwise::comm::engine::available_cores;

use super::comm::{self, Comm};
use super::groups::Groups;
use super::service::Service;
use crate::launcher::Launched;
use crate::settings;

/// What all launches of this process share.
pub(super) struct Process {
    /// All processes of the job, from which groups are created.
    pub(super) world: Comm,
    /// Communicator of point-to-point messages.
    pub(super) message_comm: Comm,
    pub(super) service: Arc<Service>,
    /// Number of cores of its machine that this process may use.
    pub(super) share_of_cores: usize,
    /// The host of every rank, identified by the lowest rank on it.
    pub(super) hosts: Arc<[usize]>,
    pub(super) groups: Arc<Groups>,
    /// Locked during a launch.
    pub(super) launches: Mutex<LaunchHistory>,
}

/// The launches of this process so far.
#[derive(Default)]
pub(super) struct LaunchHistory {
    pub(super) count: u64,
    /// The failure of one of them, after which no further launch is possible.
    pub(super) failed: Option<String>,
}

static PROCESS: OnceLock<Result<Process>> = OnceLock::new();

impl Process {
    /// Returns the process; the first call initialises MPI, which is collective over the job.
    pub(super) fn get(launched: &Launched) -> Result<&'static Process> {
        PROCESS.get_or_init(|| Process::begin(launched)).as_ref().map_err(Clone::clone)
    }

    fn begin(launched: &Launched) -> Result<Self> {
        let take_turns = settings::take_turns()?;
        comm::initialize()?;
        let world = Comm::world()?;
        if world.size() != launched.size {
            // MPI stays initialised: processes that do not know of each other cannot finalize together.
            return Err(ErrorKind::Launch.error(
                "MPI",
                format!("{} process(es) where {} started {}", world.size(), launched.by, launched.size),
                "the MPI library of the launcher",
                "use the mpirun of the library that the program was built with, or srun --mpi=pmix (or pmi2)",
            ));
        }
        let message_comm = world.duplicate()?;
        let host = world.on_this_host()?;
        let cores = CoreShare::find(&world, &host, take_turns)?;
        let least = host.all_gather_u64(world.rank() as u64)?.into_iter().min().unwrap_or(0);
        let hosts = world.all_gather_u64(least)?.into_iter().map(|rank| rank as usize).collect();
        comm::set_oversubscribed(cores.oversubscribed);
        let groups = Arc::new(Groups::default());
        let service = Service::begin(world.duplicate()?, world.duplicate()?, Arc::clone(&groups))?;
        let world = world.duplicate()?;
        // SAFETY: a function without arguments that does not unwind.
        unsafe { libc::atexit(end) };
        let share_of_cores = cores.share;
        Ok(Process { world, message_comm, service, share_of_cores, hosts, groups, launches: Mutex::default() })
    }
}

/// How the processes of a machine share its cores.
struct CoreShare {
    /// Number of cores that this process is bound to, divided among the processes that are bound to the same ones.
    share: usize,
    /// Whether some machine of the job has more processes than cores; the same on all ranks.
    oversubscribed: bool,
}

impl CoreShare {
    /// Collective. `overridden` replaces the count of the processes of this host.
    fn find(world: &Comm, host: &Comm, overridden: Option<bool>) -> Result<Self> {
        let wanted: u64 = host.all_gather_u64(available_cores() as u64)?.iter().sum();
        // SAFETY: reads a number of the system.
        let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as u64;
        let share = if wanted <= online {
            available_cores()
        } else {
            ((available_cores() as u64 * online / wanted) as usize).max(1)
        };
        let crowded = overridden.unwrap_or(host.size() as u64 > online);
        let [oversubscribed] = world.all_reduce_max(&[u64::from(crowded)])?;
        Ok(CoreShare { share, oversubscribed: oversubscribed > 0 })
    }
}

/// Finalizes MPI when the process ends, together with the other processes.
extern "C" fn end() {
    if let Some(Ok(process)) = PROCESS.get()
        && process.service.end()
    {
        // Over some networks a rank hangs in MPI_Finalize if another entered it much earlier (seen with MPICH 4.0 on UCX), so
        // all enter it together. The process ends, so an error of the barrier is ignored.
        let _ = process.world.barrier();
        comm::finalize();
    }
}
