//! Functions of one tensor, element by element.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::binary::power;
use super::scalar::Scalar;
use super::{OpEntry, Sample, derivative, dtype};
use crate::error::{Error, Result};
use crate::layout::TensorMeta;
use crate::op::{Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps, Saved};
use shardwise_kernels::{Arithmetic, Each, Function, Number, Wide, limits, map, math};

/// What a function does to the order and to sums of its arguments: which pending reductions pass through it.
#[derive(Clone, Copy, PartialEq)]
enum Passes {
    Nothing,
    /// Never decreases: the largest and the smallest stay so.
    Rising,
    /// Never increases: the largest becomes the smallest.
    Falling,
    /// Never decreases, and is not-a-number below some number: the smallest stays so, and decides whether there is one.
    RisingAbove,
    /// A multiple: sums and means stay, order stays or turns with the sign.
    Multiple {
        rising: bool,
    },
}

/// What becomes of the element type.
#[derive(Clone, Copy, PartialEq)]
enum Gives {
    /// The same type; integers are computed as such.
    Same,
    /// A floating-point type.
    Real,
    /// 0 or 1.
    Truth,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Unary {
    Named(Name),
    LeakyRelu(Scalar),
    Elu(Scalar),
    Softplus(Scalar, Scalar),
    Pow(Scalar),
    Clamp(Option<Scalar>, Option<Scalar>),
    Add(Number),
    Mul(Number),
    RSub(Number),
    Div(Scalar),
    NanToNum(Scalar, Scalar, Scalar),
}

/// One function without arguments: its name, what passes, what it gives, and its kernel.
struct Entry {
    name: &'static str,
    passes: Passes,
    gives: Gives,
    run: fn(&Tensor, Arithmetic, DType) -> Result<Tensor>,
}

/// Functions by name. `each` is written alike for f32 and f64, `wide` is computed in f64 for f32 too, and `fast` has a
/// function of f32 in [`math`]; integers that stay so are left as they are unless another function is given.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $passes:expr, $gives:ident, |$x:ident| $form:ident($real:expr) $(, whole($whole:expr))?;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                #[track_caller]
                pub fn $name(&self) -> Result<DTensor> {
                    call(Unary::Named(Name::$name), self)
                }
            )*
        }

        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        enum Name {
            $($name,)*
        }

        static FUNCTIONS: &[Entry] = &[
            $(Entry {
                name: stringify!($name),
                passes: $passes,
                gives: Gives::$gives,
                run: |x, arithmetic, dtype| {
                    let whole = functions!(@whole $x $(, $whole)?);
                    Ok(map(functions!(@$form $name, $x, $real, whole), [x], x.dims(), arithmetic, dtype)?)
                },
            },)*
        ];

        pub(super) const OPS: &[OpEntry] = &[
            $(OpEntry { name: stringify!($name), samples, apply: |x| Ok(vec![x[0].$name()?]) },)*
            OpEntry { name: "leaky_relu", samples, apply: |x| Ok(vec![x[0].leaky_relu(0.1)?]) },
            OpEntry { name: "elu", samples, apply: |x| Ok(vec![x[0].elu(0.5)?]) },
            OpEntry { name: "softplus", samples, apply: |x| Ok(vec![x[0].softplus(2.0, 20.0)?]) },
            OpEntry { name: "pow_scalar", samples, apply: |x| Ok(vec![x[0].pow_scalar(3.0)?]) },
            OpEntry { name: "clamp", samples, apply: |x| Ok(vec![x[0].clamp(Some(-0.5), Some(0.5))?]) },
            OpEntry { name: "add_scalar", samples, apply: |x| Ok(vec![x[0].add_scalar(1.5)?]) },
            OpEntry { name: "sub_scalar", samples, apply: |x| Ok(vec![x[0].sub_scalar(1.5)?]) },
            OpEntry { name: "rsub_scalar", samples, apply: |x| Ok(vec![x[0].rsub_scalar(1.5)?]) },
            OpEntry { name: "mul_scalar", samples, apply: |x| Ok(vec![x[0].mul_scalar(-2.0)?]) },
            OpEntry { name: "div_scalar", samples, apply: |x| Ok(vec![x[0].div_scalar(4.0)?]) },
            OpEntry { name: "nan_to_num", samples, apply: |x| Ok(vec![x[0].nan_to_num(0.0, 1e3, -1e3)?]) },
        ];
    };
    (@whole $x:ident) => { |[$x]: [i64; 1]| $x };
    (@whole $x:ident, $whole:expr) => {
        |[$x]: [i64; 1]| {
            let _ = $x;
            $whole
        }
    };
    (@each $name:ident, $x:ident, $real:expr, $whole:ident) => {
        Each(|[$x]: [f32; 1]| $real, |[$x]: [f64; 1]| $real, $whole)
    };
    (@wide $name:ident, $x:ident, $real:expr, $whole:ident) => { Wide(|[$x]: [f64; 1]| $real, $whole) };
    (@fast $name:ident, $x:ident, $real:expr, $whole:ident) => {{
        #[derive(Clone, Copy)]
        struct Fast<W>(W);
        impl<W: Fn([i64; 1]) -> i64 + Copy> Function<1> for Fast<W> {
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
}

const RISING: Passes = Passes::Rising;
const NOTHING: Passes = Passes::Nothing;

functions! {
    /// The negative.
    neg: Passes::Multiple { rising: false }, Same, |x| each(-x), whole(x.wrapping_neg());
    /// The absolute value.
    abs: NOTHING, Same, |x| each(x.abs()), whole(x.wrapping_abs());
    /// -1, 0 or 1; 0 for NaN, as in PyTorch.
    sign: NOTHING, Same, |x| each(if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }), whole(x.signum());
    /// The square.
    square: NOTHING, Same, |x| each(x * x), whole(x.wrapping_mul(x));
    /// The positive part.
    relu: RISING, Same, |x| each(if x < 0.0 { 0.0 } else { x }), whole(x.max(0));
    /// The next whole number below.
    floor: RISING, Same, |x| each(x.floor());
    /// The next whole number above.
    ceil: RISING, Same, |x| each(x.ceil());
    /// The nearest whole number, the even one of two.
    round: RISING, Same, |x| each(x.round_ties_even());
    /// The whole part.
    trunc: RISING, Same, |x| each(x.trunc());
    /// What is left without the whole part.
    frac: NOTHING, Real, |x| each(x.fract());
    /// e to the power of x.
    exp: RISING, Real, |x| fast(x.exp());
    /// exp(x) - 1.
    expm1: RISING, Real, |x| fast(x.exp_m1());
    /// 2 to the power of x.
    exp2: RISING, Real, |x| each(x.exp2());
    /// Natural logarithm.
    log: Passes::RisingAbove, Real, |x| fast(x.ln());
    /// log(1 + x).
    log1p: Passes::RisingAbove, Real, |x| fast(x.ln_1p());
    /// Logarithm to base 2.
    log2: Passes::RisingAbove, Real, |x| each(x.log2());
    /// Logarithm to base 10.
    log10: Passes::RisingAbove, Real, |x| wide(x.log10());
    /// Square root.
    sqrt: Passes::RisingAbove, Real, |x| each(x.sqrt());
    /// 1 / sqrt(x).
    rsqrt: NOTHING, Real, |x| each(1.0 / x.sqrt());
    /// 1 / x.
    reciprocal: NOTHING, Real, |x| each(1.0 / x);
    /// Sine.
    sin: NOTHING, Real, |x| each(x.sin());
    /// Cosine.
    cos: NOTHING, Real, |x| each(x.cos());
    /// Tangent.
    tan: NOTHING, Real, |x| wide(x.tan());
    /// Inverse sine.
    asin: NOTHING, Real, |x| wide(x.asin());
    /// Inverse tangent.
    atan: RISING, Real, |x| wide(x.atan());
    /// Hyperbolic sine.
    sinh: RISING, Real, |x| wide(x.sinh());
    /// Hyperbolic cosine.
    cosh: NOTHING, Real, |x| wide(x.cosh());
    /// Inverse hyperbolic sine.
    asinh: RISING, Real, |x| wide(libm::asinh(x)); // that of std overflows for the largest numbers
    /// Hyperbolic tangent.
    tanh: RISING, Real, |x| fast(x.tanh());
    /// Error function.
    erf: RISING, Real, |x| fast(libm::erf(x));
    /// 1 - erf(x).
    erfc: Passes::Falling, Real, |x| fast(libm::erfc(x));
    /// 1 / (1 + exp(-x)).
    sigmoid: RISING, Real, |x| fast(1.0 / (1.0 + (-x).exp()));
    /// log(sigmoid(x)).
    logsigmoid: RISING, Real, |x| fast(x.min(0.0) - (-x.abs()).exp().ln_1p());
    /// x / (1 + |x|).
    softsign: NOTHING, Real, |x| each(x / (1.0 + x.abs()));
    /// x * sigmoid(x).
    silu: NOTHING, Real, |x| fast(x / (1.0 + (-x).exp()));
    /// x * tanh(softplus(x)).
    mish: NOTHING, Real, |x| fast(x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh());
    /// x * clamp(x + 3, 0, 6) / 6.
    hardswish: NOTHING, Real, |x| wide(x * (x + 3.0).clamp(0.0, 6.0) / 6.0);
    /// x * Phi(x) with the normal distribution.
    gelu: NOTHING, Real, |x| fast(0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2));
    /// The tanh approximation of gelu, which is x * sigmoid(z) with a cubic z.
    gelu_tanh: NOTHING, Real, |x| fast({
        let z = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        x / (1.0 + (-z).exp())
    });
    /// 1 where not-a-number.
    isnan: NOTHING, Truth, |x| each(if x.is_nan() { 1.0 } else { 0.0 }), whole(0);
    /// 1 where finite.
    isfinite: NOTHING, Truth, |x| each(if x.is_finite() { 1.0 } else { 0.0 }), whole(1);
    /// 1 where infinite.
    isinf: NOTHING, Truth, |x| each(if x.is_infinite() { 1.0 } else { 0.0 }), whole(0);
    /// 1 where the sign is negative.
    signbit: NOTHING, Truth, |x| each(if x.is_sign_negative() { 1.0 } else { 0.0 }), whole(i64::from(x < 0));
    /// 1 where zero.
    logical_not: NOTHING, Truth, |x| each(if x == 0.0 { 1.0 } else { 0.0 }), whole(i64::from(x == 0));
}

impl DTensor {
    /// `x` where positive, else `slope * x`.
    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Result<DTensor> {
        call(Unary::LeakyRelu(Scalar(slope)), self)
    }

    /// `x` where positive, else `alpha * (exp(x) - 1)`.
    #[track_caller]
    pub fn elu(&self, alpha: f64) -> Result<DTensor> {
        call(Unary::Elu(Scalar(alpha)), self)
    }

    /// `log(1 + exp(beta * x)) / beta`, and `x` where `beta * x` is above the threshold.
    #[track_caller]
    pub fn softplus(&self, beta: f64, threshold: f64) -> Result<DTensor> {
        call(Unary::Softplus(Scalar(beta), Scalar(threshold)), self)
    }

    /// `x` to the power of a number.
    #[track_caller]
    pub fn pow_scalar(&self, exponent: f64) -> Result<DTensor> {
        call(Unary::Pow(Scalar(exponent)), self)
    }

    /// `x`, but no less than `min` and no more than `max`.
    #[track_caller]
    pub fn clamp(&self, min: Option<f64>, max: Option<f64>) -> Result<DTensor> {
        call(Unary::Clamp(min.map(Scalar), max.map(Scalar)), self)
    }

    /// `x + number`.
    #[track_caller]
    pub fn add_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Unary::Add(number.into()), self)
    }

    /// `x - number`.
    #[track_caller]
    pub fn sub_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Unary::Add(number.into().negative()), self)
    }

    /// `number - x`.
    #[track_caller]
    pub fn rsub_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Unary::RSub(number.into()), self)
    }

    /// `x * number`.
    #[track_caller]
    pub fn mul_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Unary::Mul(number.into()), self)
    }

    /// `x / number`.
    #[track_caller]
    pub fn div_scalar(&self, number: f64) -> Result<DTensor> {
        call(Unary::Div(Scalar(number)), self)
    }

    /// `x` with numbers in place of not-a-number and of the infinities.
    #[track_caller]
    pub fn nan_to_num(&self, nan: f64, posinf: f64, neginf: f64) -> Result<DTensor> {
        call(Unary::NanToNum(Scalar(nan), Scalar(posinf), Scalar(neginf)), self)
    }
}

#[track_caller]
fn call(op: Unary, x: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&op, &[x], Location::caller())?.swap_remove(0))
}

impl Unary {
    fn passes(self) -> Passes {
        match self {
            Unary::Named(name) => FUNCTIONS[name as usize].passes,
            Unary::LeakyRelu(s) | Unary::Elu(s) if s.0 > 0.0 => RISING,
            Unary::Softplus(beta, _) if beta.0 > 0.0 => RISING,
            Unary::Clamp(..) => RISING,
            // Not-a-number would win where an infinite operand meets an infinite number.
            Unary::Add(s) if s.real().is_finite() => RISING,
            Unary::RSub(s) if s.real().is_finite() => Passes::Falling,
            Unary::Mul(Number::Real(s)) | Unary::Div(Scalar(s)) if s.is_finite() && s != 0.0 => {
                Passes::Multiple { rising: s > 0.0 }
            }
            Unary::Mul(Number::Integer(s)) if s != 0 => Passes::Multiple { rising: s > 0 },
            _ => NOTHING,
        }
    }

    /// Whether integers may leave the range of their type.
    fn wraps(self) -> bool {
        self.gives() == Gives::Same
            && match self {
                Unary::Named(name) => matches!(name, Name::neg | Name::abs | Name::square),
                Unary::Clamp(..) | Unary::NanToNum(..) => false,
                _ => true,
            }
    }

    /// An error if an integer is to be clamped to what its type does not hold.
    fn check_bounds(self, dtype: DType) -> Result<()> {
        let (Unary::Clamp(low, high), Some((least, most))) = (self, limits(dtype)) else { return Ok(()) };
        if self.gives() != Gives::Same
            || low.is_none_or(|s| s.0 <= most as f64) && high.is_none_or(|s| s.0 >= least as f64)
        {
            return Ok(());
        }
        let text = |s: Option<Scalar>| s.map_or("none".to_string(), |s| s.0.to_string());
        let found = format!("bounds {} and {} for {} in clamp", text(low), text(high), dtype.as_str());
        let needed = format!("a lower bound of at most {most} and an upper one of at least {least}");
        Err(Error::invalid("bounds", found, needed, "use other bounds, or convert the tensor first"))
    }

    /// What becomes of the element type.
    fn gives(self) -> Gives {
        let whole = |s: Scalar| Number::Real(s.0).is_integer();
        match self {
            Unary::Named(name) => FUNCTIONS[name as usize].gives,
            Unary::Add(s) | Unary::Mul(s) | Unary::RSub(s) if s.is_integer() => Gives::Same,
            Unary::Pow(s) if whole(s) && s.0 >= 0.0 => Gives::Same,
            Unary::Clamp(a, b) if a.is_none_or(whole) && b.is_none_or(whole) => Gives::Same,
            Unary::NanToNum(..) => Gives::Same,
            _ => Gives::Real,
        }
    }

    /// The function on a local tensor.
    fn compute(self, x: &Tensor, arithmetic: Arithmetic, dtype: DType) -> Result<Tensor> {
        match self {
            Unary::Named(name) => (FUNCTIONS[name as usize].run)(x, arithmetic, dtype),
            Unary::LeakyRelu(Scalar(s)) => wide(x, arithmetic, dtype, move |x| if x < 0.0 { s * x } else { x }, |x| x),
            Unary::Elu(Scalar(alpha)) => Ok(map(Elu { alpha }, [x], x.dims(), arithmetic, dtype)?),
            // Where the argument is scaled, f32 has too few digits for it.
            Unary::Softplus(Scalar(beta), Scalar(threshold)) if beta != 1.0 => {
                let f = move |x: f64| if beta * x > threshold { x } else { (beta * x).exp().ln_1p() / beta };
                wide(x, arithmetic, dtype, f, |x| x)
            }
            Unary::Softplus(_, Scalar(threshold)) => Ok(map(Softplus { threshold }, [x], x.dims(), arithmetic, dtype)?),
            Unary::Pow(Scalar(2.0)) => (FUNCTIONS[Name::square as usize].run)(x, arithmetic, dtype),
            Unary::Pow(Scalar(s)) => wide(x, arithmetic, dtype, move |x| x.powf(s), move |x| power(x, s as i64)),
            Unary::Clamp(low, high) => {
                // A bound that is missing bounds nothing; NaN stays, and a bound that is NaN gives NaN.
                let (low, high) = (low.map_or(f64::NEG_INFINITY, |s| s.0), high.map_or(f64::INFINITY, |s| s.0));
                let real = move |x: f64| {
                    let x = if x < low || low.is_nan() { low } else { x };
                    if x > high || high.is_nan() { high } else { x }
                };
                wide(x, arithmetic, dtype, real, move |x| x.max(low as i64).min(high as i64))
            }
            Unary::Add(s) => {
                let (real, whole) = (s.real(), s.integer());
                wide(x, arithmetic, dtype, move |x| x + real, move |x| x.wrapping_add(whole))
            }
            Unary::Mul(s) => {
                let (real, whole) = (s.real(), s.integer());
                wide(x, arithmetic, dtype, move |x| x * real, move |x| x.wrapping_mul(whole))
            }
            Unary::RSub(s) => {
                let (real, whole) = (s.real(), s.integer());
                wide(x, arithmetic, dtype, move |x| real - x, move |x| whole.wrapping_sub(x))
            }
            Unary::Div(Scalar(s)) => wide(x, arithmetic, dtype, move |x| x / s, |x| x),
            Unary::NanToNum(Scalar(nan), Scalar(most), Scalar(least)) => {
                let real = move |x: f64| {
                    let x = if x == f64::INFINITY { most } else { x };
                    let x = if x == f64::NEG_INFINITY { least } else { x };
                    if x.is_nan() { nan } else { x }
                };
                wide(x, arithmetic, dtype, real, |x| x)
            }
        }
    }
}

/// A function of which f32 too is computed in f64: a number given as f64 is not rounded before it is used.
fn wide(
    x: &Tensor,
    arithmetic: Arithmetic,
    dtype: DType,
    real: impl Fn(f64) -> f64 + Copy,
    whole: impl Fn(i64) -> i64 + Copy,
) -> Result<Tensor> {
    Ok(map(Wide(move |[x]: [f64; 1]| real(x), move |[x]: [i64; 1]| whole(x)), [x], x.dims(), arithmetic, dtype)?)
}

#[derive(Clone, Copy)]
struct Elu {
    alpha: f64,
}

impl Function<1> for Elu {
    #[inline(always)]
    fn f32<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
        let below = (self.alpha * f64::from(math::expm1::<FMA>(x))) as f32;
        if x < 0.0 { below } else { x }
    }

    #[inline(always)]
    fn f64(self, [x]: [f64; 1]) -> f64 {
        if x < 0.0 { self.alpha * x.exp_m1() } else { x }
    }

    #[inline(always)]
    fn i64(self, [x]: [i64; 1]) -> i64 {
        x
    }
}

/// With beta 1.
#[derive(Clone, Copy)]
struct Softplus {
    threshold: f64,
}

impl Function<1> for Softplus {
    #[inline(always)]
    fn f32<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
        let bent = math::softplus::<FMA>(x);
        if f64::from(x) > self.threshold { x } else { bent }
    }

    #[inline(always)]
    fn f64(self, [x]: [f64; 1]) -> f64 {
        if x > self.threshold { x } else { x.exp().ln_1p() }
    }

    #[inline(always)]
    fn i64(self, [x]: [i64; 1]) -> i64 {
        x
    }
}

impl Op for Unary {
    fn name(&self) -> &'static str {
        match self {
            Unary::Named(name) => FUNCTIONS[*name as usize].name,
            Unary::LeakyRelu(_) => "leaky_relu",
            Unary::Elu(_) => "elu",
            Unary::Softplus(..) => "softplus",
            Unary::Pow(_) => "pow_scalar",
            Unary::Clamp(..) => "clamp",
            Unary::Add(_) => "add_scalar",
            Unary::Mul(_) => "mul_scalar",
            Unary::RSub(_) => "rsub_scalar",
            Unary::Div(_) => "div_scalar",
            Unary::NanToNum(..) => "nan_to_num",
        }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        self.check_bounds(x.dtype)?;
        let mut signature = Signature::pointwise(&[&x.shape], &x.shape);
        let dtype = output_type(*self, x.dtype);
        let mut pass = |from, to| signature = signature.clone().passing([Some(from)], to);
        let (sum, avg, max, min) = (ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min);
        // Rounding integers does not commute with adding, so sums pass only where the type stays; and integers
        // that wrap lose their order.
        let wraps = !x.dtype.is_float() && self.wraps();
        // Means of operands to which the same is added.
        if matches!(self, Unary::Add(s) | Unary::RSub(s) if s.real().is_finite()) && x.dtype.is_float() {
            pass(avg, avg);
        }
        match self.passes() {
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
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let whole = !x.dtype().is_float() && self.gives() != Gives::Real;
        let arithmetic = if whole { Arithmetic::Whole } else { Arithmetic::real([x.dtype()]) };
        Ok(vec![self.compute(x, arithmetic, output_type(*self, x.dtype()))?])
    }

    fn differentiable(&self) -> Option<Keeps> {
        match self {
            Unary::Add(_) | Unary::Mul(_) | Unary::RSub(_) | Unary::Div(_) => Some(Keeps::Nothing),
            Unary::Named(_) => derivative::exists(self.name()).then_some(Keeps::Inputs),
            _ => Some(Keeps::Inputs),
        }
    }

    fn gradient(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None]) };
        let gradient = match *self {
            Unary::Named(_) => return Ok(vec![derivative::chain(self.name(), &saved.input(0), g)?]),
            Unary::Add(_) => g.clone(),
            Unary::RSub(_) => g.neg()?,
            Unary::Mul(s) => g.mul_scalar(s)?,
            Unary::Div(s) => g.div_scalar(s.0)?,
            Unary::Pow(s) if s.0 == 0.0 => g.zeros_like()?,
            Unary::Pow(s) => g.mul(&saved.input(0).pow_scalar(s.0 - 1.0)?.mul_scalar(s.0)?)?,
            Unary::LeakyRelu(s) => positive(&saved.input(0))?.where_cond(g, &g.mul_scalar(s.0)?)?,
            Unary::Elu(s) => {
                let x = saved.input(0);
                positive(&x)?.where_cond(g, &g.mul(&x.exp()?.mul_scalar(s.0)?)?)?
            }
            Unary::Softplus(beta, threshold) => {
                let x = saved.input(0).mul_scalar(beta.0)?;
                positive(&x.add_scalar(-threshold.0)?)?.where_cond(g, &g.mul(&x.sigmoid()?)?)?
            }
            Unary::Clamp(low, high) => {
                let x = saved.input(0);
                let bound = |s: Option<Scalar>, none: f64| x.full_like(s.map_or(none, |s| s.0));
                let above = x.ge(&bound(low, f64::NEG_INFINITY)?)?;
                let inside = above.logical_and(&x.le(&bound(high, f64::INFINITY)?)?)?;
                inside.where_cond(g, &g.zeros_like()?)?
            }
            Unary::NanToNum(..) => saved.input(0).isfinite()?.where_cond(g, &g.zeros_like()?)?,
        };
        Ok(vec![Some(gradient.to_dtype(saved.dtype(0))?)])
    }
}

/// 1 where above zero.
#[track_caller]
fn positive(x: &DTensor) -> Result<DTensor> {
    x.gt(&x.full_like(0.0)?)
}

fn output_type(op: Unary, input: DType) -> DType {
    match op.gives() {
        Gives::Same => input,
        Gives::Real => dtype::real(input),
        Gives::Truth => DType::U8,
    }
}

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1], &[0, 2]];
    let mut all: Vec<Vec<Sample>> = shapes.iter().map(|shape| vec![Sample::new(shape, DType::F64)]).collect();
    all.push(vec![Sample::new(&[5], DType::I64)]);
    all
}
