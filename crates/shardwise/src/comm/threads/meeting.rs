//! The rendezvous of a group: each rank posts its entry, waits for the entries of the other ranks, and reads them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use parking_lot::Mutex;

use crate::comm::check::CallEntry;
use crate::error::{Error, RankCall, Result};
use shardwise_kernels::Assembly;

/// The state that the ranks of a group share.
///
/// Ranks pass through phases together: no rank is in phase `p + 1` before every rank has reached phase `p`. A collective
/// takes one phase, or two if the ranks fill one output. Two sets of slots alternate: when a rank posts its entry for
/// collective `c`, every rank has reached `c - 1` and so finished `c - 2`, whose slots it reuses.
pub(super) struct Meeting {
    ranks: Vec<usize>,
    /// Total of arrivals over all phases and ranks.
    arrivals: CacheAligned<AtomicU64>,
    members: Vec<CacheAligned<MemberState>>,
    slots: [Vec<Mutex<EntrySlot>>; 2],
}

/// How a rank waits for the other ranks; the hub implements it, which keeps this file independent of the hub.
pub(super) trait PhaseWaiter {
    /// Wakes a rank, so that it tests its condition again.
    fn wake(&self, rank: usize);

    /// Waits until `ready`, for which every rank must reach `phase` of the meeting. `describe` is called only if the wait
    /// gets long.
    fn wait_for_phase(
        &self,
        rank: usize,
        meeting: &Arc<Meeting>,
        phase: u64,
        ready: impl Fn() -> bool,
        describe: &dyn Fn() -> Box<RankCall>,
    ) -> Result<()>;
}

/// Keeps what different ranks write on different cache lines.
#[repr(align(128))]
struct CacheAligned<T>(T);

struct MemberState {
    /// Number of phases this member has reached.
    phases: AtomicU64,
    /// Locked during a collective: a second thread of the same rank waits for it.
    turn: Mutex<MemberProgress>,
}

/// How many collectives and phases one member has begun.
#[derive(Default)]
pub(super) struct MemberProgress {
    collectives: u64,
    phases: u64,
    /// Set when a wait of this member failed: its phase count no longer matches the group's, so all later calls fail.
    broken: Option<Error>,
}

/// One member's entry, and how many ranks have read it.
#[derive(Default)]
struct EntrySlot {
    posted: Option<Arc<PostedEntry>>,
    readers: usize,
}

/// What one rank contributes to a collective.
pub(super) struct PostedEntry {
    pub(super) entry: CallEntry,
    /// The output that all ranks fill together; allocated by the first rank of the group.
    pub(super) output: Option<Assembly>,
}

impl Meeting {
    pub(super) fn new(ranks: Vec<usize>) -> Self {
        let size = ranks.len();
        let member = |_| CacheAligned(MemberState { phases: AtomicU64::new(0), turn: Mutex::default() });
        let slots = || (0..size).map(|_| Mutex::default()).collect();
        Meeting {
            ranks,
            arrivals: CacheAligned(AtomicU64::new(0)),
            members: (0..size).map(member).collect(),
            slots: [slots(), slots()],
        }
    }

    /// Global ranks in group order.
    pub(super) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The global ranks that have not reached a phase yet.
    pub(super) fn missing(&self, phase: u64) -> Vec<usize> {
        let late = |&m: &usize| self.members[m].0.phases.load(SeqCst) <= phase;
        (0..self.ranks.len()).filter(late).map(|m| self.ranks[m]).collect()
    }

    /// Number of entries in the slots.
    #[cfg(test)]
    pub(super) fn posted(&self) -> usize {
        self.slots.iter().flatten().filter(|slot| slot.lock().posted.is_some()).count()
    }

    /// Begins a collective of member `me`. Repeats the error if an earlier wait of this member failed.
    pub(super) fn begin(&self, me: usize) -> Result<parking_lot::MutexGuard<'_, MemberProgress>> {
        let turn = self.members[me].0.turn.lock();
        match &turn.broken {
            Some(error) => Err(error.clone()),
            None => Ok(turn),
        }
    }

    /// Posts the entry of `me`, waits for all ranks, and returns all entries in group order.
    pub(super) fn exchange(
        self: &Arc<Self>,
        hub: &impl PhaseWaiter,
        me: usize,
        turn: &mut MemberProgress,
        posted: PostedEntry,
    ) -> Result<Vec<Arc<PostedEntry>>> {
        let posted = Arc::new(posted);
        let slots = &self.slots[(turn.collectives % 2) as usize];
        *slots[me].lock() = EntrySlot { posted: Some(Arc::clone(&posted)), readers: 0 };
        turn.collectives += 1;
        if let Err(error) = self.pass(hub, me, turn, &|| posted.entry.describe(&self.ranks, me)) {
            if matches!(error, Error::PeerLeft { .. }) {
                // This rendezvous can no longer complete, so no rank will read the entry.
                *slots[me].lock() = EntrySlot::default();
            }
            return Err(error);
        }
        // Each rank begins at its own slot, so that ranks do not queue for the same lock.
        let size = self.ranks.len();
        let mut all: Vec<Arc<PostedEntry>> = (me..me + size).map(|m| slots[m % size].lock().read(size)).collect();
        all.rotate_right(me);
        Ok(all)
    }

    /// Enters the next phase and waits until all ranks have.
    pub(super) fn pass(
        self: &Arc<Self>,
        hub: &impl PhaseWaiter,
        me: usize,
        turn: &mut MemberProgress,
        describe: &dyn Fn() -> Box<RankCall>,
    ) -> Result<()> {
        let phase = turn.phases;
        turn.phases += 1;
        let complete = turn.phases * self.ranks.len() as u64;
        self.members[me].0.phases.store(turn.phases, SeqCst);
        if self.arrivals.0.fetch_add(1, SeqCst) + 1 == complete {
            self.ranks.iter().for_each(|&rank| hub.wake(rank));
            return Ok(());
        }
        let ready = || self.arrivals.0.load(SeqCst) >= complete;
        let result = hub.wait_for_phase(self.ranks[me], self, phase, ready, describe);
        if let Err(error) = &result {
            turn.broken = Some(error.clone());
        }
        result
    }
}

impl EntrySlot {
    /// The posted entry. The last of `size` readers empties the slot, so that it keeps no tensor alive after the
    /// collective.
    fn read(&mut self, size: usize) -> Arc<PostedEntry> {
        self.readers += 1;
        let posted = if self.readers == size { self.posted.take() } else { self.posted.clone() };
        posted.expect("posted before the meeting, read once by each rank")
    }
}
