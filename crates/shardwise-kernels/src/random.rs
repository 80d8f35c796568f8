//! Random elements by position: every element is a function of seed, draw and its index in the full tensor, so that every
//! layout of a tensor has the same elements.
//!
//! Philox4x32-10 with the seed as key turns a counter into four random words. The elements `64 s .. 64 (s + 1)` come from the
//! 16 counters `16 s .. 16 (s + 1)`: element `64 s + 16 w + j` from word `w` of counter `16 s + j`. So sixteen counters are
//! computed in the lanes of a register, and elements are stored in order. No fused multiply-add is used: the bits are the
//! same on every processor.

use std::array::from_fn;

use candle_core::{DType, Tensor};

use super::convert::Compute;
use super::math;
use super::parallel::{SharedPtr, over_ranges};
use super::simd::{self, Kernel};
use super::uninit_buffer::UninitBuffer;
use crate::error::Result;

/// Counters that are computed together.
const LANES: usize = 16;

/// Elements that come from one group of counters.
const GROUP: usize = 4 * LANES;

/// Elements that a thread computes at a time.
const PIECE: usize = 256 * GROUP;

/// A draw of a generator: the key and the upper half of the counter of Philox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomDraw {
    /// The seed of the generator.
    pub seed: u64,
    /// The number of the draw.
    pub draw: u64,
}

/// A distribution of f32 numbers that are computed in vectors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RandomNumbers {
    /// Uniform in `low..high`.
    Uniform {
        /// Inclusive lower bound.
        low: f32,
        /// Exclusive upper bound, up to rounding.
        high: f32,
        /// Bits of a number between 0 and 1, at most 24: those of the element type, so that rounding does not reach the
        /// upper bound.
        bits: u32,
    },
    /// Normal distribution, at most 6.7 standard deviations from the mean.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        std: f32,
    },
    /// A value with some probability, else zero.
    Choice {
        /// The probability, in steps of 2^-32.
        probability: f64,
        /// The value.
        value: f32,
    },
}

/// Returns a vector of random elements: those at the positions of `runs`, each a first index and a length, one after the other.
///
/// # Errors
/// If the element type is not supported or memory does not suffice.
pub fn random_elements(
    draw: RandomDraw,
    numbers: RandomNumbers,
    runs: impl IntoIterator<Item = (u64, usize)>,
    dtype: DType,
) -> Result<Tensor> {
    let (mut pieces, mut count) = (Vec::new(), 0);
    for (mut start, mut length) in runs {
        while length > 0 {
            // Pieces end where a group does.
            let size = (PIECE - (start % GROUP as u64) as usize).min(length);
            pieces.push((start, count, size));
            (start, count, length) = (start + size as u64, count + size, length - size);
        }
    }
    let output = UninitBuffer::new(dtype, count)?;
    let first = SharedPtr::new(output.first());
    // Computing an element takes about as long as writing 4 to memory; a run of a few elements takes as long as a group.
    over_ranges(pieces.len(), 4 * (count / pieces.len().max(1)).max(GROUP), 1, |range| {
        for &(start, offset, size) in &pieces[range] {
            // SAFETY: the pieces divide the output.
            let to = unsafe { first.get().add(offset * dtype.size_in_bytes()) };
            simd::run(FillPiece { draw, numbers, start, size, dtype, to });
        }
    });
    // SAFETY: the pieces cover all elements.
    Ok(unsafe { output.finish(count) })
}

struct FillPiece {
    draw: RandomDraw,
    numbers: RandomNumbers,
    start: u64,
    size: usize,
    dtype: DType,
    to: *mut u8,
}

impl Kernel for FillPiece {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (end, mut at, mut written) = (self.start + self.size as u64, self.start, 0);
        while at < end {
            let group = at / GROUP as u64;
            let elements = self.numbers.elements(words(self.draw, group * LANES as u64));
            let elements = elements.as_flattened();
            let begin = (at % GROUP as u64) as usize;
            let size = (GROUP - begin).min((end - at) as usize);
            // SAFETY: the piece has room for its elements.
            unsafe {
                let to = self.to.add(written * self.dtype.size_in_bytes());
                <f32 as Compute>::store(self.dtype, &elements[begin..begin + size], to);
            }
            (at, written) = (at + size as u64, written + size);
        }
    }
}

impl RandomNumbers {
    /// The elements of a group from its random words.
    #[inline(always)]
    fn elements(self, words: [[u32; LANES]; 4]) -> [[f32; LANES]; 4] {
        match self {
            RandomNumbers::Uniform { low, high, bits } => {
                let (shift, unit) = (32 - bits, 1.0 / (1u32 << bits) as f32);
                words.map(|words| words.map(|word| low + (word >> shift) as f32 * unit * (high - low)))
            }
            RandomNumbers::Choice { probability, value } => {
                let bound = choice_bound(probability);
                words.map(|words| words.map(|word| if u64::from(word) < bound { value } else { 0.0 }))
            }
            RandomNumbers::Normal { mean, std } => {
                let [a, b, c, d] = words;
                let ((e, f), (g, h)) = (normal_pair(a, b), normal_pair(c, d));
                [e, f, g, h].map(|numbers| numbers.map(|x| mean + std * x))
            }
        }
    }
}

/// Two normal numbers per lane by Box and Muller: the first word gives the radius, the second the angle.
#[inline(always)]
fn normal_pair(radius: [u32; LANES], angle: [u32; LANES]) -> ([f32; LANES], [f32; LANES]) {
    let (mut cosines, mut sines) = ([0.0; LANES], [0.0; LANES]);
    for l in 0..LANES {
        // Above 0, at most 1.
        let unit = (radius[l] as f32 + 1.0) * (1.0 / 4_294_967_296.0);
        let radius = (-2.0 * math::log::<false>(unit)).max(0.0).sqrt();
        let (cosine, sine) = cos_sin_turns(angle[l]);
        (cosines[l], sines[l]) = (radius * cosine, radius * sine);
    }
    (cosines, sines)
}

/// Cosine and sine of an angle in units of 2^-32 turns, to 1e-7.
#[inline(always)]
fn cos_sin_turns(angle: u32) -> (f32, f32) {
    // The nearest quarter turn, and the rest between -1/8 and 1/8 of a turn.
    let quarter = angle.wrapping_add(1 << 29) >> 30;
    let rest = angle.wrapping_sub(quarter << 30) as i32 as f32;
    let x = rest * (std::f32::consts::TAU / 4_294_967_296.0);
    let square = x * x;
    let sine = x + x * square * (-1.0 / 6.0 + square * (1.0 / 120.0 + square * (-1.0 / 5040.0 + square / 362_880.0)));
    let cosine = 1.0 + square * (-0.5 + square * (1.0 / 24.0 + square * (-1.0 / 720.0 + square / 40_320.0)));
    let (c, s) = if quarter & 1 == 0 { (cosine, sine) } else { (-sine, cosine) };
    if quarter & 2 == 0 { (c, s) } else { (-c, -s) }
}

/// The random words of sixteen counters from `first`.
#[inline(always)]
fn words(draw: RandomDraw, first: u64) -> [[u32; LANES]; 4] {
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    let ([low, high], [d0, d1], mut key) = (halves(first), halves(draw.draw), halves(draw.seed));
    // The first counter is a multiple of 16, so only its low half counts up.
    let mut counter: [[u32; LANES]; 4] = [from_fn(|l| low + l as u32), [high; LANES], [d0; LANES], [d1; LANES]];
    for round in 0..10 {
        if round > 0 {
            key = next_key(key);
        }
        counter = philox_round(counter, key);
    }
    counter
}

/// Whether an element is chosen with a probability: the decision of [`RandomNumbers::Choice`] for one element by itself.
#[inline(always)]
pub(crate) fn is_chosen(draw: RandomDraw, index: u64, bound: u64) -> bool {
    let halves = |x: u64| [x as u32, (x >> 32) as u32];
    let within = (index % GROUP as u64) as usize;
    let [low, high] = halves(index / GROUP as u64 * LANES as u64 + (within % LANES) as u64);
    let [d0, d1] = halves(draw.draw);
    u64::from(philox4x32_10([low, high, d0, d1], halves(draw.seed))[within / LANES]) < bound
}

/// The words below this bound are chosen: 2^32 for certainty, which no word reaches.
#[inline(always)]
pub(crate) fn choice_bound(probability: f64) -> u64 {
    (probability * 4_294_967_296.0).round() as u64
}

#[inline(always)]
fn next_key([a, b]: [u32; 2]) -> [u32; 2] {
    [a.wrapping_add(0x9E37_79B9), b.wrapping_add(0xBB67_AE85)]
}

/// One round of Philox4x32 on several counters.
#[inline(always)]
fn philox_round<const N: usize>([a, b, c, d]: [[u32; N]; 4], key: [u32; 2]) -> [[u32; N]; 4] {
    let product = |x: u32, factor: u32| u64::from(x) * u64::from(factor);
    let (mut e, mut f, mut g, mut h) = ([0; N], [0; N], [0; N], [0; N]);
    for l in 0..N {
        let (left, right) = (product(a[l], 0xD251_1F53), product(c[l], 0xCD9E_8D57));
        e[l] = (right >> 32) as u32 ^ b[l] ^ key[0];
        f[l] = right as u32;
        g[l] = (left >> 32) as u32 ^ d[l] ^ key[1];
        h[l] = left as u32;
    }
    [e, f, g, h]
}

/// The counter-based generator Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011), which PyTorch uses on CUDA devices.
#[inline(always)]
pub fn philox4x32_10(counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let mut counter = counter.map(|word| [word]);
    for round in 0..10 {
        if round > 0 {
            key = next_key(key);
        }
        counter = philox_round(counter, key);
    }
    counter.map(|[word]| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAW: RandomDraw = RandomDraw { seed: 0x1234_5678_9abc, draw: 7 };

    fn values(numbers: RandomNumbers, runs: &[(u64, usize)]) -> Vec<f32> {
        random_elements(DRAW, numbers, runs.iter().copied(), DType::F32).unwrap().to_vec1().unwrap()
    }

    #[test]
    fn elements_depend_on_their_position_alone() {
        let normal = RandomNumbers::Normal { mean: 0.0, std: 1.0 };
        let all = values(normal, &[(0, 40_000)]);
        let runs = [(3, 5), (64, 64), (60, 130), (39_000, 1000), (0, 1), (16_383, 2)];
        let expected: Vec<f32> =
            runs.iter().flat_map(|&(start, n)| all[start as usize..start as usize + n].to_vec()).collect();
        assert_eq!(values(normal, &runs), expected);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert_eq!(pool.install(|| values(normal, &[(0, 40_000)])), all);
        // Positions beyond 32 bits count on.
        let far = 64 << 32;
        assert_ne!(values(normal, &[(far, 64)]), all[..64]);
    }

    #[test]
    fn words_are_those_of_philox() {
        let lanes = words(DRAW, 32);
        for l in 0..LANES {
            let counter = [32 + l as u32, 0, 7, 0];
            assert_eq!(lanes.map(|word| word[l]), philox4x32_10(counter, [0x5678_9abc, 0x1234]));
        }
    }

    #[test]
    fn normal_numbers_are_those_of_box_and_muller() {
        let lanes = words(DRAW, 0);
        let numbers = values(RandomNumbers::Normal { mean: 1.0, std: 2.0 }, &[(0, 64)]);
        for l in 0..LANES {
            for pair in 0..2 {
                let (a, b) = (f64::from(lanes[2 * pair][l]), f64::from(lanes[2 * pair + 1][l]));
                let radius = (-2.0 * ((a + 1.0) / 2f64.powi(32)).ln()).sqrt();
                let angle = b / 2f64.powi(32) * std::f64::consts::TAU;
                for (word, expected) in [(2 * pair, radius * angle.cos()), (2 * pair + 1, radius * angle.sin())] {
                    let got = f64::from(numbers[word * LANES + l]);
                    assert!((got - (1.0 + 2.0 * expected)).abs() < 3e-6, "{got} and not {expected}");
                }
            }
        }
    }

    #[test]
    fn choices_and_uniform_numbers_have_their_probabilities_and_bounds() {
        let n = 1 << 20;
        let chosen = values(RandomNumbers::Choice { probability: 0.3, value: 2.0 }, &[(0, n)]);
        let share = chosen.iter().filter(|&&x| x == 2.0).count() as f64 / n as f64;
        // Five standard errors.
        assert!((share - 0.3).abs() < 5.0 * (0.21 / n as f64).sqrt(), "{share}");
        assert!(chosen.iter().all(|&x| x == 0.0 || x == 2.0));
        for i in (0..n).step_by(997) {
            assert_eq!(is_chosen(DRAW, i as u64, choice_bound(0.3)), chosen[i] == 2.0, "element {i}");
        }
        for (probability, expected) in [(0.0, 0.0), (1.0, 1.0)] {
            assert!(
                values(RandomNumbers::Choice { probability, value: 1.0 }, &[(0, n)]).iter().all(|&x| x == expected)
            );
        }
        let uniform = values(RandomNumbers::Uniform { low: -1.0, high: 1.0, bits: 24 }, &[(0, n)]);
        let (least, most) = uniform.iter().fold((9f32, -9f32), |(a, b), &x| (a.min(x), b.max(x)));
        assert!((-1.0..-0.9999).contains(&least) && (0.9999..1.0).contains(&most), "{least} to {most}");
    }
}
