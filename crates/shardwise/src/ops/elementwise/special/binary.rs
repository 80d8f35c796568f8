//! Special functions of two numbers that broadcast.

use std::panic::Location;

use candle_core::Tensor;

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::broadcast::{broadcast, broadcast_shape};
use crate::ops::gradients::derivative::unbroadcast;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::rule::Signature;
use crate::tensor::{DTensor, Operand, SaveForBackward, SavedTensors};
use shardwise_kernels::{ComputeType, PerType, ViaF64, pointwise, special};

/// One row of the table.
struct BinarySpecial {
    name: &'static str,
    run: fn([&Tensor; 2], &[usize], ComputeType, candle_core::DType) -> Result<Tensor>,
    derivatives: BinaryDerivatives,
}

/// Which derivatives of a function exist.
#[derive(Clone, Copy)]
enum BinaryDerivatives {
    /// PyTorch treats the result as a constant.
    None,
    /// With respect to only the second argument; asking for the other is an error, as in PyTorch.
    Second(SecondDerivative),
    /// With respect to both.
    Both(SecondDerivative, SecondDerivative),
}

/// The derivative with respect to one argument.
type SecondDerivative = fn(&DTensor, &DTensor) -> Result<DTensor>;

/// Defines the methods of [`DTensor`], the enum [`SpecialPair`] and the table from one entry per function: its value, computed in f64 (`wide`)
/// or in the type of the elements (`each`), and its derivatives.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $(#[doc(alias = $alias:literal)])*
        $name:ident: |$a:ident, $b:ident| $form:ident($value:expr) => $derivatives:expr;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                ///
                /// The argument is a tensor that broadcasts with this one, or a number. Elementwise: communicates only if the operands
                /// are sharded differently, or `Partial`; then they are redistributed, which is collective. Integers give f32.
                $(#[doc(alias = $alias)])*
                #[track_caller]
                pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<DTensor> {
                    let other = other.into().tensor(self)?;
                    Ok(dispatch(&SpecialPair::$name, &[self, &other], Location::caller())?.swap_remove(0))
                }
            )*
        }

        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        enum SpecialPair {
            $($name,)*
        }

        static FUNCTIONS: &[BinarySpecial] = &[
            $(BinarySpecial {
                name: stringify!($name),
                run: |inputs, shape, arithmetic, dtype| {
                    Ok(pointwise(functions!(@$form $a, $b, $value), inputs, shape, arithmetic, dtype)?)
                },
                derivatives: $derivatives,
            },)*
        ];

        pub(in crate::ops) const OPS: &[OpEntry] = &[
            $(OpEntry { name: stringify!($name), samples, apply: |x| {
                // Orders and degrees are small, and probabilities of incomplete functions positive.
                let order = x[1].abs()?.mul_scalar(1.0 / 8.0)?.add_scalar(0.5)?;
                let value = x[0].abs()?.mul_scalar(1.0 / 16.0)?.add_scalar(1.25)?;
                let alone = matches!(SpecialPair::$name.function().derivatives, Second(_));
                Ok(vec![if alone { value.detach() } else { value }.$name(&order)?])
            } },)*
        ];
    };
    (@wide $a:ident, $b:ident, $value:expr) => { ViaF64(|[$a, $b]: [f64; 2]| $value, |[a, _]: [i64; 2]| a) };
    (@each $a:ident, $b:ident, $value:expr) => {
        PerType(
            |[$a, $b]: [f32; 2]| { let $b = f64::from($b); $value },
            |[$a, $b]: [f64; 2]| $value,
            |[a, _]: [i64; 2]| a,
        )
    };
}

/// The argument of the shifted Chebyshev polynomials.
macro_rules! shifted {
    ($x:expr) => {
        $x + $x - 1.0
    };
}

use BinaryDerivatives::{Both, Second};

const NONE: BinaryDerivatives = BinaryDerivatives::None;

functions! {
    /// Returns the regularized lower incomplete gamma function `P(self, other)`; NaN where an argument is negative.
    #[doc(alias = "special.gammainc")]
    igamma: |a, x| wide(special::igamma(a, x)) => Second(density);
    /// Returns the regularized upper incomplete gamma function `Q(self, other)`; NaN where an argument is negative.
    #[doc(alias = "special.gammaincc")]
    igammac: |a, x| wide(special::igammac(a, x)) => Second(|a, x| density(a, x)?.neg());
    /// Returns the Hurwitz zeta function of `self`, from `other` on.
    #[doc(alias = "special.zeta")]
    special_zeta: |s, q| wide(special::zeta(s, q)) => Second(|s, q| {
        s.neg()?.mul(&s.add_scalar(1.0)?.special_zeta(q)?)
    });
    /// Returns `self * log(1 + other)`: 0 where this tensor is 0, unless `other` is NaN.
    #[doc(alias = "special.xlog1py")]
    special_xlog1py: |x, y| wide(special::xlog1py(x, y)) => Both(
        |x, y| {
            let vanishes = x.eq(0.0)?.logical_and(&y.le(-1.0)?)?;
            y.log1p()?.masked_fill(&vanishes, 0.0)
        },
        |x, y| x.div(&y.add_scalar(1.0)?)
    );
    /// Returns the Chebyshev polynomial of the first kind, of degree `other`.
    #[doc(alias = "special.chebyshev_polynomial_t")]
    special_chebyshev_polynomial_t: |x, n| each(special::chebyshev_t(x, n)) => NONE;
    /// Returns the Chebyshev polynomial of the second kind, of degree `other`.
    #[doc(alias = "special.chebyshev_polynomial_u")]
    special_chebyshev_polynomial_u: |x, n| each(special::chebyshev_u(x, n)) => NONE;
    /// Returns the Chebyshev polynomial of the third kind, of degree `other`.
    #[doc(alias = "special.chebyshev_polynomial_v")]
    special_chebyshev_polynomial_v: |x, n| each(special::chebyshev_v(x, n)) => NONE;
    /// Returns the Chebyshev polynomial of the fourth kind, of degree `other`.
    #[doc(alias = "special.chebyshev_polynomial_w")]
    special_chebyshev_polynomial_w: |x, n| each(special::chebyshev_w(x, n)) => NONE;
    /// Returns the Chebyshev polynomial of the first kind of `2 x - 1`, of degree `other`.
    #[doc(alias = "special.shifted_chebyshev_polynomial_t")]
    special_shifted_chebyshev_polynomial_t: |x, n| each(special::chebyshev_t(shifted!(x), n)) => NONE;
    /// Returns the Chebyshev polynomial of the second kind of `2 x - 1`, of degree `other`.
    #[doc(alias = "special.shifted_chebyshev_polynomial_u")]
    special_shifted_chebyshev_polynomial_u: |x, n| each(special::chebyshev_u(shifted!(x), n)) => NONE;
    /// Returns the Chebyshev polynomial of the third kind of `2 x - 1`, of degree `other`.
    #[doc(alias = "special.shifted_chebyshev_polynomial_v")]
    special_shifted_chebyshev_polynomial_v: |x, n| each(special::chebyshev_v(shifted!(x), n)) => NONE;
    /// Returns the Chebyshev polynomial of the fourth kind of `2 x - 1`, of degree `other`.
    #[doc(alias = "special.shifted_chebyshev_polynomial_w")]
    special_shifted_chebyshev_polynomial_w: |x, n| each(special::chebyshev_w(shifted!(x), n)) => NONE;
    /// Returns the Hermite polynomial of the physicists, of degree `other`; NaN for degrees that overflow.
    #[doc(alias = "special.hermite_polynomial_h")]
    special_hermite_polynomial_h: |x, n| each(special::hermite_h(x, n)) => NONE;
    /// Returns the Hermite polynomial of probability theory, of degree `other`; NaN for degrees that overflow.
    #[doc(alias = "special.hermite_polynomial_he")]
    special_hermite_polynomial_he: |x, n| each(special::hermite_he(x, n)) => NONE;
    /// Returns the Laguerre polynomial of degree `other`.
    #[doc(alias = "special.laguerre_polynomial_l")]
    special_laguerre_polynomial_l: |x, n| each(special::laguerre_l(x, n)) => NONE;
    /// Returns the Legendre polynomial of degree `other`.
    #[doc(alias = "special.legendre_polynomial_p")]
    special_legendre_polynomial_p: |x, n| each(special::legendre_p(x, n)) => NONE;
}

/// The density of the gamma distribution: `x^(a - 1) exp(-x) / Gamma(a)`.
fn density(a: &DTensor, x: &DTensor) -> Result<DTensor> {
    a.add_scalar(-1.0)?.mul(&x.log()?)?.sub(x)?.sub(&a.lgamma()?)?.exp()
}

impl SpecialPair {
    fn function(self) -> &'static BinarySpecial {
        &FUNCTIONS[self as usize]
    }
}

impl Op for SpecialPair {
    fn name(&self) -> &'static str {
        self.function().name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = broadcast(self.name(), inputs)?;
        let dtype = dtype::real(dtype::promote(inputs[0].dtype, inputs[1].dtype));
        let signature = Signature::pointwise(&[&inputs[0].shape, &inputs[1].shape], &shape);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let shape = broadcast_shape(&[a.dims(), b.dims()]).expect("parts of tensors that broadcast");
        let dtype = dtype::real(dtype::promote(a.dtype(), b.dtype()));
        // In the type of the result: integers become f32 first, as in PyTorch.
        let arithmetic = ComputeType::float_for([dtype]);
        Ok(vec![(self.function().run)([a, b], &shape, arithmetic, dtype)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        if let BinaryDerivatives::None = self.function().derivatives {
            return Gradient::NotDifferentiable;
        }
        Gradient::From(SaveForBackward::Inputs, Self::backward)
    }
}

impl SpecialPair {
    fn backward(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None, None]) };
        let (first, second) = match self.function().derivatives {
            BinaryDerivatives::None => (None, None),
            Second(second) => (None, Some(second)),
            Both(first, second) => (Some(first), Some(second)),
        };
        let mut found = Vec::new();
        for (i, derivative) in [first, second].into_iter().enumerate() {
            if !saved.needs_input_grad(i) {
                found.push(None);
                continue;
            }
            let Some(derivative) = derivative else {
                return Err(ErrorKind::Gradient.error(
                    "gradient",
                    format!("the gradient of {} with respect to its first argument", self.name()),
                    "a gradient with respect to the second argument, the only one that exists",
                    "detach the first argument",
                ));
            };
            let slope = derivative(&saved.input(0), &saved.input(1))?;
            found.push(Some(unbroadcast(&g.mul(&slope)?, saved, i)?));
        }
        Ok(found)
    }
}

fn samples() -> Vec<Vec<SampleInput>> {
    use candle_core::DType;
    let shapes: [(&[usize], &[usize]); 4] = [(&[4, 6], &[4, 6]), (&[5, 3], &[3]), (&[5, 1], &[1, 4]), (&[0, 2], &[2])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::F64), SampleInput::new(b, DType::F64)]).collect()
}
