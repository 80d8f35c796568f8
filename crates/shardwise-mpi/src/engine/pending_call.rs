//! The call in which a rank's program waits inside MPI, published so that the service thread can read it.
//!
//! Every collective is published, so it costs only one store at the start and one compare-exchange at the end.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use shardwise::error::RankCall;

/// A call in progress.
pub(super) struct PendingCall<'a> {
    pub(super) deadline: Duration,
    pub(super) describe: &'a (dyn Fn() -> RankCall + Sync),
}

/// The one call of a group that may be in progress, or null. The pointer is to the stack of the calling thread.
#[derive(Default)]
pub(super) struct PendingSlot(AtomicPtr<PendingCall<'static>>);

/// Its address is in the slot while the service reads the call, which keeps the calling thread from returning.
static BEING_READ: u8 = 0;

fn being_read() -> *mut PendingCall<'static> {
    (&raw const BEING_READ).cast_mut().cast()
}

impl PendingSlot {
    /// Runs `body`, which may block inside MPI, with the call published. One call at a time.
    pub(super) fn run<R>(&self, pending: &PendingCall<'_>, body: impl FnOnce() -> R) -> R {
        /// Clears the slot, also if the body panics.
        struct ClearOnDrop<'a>(&'a PendingSlot, *mut PendingCall<'static>);
        impl Drop for ClearOnDrop<'_> {
            fn drop(&mut self) {
                // Fails while the service reads the call; the service restores the pointer afterwards.
                while self.0.0.compare_exchange_weak(self.1, null_mut(), AcqRel, Relaxed).is_err() {
                    std::thread::yield_now();
                }
            }
        }
        // Erases the lifetime: the slot is cleared before this function returns.
        let address = (&raw const *pending).cast_mut().cast::<PendingCall<'static>>();
        self.0.store(address, Release);
        let _clear = ClearOnDrop(self, address);
        body()
    }

    /// Whether a call is in progress.
    pub(super) fn is_pending(&self) -> bool {
        !self.0.load(Relaxed).is_null()
    }

    /// Runs `body` with the call in progress, if there is one. Only the service thread may call it.
    pub(super) fn read<R>(&self, body: impl FnOnce(&PendingCall<'_>) -> R) -> Option<R> {
        let address = self.0.load(Acquire);
        if address.is_null() || self.0.compare_exchange(address, being_read(), AcqRel, Relaxed).is_err() {
            return None;
        }
        // SAFETY: the thread that published the call does not return before the pointer is back in the slot.
        let result = body(unsafe { &*address });
        self.0.store(address, Release);
        Some(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    #[test]
    fn a_call_is_readable_only_while_it_runs() {
        let (slot, stop, read) = (PendingSlot::default(), AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Acquire) {
                    let text = slot.read(|pending| (pending.describe)().call);
                    if let Some(text) = text {
                        assert!(text.starts_with("call "), "{text}");
                        read.fetch_add(1, Relaxed);
                    }
                }
            });
            let mut number = 0;
            while read.load(Relaxed) < 1000 {
                number += 1;
                let text = format!("call {number}");
                let describe = || RankCall { rank: 0, call: text.clone(), group: vec![0], site: String::new() };
                slot.run(&PendingCall { deadline: Duration::ZERO, describe: &describe }, || assert!(slot.is_pending()));
            }
            stop.store(true, Release);
        });
        assert!(!slot.is_pending());
    }
}
