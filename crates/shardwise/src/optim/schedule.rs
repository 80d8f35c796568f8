//! Learning-rate schedules.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// A learning-rate schedule: linear warmup, then one of several forms of decay.
///
/// It is a function of the step and the base rate of a parameter group, so that nothing has to be stepped or saved
/// separately.
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
#[doc(alias = "WSD")]
#[doc(alias = "get_inverse_sqrt_schedule")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Schedule {
    /// The base rate at every step.
    #[default]
    Constant,
    /// Linear warmup, then linear decay.
    Linear {
        /// Steps of warmup: step `i`, from 0, has `(i + 1) / warmup` of the base rate.
        warmup: u64,
        /// Steps until the end of the decay, warmup included; the rate is constant afterwards.
        total: u64,
        /// Rate at the end, as a fraction of the base rate.
        end: f64,
    },
    /// Linear warmup, then cosine decay.
    Cosine {
        /// Steps of warmup: step `i`, from 0, has `(i + 1) / warmup` of the base rate.
        warmup: u64,
        /// Steps until the end of the decay, warmup included; the rate is constant afterwards.
        total: u64,
        /// Rate at the end, as a fraction of the base rate.
        end: f64,
    },
    /// Linear warmup, the base rate, then linear decay in the last steps (warmup, stable, decay). A run that goes on longer than planned
    /// changes nothing but the beginning of the decay.
    WarmupStableDecay {
        /// Steps of warmup: step `i`, from 0, has `(i + 1) / warmup` of the base rate.
        warmup: u64,
        /// Steps of the decay, which ends at `total`.
        decay: u64,
        /// Steps until the end of the decay; the rate is constant afterwards.
        total: u64,
        /// Rate at the end, as a fraction of the base rate.
        end: f64,
    },
    /// Linear warmup, then the inverse square root of the step: `sqrt(warmup / (step + 1))` of the base rate. It has no end.
    InverseSqrt {
        /// Steps of warmup, also the scale of the decay; at least 1 is used.
        warmup: u64,
    },
}

impl Schedule {
    /// Returns the learning rate of a step, from 0, for a base rate.
    pub fn lr(&self, step: u64, base: f64) -> f64 {
        // The decay begins after `stable` steps, of which the first ones are the warmup.
        let (warmup, stable, total, end) = match *self {
            Schedule::Constant => return base,
            Schedule::Linear { warmup, total, end } | Schedule::Cosine { warmup, total, end } => {
                (warmup, warmup, total, end)
            }
            Schedule::WarmupStableDecay { warmup, decay, total, end } => {
                (warmup, total.saturating_sub(decay).max(warmup), total, end)
            }
            Schedule::InverseSqrt { warmup } => {
                let (warmup, step) = (warmup.max(1) as f64, (step + 1) as f64);
                return base * (step / warmup).min((warmup / step).sqrt());
            }
        };
        if step < warmup {
            return base * (step + 1) as f64 / warmup as f64;
        }
        if step < stable {
            return base;
        }
        let progress = match total > stable {
            true => ((step - stable) as f64 / (total - stable) as f64).min(1.0),
            false => 1.0,
        };
        let left = match self {
            Schedule::Cosine { .. } => (1.0 + (PI * progress).cos()) / 2.0,
            _ => 1.0 - progress,
        };
        base * (end + (1.0 - end) * left)
    }
}
