//! The state that the ranks of one world share: which ranks failed, left, or wait for which. Every wait of this engine is
//! in [`Hub::wait_until`], which is what makes deadlocks and failures visible.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::mailbox::{Envelope, Mailbox};
use super::meeting::{Meeting, PhaseWaiter};
use crate::comm::Trace;
use crate::comm::dump::RankDump;
use crate::comm::host::{launch_ended_error, thread_number, wrong_thread_error};
use crate::comm::waiting::while_waiting;
use crate::error::{Error, RankCall, Result};

/// The shared state of one world.
pub(super) struct Hub {
    pub(super) deadline: Duration,
    /// Meetings by their ranks. They live as long as the world.
    meetings: Mutex<HashMap<Vec<usize>, Arc<Meeting>>>,
    pub(super) mailbox: Mailbox,
    /// The traces of the ranks that have begun, for dumps.
    traces: Mutex<HashMap<usize, Trace>>,
    /// Whether there are at least as many cores as ranks, so that a spinning rank takes no core from another.
    core_per_rank: bool,
    ranks: Vec<RankState>,
    /// Set together with `failure`; read without a lock while spinning.
    failed: AtomicBool,
    failure: Mutex<Option<(WorldFailure, Instant)>>,
    /// What each sleeping rank waits for. Locked during the search for a cycle, so that the waits do not change meanwhile.
    waits: Mutex<Vec<Option<Wait>>>,
}

struct RankState {
    /// Whether the rank has returned from its program.
    left: AtomicBool,
    /// The thread that runs the rank's program, and the only one that may make collectives; 0 before it runs.
    program: AtomicUsize,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// Why all further calls of the world fail.
enum WorldFailure {
    /// A rank failed by itself; other ranks get [`Error::PeerFailed`] with their own calls.
    Rank { rank: usize, reason: Arc<str> },
    /// An error that every rank gets unchanged, such as a deadlock.
    SameForAll(Error),
}

/// What a sleeping rank waits for.
#[derive(Clone)]
pub(super) struct Wait {
    pub(super) call: Box<RankCall>,
    pub(super) reason: WaitReason,
}

#[derive(Clone)]
pub(super) enum WaitReason {
    /// For all ranks of a meeting to reach a phase.
    Meeting { meeting: Arc<Meeting>, phase: u64 },
    /// For a message.
    Message(Envelope),
}

/// How long a rank spins before it sleeps, if it has a core to itself. Longer than a wake-up takes (about 60 us where this
/// was measured): otherwise ranks that have slept once keep making each other late. Short enough to waste little power.
const SPIN: Duration = Duration::from_micros(200);

/// How often a rank yields its core before it sleeps, if ranks share cores.
const YIELDS: usize = 8;

impl Hub {
    pub(super) fn new(size: usize, deadline: Duration, core_per_rank: bool) -> Self {
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
            traces: Mutex::default(),
            core_per_rank,
            ranks: (0..size).map(|_| rank()).collect(),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            waits: Mutex::new((0..size).map(|_| None).collect()),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.ranks.len()
    }

    /// The meeting of some ranks: the same one for all ranks that pass the same list.
    pub(super) fn meeting(&self, ranks: &[usize]) -> Arc<Meeting> {
        let mut meetings = self.meetings.lock();
        if let Some(meeting) = meetings.get(ranks) {
            return Arc::clone(meeting);
        }
        let meeting = Arc::new(Meeting::new(ranks.to_vec()));
        meetings.insert(ranks.to_vec(), Arc::clone(&meeting));
        meeting
    }

    /// Keeps the trace of a rank for its dump.
    pub(super) fn keep_trace(&self, rank: usize, trace: &Trace) {
        self.traces.lock().insert(rank, trace.clone());
    }

    /// Describes a rank that ended, or did not, with this error.
    pub(super) fn dump(&self, rank: usize, error: Option<&Error>) -> RankDump {
        let trace = self.traces.lock().get(&rank).cloned();
        let mut dump = RankDump::new(rank, self.size(), error, trace.as_ref());
        dump.is_first &= self.first_failed().is_none_or(|first| first == rank);
        dump.unreceived = self.mailbox.sent_by(rank);
        dump
    }

    /// Records that a rank failed: every pending and later call of the other ranks is an error that names it.
    pub(super) fn fail(&self, rank: usize, reason: String) {
        self.record(WorldFailure::Rank { rank, reason: reason.into() });
    }

    /// Makes every pending and later call fail with this error.
    pub(super) fn fail_all(&self, error: Error) {
        self.record(WorldFailure::SameForAll(error));
    }

    /// Keeps the first failure: later ones are its consequences.
    fn record(&self, failure: WorldFailure) {
        self.failure.lock().get_or_insert((failure, Instant::now()));
        self.failed.store(true, SeqCst);
        self.wake_all();
    }

    /// Registers the calling thread as the one that runs a rank's program.
    pub(super) fn enter(&self, rank: usize) {
        self.ranks[rank].program.store(thread_number(), SeqCst);
    }

    /// An error unless the calling thread runs the rank's program: the order of two threads' collectives would differ
    /// between ranks.
    pub(super) fn check_thread(&self, rank: usize) -> Result<()> {
        if self.ranks[rank].program.load(SeqCst) == thread_number() {
            return Ok(());
        }
        Err(wrong_thread_error(rank))
    }

    /// An error once a rank has returned from its program: groups that outlive it cannot communicate.
    pub(super) fn check_running(&self, rank: usize, call: impl FnOnce() -> Box<RankCall>) -> Result<()> {
        if !self.has_left(rank) {
            return Ok(());
        }
        Err(Error::Rejected { call: call(), source: Box::new(launch_ended_error()) })
    }

    /// Records that a rank has returned from its program, so that no rank waits for it any longer.
    pub(super) fn leave(&self, rank: usize) {
        self.ranks[rank].left.store(true, SeqCst);
        self.wake_all();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.ranks[rank].left.load(SeqCst)
    }

    /// The rank whose own failure came first, if any.
    pub(super) fn first_failed(&self) -> Option<usize> {
        match self.failure.lock().as_ref()? {
            (WorldFailure::Rank { rank, .. }, _) => Some(*rank),
            (WorldFailure::SameForAll(_), _) => None,
        }
    }

    /// Time since the first failure, if there was one.
    pub(super) fn failed_since(&self) -> Option<Duration> {
        self.failure.lock().as_ref().map(|(_, at)| at.elapsed())
    }

    /// The error of a call after a failure of the world, if there was one.
    pub(super) fn failure_for(&self, call: impl FnOnce() -> Box<RankCall>) -> Option<Error> {
        if !self.failed.load(SeqCst) {
            return None;
        }
        match self.failure.lock().as_ref()? {
            (WorldFailure::SameForAll(error), _) => Some(error.clone()),
            (WorldFailure::Rank { rank, reason }, _) => {
                Some(Error::PeerFailed { rank: *rank, reason: Arc::clone(reason), call: call() })
            }
        }
    }

    fn wake_all(&self) {
        (0..self.size()).for_each(|rank| self.wake(rank));
    }

    /// Waits until `ready`; an error as soon as that can no longer happen, or after the deadline.
    ///
    /// `missing` lists the ranks that have to act first. `wait` describes the wait and is called only if it gets long.
    pub(super) fn wait_until(
        &self,
        rank: usize,
        ready: impl Fn() -> bool,
        missing: impl Fn() -> Vec<usize>,
        wait: impl Fn() -> Wait,
    ) -> Result<()> {
        let _waiting = while_waiting();
        if self.spin(&ready) {
            return Ok(());
        }
        let wait = wait();
        self.waits.lock()[rank] = Some(wait.clone());
        let result = self.look_for_circle(rank).and_then(|()| self.sleep(rank, &ready, &missing, &wait.call));
        self.waits.lock()[rank] = None;
        result
    }

    /// Spins for a short while; whether the condition became true.
    fn spin(&self, ready: &impl Fn() -> bool) -> bool {
        if !self.core_per_rank {
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
        // A deadline beyond the range of the clock means no deadline.
        let until = Instant::now().checked_add(self.deadline);
        let mut guard = state.lock.lock();
        state.sleepers.fetch_add(1, SeqCst);
        let result = loop {
            if ready() {
                break Ok(());
            }
            // This order matters: a rank records its failure before it leaves, and may join the meeting before it leaves.
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
                break Err(Error::Timeout { call, waited, other_calls: self.calls_of(&missing), missing });
            }
        };
        state.sleepers.fetch_sub(1, SeqCst);
        drop(guard);
        if let Err(error @ Error::Timeout { .. }) = &result {
            self.fail_all(error.clone());
        }
        result
    }

    /// Fails all ranks if this one waits for itself through other ranks. The rank that closes the cycle finds it, since each
    /// rank searches after it has recorded its wait.
    fn look_for_circle(&self, rank: usize) -> Result<()> {
        let waits = self.waits.lock();
        // A wait for a rank that has left ends with an error, so it is not part of a cycle.
        let edges = |wait: &Wait| {
            let missing = self.missing_for(wait);
            if missing.iter().any(|&r| self.has_left(r)) { Vec::new() } else { missing }
        };
        let Some(circle) = shortest_circle(&waits, rank, edges) else { return Ok(()) };
        let call = |rank: &usize| (*waits[*rank].as_ref().expect("on a circle of waiting ranks").call).clone();
        let error = Error::Deadlock { cycle: circle.iter().map(call).collect() };
        drop(waits);
        self.fail_all(error.clone());
        // Another failure may have been recorded first; then all ranks get that one.
        Err(self.failure_for(|| self.waits.lock()[rank].as_ref().expect("still waiting").call.clone()).unwrap_or(error))
    }

    /// The calls in which some ranks wait, as far as they do.
    fn calls_of(&self, ranks: &[usize]) -> Vec<RankCall> {
        let waits = self.waits.lock();
        ranks.iter().filter_map(|&rank| Some((*waits[rank].as_ref()?.call).clone())).collect()
    }

    /// The ranks that a waiting rank waits for.
    fn missing_for(&self, wait: &Wait) -> Vec<usize> {
        match &wait.reason {
            WaitReason::Meeting { meeting, phase } => meeting.missing(*phase),
            WaitReason::Message(envelope) if self.mailbox.holds(envelope) => Vec::new(),
            WaitReason::Message(envelope) => vec![envelope.from],
        }
    }
}

impl PhaseWaiter for Hub {
    fn wake(&self, rank: usize) {
        let state = &self.ranks[rank];
        if state.sleepers.load(SeqCst) > 0 {
            // The lock orders the notification after the sleeper's last test of its condition.
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
        let wait = || Wait { call: describe(), reason: WaitReason::Meeting { meeting: Arc::clone(meeting), phase } };
        self.wait_until(rank, ready, || meeting.missing(phase), wait)
    }
}

/// The ranks on a shortest cycle of waits through `start`, beginning with `start`, if there is one.
fn shortest_circle(waits: &[Option<Wait>], start: usize, missing: impl Fn(&Wait) -> Vec<usize>) -> Option<Vec<usize>> {
    // Breadth-first over "waits for", with the predecessor of each rank found.
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
