//! What the threads of this rank wait for inside MPI, where nobody can reach them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use shardwise::error::RankCall;

use super::groups::GroupState;

/// Describes a call.
type Describe = dyn Fn() -> RankCall + Sync;

/// The calls under way.
#[derive(Default)]
pub(super) struct Watch {
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    next: u64,
    calls: Vec<Call>,
}

struct Call {
    number: u64,
    since: Instant,
    deadline: Duration,
    group: Arc<GroupState>,
    waits_for: WaitsFor,
    /// Belongs to the thread that waits, and is there as long as the entry is.
    describe: *const Describe,
}

// SAFETY: the function can be called from any thread; the lock keeps it alive meanwhile.
unsafe impl Send for Call {}

/// What a call needs of the other ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// That all ranks of the group begin so many collectives.
    Collective(u64),
    /// That the service of a rank answers.
    Answer(usize),
}

/// A call that has been going on for a while.
pub(super) struct Waiting {
    /// Tells it apart from other calls of this process.
    pub(super) number: u64,
    pub(super) call: RankCall,
    pub(super) group: Arc<GroupState>,
    pub(super) waits_for: WaitsFor,
    pub(super) waited: Duration,
    pub(super) overdue: bool,
}

impl Watch {
    /// Watches over `body`, which may stay inside MPI.
    pub(super) fn over<R>(
        &self,
        group: &Arc<GroupState>,
        waits_for: WaitsFor,
        deadline: Duration,
        describe: &(dyn Fn() -> RankCall + Sync),
        body: impl FnOnce() -> R,
    ) -> R {
        /// Takes the entry out also when the body panics.
        struct Done<'a>(&'a Watch, u64);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                let mut pending = self.0.pending.lock();
                pending.calls.retain(|call| call.number != self.1);
            }
        }
        // SAFETY: only the lifetime changes. The entry is taken out under the lock before this function returns, and it
        // is read under the lock only.
        let describe =
            unsafe { std::mem::transmute::<*const (dyn Fn() -> RankCall + Sync + '_), *const Describe>(describe) };
        let number = {
            let mut pending = self.pending.lock();
            pending.next += 1;
            let number = pending.next;
            let (since, group) = (Instant::now(), Arc::clone(group));
            pending.calls.push(Call { number, since, deadline, group, waits_for, describe });
            number
        };
        let _done = Done(self, number);
        body()
    }

    /// The calls that have been going on for longer than `patience`.
    pub(super) fn waiting(&self, patience: Duration) -> Vec<Waiting> {
        let pending = self.pending.lock();
        let long = pending.calls.iter().filter(|call| call.since.elapsed() >= patience);
        let waiting = long.map(|call| Waiting {
            number: call.number,
            // SAFETY: the entry is there, so the function is, and the lock keeps it so.
            call: unsafe { (*call.describe)() },
            group: Arc::clone(&call.group),
            waits_for: call.waits_for,
            waited: call.since.elapsed(),
            overdue: call.since.elapsed() >= call.deadline,
        });
        waiting.collect()
    }
}
