//! A thread in every process that is there for the other ranks while this one computes or waits inside MPI: it hands out
//! exposed tensors, notes who has left, and ends the job when this rank waits for something that cannot come.

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

use super::circle::{Doing, Waiting, circle};
use super::comm::{Arrived, Comm, Request};
use super::groups::{GroupState, Groups};
use super::shelf::{ReadRequest, SetId, Shelf};

pub(super) struct Service {
    /// What services tell each other.
    notices: Comm,
    /// Answers to those who read tensors of this rank.
    pub(super) answers: Comm,
    groups: Arc<Groups>,
    pub(super) shelf: Shelf,
    known: Mutex<Known>,
    changed: Condvar,
    stop: AtomicBool,
    /// Set with the first failure that is known: collectives ask before every call.
    failed: AtomicBool,
    /// Set when this process is about to end the job.
    dying: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What is known of all ranks.
#[derive(Default)]
struct Known {
    /// The launch that is going on, or the last one.
    launch: u64,
    left: HashMap<u64, HashMap<usize, Left>>,
    /// Ranks whose processes are at their end.
    ended: Vec<bool>,
}

/// What a rank tells all others when it returns from its program.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Left {
    pub(super) launch: u64,
    /// How it failed, if it did.
    pub(super) failed: Option<String>,
    /// Collectives it has begun, by group.
    pub(super) begun: HashMap<u64, u64>,
    /// Messages it has sent to every rank.
    pub(super) sent: Vec<u64>,
}

/// Kinds of notices.
const READ: c_int = 1;
const RELEASE: c_int = 2;
const LEFT: c_int = 3;
const ENDED: c_int = 4;
const WHAT_ARE_YOU_DOING: c_int = 5;
const DOING: c_int = 6;

/// How long the thread sleeps between two looks, at first and at most.
const FIRST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_millis(2);

/// How long a call goes on before the thread asks whether it can still succeed.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long a call goes on before the thread asks all ranks what they are doing, at first; then twice as long each time, so
/// that a job with many ranks is not busy asking.
const FIRST_QUESTION: Duration = Duration::from_secs(1);

/// How long a failed rank waits for the others to fail as well before it ends the job: when all were told of one error,
/// they end the launch together.
const GRACE: Duration = Duration::from_secs(3);

/// How long other ranks have to say what they are doing.
const TIME_TO_ANSWER: Duration = Duration::from_secs(2);

impl Service {
    pub(super) fn begin(notices: Comm, answers: Comm, groups: Arc<Groups>) -> Result<Arc<Self>> {
        let known = Known { ended: vec![false; notices.size()], ..Known::default() };
        let service = Arc::new(Service {
            notices,
            answers,
            groups,
            shelf: Shelf::default(),
            known: Mutex::new(known),
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

    /// Ends the job, with the reason on the standard error.
    pub(super) fn die(&self, reason: &str) -> ! {
        self.dying.store(true, SeqCst);
        // One write, so that the lines of several ranks do not mix.
        let text = format!("shardwise: {reason}\nshardwise: rank {} ends the job\n", self.rank());
        let mut error = std::io::stderr().lock();
        let _ = error.write_all(text.as_bytes()).and_then(|()| error.flush());
        self.notices.abort()
    }

    /// A launch begins in this process.
    pub(super) fn enter(&self, launch: u64) {
        self.known.lock().launch = launch;
    }

    /// The failure of another rank in the current launch, if one has said so.
    pub(super) fn failure(&self) -> Option<(usize, String)> {
        if !self.failed.load(SeqCst) {
            return None;
        }
        let known = self.known.lock();
        let left = known.left.get(&known.launch)?;
        left.iter().filter_map(|(&rank, left)| Some((rank, left.failed.clone()?))).min()
    }

    /// Whether the process of a rank is at its end.
    pub(super) fn has_ended(&self, rank: usize) -> bool {
        self.known.lock().ended[rank]
    }

    /// How many messages a rank has sent to this one, if it has left the current launch.
    pub(super) fn sent_by(&self, rank: usize) -> Option<u64> {
        let known = self.known.lock();
        Some(known.left.get(&known.launch)?.get(&rank)?.sent[self.rank()])
    }

    /// Tells all ranks that this one has returned from its program, and waits for all to return. What every rank said.
    pub(super) fn leave(&self, mine: &Left) -> Result<Vec<Left>> {
        let text = serde_json::to_vec(mine).map_err(Error::other)?;
        for rank in self.others() {
            self.notices.send(&text, rank, LEFT)?;
        }
        let since = Instant::now();
        let mut known = self.known.lock();
        known.left.entry(mine.launch).or_default().insert(self.rank(), mine.clone());
        loop {
            let left = &known.left[&mine.launch];
            if left.len() == self.notices.size() {
                break;
            }
            if let (Some(failed), true) = (&mine.failed, since.elapsed() > GRACE) {
                self.die(&format!("rank {} {failed}", self.rank()));
            }
            if let Some(rank) = self.others().find(|r| known.ended[*r] && !left.contains_key(r)) {
                self.die(&format!(
                    "rank {rank} ended without taking part in the launch that rank {} left",
                    self.rank()
                ));
            }
            self.changed.wait_for(&mut known, PATIENCE);
        }
        let mut left = known.left.remove(&mine.launch).unwrap_or_default();
        Ok((0..self.notices.size()).filter_map(|rank| left.remove(&rank)).collect())
    }

    /// Ends the thread when all processes are at their end. Whether MPI can be ended as well.
    pub(super) fn end(&self) -> bool {
        if self.dying.load(SeqCst) {
            return false;
        }
        for rank in self.others() {
            if self.notices.send(&[], rank, ENDED).is_err() {
                return false;
            }
        }
        let mut known = self.known.lock();
        let me = self.rank();
        known.ended[me] = true;
        while !known.ended.iter().all(|&ended| ended) {
            self.changed.wait(&mut known);
        }
        drop(known);
        self.stop.store(true, SeqCst);
        self.thread.lock().take().is_none_or(|thread| thread.join().is_ok())
    }

    /// Asks the service of a rank for a tensor; the answer comes with the ticket.
    pub(super) fn ask(&self, rank: usize, request: &ReadRequest) -> Result<()> {
        self.notices.send(&request.encode(), rank, READ)
    }

    /// Tells all ranks of a group that this one has no more use for a set of exposed tensors.
    pub(super) fn release(&self, group: &[usize], set: SetId) {
        for &rank in group {
            if rank == self.rank() {
                self.shelf.release(set);
            } else if let Err(error) = self.notices.send(&set.encode(), rank, RELEASE) {
                self.die(&format!("rank {}: {error}", self.rank()));
            }
        }
    }

    /// What this rank is doing.
    fn doing(&self) -> Doing {
        let waiting = |group: Arc<GroupState>| {
            let number = group.begun.load(SeqCst);
            let RankCall { call, group: ranks, site, .. } = group.waiting.read(|pending| (pending.describe)())?;
            Some(Waiting { group: group.identity, ranks, number, call, site })
        };
        // In this order: what a rank has begun meanwhile only shows that it is not late.
        let waiting = self.groups.waiting().into_iter().filter_map(waiting).collect();
        Doing { waiting, begun: self.groups.begun() }
    }

    fn work(&self) {
        let mut rounds =
            Rounds { service: self, sending: Vec::new(), seen: HashMap::new(), doing: HashMap::new(), asked: None };
        let mut sleep = FIRST_SLEEP;
        while !self.stop.load(SeqCst) {
            // Without this thread nobody would notice anything any more.
            match catch_panic(self.rank(), || rounds.turn()) {
                Ok(true) => sleep = FIRST_SLEEP,
                Ok(false) => sleep = (sleep * 2).min(LONGEST_SLEEP),
                Err(error) => self.die(&error.of_rank(self.rank()).to_string()),
            }
            std::thread::sleep(sleep);
        }
    }
}

/// The thread at work.
struct Rounds<'a> {
    service: &'a Service,
    /// What is on its way to other ranks, with the memory that must stay until it is there.
    sending: Vec<(Request, Box<dyn Send>)>,
    /// Collectives that were under way at the last look, by group: their numbers, and when they were first seen.
    seen: HashMap<u64, (u64, Instant)>,
    /// What others have said they are doing since they were last asked.
    doing: HashMap<usize, Doing>,
    /// The call for which they were asked, as group and number, and how long it is to last before they are asked again.
    asked: Option<(u64, u64, Duration)>,
}

impl Rounds<'_> {
    /// Does what there is to do. Whether there was something.
    fn turn(&mut self) -> Result<bool> {
        let mut busy = false;
        while let Some(arrived) = self.service.notices.arrived()? {
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
        let waiting = self.service.groups.waiting();
        self.seen.retain(|identity, _| waiting.iter().any(|group| group.identity == *identity));
        for group in waiting {
            let number = group.begun.load(SeqCst);
            let (seen, since) = self.seen.entry(group.identity).or_insert_with(|| (number, Instant::now()));
            if *seen != number {
                (*seen, *since) = (number, Instant::now());
            }
            let waited = since.elapsed();
            if waited > PATIENCE {
                self.look_after(&group, number, waited)?;
            }
        }
        Ok(busy || !self.sending.is_empty())
    }

    fn read_notice(&mut self, arrived: &Arrived) -> Result<()> {
        let (service, from) = (self.service, arrived.from);
        match arrived.tag {
            READ => {
                for (request, tensor) in service.shelf.answer(&arrived.bytes, from, &service.answers)? {
                    self.sending.push((request, Box::new(tensor)));
                }
            }
            RELEASE => service.shelf.release(SetId::decode(&arrived.bytes)),
            LEFT => {
                let left: Left = serde_json::from_slice(&arrived.bytes).map_err(Error::other)?;
                service.failed.fetch_or(left.failed.is_some(), SeqCst);
                service.known.lock().left.entry(left.launch).or_default().insert(from, left);
                service.changed.notify_all();
            }
            ENDED => {
                service.known.lock().ended[from] = true;
                service.changed.notify_all();
            }
            WHAT_ARE_YOU_DOING => {
                let text = serde_json::to_vec(&service.doing()).map_err(Error::other)?;
                // Not a call that waits: all services may ask each other at the same moment.
                // SAFETY: the text is kept with the request until it is done; it is short enough for one.
                let requests = unsafe { service.notices.start_send(text.as_ptr(), text.len(), from, DOING)? };
                let text = Arc::new(text);
                for request in requests {
                    self.sending.push((request, Box::new(Arc::clone(&text))));
                }
            }
            DOING => {
                self.doing.insert(from, serde_json::from_slice(&arrived.bytes).map_err(Error::other)?);
            }
            other => unreachable!("notice {other}"),
        }
        Ok(())
    }

    /// Ends the job if a call cannot succeed any more, or has taken too long.
    fn look_after(&mut self, group: &GroupState, number: u64, waited: Duration) -> Result<()> {
        let read = group.waiting.read(|pending| ((pending.describe)(), pending.deadline));
        let Some((call, deadline)) = read else { return Ok(()) };
        if let Some(rank) = self.never_comes(group, number) {
            self.service.die(&Error::PeerLeft { rank, call: Box::new(call) }.to_string());
        }
        if waited < deadline {
            return self.look_for_circle(group, number, waited);
        }
        let others: Vec<usize> = group.ranks.iter().copied().filter(|&r| r != self.service.rank()).collect();
        self.ask_all()?;
        let since = Instant::now();
        while since.elapsed() < TIME_TO_ANSWER && others.iter().any(|r| !self.doing.contains_key(r)) {
            while let Some(arrived) = self.service.notices.arrived()? {
                self.read_notice(&arrived)?;
            }
            std::thread::sleep(LONGEST_SLEEP);
        }
        if group.waiting.is_taken() && group.begun.load(SeqCst) == number {
            let missing = others.into_iter().filter(|rank| self.is_missing(*rank, group, number)).collect();
            self.service.die(&self.timeout(call, waited, missing));
        }
        Ok(())
    }

    /// Asks all ranks what they are doing. Answers come as notices.
    fn ask_all(&mut self) -> Result<()> {
        self.doing.clear();
        self.service.others().try_for_each(|rank| self.service.notices.send(&[], rank, WHAT_ARE_YOU_DOING))
    }

    /// Ends the job if ranks wait for each other in a circle, this one among them.
    fn look_for_circle(&mut self, group: &GroupState, number: u64, waited: Duration) -> Result<()> {
        let next = match self.asked {
            Some((identity, asked, next)) if (identity, asked) == (group.identity, number) => next,
            // Answers to earlier questions say nothing about this call.
            _ => {
                self.doing.clear();
                self.asked = Some((group.identity, number, FIRST_QUESTION));
                return Ok(());
            }
        };
        if waited > next {
            self.asked = Some((group.identity, number, waited * 2));
            return self.ask_all();
        }
        if self.doing.is_empty() {
            return Ok(());
        }
        let mut all = self.doing.clone();
        all.insert(self.service.rank(), self.service.doing());
        if let Some(circle) = circle(&all, self.service.rank()) {
            self.service.die(&Error::Deadlock { cycle: circle }.to_string());
        }
        Ok(())
    }

    /// A rank that is needed and has already left without taking part.
    fn never_comes(&self, group: &GroupState, number: u64) -> Option<usize> {
        let known = self.service.known.lock();
        let left = known.left.get(&known.launch);
        group.ranks.iter().copied().find(|rank| match left.and_then(|left| left.get(rank)) {
            // One that failed ends the job itself, with its own error.
            Some(left) => left.failed.is_none() && left.begun.get(&group.identity).is_none_or(|&n| n < number),
            None => known.ended[*rank],
        })
    }

    /// Whether a rank has not come to the collective with this number, or does not say so.
    fn is_missing(&self, rank: usize, group: &GroupState, number: u64) -> bool {
        let begun = |doing: &Doing| doing.begun.get(&group.identity).is_some_and(|&n| n >= number);
        !self.doing.get(&rank).is_some_and(begun)
    }

    /// The error of a call that took too long, with what the others are doing.
    fn timeout(&self, call: RankCall, waited: Duration, missing: Vec<usize>) -> String {
        let mut text =
            Error::Timeout { call: Box::new(call), waited, missing: missing.clone(), other_calls: Vec::new() }
                .to_string();
        if missing.is_empty() {
            text += "\nshardwise: all ranks are in this call, so it takes longer than the deadline by itself";
        }
        for rank in missing {
            text += &match self.doing.get(&rank) {
                None => format!("\nshardwise: rank {rank} does not answer"),
                Some(doing) if doing.waiting.is_empty() => format!("\nshardwise: rank {rank} is in no call"),
                Some(doing) => {
                    let calls = doing.waiting.iter().map(|waiting| waiting.of_rank(rank).to_string());
                    format!("\nshardwise: {}", calls.collect::<Vec<_>>().join("; "))
                }
            };
        }
        text
    }
}
