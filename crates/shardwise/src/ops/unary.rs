//! Functions of one tensor, element by element: rule, kernel and derivative of each in one entry of a table.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, LN_10, PI};
use std::panic::Location;

use candle_core::{DType, Tensor};

use super::derivative::{Derivative, zero};
use super::{OpEntry, Sample, dtype};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps, is_recording};
use shardwise_kernels::{ComputeType, PerType, PointwiseFn, ViaF64, math, pointwise};

/// What a function does to the order and to sums of its arguments: which partial placements pass through it.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Passes {
    Nothing,
    /// Never decreases: the largest and the smallest stay so.
    Rising,
    /// Never increases: the largest becomes the smallest.
    Falling,
    /// Never decreases, and is NaN below some number: the smallest stays so, and decides whether there is one.
    RisingAbove,
    /// A multiple: sums and means stay, order stays or turns with the sign.
    Multiple {
        rising: bool,
    },
}

/// What becomes of the element type.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Gives {
    /// The same type; integers are computed as such.
    Same,
    /// A floating-point type.
    Real,
    /// 0 or 1.
    Truth,
}

/// One function: its name, what passes, the element type of the result, its kernel and its derivative.
struct Entry {
    name: &'static str,
    passes: Passes,
    gives: Gives,
    run: fn(&Tensor, ComputeType, DType) -> Result<Tensor>,
    /// `None` if it is not differentiable.
    derivative: Option<Derivative>,
}

/// Functions by name. `each` is written alike for f32 and f64, `wide` is computed in f64 for f32 too, and `fast` has a
/// function of f32 in [`math`]; integers that stay so are left as they are unless another function is given. Then the
/// derivative, which every entry has to state: `slope` of a number, as a formula of operators and, for those that training is
/// full of, in f32 with the functions of [`math`]; or `not_differentiable`.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $passes:expr, $gives:ident, |$x:ident| $form:ident($real:expr) $(, whole($whole:expr))?
            => $derivative:ident $(($($slope:tt)*))?;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                #[track_caller]
                pub fn $name(&self) -> Result<DTensor> {
                    Ok(dispatch(&Unary::$name, &[self], Location::caller())?.swap_remove(0))
                }
            )*
        }

        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(super) enum Unary {
            $($name,)*
        }

        static FUNCTIONS: &[Entry] = &[
            $(Entry {
                name: stringify!($name),
                passes: $passes,
                gives: Gives::$gives,
                run: |x, arithmetic, dtype| {
                    let whole = functions!(@whole $x $(, $whole)?);
                    Ok(pointwise(functions!(@$form $name, $x, $real, whole), [x], x.dims(), arithmetic, dtype)?)
                },
                derivative: functions!(@$derivative $(($($slope)*))?),
            },)*
        ];

        pub(super) const OPS: &[OpEntry] = &[
            $(OpEntry { name: stringify!($name), samples, apply: |x| Ok(vec![x[0].$name()?]) },)*
        ];

        #[cfg(test)]
        const ALL: &[Unary] = &[$(Unary::$name,)*];
    };
    (@whole $x:ident) => { |[$x]: [i64; 1]| $x };
    (@whole $x:ident, $whole:expr) => {
        |[$x]: [i64; 1]| {
            let _ = $x;
            $whole
        }
    };
    (@each $name:ident, $x:ident, $real:expr, $whole:ident) => {
        PerType(|[$x]: [f32; 1]| $real, |[$x]: [f64; 1]| $real, $whole)
    };
    (@wide $name:ident, $x:ident, $real:expr, $whole:ident) => { ViaF64(|[$x]: [f64; 1]| $real, $whole) };
    (@fast $name:ident, $x:ident, $real:expr, $whole:ident) => {{
        #[derive(Clone, Copy)]
        struct Fast<W>(W);
        impl<W: Fn([i64; 1]) -> i64 + Copy> PointwiseFn<1> for Fast<W> {
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
        Fast($whole)
    }};
    (@not_differentiable) => { None };
    (@slope ($at:expr, $formula:expr)) => { Some(Derivative { at: $at, formula: $formula, kernel: None }) };
    (@slope ($at:expr, $formula:expr, f32(|$x:ident| $fast:expr))) => {{
        #[derive(Clone, Copy)]
        struct Fast;
        impl PointwiseFn<2> for Fast {
            #[inline(always)]
            fn f32<const FMA: bool>(self, [$x, g]: [f32; 2]) -> f32 {
                g * $fast
            }
            #[inline(always)]
            fn f64(self, [x, g]: [f64; 2]) -> f64 {
                let at: fn(f64) -> f64 = $at;
                g * at(x)
            }
            #[inline(always)]
            fn i64(self, [_, g]: [i64; 2]) -> i64 {
                g
            }
        }
        let kernel: fn(&Tensor, &Tensor) -> Result<Tensor> =
            |x, g| Ok(pointwise(Fast, [x, g], x.dims(), ComputeType::float_for([x.dtype(), g.dtype()]), g.dtype())?);
        Some(Derivative { at: $at, formula: $formula, kernel: Some(kernel) })
    }};
}

const RISING: Passes = Passes::Rising;
const NOTHING: Passes = Passes::Nothing;
const GELU_INNER: f64 = 0.797_884_560_802_865_4; // sqrt(2 / pi)
const GELU_CUBIC: f64 = 0.044715;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

functions! {
    /// The negative.
    neg: Passes::Multiple { rising: false }, Same, |x| each(-x), whole(x.wrapping_neg())
        => slope(|_| -1.0, |x| zero(x)?.add_scalar(-1.0));
    /// The absolute value.
    abs: NOTHING, Same, |x| each(x.abs()), whole(x.wrapping_abs())
        => slope(|x| if x == 0.0 { 0.0 } else { x.signum() }, DTensor::sign);
    /// -1, 0 or 1; 0 for NaN, as in PyTorch.
    sign: NOTHING, Same, |x| each(if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }), whole(x.signum())
        => slope(|_| 0.0, zero);
    /// The square.
    square: NOTHING, Same, |x| each(x * x), whole(x.wrapping_mul(x))
        => slope(|x| 2.0 * x, |x| x.mul_scalar(2.0));
    /// The positive part.
    relu: RISING, Same, |x| each(if x < 0.0 { 0.0 } else { x }), whole(x.max(0))
        => slope(|x| f64::from(u8::from(x > 0.0)), |x| x.gt(&zero(x)?)?.to_dtype(x.dtype()),
            f32(|x| if x > 0.0 { 1.0 } else { 0.0 }));
    /// The next integer below.
    floor: RISING, Same, |x| each(x.floor())
        => slope(|_| 0.0, zero);
    /// The next integer above.
    ceil: RISING, Same, |x| each(x.ceil())
        => slope(|_| 0.0, zero);
    /// The nearest integer, the even one of two.
    round: RISING, Same, |x| each(x.round_ties_even())
        => slope(|_| 0.0, zero);
    /// The integer part.
    trunc: RISING, Same, |x| each(x.trunc())
        => slope(|_| 0.0, zero);
    /// What is left without the integer part.
    frac: NOTHING, Real, |x| each(x.fract())
        => slope(|_| 1.0, |x| zero(x)?.add_scalar(1.0));
    /// e to the power of x.
    exp: RISING, Real, |x| fast(x.exp())
        => slope(f64::exp, DTensor::exp, f32(|x| math::exp::<FMA>(x)));
    /// exp(x) - 1.
    expm1: RISING, Real, |x| fast(x.exp_m1())
        => slope(f64::exp, DTensor::exp);
    /// 2 to the power of x.
    exp2: RISING, Real, |x| each(x.exp2())
        => slope(|x| x.exp2() * LN_2, |x| x.exp2()?.mul_scalar(LN_2));
    /// Natural logarithm.
    log: Passes::RisingAbove, Real, |x| fast(x.ln())
        => slope(f64::recip, DTensor::reciprocal);
    /// log(1 + x).
    log1p: Passes::RisingAbove, Real, |x| fast(x.ln_1p())
        => slope(|x| 1.0 / (1.0 + x), |x| x.add_scalar(1.0)?.reciprocal());
    /// Logarithm to base 2.
    log2: Passes::RisingAbove, Real, |x| each(x.log2())
        => slope(|x| 1.0 / (x * LN_2), |x| x.mul_scalar(LN_2)?.reciprocal());
    /// Logarithm to base 10.
    log10: Passes::RisingAbove, Real, |x| wide(x.log10())
        => slope(|x| 1.0 / (x * LN_10), |x| x.mul_scalar(LN_10)?.reciprocal());
    /// Square root.
    sqrt: Passes::RisingAbove, Real, |x| each(x.sqrt())
        => slope(|x| 0.5 / x.sqrt(), |x| x.rsqrt()?.mul_scalar(0.5));
    /// 1 / sqrt(x).
    rsqrt: NOTHING, Real, |x| each(1.0 / x.sqrt())
        => slope(|x| -0.5 / (x * x.sqrt()), |x| x.rsqrt()?.pow_scalar(3.0)?.mul_scalar(-0.5));
    /// 1 / x.
    reciprocal: NOTHING, Real, |x| each(1.0 / x)
        => slope(|x| -1.0 / (x * x), |x| x.reciprocal()?.square()?.neg());
    /// Sine.
    sin: NOTHING, Real, |x| each(x.sin())
        => slope(f64::cos, DTensor::cos);
    /// Cosine.
    cos: NOTHING, Real, |x| each(x.cos())
        => slope(|x| -x.sin(), |x| x.sin()?.neg());
    /// Tangent.
    tan: NOTHING, Real, |x| wide(x.tan())
        => slope(|x| 1.0 + x.tan().powi(2), |x| x.tan()?.square()?.add_scalar(1.0));
    /// Inverse sine.
    asin: NOTHING, Real, |x| wide(x.asin())
        => slope(|x| 1.0 / (1.0 - x * x).sqrt(), |x| x.square()?.rsub_scalar(1.0)?.rsqrt());
    /// Inverse tangent.
    atan: RISING, Real, |x| wide(x.atan())
        => slope(|x| 1.0 / (1.0 + x * x), |x| x.square()?.add_scalar(1.0)?.reciprocal());
    /// Hyperbolic sine.
    sinh: RISING, Real, |x| wide(x.sinh())
        => slope(f64::cosh, DTensor::cosh);
    /// Hyperbolic cosine.
    cosh: NOTHING, Real, |x| wide(x.cosh())
        => slope(f64::sinh, DTensor::sinh);
    /// Inverse hyperbolic sine.
    asinh: RISING, Real, |x| wide(libm::asinh(x)) // that of std overflows for the largest numbers
        => slope(|x| 1.0 / (1.0 + x * x).sqrt(), |x| x.square()?.add_scalar(1.0)?.rsqrt());
    /// Hyperbolic tangent.
    tanh: RISING, Real, |x| fast(x.tanh())
        => slope(|x| 1.0 - x.tanh().powi(2), |x| x.tanh()?.square()?.rsub_scalar(1.0), f32(|x| {
            let t = math::tanh::<FMA>(x);
            (1.0 - t) * (1.0 + t)
        }));
    /// Error function.
    erf: RISING, Real, |x| fast(libm::erf(x))
        => slope(|x| 2.0 / PI.sqrt() * (-x * x).exp(), |x| x.square()?.neg()?.exp()?.mul_scalar(2.0 / PI.sqrt()));
    /// 1 - erf(x).
    erfc: Passes::Falling, Real, |x| fast(libm::erfc(x))
        => slope(|x| -2.0 / PI.sqrt() * (-x * x).exp(), |x| x.square()?.neg()?.exp()?.mul_scalar(-2.0 / PI.sqrt()));
    /// 1 / (1 + exp(-x)).
    sigmoid: RISING, Real, |x| fast(1.0 / (1.0 + (-x).exp()))
        => slope(|x| sigmoid(x) * sigmoid(-x), |x| x.sigmoid()?.mul(&x.neg()?.sigmoid()?), f32(|x| {
            math::sigmoid::<FMA>(x) * math::sigmoid::<FMA>(-x)
        }));
    /// log(sigmoid(x)).
    logsigmoid: RISING, Real, |x| fast(x.min(0.0) - (-x.abs()).exp().ln_1p())
        => slope(|x| sigmoid(-x), |x| x.neg()?.sigmoid());
    /// x / (1 + |x|).
    softsign: NOTHING, Real, |x| each(x / (1.0 + x.abs()))
        => slope(|x| (1.0 + x.abs()).powi(-2), |x| x.abs()?.add_scalar(1.0)?.square()?.reciprocal());
    /// x * sigmoid(x).
    silu: NOTHING, Real, |x| fast(x / (1.0 + (-x).exp()))
        => slope(|x| sigmoid(x) * (1.0 + x * sigmoid(-x)), |x| {
            let other = x.neg()?.sigmoid()?;
            x.sigmoid()?.mul(&x.mul(&other)?.add_scalar(1.0)?)
        }, f32(|x| math::sigmoid::<FMA>(x) * (1.0 + x * math::sigmoid::<FMA>(-x))));
    /// x * tanh(softplus(x)).
    mish: NOTHING, Real, |x| fast(x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh())
        => slope(|x| {
            let t = (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh();
            t + x * (1.0 - t * t) * sigmoid(x)
        }, |x| {
            let t = x.softplus(1.0, 20.0)?.tanh()?;
            t.add(&x.mul(&x.sigmoid()?)?.mul(&t.square()?.rsub_scalar(1.0)?)?)
        });
    /// x * clamp(x + 3, 0, 6) / 6.
    ///
    /// At its two kinks it has the slope of the straight part, as in PyTorch.
    hardswish: NOTHING, Real, |x| wide(x * (x + 3.0).clamp(0.0, 6.0) / 6.0)
        => slope(|x| if x <= -3.0 { 0.0 } else if x >= 3.0 { 1.0 } else { (2.0 * x + 3.0) / 6.0 }, |x| {
            let inside = x.mul_scalar(2.0)?.add_scalar(3.0)?.div_scalar(6.0)?;
            let above = x.ge(&zero(x)?.add_scalar(3.0)?)?;
            let below = x.le(&zero(x)?.add_scalar(-3.0)?)?;
            below.where_cond(&zero(x)?, &above.where_cond(&zero(x)?.add_scalar(1.0)?, &inside)?)
        });
    /// x * Phi(x) with the normal distribution.
    gelu: NOTHING, Real, |x| fast(0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2))
        => slope(|x| {
            let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
            0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2)) + x * density
        }, |x| {
            let density = x.square()?.mul_scalar(-0.5)?.exp()?.mul_scalar(1.0 / (2.0 * PI).sqrt())?;
            x.mul_scalar(FRAC_1_SQRT_2)?.erf()?.add_scalar(1.0)?.mul_scalar(0.5)?.add(&x.mul(&density)?)
        }, f32(|x| {
            let below = 0.5 * (1.0 + math::erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2));
            below + x * math::exp::<FMA>(-0.5 * x * x) * 0.398_942_3
        }));
    /// The tanh approximation of gelu, which is x * sigmoid(z) with a cubic z.
    gelu_tanh: NOTHING, Real, |x| fast({
        let z = 2.0 * (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
        x / (1.0 + (-z).exp())
    }) => slope(|x| {
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
    /// 1 where NaN.
    isnan: NOTHING, Truth, |x| each(if x.is_nan() { 1.0 } else { 0.0 }), whole(0)
        => not_differentiable;
    /// 1 where finite.
    isfinite: NOTHING, Truth, |x| each(if x.is_finite() { 1.0 } else { 0.0 }), whole(1)
        => not_differentiable;
    /// 1 where infinite.
    isinf: NOTHING, Truth, |x| each(if x.is_infinite() { 1.0 } else { 0.0 }), whole(0)
        => not_differentiable;
    /// 1 where the sign is negative.
    signbit: NOTHING, Truth, |x| each(if x.is_sign_negative() { 1.0 } else { 0.0 }), whole(i64::from(x < 0))
        => not_differentiable;
    /// 1 where zero.
    logical_not: NOTHING, Truth, |x| each(if x == 0.0 { 1.0 } else { 0.0 }), whole(i64::from(x == 0))
        => not_differentiable;
}

impl Unary {
    fn entry(self) -> &'static Entry {
        &FUNCTIONS[self as usize]
    }

    /// The function on a local tensor.
    pub(super) fn compute(self, x: &Tensor, arithmetic: ComputeType, dtype: DType) -> Result<Tensor> {
        (self.entry().run)(x, arithmetic, dtype)
    }
}

impl Gives {
    /// The element type of the result.
    pub(super) fn dtype(self, input: DType) -> DType {
        match self {
            Gives::Same => input,
            Gives::Real => dtype::real(input),
            Gives::Truth => DType::U8,
        }
    }

    /// How elements of this type are computed.
    pub(super) fn arithmetic(self, input: DType) -> ComputeType {
        if !input.is_float() && self != Gives::Real { ComputeType::I64 } else { ComputeType::float_for([input]) }
    }
}

/// The plan of a function of one tensor: elementwise, with the partial placements that pass. `wraps` says whether integers may
/// leave the range of their type, `shifts` whether the same number is added to every term of a mean.
pub(super) fn plan(x: &TensorMeta, gives: Gives, passes: Passes, wraps: bool, shifts: bool) -> OpPlan {
    let dtype = gives.dtype(x.dtype);
    let mut signature = Signature::pointwise(&[&x.shape], &x.shape);
    let mut pass = |from, to| signature = signature.clone().passing([Some(from)], to);
    let (sum, avg, max, min) = (ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min);
    if shifts && x.dtype.is_float() {
        pass(avg, avg);
    }
    // Rounding integers does not commute with adding, so sums pass only where the type stays; and integers
    // that wrap lose their order.
    let wraps = !x.dtype.is_float() && wraps;
    match passes {
        Passes::Rising | Passes::Falling | Passes::RisingAbove if wraps => {}
        Passes::RisingAbove => pass(min, min),
        Passes::Nothing => {}
        Passes::Rising => {
            pass(max, max);
            pass(min, min);
        }
        Passes::Falling => {
            pass(max, min);
            pass(min, max);
        }
        Passes::Multiple { rising } => {
            if dtype == x.dtype {
                pass(sum, sum);
                pass(avg, avg);
            }
            if !wraps {
                pass(max, if rising { max } else { min });
                pass(min, if rising { min } else { max });
            }
        }
    }
    OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype }] }
}

impl Op for Unary {
    fn name(&self) -> &'static str {
        self.entry().name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let Entry { gives, passes, .. } = *self.entry();
        let wraps = matches!(self, Unary::neg | Unary::abs | Unary::square);
        Ok(plan(&inputs[0], gives, passes, wraps, false))
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let (x, gives) = (&inputs[0], self.entry().gives);
        Ok(vec![self.compute(x, gives.arithmetic(x.dtype()), gives.dtype(x.dtype()))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        if self.entry().derivative.is_none() {
            return Gradient::NotDifferentiable;
        }
        Gradient::From(Keeps::Inputs, |op, saved, gradients| {
            let (Some(derivative), Some(g)) = (&op.entry().derivative, &gradients[0]) else { return Ok(vec![None]) };
            let x = saved.input(0);
            if is_recording() {
                return Ok(vec![Some(g.mul(&(derivative.formula)(&x)?)?)]);
            }
            Ok(vec![Some(dispatch(&Slope(*op), &[&x, g], Location::caller())?.swap_remove(0))])
        })
    }
}

/// The derivative of a function at the first tensor, times the second: the gradient in one pass over memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Slope(Unary);

impl Op for Slope {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, g) = (&inputs[0], &inputs[1]);
        // Linear in the gradient.
        let signature = Signature::pointwise(&[&x.shape, &g.shape], &x.shape)
            .passing([None, Some(ReduceOp::Sum)], ReduceOp::Sum)
            .passing([None, Some(ReduceOp::Avg)], ReduceOp::Avg);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype: g.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let derivative = self.0.entry().derivative.as_ref().expect("run for functions that have one");
        Ok(vec![derivative.times(&inputs[0], &inputs[1])?])
    }

    /// Runs in backward passes that are not recorded; recorded ones use [`Derivative::formula`].
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(super) fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1], &[0, 2]];
    let mut all: Vec<Vec<Sample>> = shapes.iter().map(|shape| vec![Sample::new(shape, DType::F64)]).collect();
    all.push(vec![Sample::new(&[5], DType::I64)]);
    all
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
            let Some(derivative) = &function.entry().derivative else { continue };
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
