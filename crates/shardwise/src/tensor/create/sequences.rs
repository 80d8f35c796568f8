//! The sequences of numbers that `arange`, `linspace` and `logspace` fill tensors with.

use std::ops::Range;

use crate::error::{ErrorKind, Result};
use crate::tensor::Number;

/// Longer sequences are taken for a mistake. Below it, the length of a range in f64 is exact enough to be a tensor's size.
const MAX_COUNT: f64 = 1e18;

/// The numbers from `start` to before `end` in steps of `step`; see [`DTensor::arange`](crate::tensor::DTensor::arange).
///
/// A range such as `0..12` or `0.5..4.5` converts into one with a step of 1.
#[derive(Debug, Clone, Copy)]
pub struct Arange {
    /// The first number.
    pub start: Number,
    /// Where the numbers end; it is not one of them.
    pub end: Number,
    /// The distance of neighbours, which may be negative.
    pub step: Number,
}

impl Arange {
    /// The numbers from `start` to before `end` in steps of `step`.
    pub fn new(start: impl Into<Number>, end: impl Into<Number>, step: impl Into<Number>) -> Self {
        Arange { start: start.into(), end: end.into(), step: step.into() }
    }

    /// How many numbers there are; exact for integers.
    pub(in crate::tensor) fn count(&self) -> Result<usize> {
        let Arange { start, end, step } = *self;
        let count = match (start, end, step) {
            (Number::Integer(start), Number::Integer(end), Number::Integer(step)) if step != 0 => {
                let (length, step) = (i128::from(end) - i128::from(start), i128::from(step));
                (length.div_euclid(step) + i128::from(length.rem_euclid(step) != 0 && step > 0)).max(0) as f64
            }
            _ => ((end.to_f64() - start.to_f64()) / step.to_f64()).ceil(),
        };
        if count.is_finite() && step.to_f64() != 0.0 && count <= MAX_COUNT {
            return Ok(count.max(0.0) as usize);
        }
        Err(ErrorKind::Argument.error(
            "range",
            format!("{} to {} in steps of {}", start.to_f64(), end.to_f64(), step.to_f64()),
            "finite bounds and a step that leads from one to the other",
            "correct the bounds",
        ))
    }

    /// The number at a position: computed in i64 with wrapping for an integer type, in f64 otherwise.
    pub(in crate::tensor) fn at(&self, i: u64, is_float: bool) -> Number {
        match is_float {
            true => Number::Real(self.start.to_f64() + i as f64 * self.step.to_f64()),
            false => {
                let offset = (i as i64).wrapping_mul(self.step.to_i64());
                Number::Integer(self.start.to_i64().wrapping_add(offset))
            }
        }
    }
}

impl<T: Into<Number>> From<Range<T>> for Arange {
    fn from(range: Range<T>) -> Self {
        Arange::new(range.start, range.end, 1)
    }
}

/// `steps` numbers at equal distances from `start` to `end`, both included; see
/// [`DTensor::linspace`](crate::tensor::DTensor::linspace).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Linspace {
    /// The first number.
    pub start: f64,
    /// The last number.
    pub end: f64,
    /// How many numbers there are.
    pub steps: usize,
}

impl Linspace {
    pub(in crate::tensor) fn at(&self, i: u64) -> f64 {
        let Linspace { start, end, steps } = *self;
        match steps {
            0 | 1 => start,
            // From the nearer end, so that both ends are exact.
            _ if (i as usize) < steps / 2 => start + (end - start) / (steps - 1) as f64 * i as f64,
            _ => end - (end - start) / (steps - 1) as f64 * (steps - 1 - i as usize) as f64,
        }
    }
}

/// `steps` powers of `base` whose exponents are at equal distances from `start` to `end`, both included; see
/// [`DTensor::logspace`](crate::tensor::DTensor::logspace).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logspace {
    /// The first exponent.
    pub start: f64,
    /// The last exponent.
    pub end: f64,
    /// How many numbers there are.
    pub steps: usize,
    /// The number whose powers are taken; 10 is PyTorch's default.
    pub base: f64,
}

impl Logspace {
    pub(in crate::tensor) fn at(&self, i: u64) -> f64 {
        let exponents = Linspace { start: self.start, end: self.end, steps: self.steps };
        self.base.powf(exponents.at(i))
    }
}
