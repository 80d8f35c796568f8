//! One launch in this process: its settings, its messages, and whether it is still open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use shardwise::comm::engine::{launch_ended_error, thread_number, while_waiting, wrong_thread_error};
use shardwise::error::RankCall;
use shardwise::mesh::Network;
use shardwise::{Error, Result};

use super::message_buffer::CollectiveLimits;
use super::messages::MessageQueue;
use super::process::Process;

/// How long a rank that waits for a message polls without sleeping, and how long it sleeps between polls after that. Short
/// waits keep the latency of a message; long ones leave the core to the other ranks.
const SPIN: Duration = Duration::from_micros(200);
const SLEEP: Duration = Duration::from_micros(100);

pub(super) struct Launch {
    pub(super) process: &'static Process,
    pub(super) messages: Arc<MessageQueue>,
    pub(super) deadline: Duration,
    pub(super) check: bool,
    pub(super) limits: CollectiveLimits,
    pub(super) network: Network,
    closed: AtomicBool,
    /// The thread that runs the program, the only one that may start collectives.
    program_thread: AtomicUsize,
}

impl Launch {
    pub(super) fn new(process: &'static Process, settings: &crate::Settings) -> Result<Self> {
        let network = Network::of_hosts(Arc::clone(&process.hosts), settings.inside, settings.across)?;
        Ok(Launch {
            process,
            messages: Arc::new(MessageQueue::new(process.message_comm.size())),
            deadline: settings.deadline,
            check: settings.check,
            limits: CollectiveLimits {
                deterministic: settings.deterministic,
                segment: settings.segment,
                largest_count: settings.largest_count,
            },
            network,
            closed: AtomicBool::new(false),
            program_thread: AtomicUsize::new(0),
        })
    }

    /// Records the calling thread as the one that runs the program.
    pub(super) fn enter(&self) {
        self.program_thread.store(thread_number(), SeqCst);
    }

    /// Checks that the calling thread is the one that runs the program: the order of collectives of two threads would differ
    /// between ranks by chance.
    pub(super) fn check_thread(&self) -> Result<()> {
        if self.program_thread.load(SeqCst) == thread_number() {
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

    /// Polls until `poll` returns something that `rank` sends, or fails with a timeout after the deadline.
    pub(super) fn wait_for<T>(
        &self,
        rank: usize,
        call: &dyn Fn() -> RankCall,
        mut poll: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let _waiting = while_waiting();
        let since = Instant::now();
        loop {
            if let Some(found) = poll()? {
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

    /// Checks that the launch is open: a `World` or tensor that outlives its launch cannot communicate.
    pub(super) fn check_open(&self, call: &dyn Fn() -> RankCall) -> Result<()> {
        if self.is_open() {
            return Ok(());
        }
        Err(Error::Rejected { call: Box::new(call()), source: Box::new(launch_ended_error()) })
    }
}
