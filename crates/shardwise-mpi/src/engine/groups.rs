//! Groups of ranks, as this process knows them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use shardwise::comm::engine::fnv1a;
use shardwise::{Error, Result};

use super::comm::Comm;
use super::watch::Slot;

/// The groups that this process has asked for. They live as long as the process.
#[derive(Default)]
pub(super) struct Groups(Mutex<HashMap<Vec<usize>, Arc<GroupState>>>);

/// A group of ranks, one and the same for all who ask for the same ranks in the same order.
pub(super) struct GroupState {
    pub(super) ranks: Vec<usize>,
    /// Position of this rank.
    pub(super) me: usize,
    /// The same number in every process, another for every group.
    pub(super) identity: u64,
    /// Collectives that this rank has begun.
    pub(super) begun: AtomicU64,
    /// Sets of tensors that were exposed to the group.
    pub(super) exposed: AtomicU64,
    /// Held during a collective: a second thread of this rank waits for its turn. The error after which this rank is no
    /// longer in step with the group, if there was one.
    pub(super) turn: Mutex<Option<Error>>,
    /// The collective that this rank is in.
    pub(super) waiting: Slot,
    comm: OnceLock<Comm>,
}

impl Groups {
    /// The group of some ranks, `rank`, which is this process, among them.
    pub(super) fn get(&self, ranks: &[usize], rank: usize) -> Arc<GroupState> {
        let mut groups = self.0.lock();
        if let Some(group) = groups.get(ranks) {
            return Arc::clone(group);
        }
        let me = ranks.iter().position(|&r| r == rank);
        let group = Arc::new(GroupState {
            ranks: ranks.to_vec(),
            me: me.expect("checked by those who ask"),
            identity: identity(ranks),
            begun: AtomicU64::new(0),
            exposed: AtomicU64::new(0),
            turn: Mutex::new(None),
            waiting: Slot::default(),
            comm: OnceLock::new(),
        });
        groups.insert(ranks.to_vec(), Arc::clone(&group));
        group
    }

    /// The groups in which this rank is inside a collective.
    pub(super) fn waiting(&self) -> Vec<Arc<GroupState>> {
        self.0.lock().values().filter(|group| group.waiting.is_taken()).map(Arc::clone).collect()
    }

    /// How many collectives this rank has begun in each of its groups.
    pub(super) fn begun(&self) -> HashMap<u64, u64> {
        self.0.lock().values().map(|group| (group.identity, group.begun.load(SeqCst))).collect()
    }
}

impl GroupState {
    /// The communicator of the group, made by its ranks together when they first need it. The caller holds the turn.
    pub(super) fn comm(&self, world: &Comm) -> Result<&Comm> {
        if let Some(comm) = self.comm.get() {
            return Ok(comm);
        }
        let tag = (self.identity % 30_000) as i32;
        let made = world.of_ranks(&self.ranks, tag)?;
        Ok(self.comm.get_or_init(|| made))
    }
}

/// The same number for the same ranks in every process.
fn identity(ranks: &[usize]) -> u64 {
    let bytes: Vec<u8> = ranks.iter().flat_map(|&rank| (rank as u64).to_le_bytes()).collect();
    fnv1a(&bytes)
}
