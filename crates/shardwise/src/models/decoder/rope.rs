//! Angles of rotary position embedding, with the ways in which models stretch them for longer sequences.

use std::f64::consts::TAU;
use std::sync::Arc;

use crate::ops::RotaryFrequencies;

/// A rotary position embedding.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::models) struct Rope {
    /// Base of the frequencies, `rope_theta`.
    pub(in crate::models) base: f64,
    /// Features of a head that turn, the first ones; with an odd number one more does.
    pub(in crate::models) size: usize,
    pub(in crate::models) scaling: RopeScaling,
}

/// How frequencies are changed; `rope_type` in configurations.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::models) enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// A larger base for sequences longer than `positions`.
    Dynamic {
        factor: f64,
        positions: usize,
    },
    /// Low frequencies divided by `factor`, with a ramp to the frequencies that stay.
    Yarn {
        factor: f64,
        original: f64,
        beta_fast: f64,
        beta_slow: f64,
        truncate: bool,
        attention_factor: f64,
    },
    /// Low frequencies divided by `factor`, with a ramp in terms of wavelengths.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    /// One divisor per frequency, and another one each for sequences longer than `original`.
    Long {
        short: Vec<f64>,
        long: Vec<f64>,
        original: usize,
        attention_factor: f64,
    },
}

impl Rope {
    /// Whether the angles depend on the length of the sequence.
    pub(in crate::models) fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. } | RopeScaling::Long { .. })
    }

    /// The longest sequence that has the angles of short ones, if longer sequences have different angles.
    pub(in crate::models) fn short_limit(&self) -> Option<usize> {
        match &self.scaling {
            RopeScaling::Long { original, .. } => Some(*original),
            _ => None,
        }
    }

    /// The angles per position for a sequence of `length` positions.
    pub(in crate::models) fn frequencies(&self, length: usize) -> Arc<RotaryFrequencies> {
        let size = self.size as f64;
        let powers = |base: f64| {
            (0..self.size.div_ceil(2)).map(move |i| base.powf(-2.0 * i as f64 / size)).collect::<Vec<f64>>()
        };
        let plain = powers(self.base);
        let (frequencies, scale) = match &self.scaling {
            RopeScaling::None => (plain, 1.0),
            RopeScaling::Linear { factor } => (plain.iter().map(|f| f / factor).collect(), 1.0),
            RopeScaling::Dynamic { factor, positions } => {
                let stretched = factor * length.max(*positions) as f64 / *positions as f64 - (factor - 1.0);
                (powers(self.base * stretched.powf(size / (size - 2.0))), 1.0)
            }
            RopeScaling::Llama3 { factor, low, high, original } => {
                let changed = |&f: &f64| {
                    let wavelength = TAU / f;
                    if wavelength < original / high {
                        f
                    } else if wavelength > original / low {
                        f / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * f / factor + smooth * f
                    }
                };
                (plain.iter().map(changed).collect(), 1.0)
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate, attention_factor } => {
                // The pair of features that turns this often within the original context.
                let pair = |turns: f64| size * (original / (turns * TAU)).ln() / (2.0 * self.base.ln());
                let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(size - 1.0));
                if low == high {
                    high += 0.001;
                }
                let changed = |(i, f): (usize, &f64)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * ramp + f * (1.0 - ramp)
                };
                (plain.iter().enumerate().map(changed).collect(), *attention_factor)
            }
            RopeScaling::Long { short, long, original, attention_factor } => {
                let divisors = if length > *original { long } else { short };
                (plain.iter().zip(divisors).map(|(f, divisor)| f / divisor).collect(), *attention_factor)
            }
        };
        Arc::new(RotaryFrequencies::new(frequencies, scale))
    }
}
