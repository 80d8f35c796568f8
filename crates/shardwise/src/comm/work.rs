//! How much a rank would compute.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Elementary operations of a rank, counted in dry runs: a real run measures its time.
#[derive(Debug, Clone, Default)]
pub(crate) struct Work(Arc<AtomicU64>);

impl Work {
    pub(crate) fn add(&self, flops: u64) {
        self.0.fetch_add(flops, Relaxed);
    }

    pub(super) fn total(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
