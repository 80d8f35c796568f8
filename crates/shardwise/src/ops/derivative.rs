//! Derivatives of functions of one number: as one pass over memory, and as formulas of operators, which have derivatives
//! themselves.

use std::f64::consts::{FRAC_1_SQRT_2, LN_2, LN_10, PI};
use std::hash::{Hash, Hasher};
use std::panic::Location;

use candle_core::Tensor;

use crate::comm::implicitly;
use crate::error::Result;
use crate::layout::{Layout, TensorMeta};
use crate::op::{Op, OpPlan, Place, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps, Saved, is_recording};
use shardwise_kernels::{Arithmetic, Function, Wide, map, math};

/// The derivative of one function.
#[derive(Clone, Copy)]
pub(super) struct Derivative {
    name: &'static str,
    /// Its value at a number.
    at: fn(f64) -> f64,
    /// The same of a tensor, made of operators.
    formula: fn(&DTensor) -> Result<DTensor>,
    /// The kernel: the derivative at the first tensor, times the second.
    kernel: fn(&Derivative, &Tensor, &Tensor) -> Result<Tensor>,
}

impl PartialEq for Derivative {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Derivative {}

impl Hash for Derivative {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// The gradient with respect to `x` of the named function of it, given that of its value; `None` if it has none.
#[track_caller]
pub(super) fn chain(name: &str, x: &DTensor, gradient: &DTensor) -> Result<Option<DTensor>> {
    let Some(derivative) = DERIVATIVES.iter().find(|d| d.name == name) else { return Ok(None) };
    if is_recording() {
        return Ok(Some(gradient.mul(&(derivative.formula)(x)?)?));
    }
    Ok(Some(dispatch(derivative, &[x, gradient], Location::caller())?.swap_remove(0)))
}

/// Whether the named function has a derivative.
pub(super) fn exists(name: &str) -> bool {
    DERIVATIVES.iter().any(|d| d.name == name)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// 1 where true.
fn step(truth: &DTensor, like: &DTensor) -> Result<DTensor> {
    truth.to_dtype(like.dtype())
}

fn zero(x: &DTensor) -> Result<DTensor> {
    DTensor::full_in(&x.layout().settled(), 0.0, x.dtype(), x.device_mesh())
}

const GELU_INNER: f64 = 0.797_884_560_802_865_4; // sqrt(2 / pi)
const GELU_CUBIC: f64 = 0.044715;

/// Derivatives by name: at a number, as a formula of operators and, for those that training is full of, in f32 with the
/// functions of [`math`].
macro_rules! derivatives {
    ($($name:ident: $at:expr, $formula:expr $(, f32(|$x:ident| $fast:expr))?;)*) => {
        static DERIVATIVES: &[Derivative] = &[$(Derivative {
            name: stringify!($name),
            at: $at,
            formula: $formula,
            kernel: derivatives!(@kernel $at $(, $x, $fast)?),
        },)*];
    };
    (@kernel $at:expr) => { at_every_number };
    (@kernel $at:expr, $x:ident, $fast:expr) => {{
        #[derive(Clone, Copy)]
        struct Fast;
        impl Function<2> for Fast {
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
        |_, x, g| Ok(map(Fast, [x, g], x.dims(), Arithmetic::real([x.dtype(), g.dtype()]), g.dtype())?)
    }};
}

/// Computed in f64, one number after the other.
fn at_every_number(derivative: &Derivative, x: &Tensor, g: &Tensor) -> Result<Tensor> {
    let at = derivative.at;
    let product = Wide(move |[x, g]: [f64; 2]| g * at(x), |[_, g]: [i64; 2]| g);
    Ok(map(product, [x, g], x.dims(), Arithmetic::real([x.dtype(), g.dtype()]), g.dtype())?)
}

derivatives! {
    neg: |_| -1.0, |x| zero(x)?.add_scalar(-1.0);
    abs: |x| if x == 0.0 { 0.0 } else { x.signum() }, DTensor::sign;
    // steps have no slope
    sign: |_| 0.0, zero;
    floor: |_| 0.0, zero;
    ceil: |_| 0.0, zero;
    round: |_| 0.0, zero;
    trunc: |_| 0.0, zero;
    frac: |_| 1.0, |x| zero(x)?.add_scalar(1.0);
    square: |x| 2.0 * x, |x| x.mul_scalar(2.0);
    relu: |x| f64::from(u8::from(x > 0.0)), |x| step(&x.gt(&zero(x)?)?, x), f32(|x| if x > 0.0 { 1.0 } else { 0.0 });
    exp: f64::exp, DTensor::exp, f32(|x| math::exp::<FMA>(x));
    expm1: f64::exp, DTensor::exp;
    exp2: |x| x.exp2() * LN_2, |x| x.exp2()?.mul_scalar(LN_2);
    log: f64::recip, DTensor::reciprocal;
    log1p: |x| 1.0 / (1.0 + x), |x| x.add_scalar(1.0)?.reciprocal();
    log2: |x| 1.0 / (x * LN_2), |x| x.mul_scalar(LN_2)?.reciprocal();
    log10: |x| 1.0 / (x * LN_10), |x| x.mul_scalar(LN_10)?.reciprocal();
    sqrt: |x| 0.5 / x.sqrt(), |x| x.rsqrt()?.mul_scalar(0.5);
    rsqrt: |x| -0.5 / (x * x.sqrt()), |x| x.rsqrt()?.pow_scalar(3.0)?.mul_scalar(-0.5);
    reciprocal: |x| -1.0 / (x * x), |x| x.reciprocal()?.square()?.neg();
    sin: f64::cos, DTensor::cos;
    cos: |x| -x.sin(), |x| x.sin()?.neg();
    tan: |x| 1.0 + x.tan().powi(2), |x| x.tan()?.square()?.add_scalar(1.0);
    asin: |x| 1.0 / (1.0 - x * x).sqrt(), |x| x.square()?.rsub_scalar(1.0)?.rsqrt();
    atan: |x| 1.0 / (1.0 + x * x), |x| x.square()?.add_scalar(1.0)?.reciprocal();
    sinh: f64::cosh, DTensor::cosh;
    cosh: f64::sinh, DTensor::sinh;
    asinh: |x| 1.0 / (1.0 + x * x).sqrt(), |x| x.square()?.add_scalar(1.0)?.rsqrt();
    tanh: |x| 1.0 - x.tanh().powi(2), |x| x.tanh()?.square()?.rsub_scalar(1.0), f32(|x| {
        let t = math::tanh::<FMA>(x);
        (1.0 - t) * (1.0 + t)
    });
    erf: |x| 2.0 / PI.sqrt() * (-x * x).exp(), |x| x.square()?.neg()?.exp()?.mul_scalar(2.0 / PI.sqrt());
    erfc: |x| -2.0 / PI.sqrt() * (-x * x).exp(), |x| x.square()?.neg()?.exp()?.mul_scalar(-2.0 / PI.sqrt());
    sigmoid: |x| sigmoid(x) * sigmoid(-x), |x| x.sigmoid()?.mul(&x.neg()?.sigmoid()?), f32(|x| {
        math::sigmoid::<FMA>(x) * math::sigmoid::<FMA>(-x)
    });
    logsigmoid: |x| sigmoid(-x), |x| x.neg()?.sigmoid();
    softsign: |x| (1.0 + x.abs()).powi(-2), |x| x.abs()?.add_scalar(1.0)?.square()?.reciprocal();
    silu: |x| sigmoid(x) * (1.0 + x * sigmoid(-x)), |x| {
        let other = x.neg()?.sigmoid()?;
        x.sigmoid()?.mul(&x.mul(&other)?.add_scalar(1.0)?)
    }, f32(|x| math::sigmoid::<FMA>(x) * (1.0 + x * math::sigmoid::<FMA>(-x)));
    mish: |x| {
        let t = (x.max(0.0) + (-x.abs()).exp().ln_1p()).tanh();
        t + x * (1.0 - t * t) * sigmoid(x)
    }, |x| {
        let t = x.softplus(1.0, 20.0)?.tanh()?;
        t.add(&x.mul(&x.sigmoid()?)?.mul(&t.square()?.rsub_scalar(1.0)?)?)
    };
    // At its two kinks the slope of the straight part, as in PyTorch.
    hardswish: |x| if x <= -3.0 { 0.0 } else if x >= 3.0 { 1.0 } else { (2.0 * x + 3.0) / 6.0 }, |x| {
        let inside = x.mul_scalar(2.0)?.add_scalar(3.0)?.div_scalar(6.0)?;
        let above = x.ge(&zero(x)?.add_scalar(3.0)?)?;
        let below = x.le(&zero(x)?.add_scalar(-3.0)?)?;
        below.where_cond(&zero(x)?, &above.where_cond(&zero(x)?.add_scalar(1.0)?, &inside)?)
    };
    gelu: |x| {
        let density = (-0.5 * x * x).exp() / (2.0 * PI).sqrt();
        0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2)) + x * density
    }, |x| {
        let density = x.square()?.mul_scalar(-0.5)?.exp()?.mul_scalar(1.0 / (2.0 * PI).sqrt())?;
        x.mul_scalar(FRAC_1_SQRT_2)?.erf()?.add_scalar(1.0)?.mul_scalar(0.5)?.add(&x.mul(&density)?)
    }, f32(|x| {
        let below = 0.5 * (1.0 + math::erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2));
        below + x * math::exp::<FMA>(-0.5 * x * x) * 0.398_942_3
    });
    gelu_tanh: |x| {
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
    });
}

impl Op for Derivative {
    fn name(&self) -> &'static str {
        self.name
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
        Ok(vec![(self.kernel)(self, &inputs[0], &inputs[1])?])
    }
}

/// A gradient with respect to one operand of a function of two, given both operands and the gradient of the value.
type OfTwo = fn(&DTensor, &DTensor, &DTensor) -> Result<DTensor>;

/// Gradients of functions of two tensors, with respect to each.
static OF_TWO: &[(&str, OfTwo, OfTwo)] = &[
    ("mul", |_, b, g| g.mul(b), |a, _, g| g.mul(a)),
    // The square of the divisor may be beyond the type where the quotient is not.
    ("div", |_, b, g| g.div(b), |a, b, g| g.mul(&a.div(b)?.div(b)?)?.neg()),
    ("div_floor", |_, _, g| zero(g), |_, _, g| zero(g)),
    ("div_trunc", |_, _, g| zero(g), |_, _, g| zero(g)),
    (
        "pow",
        |a, b, g| {
            let slope = b.mul(&a.pow(&b.add_scalar(-1.0)?)?)?;
            b.eq(&zero(b)?)?.where_cond(&zero(g)?, &g.mul(&slope)?)
        },
        |a, b, g| {
            // At zero a power with a positive exponent stays zero.
            let flat = a.eq(&zero(a)?)?.logical_and(&b.ge(&zero(b)?)?)?;
            flat.where_cond(&zero(g)?, &g.mul(&a.pow(b)?)?.mul(&a.log()?)?)
        },
    ),
    // Equal operands share the gradient.
    ("maximum", |a, b, g| g.mul(&share(&a.gt(b)?, a, b)?), |a, b, g| g.mul(&share(&b.gt(a)?, a, b)?)),
    ("minimum", |a, b, g| g.mul(&share(&a.lt(b)?, a, b)?), |a, b, g| g.mul(&share(&b.lt(a)?, a, b)?)),
    ("fmod", |_, _, g| Ok(g.clone()), |a, b, g| g.mul(&a.div_trunc(b)?)?.neg()),
    ("remainder", |_, _, g| Ok(g.clone()), |a, b, g| g.mul(&a.div_floor(b)?)?.neg()),
    (
        "atan2",
        |a, b, g| g.mul(b)?.div(&a.square()?.add(&b.square()?)?),
        |a, b, g| g.mul(a)?.div(&a.square()?.add(&b.square()?)?)?.neg(),
    ),
    ("hypot", |a, b, g| g.mul(a)?.div(&a.hypot(b)?), |a, b, g| g.mul(b)?.div(&a.hypot(b)?)),
];

/// 1 where true, and a half where the operands are equal.
fn share(truth: &DTensor, a: &DTensor, b: &DTensor) -> Result<DTensor> {
    let dtype = super::dtype::promote(a.dtype(), b.dtype());
    truth.to_dtype(dtype)?.add(&a.eq(b)?.to_dtype(dtype)?.mul_scalar(0.5)?)
}

/// What the gradient of the named function of two tensors needs.
pub(super) fn of_two_keeps(name: &str) -> Option<Keeps> {
    match name {
        "add" | "sub" => Some(Keeps::Nothing),
        _ => OF_TWO.iter().any(|(n, ..)| *n == name).then_some(Keeps::Inputs),
    }
}

/// The gradients of the named function of two tensors that broadcast.
#[track_caller]
pub(super) fn of_two(name: &'static str, saved: &Saved<'_>, gradient: &DTensor) -> Result<Vec<Option<DTensor>>> {
    let mut found = Vec::new();
    for i in 0..2 {
        if !saved.wants(i) {
            found.push(None);
            continue;
        }
        let whole = match (name, i) {
            ("sub", 1) => gradient.neg()?,
            ("add" | "sub", _) => gradient.clone(),
            _ => {
                let (_, left, right) = OF_TWO.iter().find(|(n, ..)| *n == name).expect("a function with a gradient");
                let of = if i == 0 { left } else { right };
                // These use an operand once at most, and products are linear in a partial sum.
                let once = matches!((name, i), ("mul", _) | ("div" | "fmod" | "remainder", 0));
                let operand = |o: usize| if once { Ok(saved.input(o)) } else { beside(name, saved, o, gradient) };
                let (a, b) = match name {
                    "div_floor" | "div_trunc" => (saved.input(0), saved.input(1)),
                    _ => (operand(0)?, operand(1)?),
                };
                of(&a, &b, gradient)?
            }
        };
        found.push(Some(back_to(&whole, saved, i)?));
    }
    Ok(found)
}

/// An input as a formula that uses it several times needs it beside the gradient, so that it is moved once: without partial
/// sums and, if it is smaller than the gradient, sharded as the gradient is.
#[track_caller]
fn beside(name: &'static str, saved: &Saved<'_>, i: usize, gradient: &DTensor) -> Result<DTensor> {
    let input = saved.input(i);
    let (own, of) = (input.layout(), gradient.layout());
    let new = of.shape().len() - own.shape().len();
    let smaller = input.elem_count() < gradient.elem_count();
    let placement = |axis: usize| match (&own.placements()[axis], &of.placements()[axis]) {
        (Placement::Replicate, _) => Placement::Replicate,
        (now, like) if now.is_partial() || smaller && like.is_shard(None) => {
            let same = |d: &usize| own.shape()[*d] == of.shape()[*d + new];
            let at = like.shard_dim().and_then(|d| d.checked_sub(new)).filter(same);
            at.map_or(Placement::Replicate, |d| like.with_dim(d))
        }
        (now, _) => now.clone(),
    };
    let placements: Vec<Placement> = (0..own.mesh().ndim()).map(placement).collect();
    if placements == own.placements() {
        return Ok(input);
    }
    // Ragged sizes need not fit other shards.
    let to = Layout::new(own.mesh(), own.shape(), placements).unwrap_or_else(|_| own.settled());
    let site = Location::caller();
    implicitly(name, || input.to_layout_at(&to, site))
}

/// The gradient of what an input was stretched to, as that of the input: summed over what was stretched, in its type.
#[track_caller]
pub(super) fn back_to(gradient: &DTensor, saved: &Saved<'_>, i: usize) -> Result<DTensor> {
    let shape = saved.shape(i);
    let new = gradient.rank() - shape.len();
    let stretched = |d: usize| d >= new && shape[d - new] == 1 && gradient.shape()[d] != 1;
    let kept: Vec<isize> = (0..gradient.rank()).filter(|&d| stretched(d)).map(|d| d as isize).collect();
    let mut summed = if kept.is_empty() { gradient.clone() } else { gradient.sum(&kept, true)? };
    if new > 0 {
        summed = summed.sum(&(0..new as isize).collect::<Vec<_>>(), false)?;
    }
    summed.to_dtype(saved.dtype(i))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn derivatives_in_f32_are_those_in_f64() {
        let values: Vec<f64> = (-4000..4000).map(|i| f64::from(i) * 0.003 + 0.0007).collect();
        let x = Tensor::from_vec(values.clone(), 8000, &Device::Cpu).unwrap();
        let ones = x.ones_like().unwrap();
        let single = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
        for derivative in DERIVATIVES {
            let run = |x: &Tensor, g: &Tensor| (derivative.kernel)(derivative, x, g).unwrap();
            let wide = run(&single(&x).to_dtype(DType::F64).unwrap(), &ones).to_vec1::<f64>().unwrap();
            let fast = run(&single(&x), &single(&ones)).to_vec1::<f32>().unwrap();
            for (i, (wide, fast)) in wide.iter().zip(&fast).enumerate() {
                let near = (wide - f64::from(*fast)).abs() <= 2e-6 * wide.abs().max(1.0);
                assert!(
                    near || wide.is_nan() && fast.is_nan() || *wide as f32 == *fast,
                    "{} at {}: {wide} {fast}",
                    derivative.name,
                    values[i]
                );
            }
        }
    }
}
