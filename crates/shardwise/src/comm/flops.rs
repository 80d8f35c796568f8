//! Floating-point operations of a rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts operations in dry runs, where planners need an estimate; a real run can measure its time instead.
#[derive(Debug, Clone, Default)]
pub(crate) struct FlopCounter(Arc<AtomicU64>);

impl FlopCounter {
    pub(crate) fn add(&self, flops: u64) {
        self.0.fetch_add(flops, Relaxed);
    }

    pub(super) fn total(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
