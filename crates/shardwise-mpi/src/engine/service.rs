//! The service thread of every process, which acts while the rank's program computes or blocks inside MPI: it sends exposed
//! tensors, records which ranks have left, and ends the job if this rank waits for a call that cannot complete.

use std::collections::HashMap;
use std::ffi::c_int;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use shardwise::comm::engine::catch_panic;
use shardwise::error::RankCall;
use shardwise::{Error, Result};

use super::comm::{Comm, ReceivedMessage, Request};
use super::deadlock::{ActiveCollective, ActiveReceive, RankActivity, find_cycle};
use super::exposed_tensors::{ExposedSetId, ExposedStore, ReadRequest};
use super::groups::{GroupState, Groups};
use super::messages::MessageQueue;

pub(super) struct Service {
    /// Messages between services.
    notices: Comm,
    /// Answers to requests for exposed tensors.
    pub(super) answers: Comm,
    groups: Arc<Groups>,
    pub(super) exposed: ExposedStore,
    status: Mutex<JobStatus>,
    changed: Condvar,
    stop: AtomicBool,
    /// Whether any rank has reported a failure: checked before every collective, without a lock.
    failed: AtomicBool,
    /// Whether this process is ending the job.
    dying: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Which ranks have left a launch or ended.
#[derive(Default)]
struct JobStatus {
    /// Number of the current launch, or of the last one.
    launch: u64,
    /// Messages of that launch.
    messages: Option<Arc<MessageQueue>>,
    left: HashMap<u64, HashMap<usize, LaunchExit>>,
    /// Whether the process of each rank has ended.
    ended: Vec<bool>,
}

/// What a rank reports to all other ranks when its program returns.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct LaunchExit {
    pub(super) launch: u64,
    /// Text of its error, if it failed.
    pub(super) failed: Option<String>,
    /// Number of collectives that it has started, by group.
    pub(super) begun: HashMap<u64, u64>,
    /// Number of messages that it has sent to every rank.
    pub(super) sent: Vec<u64>,
}

/// Kinds of messages between services, as MPI tags.
const READ: c_int = 1;
const RELEASE: c_int = 2;
const LEFT: c_int = 3;
const ENDED: c_int = 4;
const QUERY_ACTIVITY: c_int = 5;
const ACTIVITY: c_int = 6;

/// Stands for a group where calls are named by group and number: the receives of a rank. Identities of groups are hashes.
const RECEIVES: u64 = 0;

/// How long the thread sleeps between polls: at first after it was busy, and at most. A read of an exposed tensor waits this
/// long; a shorter sleep takes time from the kernels of the rank.
const FIRST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_millis(2);

/// How long a call lasts before the thread checks whether it can still complete. Most calls are shorter and cost nothing.
const WATCH_AFTER: Duration = Duration::from_millis(200);

/// How long a call lasts before the thread queries all ranks for the first time; the interval then doubles, so that a job with
/// many ranks is not busy with queries.
const FIRST_QUERY: Duration = Duration::from_secs(1);

/// How long a failed rank waits for the other ranks to fail as well before it ends the job: after an error that all ranks got, they
/// end the launch together.
const FAILURE_GRACE: Duration = Duration::from_secs(3);

/// How long a rank waits for answers of the other ranks before it reports a timeout without them.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

impl Service {
    pub(super) fn begin(notices: Comm, answers: Comm, groups: Arc<Groups>) -> Result<Arc<Self>> {
        let status = JobStatus { ended: vec![false; notices.size()], ..JobStatus::default() };
        let service = Arc::new(Service {
            notices,
            answers,
            groups,
            exposed: ExposedStore::default(),
            status: Mutex::new(status),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            dying: AtomicBool::new(false),
            thread: Mutex::new(None),
        });
        let worker = Arc::clone(&service);
        let name = format!("rank {} service", service.rank());
        let thread = std::thread::Builder::new().name(name).spawn(move || worker.work())?;
        *service.thread.lock() = Some(thread);
        Ok(service)
    }

    pub(super) fn rank(&self) -> usize {
        self.notices.rank()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.rank();
        (0..self.notices.size()).filter(move |&r| r != me)
    }

    /// Ends the job and prints the reason to standard error.
    pub(super) fn abort_job(&self, reason: &str) -> ! {
        self.dying.store(true, SeqCst);
        // One write, so that the lines of several ranks do not mix.
        let text = format!("shardwise: {reason}\nshardwise: rank {} ends the job\n", self.rank());
        let mut error = std::io::stderr().lock();
        let _ = error.write_all(text.as_bytes()).and_then(|()| error.flush());
        self.notices.abort()
    }

    /// Starts a launch in this process.
    pub(super) fn enter(&self, launch: u64, messages: &Arc<MessageQueue>) {
        let mut status = self.status.lock();
        (status.launch, status.messages) = (launch, Some(Arc::clone(messages)));
    }

    /// The messages of the current launch, or of the last one.
    fn messages(&self) -> Option<Arc<MessageQueue>> {
        self.status.lock().messages.clone()
    }

    /// The lowest rank that has reported a failure in the current launch, and its error.
    pub(super) fn failure(&self) -> Option<(usize, String)> {
        if !self.failed.load(SeqCst) {
            return None;
        }
        let status = self.status.lock();
        let left = status.left.get(&status.launch)?;
        left.iter().filter_map(|(&rank, left)| Some((rank, left.failed.clone()?))).min()
    }

    /// Whether the process of a rank has ended.
    pub(super) fn has_ended(&self, rank: usize) -> bool {
        self.status.lock().ended[rank]
    }

    /// Number of messages that a rank has sent to this one, if it has left the current launch.
    pub(super) fn sent_by(&self, rank: usize) -> Option<u64> {
        let status = self.status.lock();
        Some(status.left.get(&status.launch)?.get(&rank)?.sent[self.rank()])
    }

    /// Reports to all ranks that the program of this one has returned, and waits for their reports, which it returns in rank
    /// order. A rank that failed ends the job if other ranks do not leave too; one that only `followed` another rank's failure
    /// lets that rank do so, which knows the cause.
    pub(super) fn leave(&self, mine: &LaunchExit, followed: bool) -> Result<Vec<LaunchExit>> {
        let text = serde_json::to_vec(mine).map_err(Error::other)?;
        for rank in self.others() {
            self.notices.send(&text, rank, LEFT)?;
        }
        let since = Instant::now();
        let grace = if followed { 2 * FAILURE_GRACE } else { FAILURE_GRACE };
        let mut status = self.status.lock();
        status.left.entry(mine.launch).or_default().insert(self.rank(), mine.clone());
        loop {
            let left = &status.left[&mine.launch];
            if left.len() == self.notices.size() {
                break;
            }
            if let (Some(failed), true) = (&mine.failed, since.elapsed() > grace) {
                self.abort_job(&format!("rank {} {failed}", self.rank()));
            }
            if let Some(rank) = self.others().find(|r| status.ended[*r] && !left.contains_key(r)) {
                self.abort_job(&format!(
                    "rank {rank} ended without taking part in the launch that rank {} left",
                    self.rank()
                ));
            }
            self.changed.wait_for(&mut status, WATCH_AFTER);
        }
        let mut left = status.left.remove(&mine.launch).unwrap_or_default();
        Ok((0..self.notices.size()).filter_map(|rank| left.remove(&rank)).collect())
    }

    /// Waits for all processes to end and stops the thread. Returns whether MPI can be finalized.
    pub(super) fn end(&self) -> bool {
        if self.dying.load(SeqCst) {
            return false;
        }
        for rank in self.others() {
            if self.notices.send(&[], rank, ENDED).is_err() {
                return false;
            }
        }
        let mut status = self.status.lock();
        let me = self.rank();
        status.ended[me] = true;
        while !status.ended.iter().all(|&ended| ended) {
            self.changed.wait(&mut status);
        }
        drop(status);
        self.stop.store(true, SeqCst);
        self.thread.lock().take().is_none_or(|thread| thread.join().is_ok())
    }

    /// Requests an exposed tensor of a rank; the answer has the ticket as its tag.
    pub(super) fn request_tensor(&self, rank: usize, request: &ReadRequest) -> Result<()> {
        self.notices.send(&request.encode(), rank, READ)
    }

    /// Reports to all ranks of a group that this one no longer reads a set of exposed tensors.
    pub(super) fn release(&self, group: &[usize], set: ExposedSetId) {
        for &rank in group {
            if rank == self.rank() {
                self.exposed.release(set);
            } else if let Err(error) = self.notices.send(&set.encode(), rank, RELEASE) {
                self.abort_job(&format!("rank {}: {error}", self.rank()));
            }
        }
    }

    /// The collectives that this rank is in and has started, the message that it waits for, and how many it has sent.
    fn activity(&self) -> RankActivity {
        let waiting = |group: Arc<GroupState>| {
            let number = group.begun.load(SeqCst);
            let RankCall { call, group: ranks, site, .. } = group.pending.read(|pending| (pending.describe)())?;
            Some(ActiveCollective { group: group.identity, ranks, number, call, site })
        };
        // In this order: a collective that starts in between only shows that the rank is not late.
        let waiting = self.groups.in_collective().into_iter().filter_map(waiting).collect();
        let messages = self.messages();
        RankActivity {
            active: waiting,
            begun: self.groups.begun(),
            receiving: messages.as_ref().and_then(|messages| messages.receiving()),
            sent: messages.map(|messages| messages.sent()).unwrap_or_default(),
        }
    }

    fn work(&self) {
        let mut service_loop = ServiceLoop {
            service: self,
            sending: Vec::new(),
            seen: HashMap::new(),
            receiving: None,
            activities: HashMap::new(),
            asked: None,
        };
        let mut sleep = FIRST_SLEEP;
        while !self.stop.load(SeqCst) {
            // Without this thread no failure would be noticed any more, so its own failure ends the job.
            match catch_panic(self.rank(), || service_loop.poll()) {
                Ok(true) => sleep = FIRST_SLEEP,
                Ok(false) => sleep = (sleep * 2).min(LONGEST_SLEEP),
                Err(error) => self.abort_job(&error.of_rank(self.rank()).to_string()),
            }
            std::thread::sleep(sleep);
        }
    }
}

/// State of the service thread between polls.
struct ServiceLoop<'a> {
    service: &'a Service,
    /// Messages in flight, with the memory that they use.
    sending: Vec<(Request, Box<dyn Send>)>,
    /// Collectives that were in progress at the last poll, by group: their number, and when it was first seen.
    seen: HashMap<u64, (u64, Instant)>,
    /// The receive that was in progress at the last poll: its number, and when it was first seen.
    receiving: Option<(u64, Instant)>,
    /// Answers of the other ranks to the last query.
    activities: HashMap<usize, RankActivity>,
    /// The call for which they were queried, as group (or [`RECEIVES`]) and number, and how long it must last before the next query.
    asked: Option<(u64, u64, Duration)>,
}

impl ServiceLoop<'_> {
    /// Handles messages and checks calls in progress. Returns whether there was something to do.
    fn poll(&mut self) -> Result<bool> {
        let mut busy = false;
        while let Some(arrived) = self.service.notices.try_receive_any()? {
            self.read_notice(&arrived)?;
            busy = true;
        }
        let mut failed = None;
        self.sending.retain_mut(|(request, _)| match request.is_done() {
            Ok(done) => !done,
            Err(error) => {
                failed = Some(error);
                false
            }
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let waiting = self.service.groups.in_collective();
        self.seen.retain(|identity, _| waiting.iter().any(|group| group.identity == *identity));
        for group in waiting {
            let number = group.begun.load(SeqCst);
            let (seen, since) = self.seen.entry(group.identity).or_insert_with(|| (number, Instant::now()));
            if *seen != number {
                (*seen, *since) = (number, Instant::now());
            }
            let waited = since.elapsed();
            if waited > WATCH_AFTER {
                self.check_pending_call(&group, number, waited)?;
            }
        }
        // The waiting rank itself watches the deadline of a receive, and whether its sender leaves.
        match self.service.messages().and_then(|messages| messages.receiving()) {
            Some(ActiveReceive { number, .. }) => {
                let (seen, since) = self.receiving.get_or_insert_with(|| (number, Instant::now()));
                if *seen != number {
                    (*seen, *since) = (number, Instant::now());
                }
                let waited = since.elapsed();
                if waited > WATCH_AFTER {
                    self.check_for_deadlock(RECEIVES, number, waited)?;
                }
            }
            None => self.receiving = None,
        }
        Ok(busy || !self.sending.is_empty())
    }

    fn read_notice(&mut self, arrived: &ReceivedMessage) -> Result<()> {
        let (service, from) = (self.service, arrived.from);
        match arrived.tag {
            READ => {
                for (request, tensor) in service.exposed.answer(&arrived.bytes, from, &service.answers)? {
                    self.sending.push((request, Box::new(tensor)));
                }
            }
            RELEASE => service.exposed.release(ExposedSetId::decode(&arrived.bytes)),
            LEFT => {
                let left: LaunchExit = serde_json::from_slice(&arrived.bytes).map_err(Error::other)?;
                service.failed.fetch_or(left.failed.is_some(), SeqCst);
                service.status.lock().left.entry(left.launch).or_default().insert(from, left);
                service.changed.notify_all();
            }
            ENDED => {
                service.status.lock().ended[from] = true;
                service.changed.notify_all();
            }
            QUERY_ACTIVITY => {
                let text = serde_json::to_vec(&service.activity()).map_err(Error::other)?;
                // A blocking send could deadlock: all services may query each other at the same time.
                // SAFETY: the text is kept with the requests until they are complete.
                let requests = unsafe { service.notices.start_send(text.as_ptr(), text.len(), from, ACTIVITY)? };
                let text = Arc::new(text);
                for request in requests {
                    self.sending.push((request, Box::new(Arc::clone(&text))));
                }
            }
            ACTIVITY => {
                self.activities.insert(from, serde_json::from_slice(&arrived.bytes).map_err(Error::other)?);
            }
            other => unreachable!("notice {other}"),
        }
        Ok(())
    }

    /// Ends the job if a call cannot complete any more, or has exceeded its deadline.
    fn check_pending_call(&mut self, group: &GroupState, number: u64, waited: Duration) -> Result<()> {
        let read = group.pending.read(|pending| ((pending.describe)(), pending.deadline));
        let Some((call, deadline)) = read else { return Ok(()) };
        if let Some(rank) = self.absent_rank(group, number) {
            self.service.abort_job(&Error::PeerLeft { rank, call: Box::new(call) }.to_string());
        }
        if waited < deadline {
            return self.check_for_deadlock(group.identity, number, waited);
        }
        let others: Vec<usize> = group.ranks.iter().copied().filter(|&r| r != self.service.rank()).collect();
        self.query_all()?;
        let since = Instant::now();
        while since.elapsed() < ANSWER_TIMEOUT && others.iter().any(|r| !self.activities.contains_key(r)) {
            while let Some(arrived) = self.service.notices.try_receive_any()? {
                self.read_notice(&arrived)?;
            }
            std::thread::sleep(LONGEST_SLEEP);
        }
        if group.pending.is_pending() && group.begun.load(SeqCst) == number {
            let missing = others.into_iter().filter(|rank| self.is_missing(*rank, group, number)).collect();
            self.service.abort_job(&self.timeout(call, waited, missing));
        }
        Ok(())
    }

    /// Queries all ranks for their activity. Answers arrive as messages.
    fn query_all(&mut self) -> Result<()> {
        self.activities.clear();
        self.service.others().try_for_each(|rank| self.service.notices.send(&[], rank, QUERY_ACTIVITY))
    }

    /// Ends the job if this rank is part of a deadlock.
    fn check_for_deadlock(&mut self, group: u64, number: u64, waited: Duration) -> Result<()> {
        let next = match self.asked {
            Some((identity, asked, next)) if (identity, asked) == (group, number) => next,
            // Answers to earlier queries are not about this call.
            _ => {
                self.activities.clear();
                self.asked = Some((group, number, FIRST_QUERY));
                return Ok(());
            }
        };
        if waited > next {
            self.asked = Some((group, number, waited * 2));
            return self.query_all();
        }
        if self.activities.is_empty() {
            return Ok(());
        }
        let mut all = self.activities.clone();
        all.insert(self.service.rank(), self.service.activity());
        if let Some(cycle) = find_cycle(&all, self.service.rank()) {
            self.service.abort_job(&Error::Deadlock { cycle }.to_string());
        }
        Ok(())
    }

    /// A rank of the group that has left without starting this collective.
    fn absent_rank(&self, group: &GroupState, number: u64) -> Option<usize> {
        let status = self.service.status.lock();
        let left = status.left.get(&status.launch);
        group.ranks.iter().copied().find(|rank| match left.and_then(|left| left.get(rank)) {
            // A rank that failed ends the job itself, with its own error.
            Some(left) => left.failed.is_none() && left.begun.get(&group.identity).is_none_or(|&n| n < number),
            None => status.ended[*rank],
        })
    }

    /// Whether a rank has not started the collective with this number, or has not answered.
    fn is_missing(&self, rank: usize, group: &GroupState, number: u64) -> bool {
        let begun = |activity: &RankActivity| activity.begun.get(&group.identity).is_some_and(|&n| n >= number);
        !self.activities.get(&rank).is_some_and(begun)
    }

    /// Text of the error of a call that exceeded its deadline, with the activity of the missing ranks.
    fn timeout(&self, call: RankCall, waited: Duration, missing: Vec<usize>) -> String {
        let mut text =
            Error::Timeout { call: Box::new(call), waited, missing: missing.clone(), other_calls: Vec::new() }
                .to_string();
        if missing.is_empty() {
            text += "\nshardwise: all ranks are in this call, so it takes longer than the deadline by itself";
        }
        for rank in missing {
            text += &match self.activities.get(&rank) {
                None => format!("\nshardwise: rank {rank} does not answer"),
                Some(activity) => match activity.calls(rank).map(|call| call.to_string()).collect::<Vec<_>>() {
                    calls if calls.is_empty() => format!("\nshardwise: rank {rank} is in no call"),
                    calls => format!("\nshardwise: {}", calls.join("; ")),
                },
            };
        }
        text
    }
}
