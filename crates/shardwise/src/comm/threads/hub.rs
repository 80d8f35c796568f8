//! What the ranks of one world share: who failed, who left, who waits for whom. No call waits without passing here.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::mailbox::{Envelope, Mailbox};
use super::meeting::{Meeting, Waiting};
use crate::comm::host::{launch_is_over, second_thread, this_thread};
use crate::error::{Error, RankCall, Result};

pub(super) struct Hub {
    pub(super) deadline: Duration,
    /// Meetings by the ranks that take part. They live as long as the world.
    meetings: Mutex<HashMap<Vec<usize>, Arc<Meeting>>>,
    pub(super) mailbox: Mailbox,
    /// Whether every rank has a core to itself, so that spinning harms nobody.
    roomy: bool,
    ranks: Vec<RankState>,
    /// Set together with `failure`; read without a lock while spinning.
    failed: AtomicBool,
    failure: Mutex<Option<(Failure, Instant)>>,
    /// What every sleeping rank waits for. Locked while looking for a circle, so that no rank can move meanwhile.
    waits: Mutex<Vec<Option<Wait>>>,
}

struct RankState {
    left: AtomicBool,
    /// The thread that runs the program of this rank, and so makes its collectives; 0 before it runs.
    program: AtomicUsize,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// Why the world cannot go on.
enum Failure {
    /// A rank failed by itself.
    Rank { rank: usize, reason: Arc<str> },
    /// Something that every rank is to hear in the same words.
    Shared(Error),
}

/// What a sleeping rank waits for.
#[derive(Clone)]
pub(super) struct Wait {
    pub(super) call: Box<RankCall>,
    pub(super) reason: Reason,
}

#[derive(Clone)]
pub(super) enum Reason {
    /// For the others to come to a meeting.
    Meeting { meeting: Arc<Meeting>, phase: u64 },
    /// For a message.
    Message(Envelope),
}

/// How long a rank looks before it sleeps, if it has a core to itself: longer than waking up takes (some 60 us here), or
/// else ranks that have slept once keep each other late; shorter than anyone would notice on a power bill.
const SPIN: Duration = Duration::from_micros(200);

/// How often a rank lets others run before it sleeps, if it shares its core.
const YIELDS: usize = 8;

impl Hub {
    pub(super) fn new(size: usize, deadline: Duration, roomy: bool) -> Self {
        let rank = || RankState {
            left: AtomicBool::new(false),
            program: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        };
        Hub {
            deadline,
            meetings: Mutex::default(),
            mailbox: Mailbox::default(),
            roomy,
            ranks: (0..size).map(|_| rank()).collect(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            waits: Mutex::new((0..size).map(|_| None).collect()),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The meeting of some ranks: one and the same for everybody who names the same ranks in the same order.
    pub(super) fn meeting(&self, ranks: &[usize]) -> Arc<Meeting> {
        let mut meetings = self.meetings.lock();
        if let Some(meeting) = meetings.get(ranks) {
            return Arc::clone(meeting);
        }
        let meeting = Arc::new(Meeting::new(ranks.to_vec()));
        meetings.insert(ranks.to_vec(), Arc::clone(&meeting));
        meeting
    }

    /// A rank failed: every pending and later call of the others ends in an error that names it.
    pub(super) fn fail(&self, rank: usize, reason: String) {
        self.record(Failure::Rank { rank, reason: reason.into() });
    }

    /// Every pending and later call ends in this error.
    pub(super) fn fail_all(&self, error: Error) {
        self.record(Failure::Shared(error));
    }

    /// The first failure counts, later ones are its consequences.
    fn record(&self, failure: Failure) {
        self.failure.lock().get_or_insert((failure, Instant::now()));
        self.failed.store(true, SeqCst);
        self.wake_all();
    }

    /// The calling thread runs the program of a rank.
    pub(super) fn enter(&self, rank: usize) {
        self.ranks[rank].program.store(this_thread(), SeqCst);
    }

    /// An error unless the calling thread runs the program of a rank: which of two threads' collectives come first would
    /// be chance, on every rank by itself.
    pub(super) fn check_thread(&self, rank: usize) -> Result<()> {
        if self.ranks[rank].program.load(SeqCst) == this_thread() {
            return Ok(());
        }
        Err(second_thread(rank))
    }

    /// An error once a rank has returned from its program: what it left behind cannot communicate.
    pub(super) fn check_running(&self, rank: usize, call: impl FnOnce() -> Box<RankCall>) -> Result<()> {
        if !self.has_left(rank) {
            return Ok(());
        }
        Err(Error::Rejected { call: call(), source: Box::new(launch_is_over()) })
    }

    /// A rank has returned from its program: nobody needs to wait for it any longer.
    pub(super) fn leave(&self, rank: usize) {
        self.ranks[rank].left.store(true, SeqCst);
        self.wake_all();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.ranks[rank].left.load(SeqCst)
    }

    /// The rank that failed first, if one failed by itself.
    pub(super) fn first_failed(&self) -> Option<usize> {
        match self.failure.lock().as_ref()? {
            (Failure::Rank { rank, .. }, _) => Some(*rank),
            (Failure::Shared(_), _) => None,
        }
    }

    /// Time since the first failure, if there was one.
    pub(super) fn failed_since(&self) -> Option<Duration> {
        self.failure.lock().as_ref().map(|(_, at)| at.elapsed())
    }

    /// The error that a failure of the world means for a call, if there was one.
    pub(super) fn failure_for(&self, call: impl FnOnce() -> Box<RankCall>) -> Option<Error> {
        if !self.failed.load(SeqCst) {
            return None;
        }
        match self.failure.lock().as_ref()? {
            (Failure::Shared(error), _) => Some(error.clone()),
            (Failure::Rank { rank, reason }, _) => {
                Some(Error::PeerFailed { rank: *rank, reason: Arc::clone(reason), call: call() })
            }
        }
    }

    fn wake_all(&self) {
        (0..self.size()).for_each(|rank| self.wake(rank));
    }

    /// Waits until `ready`, for as long as that can still happen.
    ///
    /// `missing` lists the ranks without which it cannot; `wait` describes the wait and is asked for only if it gets
    /// long.
    pub(super) fn wait_until(
        &self,
        rank: usize,
        ready: impl Fn() -> bool,
        missing: impl Fn() -> Vec<usize>,
        wait: impl Fn() -> Wait,
    ) -> Result<()> {
        if self.spin(&ready) {
            return Ok(());
        }
        let wait = wait();
        self.waits.lock()[rank] = Some(wait.clone());
        let result = self.look_for_circle(rank).and_then(|()| self.sleep(rank, &ready, &missing, &wait.call));
        self.waits.lock()[rank] = None;
        result
    }

    /// Looks for a short while. Whether it became ready.
    fn spin(&self, ready: &impl Fn() -> bool) -> bool {
        if !self.roomy {
            return (0..YIELDS).any(|_| {
                std::thread::yield_now();
                ready()
            });
        }
        let start = Instant::now();
        loop {
            for _ in 0..64 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN || self.failed.load(SeqCst) {
                return false;
            }
        }
    }

    fn sleep(
        &self,
        rank: usize,
        ready: &impl Fn() -> bool,
        missing: &impl Fn() -> Vec<usize>,
        call: &RankCall,
    ) -> Result<()> {
        let state = &self.ranks[rank];
        // A deadline beyond what the clock can say is none.
        let until = Instant::now().checked_add(self.deadline);
        let mut guard = state.lock.lock();
        state.sleepers.fetch_add(1, SeqCst);
        let result = loop {
            if ready() {
                break Ok(());
            }
            // In this order: a rank fails before it leaves, and it may come to the meeting before it leaves.
            let gone: Vec<usize> = (0..self.size()).filter(|&r| self.has_left(r)).collect();
            if let Some(error) = self.failure_for(|| Box::new(call.clone())) {
                break Err(error);
            }
            if let Some(gone) = missing().into_iter().find(|r| gone.contains(r)) {
                break Err(Error::PeerLeft { rank: gone, call: Box::new(call.clone()) });
            }
            let timed_out = match until {
                Some(until) => state.wake.wait_until(&mut guard, until).timed_out(),
                None => {
                    state.wake.wait(&mut guard);
                    false
                }
            };
            if timed_out && !ready() {
                let (call, waited, missing) = (Box::new(call.clone()), self.deadline, missing());
                break Err(Error::Timeout { call, waited, elsewhere: self.calls_of(&missing), missing });
            }
        };
        state.sleepers.fetch_sub(1, SeqCst);
        drop(guard);
        if let Err(error @ Error::Timeout { .. }) = &result {
            self.fail_all(error.clone());
        }
        result
    }

    /// Ranks that wait for each other in a circle would wait for ever: an error for all of them. Whoever closes the
    /// circle finds it, since everyone looks after writing down what it waits for.
    fn look_for_circle(&self, rank: usize) -> Result<()> {
        let waits = self.waits.lock();
        // A wait for a rank that has left ends by itself, so it is no part of a circle.
        let edges = |wait: &Wait| {
            let missing = self.missing_for(wait);
            if missing.iter().any(|&r| self.has_left(r)) { Vec::new() } else { missing }
        };
        let Some(circle) = shortest_circle(&waits, rank, edges) else { return Ok(()) };
        let call = |rank: &usize| (*waits[*rank].as_ref().expect("on a circle of waiting ranks").call).clone();
        let error = Error::Deadlock { circle: circle.iter().map(call).collect() };
        drop(waits);
        self.fail_all(error.clone());
        // Another failure may have come first; then that is what everybody hears.
        Err(self.failure_for(|| self.waits.lock()[rank].as_ref().expect("still waiting").call.clone()).unwrap_or(error))
    }

    /// The calls in which these ranks wait.
    fn calls_of(&self, ranks: &[usize]) -> Vec<RankCall> {
        let waits = self.waits.lock();
        ranks.iter().filter_map(|&rank| Some((*waits[rank].as_ref()?.call).clone())).collect()
    }

    /// The ranks that a waiting rank waits for.
    fn missing_for(&self, wait: &Wait) -> Vec<usize> {
        match &wait.reason {
            Reason::Meeting { meeting, phase } => meeting.missing(*phase),
            Reason::Message(envelope) if self.mailbox.holds(envelope) => Vec::new(),
            Reason::Message(envelope) => vec![envelope.from],
        }
    }
}

impl Waiting for Hub {
    fn wake(&self, rank: usize) {
        let state = &self.ranks[rank];
        if state.sleepers.load(SeqCst) > 0 {
            // Taking the lock orders this after the sleeper's last look at its condition.
            let _guard = state.lock.lock();
            state.wake.notify_all();
        }
    }

    fn wait_for_phase(
        &self,
        rank: usize,
        meeting: &Arc<Meeting>,
        phase: u64,
        ready: impl Fn() -> bool,
        describe: &dyn Fn() -> Box<RankCall>,
    ) -> Result<()> {
        let wait = || Wait { call: describe(), reason: Reason::Meeting { meeting: Arc::clone(meeting), phase } };
        self.wait_until(rank, ready, || meeting.missing(phase), wait)
    }
}

/// The ranks on a shortest circle of waiting ranks through `start`, beginning with it, if there is one.
fn shortest_circle(waits: &[Option<Wait>], start: usize, missing: impl Fn(&Wait) -> Vec<usize>) -> Option<Vec<usize>> {
    // Breadth first over "waits for", remembering through whom each rank was found.
    let mut found_through: Vec<Option<usize>> = vec![None; waits.len()];
    let mut open = std::collections::VecDeque::from([start]);
    while let Some(rank) = open.pop_front() {
        for next in waits[rank].as_ref().map(&missing).unwrap_or_default() {
            if next == start {
                let mut circle = vec![rank];
                while let Some(&before) = found_through[*circle.last().expect("not empty")].as_ref() {
                    circle.push(before);
                }
                circle.reverse();
                return Some(circle);
            }
            if found_through[next].is_none() {
                found_through[next] = Some(rank);
                open.push_back(next);
            }
        }
    }
    None
}
