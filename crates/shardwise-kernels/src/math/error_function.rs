//! The error function, its complement, and GELU.

use std::f32::consts::LOG2_E;

use super::activation::zero_below;
use super::exponential::{LN_2_HIGH, LN_2_LOW, ROUNDER, exp_near, exp_of_rest, power_of_two};
use super::{at_most, fma, polynomial, polynomial_wide, wide};

/// Error function.
#[inline(always)]
pub fn erf<const FMA: bool>(x: f32) -> f32 {
    // |x| < 0.93
    let square = x * x;
    let p = polynomial::<FMA, 6>(
        square,
        [-5.967_617e-4, 4.991_194_2e-3, -2.676_813_5e-2, 0.112_819_925, -0.376_125_34, 0.128_379_17],
    );
    let near = fma::<FMA>(p, x, x);
    // From there to 4, where the function rounds to 1: the logarithm of the complement.
    let size = at_most(x.abs(), 4.0);
    let p = polynomial::<FMA, 7>(
        size,
        [-1.728_534_7e-5, 3.831_971_3e-4, -3.883_964_4e-3, 2.425_462_2e-2, -0.106_777_88, -0.634_846_7, -0.128_717_51],
    );
    let far = (1.0 - exp_near::<FMA>(fma::<FMA>(p, size, -size))).copysign(x);
    if x.abs() > 0.927_734_4 { far } else { near }
}

/// Complementary error function, `1 - erf(x)`, without cancellation for large x.
#[inline(always)]
pub fn erfc<const FMA: bool>(x: f32) -> f32 {
    let size = f64::from(at_most(x.abs(), 10.5));
    // erfc(x) exp(x^2) for x between 0 and 10.2
    let over = polynomial_wide::<FMA, 5>(
        size,
        [
            0.032_885_832_928_272_914,
            0.229_645_208_237_568_45,
            0.732_499_566_630_378_2,
            1.239_266_231_311_124,
            1.000_000_005_824_964,
        ],
    );
    let under = polynomial_wide::<FMA, 6>(
        size,
        [
            0.058_287_936_964_627_84,
            0.407_061_519_294_237_2,
            1.327_039_900_509_572_3,
            2.404_092_490_251_163_6,
            2.367_645_985_715_511_4,
            1.0,
        ],
    );
    let above = wide::exp::<FMA>(-size * size) * over / under;
    (if x < 0.0 { 2.0 - above } else { above }) as f32
}

/// `Phi(-size) * x` for a size up to 14.5: the number, and the exponent of a power of two to multiply it by.
///
/// A product of an exponential, a reciprocal and a polynomial in the reciprocal. What their last operations round off is
/// added up and corrects the result; only what happens inside polynomial and exponential rounds uncorrected.
#[inline(always)]
fn normal_tail<const FMA: bool>(size: f32, x: f32) -> (f32, i32) {
    let half = -0.5 * size;
    let square = half * size;
    let lost = fma::<FMA>(half, size, -square);
    let rounded = fma::<FMA>(square, LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let rest = fma::<FMA>(n, -LN_2_HIGH, square) + fma::<FMA>(n, -LN_2_LOW, lost);
    let more = exp_of_rest::<FMA>(rest);
    let sum = size + 4.0;
    let sum_lost = size - (sum - 4.0);
    let inverse = 1.0 / sum;
    // The exact reciprocal is `inverse * (1 + deviation)`.
    let deviation = fma::<FMA>(-inverse, sum_lost, fma::<FMA>(-inverse, sum, 1.0));
    // Phi(-x) exp(x^2 / 2) / quadruple for x between 0 and 14.5; the variable is exact.
    let quadruple = 4.0 * inverse;
    let variable = quadruple - 0.5;
    let p = polynomial::<FMA, 9>(
        variable,
        [
            1.689_138e-2,
            1.147_97e-2,
            -5.023_768_7e-2,
            -5.620_100_4e-2,
            6.020_220_5e-2,
            0.241_615_33,
            0.373_046_88,
            0.387_136_9,
            0.303_948_3,
        ],
    );
    let tail = fma::<FMA>(variable, p, 0.188_821_28);
    let tail_lost = fma::<FMA>(variable, p, 0.188_821_28 - tail);
    let product = fma::<FMA>(tail, more, tail);
    let product_lost = fma::<FMA>(tail, more, tail - product) + tail_lost;
    let value = product * quadruple;
    let value_lost = fma::<FMA>(product, quadruple, -value);
    // The relative change of the result with that of the reciprocal, within 0.2.
    let slope = fma::<FMA>(2.8, variable, 1.75);
    let correction = fma::<FMA>(quadruple, product_lost, fma::<FMA>(value, slope * deviation, value_lost));
    (fma::<FMA>(x, value, x * correction), rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32)
}

/// GELU, `x * Phi(x)` with the distribution function of the normal distribution.
#[inline(always)]
pub fn gelu<const FMA: bool>(x: f32) -> f32 {
    if FMA {
        let (value, n) = normal_tail::<FMA>(at_most(x.abs(), 14.5), at_most(x, 14.5));
        // In two steps, because the power may be out of range.
        let above = value * power_of_two(n.wrapping_add(64)) * (1.0 / 18_446_744_073_709_551_616.0);
        return zero_below(x, -14.4, if x < 0.0 { above } else { x - above });
    }
    let size = f64::from(at_most(x.abs(), 14.5));
    // Phi(-x) exp(x^2 / 2) for x between 0 and 14.5
    let over = polynomial_wide::<FMA, 5>(
        size,
        [
            0.004_116_414_360_859_117,
            0.040_634_164_625_382_79,
            0.183_238_250_995_781_25,
            0.438_299_658_113_078_64,
            0.500_000_002_941_802_1,
        ],
    );
    let under = polynomial_wide::<FMA, 6>(
        size,
        [
            0.010_318_200_955_699_45,
            0.101_861_190_125_151_52,
            0.469_478_744_356_489_45,
            1.202_516_887_933_262_8,
            1.674_484_296_188_176,
            1.0,
        ],
    );
    let above = wide::exp::<FMA>(-0.5 * size * size) * over / under;
    let share = if x < 0.0 { above } else { 1.0 - above };
    zero_below(x, -14.4, (f64::from(x) * share) as f32)
}

/// Whether GELU of a number is normal, unless the number is subnormal itself.
#[inline(always)]
pub fn is_gelu_near(x: f32) -> bool {
    x.abs() <= 12.0
}

/// GELU where [`is_gelu_near`] holds.
#[inline(always)]
pub fn gelu_near<const FMA: bool>(x: f32) -> f32 {
    if FMA {
        let (value, n) = normal_tail::<FMA>(x.abs(), x);
        let above = value * power_of_two(n);
        return if x < 0.0 { above } else { x - above };
    }
    gelu::<FMA>(x)
}
