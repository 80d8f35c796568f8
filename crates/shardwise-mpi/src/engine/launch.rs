//! One launch in this process: its settings, and whether it is still going on.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use shardwise::error::RankCall;
use shardwise::{Error, Result};

use super::mail::Mail;
use super::parts::Limits;
use super::process::Process;

pub(super) struct Launch {
    pub(super) process: &'static Process,
    pub(super) mail: Mail,
    pub(super) deadline: Duration,
    pub(super) check: bool,
    pub(super) limits: Limits,
    closed: AtomicBool,
}

impl Launch {
    pub(super) fn new(process: &'static Process, settings: &crate::Settings) -> Self {
        Launch {
            process,
            mail: Mail::new(process.mail.size()),
            deadline: settings.deadline,
            check: settings.check,
            limits: Limits {
                deterministic: settings.deterministic,
                segment: settings.segment,
                largest_count: settings.largest_count,
            },
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        !self.closed.load(SeqCst)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, SeqCst);
    }

    /// An error once the launch is over: what is left of it in the hands of the program cannot communicate.
    pub(super) fn check_open(&self, call: &dyn Fn() -> RankCall) -> Result<()> {
        if self.is_open() {
            return Ok(());
        }
        let source = Error::invalid(
            "call",
            "one after the launch had ended",
            "a world whose ranks are still there",
            "communicate inside the program that is launched",
        );
        Err(Error::Rejected { call: Box::new(call()), source: Box::new(source) })
    }
}
