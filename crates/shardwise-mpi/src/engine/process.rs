//! MPI in this process: begun with the first launch, ended with the process.

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

/// What lives as long as the process.
pub(super) struct Process {
    /// All processes, from which groups are made.
    pub(super) world: Comm,
    /// Messages from rank to rank.
    pub(super) mail: Comm,
    pub(super) service: Arc<Service>,
    /// This process's share of the cores of its machine.
    pub(super) share_of_cores: usize,
    /// The host of every rank, by the least rank on it.
    pub(super) hosts: Arc<[usize]>,
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
        let take_turns = settings::take_turns()?;
        comm::initialize()?;
        let world = Comm::world()?;
        if world.size() != launched.size {
            // Ending in peace takes all processes, which do not know of each other.
            return Err(ErrorKind::Launch.error(
                "MPI",
                format!("{} process(es) where {} started {}", world.size(), launched.by, launched.size),
                "the MPI library of the launcher",
                "use the mpirun of the library that the program was built with, or srun --mpi=pmix (or pmi2)",
            ));
        }
        let mail = world.duplicate()?;
        let host = world.on_this_host()?;
        let cores = Cores::find(&world, &host, take_turns)?;
        let least = host.numbers(world.rank() as u64)?.into_iter().min().unwrap_or(0);
        let hosts = world.numbers(least)?.into_iter().map(|rank| rank as usize).collect();
        comm::set_take_turns(cores.take_turns);
        let groups = Arc::new(Groups::default());
        let service = Service::begin(world.duplicate()?, world.duplicate()?, Arc::clone(&groups))?;
        let world = world.duplicate()?;
        // SAFETY: a function without arguments that does not unwind.
        unsafe { libc::atexit(end) };
        let share_of_cores = cores.share;
        Ok(Process { world, mail, service, share_of_cores, hosts, groups, launches: Mutex::default() })
    }
}

/// The cores of this machine, as the processes on it share them.
struct Cores {
    /// Those that this process is bound to, or its share where several are bound to the same.
    share: usize,
    /// Whether some machine of the job has fewer cores than processes; the same on all.
    take_turns: bool,
}

impl Cores {
    fn find(world: &Comm, host: &Comm, take_turns: Option<bool>) -> Result<Self> {
        let wanted: u64 = host.numbers(available_cores() as u64)?.iter().sum();
        // SAFETY: a number of the system.
        let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }.max(1) as u64;
        let share = if wanted <= online {
            available_cores()
        } else {
            ((available_cores() as u64 * online / wanted) as usize).max(1)
        };
        let crowded = take_turns.unwrap_or(host.size() as u64 > online);
        let [take_turns] = world.greatest(&[u64::from(crowded)])?;
        Ok(Cores { share, take_turns: take_turns > 0 })
    }
}

/// Ends MPI when the process ends, together with the other processes.
extern "C" fn end() {
    if let Some(Ok(process)) = PROCESS.get()
        && process.service.end()
    {
        // Over some networks a rank waits for ever in MPI_Finalize for one that was there much earlier (seen with MPICH 4.0
        // on UCX). An error is of no use to anybody here.
        let _ = process.world.barrier();
        comm::finalize();
    }
}
