//! Functions of two tensors that broadcast, element by element.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use super::{OpEntry, Sample, derivative, dtype};
use crate::error::{Error, Result};
use crate::layout::TensorMeta;
use crate::local::{Arithmetic, Each, Wide, map};
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
    name: &'static str,
    gives: Gives,
    passes: &'static [Passing],
    run: fn([&Tensor; 2], &[usize], Arithmetic, DType) -> Result<Tensor>,
}

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

/// Functions by name. `each` is written alike for f32 and f64, `wide` is computed in f64 for f32 too.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $gives:ident, $passes:expr, |$a:ident, $b:ident| $form:ident($real:expr), whole($whole:expr);
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                #[track_caller]
                pub fn $name(&self, other: &DTensor) -> Result<DTensor> {
                    Ok(dispatch(&Binary::$name, &[self, other], Location::caller())?.swap_remove(0))
                }
            )*
        }

        #[allow(non_camel_case_types)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        enum Binary {
            $($name,)*
        }

        static FUNCTIONS: &[Function] = &[
            $(Function {
                name: stringify!($name),
                gives: Gives::$gives,
                passes: $passes,
                run: |inputs, shape, arithmetic, dtype| {
                    let whole = |[$a, $b]: [i64; 2]| $whole;
                    map(functions!(@$form $a, $b, $real, whole), inputs, shape, arithmetic, dtype)
                },
            },)*
        ];

        pub(super) const OPS: &[OpEntry] = &[
            $(OpEntry { name: stringify!($name), samples, apply: |x| Ok(vec![x[0].$name(&x[1])?]) },)*
        ];
    };
    (@each $a:ident, $b:ident, $real:expr, $whole:ident) => {
        Each(|[$a, $b]: [f32; 2]| $real, |[$a, $b]: [f64; 2]| $real, $whole)
    };
    (@wide $a:ident, $b:ident, $real:expr, $whole:ident) => { Wide(|[$a, $b]: [f64; 2]| $real, $whole) };
}

functions! {
    /// a + b.
    add: Meet, ADD, |a, b| each(a + b), whole(a.wrapping_add(b));
    /// a - b.
    sub: Meet, ADD, |a, b| each(a - b), whole(a.wrapping_sub(b));
    /// a * b.
    mul: Meet, MUL, |a, b| each(a * b), whole(a.wrapping_mul(b));
    /// a / b, a floating-point number.
    div: Real, &[], |a, b| each(a / b), whole(real_only(a, b));
    /// The whole number next below a / b.
    div_floor: Meet, &[], |a, b| wide((a / b).floor()), whole(floor_of_quotient(a, b));
    /// a / b without its fraction.
    div_trunc: Meet, &[], |a, b| wide((a / b).trunc()), whole(if b == 0 { 0 } else { a.wrapping_div(b) });
    /// a to the power of b.
    pow: Meet, &[], |a, b| wide(a.powf(b)), whole(power(a, b));
    /// The larger one; not-a-number wins.
    maximum: Meet, MAXIMUM, |a, b| each(if a >= b || a.is_nan() { a } else { b }), whole(a.max(b));
    /// The smaller one; not-a-number wins.
    minimum: Meet, MINIMUM, |a, b| each(if a <= b || a.is_nan() { a } else { b }), whole(a.min(b));
    /// What a leaves when divided by b, with the sign of a.
    fmod: Meet, &[], |a, b| each(a % b), whole(if b == 0 { 0 } else { a.wrapping_rem(b) });
    /// What a leaves when divided by b, with the sign of b.
    remainder: Meet, &[], |a, b| wide(a - b * (a / b).floor()), whole(remainder_of_quotient(a, b));
    /// The angle of the point (b, a).
    atan2: Real, &[], |a, b| wide(a.atan2(b)), whole(real_only(a, b));
    /// sqrt(a^2 + b^2).
    hypot: Real, &[], |a, b| wide(a.hypot(b)), whole(real_only(a, b));
    /// 1 where equal.
    eq: Truth, &[], |a, b| each(if a == b { 1.0 } else { 0.0 }), whole(i64::from(a == b));
    /// 1 where different.
    ne: Truth, &[], |a, b| each(if a != b { 1.0 } else { 0.0 }), whole(i64::from(a != b));
    /// 1 where a < b.
    lt: Truth, &[], |a, b| each(if a < b { 1.0 } else { 0.0 }), whole(i64::from(a < b));
    /// 1 where a <= b.
    le: Truth, &[], |a, b| each(if a <= b { 1.0 } else { 0.0 }), whole(i64::from(a <= b));
    /// 1 where a > b.
    gt: Truth, &[], |a, b| each(if a > b { 1.0 } else { 0.0 }), whole(i64::from(a > b));
    /// 1 where a >= b.
    ge: Truth, &[], |a, b| each(if a >= b { 1.0 } else { 0.0 }), whole(i64::from(a >= b));
    /// 1 where neither is zero.
    logical_and: Truth, &[], |a, b| each(if a != 0.0 && b != 0.0 { 1.0 } else { 0.0 }),
        whole(i64::from(a != 0 && b != 0));
    /// 1 where not both are zero.
    logical_or: Truth, &[], |a, b| each(if a != 0.0 || b != 0.0 { 1.0 } else { 0.0 }),
        whole(i64::from(a != 0 || b != 0));
    /// 1 where exactly one is zero.
    logical_xor: Truth, &[], |a, b| each(if (a != 0.0) != (b != 0.0) { 1.0 } else { 0.0 }),
        whole(i64::from((a != 0) != (b != 0)));
    /// The bits that both have; whole numbers only.
    bitwise_and: Meet, &[], |a, b| each(whole_only(a, b)), whole(a & b);
    /// The bits that either has; whole numbers only.
    bitwise_or: Meet, &[], |a, b| each(whole_only(a, b)), whole(a | b);
    /// The bits that exactly one has; whole numbers only.
    bitwise_xor: Meet, &[], |a, b| each(whole_only(a, b)), whole(a ^ b);
}

/// Of a function that gives real numbers; whole numbers become such before they get here.
fn real_only(_: i64, _: i64) -> i64 {
    unreachable!("computed in a floating-point type")
}

/// Of a function whose plan refuses real numbers.
fn whole_only<T>(_: T, _: T) -> T {
    unreachable!("refused when planned")
}

fn floor_of_quotient(a: i64, b: i64) -> i64 {
    match b {
        0 => 0,
        _ => a.wrapping_div_euclid(b) - i64::from(b < 0 && a.wrapping_rem_euclid(b) != 0),
    }
}

fn remainder_of_quotient(a: i64, b: i64) -> i64 {
    if b == 0 { 0 } else { a.wrapping_rem(b).wrapping_add(b).wrapping_rem(b) }
}

fn power(a: i64, b: i64) -> i64 {
    match (a, b) {
        (1, _) => 1,
        (-1, _) => 1 - 2 * (b & 1),
        (_, ..0) => 0,
        _ => a.wrapping_pow(b as u32),
    }
}

/// The shape that tensors of these shapes broadcast to, if there is one.
pub(super) fn meeting_shape(shapes: &[&[usize]]) -> Option<SmallVec<[usize; 6]>> {
    let ndim = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut met: SmallVec<[usize; 6]> = SmallVec::from_elem(1, ndim);
    for shape in shapes {
        for (out, &n) in met[ndim - shape.len()..].iter_mut().zip(*shape) {
            if *out == 1 {
                *out = n;
            } else if n != *out && n != 1 {
                return None;
            }
        }
    }
    Some(met)
}

/// The shape that tensors broadcast to.
pub(super) fn broadcast(name: &str, inputs: &[TensorMeta]) -> Result<Vec<usize>> {
    let shapes: Vec<&[usize]> = inputs.iter().map(|m| m.shape.as_slice()).collect();
    meeting_shape(&shapes).map(SmallVec::into_vec).ok_or_else(|| {
        Error::invalid(
            "operands",
            format!("shapes {shapes:?} in {name}"),
            "shapes that are equal or 1 in every dimension, counted from the last",
            "reshape or expand the tensors",
        )
    })
}

impl Binary {
    fn function(self) -> &'static Function {
        &FUNCTIONS[self as usize]
    }

    /// The type of the result, for inputs that meet in a type.
    fn dtype(self, meet: DType) -> DType {
        match self.function().gives {
            Gives::Meet => meet,
            Gives::Real => dtype::real(meet),
            Gives::Truth => DType::U8,
        }
    }
}

impl Op for Binary {
    fn name(&self) -> &'static str {
        self.function().name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = broadcast(self.name(), inputs)?;
        let meet = dtype::promote(inputs[0].dtype, inputs[1].dtype);
        if matches!(self, Binary::bitwise_and | Binary::bitwise_or | Binary::bitwise_xor) && meet.is_float() {
            let found = format!("{} and {} in {}", inputs[0].dtype.as_str(), inputs[1].dtype.as_str(), self.name());
            return Err(Error::invalid("operands", found, "whole numbers", "convert the tensors first"));
        }
        let dtype = self.dtype(meet);
        let mut signature = Signature::pointwise(&[&inputs[0].shape, &inputs[1].shape], &shape);
        for &(a, b, result) in self.function().passes {
            // Operands that are converted on the way must not be rounded before they are reduced.
            let converted = |pending: Option<ReduceOp>, from: DType| pending.is_some() && from != dtype;
            if !converted(a, inputs[0].dtype) && !converted(b, inputs[1].dtype) {
                signature = signature.passing([a, b], result);
            }
        }
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let shape = meeting_shape(&[a.dims(), b.dims()]).expect("parts of tensors that broadcast");
        let meet = dtype::promote(a.dtype(), b.dtype());
        let whole = !meet.is_float() && self.function().gives != Gives::Real;
        let arithmetic = if whole { Arithmetic::Whole } else { Arithmetic::real([a.dtype(), b.dtype()]) };
        Ok(vec![(self.function().run)([a, b], &shape, arithmetic, self.dtype(meet))?])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_divide_towards_the_floor_and_never_fail() {
        for a in -7..=7i64 {
            for b in (-4..=4i64).filter(|b| *b != 0) {
                let floor = (a as f64 / b as f64).floor() as i64;
                assert_eq!((floor_of_quotient(a, b), remainder_of_quotient(a, b)), (floor, a - b * floor), "{a} {b}");
            }
            assert_eq!((floor_of_quotient(a, 0), remainder_of_quotient(a, 0)), (0, 0));
        }
        assert_eq!((floor_of_quotient(i64::MIN, -1), remainder_of_quotient(i64::MIN, -1)), (i64::MIN, 0));
        assert_eq!([power(-1, -3), power(-1, 4), power(1, -9), power(2, -1), power(3, 4)], [-1, 1, 1, 0, 81]);
        assert_eq!(power(i64::MIN, -1), 0);
    }
}
