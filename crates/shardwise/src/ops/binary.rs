//! Functions of two tensors that broadcast, element by element.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::{OpEntry, Sample, derivative, dtype};
use crate::error::{Error, Result};
use crate::layout::TensorMeta;
use crate::local::{from_reals, from_wholes, reals, stretch, wholes};
use crate::op::{Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps, Saved};

/// What a function gives.
#[derive(Clone, Copy, PartialEq)]
enum Gives {
    /// The type in which both meet.
    Meet,
    /// A floating-point type.
    Real,
    /// 0 or 1.
    Truth,
}

/// Pending reductions that pass: of the two operands (`None`: whole) and of the result.
type Passing = (Option<ReduceOp>, Option<ReduceOp>, ReduceOp);

struct Function {
    gives: Gives,
    passes: &'static [Passing],
    real: fn(f64, f64) -> f64,
    whole: fn(i64, i64) -> i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Binary(&'static str);

use ReduceOp::{Avg, Max, Min, Sum};

/// Sums and means add up term by term, and a value that is added to a mean may be whole. Extremes do not pass: whole
/// numbers wrap, and an infinite operand beside the other infinity would be not-a-number.
const ADD: &[Passing] =
    &[(Some(Sum), Some(Sum), Sum), (Some(Avg), Some(Avg), Avg), (Some(Avg), None, Avg), (None, Some(Avg), Avg)];
const MUL: &[Passing] =
    &[(Some(Sum), None, Sum), (None, Some(Sum), Sum), (Some(Avg), None, Avg), (None, Some(Avg), Avg)];
/// An extreme of extremes; a whole operand is one of them on every rank.
const MAXIMUM: &[Passing] = &[
    (Some(Max), Some(Max), Max),
    (Some(Max), None, Max),
    (None, Some(Max), Max),
    (Some(Min), None, Min),
    (None, Some(Min), Min),
];
const MINIMUM: &[Passing] = &[
    (Some(Min), Some(Min), Min),
    (Some(Min), None, Min),
    (None, Some(Min), Min),
    (Some(Max), None, Max),
    (None, Some(Max), Max),
];

macro_rules! functions {
    ($($(#[doc = $doc:literal])* $name:ident: $gives:ident, $passes:expr, $real:expr, $whole:expr;)*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                #[track_caller]
                pub fn $name(&self, other: &DTensor) -> Result<DTensor> {
                    Ok(dispatch(&Binary(stringify!($name)), &[self, other], Location::caller())?.swap_remove(0))
                }
            )*
        }

        fn function(name: &str) -> Function {
            match name {
                $(stringify!($name) => Function { gives: Gives::$gives, passes: $passes, real: $real, whole: $whole },)*
                other => unreachable!("{other} is not in the table"),
            }
        }

        pub(super) const OPS: &[OpEntry] = &[
            $(OpEntry { name: stringify!($name), samples, apply: |x| Ok(vec![x[0].$name(&x[1])?]) },)*
        ];
    };
}

fn truth(b: bool) -> f64 {
    f64::from(u8::from(b))
}

functions! {
    /// a + b.
    add: Meet, ADD, |a, b| a + b, i64::wrapping_add;
    /// a - b.
    sub: Meet, ADD, |a, b| a - b, i64::wrapping_sub;
    /// a * b.
    mul: Meet, MUL, |a, b| a * b, i64::wrapping_mul;
    /// a / b, a floating-point number.
    div: Real, &[], |a, b| a / b, |a, _| a;
    /// The whole number next below a / b.
    div_floor: Meet, &[], |a, b| (a / b).floor(), |a, b| if b == 0 { 0 } else { a.div_euclid(b) - i64::from(b < 0 && a.rem_euclid(b) != 0) };
    /// a / b without its fraction.
    div_trunc: Meet, &[], |a, b| (a / b).trunc(), |a, b| if b == 0 { 0 } else { a.wrapping_div(b) };
    /// a to the power of b.
    pow: Meet, &[], f64::powf, |a, b| if b < 0 { if a.abs() == 1 { a.pow((b & 1) as u32) } else { 0 } } else { a.wrapping_pow(b as u32) };
    /// The larger one; not-a-number wins.
    maximum: Meet, MAXIMUM, |a, b| if a >= b || a.is_nan() { a } else { b }, i64::max;
    /// The smaller one; not-a-number wins.
    minimum: Meet, MINIMUM, |a, b| if a <= b || a.is_nan() { a } else { b }, i64::min;
    /// What a leaves when divided by b, with the sign of a.
    fmod: Meet, &[], |a, b| a % b, |a, b| if b == 0 { 0 } else { a.wrapping_rem(b) };
    /// What a leaves when divided by b, with the sign of b.
    remainder: Meet, &[], |a, b| a - b * (a / b).floor(), |a, b| if b == 0 { 0 } else { ((a % b) + b) % b };
    /// The angle of the point (b, a).
    atan2: Real, &[], f64::atan2, |a, _| a;
    /// sqrt(a^2 + b^2).
    hypot: Real, &[], f64::hypot, |a, _| a;
    /// 1 where equal.
    eq: Truth, &[], |a, b| truth(a == b), |a, b| i64::from(a == b);
    /// 1 where different.
    ne: Truth, &[], |a, b| truth(a != b), |a, b| i64::from(a != b);
    /// 1 where a < b.
    lt: Truth, &[], |a, b| truth(a < b), |a, b| i64::from(a < b);
    /// 1 where a <= b.
    le: Truth, &[], |a, b| truth(a <= b), |a, b| i64::from(a <= b);
    /// 1 where a > b.
    gt: Truth, &[], |a, b| truth(a > b), |a, b| i64::from(a > b);
    /// 1 where a >= b.
    ge: Truth, &[], |a, b| truth(a >= b), |a, b| i64::from(a >= b);
    /// 1 where neither is zero.
    logical_and: Truth, &[], |a, b| truth(a != 0.0 && b != 0.0), |a, b| i64::from(a != 0 && b != 0);
    /// 1 where not both are zero.
    logical_or: Truth, &[], |a, b| truth(a != 0.0 || b != 0.0), |a, b| i64::from(a != 0 || b != 0);
    /// 1 where exactly one is zero.
    logical_xor: Truth, &[], |a, b| truth((a != 0.0) != (b != 0.0)), |a, b| i64::from((a != 0) != (b != 0));
    /// The bits that both have; whole numbers only.
    bitwise_and: Meet, &[], |a, _| a, |a, b| a & b;
    /// The bits that either has; whole numbers only.
    bitwise_or: Meet, &[], |a, _| a, |a, b| a | b;
    /// The bits that exactly one has; whole numbers only.
    bitwise_xor: Meet, &[], |a, _| a, |a, b| a ^ b;
}

/// The shape that tensors broadcast to.
pub(super) fn broadcast(name: &str, inputs: &[TensorMeta]) -> Result<Vec<usize>> {
    let ndim = inputs.iter().map(|m| m.shape.len()).max().unwrap_or(0);
    let mut shape = vec![1; ndim];
    for input in inputs {
        let missing = ndim - input.shape.len();
        for (d, &n) in input.shape.iter().enumerate() {
            let out = &mut shape[d + missing];
            if *out != n && *out != 1 && n != 1 {
                let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
                return Err(Error::invalid(
                    "operands",
                    format!("shapes {shapes:?} in {name}"),
                    "shapes that are equal or 1 in every dimension, counted from the last",
                    "reshape or expand the tensors",
                ));
            }
            if *out == 1 {
                *out = n;
            }
        }
    }
    Ok(shape)
}

impl Op for Binary {
    fn name(&self) -> &'static str {
        self.0
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let function = function(self.0);
        let shape = broadcast(self.0, inputs)?;
        let meet = dtype::promote(inputs[0].dtype, inputs[1].dtype);
        if self.0.starts_with("bitwise") && meet.is_float() {
            let found = format!("{} and {} in {}", inputs[0].dtype.as_str(), inputs[1].dtype.as_str(), self.0);
            return Err(Error::invalid("operands", found, "whole numbers", "convert the tensors first"));
        }
        let dtype = match function.gives {
            Gives::Meet => meet,
            Gives::Real => dtype::real(meet),
            Gives::Truth => DType::U8,
        };
        let mut signature = Signature::pointwise(&[&inputs[0].shape, &inputs[1].shape], &shape);
        for &(a, b, result) in function.passes {
            // Operands that are converted on the way must not be rounded before they are reduced.
            let converted = |pending: Option<ReduceOp>, from: DType| pending.is_some() && from != dtype;
            if !converted(a, inputs[0].dtype) && !converted(b, inputs[1].dtype) {
                signature = signature.passing([a, b], result);
            }
        }
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let function = function(self.0);
        let metas: Vec<TensorMeta> = inputs.iter().map(|t| TensorMeta::new(t.dims(), t.dtype())).collect();
        let shape = broadcast(self.0, &metas)?;
        let meet = dtype::promote(metas[0].dtype, metas[1].dtype);
        // Candle's own kernels, where the result is exact to the last bit whatever the length of the tensor.
        if matches!(meet, DType::F32 | DType::F64) && metas[0].dtype == metas[1].dtype && !shape.contains(&0) {
            let (a, b) = (&inputs[0], &inputs[1]);
            match self.0 {
                "add" => return Ok(vec![a.broadcast_add(b)?]),
                "sub" => return Ok(vec![a.broadcast_sub(b)?]),
                "mul" => return Ok(vec![a.broadcast_mul(b)?]),
                "div" => return Ok(vec![a.broadcast_div(b)?]),
                _ => {}
            }
        }
        let (a, b) = (stretch(&inputs[0], &shape)?, stretch(&inputs[1], &shape)?);
        let dtype = match function.gives {
            Gives::Meet => meet,
            Gives::Real => dtype::real(meet),
            Gives::Truth => DType::U8,
        };
        if !meet.is_float() && function.gives != Gives::Real {
            let values = wholes(&a)?.into_iter().zip(wholes(&b)?).map(|(a, b)| (function.whole)(a, b)).collect();
            return Ok(vec![from_wholes(values, &shape, dtype)?]);
        }
        let values = reals(&a)?.into_iter().zip(reals(&b)?).map(|(a, b)| (function.real)(a, b)).collect();
        Ok(vec![from_reals(values, &shape, dtype)?])
    }

    fn differentiable(&self) -> Option<Keeps> {
        derivative::of_two_keeps(self.name())
    }

    fn gradient(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        match &gradients[0] {
            Some(gradient) => derivative::of_two(self.name(), saved, gradient),
            None => Ok(vec![None, None]),
        }
    }
}

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [(&[usize], &[usize]); 5] =
        [(&[4, 6], &[4, 6]), (&[5, 3], &[3]), (&[5, 1], &[1, 4]), (&[0, 2], &[2]), (&[1], &[5])];
    let mut all: Vec<Vec<Sample>> = Vec::new();
    for (a, b) in shapes {
        all.push(vec![Sample::new(a, DType::I64), Sample::new(b, DType::I64)]);
    }
    all
}
