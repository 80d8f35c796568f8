//! The logistic function and the activations that are built from it.

use super::exponential::{Exponential, exp_of_rest, power_of_two, reduce};
use super::{at_least, at_most, fma, logarithm, wide};

/// `x / (1 + exp(-z))` for z of at least -130. The power of two is divided in two, because the exponential may overflow
/// where the result does not underflow.
#[inline(always)]
fn logistic<const FMA: bool>(x: f32, z: f32) -> f32 {
    let (rest, n) = reduce::<FMA>(at_least(-z, -80.0));
    let first = n.min(100);
    let power = power_of_two(first);
    // 1 + exp(-z). The sum of the power and 1 is exact up to 2^23; above, the smaller of the two is added first.
    let sum = power + 1.0;
    let lost = if power < 1.0 { power - (sum - 1.0) } else { 1.0 - (sum - power) };
    let share = x / (fma::<FMA>(exp_of_rest::<FMA>(rest), power, lost) + sum);
    share * power_of_two(first.wrapping_sub(n))
}

/// Logistic sigmoid, `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    logistic::<FMA>(1.0, at_least(x, -110.0))
}

/// `value`, or a zero with the sign of `x` below `bound`, where the value rounds to zero.
#[inline(always)]
pub(super) fn zero_below(x: f32, bound: f32, value: f32) -> f32 {
    if x < bound { 0.0 * x } else { value }
}

/// SiLU (Swish), `x * sigmoid(x)`.
#[inline(always)]
pub fn silu<const FMA: bool>(x: f32) -> f32 {
    zero_below(x, -129.0, logistic::<FMA>(x, at_least(x, -130.0)))
}

/// GELU with the tanh approximation, computed as `x * sigmoid(z)` with a cubic `z`.
#[inline(always)]
pub fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    const TWICE_SQRT_2_OVER_PI: f64 = 1.595_769_121_605_730_7;
    let inside = f64::from(at_most(at_least(x, -12.0), 12.0));
    let decay = wide::exp::<FMA>(-TWICE_SQRT_2_OVER_PI * inside * (1.0 + 0.044715 * inside * inside));
    zero_below(x, -11.5, (f64::from(x) / (1.0 + decay)) as f32)
}

/// `log(1 + exp(-|z|))`, the smooth part of softplus and logsigmoid.
#[inline(always)]
fn log1p_exp_neg_abs<const FMA: bool>(z: f32) -> f32 {
    logarithm::log1p::<FMA>(Exponential::of::<FMA>(at_least(-z.abs(), -110.0)).value())
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

/// `log(1 + exp(beta * x)) / beta`. Computed in f64, because `beta * x` in f32 would lose digits.
#[inline(always)]
pub fn softplus_of_multiple<const FMA: bool>(x: f32, beta: f64) -> f32 {
    let z = beta * f64::from(x);
    let negative = -z.abs();
    let decay = wide::exp::<FMA>(if negative < -600.0 { -600.0 } else { negative });
    // Below 1e-5 the sum with 1 would lose digits of the decay.
    let curve = if decay < 1e-5 { decay - 0.5 * decay * decay } else { wide::log::<FMA>(1.0 + decay) };
    let value = (if z > 0.0 { z } else { 0.0 }) + curve;
    ((if z.is_nan() { z } else { value }) / beta) as f32
}

/// Mish, `x * tanh(softplus(x))`, computed as a fraction of exponentials.
#[inline(always)]
pub fn mish<const FMA: bool>(x: f32) -> f32 {
    // Above 40 the fraction is 1.
    let growth = wide::exp::<FMA>(f64::from(at_most(at_least(x, -130.0), 40.0)));
    let sum = growth * (growth + 2.0);
    zero_below(x, -129.0, (f64::from(x) * sum / (sum + 2.0)) as f32)
}
