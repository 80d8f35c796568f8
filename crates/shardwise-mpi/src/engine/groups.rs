//! The groups that this process is in: their communicators and how many collectives each has started.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use shardwise::comm::engine::fnv1a;
use shardwise::{Error, Result};

use super::comm::Comm;
use super::pending_call::PendingSlot;

/// All groups that this process has created. They live as long as the process, because MPI communicators are scarce and
/// freeing one is a collective.
#[derive(Default)]
pub(super) struct Groups(Mutex<HashMap<Vec<usize>, Arc<GroupState>>>);

/// A group of ranks; requests for the same ranks in the same order share it.
pub(super) struct GroupState {
    pub(super) ranks: Vec<usize>,
    /// Position of this rank in `ranks`.
    pub(super) me: usize,
    /// Hash of `ranks`: the same in every process, different for different groups.
    pub(super) identity: u64,
    /// Number of collectives that this rank has started.
    pub(super) begun: AtomicU64,
    /// Number of sets of tensors that were exposed to the group.
    pub(super) exposed: AtomicU64,
    /// Locked during a collective, so that a second thread of this rank waits. Holds the error after which this rank no
    /// longer makes the same calls as the group, if there was one; later collectives return it.
    pub(super) out_of_sync: Mutex<Option<Error>>,
    /// The collective that this rank is in, for the service thread.
    pub(super) pending: PendingSlot,
    comm: OnceLock<Comm>,
}

impl Groups {
    /// Returns the group of `ranks`, which must include `rank`, this process. Local: the communicator is created later.
    pub(super) fn get(&self, ranks: &[usize], rank: usize) -> Arc<GroupState> {
        let mut groups = self.0.lock();
        if let Some(group) = groups.get(ranks) {
            return Arc::clone(group);
        }
        let me = ranks.iter().position(|&r| r == rank);
        let group = Arc::new(GroupState {
            ranks: ranks.to_vec(),
            me: me.expect("callers check that this rank is in the group"),
            identity: identity(ranks),
            begun: AtomicU64::new(0),
            exposed: AtomicU64::new(0),
            out_of_sync: Mutex::new(None),
            pending: PendingSlot::default(),
            comm: OnceLock::new(),
        });
        groups.insert(ranks.to_vec(), Arc::clone(&group));
        group
    }

    /// The groups in which this rank is inside a collective.
    pub(super) fn in_collective(&self) -> Vec<Arc<GroupState>> {
        self.0.lock().values().filter(|group| group.pending.is_pending()).map(Arc::clone).collect()
    }

    /// Number of collectives that this rank has started, by identity of the group.
    pub(super) fn begun(&self) -> HashMap<u64, u64> {
        self.0.lock().values().map(|group| (group.identity, group.begun.load(SeqCst))).collect()
    }
}

impl GroupState {
    /// The communicator of the group. The first call is collective over the group and creates it; the caller holds the lock
    /// of `out_of_sync`.
    pub(super) fn comm(&self, world: &Comm) -> Result<&Comm> {
        if let Some(comm) = self.comm.get() {
            return Ok(comm);
        }
        // Keeps creations of several groups at the same time apart. MPI guarantees tags up to 32,767.
        let tag = (self.identity % 30_000) as i32;
        let created = world.of_ranks(&self.ranks, tag)?;
        Ok(self.comm.get_or_init(|| created))
    }
}

/// Hash of the ranks, the same in every process.
fn identity(ranks: &[usize]) -> u64 {
    let bytes: Vec<u8> = ranks.iter().flat_map(|&rank| (rank as u64).to_le_bytes()).collect();
    fnv1a(&bytes)
}
