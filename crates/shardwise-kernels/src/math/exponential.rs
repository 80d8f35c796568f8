//! Exponentials.

use std::f32::consts::{LN_2, LOG2_E};

use super::{at_least, at_most, fma, polynomial};

/// ln 2 in two parts: the first has few bits, so that its product with an exponent is exact; the second is the remainder.
pub(super) const LN_2_HIGH: f32 = 0.693_359_4;
pub(super) const LN_2_LOW: f32 = -2.121_944_4e-4;

/// 1.5 * 2^23: adding it to a small number leaves the nearest integer in the low bits of the mantissa.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// Coefficients of `(exp(r) - 1 - r) / r^2` for |r| <= ln(2) / 2.
pub(super) const EXP_COEFFICIENTS: [f32; 5] =
    [1.378_059_4e-3, 8.373_124_5e-3, 4.166_953_6e-2, 0.166_664_72, 0.499_999_85];

/// `(1 + more) * 2^n`, not yet multiplied out.
#[derive(Clone, Copy)]
pub(super) struct Exponential {
    more: f32,
    /// Two factors of the power of two, because the power itself may be out of range.
    powers: [f32; 2],
}

impl Exponential {
    /// `exp(rest) * 2^n` for |rest| <= ln(2) / 2 and n between -190 and 63.
    #[inline(always)]
    pub(super) fn new<const FMA: bool>(rest: f32, n: i32) -> Self {
        Exponential {
            more: exp_of_rest::<FMA>(rest),
            powers: [power_of_two(n.wrapping_add(64)), 1.0 / 18_446_744_073_709_551_616.0],
        }
    }

    /// exp(x) for x between -130 and 43, or NaN.
    #[inline(always)]
    pub(super) fn of<const FMA: bool>(x: f32) -> Self {
        let (rest, n) = reduce::<FMA>(x);
        Self::new::<FMA>(rest, n)
    }

    /// The value, which is rounded once where it is subnormal.
    #[inline(always)]
    pub(super) fn value(self) -> f32 {
        (1.0 + self.more) * self.powers[0] * self.powers[1]
    }
}

/// exp(rest) - 1 for |rest| <= ln(2) / 2, with the accuracy that exp(rest) needs.
#[inline(always)]
pub(super) fn exp_of_rest<const FMA: bool>(rest: f32) -> f32 {
    let p = polynomial::<FMA, 5>(rest, EXP_COEFFICIENTS);
    fma::<FMA>(rest * rest, p, rest)
}

/// 2 to the power of n between -126 and 127.
#[inline(always)]
pub(super) fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Range reduction: `x - n ln 2` and `n`, the nearest integer to `x / ln 2`, for |x| < 1e6.
#[inline(always)]
pub(super) fn reduce<const FMA: bool>(x: f32) -> (f32, i32) {
    let rounded = fma::<FMA>(x, LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let rest = fma::<FMA>(n, -LN_2_LOW, fma::<FMA>(n, -LN_2_HIGH, x));
    (rest, rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32)
}

/// `exp(x)`.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    let (rest, n) = reduce::<FMA>(at_most(at_least(x, -110.0), 95.0));
    // Two halves of the power reach both ends of the range.
    let half = n >> 1;
    (1.0 + exp_of_rest::<FMA>(rest)) * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// Whether `exp(x)` is a normal number.
#[inline(always)]
pub fn is_exp_near(x: f32) -> bool {
    x.abs() <= 86.0
}

/// `exp(x)` where [`is_exp_near`] holds.
#[inline(always)]
pub fn exp_near<const FMA: bool>(x: f32) -> f32 {
    let (rest, n) = reduce::<FMA>(x);
    // A product with the power of two, by addition to the exponent.
    f32::from_bits((1.0 + exp_of_rest::<FMA>(rest)).to_bits().wrapping_add((n as u32) << 23))
}

/// 2 to the power of `x`.
#[inline(always)]
pub fn exp2<const FMA: bool>(x: f32) -> f32 {
    let x = at_most(at_least(x, -151.0), 129.0);
    let rounded = x + ROUNDER;
    let rest = x - (rounded - ROUNDER);
    let n = rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    // |rest| <= 1/2
    let p =
        polynomial::<FMA, 6>(rest, [1.535_335_9e-4, 1.339_887_5e-3, 9.618_437e-3, 5.550_332_5e-2, 0.240_226_48, LN_2]);
    let half = n >> 1;
    fma::<FMA>(rest, p, 1.0) * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `exp(x) - 1`, accurate for small x.
#[inline(always)]
pub fn expm1<const FMA: bool>(x: f32) -> f32 {
    let (rest, n) = reduce::<FMA>(at_most(at_least(x, -30.0), 89.0));
    // |rest| <= ln(2) / 2
    let p = polynomial::<FMA, 6>(rest, [2.001_270_3e-4, 1.390_653_8e-3, 8.333_56e-3, 4.166_668e-2, 0.166_666_67, 0.5]);
    let near = fma::<FMA>(rest * rest, p, rest);
    // Half of the power of two, because the power itself may be out of range.
    let half = power_of_two(n.wrapping_sub(1));
    let value = 2.0 * fma::<FMA>(half, near, half - 0.5);
    // Zeros keep their sign, and subnormal numbers their digits.
    if x.abs() < 1e-10 { x } else { value }
}
