//! Elementwise functions of one tensor with numeric arguments: activations with parameters, arithmetic with scalars, `clamp`.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::OpEntry;
use crate::ops::arguments::scalar::Scalar;
use crate::ops::elementwise::binary::power;
use crate::ops::elementwise::unary::{Monotonicity, Unary, UnaryResultType, plan, samples};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};
use shardwise_kernels::{ComputeType, Number, PointwiseFn, ViaF64, integer_range, math, pointwise};

/// An elementwise function with its arguments, in the order of the method's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Parametrized {
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

impl DTensor {
    /// Applies the leaky ReLU activation: `x` where positive, else `slope * x`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn leaky_relu(&self, slope: f64) -> Result<DTensor> {
        call(Parametrized::LeakyRelu(Scalar(slope)), self)
    }

    /// Applies the ELU activation: `x` where positive, else `alpha * (exp(x) - 1)`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn elu(&self, alpha: f64) -> Result<DTensor> {
        call(Parametrized::Elu(Scalar(alpha)), self)
    }

    /// Applies the softplus activation, `log(1 + exp(beta * x)) / beta`; `x` itself where `beta * x` exceeds `threshold`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn softplus(&self, beta: f64, threshold: f64) -> Result<DTensor> {
        call(Parametrized::Softplus(Scalar(beta), Scalar(threshold)), self)
    }

    /// Raises each element to the power `exponent`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn pow_scalar(&self, exponent: f64) -> Result<DTensor> {
        call(Parametrized::Pow(Scalar(exponent)), self)
    }

    /// Clamps each element to `min..=max`; `None` is not a bound. NaN stays NaN.
    /// The gradient is 0 where an element is a bound, as in PyTorch since 2.15.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn clamp(&self, min: Option<f64>, max: Option<f64>) -> Result<DTensor> {
        call(Parametrized::Clamp(min.map(Scalar), max.map(Scalar)), self)
    }

    /// Adds a number to each element.
    ///
    /// Elementwise: partial sums are reduced first; partial means, maxima and minima pass unreduced.
    #[track_caller]
    pub fn add_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Parametrized::Add(number.into()), self)
    }

    /// Subtracts a number from each element.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn sub_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Parametrized::Add(number.into().negative()), self)
    }

    /// Subtracts each element from a number, PyTorch's `rsub`.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn rsub_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Parametrized::RSub(number.into()), self)
    }

    /// Multiplies each element by a number.
    ///
    /// Elementwise: keeps the layout and communicates nothing; partial sums pass unreduced.
    #[track_caller]
    pub fn mul_scalar(&self, number: impl Into<Number>) -> Result<DTensor> {
        call(Parametrized::Mul(number.into()), self)
    }

    /// Divides each element by a number; the result is floating point.
    ///
    /// Elementwise: keeps the layout and communicates nothing; partial sums pass unreduced.
    #[track_caller]
    pub fn div_scalar(&self, number: f64) -> Result<DTensor> {
        call(Parametrized::Div(Scalar(number)), self)
    }

    /// Replaces NaN, positive infinity and negative infinity by numbers.
    ///
    /// Elementwise: keeps the layout, and communicates only to reduce a partial tensor.
    #[track_caller]
    pub fn nan_to_num(&self, nan: f64, posinf: f64, neginf: f64) -> Result<DTensor> {
        call(Parametrized::NanToNum(Scalar(nan), Scalar(posinf), Scalar(neginf)), self)
    }
}

#[track_caller]
fn call(op: Parametrized, x: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&op, &[x], Location::caller())?.swap_remove(0))
}

impl Parametrized {
    fn monotonicity(self) -> Monotonicity {
        match self {
            Parametrized::LeakyRelu(s) | Parametrized::Elu(s) if s.0 > 0.0 => Monotonicity::Increasing,
            Parametrized::Softplus(beta, _) if beta.0 > 0.0 => Monotonicity::Increasing,
            Parametrized::Clamp(..) => Monotonicity::Increasing,
            // An infinite number added to the opposite infinity would be NaN, and NaN wins every reduction.
            Parametrized::Add(s) if s.to_f64().is_finite() => Monotonicity::Increasing,
            Parametrized::RSub(s) if s.to_f64().is_finite() => Monotonicity::Decreasing,
            Parametrized::Mul(Number::Real(s)) | Parametrized::Div(Scalar(s)) if s.is_finite() && s != 0.0 => {
                Monotonicity::Linear { increasing: s > 0.0 }
            }
            Parametrized::Mul(Number::Integer(s)) if s != 0 => Monotonicity::Linear { increasing: s > 0 },
            _ => Monotonicity::None,
        }
    }

    /// Whether integers may overflow their type.
    fn wraps(self) -> bool {
        self.result_type() == UnaryResultType::Same
            && !matches!(self, Parametrized::Clamp(..) | Parametrized::NanToNum(..))
    }

    /// Fails if integers are to be clamped to bounds outside of their type.
    fn check_bounds(self, dtype: DType) -> Result<()> {
        let (Parametrized::Clamp(low, high), Some((least, most))) = (self, integer_range(dtype)) else { return Ok(()) };
        if self.result_type() != UnaryResultType::Same
            || low.is_none_or(|s| s.0 <= most as f64) && high.is_none_or(|s| s.0 >= least as f64)
        {
            return Ok(());
        }
        let text = |s: Option<Scalar>| s.map_or("none".to_string(), |s| s.0.to_string());
        let found = format!("bounds {} and {} for {} in clamp", text(low), text(high), dtype.as_str());
        let needed = format!("a lower bound of at most {most} and an upper one of at least {least}");
        Err(ErrorKind::Argument.error("bounds", found, needed, "use other bounds, or convert the tensor first"))
    }

    /// The element type of the result.
    fn result_type(self) -> UnaryResultType {
        let integer = |s: Scalar| Number::Real(s.0).is_integer();
        match self {
            Parametrized::Add(s) | Parametrized::Mul(s) | Parametrized::RSub(s) if s.is_integer() => {
                UnaryResultType::Same
            }
            Parametrized::Pow(s) if integer(s) && s.0 >= 0.0 => UnaryResultType::Same,
            Parametrized::Clamp(a, b) if a.is_none_or(integer) && b.is_none_or(integer) => UnaryResultType::Same,
            Parametrized::NanToNum(..) => UnaryResultType::Same,
            _ => UnaryResultType::Float,
        }
    }

    /// Applies the function to a local tensor.
    fn compute(self, x: &Tensor, arithmetic: ComputeType, dtype: DType) -> Result<Tensor> {
        match self {
            Parametrized::LeakyRelu(Scalar(s)) => {
                wide(x, arithmetic, dtype, move |x| if x < 0.0 { s * x } else { x }, |x| x)
            }
            Parametrized::Elu(Scalar(alpha)) => Ok(pointwise(Elu { alpha }, [x], x.dims(), arithmetic, dtype)?),
            Parametrized::Softplus(Scalar(beta), Scalar(threshold)) => {
                Ok(pointwise(Softplus { beta, threshold }, [x], x.dims(), arithmetic, dtype)?)
            }
            Parametrized::Pow(Scalar(2.0)) => Unary::square.compute(x, arithmetic, dtype),
            // Exact products and roots, as in PyTorch. Integers have the general kernel: they wrap.
            Parametrized::Pow(Scalar(s)) if arithmetic != ComputeType::I64 && s == 3.0 => {
                wide(x, arithmetic, dtype, |x| x * x * x, |x| x)
            }
            Parametrized::Pow(Scalar(s)) if arithmetic != ComputeType::I64 && s == 0.5 => {
                Unary::sqrt.compute(x, arithmetic, dtype)
            }
            Parametrized::Pow(Scalar(s)) if arithmetic != ComputeType::I64 && s == -1.0 => {
                Unary::reciprocal.compute(x, arithmetic, dtype)
            }
            Parametrized::Pow(Scalar(exponent)) => Ok(pointwise(Pow { exponent }, [x], x.dims(), arithmetic, dtype)?),
            Parametrized::Clamp(low, high) => {
                // NaN stays NaN, and a bound that is NaN gives NaN.
                let (low, high) = (low.map_or(f64::NEG_INFINITY, |s| s.0), high.map_or(f64::INFINITY, |s| s.0));
                let real = move |x: f64| {
                    let x = if x < low || low.is_nan() { low } else { x };
                    if x > high || high.is_nan() { high } else { x }
                };
                wide(x, arithmetic, dtype, real, move |x| x.max(low as i64).min(high as i64))
            }
            Parametrized::Add(s) => {
                let (real, integer) = (s.to_f64(), s.to_i64());
                wide(x, arithmetic, dtype, move |x| x + real, move |x| x.wrapping_add(integer))
            }
            Parametrized::Mul(s) => {
                let (real, integer) = (s.to_f64(), s.to_i64());
                wide(x, arithmetic, dtype, move |x| x * real, move |x| x.wrapping_mul(integer))
            }
            Parametrized::RSub(s) => {
                let (real, integer) = (s.to_f64(), s.to_i64());
                wide(x, arithmetic, dtype, move |x| real - x, move |x| integer.wrapping_sub(x))
            }
            Parametrized::Div(Scalar(s)) => wide(x, arithmetic, dtype, move |x| x / s, |x| x),
            Parametrized::NanToNum(Scalar(nan), Scalar(most), Scalar(least)) => {
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

/// Applies a function in f64, for f32 inputs too: an f64 argument is not rounded to f32 before it is used.
fn wide(
    x: &Tensor,
    arithmetic: ComputeType,
    dtype: DType,
    real: impl Fn(f64) -> f64 + Copy + Sync,
    integer: impl Fn(i64) -> i64 + Copy + Sync,
) -> Result<Tensor> {
    Ok(pointwise(
        ViaF64(move |[x]: [f64; 1]| real(x), move |[x]: [i64; 1]| integer(x)),
        [x],
        x.dims(),
        arithmetic,
        dtype,
    )?)
}

/// Kernel of `elu`.
#[derive(Clone, Copy)]
struct Elu {
    alpha: f64,
}

impl PointwiseFn<1> for Elu {
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

/// Kernel of `softplus`.
#[derive(Clone, Copy)]
struct Softplus {
    beta: f64,
    threshold: f64,
}

impl PointwiseFn<1> for Softplus {
    #[inline(always)]
    fn f32<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
        let Softplus { beta, threshold } = self;
        // The same for every element, so that the compiler takes it out of the loop.
        let bent = if beta == 1.0 { math::softplus::<FMA>(x) } else { math::softplus_of_multiple::<FMA>(x, beta) };
        if beta * f64::from(x) > threshold { x } else { bent }
    }

    #[inline(always)]
    fn f64(self, [x]: [f64; 1]) -> f64 {
        if self.beta * x > self.threshold { x } else { (self.beta * x).exp().ln_1p() / self.beta }
    }

    #[inline(always)]
    fn i64(self, [x]: [i64; 1]) -> i64 {
        x
    }
}

/// Kernel of `pow_scalar`.
#[derive(Clone, Copy)]
struct Pow {
    exponent: f64,
}

impl PointwiseFn<1> for Pow {
    #[inline(always)]
    fn f32<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
        math::pow::<FMA>(x, self.exponent)
    }

    #[inline(always)]
    fn f64(self, [x]: [f64; 1]) -> f64 {
        x.powf(self.exponent)
    }

    #[inline(always)]
    fn i64(self, [x]: [i64; 1]) -> i64 {
        power(x, self.exponent as i64)
    }
}

impl Op for Parametrized {
    fn name(&self) -> &'static str {
        match self {
            Parametrized::LeakyRelu(_) => "leaky_relu",
            Parametrized::Elu(_) => "elu",
            Parametrized::Softplus(..) => "softplus",
            Parametrized::Pow(_) => "pow_scalar",
            Parametrized::Clamp(..) => "clamp",
            Parametrized::Add(_) => "add_scalar",
            Parametrized::Mul(_) => "mul_scalar",
            Parametrized::RSub(_) => "rsub_scalar",
            Parametrized::Div(_) => "div_scalar",
            Parametrized::NanToNum(..) => "nan_to_num",
        }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        self.check_bounds(inputs[0].dtype)?;
        // Adding a constant to every term of a mean adds it to the mean.
        let shifts = matches!(self, Parametrized::Add(s) | Parametrized::RSub(s) if s.to_f64().is_finite());
        Ok(plan(&inputs[0], self.result_type(), self.monotonicity(), self.wraps(), shifts))
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, result_type) = (&inputs[0], self.result_type());
        Ok(vec![self.compute(x, result_type.arithmetic(x.dtype()), result_type.dtype(x.dtype()))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        let saves = match self {
            Parametrized::Add(_) | Parametrized::Mul(_) | Parametrized::RSub(_) | Parametrized::Div(_) => {
                SaveForBackward::Nothing
            }
            Parametrized::LeakyRelu(_) | Parametrized::Elu(_) | Parametrized::Softplus(..) | Parametrized::Pow(_) => {
                SaveForBackward::Inputs
            }
            Parametrized::Clamp(..) | Parametrized::NanToNum(..) => SaveForBackward::Inputs,
        };
        Gradient::From(saves, Self::backward)
    }
}

impl Parametrized {
    fn backward(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None]) };
        let gradient = match *self {
            Parametrized::Add(_) => g.clone(),
            Parametrized::RSub(_) => g.neg()?,
            Parametrized::Mul(s) => g.mul_scalar(s)?,
            Parametrized::Div(s) => g.div_scalar(s.0)?,
            Parametrized::Pow(s) if s.0 == 0.0 => g.zeros_like()?,
            Parametrized::Pow(s) => g.mul(&saved.input(0).pow_scalar(s.0 - 1.0)?.mul_scalar(s.0)?)?,
            Parametrized::LeakyRelu(s) => positive(&saved.input(0))?.where_cond(g, &g.mul_scalar(s.0)?)?,
            Parametrized::Elu(s) => {
                let x = saved.input(0);
                let x = x.widened()?.unwrap_or(x); // In half precision the exponential would be rounded, or 0, on the way.
                // NaN has the slope 1, as in PyTorch.
                x.le(0.0)?.where_cond(&g.mul(&x.exp()?.mul_scalar(s.0)?)?, g)?
            }
            Parametrized::Softplus(beta, threshold) => {
                let x = saved.input(0).mul_scalar(beta.0)?;
                positive(&x.add_scalar(-threshold.0)?)?.where_cond(g, &g.mul(&x.sigmoid()?)?)?
            }
            Parametrized::Clamp(low, high) => {
                let x = saved.input(0);
                let within = |inside: Result<DTensor>, g: &DTensor| inside?.where_cond(g, &g.zeros_like()?);
                let g = low.map_or(Ok(g.clone()), |low| within(x.gt(low.0), g))?;
                high.map_or(Ok(g.clone()), |high| within(x.lt(high.0), &g))?
            }
            Parametrized::NanToNum(..) => saved.input(0).isfinite()?.where_cond(g, &g.zeros_like()?)?,
        };
        Ok(vec![Some(gradient.to_dtype(saved.dtype(0))?)])
    }
}

/// 1 where an element is above zero.
#[track_caller]
fn positive(x: &DTensor) -> Result<DTensor> {
    x.gt(&x.full_like(0.0)?)
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
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
