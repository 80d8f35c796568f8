//! Logarithms.

use std::f64::consts::{LOG2_E as LOG2_E_WIDE, LOG10_E as LOG10_E_WIDE};

use super::exponential::power_of_two;
use super::{fma, polynomial};

/// Splits a positive normal number into `(1 + f) * 2^n` with 1 + f between 2/3 and 4/3. Returns f and n.
#[inline(always)]
fn mantissa(x: f32) -> (f32, i32) {
    const TWO_THIRDS: i32 = 0x3f2a_aaab;
    let bits = x.to_bits() as i32;
    let n = bits.wrapping_sub(TWO_THIRDS) >> 23;
    (f32::from_bits(bits.wrapping_sub(n << 23) as u32) - 1.0, n)
}

/// log(1 + f) - f for 1 + f between 2/3 and 4/3, by two chains of half the length.
#[inline(always)]
fn log_beyond_linear<const FMA: bool>(f: f32) -> f32 {
    let square = f * f;
    let even = polynomial::<FMA, 4>(square, [-0.130_310_06, -0.121_484_19, -0.166_846_13, -0.249_996_2]);
    let odd = polynomial::<FMA, 3>(square, [0.140_869_14, 0.139_814_85, 0.200_120_35]);
    let p = fma::<FMA>(fma::<FMA>(odd, f, even), f, 0.333_331_97);
    fma::<FMA>(p, f, -0.5) * square
}

/// log((1 + f) * 2^n).
#[inline(always)]
fn log_of_parts<const FMA: bool>(f: f32, n: f32) -> f32 {
    if FMA {
        return fma::<FMA>(n, std::f32::consts::LN_2, f + log_beyond_linear::<FMA>(f));
    }
    let high = n * super::exponential::LN_2_HIGH;
    high + (f + (log_beyond_linear::<FMA>(f) + n * super::exponential::LN_2_LOW))
}

/// The logarithm to another base: `scale` is the logarithm of e, `two` that of 2.
#[inline(always)]
fn scaled_log_of_parts<const FMA: bool>(f: f32, n: f32, scale: f64, two: f64) -> f32 {
    // The first part has 12 bits, so that its products are exact; the second is the remainder.
    let (high, low) = split(scale);
    let (two_high, two_low) = split(two);
    let curve = log_beyond_linear::<FMA>(f);
    // The same of f, whose upper half times the upper half of the scale is exact.
    let f_high = f32::from_bits(f.to_bits() & 0xffff_f000);
    let rest = fma::<FMA>(curve, scale as f32, fma::<FMA>(f, low, fma::<FMA>(f - f_high, high, n * two_low)));
    let first = fma::<FMA>(n, two_high, f_high * high);
    // What the sum of the large terms rounds off.
    let lost = f_high * high - (first - n * two_high);
    first + (rest + lost)
}

/// A number as the sum of one with 12 bits and the remainder.
#[inline(always)]
fn split(x: f64) -> (f32, f32) {
    let high = f32::from_bits((x as f32).to_bits() & 0xffff_f000);
    (high, (x - f64::from(high)) as f32)
}

/// Extends a logarithm of positive normal numbers to all numbers; `parts` gets f and n.
#[inline(always)]
fn everywhere(x: f32, parts: impl Fn(f32, f32) -> f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let (f, n) = mantissa(if tiny { x * 8_388_608.0 } else { x });
    let value = parts(f, (if tiny { n.wrapping_sub(23) } else { n }) as f32);
    let value = if x < f32::INFINITY { value } else { x };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x < 0.0 { f32::NAN } else { value }
}

/// Whether a number is positive, normal and finite.
#[inline(always)]
pub fn is_normal(x: f32) -> bool {
    x.to_bits().wrapping_sub(0x0080_0000) < 0x7f00_0000
}

macro_rules! logarithms {
    ($($(#[$doc:meta])* $name:ident, $near:ident: |$f:ident, $n:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<const FMA: bool>(x: f32) -> f32 {
            everywhere(x, |$f, $n| $value)
        }

        /// The same logarithm where [`is_normal`] holds.
        #[inline(always)]
        pub fn $near<const FMA: bool>(x: f32) -> f32 {
            let ($f, n) = mantissa(x);
            let $n = n as f32;
            $value
        }
    )*};
}

logarithms! {
    /// Natural logarithm.
    log, log_near: |f, n| log_of_parts::<FMA>(f, n);
    /// Logarithm to base 2.
    log2, log2_near: |f, n| scaled_log_of_parts::<FMA>(f, n, LOG2_E_WIDE, 1.0);
    /// Logarithm to base 10.
    log10, log10_near: |f, n| scaled_log_of_parts::<FMA>(f, n, LOG10_E_WIDE, std::f64::consts::LOG10_2);
}

/// `log(1 + x)`, accurate for small x.
#[inline(always)]
pub fn log1p<const FMA: bool>(x: f32) -> f32 {
    let (far, n) = mantissa(1.0 + x);
    // The sum was rounded, so only its exponent is used; both terms below are exact.
    let power = power_of_two(n.wrapping_neg());
    let near = x * power + (power - 1.0);
    let value = log_of_parts::<FMA>(if x > 1e9 { far } else { near }, n as f32);
    let value = if x < f32::INFINITY { value } else { x };
    // Zeros keep their sign.
    let value = if x.abs() < 1e-10 { x } else { value };
    let value = if x == -1.0 { f32::NEG_INFINITY } else { value };
    if x < -1.0 { f32::NAN } else { value }
}
