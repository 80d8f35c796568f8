//! Functions of one tensor, element by element.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::scalar::Scalar;
use super::{OpEntry, Sample, derivative, dtype};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::local::{from_reals, from_wholes, reals, wholes};
use crate::op::{Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps, Saved};

/// What a function does to the order and to sums of its arguments: which pending reductions pass through it.
#[derive(Clone, Copy, PartialEq)]
enum Passes {
    Nothing,
    /// Never decreases: the largest and the smallest stay so.
    Rising,
    /// Never increases: the largest becomes the smallest.
    Falling,
    /// A multiple: sums and means stay, order stays or turns with the sign.
    Multiple {
        rising: bool,
    },
}

/// What becomes of the element type.
#[derive(Clone, Copy, PartialEq)]
enum Gives {
    /// The same type; whole numbers are computed as such.
    Same,
    /// A floating-point type.
    Real,
    /// 0 or 1.
    Truth,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Unary {
    Named(&'static str),
    LeakyRelu(Scalar),
    Elu(Scalar),
    Softplus(Scalar, Scalar),
    Pow(Scalar),
    Clamp(Option<Scalar>, Option<Scalar>),
    Add(Scalar),
    Mul(Scalar),
    RSub(Scalar),
    Div(Scalar),
    NanToNum(Scalar, Scalar, Scalar),
}

/// One function: what passes, what it gives, and its value.
struct Function {
    passes: Passes,
    gives: Gives,
    real: fn(f64) -> f64,
    /// The same on whole numbers, where they stay whole.
    whole: fn(i64) -> i64,
}

macro_rules! functions {
    ($($(#[doc = $doc:literal])* $name:ident: $passes:expr, $gives:ident, $real:expr $(, $whole:expr)?;)*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                #[track_caller]
                pub fn $name(&self) -> Result<DTensor> {
                    call(Unary::Named(stringify!($name)), self)
                }
            )*
        }

        fn function(name: &str) -> Function {
            match name {
                $(stringify!($name) => {
                    #[allow(unused_mut, unused_assignments)]
                    let mut whole: fn(i64) -> i64 = |x| x;
                    $(whole = $whole;)?
                    Function { passes: $passes, gives: Gives::$gives, real: $real, whole }
                })*
                other => unreachable!("{other} is not in the table"),
            }
        }

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
}

const RISING: Passes = Passes::Rising;
const NOTHING: Passes = Passes::Nothing;

functions! {
    /// The negative.
    neg: Passes::Multiple { rising: false }, Same, |x| -x, i64::wrapping_neg;
    /// The absolute value.
    abs: NOTHING, Same, f64::abs, i64::wrapping_abs;
    /// -1, 0 or 1.
    sign: RISING, Same, |x| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x }, i64::signum;
    /// The square.
    square: NOTHING, Same, |x| x * x, |x| x.wrapping_mul(x);
    /// The positive part.
    relu: RISING, Same, |x| if x < 0.0 { 0.0 } else { x }, |x| x.max(0);
    /// The next whole number below.
    floor: RISING, Same, f64::floor;
    /// The next whole number above.
    ceil: RISING, Same, f64::ceil;
    /// The nearest whole number, the even one of two.
    round: RISING, Same, f64::round_ties_even;
    /// The whole part.
    trunc: RISING, Same, f64::trunc;
    /// What is left without the whole part.
    frac: NOTHING, Real, f64::fract;
    /// e to the power of x.
    exp: RISING, Real, f64::exp;
    /// exp(x) - 1.
    expm1: RISING, Real, f64::exp_m1;
    /// 2 to the power of x.
    exp2: RISING, Real, f64::exp2;
    /// Natural logarithm.
    log: NOTHING, Real, f64::ln;
    /// log(1 + x).
    log1p: NOTHING, Real, f64::ln_1p;
    /// Logarithm to base 2.
    log2: NOTHING, Real, f64::log2;
    /// Logarithm to base 10.
    log10: NOTHING, Real, f64::log10;
    /// Square root.
    sqrt: NOTHING, Real, f64::sqrt;
    /// 1 / sqrt(x).
    rsqrt: NOTHING, Real, |x| 1.0 / x.sqrt();
    /// 1 / x.
    reciprocal: NOTHING, Real, f64::recip;
    /// Sine.
    sin: NOTHING, Real, f64::sin;
    /// Cosine.
    cos: NOTHING, Real, f64::cos;
    /// Tangent.
    tan: NOTHING, Real, f64::tan;
    /// Inverse sine.
    asin: NOTHING, Real, f64::asin;
    /// Inverse tangent.
    atan: RISING, Real, f64::atan;
    /// Hyperbolic sine.
    sinh: RISING, Real, f64::sinh;
    /// Hyperbolic cosine.
    cosh: NOTHING, Real, f64::cosh;
    /// Inverse hyperbolic sine.
    asinh: RISING, Real, f64::asinh;
    /// Hyperbolic tangent.
    tanh: RISING, Real, f64::tanh;
    /// Error function.
    erf: RISING, Real, libm::erf;
    /// 1 - erf(x).
    erfc: Passes::Falling, Real, libm::erfc;
    /// 1 / (1 + exp(-x)).
    sigmoid: RISING, Real, |x| 1.0 / (1.0 + (-x).exp());
    /// log(sigmoid(x)).
    logsigmoid: RISING, Real, |x| x.min(0.0) - (-x.abs()).exp().ln_1p();
    /// x / (1 + |x|).
    softsign: NOTHING, Real, |x| x / (1.0 + x.abs());
    /// x * sigmoid(x).
    silu: NOTHING, Real, |x| x / (1.0 + (-x).exp());
    /// x * tanh(softplus(x)).
    mish: NOTHING, Real, |x| x * (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh();
    /// x * clamp(x + 3, 0, 6) / 6.
    hardswish: NOTHING, Real, |x| x * (x + 3.0).clamp(0.0, 6.0) / 6.0;
    /// x * Phi(x) with the normal distribution.
    gelu: NOTHING, Real, |x| 0.5 * x * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2));
    /// The tanh approximation of gelu.
    gelu_tanh: NOTHING, Real, |x| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
        0.5 * x * (1.0 + inner.tanh())
    };
    /// 1 where not-a-number.
    isnan: NOTHING, Truth, |x| f64::from(u8::from(x.is_nan())), |_| 0;
    /// 1 where finite.
    isfinite: NOTHING, Truth, |x| f64::from(u8::from(x.is_finite())), |_| 1;
    /// 1 where infinite.
    isinf: NOTHING, Truth, |x| f64::from(u8::from(x.is_infinite())), |_| 0;
    /// 1 where the sign is negative.
    signbit: NOTHING, Truth, |x| f64::from(u8::from(x.is_sign_negative())), |x| i64::from(x < 0);
    /// 1 where zero.
    logical_not: NOTHING, Truth, |x| f64::from(u8::from(x == 0.0)), |x| i64::from(x == 0);
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
    pub fn add_scalar(&self, number: f64) -> Result<DTensor> {
        call(Unary::Add(Scalar(number)), self)
    }

    /// `x - number`.
    #[track_caller]
    pub fn sub_scalar(&self, number: f64) -> Result<DTensor> {
        call(Unary::Add(Scalar(-number)), self)
    }

    /// `number - x`.
    #[track_caller]
    pub fn rsub_scalar(&self, number: f64) -> Result<DTensor> {
        call(Unary::RSub(Scalar(number)), self)
    }

    /// `x * number`.
    #[track_caller]
    pub fn mul_scalar(&self, number: f64) -> Result<DTensor> {
        call(Unary::Mul(Scalar(number)), self)
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
            Unary::Named(name) => function(name).passes,
            Unary::LeakyRelu(s) | Unary::Elu(s) if s.0 > 0.0 => RISING,
            Unary::Softplus(beta, _) if beta.0 > 0.0 => RISING,
            Unary::Clamp(..) => RISING,
            // Not-a-number would win where an infinite operand meets an infinite number.
            Unary::Add(s) if s.0.is_finite() => RISING,
            Unary::RSub(s) if s.0.is_finite() => Passes::Falling,
            Unary::Mul(s) | Unary::Div(s) if s.0.is_finite() && s.0 != 0.0 => Passes::Multiple { rising: s.0 > 0.0 },
            _ => NOTHING,
        }
    }

    /// Whether whole numbers may leave the range of their type.
    fn wraps(self) -> bool {
        self.gives() == Gives::Same
            && match self {
                Unary::Named(name) => ["neg", "abs", "square"].contains(&name),
                Unary::Clamp(..) | Unary::NanToNum(..) => false,
                _ => true,
            }
    }

    /// What becomes of the element type.
    fn gives(self) -> Gives {
        let whole = |s: Scalar| s.0.fract() == 0.0 && s.0.abs() < 9e15;
        match self {
            Unary::Named(name) => function(name).gives,
            Unary::Add(s) | Unary::Mul(s) | Unary::RSub(s) if whole(s) => Gives::Same,
            Unary::Pow(s) if whole(s) && s.0 >= 0.0 => Gives::Same,
            Unary::Clamp(a, b) if a.is_none_or(whole) && b.is_none_or(whole) => Gives::Same,
            Unary::NanToNum(..) => Gives::Same,
            _ => Gives::Real,
        }
    }

    fn real(self, x: f64) -> f64 {
        match self {
            Unary::Named(_) => unreachable!("called through its table"),
            Unary::LeakyRelu(s) => {
                if x < 0.0 {
                    s.0 * x
                } else {
                    x
                }
            }
            Unary::Elu(s) => {
                if x < 0.0 {
                    s.0 * x.exp_m1()
                } else {
                    x
                }
            }
            Unary::Softplus(b, t) if b.0 * x > t.0 => x,
            Unary::Softplus(b, _) => (b.0 * x).exp().ln_1p() / b.0,
            Unary::Pow(s) => x.powf(s.0),
            Unary::Clamp(low, high) => {
                let x = low.map_or(x, |low| if x < low.0 { low.0 } else { x });
                high.map_or(x, |high| if x > high.0 { high.0 } else { x })
            }
            Unary::Add(s) => x + s.0,
            Unary::Mul(s) => x * s.0,
            Unary::RSub(s) => s.0 - x,
            Unary::Div(s) => x / s.0,
            Unary::NanToNum(nan, _, _) if x.is_nan() => nan.0,
            Unary::NanToNum(_, pos, neg) if x.is_infinite() => {
                if x > 0.0 {
                    pos.0
                } else {
                    neg.0
                }
            }
            Unary::NanToNum(..) => x,
        }
    }

    fn whole(self, x: i64) -> i64 {
        match self {
            Unary::Named(name) => (function(name).whole)(x),
            Unary::Add(s) => x.wrapping_add(s.0 as i64),
            Unary::Mul(s) => x.wrapping_mul(s.0 as i64),
            Unary::RSub(s) => (s.0 as i64).wrapping_sub(x),
            Unary::Pow(s) => x.wrapping_pow(s.0 as u32),
            Unary::Clamp(low, high) => {
                let x = low.map_or(x, |low| x.max(low.0 as i64));
                high.map_or(x, |high| x.min(high.0 as i64))
            }
            _ => x,
        }
    }
}

impl Op for Unary {
    fn name(&self) -> &'static str {
        match self {
            Unary::Named(name) => name,
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
        let mut signature = Signature::pointwise(&[&x.shape], &x.shape);
        let dtype = output_type(*self, x.dtype);
        let mut pass = |from, to| signature = signature.clone().passing([Some(from)], to);
        let (sum, avg, max, min) = (ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min);
        // Rounding whole numbers does not commute with adding, so sums pass only where the type stays; and whole numbers
        // that wrap lose their order.
        let wraps = !x.dtype.is_float() && self.wraps();
        match self.passes() {
            Passes::Rising | Passes::Falling if wraps => {}
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
        let dtype = output_type(*self, x.dtype());
        if !x.dtype().is_float() && self.gives() != Gives::Real {
            let values = wholes(x)?.into_iter().map(|v| self.whole(v)).collect();
            return Ok(vec![from_wholes(values, x.dims(), dtype)?]);
        }
        let values = reals(x)?;
        let values = match self {
            Unary::Named(name) => values.into_iter().map(function(name).real).collect(),
            _ => values.into_iter().map(|v| self.real(v)).collect(),
        };
        Ok(vec![from_reals(values, x.dims(), dtype)?])
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
            Unary::Mul(s) => g.mul_scalar(s.0)?,
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
