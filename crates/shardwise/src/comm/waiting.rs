//! The time that a rank waits for other ranks.

use std::time::Instant;

use crate::rank_context::rank_context_if_alive;

/// Counts the time until the result is dropped as waiting, in [`CommRecord::waiting`](super::CommRecord::waiting). Engines hold one
/// while they wait for another rank.
#[must_use]
pub fn while_waiting() -> WaitingTime {
    WaitingTime(Instant::now())
}

/// See [`while_waiting`].
pub struct WaitingTime(Instant);

impl Drop for WaitingTime {
    fn drop(&mut self) {
        rank_context_if_alive(|context| context.waited.set(context.waited.get() + self.0.elapsed()));
    }
}
