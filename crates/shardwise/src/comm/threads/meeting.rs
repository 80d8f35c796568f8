//! Where the ranks of a group meet: each posts its entry, waits for the others, and reads theirs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use parking_lot::Mutex;

use crate::comm::check::Entry;
use crate::error::{Error, RankCall, Result};
use shardwise_kernels::Assembly;

/// The shared part of a group.
///
/// Ranks pass through phases together: nobody is in phase `p + 1` before everybody has come to phase `p`. A collective
/// takes one phase, or two if the ranks work on one output. Entries lie in two sets of slots in turn: when a rank posts
/// for collective `c`, all have come to `c - 1`, hence finished `c - 2`, whose slots it reuses.
pub(super) struct Meeting {
    ranks: Vec<usize>,
    /// Total of arrivals over all phases and ranks.
    arrivals: Padded<AtomicU64>,
    members: Vec<Padded<MemberState>>,
    slots: [Vec<Mutex<Slot>>; 2],
}

/// Where a rank waits for the others.
pub(super) trait Waiting {
    /// Lets a rank look again whether what it waits for is there.
    fn wake(&self, rank: usize);

    /// Waits until `ready`, which every rank must come to a phase of the meeting for. `describe` is asked for the call only
    /// if the wait gets long.
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
struct Padded<T>(T);

struct MemberState {
    /// Number of phases this member has come to.
    phases: AtomicU64,
    /// Held during a collective: a second thread of the same rank waits for its turn.
    turn: Mutex<Turn>,
}

/// Where one member stands.
#[derive(Default)]
pub(super) struct Turn {
    collectives: u64,
    phases: u64,
    /// Set when a wait of this member failed: the phases of the group no longer agree, so it stays failed.
    broken: Option<Error>,
}

#[derive(Default)]
struct Slot {
    posted: Option<Arc<Posted>>,
    readers: usize,
}

/// What one rank brings to a collective.
pub(super) struct Posted {
    pub(super) entry: Entry,
    /// The output that all ranks fill together; the first rank of the group brings it.
    pub(super) output: Option<Assembly>,
}

impl Meeting {
    pub(super) fn new(ranks: Vec<usize>) -> Self {
        let size = ranks.len();
        let member = |_| Padded(MemberState { phases: AtomicU64::new(0), turn: Mutex::default() });
        let slots = || (0..size).map(|_| Mutex::default()).collect();
        Meeting {
            ranks,
            arrivals: Padded(AtomicU64::new(0)),
            members: (0..size).map(member).collect(),
            slots: [slots(), slots()],
        }
    }

    /// Global ranks in group order.
    pub(super) fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The global ranks that have not come to a phase yet.
    pub(super) fn missing(&self, phase: u64) -> Vec<usize> {
        let late = |&m: &usize| self.members[m].0.phases.load(SeqCst) <= phase;
        (0..self.ranks.len()).filter(late).map(|m| self.ranks[m]).collect()
    }

    /// Number of entries that lie in the slots.
    #[cfg(test)]
    pub(super) fn posted(&self) -> usize {
        self.slots.iter().flatten().filter(|slot| slot.lock().posted.is_some()).count()
    }

    /// Begins a collective of member `me`. The same error again if an earlier wait of this member failed.
    pub(super) fn begin(&self, me: usize) -> Result<parking_lot::MutexGuard<'_, Turn>> {
        let turn = self.members[me].0.turn.lock();
        match &turn.broken {
            Some(error) => Err(error.clone()),
            None => Ok(turn),
        }
    }

    /// Posts what `me` brings, waits for everybody, and returns what all have brought, in group order.
    pub(super) fn exchange(
        self: &Arc<Self>,
        hub: &impl Waiting,
        me: usize,
        turn: &mut Turn,
        posted: Posted,
    ) -> Result<Vec<Arc<Posted>>> {
        let posted = Arc::new(posted);
        let slots = &self.slots[(turn.collectives % 2) as usize];
        *slots[me].lock() = Slot { posted: Some(Arc::clone(&posted)), readers: 0 };
        turn.collectives += 1;
        if let Err(error) = self.pass(hub, me, turn, &|| posted.entry.describe(&self.ranks, me)) {
            if matches!(error, Error::PeerLeft { .. }) {
                // Nobody can complete this meeting, so nobody will read the entry.
                *slots[me].lock() = Slot::default();
            }
            return Err(error);
        }
        // Begin at the own slot, so that ranks do not queue for the same one.
        let size = self.ranks.len();
        let mut all: Vec<Arc<Posted>> = (me..me + size).map(|m| slots[m % size].lock().read(size)).collect();
        all.rotate_right(me);
        Ok(all)
    }

    /// Comes to the next phase and waits until everybody has.
    pub(super) fn pass(
        self: &Arc<Self>,
        hub: &impl Waiting,
        me: usize,
        turn: &mut Turn,
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

impl Slot {
    /// A handle to what was posted. The last of `size` readers leaves nothing behind, so that tensors do not outlive
    /// the collective in here.
    fn read(&mut self, size: usize) -> Arc<Posted> {
        self.readers += 1;
        let posted = if self.readers == size { self.posted.take() } else { self.posted.clone() };
        posted.expect("posted before the meeting, read once by each rank")
    }
}
