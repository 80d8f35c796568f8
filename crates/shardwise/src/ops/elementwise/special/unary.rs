//! Special functions of one number: one table entry per function holds its kernel and its derivative.

use std::f64::consts::{FRAC_1_SQRT_2, PI};
use std::panic::Location;

use candle_core::Tensor;

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::OpEntry;
use crate::ops::elementwise::unary::{Monotonicity, UnaryResultType, plan, samples};
use crate::ops::gradients::derivative::{Derivative, Differentiable};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{ComputeType, ViaF64, pointwise, special};

/// One row of the table.
struct SpecialFunction {
    name: &'static str,
    at: fn(f64) -> f64,
    /// `None` if PyTorch has no derivative of it.
    derivative: Option<Derivative>,
}

/// Defines the methods of [`DTensor`], the enum [`Special`] and the table from one entry per function: its value at a number, and after
/// the arrow its derivative at a number and in terms of operators, or `not_differentiable`.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $(#[doc(alias = $alias:literal)])*
        $name:ident: $at:expr => $derivative:ident $(($slope:expr, $formula:expr))?;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                ///
                /// Elementwise: keeps the layout and communicates nothing, unless this tensor is `Partial`. Such a tensor is reduced
                /// first, which is collective. f32 is computed in f64 and rounded once; integers give f32.
                $(#[doc(alias = $alias)])*
                #[track_caller]
                pub fn $name(&self) -> Result<DTensor> {
                    Ok(dispatch(&Special::$name, &[self], Location::caller())?.swap_remove(0))
                }
            )*
        }

        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        enum Special {
            $($name,)*
        }

        static FUNCTIONS: &[SpecialFunction] = &[
            $(SpecialFunction {
                name: stringify!($name),
                at: $at,
                derivative: functions!(@$derivative $(($slope, $formula))?),
            },)*
        ];

        pub(in crate::ops) const OPS: &[OpEntry] = &[
            $(OpEntry { name: stringify!($name), samples, apply: |x| {
                // Gradients are compared between 0 and 1, where all of them exist and none is near a pole.
                Ok(vec![x[0].detach().$name()?, x[0].mul_scalar(1.0 / 128.0)?.add_scalar(0.6)?.$name()?])
            } },)*
        ];
    };
    (@not_differentiable) => { None };
    (@derivative ($slope:expr, $formula:expr)) => {
        Some(Derivative { at: $slope, formula: $formula, kernel: None })
    };
}

/// The sign of a number, 0 for 0 and NaN.
fn sign(x: f64) -> f64 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        0.0
    }
}

/// The derivative of a function of order 1 from those of order 0 and 1: `outer - inner / x`, which is a half at 0.
fn slope_of_first_order(x: f64, outer: f64, inner: f64) -> f64 {
    if x.abs() < f64::EPSILON { 0.5 } else { outer - inner / x }
}

/// As [`slope_of_first_order`], of tensors.
fn first_order(x: &DTensor, outer: &DTensor, inner: &DTensor) -> Result<DTensor> {
    let near_zero = x.abs()?.lt(f64::EPSILON)?;
    let safe = x.masked_fill(&near_zero, 1.0)?;
    outer.sub(&inner.div(&safe)?)?.masked_fill(&near_zero, 0.5)
}

functions! {
    /// Returns the logarithm of the magnitude of the gamma function of each element.
    #[doc(alias = "special.gammaln")]
    lgamma: special::lgamma => derivative(special::digamma, DTensor::digamma);
    /// Returns the derivative of the logarithm of the gamma function of each element; NaN at the negative integers.
    #[doc(alias = "special.digamma")]
    #[doc(alias = "special.psi")]
    digamma: special::digamma => derivative(special::trigamma, |x| x.polygamma(1));
    /// Returns the inverse of the error function of each element; NaN outside of -1 to 1.
    #[doc(alias = "special.erfinv")]
    erfinv: special::erfinv => derivative(
        |x| 0.5 * PI.sqrt() * special::erfinv(x).powi(2).exp(),
        |x| x.erfinv()?.square()?.exp()?.mul_scalar(0.5 * PI.sqrt())
    );
    /// Returns `sin(pi x) / (pi x)` of each element, 1 at 0.
    #[doc(alias = "special.sinc")]
    sinc: special::sinc => derivative(
        |x| {
            let product = PI * x;
            if x * x * PI == 0.0 { 0.0 } else { (product * product.cos() - product.sin()) / (x * product) }
        },
        |x| {
            let product = x.mul_scalar(PI)?;
            let below = x.mul(&product)?;
            let at_zero = below.eq(0.0)?;
            let above = product.mul(&product.cos()?)?.sub(&product.sin()?)?;
            above.div(&below.masked_fill(&at_zero, 1.0)?)?.masked_fill(&at_zero, 0.0)
        }
    );
    /// Returns the modified Bessel function of the first kind and order 0 of each element.
    #[doc(alias = "special.i0")]
    #[doc(alias = "special.modified_bessel_i0")]
    i0: special::i0 => derivative(special::i1, DTensor::special_i1);
    /// Returns `exp(-|x|)` times the modified Bessel function of the first kind and order 0.
    #[doc(alias = "special.i0e")]
    special_i0e: special::i0e => derivative(
        |x| special::i1e(x) - sign(x) * special::i0e(x),
        |x| x.special_i1e()?.sub(&x.sign()?.mul(&x.special_i0e()?)?)
    );
    /// Returns the modified Bessel function of the first kind and order 1 of each element.
    #[doc(alias = "special.i1")]
    #[doc(alias = "special.modified_bessel_i1")]
    special_i1: special::i1 => derivative(
        |x| slope_of_first_order(x, special::i0(x), special::i1(x)),
        |x| first_order(x, &x.i0()?, &x.special_i1()?)
    );
    /// Returns `exp(-|x|)` times the modified Bessel function of the first kind and order 1.
    #[doc(alias = "special.i1e")]
    special_i1e: special::i1e => derivative(
        |x| slope_of_first_order(x, special::i0e(x) - sign(x) * special::i1e(x), special::i1e(x)),
        |x| first_order(x, &x.special_i0e()?.sub(&x.sign()?.mul(&x.special_i1e()?)?)?, &x.special_i1e()?)
    );
    /// Returns the modified Bessel function of the second kind and order 0 of each element; NaN for negative ones.
    #[doc(alias = "special.modified_bessel_k0")]
    special_modified_bessel_k0: special::k0 => derivative(|x| -special::k1(x), |x| x.special_modified_bessel_k1()?.neg());
    /// Returns the modified Bessel function of the second kind and order 1 of each element; NaN for negative ones.
    #[doc(alias = "special.modified_bessel_k1")]
    special_modified_bessel_k1: special::k1 => derivative(
        |x| -special::k0(x) - special::k1(x) / x,
        |x| x.special_modified_bessel_k0()?.add(&x.special_modified_bessel_k1()?.div(x)?)?.neg()
    );
    /// Returns `exp(x)` times the modified Bessel function of the second kind and order 0; NaN for negative elements.
    #[doc(alias = "special.scaled_modified_bessel_k0")]
    special_scaled_modified_bessel_k0: special::k0e => not_differentiable;
    /// Returns `exp(x)` times the modified Bessel function of the second kind and order 1; NaN for negative elements.
    #[doc(alias = "special.scaled_modified_bessel_k1")]
    special_scaled_modified_bessel_k1: special::k1e => not_differentiable;
    /// Returns the Bessel function of the first kind and order 0 of each element.
    #[doc(alias = "special.bessel_j0")]
    special_bessel_j0: special::j0 => derivative(|x| -special::j1(x), |x| x.special_bessel_j1()?.neg());
    /// Returns the Bessel function of the first kind and order 1 of each element.
    #[doc(alias = "special.bessel_j1")]
    special_bessel_j1: special::j1 => derivative(
        |x| slope_of_first_order(x, special::j0(x), special::j1(x)),
        |x| first_order(x, &x.special_bessel_j0()?, &x.special_bessel_j1()?)
    );
    /// Returns the Bessel function of the second kind and order 0 of each element; NaN for negative ones.
    #[doc(alias = "special.bessel_y0")]
    special_bessel_y0: special::y0 => derivative(|x| -special::y1(x), |x| x.special_bessel_y1()?.neg());
    /// Returns the Bessel function of the second kind and order 1 of each element; NaN for negative ones.
    #[doc(alias = "special.bessel_y1")]
    special_bessel_y1: special::y1 => derivative(
        |x| special::y0(x) - special::y1(x) / x,
        |x| x.special_bessel_y0()?.sub(&x.special_bessel_y1()?.div(x)?)
    );
    /// Returns the spherical Bessel function of the first kind and order 0 of each element, `sin(x) / x`.
    #[doc(alias = "special.spherical_bessel_j0")]
    special_spherical_bessel_j0: special::spherical_j0 => not_differentiable;
    /// Returns the Airy function of each element.
    #[doc(alias = "special.airy_ai")]
    special_airy_ai: special::airy_ai => not_differentiable;
    /// Returns `-x log(x)` of each element: 0 at 0, and negative infinity below.
    #[doc(alias = "special.entr")]
    special_entr: special::entr => derivative(|x| -(1.0 + x.ln()), |x| x.log()?.add_scalar(1.0)?.neg());
    /// Returns `exp(x^2) erfc(x)` of each element.
    #[doc(alias = "special.erfcx")]
    special_erfcx: special::erfcx => derivative(
        |x| 2.0 * x * special::erfcx(x) - 2.0 / PI.sqrt(),
        |x| x.mul(&x.special_erfcx()?)?.mul_scalar(2.0)?.add_scalar(-2.0 / PI.sqrt())
    );
    /// Returns the normal distribution function of each element.
    #[doc(alias = "special.ndtr")]
    special_ndtr: special::ndtr => derivative(
        |x| (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
        |x| x.square()?.mul_scalar(-0.5)?.exp()?.mul_scalar(1.0 / (2.0 * PI).sqrt())
    );
    /// Returns the quantile of the normal distribution for each element; NaN outside of 0 to 1.
    #[doc(alias = "special.ndtri")]
    special_ndtri: special::ndtri => derivative(
        |x| (2.0 * PI).sqrt() * (0.5 * special::ndtri(x).powi(2)).exp(),
        |x| x.special_ndtri()?.square()?.mul_scalar(0.5)?.exp()?.mul_scalar((2.0 * PI).sqrt())
    );
    /// Returns the logarithm of the normal distribution function of each element.
    #[doc(alias = "special.log_ndtr")]
    special_log_ndtr: special::log_ndtr => derivative(
        |x| (2.0 / PI).sqrt() / special::erfcx(-x * FRAC_1_SQRT_2),
        |x| x.mul_scalar(-FRAC_1_SQRT_2)?.special_erfcx()?.reciprocal()?.mul_scalar((2.0 / PI).sqrt())
    );
}

impl Special {
    fn function(self) -> &'static SpecialFunction {
        &FUNCTIONS[self as usize]
    }
}

impl Differentiable for Special {
    fn derivative(self) -> Option<&'static Derivative> {
        self.function().derivative.as_ref()
    }
}

impl Op for Special {
    fn name(&self) -> &'static str {
        self.function().name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let monotonicity = match self {
            Special::special_erfcx => Monotonicity::Decreasing,
            Special::special_ndtr | Special::special_log_ndtr => Monotonicity::Increasing,
            _ => Monotonicity::None,
        };
        Ok(plan(&inputs[0], UnaryResultType::Float, monotonicity, false, false))
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, at) = (&inputs[0], self.function().at);
        let (arithmetic, dtype) = (ComputeType::float_for([x.dtype()]), UnaryResultType::Float.dtype(x.dtype()));
        let function = ViaF64(move |[x]: [f64; 1]| at(x), |[x]: [i64; 1]| x);
        Ok(vec![pointwise(function, [x], x.dims(), arithmetic, dtype)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        self.gradient_by_derivative()
    }
}

impl DTensor {
    /// Returns the derivative of order `n` of [`digamma`](Self::digamma) of each element.
    ///
    /// Elementwise: keeps the layout and communicates nothing, unless this tensor is `Partial`. Such a tensor is reduced first, which is
    /// collective. f32 is computed in f64 and rounded once; integers give f32.
    #[doc(alias = "special.polygamma")]
    #[track_caller]
    pub fn polygamma(&self, n: u32) -> Result<DTensor> {
        match n {
            0 => self.digamma(),
            _ => Ok(dispatch(&Polygamma { n }, &[self], Location::caller())?.swap_remove(0)),
        }
    }

    /// Returns the logarithm of the multivariate gamma function of dimension `p` of each element.
    ///
    /// Elementwise, as [`lgamma`](Self::lgamma).
    ///
    /// # Errors
    /// If `p` is 0, or above 65536: every dimension is a pass over the elements.
    #[doc(alias = "special.multigammaln")]
    #[track_caller]
    pub fn mvlgamma(&self, p: usize) -> Result<DTensor> {
        if !(1..=1 << 16).contains(&p) {
            let found = format!("dimension {p} in mvlgamma of {}", self.layout());
            let kind = crate::error::ErrorKind::Argument;
            return Err(kind.error("dimension", found, "1 to 65536", "use lgamma for one dimension"));
        }
        let x = if self.dtype().is_float() { self.clone() } else { self.to_dtype(candle_core::DType::F32)? };
        let constant = 0.25 * (p * (p - 1)) as f64 * PI.ln();
        let mut sum = x.lgamma()?.add_scalar(constant)?;
        for i in 1..p {
            sum = sum.add(&x.add_scalar(-0.5 * i as f64)?.lgamma()?)?;
        }
        Ok(sum)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Polygamma {
    n: u32,
}

/// The first derivative in f32 has values of its own at the negative integers.
#[derive(Clone, Copy)]
struct Trigamma;

impl shardwise_kernels::PointwiseFn<1> for Trigamma {
    #[inline(always)]
    fn f32<const FMA: bool>(self, [x]: [f32; 1]) -> f32 {
        special::trigamma_f32(x)
    }

    #[inline(always)]
    fn f64(self, [x]: [f64; 1]) -> f64 {
        special::trigamma(x)
    }

    #[inline(always)]
    fn i64(self, [x]: [i64; 1]) -> i64 {
        x
    }
}

impl Op for Polygamma {
    fn name(&self) -> &'static str {
        "polygamma"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(plan(&inputs[0], UnaryResultType::Float, Monotonicity::None, false, false))
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, n) = (&inputs[0], self.n);
        let dtype = UnaryResultType::Float.dtype(x.dtype());
        // Integers become f32 before anything is computed, as in PyTorch.
        let arithmetic = match x.dtype().is_float() {
            true => ComputeType::float_for([x.dtype()]),
            false => ComputeType::F32,
        };
        if n == 1 {
            return Ok(vec![pointwise(Trigamma, [x], x.dims(), arithmetic, dtype)?]);
        }
        let function = ViaF64(move |[x]: [f64; 1]| special::polygamma(n, x), |[x]: [i64; 1]| x);
        Ok(vec![pointwise(function, [x], x.dims(), arithmetic, dtype)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            Ok(vec![Some(g.mul(&saved.input(0).polygamma(op.n.saturating_add(1))?)?.to_dtype(saved.dtype(0))?)])
        })
    }
}

pub(in crate::ops) const ORDER_OPS: &[OpEntry] = &[
    OpEntry {
        name: "polygamma",
        samples,
        apply: |x| {
            let x = away_from_poles(&x[0])?;
            Ok(vec![x.polygamma(1)?, x.polygamma(2)?, x.polygamma(3)?])
        },
    },
    OpEntry { name: "mvlgamma", samples, apply: |x| Ok(vec![away_from_poles(&x[0])?.mvlgamma(3)?]) },
];

/// Numbers above 2, whatever the argument.
fn away_from_poles(x: &DTensor) -> Result<DTensor> {
    x.mul_scalar(1.0 / 32.0)?.square()?.add_scalar(2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derivatives_are_differences() {
        const STEP: f64 = 1e-6;
        for function in FUNCTIONS {
            let Some(derivative) = &function.derivative else { continue };
            for x in [0.13, 0.37, 0.71, 0.93] {
                let difference = ((function.at)(x + STEP) - (function.at)(x - STEP)) / (2.0 * STEP);
                let slope = (derivative.at)(x);
                let near = (difference - slope).abs() <= 1e-7 * slope.abs().max(1.0);
                assert!(near, "{} at {x}: {slope} instead of {difference}", function.name);
            }
        }
    }
}
