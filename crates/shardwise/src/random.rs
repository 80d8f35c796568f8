//! Random tensors that do not depend on the layout: each element is a function of seed, draw and global index.
//!
//! Elements of draw `o` of a generator with seed `s` are computed by Philox4x32-10 with key `s` and a counter of their index and
//! `o`. So every layout, mesh and world size gives the same bits without communication. PyTorch's
//! `OffsetBasedRNGTracker` guarantees less: that replicas agree and shards differ.
//! Philox is implemented here because generators of other crates are streams: they return the next number, not the number
//! of an element.

use std::f64::consts::TAU;
use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, Result};
#[doc(inline)]
pub use shardwise_kernels::philox4x32_10;
use shardwise_kernels::{RandomDraw, RandomNumbers};

/// The state of a [`Generator`], as stored in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GeneratorState {
    /// The seed, which is the key of Philox.
    pub seed: u64,
    /// Number of draws so far.
    pub offset: u64,
}

impl From<GeneratorState> for RandomDraw {
    fn from(state: GeneratorState) -> Self {
        RandomDraw { seed: state.seed, draw: state.offset }
    }
}

/// The random state of a mesh: a seed and the number of draws so far.
///
/// Clones share the state. Each random tensor is one draw, however large it is. All ranks must draw in the same order;
/// factories check it.
#[doc(alias = "OffsetBasedRNGTracker")]
#[derive(Debug, Clone)]
pub struct Generator(Arc<Mutex<GeneratorState>>);

impl Generator {
    /// Creates a generator with a seed and no draws.
    pub fn new(seed: u64) -> Self {
        Generator(Arc::new(Mutex::new(GeneratorState { seed, offset: 0 })))
    }

    /// Seed and number of draws so far.
    #[doc(alias = "get_rng_state")]
    pub fn state(&self) -> GeneratorState {
        *self.0.lock()
    }

    /// Restores a state, such as from a checkpoint. Local, but all ranks must restore the same.
    #[doc(alias = "set_rng_state")]
    pub fn set_state(&self, state: GeneratorState) {
        *self.0.lock() = state;
    }

    /// Restarts the generator with a seed. Local, but all ranks must pass the same.
    pub fn manual_seed(&self, seed: u64) {
        self.set_state(GeneratorState { seed, offset: 0 });
    }

    /// Returns the state for one draw and advances to the next.
    pub(crate) fn draw(&self) -> GeneratorState {
        let mut state = self.0.lock();
        let drawn = *state;
        state.offset = state.offset.wrapping_add(1);
        drawn
    }
}

/// The distribution of the elements of a random tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Distribution {
    /// Uniform in `low..high`.
    Uniform {
        /// Inclusive lower bound.
        low: f64,
        /// Exclusive upper bound, up to rounding to the element type.
        high: f64,
    },
    /// Normal distribution.
    #[doc(alias = "randn")]
    Normal {
        /// Mean of the distribution.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// Normal distribution, truncated at `width` standard deviations from the mean.
    #[doc(alias = "trunc_normal_")]
    TruncatedNormal {
        /// Mean of the distribution.
        mean: f64,
        /// Standard deviation before truncation.
        std: f64,
        /// Largest distance from the mean in standard deviations, at most 8.
        width: f64,
    },
    /// One with probability `p`, else zero.
    Bernoulli {
        /// The probability of a one.
        p: f64,
    },
    /// Uniform integers in `low..high`.
    #[doc(alias = "randint")]
    Integers {
        /// Inclusive lower bound.
        low: i64,
        /// Exclusive upper bound.
        high: i64,
    },
    /// A random permutation of `0..n`.
    #[doc(alias = "randperm")]
    Permutation {
        /// The number of elements.
        n: u64,
    },
}

impl Distribution {
    /// Checks the parameters.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for parameters that are out of range or not finite.
    pub fn check(&self) -> Result<()> {
        let (good, needed) = match *self {
            Distribution::Uniform { low, high } => (low <= high && (high - low).is_finite(), "finite low <= high"),
            Distribution::Normal { mean, std } => {
                (mean.is_finite() && std >= 0.0 && std.is_finite(), "a finite mean and std >= 0")
            }
            Distribution::TruncatedNormal { mean, std, width } => {
                let finite = mean.is_finite() && std.is_finite() && std >= 0.0;
                (finite && width > 0.0 && width <= 8.0, "a finite mean, std >= 0 and a width above 0, 8 at most")
            }
            Distribution::Bernoulli { p } => ((0.0..=1.0).contains(&p), "a probability from 0 to 1"),
            Distribution::Integers { low, high } => (low < high, "low < high"),
            Distribution::Permutation { .. } => (true, ""),
        };
        if good {
            return Ok(());
        }
        Err(ErrorKind::Argument.error("distribution", format!("{self:?}"), needed, "correct the parameters"))
    }

    /// An error if the distribution cannot fill a tensor of this shape, or if the element type cannot represent its values
    /// exactly.
    pub(crate) fn check_fit(&self, shape: &[usize], dtype: DType) -> Result<()> {
        let count = shape.iter().product::<usize>() as u64;
        let (low, high) = match *self {
            Distribution::Permutation { n } if n != count => {
                return Err(ErrorKind::shape(shape).error(
                    "permutation",
                    format!("{n} numbers for shape {shape:?}"),
                    format!("{count}, one per element"),
                    "permute as many numbers as the tensor has elements",
                ));
            }
            Distribution::Permutation { n } => (0, n.saturating_sub(1) as i64),
            Distribution::Integers { low, high } => (low, high - 1),
            _ => return Ok(()),
        };
        // The range of integers that the type represents exactly.
        let (least, most) = match dtype {
            DType::U8 => (0, i64::from(u8::MAX)),
            DType::U32 => (0, i64::from(u32::MAX)),
            DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
            DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
            DType::I64 => (i64::MIN, i64::MAX),
            float => (-1 << mantissa_bits(float), 1 << mantissa_bits(float)),
        };
        if least <= low && high <= most {
            return Ok(());
        }
        Err(ErrorKind::dtype(dtype).error(
            "element type",
            format!("{} for integers from {low} to {high}", dtype.as_str()),
            format!("a type that holds them; {} holds {least} to {most}", dtype.as_str()),
            "use a wider type or a smaller range",
        ))
    }

    /// The distribution as one that is computed in vectors of f32; `None` for element types and distributions that need more
    /// digits, which [`at`](Self::at) has.
    pub(crate) fn in_vectors(&self, dtype: DType) -> Option<RandomNumbers> {
        match *self {
            // One bit decides, whatever the type.
            Distribution::Bernoulli { p } => Some(RandomNumbers::Choice { probability: p, value: 1.0 }),
            _ if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) => None,
            Distribution::Uniform { low, high } => {
                Some(RandomNumbers::Uniform { low: low as f32, high: high as f32, bits: mantissa_bits(dtype) })
            }
            Distribution::Normal { mean, std } => Some(RandomNumbers::Normal { mean: mean as f32, std: std as f32 }),
            _ => None,
        }
    }

    /// The value of the element at `index`, for an element type of `precision` bits. A uniform number has no more bits, so
    /// that rounding does not reach the upper bound.
    pub(crate) fn at(&self, draw: GeneratorState, index: u64, precision: u32) -> f64 {
        match *self {
            Distribution::TruncatedNormal { mean, std, width } => {
                // Inverse transform: a uniform number between the probabilities of the two ends, mapped to its quantile.
                let words = block(draw, index);
                let (low, high) = (normal_cdf(-width), normal_cdf(width));
                let share = low + to_unit(words[0], words[1]) * (high - low);
                mean + std * normal_quantile(share).clamp(-width, width)
            }
            Distribution::Uniform { low, high } => {
                let words = block(draw, index);
                let bits = (u64::from(words[0]) | u64::from(words[1]) << 32) >> (64 - precision);
                low + bits as f64 / (1u64 << precision) as f64 * (high - low)
            }
            Distribution::Normal { mean, std } => {
                // Box-Muller; the first number is in (0, 1].
                let words = block(draw, index);
                let radius = (-2.0 * (1.0 - to_unit(words[0], words[1])).ln()).sqrt();
                mean + std * radius * (TAU * to_unit(words[2], words[3])).cos()
            }
            Distribution::Bernoulli { .. } => unreachable!("computed in vectors"),
            Distribution::Integers { .. } | Distribution::Permutation { .. } => self.integer_at(draw, index) as f64,
        }
    }

    /// The value of the element at `index` as an integer; continuous distributions are rounded toward zero.
    pub(crate) fn integer_at(&self, draw: GeneratorState, index: u64) -> i64 {
        match *self {
            Distribution::Integers { low, high } => {
                let words = block(draw, index);
                let bits = u128::from(words[0]) | u128::from(words[1]) << 32;
                let range = high.wrapping_sub(low) as u64;
                low.wrapping_add(((bits * u128::from(range)) >> 64) as i64)
            }
            Distribution::Permutation { n } => permuted(draw, index, n) as i64,
            _ => self.at(draw, index, mantissa_bits(DType::F64)) as i64,
        }
    }
}

/// Bits of precision of a floating-point type.
pub(crate) fn mantissa_bits(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 8,
        DType::F16 => 11,
        DType::F32 => 24,
        _ => 53,
    }
}

/// 53 bits of two words as a number in `0..1`.
fn to_unit(low: u32, high: u32) -> f64 {
    let bits = u64::from(low) | u64::from(high) << 32;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The four random words of the element at `index`.
fn block(draw: GeneratorState, index: u64) -> [u32; 4] {
    let halves = |x: u64| (x as u32, (x >> 32) as u32);
    let ((i0, i1), (o0, o1), (k0, k1)) = (halves(index), halves(draw.offset), halves(draw.seed));
    philox4x32_10([i0, i1, o0, o1], [k0, k1])
}

/// The image of `index` under a random permutation of `0..n`: a Feistel network on the smallest even number of bits that
/// hold `n`, applied until the result is below `n` (cycle walking). Independent of the other elements, hence local.
fn permuted(draw: GeneratorState, index: u64, n: u64) -> u64 {
    let half_bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half_bits, value & mask);
        // Four rounds already give a pseudorandom permutation; eight leave a margin at little cost.
        for round in 0..8u64 {
            let words = block(draw, right | round << 60);
            (left, right) = (right, left ^ (u64::from(words[0]) | u64::from(words[1]) << 32) & mask);
        }
        value = left << half_bits | right;
        if value < n {
            return value;
        }
    }
}

/// The cumulative distribution function of the standard normal distribution.
fn normal_cdf(z: f64) -> f64 {
    0.5 * libm::erfc(-z * std::f64::consts::FRAC_1_SQRT_2)
}

/// The inverse of [`normal_cdf`], by Newton's method from 0. The function is convex on one side of 0 and concave on the
/// other, so the steps approach the root from one side and never overshoot. 60 steps are more than a width of 8 needs.
fn normal_quantile(share: f64) -> f64 {
    let mut z: f64 = 0.0;
    for _ in 0..60 {
        let density = (-0.5 * z * z).exp() / TAU.sqrt();
        let step = (share - normal_cdf(z)) / density;
        z += step;
        if step.abs() < 1e-14 {
            break;
        }
    }
    z
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_known_answers() {
        // From the known-answer tests of the Random123 library.
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    #[test]
    fn permutations_hit_every_number_once_and_differ_by_draw() {
        for n in [0, 1, 2, 3, 5, 16, 17, 1000] {
            let of = |offset| (0..n).map(|i| permuted(GeneratorState { seed: 3, offset }, i, n)).collect::<Vec<_>>();
            let mut sorted = of(0);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..n).collect::<Vec<_>>());
            assert!(n < 16 || of(0) != of(1));
        }
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let draw = GeneratorState { seed: 11, offset: 5 };
        let n = 200_000u64;
        let moments = |d: Distribution| {
            let values: Vec<f64> = (0..n).map(|i| d.at(draw, i, 53)).collect();
            let mean = values.iter().sum::<f64>() / n as f64;
            (mean, values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64)
        };
        // Bounds are five standard errors of each estimate.
        for (distribution, mean, variance) in [
            (Distribution::Uniform { low: -1.0, high: 3.0 }, 1.0, 16.0 / 12.0),
            (Distribution::Normal { mean: 2.0, std: 3.0 }, 2.0, 9.0),
            (Distribution::Integers { low: -5, high: 6 }, 0.0, 10.0),
        ] {
            let (m, v) = moments(distribution);
            let error = 5.0 * (variance / n as f64).sqrt();
            assert!((m - mean).abs() < error, "{distribution:?}: mean {m}");
            assert!((v / variance - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt(), "{distribution:?}: variance {v}");
        }
        let extremes = Distribution::Integers { low: i64::MIN, high: i64::MAX };
        assert!((0..100).any(|i| extremes.integer_at(draw, i) < 0));
    }

    #[test]
    fn generators_advance_by_draw_and_can_be_put_back() {
        let generator = Generator::new(7);
        let shared = generator.clone();
        let (a, b) = (generator.draw(), shared.draw());
        assert_eq!((a.offset, b.offset), (0, 1));
        assert_eq!(shared.state(), generator.state());
        let state = generator.state();
        generator.draw();
        generator.set_state(state);
        assert_eq!(generator.draw().offset, 2);
        generator.manual_seed(8);
        assert_eq!(generator.state(), GeneratorState { seed: 8, offset: 0 });
        assert!(Distribution::Bernoulli { p: 1.5 }.check().is_err());
    }

    #[test]
    fn numbers_fit_their_type_and_stay_below_their_bound() {
        let uniform = Distribution::Uniform { low: 0.0, high: 1.0 };
        let draw = GeneratorState { seed: 1, offset: 1 };
        let largest = (0..100_000).map(|i| half::bf16::from_f64(uniform.at(draw, i, 8)).to_f64()).fold(0.0, f64::max);
        assert!(largest < 1.0 && largest > 0.99, "{largest}");
        let integers = Distribution::Integers { low: 0, high: 257 };
        assert!(integers.check_fit(&[3], DType::BF16).is_ok() && integers.check_fit(&[3], DType::U8).is_err());
        assert!(Distribution::Integers { low: -1, high: 5 }.check_fit(&[3], DType::U32).is_err());
        assert!(Distribution::Permutation { n: 5 }.check_fit(&[100], DType::I64).is_err());
        assert!(Distribution::Permutation { n: 300 }.check_fit(&[300], DType::U8).is_err());
    }
}
