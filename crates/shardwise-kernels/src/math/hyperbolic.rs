//! Hyperbolic functions.

use super::exponential::{exp_of_rest, power_of_two, reduce};
use super::{at_most, fma, polynomial, polynomial_wide, wide};

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
    // 1 - 2 / (exp(2 |x|) + 1)
    let (rest, n) = reduce::<FMA>(2.0 * at_most(size, 10.0));
    let power = power_of_two(n);
    let far = 1.0 - 2.0 / fma::<FMA>(exp_of_rest::<FMA>(rest), power, power + 1.0);
    // |x| < 0.625
    let square = x * x;
    let p = polynomial::<FMA, 5>(square, [-5.704_988e-3, 2.063_908_7e-2, -5.373_971_5e-2, 0.133_314_42, -0.333_332_8]);
    let near = fma::<FMA>(size * square, p, size);
    (if size < 0.625 { near } else { far }).copysign(x)
}

/// Inverse hyperbolic sine.
#[inline(always)]
pub fn asinh<const FMA: bool>(x: f32) -> f32 {
    let size = f64::from(x.abs());
    let square = size * size;
    // The sum has an error of 1e-16 or less, which is small beside the logarithm above 1e-3.
    let far = wide::log::<FMA>(size + (square + 1.0).sqrt());
    let near = size - size * square * (1.0 / 6.0);
    let value = (if size < 1e-3 { near } else { far }) as f32;
    if x.abs() < f32::INFINITY { value.copysign(x) } else { x }
}
