//! One launch in this process: its settings, and whether it is still going on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use shardwise::comm::engine::{launch_ended_error, thread_number, wrong_thread_error};
use shardwise::error::RankCall;
use shardwise::mesh::Network;
use shardwise::{Error, Result};

use super::mail::Mail;
use super::parts::Limits;
use super::process::Process;

/// How long a rank that waits for a message looks all the time, and how long it sleeps between looks after that.
const SPIN: Duration = Duration::from_micros(200);
const SLEEP: Duration = Duration::from_micros(100);

pub(super) struct Launch {
    pub(super) process: &'static Process,
    pub(super) mail: Mail,
    pub(super) deadline: Duration,
    pub(super) check: bool,
    pub(super) limits: Limits,
    pub(super) network: Network,
    closed: AtomicBool,
    /// The thread that runs the program, and so makes the collectives.
    program: AtomicUsize,
}

impl Launch {
    pub(super) fn new(process: &'static Process, settings: &crate::Settings) -> Result<Self> {
        let network = Network::of_hosts(Arc::clone(&process.hosts), settings.inside, settings.across)?;
        Ok(Launch {
            process,
            mail: Mail::new(process.mail.size()),
            deadline: settings.deadline,
            check: settings.check,
            limits: Limits {
                deterministic: settings.deterministic,
                segment: settings.segment,
                largest_count: settings.largest_count,
            },
            network,
            closed: AtomicBool::new(false),
            program: AtomicUsize::new(0),
        })
    }

    /// The calling thread runs the program.
    pub(super) fn enter(&self) {
        self.program.store(thread_number(), SeqCst);
    }

    /// An error unless the calling thread runs the program: which of two threads' collectives come first would be chance, on
    /// every rank by itself.
    pub(super) fn check_thread(&self) -> Result<()> {
        if self.program.load(SeqCst) == thread_number() {
            return Ok(());
        }
        Err(wrong_thread_error(self.process.world.rank()))
    }

    pub(super) fn is_open(&self) -> bool {
        !self.closed.load(SeqCst)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, SeqCst);
    }

    /// Looks until `look` finds something that comes from a rank, but not for longer than the deadline.
    pub(super) fn wait_for<T>(
        &self,
        rank: usize,
        call: &dyn Fn() -> RankCall,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let since = Instant::now();
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            let waited = since.elapsed();
            if waited > self.deadline {
                return Err(Error::Timeout {
                    call: Box::new(call()),
                    waited,
                    missing: vec![rank],
                    other_calls: Vec::new(),
                });
            }
            if waited > SPIN {
                std::thread::sleep(SLEEP);
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// An error once the launch is over: what is left of it in the hands of the program cannot communicate.
    pub(super) fn check_open(&self, call: &dyn Fn() -> RankCall) -> Result<()> {
        if self.is_open() {
            return Ok(());
        }
        Err(Error::Rejected { call: Box::new(call()), source: Box::new(launch_ended_error()) })
    }
}
