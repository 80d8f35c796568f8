//! Elementwise functions of one tensor. One table entry per function holds its sharding rule, its kernel and its derivative.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, LN_10, PI};
use std::mem::MaybeUninit;
use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::gradients::derivative::{Derivative, Differentiable, zero};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::DTensor;
use shardwise_kernels::{ComputeType, PerType, PointwiseFn, ViaF64, math, pointwise, pointwise_f32};

/// Whether a function preserves the order or the sums of its arguments. Decides which `Partial` placements pass through it
/// unreduced: the maximum of increasing values is the value of the maximum.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::ops) enum Monotonicity {
    None,
    /// Never decreases: maxima and minima pass.
    Increasing,
    /// Never increases: a maximum becomes a minimum and the other way round.
    Decreasing,
    /// Never decreases, but is NaN below some argument, as `log` is. Minima pass: if any argument gives NaN, so does the smallest.
    IncreasingWhereDefined,
    /// A multiple of the argument: sums and means pass, maxima and minima as for an increasing or a decreasing function.
    Linear {
        increasing: bool,
    },
}

/// The element type of the result of a function of one tensor.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::ops) enum UnaryResultType {
    /// That of the argument; integers are computed in integer arithmetic.
    Same,
    /// Floating point: integers become f32.
    Float,
    /// u8, 0 or 1.
    Bool,
}

/// One row of the table.
struct UnaryFunction {
    name: &'static str,
    monotonicity: Monotonicity,
    result_type: UnaryResultType,
    run: fn(&Tensor, ComputeType, DType) -> Result<Tensor>,
    /// The same for some elements in f32.
    in_f32: fn(&[f32], &mut [MaybeUninit<f32>]),
    /// `None` if it is not differentiable.
    derivative: Option<Derivative>,
}

/// Defines the methods of [`DTensor`], the enum [`Unary`] and the table from one entry per function.
///
/// The kernel is one of `each` (the same expression in f32 and f64), `wide` (computed in f64 for f32 too), `fast` (f32 has a
/// vectorized function in [`math`]) and `near` (and a shorter form for most arguments in [`math::near`]). Integers whose type is kept are returned unchanged unless `integer` gives a function.
/// After the arrow comes the derivative, which every entry must state: its value at a number, its formula in terms of
/// operators and, for activations that dominate training steps, an f32 kernel; or `not_differentiable`.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $monotonicity:expr, $result_type:ident, |$x:ident| $form:ident($real:expr) $(, integer($integer:expr))?
            => $derivative:ident $(($($parts:tt)*))?;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                ///
                /// Elementwise: keeps the layout and communicates nothing, unless this tensor is `Partial` with a reduction that
                /// does not commute with the function. Such a tensor is reduced first, which is collective.
                #[track_caller]
                pub fn $name(&self) -> Result<DTensor> {
                    Ok(dispatch(&Unary::$name, &[self], Location::caller())?.swap_remove(0))
                }
            )*
        }

        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(in crate::ops) enum Unary {
            $($name,)*
        }

        static FUNCTIONS: &[UnaryFunction] = &[
            $(UnaryFunction {
                name: stringify!($name),
                monotonicity: $monotonicity,
                result_type: UnaryResultType::$result_type,
                run: |x, arithmetic, dtype| {
                    let integer = functions!(@integer $x $(, $integer)?);
                    Ok(pointwise(functions!(@$form $name, $x, $real, integer), [x], x.dims(), arithmetic, dtype)?)
                },
                in_f32: |x, out| {
                    let integer = functions!(@integer $x $(, $integer)?);
                    pointwise_f32(functions!(@$form $name, $x, $real, integer), x, out);
                },
                derivative: functions!(@$derivative $(($($parts)*))?),
            },)*
        ];

        pub(in crate::ops) const OPS: &[OpEntry] = &[
            $(OpEntry {
                name: stringify!($name),
                samples: if matches!(Unary::$name, Unary::bitwise_not) { integers } else { samples },
                apply: |x| Ok(vec![x[0].$name()?]),
            },)*
        ];

        #[cfg(test)]
        const ALL: &[Unary] = &[$(Unary::$name,)*];
    };
    (@integer $x:ident) => { |[$x]: [i64; 1]| $x };
    (@integer $x:ident, $integer:expr) => {
        |[$x]: [i64; 1]| {
            let _ = $x;
            $integer
        }
    };
    (@each $name:ident, $x:ident, $real:expr, $integer:ident) => {
        PerType(|[$x]: [f32; 1]| $real, |[$x]: [f64; 1]| $real, $integer)
    };
    (@wide $name:ident, $x:ident, $real:expr, $integer:ident) => { ViaF64(|[$x]: [f64; 1]| $real, $integer) };
    (@fast $name:ident, $x:ident, $real:expr, $integer:ident) => {{
        #[derive(Clone, Copy)]
        struct F32Unary<W>(W);
        impl<W: Fn([i64; 1]) -> i64 + Copy + Sync> PointwiseFn<1> for F32Unary<W> {
            #[inline(always)]
            fn f32<const FMA: bool>(self, [$x]: [f32; 1]) -> f32 {
                math::$name::<FMA>($x)
            }
            #[inline(always)]
            fn f64(self, [$x]: [f64; 1]) -> f64 {
                $real
            }
            #[inline(always)]
            fn i64(self, x: [i64; 1]) -> i64 {
                (self.0)(x)
            }
        }
        F32Unary($integer)
    }};
    (@near $name:ident, $x:ident, $real:expr, $integer:ident) => {{
        #[derive(Clone, Copy)]
        struct F32NearZero<W>(W);
        impl<W: Fn([i64; 1]) -> i64 + Copy + Sync> PointwiseFn<1> for F32NearZero<W> {
            const HAS_NEAR: bool = true;
            #[inline(always)]
            fn f32<const FMA: bool>(self, [$x]: [f32; 1]) -> f32 {
                math::$name::<FMA>($x)
            }
            #[inline(always)]
            fn f32_near<const FMA: bool>(self, [$x]: [f32; 1]) -> f32 {
                math::near::$name::<FMA>($x)
            }
            #[inline(always)]
            fn is_near(self, [$x]: [f32; 1]) -> bool {
                math::is_near::$name($x)
            }
            #[inline(always)]
            fn f64(self, [$x]: [f64; 1]) -> f64 {
                $real
            }
            #[inline(always)]
            fn i64(self, x: [i64; 1]) -> i64 {
                (self.0)(x)
            }
        }
        F32NearZero($integer)
    }};
    (@not_differentiable) => { None };
    (@derivative ($at:expr, $formula:expr)) => { Some(Derivative { at: $at, formula: $formula, kernel: None }) };
    (@derivative ($at:expr, $formula:expr, f32(|$x:ident| $fast:expr))) => {
        functions!(@kernel $at, $formula, |$x, g| g * $fast, |x, g| {
            let at: fn(f64) -> f64 = $at;
            g * at(x)
        })
    };
    // The derivative is a reciprocal: dividing by it is finite where the reciprocal of a subnormal number is not.
    (@one_over ($divisor:expr, $formula:expr, f32(|$x:ident| $fast:expr))) => {
        functions!(@kernel |x| 1.0 / $divisor(x), |x| $formula(x)?.reciprocal(), |$x, g| g / $fast, |x, g| g / $divisor(x))
    };
    (@kernel $at:expr, $formula:expr, |$x:ident, $g:ident| $fast:expr, |$y:ident, $h:ident| $wide:expr) => {{
        #[derive(Clone, Copy)]
        struct F32Derivative;
        impl PointwiseFn<2> for F32Derivative {
            #[inline(always)]
            fn f32<const FMA: bool>(self, [$x, $g]: [f32; 2]) -> f32 {
                $fast
            }
            #[inline(always)]
            fn f64(self, [$y, $h]: [f64; 2]) -> f64 {
                $wide
            }
            #[inline(always)]
            fn i64(self, [_, g]: [i64; 2]) -> i64 {
                g
            }
        }
        let kernel: fn(&Tensor, &Tensor) -> Result<Tensor> =
            |x, g| Ok(pointwise(F32Derivative, [x, g], x.dims(), ComputeType::float_for([x.dtype(), g.dtype()]), g.dtype())?);
        Some(Derivative { at: $at, formula: $formula, kernel: Some(kernel) })
    }};
}

const INCREASING: Monotonicity = Monotonicity::Increasing;
const NOT_MONOTONE: Monotonicity = Monotonicity::None;
const GELU_INNER: f64 = 0.797_884_560_802_865_4; // sqrt(2 / pi)
const GELU_CUBIC: f64 = 0.044715;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

functions! {
    /// Returns the negative of each element.
    neg: Monotonicity::Linear { increasing: false }, Same, |x| each(-x), integer(x.wrapping_neg())
        => derivative(|_| -1.0, |x| zero(x)?.add_scalar(-1.0));
    /// Returns the absolute value of each element.
    abs: NOT_MONOTONE, Same, |x| each(x.abs()), integer(x.wrapping_abs())
        => derivative(|x| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }, DTensor::sign,
            f32(|x| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }));
    /// Returns the sign of each element: -1, 0 or 1; 0 for NaN, as in PyTorch.
    sign: NOT_MONOTONE, Same, |x| each(if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }), integer(x.signum())
        => derivative(|_| 0.0, zero);
    /// Returns the square of each element.
    square: NOT_MONOTONE, Same, |x| each(x * x), integer(x.wrapping_mul(x))
        => derivative(|x| 2.0 * x, |x| x.mul_scalar(2.0), f32(|x| 2.0 * x));
    /// Applies the rectified linear unit, `max(x, 0)`.
    relu: INCREASING, Same, |x| each(if x < 0.0 { 0.0 } else { x }), integer(x.max(0))
        // The gradient of NaN passes, as in PyTorch.
        => derivative(|x| if x <= 0.0 { 0.0 } else { 1.0 }, |x| x.le(&zero(x)?)?.eq(0)?.to_dtype(x.dtype()),
            f32(|x| if x <= 0.0 { 0.0 } else { 1.0 }));
    /// Rounds each element down to an integer.
    floor: INCREASING, Same, |x| each(x.floor())
        => derivative(|_| 0.0, zero);
    /// Rounds each element up to an integer.
    ceil: INCREASING, Same, |x| each(x.ceil())
        => derivative(|_| 0.0, zero);
    /// Rounds each element to the nearest integer, ties to the even one.
    round: INCREASING, Same, |x| each(x.round_ties_even())
        => derivative(|_| 0.0, zero);
    /// Rounds each element towards zero to an integer.
    trunc: INCREASING, Same, |x| each(x.trunc())
        => derivative(|_| 0.0, zero);
    /// Returns the fractional part of each element.
    frac: NOT_MONOTONE, Float, |x| each(x.fract())
        => derivative(|_| 1.0, |x| zero(x)?.add_scalar(1.0));
    /// Returns the exponential of each element.
    exp: INCREASING, Float, |x| near(x.exp())
        => derivative(f64::exp, DTensor::exp, f32(|x| math::exp::<FMA>(x)));
    /// Returns `exp(x) - 1` of each element, accurate near 0.
    expm1: INCREASING, Float, |x| fast(x.exp_m1())
        => derivative(f64::exp, DTensor::exp, f32(|x| math::exp::<FMA>(x)));
    /// Returns 2 to the power of each element.
    exp2: INCREASING, Float, |x| fast(x.exp2())
        => derivative(|x| x.exp2() * LN_2, |x| x.exp2()?.mul_scalar(LN_2), f32(|x| math::exp2::<FMA>(x) * LN_2 as f32));
    /// Returns the natural logarithm of each element.
    log: Monotonicity::IncreasingWhereDefined, Float, |x| near(x.ln())
        => one_over(std::convert::identity::<f64>, |x: &DTensor| Result::<DTensor>::Ok(x.clone()), f32(|x| x));
    /// Returns `log(1 + x)` of each element, accurate near 0.
    log1p: Monotonicity::IncreasingWhereDefined, Float, |x| fast(x.ln_1p())
        => one_over(|x: f64| 1.0 + x, |x: &DTensor| x.add_scalar(1.0), f32(|x| 1.0 + x));
    /// Returns the logarithm to base 2 of each element.
    log2: Monotonicity::IncreasingWhereDefined, Float, |x| near(x.log2())
        => one_over(|x: f64| x * LN_2, |x: &DTensor| x.mul_scalar(LN_2), f32(|x| x * LN_2 as f32));
    /// Returns the logarithm to base 10 of each element.
    log10: Monotonicity::IncreasingWhereDefined, Float, |x| near(x.log10())
        => one_over(|x: f64| x * LN_10, |x: &DTensor| x.mul_scalar(LN_10), f32(|x| x * LN_10 as f32));
    /// Returns the square root of each element.
    sqrt: Monotonicity::IncreasingWhereDefined, Float, |x| each(x.sqrt())
        => derivative(|x| 0.5 / x.sqrt(), |x| x.rsqrt()?.mul_scalar(0.5), f32(|x| 0.5 / x.sqrt()));
    /// Returns the reciprocal of the square root of each element.
    rsqrt: NOT_MONOTONE, Float, |x| each(1.0 / x.sqrt())
        => derivative(|x| -0.5 / (x * x.sqrt()), |x| x.rsqrt()?.pow_scalar(3.0)?.mul_scalar(-0.5));
    /// Returns the reciprocal of each element.
    reciprocal: NOT_MONOTONE, Float, |x| each(1.0 / x)
        => derivative(|x| -1.0 / (x * x), |x| x.reciprocal()?.square()?.neg());
    /// Returns the sine of each element.
    sin: NOT_MONOTONE, Float, |x| near(x.sin())
        => derivative(f64::cos, DTensor::cos, f32(|x| math::cos::<FMA>(x)));
    /// Returns the cosine of each element.
    cos: NOT_MONOTONE, Float, |x| near(x.cos())
        => derivative(|x| -x.sin(), |x| x.sin()?.neg(), f32(|x| -math::sin::<FMA>(x)));
    /// Returns the tangent of each element.
    tan: NOT_MONOTONE, Float, |x| near(x.tan())
        => derivative(|x| 1.0 + x.tan().powi(2), |x| x.tan()?.square()?.add_scalar(1.0));
    /// Returns the inverse sine of each element.
    asin: NOT_MONOTONE, Float, |x| fast(x.asin())
        => derivative(|x| 1.0 / (1.0 - x * x).sqrt(), |x| x.square()?.rsub_scalar(1.0)?.rsqrt());
    /// Returns the inverse tangent of each element.
    atan: INCREASING, Float, |x| fast(x.atan())
        => derivative(|x| 1.0 / (1.0 + x * x), |x| x.square()?.add_scalar(1.0)?.reciprocal(),
            f32(|x| 1.0 / (1.0 + x * x)));
    /// Returns the hyperbolic sine of each element.
    sinh: INCREASING, Float, |x| fast(x.sinh())
        => derivative(f64::cosh, DTensor::cosh, f32(|x| math::cosh::<FMA>(x)));
    /// Returns the hyperbolic cosine of each element.
    cosh: NOT_MONOTONE, Float, |x| fast(x.cosh())
        => derivative(f64::sinh, DTensor::sinh, f32(|x| math::sinh::<FMA>(x)));
    /// Returns the inverse hyperbolic sine of each element.
    asinh: INCREASING, Float, |x| fast(libm::asinh(x)) // that of std overflows for the largest numbers
        => derivative(|x| 1.0 / (1.0 + x * x).sqrt(), |x| x.square()?.add_scalar(1.0)?.rsqrt());
    /// Returns the hyperbolic tangent of each element.
    tanh: INCREASING, Float, |x| fast(x.tanh())
        => derivative(|x| 1.0 - x.tanh().powi(2), |x| x.tanh()?.square()?.rsub_scalar(1.0), f32(|x| {
            let t = math::tanh::<FMA>(x);
            (1.0 - t) * (1.0 + t)
        }));
    /// Returns the error function of each element.
    erf: INCREASING, Float, |x| fast(libm::erf(x))
        => derivative(|x| 2.0 / PI.sqrt() * (-x * x).exp(), |x| x.square()?.neg()?.exp()?.mul_scalar(2.0 / PI.sqrt()));
    /// Returns the complementary error function of each element, `1 - erf(x)`.
    erfc: Monotonicity::Decreasing, Float, |x| fast(libm::erfc(x))
        => derivative(|x| -2.0 / PI.sqrt() * (-x * x).exp(), |x| x.square()?.neg()?.exp()?.mul_scalar(-2.0 / PI.sqrt()));
    /// Applies the logistic function, `1 / (1 + exp(-x))`.
    sigmoid: INCREASING, Float, |x| fast(1.0 / (1.0 + (-x).exp()))
        => derivative(|x| sigmoid(x) * sigmoid(-x), |x| x.sigmoid()?.mul(&x.neg()?.sigmoid()?), f32(|x| {
            math::sigmoid::<FMA>(x) * math::sigmoid::<FMA>(-x)
        }));
    /// Returns `log(sigmoid(x))` of each element, without overflow.
    logsigmoid: INCREASING, Float, |x| fast(x.min(0.0) - (-x.abs()).exp().ln_1p())
        => derivative(|x| sigmoid(-x), |x| x.neg()?.sigmoid(), f32(|x| math::sigmoid::<FMA>(-x)));
    /// Applies the softsign activation, `x / (1 + |x|)`.
    softsign: NOT_MONOTONE, Float, |x| each(x / (1.0 + x.abs()))
        => derivative(|x| (1.0 + x.abs()).powi(-2), |x| x.abs()?.add_scalar(1.0)?.square()?.reciprocal(), f32(|x| {
            let sum = 1.0 + x.abs();
            1.0 / (sum * sum)
        }));
    /// Applies the SiLU activation (swish), `x * sigmoid(x)`.
    silu: NOT_MONOTONE, Float, |x| fast(x / (1.0 + (-x).exp()))
        => derivative(|x| sigmoid(x) * (1.0 + x * sigmoid(-x)), |x| {
            let other = x.neg()?.sigmoid()?;
            x.sigmoid()?.mul(&x.mul(&other)?.add_scalar(1.0)?)
        }, f32(|x| math::sigmoid::<FMA>(x) * (1.0 + x * math::sigmoid::<FMA>(-x))));
    /// Applies the Mish activation, `x * tanh(softplus(x))`.
    mish: NOT_MONOTONE, Float, |x| fast(x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh())
        => derivative(|x| {
            let t = (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh();
            t + x * (1.0 - t * t) * sigmoid(x)
        }, |x| {
            let t = x.softplus(1.0, 20.0)?.tanh()?;
            t.add(&x.mul(&x.sigmoid()?)?.mul(&t.square()?.rsub_scalar(1.0)?)?)
        }, f32(|x| {
            let t = math::tanh::<FMA>(math::softplus::<FMA>(x));
            t + x * (1.0 - t) * (1.0 + t) * math::sigmoid::<FMA>(x)
        }));
    /// Applies the hard swish activation, `x * clamp(x + 3, 0, 6) / 6`.
    ///
    /// The gradient at -3 and 3 is that of the outer, linear pieces, as in PyTorch.
    hardswish: NOT_MONOTONE, Float, |x| wide(x * (x + 3.0).clamp(0.0, 6.0) / 6.0)
        => derivative(|x| if x <= -3.0 { 0.0 } else if x >= 3.0 { 1.0 } else { (2.0 * x + 3.0) / 6.0 }, |x| {
            let inside = x.mul_scalar(2.0)?.add_scalar(3.0)?.div_scalar(6.0)?;
            let above = x.ge(&zero(x)?.add_scalar(3.0)?)?;
            let below = x.le(&zero(x)?.add_scalar(-3.0)?)?;
            below.where_cond(&zero(x)?, &above.where_cond(&zero(x)?.add_scalar(1.0)?, &inside)?)
        });
    /// Applies the exact GELU activation, `x * Phi(x)` with the normal distribution function `Phi`.
    gelu: NOT_MONOTONE, Float, |x| near(0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2))
        => derivative(|x| {
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2)) + x * density
        }, |x| {
            let density = x.square()?.mul_scalar(-0.5)?.exp()?.mul_scalar(1.0 / (2.0 * PI).sqrt())?;
            x.mul_scalar(FRAC_1_SQRT_2)?.erf()?.add_scalar(1.0)?.mul_scalar(0.5)?.add(&x.mul(&density)?)
        }, f32(|x| {
            let below = 0.5 * (1.0 + math::erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2));
            below + x * math::exp::<FMA>(-0.5 * x * x) * 0.398_942_3
        }));
    /// Applies the tanh approximation of GELU: PyTorch's `gelu(approximate="tanh")`.
    gelu_tanh: NOT_MONOTONE, Float, |x| fast({
        let z = 2.0 * (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
        x / (1.0 + (-z).exp())
    }) => derivative(|x| {
            let t = (GELU_INNER * (x + GELU_CUBIC * x * x * x)).tanh();
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_INNER * (1.0 + 3.0 * GELU_CUBIC * x * x)
        }, |x| {
            let squares = x.square()?;
            let t = x.mul(&squares.mul_scalar(GELU_CUBIC)?.add_scalar(1.0)?)?.mul_scalar(GELU_INNER)?.tanh()?;
            let slope = squares.mul_scalar(3.0 * GELU_CUBIC)?.add_scalar(1.0)?.mul_scalar(GELU_INNER)?;
            let curved = x.mul(&t.square()?.rsub_scalar(1.0)?)?.mul(&slope)?;
            t.add_scalar(1.0)?.add(&curved)?.mul_scalar(0.5)
        }, f32(|x| {
            let (inner, cubic) = (GELU_INNER as f32, GELU_CUBIC as f32);
            let t = math::tanh::<FMA>(inner * (x + cubic * x * x * x));
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t) * (1.0 + t) * inner * (1.0 + 3.0 * cubic * x * x)
        }));
    /// Returns the inverse cosine of each element.
    acos: Monotonicity::None, Float, |x| wide(x.acos())
        => derivative(|x| -1.0 / (1.0 - x * x).sqrt(), |x| x.square()?.rsub_scalar(1.0)?.rsqrt()?.neg());
    /// Returns the inverse hyperbolic cosine of each element.
    acosh: Monotonicity::IncreasingWhereDefined, Float, |x| wide(libm::acosh(x))
        => derivative(|x| 1.0 / (x * x - 1.0).sqrt(), |x| x.square()?.add_scalar(-1.0)?.rsqrt());
    /// Returns the inverse hyperbolic tangent of each element.
    atanh: NOT_MONOTONE, Float, |x| wide(libm::atanh(x))
        => derivative(|x| 1.0 / (1.0 - x * x), |x| x.square()?.rsub_scalar(1.0)?.reciprocal());
    /// Returns the angle of each element as a complex number: pi for negative ones, NaN for NaN, else 0.
    angle: NOT_MONOTONE, Float, |x| wide(if x.is_nan() { x } else if x < 0.0 { PI } else { 0.0 })
        => derivative(|_| 0.0, zero);
    /// Converts degrees to radians.
    deg2rad: Monotonicity::Linear { increasing: true }, Float, |x| wide(x * (PI / 180.0))
        => derivative(|_| PI / 180.0, |x| zero(x)?.add_scalar(PI / 180.0));
    /// Converts radians to degrees.
    rad2deg: Monotonicity::Linear { increasing: true }, Float, |x| wide(x * (180.0 / PI))
        => derivative(|_| 180.0 / PI, |x| zero(x)?.add_scalar(180.0 / PI));
    /// Returns the binary exponent of each element as a floating-point number: `x` is a fraction from 0.5 to 1 times 2 to this
    /// power. 0 for zeros, infinities and NaN. See [`frexp`](Self::frexp).
    frexp_exponent: NOT_MONOTONE, Float, |x| wide(f64::from(libm::frexp(x).1) * f64::from(u8::from(x.is_finite())))
        => not_differentiable;
    /// Returns the bitwise complement of integers. PyTorch's `bitwise_not` of bool is [`logical_not`](Self::logical_not).
    bitwise_not: NOT_MONOTONE, Same, |x| each(x), integer(!x)
        => not_differentiable;
    /// Returns 1 where an element is positive infinity and 0 otherwise, as u8.
    isposinf: NOT_MONOTONE, Bool, |x| each(if x.is_infinite() && x > 0.0 { 1.0 } else { 0.0 }), integer(0)
        => not_differentiable;
    /// Returns 1 where an element is negative infinity and 0 otherwise, as u8.
    isneginf: NOT_MONOTONE, Bool, |x| each(if x.is_infinite() && x < 0.0 { 1.0 } else { 0.0 }), integer(0)
        => not_differentiable;
    /// Returns 1 where an element is NaN and 0 otherwise, as u8.
    isnan: NOT_MONOTONE, Bool, |x| each(if x.is_nan() { 1.0 } else { 0.0 }), integer(0)
        => not_differentiable;
    /// Returns 1 where an element is finite and 0 otherwise, as u8.
    isfinite: NOT_MONOTONE, Bool, |x| each(if x.is_finite() { 1.0 } else { 0.0 }), integer(1)
        => not_differentiable;
    /// Returns 1 where an element is infinite and 0 otherwise, as u8.
    isinf: NOT_MONOTONE, Bool, |x| each(if x.is_infinite() { 1.0 } else { 0.0 }), integer(0)
        => not_differentiable;
    /// Returns 1 where the sign bit of an element is set and 0 otherwise, as u8.
    signbit: NOT_MONOTONE, Bool, |x| each(if x.is_sign_negative() { 1.0 } else { 0.0 }), integer(i64::from(x < 0))
        => not_differentiable;
    /// Returns 1 where an element is zero and 0 otherwise, as u8.
    logical_not: NOT_MONOTONE, Bool, |x| each(if x == 0.0 { 1.0 } else { 0.0 }), integer(i64::from(x == 0))
        => not_differentiable;
}

impl Unary {
    fn function(self) -> &'static UnaryFunction {
        &FUNCTIONS[self as usize]
    }

    /// Applies the function to a local tensor.
    pub(in crate::ops) fn compute(self, x: &Tensor, arithmetic: ComputeType, dtype: DType) -> Result<Tensor> {
        (self.function().run)(x, arithmetic, dtype)
    }

    /// The function of some elements in f32.
    pub(in crate::ops) fn in_f32(self) -> fn(&[f32], &mut [MaybeUninit<f32>]) {
        self.function().in_f32
    }
}

impl UnaryResultType {
    /// The element type of the result.
    pub(in crate::ops) fn dtype(self, input: DType) -> DType {
        match self {
            UnaryResultType::Same => input,
            UnaryResultType::Float => dtype::real(input),
            UnaryResultType::Bool => DType::U8,
        }
    }

    /// The arithmetic in which elements of this type are computed.
    pub(in crate::ops) fn arithmetic(self, input: DType) -> ComputeType {
        if !input.is_float() && self != UnaryResultType::Float {
            ComputeType::I64
        } else {
            ComputeType::float_for([input])
        }
    }
}

/// The plan of an elementwise function of one tensor, with the `Partial` placements that pass. `wraps`: integers may overflow
/// their type. `shifts`: a constant is added, which a mean of terms lets pass.
pub(in crate::ops) fn plan(
    x: &TensorMeta,
    result_type: UnaryResultType,
    monotonicity: Monotonicity,
    wraps: bool,
    shifts: bool,
) -> OpPlan {
    let dtype = result_type.dtype(x.dtype);
    let mut signature = Signature::pointwise(&[&x.shape], &x.shape);
    let mut pass = |from, to| signature = signature.clone().allow_partial([Some(from)], to);
    let (sum, avg, max, min) = (ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min);
    if shifts && x.dtype.is_float() {
        pass(avg, avg);
    }
    // Converting integers to floating point rounds and does not commute with addition, so sums pass only if the type is kept.
    // Integers that wrap lose their order.
    let wraps = !x.dtype.is_float() && wraps;
    match monotonicity {
        Monotonicity::Increasing | Monotonicity::Decreasing | Monotonicity::IncreasingWhereDefined if wraps => {}
        Monotonicity::IncreasingWhereDefined => pass(min, min),
        Monotonicity::None => {}
        Monotonicity::Increasing => {
            pass(max, max);
            pass(min, min);
        }
        Monotonicity::Decreasing => {
            pass(max, min);
            pass(min, max);
        }
        Monotonicity::Linear { increasing } => {
            if dtype == x.dtype {
                pass(sum, sum);
                pass(avg, avg);
            }
            if !wraps {
                pass(max, if increasing { max } else { min });
                pass(min, if increasing { min } else { max });
            }
        }
    }
    OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype }] }
}

impl Differentiable for Unary {
    fn derivative(self) -> Option<&'static Derivative> {
        self.function().derivative.as_ref()
    }
}

impl Op for Unary {
    fn name(&self) -> &'static str {
        self.function().name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let UnaryFunction { result_type, monotonicity, .. } = *self.function();
        if *self == Unary::bitwise_not && inputs[0].dtype.is_float() {
            let found = format!("{} in bitwise_not", inputs[0].dtype.as_str());
            let kind = ErrorKind::dtype(inputs[0].dtype);
            return Err(kind.error("operand", found, "integers", "convert the tensor first"));
        }
        let wraps = matches!(self, Unary::neg | Unary::abs | Unary::square | Unary::bitwise_not);
        Ok(plan(&inputs[0], result_type, monotonicity, wraps, false))
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, result_type) = (&inputs[0], self.function().result_type);
        Ok(vec![self.compute(x, result_type.arithmetic(x.dtype()), result_type.dtype(x.dtype()))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        self.gradient_by_derivative()
    }
}

pub(in crate::ops) fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1], &[0, 2]];
    let mut all: Vec<Vec<SampleInput>> = shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect();
    all.push(vec![SampleInput::new(&[5], DType::I64)]);
    all
}

/// For functions on bits.
fn integers() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[0, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn derivatives_in_f32_are_those_in_f64() {
        let values: Vec<f64> = (-4000..4000).map(|i| f64::from(i) * 0.003 + 0.0007).collect();
        let x = Tensor::from_vec(values.clone(), 8000, &Device::Cpu).unwrap();
        let ones = x.ones_like().unwrap();
        let single = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        for function in ALL {
            let Some(derivative) = &function.function().derivative else { continue };
            let run = |x: &Tensor, g: &Tensor| derivative.times(x, g).unwrap();
            let wide = run(&single(&x).to_dtype(DType::F64).unwrap(), &ones).to_vec1::<f64>().unwrap();
            let fast = run(&single(&x), &single(&ones)).to_vec1::<f32>().unwrap();
            for (i, (wide, fast)) in wide.iter().zip(&fast).enumerate() {
                let near = (wide - f64::from(*fast)).abs() <= 2e-6 * wide.abs().max(1.0);
                assert!(
                    near || wide.is_nan() && fast.is_nan() || *wide as f32 == *fast,
                    "{function:?} at {}: {wide} {fast}",
                    values[i]
                );
            }
        }
    }
}
