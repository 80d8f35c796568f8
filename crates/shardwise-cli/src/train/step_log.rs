//! The numbers of a step that are logged and shown.

use serde::Serialize;

/// A step in the log.
#[derive(Serialize, Clone)]
pub(super) struct StepLog {
    /// Counted from 1.
    pub(super) step: u64,
    pub(super) loss: f64,
    /// Gradient norm before clipping; none without clipping.
    pub(super) grad_norm: Option<f64>,
    pub(super) lr: f64,
    pub(super) ms: f64,
    pub(super) tokens_per_s: f64,
    /// Fraction of the time in collectives.
    pub(super) communication: f64,
    /// Mean over the ranks of the fraction of the time that they waited for other ranks.
    pub(super) waiting: f64,
    pub(super) ranks: Vec<RankLog>,
}

/// A rank in the log of a step.
#[derive(Serialize, Clone)]
pub(super) struct RankLog {
    pub(super) ms: f64,
    /// Fraction of the time of waiting for other ranks.
    pub(super) waiting: f64,
    pub(super) memory_bytes: usize,
    /// The most since the run began.
    pub(super) peak_bytes: usize,
}
