//! The error function, its complement, and GELU.

use super::activation::zero_below;
use super::exponential::exp_near;
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

/// GELU, `x * Phi(x)` with the distribution function of the normal distribution.
#[inline(always)]
pub fn gelu<const FMA: bool>(x: f32) -> f32 {
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
