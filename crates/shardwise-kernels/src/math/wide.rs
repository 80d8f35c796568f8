//! Exponential and logarithm in f64, with the accuracy that a result rounded to f32 needs: a relative error below 1e-10.

use super::{fma_wide, polynomial_wide};

/// 1.5 * 2^52: adding it to a number below 2^51 leaves the nearest integer in the low bits of the mantissa.
pub(super) const ROUNDER: f64 = 6_755_399_441_055_744.0;

/// `exp(x)` for |x| <= 700, or NaN.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f64) -> f64 {
    let rounded = fma_wide::<FMA>(x, std::f64::consts::LOG2_E, ROUNDER);
    let rest = fma_wide::<FMA>(rounded - ROUNDER, -std::f64::consts::LN_2, x);
    // |rest| <= ln(2) / 2
    let p = polynomial_wide::<FMA, 8>(
        rest,
        [
            1.977_462_057_609_524e-4,
            1.394_818_015_985_543_5e-3,
            8.333_562_239_172_422e-3,
            4.166_622_548_246_605e-2,
            0.166_666_651_193_189_24,
            0.500_000_010_451_065_5,
            1.000_000_000_244_101_2,
            0.999_999_999_961_699_6,
        ],
    );
    // The low bits of `rounded` are the exponent; those above are shifted out.
    p * f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52)
}

/// `log(x)` for a positive normal f64; every positive f32 is one. Other arguments give any number.
#[inline(always)]
pub(super) fn log<const FMA: bool>(x: f64) -> f64 {
    // Bits of sqrt(1/2), so that the mantissa is between it and sqrt(2).
    const SQRT_HALF: u64 = 0x3fe6_a09e_0000_0000;
    let bits = x.to_bits();
    let exponent = bits.wrapping_sub(SQRT_HALF) & 0xfff0_0000_0000_0000;
    let f = f64::from_bits(bits.wrapping_sub(exponent)) - 1.0;
    // The exponent as a number, without a conversion from i64, which AVX2 does not have.
    let biased = (exponent >> 52).wrapping_add(1024) & 0xfff;
    let n = f64::from_bits(biased | 0x4330_0000_0000_0000) - (4_503_599_627_370_496.0 + 1024.0);
    // log(1 + f) = 2 atanh(s)
    let s = f / (f + 2.0);
    let square = s * s;
    // |s| <= 3 - 2 sqrt(2)
    let p = polynomial_wide::<FMA, 4>(
        square,
        [0.235_835_640_690_316_23, 0.285_372_385_073_228_9, 0.400_003_362_184_054_4, 0.666_666_656_412_789_5],
    );
    fma_wide::<FMA>(n, std::f64::consts::LN_2, fma_wide::<FMA>(s * square, p, 2.0 * s))
}
