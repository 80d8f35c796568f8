//! Hyperbolic functions.

use std::f32::consts::LOG2_E;

use super::exponential::{EXP_COEFFICIENTS, LN_2_HIGH, LN_2_LOW, ROUNDER, power_of_two};
use super::{at_most, fma, polynomial, polynomial_wide, wide};

/// Coefficients of `(exp(2 r) - 1 - 2 r) / (2 r^2)`: those of `exp`, scaled by powers of two.
const EXP_COEFFICIENTS_OF_HALF: [f32; 5] = {
    let [a, b, c, d, e] = EXP_COEFFICIENTS;
    [32.0 * a, 16.0 * b, 8.0 * c, 4.0 * d, 2.0 * e]
};

/// Hyperbolic sine.
#[inline(always)]
pub fn sinh<const FMA: bool>(x: f32) -> f32 {
    let size = f64::from(at_most(x.abs(), 100.0));
    let square = size * size;
    // |x| <= 1
    let p = polynomial_wide::<FMA, 4>(
        square,
        [2.816_953_376_382_592_7e-6, 1.983_615_933_974_169_3e-4, 8.333_350_060_942_187e-3, 0.166_666_664_975_084_3],
    );
    let near = size + size * square * p;
    let growth = wide::exp::<FMA>(size);
    let far = 0.5 * (growth - 1.0 / growth);
    ((if size < 1.0 { near } else { far }) as f32).copysign(x)
}

/// Hyperbolic cosine.
#[inline(always)]
pub fn cosh<const FMA: bool>(x: f32) -> f32 {
    let growth = wide::exp::<FMA>(f64::from(at_most(x.abs(), 100.0)));
    (0.5 * (growth + 1.0 / growth)) as f32
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let size = x.abs();
    // 1 - 1 / ((exp(2 |x|) + 1) / 2), with the range reduction and the polynomial of `exp` in half the argument.
    let inside = at_most(size, 10.0);
    let rounded = fma::<FMA>(inside, 2.0 * LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let rest = fma::<FMA>(n, -0.5 * LN_2_LOW, fma::<FMA>(n, -0.5 * LN_2_HIGH, inside));
    let p = polynomial::<FMA, 5>(rest, EXP_COEFFICIENTS_OF_HALF);
    let more = fma::<FMA>(rest * rest, p, rest);
    let power = power_of_two(rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32);
    let far = 1.0 - 1.0 / fma::<FMA>(more, power, fma::<FMA>(power, 0.5, 0.5));
    // |x| < 1/2
    let square = x * x;
    let p = polynomial::<FMA, 4>(square, [1.724_148_1e-2, -5.304_548_7e-2, 0.133_258_79, -0.333_331_44]);
    let near = fma::<FMA>(size * square, p, size);
    (if size < 0.5 { near } else { far }).copysign(x)
}

/// Inverse hyperbolic sine.
#[inline(always)]
pub fn asinh<const FMA: bool>(x: f32) -> f32 {
    let size = f64::from(x.abs());
    let square = size * size;
    // The sum has an error of 1e-16 or less, which is small compared with the logarithm above 1e-3.
    let far = wide::log::<FMA>(size + (square + 1.0).sqrt());
    let near = size - size * square * (1.0 / 6.0);
    let value = (if size < 1e-3 { near } else { far }) as f32;
    if x.abs() < f32::INFINITY { value.copysign(x) } else { x }
}
