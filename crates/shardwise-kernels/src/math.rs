//! Transcendental functions and activations of f32, written without branches so that loops over them become vector
//! instructions.
//!
//! Each is within 3 units in the last place (ulp) over the whole range; erfc, gelu and mish within 5. Zeros, infinities and
//! NaN give what the function in f64 gives.
//!
//! `FMA` is whether the loop is compiled for a processor with fused multiply-add; without it, `mul_add` would be a library
//! call. Coefficients are minimax fits on the interval that a comment states.

use std::f32::consts::{FRAC_2_SQRT_PI, LOG2_E, SQRT_2};

/// ln 2 in two parts: the first has few bits, so that its product with an exponent is exact; the second is the remainder.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// 1.5 * 2^23: adding it to a small number leaves the nearest integer in the low bits of the mantissa.
const ROUNDER: f32 = 12_582_912.0;

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Evaluates a polynomial by Horner's rule, highest coefficient first.
#[inline(always)]
fn polynomial<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    let mut sum = coefficients[0];
    for &c in &coefficients[1..] {
        sum = fma::<FMA>(sum, x, c);
    }
    sum
}

/// `min(x, bound)` that propagates NaN.
#[inline(always)]
fn at_most(x: f32, bound: f32) -> f32 {
    if x > bound { bound } else { x }
}

/// `max(x, bound)` that propagates NaN.
#[inline(always)]
fn at_least(x: f32, bound: f32) -> f32 {
    if x < bound { bound } else { x }
}

/// `(1 + more) * 2^n`, not yet multiplied out: a factor may bring a value outside the range of f32 back into it, and the
/// small summand keeps digits that the sum would round off.
#[derive(Clone, Copy)]
struct Exponential {
    more: f32,
    /// Two factors of the power of two, because the power itself may be out of range.
    powers: [f32; 2],
}

impl Exponential {
    /// `exp(rest) * 2^n` for |rest| <= ln(2) / 2 and n between -190 and 63.
    #[inline(always)]
    fn new<const FMA: bool>(rest: f32, n: i32) -> Self {
        let p =
            polynomial::<FMA, 5>(rest, [1.378_059_4e-3, 8.373_124_5e-3, 4.166_953_6e-2, 0.166_664_72, 0.499_999_85]);
        let more = fma::<FMA>(rest * rest, p, rest);
        Exponential { more, powers: [power_of_two(n.wrapping_add(64)), 1.0 / 18_446_744_073_709_551_616.0] }
    }

    /// exp(x) for x between -130 and 43, or NaN.
    #[inline(always)]
    fn of<const FMA: bool>(x: f32) -> Self {
        let (rest, n) = reduce::<FMA>(x);
        Self::new::<FMA>(rest, n)
    }

    /// `factor * (1 + more)`, without the power of two.
    #[inline(always)]
    fn number<const FMA: bool>(self, factor: f32) -> f32 {
        fma::<FMA>(factor, self.more, factor)
    }

    /// Multiplies a result of [`number`](Self::number) by the power of two, which rounds once.
    #[inline(always)]
    fn scale(self, number: f32) -> f32 {
        number * self.powers[0] * self.powers[1]
    }

    #[inline(always)]
    fn value(self) -> f32 {
        self.scale(1.0 + self.more)
    }
}

/// 2 to the power of n between -126 and 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Range reduction: `x - n ln 2` and `n`, the nearest integer to `x / ln 2`, for |x| < 1e6.
#[inline(always)]
fn reduce<const FMA: bool>(x: f32) -> (f32, i32) {
    let rounded = fma::<FMA>(x, LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let rest = fma::<FMA>(n, -LN_2_LOW, fma::<FMA>(n, -LN_2_HIGH, x));
    (rest, rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32)
}

/// Range reduction in f64: an exponential of a large argument needs more digits than f32 has.
#[inline(always)]
fn reduce_wide(x: f64) -> (f32, i32) {
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    let rounded = x * std::f64::consts::LOG2_E + ROUNDER;
    let n = rounded - ROUNDER;
    ((x - n * std::f64::consts::LN_2) as f32, rounded.to_bits() as i32)
}

/// `exp(x)`.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    let (rest, n) = reduce::<FMA>(at_most(at_least(x, -110.0), 95.0));
    // Two halves of the power reach both ends of the range.
    let half = n >> 1;
    let powers = [power_of_two(half), power_of_two(n.wrapping_sub(half))];
    Exponential { powers, ..Exponential::new::<FMA>(rest, n) }.value()
}

/// `exp(x) - 1`, accurate for small x.
#[inline(always)]
pub fn expm1<const FMA: bool>(x: f32) -> f32 {
    let (rest, n) = reduce::<FMA>(at_most(at_least(x, -30.0), 89.0));
    // |x| <= ln(2) / 2
    let p = polynomial::<FMA, 6>(rest, [2.001_270_3e-4, 1.390_653_8e-3, 8.333_56e-3, 4.166_668e-2, 0.166_666_67, 0.5]);
    let near = fma::<FMA>(rest * rest, p, rest);
    // Half of the power of two, because the power itself may be out of range.
    let half = power_of_two(n.wrapping_sub(1));
    let value = 2.0 * fma::<FMA>(half, near, half - 0.5);
    // Zeros keep their sign, and subnormal numbers their digits.
    if x.abs() < 1e-10 { x } else { value }
}

/// Splits a positive normal number into `(1 + f) * 2^n` with 1 + f between sqrt(1/2) and sqrt(2).
#[inline(always)]
fn mantissa(x: f32) -> (f32, i32) {
    const SQRT_HALF: i32 = 0x3f35_04f3;
    let bits = x.to_bits() as i32;
    let n = bits.wrapping_sub(SQRT_HALF) >> 23;
    (f32::from_bits(bits.wrapping_sub(n << 23) as u32) - 1.0, n)
}

/// log((1 + f) * 2^n) for 1 + f between sqrt(1/2) and sqrt(2).
#[inline(always)]
fn log_of_parts<const FMA: bool>(f: f32, n: f32) -> f32 {
    let p = polynomial::<FMA, 8>(
        f,
        [
            -7.634_33e-2,
            0.127_614_14,
            -0.131_601_69,
            0.142_017_81,
            -0.166_233_61,
            0.200_012_26,
            -0.250_008_2,
            0.333_333_3,
        ],
    );
    let square = f * f;
    let small = fma::<FMA>(square * f, p, fma::<FMA>(square, -0.5, n * LN_2_LOW));
    fma::<FMA>(n, LN_2_HIGH, f + small)
}

/// Natural logarithm.
#[inline(always)]
pub fn log<const FMA: bool>(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let (f, n) = mantissa(if tiny { x * 8_388_608.0 } else { x });
    let value = log_of_parts::<FMA>(f, (if tiny { n.wrapping_sub(23) } else { n }) as f32);
    let value = if x < f32::INFINITY { value } else { x };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x < 0.0 { f32::NAN } else { value }
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

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let size = x.abs();
    let far = 1.0 - 2.0 / (Exponential::of::<FMA>(2.0 * at_most(size, 10.0)).value() + 1.0);
    // |x| < 0.625
    let square = x * x;
    let p = polynomial::<FMA, 5>(square, [-5.704_988e-3, 2.063_908_7e-2, -5.373_971_5e-2, 0.133_314_42, -0.333_332_8]);
    let near = fma::<FMA>(size * square, p, size);
    (if size < 0.625 { near } else { far }).copysign(x)
}

/// `x / (1 + exp(-z))`, given exp(-|z|) and whether z is negative.
#[inline(always)]
fn logistic<const FMA: bool>(x: f32, negative: bool, decay: Exponential) -> f32 {
    let whole = 1.0 + decay.value();
    let share = (if negative { decay.number::<FMA>(x) } else { x }) / whole;
    if negative { decay.scale(share) } else { share }
}

/// Logistic sigmoid, `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    logistic::<FMA>(1.0, x < 0.0, Exponential::of::<FMA>(at_least(-x.abs(), -110.0)))
}

/// `value`, or a zero with the sign of `x` below `bound`, where the value rounds to zero.
#[inline(always)]
fn zero_below(x: f32, bound: f32, value: f32) -> f32 {
    if x < bound { 0.0 * x } else { value }
}

/// SiLU (Swish), `x * sigmoid(x)`.
#[inline(always)]
pub fn silu<const FMA: bool>(x: f32) -> f32 {
    let decay = Exponential::of::<FMA>(at_least(-x.abs(), -130.0));
    zero_below(x, -129.0, logistic::<FMA>(x, x < 0.0, decay))
}

/// GELU with the tanh approximation, computed as `x * sigmoid(z)` with a cubic `z`.
#[inline(always)]
pub fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    const TWICE_SQRT_2_OVER_PI: f64 = 1.595_769_121_605_730_7;
    let size = f64::from(at_most(x.abs(), 11.0));
    let (rest, n) = reduce_wide(-TWICE_SQRT_2_OVER_PI * size * (1.0 + 0.044715 * size * size));
    zero_below(x, -10.95, logistic::<FMA>(x, x < 0.0, Exponential::new::<FMA>(rest, n)))
}

/// `log(1 + exp(-|z|))`, the smooth part of softplus and logsigmoid.
#[inline(always)]
fn log1p_exp_neg_abs<const FMA: bool>(z: f32) -> f32 {
    log1p::<FMA>(Exponential::of::<FMA>(at_least(-z.abs(), -110.0)).value())
}

/// `log(sigmoid(x))`.
#[inline(always)]
pub fn logsigmoid<const FMA: bool>(x: f32) -> f32 {
    at_most(x, 0.0) - log1p_exp_neg_abs::<FMA>(x)
}

/// Softplus, `log(1 + exp(x))`.
#[inline(always)]
pub fn softplus<const FMA: bool>(x: f32) -> f32 {
    at_least(x, 0.0) + log1p_exp_neg_abs::<FMA>(x)
}

/// Mish, `x * tanh(softplus(x))`, computed as a fraction of exponentials.
#[inline(always)]
pub fn mish<const FMA: bool>(x: f32) -> f32 {
    let growth = Exponential::of::<FMA>(at_most(at_least(x, -130.0), 20.0));
    let e = growth.value();
    let share = (e + 2.0) * growth.number::<FMA>(x) / fma::<FMA>(e, e + 2.0, 2.0);
    if x > 20.0 { x } else { zero_below(x, -129.0, growth.scale(share)) }
}

/// `exp(-x^2 * factor)` for x between 0 and 15 and a factor that is a power of two. The square is split: that of the upper
/// half of the digits is exact.
#[inline(always)]
fn gaussian<const FMA: bool>(x: f32, factor: f32) -> Exponential {
    let high = f32::from_bits(x.to_bits() & 0xffff_f000);
    let low = (x - high) * (x + high);
    let (rest, n) = reduce::<FMA>(-factor * high * high);
    Exponential::new::<FMA>(rest - factor * low, n)
}

/// Upper tail of the normal distribution, `P(X > y) / exp(-y^2 / 2)`, for y between 0 and 14.5.
#[inline(always)]
fn normal_tail<const FMA: bool>(y: f32) -> f32 {
    let sum = y + 4.0;
    let lost = y - (sum - 4.0);
    let inverse = 1.0 / sum;
    let inverse = inverse - inverse * inverse * lost;
    // A polynomial in a variable that is exact for small y, where the function is steep.
    let p = polynomial::<FMA, 10>(
        0.5 - y * inverse,
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
            0.188_821_28,
        ],
    );
    4.0 * inverse * p
}

/// erf(x) for |x| < 0.75.
#[inline(always)]
fn erf_near_zero<const FMA: bool>(x: f32) -> f32 {
    let p = polynomial::<FMA, 6>(
        x * x,
        [-6.749_519e-4, 5.114_346_3e-3, -2.683_462_5e-2, 0.112_833_77, -0.376_126_2, FRAC_2_SQRT_PI],
    );
    x * p
}

/// Error function.
#[inline(always)]
pub fn erf<const FMA: bool>(x: f32) -> f32 {
    let size = at_most(x.abs(), 4.5);
    let gaussian = gaussian::<FMA>(size, 1.0);
    let above = gaussian.scale(gaussian.number::<FMA>(normal_tail::<FMA>(size * SQRT_2)));
    if x.abs() < 0.75 { erf_near_zero::<FMA>(x) } else { (1.0 - 2.0 * above).copysign(x) }
}

/// Complementary error function, `1 - erf(x)`, without cancellation for large x.
#[inline(always)]
pub fn erfc<const FMA: bool>(x: f32) -> f32 {
    let size = at_most(x.abs(), 10.5);
    let gaussian = gaussian::<FMA>(size, 1.0);
    let above = gaussian.scale(2.0 * gaussian.number::<FMA>(normal_tail::<FMA>(size * SQRT_2)));
    let far = if x < 0.0 { 2.0 - above } else { above };
    if x.abs() < 0.5 { 1.0 - erf_near_zero::<FMA>(x) } else { far }
}

/// GELU, `x * Phi(x)` with the distribution function of the normal distribution.
#[inline(always)]
pub fn gelu<const FMA: bool>(x: f32) -> f32 {
    let size = at_most(x.abs(), 14.5);
    let gaussian = gaussian::<FMA>(size, 0.5);
    let above = gaussian.scale(gaussian.number::<FMA>(normal_tail::<FMA>(size)) * at_most(x, 14.5));
    let far = if x < 0.0 { zero_below(x, -14.4, above) } else { x - above };
    // |x| < 0.5
    let p = polynomial::<FMA, 5>(x * x, [1.154_344e-4, -1.187_326e-3, 9.973_557e-3, -6.649_038e-2, 0.398_942_3]);
    if x.abs() < 0.5 { x * fma::<FMA>(x, p, 0.5) } else { far }
}

#[cfg(test)]
mod tests {
    /// The error in units in the last place of an f32 of this size.
    fn error(got: f32, right: f64) -> f64 {
        let rounded = right as f32;
        if got.to_bits() == rounded.to_bits() || got.is_nan() && rounded.is_nan() {
            return 0.0;
        }
        if got == 0.0 && right == 0.0 || got.is_nan() || rounded.is_nan() {
            return f64::INFINITY;
        }
        // An infinity counts as the next number after the largest.
        let number = |x: f32| if x.is_infinite() { f64::from(x.signum()) * 2f64.powi(128) } else { f64::from(x) };
        let exponent = (rounded.abs().clamp(f32::MIN_POSITIVE, f32::MAX).to_bits() >> 23) as i32 - 127;
        (number(got) - right.clamp(-2f64.powi(128), 2f64.powi(128))).abs() / 2f64.powi(exponent - 23)
    }

    /// Random bit patterns, and numbers where the functions change fastest.
    fn arguments() -> Vec<f32> {
        let mut all =
            vec![0.0, f32::INFINITY, f32::NAN, 1.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, 0.5, 0.75, 0.625, 104.0];
        all.extend(all.clone().iter().map(|x| -x));
        let mut state = 1u64;
        for i in 0..300_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (state >> 32) as u32;
            let unit = f64::from(bits) / f64::from(u32::MAX) * 2.0 - 1.0;
            all.push([f32::from_bits(bits), (unit * 110.0) as f32, (unit * 15.0) as f32][i % 3]);
        }
        all
    }

    macro_rules! close {
        ($name:ident, $limit:expr, $right:expr) => {
            let right: fn(f64) -> f64 = $right;
            for x in arguments() {
                for got in [super::$name::<true>(x), super::$name::<false>(x)] {
                    let error = error(got, right(f64::from(x)));
                    assert!(error <= $limit, "{}({x:e}) is {got:e}, off by {error}", stringify!($name));
                }
            }
        };
    }

    #[test]
    fn functions_are_within_a_few_ulp() {
        close!(exp, 1.5, f64::exp);
        close!(expm1, 2.0, f64::exp_m1);
        close!(log, 1.5, f64::ln);
        close!(log1p, 2.0, f64::ln_1p);
        close!(tanh, 2.0, f64::tanh);
        close!(sigmoid, 3.0, |x| 1.0 / (1.0 + (-x).exp()));
        close!(silu, 3.0, |x| x / (1.0 + (-x).exp()));
        close!(logsigmoid, 2.0, |x| x.min(0.0) - (-x.abs()).exp().ln_1p());
        close!(softplus, 2.0, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
        close!(gelu_tanh, 3.0, |x| x / (1.0 + (-1.595_769_121_605_730_8 * (x + 0.044715 * x * x * x)).exp()));
        close!(mish, 4.5, |x| x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh());
        close!(erf, 3.0, libm::erf);
        close!(erfc, 4.5, libm::erfc);
        close!(gelu, 4.5, |x| 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2));
    }
}
