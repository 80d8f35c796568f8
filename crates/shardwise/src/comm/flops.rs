//! Floating-point operations of a rank.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::module_scope::current_phase;
use crate::rank_context::Phase;

/// Counts operations in dry runs, where planners need an estimate; a real run can measure its time instead.
#[derive(Debug, Clone, Default)]
pub(crate) struct FlopCounter(Arc<[AtomicU64; Phase::ALL.len()]>);

impl FlopCounter {
    /// Adds to the operations of the phase that this thread is in.
    pub(crate) fn add(&self, flops: u64) {
        self.0[current_phase() as usize].fetch_add(flops, Relaxed);
    }

    pub(crate) fn in_phase(&self, phase: Phase) -> u64 {
        self.0[phase as usize].load(Relaxed)
    }

    pub(crate) fn total(&self) -> u64 {
        Phase::ALL.iter().map(|&phase| self.in_phase(phase)).sum()
    }
}
