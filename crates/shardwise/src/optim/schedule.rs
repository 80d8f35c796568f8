//! Learning rates that change from step to step.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// What becomes of a learning rate as steps go by.
///
/// ```
/// use shardwise::optim::Schedule;
///
/// let schedule = Schedule::Linear { warmup: 2, total: 6, end: 0.5 };
/// let rates: Vec<f64> = (0..8).map(|step| schedule.lr(step, 0.1)).collect();
/// let expected = [0.05, 0.1, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.05];
/// assert!(rates.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12));
/// ```
#[doc(alias = "LRScheduler")]
#[doc(alias = "LambdaLR")]
#[doc(alias = "CosineAnnealingLR")]
#[doc(alias = "LinearLR")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Schedule {
    /// It stays.
    #[default]
    Constant,
    /// It rises for some steps to its full value and then falls in a line.
    Linear {
        /// Steps until the full value is reached; the first step already takes a part of it.
        warmup: u64,
        /// Steps until it has fallen.
        total: u64,
        /// What is left of it in the end, as a part of the full value.
        end: f64,
    },
    /// It rises for some steps to its full value and then falls as half a wave of a cosine.
    Cosine {
        /// Steps until the full value is reached; the first step already takes a part of it.
        warmup: u64,
        /// Steps until it has fallen.
        total: u64,
        /// What is left of it in the end, as a part of the full value.
        end: f64,
    },
}

impl Schedule {
    /// The learning rate of a step, counted from 0, whose full value is `base`.
    pub fn lr(&self, step: u64, base: f64) -> f64 {
        let (warmup, total, end) = match *self {
            Schedule::Constant => return base,
            Schedule::Linear { warmup, total, end } | Schedule::Cosine { warmup, total, end } => (warmup, total, end),
        };
        if step < warmup {
            return base * (step + 1) as f64 / warmup as f64;
        }
        let fallen = match total > warmup {
            true => ((step - warmup) as f64 / (total - warmup) as f64).min(1.0),
            false => 1.0,
        };
        let left = match self {
            Schedule::Cosine { .. } => (1.0 + (PI * fallen).cos()) / 2.0,
            _ => 1.0 - fallen,
        };
        base * (end + (1.0 - end) * left)
    }
}
