//! What a rank waits for inside MPI, where nobody can reach it, put down where its service can read it.
//!
//! Every collective passes here, so it costs one store on the way in and one exchange on the way out.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::time::Duration;

use shardwise::error::RankCall;

/// A call under way.
pub(super) struct Pending<'a> {
    pub(super) deadline: Duration,
    pub(super) describe: &'a (dyn Fn() -> RankCall + Sync),
}

/// Where the one call of a group that may be under way is put down.
#[derive(Default)]
pub(super) struct Slot(AtomicPtr<Pending<'static>>);

/// In the slot while the service reads what was in it.
static BEING_READ: u8 = 0;

fn being_read() -> *mut Pending<'static> {
    (&raw const BEING_READ).cast_mut().cast()
}

impl Slot {
    /// Watches over `body`, which may stay inside MPI. One call at a time.
    pub(super) fn over<R>(&self, pending: &Pending<'_>, body: impl FnOnce() -> R) -> R {
        /// Takes the call out of the slot also when the body panics.
        struct Done<'a>(&'a Slot, *mut Pending<'static>);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                // The service puts it back when it has read it.
                while self.0.0.compare_exchange_weak(self.1, null_mut(), AcqRel, Relaxed).is_err() {
                    std::thread::yield_now();
                }
            }
        }
        // The lifetime ends here: what is in the slot is taken out before this function returns.
        let address = (&raw const *pending).cast_mut().cast::<Pending<'static>>();
        self.0.store(address, Release);
        let _done = Done(self, address);
        body()
    }

    /// Whether a call is under way.
    pub(super) fn is_taken(&self) -> bool {
        !self.0.load(Relaxed).is_null()
    }

    /// What `body` makes of the call under way, if there is one. Only the service asks.
    pub(super) fn read<R>(&self, body: impl FnOnce(&Pending<'_>) -> R) -> Option<R> {
        let address = self.0.load(Acquire);
        if address.is_null() || self.0.compare_exchange(address, being_read(), AcqRel, Relaxed).is_err() {
            return None;
        }
        // SAFETY: the thread that put it down does not go on before it is back in the slot.
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
    fn a_call_is_read_while_it_lasts_and_never_after() {
        let (slot, stop, read) = (Slot::default(), AtomicBool::new(false), AtomicUsize::new(0));
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
                slot.over(&Pending { deadline: Duration::ZERO, describe: &describe }, || assert!(slot.is_taken()));
            }
            stop.store(true, Release);
        });
        assert!(!slot.is_taken());
    }
}
