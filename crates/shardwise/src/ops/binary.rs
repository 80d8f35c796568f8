//! Functions of two tensors that broadcast, element by element.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use super::derivative::{OperandGradient, of_two, of_two_keeps, zero};
use super::{OpEntry, Sample, dtype};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Operand};
use shardwise_kernels::{ComputeType, DimReduction, PerType, ViaF64, pointwise, reduce_dims};

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
    /// With respect to each operand; `None` if it is not differentiable.
    gradients: Option<[OperandGradient; 2]>,
    run: fn([&Tensor; 2], &[usize], ComputeType, DType) -> Result<Tensor>,
}

use ReduceOp::{Avg, Max, Min, Sum};

/// Sums and means add up term by term, and a value that is added to a mean may be replicated. Extremes do not pass: integers
/// wrap, and an infinite operand beside the other infinity would be NaN.
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

/// Functions by name. `each` is written alike for f32 and f64, `wide` is computed in f64 for f32 too. Then the gradient, which
/// every entry has to state: with respect to both operands, each a variant of [`OperandGradient`], or `not_differentiable`.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $gives:ident, $passes:expr, |$a:ident, $b:ident| $form:ident($real:expr), whole($whole:expr)
            => $gradient:ident $(($left:ident($of_left:expr), $right:ident($of_right:expr)))?;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                ///
                /// `other` is a tensor, whose shape broadcasts with that of this one, or a plain number.
                #[track_caller]
                pub fn $name<'a>(&self, other: impl Into<Operand<'a>>) -> Result<DTensor> {
                    call(Binary::$name, self, other.into())
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
                gradients: functions!(@$gradient $(($left($of_left), $right($of_right)))?),
                run: |inputs, shape, arithmetic, dtype| {
                    let whole = |[$a, $b]: [i64; 2]| $whole;
                    Ok(pointwise(functions!(@$form $a, $b, $real, whole), inputs, shape, arithmetic, dtype)?)
                },
            },)*
        ];

        pub(super) const OPS: &[OpEntry] = &[
            $(OpEntry {
                name: stringify!($name),
                samples: if Binary::$name.divides() { real_samples } else { samples },
                apply: |x| Ok(vec![x[0].$name(&x[1])?]),
            },)*
        ];
    };
    (@not_differentiable) => { None };
    (@gradients ($left:ident($of_left:expr), $right:ident($of_right:expr))) => {
        Some([functions!(@$left $of_left), functions!(@$right $of_right)])
    };
    (@alone $of:expr) => { OperandGradient::Alone($of) };
    (@once $of:expr) => { OperandGradient::Once($of) };
    (@several $of:expr) => { OperandGradient::Several($of) };
    (@each $a:ident, $b:ident, $real:expr, $whole:ident) => {
        PerType(|[$a, $b]: [f32; 2]| $real, |[$a, $b]: [f64; 2]| $real, $whole)
    };
    (@wide $a:ident, $b:ident, $real:expr, $whole:ident) => { ViaF64(|[$a, $b]: [f64; 2]| $real, $whole) };
}

/// What a division leaves, with the sign of the divisor: from fmod, which is exact, and not from the rounded quotient.
macro_rules! remainder_of_division {
    ($a:ident, $b:ident) => {{
        let left = $a % $b;
        if left != 0.0 && ($b < 0.0) != (left < 0.0) { left + $b } else { left }
    }};
}

/// The floor of a quotient as PyTorch and Python find it: without what the division leaves, the quotient is an integer but
/// for rounding.
macro_rules! floor_of_division {
    ($a:ident, $b:ident) => {{
        let left = $a % $b;
        let quotient = ($a - left) / $b;
        let quotient = if left != 0.0 && ($b < 0.0) != (left < 0.0) { quotient - 1.0 } else { quotient };
        let floor = quotient.floor();
        let nearest = if quotient - floor > 0.5 { floor + 1.0 } else { floor };
        if $b == 0.0 {
            $a / $b
        } else if quotient == 0.0 {
            quotient.abs().copysign($a / $b)
        } else {
            nearest
        }
    }};
}

functions! {
    /// a + b.
    add: Meet, ADD, |a, b| each(a + b), whole(a.wrapping_add(b))
        => gradients(alone(|g| Ok(g.clone())), alone(|g| Ok(g.clone())));
    /// a - b.
    sub: Meet, ADD, |a, b| each(a - b), whole(a.wrapping_sub(b))
        => gradients(alone(|g| Ok(g.clone())), alone(DTensor::neg));
    /// a * b.
    mul: Meet, MUL, |a, b| each(a * b), whole(a.wrapping_mul(b))
        => gradients(once(|_, b, g| g.mul(b)), once(|a, _, g| g.mul(a)));
    /// a / b, a floating-point number.
    div: Real, &[], |a, b| each(a / b), whole(real_only(a, b))
        // The square of the divisor may be beyond the type where the quotient is not.
        => gradients(once(|_, b, g| g.div(b)), several(|a, b, g| g.mul(&a.div(b)?.div(b)?)?.neg()));
    /// The integer next below a / b, of the exact quotient. An integer divided by zero is an error, as in [`fmod`](Self::fmod).
    div_floor: Meet, &[], |a, b| each(floor_of_division!(a, b)), whole(floor_of_quotient(a, b))
        => gradients(alone(zero), alone(zero));
    /// a / b, rounded, without its fraction. An integer divided by zero is an error, as in [`fmod`](Self::fmod).
    div_trunc: Meet, &[], |a, b| each((a / b).trunc()), whole(a.wrapping_div(b))
        => gradients(alone(zero), alone(zero));
    /// a to the power of b.
    pow: Meet, &[], |a, b| wide(a.powf(b)), whole(power(a, b))
        => gradients(several(power_by_base), several(power_by_exponent));
    /// The larger one, b if they are equal; NaN wins.
    maximum: Meet, MAXIMUM, |a, b| each(if a > b || a.is_nan() { a } else { b }), whole(a.max(b))
        => gradients(several(|a, b, g| g.mul(&share(&a.gt(b)?, a, b)?)), several(|a, b, g| g.mul(&share(&b.gt(a)?, a, b)?)));
    /// The smaller one, b if they are equal; NaN wins.
    minimum: Meet, MINIMUM, |a, b| each(if a < b || a.is_nan() { a } else { b }), whole(a.min(b))
        => gradients(several(|a, b, g| g.mul(&share(&a.lt(b)?, a, b)?)), several(|a, b, g| g.mul(&share(&b.lt(a)?, a, b)?)));
    /// What a leaves when divided by b, with the sign of a. An integer divided by zero is an error on the ranks that hold the
    /// zero, and reaches the others with their next collective.
    fmod: Meet, &[], |a, b| each(a % b), whole(a.wrapping_rem(b))
        => gradients(alone(|g| Ok(g.clone())), several(|a, b, g| g.mul(&a.div_trunc(b)?)?.neg()));
    /// What a leaves when divided by b, with the sign of b; exact before it is rounded. An integer divided by zero is an
    /// error, as in [`fmod`](Self::fmod).
    remainder: Meet, &[], |a, b| each(remainder_of_division!(a, b)), whole(remainder_of_quotient(a, b))
        => gradients(alone(|g| Ok(g.clone())), several(|a, b, g| g.mul(&a.div_floor(b)?)?.neg()));
    /// The angle of the point (b, a).
    atan2: Real, &[], |a, b| wide(a.atan2(b)), whole(real_only(a, b))
        => gradients(several(|a, b, g| g.mul(b)?.div(&a.square()?.add(&b.square()?)?)),
            several(|a, b, g| g.mul(a)?.div(&a.square()?.add(&b.square()?)?)?.neg()));
    /// sqrt(a^2 + b^2).
    hypot: Real, &[], |a, b| wide(a.hypot(b)), whole(real_only(a, b))
        => gradients(several(|a, b, g| g.mul(a)?.div(&a.hypot(b)?)), several(|a, b, g| g.mul(b)?.div(&a.hypot(b)?)));
    /// 1 where equal.
    eq: Truth, &[], |a, b| each(if a == b { 1.0 } else { 0.0 }), whole(i64::from(a == b))
        => not_differentiable;
    /// 1 where different.
    ne: Truth, &[], |a, b| each(if a != b { 1.0 } else { 0.0 }), whole(i64::from(a != b))
        => not_differentiable;
    /// 1 where a < b.
    lt: Truth, &[], |a, b| each(if a < b { 1.0 } else { 0.0 }), whole(i64::from(a < b))
        => not_differentiable;
    /// 1 where a <= b.
    le: Truth, &[], |a, b| each(if a <= b { 1.0 } else { 0.0 }), whole(i64::from(a <= b))
        => not_differentiable;
    /// 1 where a > b.
    gt: Truth, &[], |a, b| each(if a > b { 1.0 } else { 0.0 }), whole(i64::from(a > b))
        => not_differentiable;
    /// 1 where a >= b.
    ge: Truth, &[], |a, b| each(if a >= b { 1.0 } else { 0.0 }), whole(i64::from(a >= b))
        => not_differentiable;
    /// 1 where neither is zero.
    logical_and: Truth, &[], |a, b| each(if a != 0.0 && b != 0.0 { 1.0 } else { 0.0 }),
        whole(i64::from(a != 0 && b != 0))
        => not_differentiable;
    /// 1 where not both are zero.
    logical_or: Truth, &[], |a, b| each(if a != 0.0 || b != 0.0 { 1.0 } else { 0.0 }),
        whole(i64::from(a != 0 || b != 0))
        => not_differentiable;
    /// 1 where exactly one is zero.
    logical_xor: Truth, &[], |a, b| each(if (a != 0.0) != (b != 0.0) { 1.0 } else { 0.0 }),
        whole(i64::from((a != 0) != (b != 0)))
        => not_differentiable;
    /// The bits that both have; integers only.
    bitwise_and: Meet, &[], |a, b| each(whole_only(a, b)), whole(a & b)
        => not_differentiable;
    /// The bits that either has; integers only.
    bitwise_or: Meet, &[], |a, b| each(whole_only(a, b)), whole(a | b)
        => not_differentiable;
    /// The bits that exactly one has; integers only.
    bitwise_xor: Meet, &[], |a, b| each(whole_only(a, b)), whole(a ^ b)
        => not_differentiable;
}

#[track_caller]
fn call(op: Binary, x: &DTensor, other: Operand<'_>) -> Result<DTensor> {
    match (op, other) {
        // Partial sums pass through these, and no tensor is allocated for the number.
        (Binary::add, Operand::Number(number)) => return x.add_scalar(number),
        (Binary::sub, Operand::Number(number)) => return x.sub_scalar(number),
        (Binary::mul, Operand::Number(number)) => return x.mul_scalar(number),
        (Binary::div, Operand::Number(number)) => return x.div_scalar(number.to_f64()),
        (Binary::pow, Operand::Number(number)) => return x.pow_scalar(number.to_f64()),
        _ => {}
    }
    let other = other.tensor(x)?;
    Ok(dispatch(&op, &[x, &other], Location::caller())?.swap_remove(0))
}

/// Of a function that gives real numbers; integers become such before they get here.
fn real_only(_: i64, _: i64) -> i64 {
    unreachable!("computed in a floating-point type")
}

/// Of a function whose plan refuses real numbers.
fn whole_only<T>(_: T, _: T) -> T {
    unreachable!("refused when planned")
}

/// Of a divisor that is not zero.
fn floor_of_quotient(a: i64, b: i64) -> i64 {
    a.wrapping_div(b) - i64::from(a.wrapping_rem(b) != 0 && (a < 0) != (b < 0))
}

/// Of a divisor that is not zero.
fn remainder_of_quotient(a: i64, b: i64) -> i64 {
    let left = a.wrapping_rem(b);
    if left != 0 && (left < 0) != (b < 0) { left + b } else { left }
}

/// Wraps; the reciprocal of a power loses its fraction.
pub(super) fn power(a: i64, b: i64) -> i64 {
    let mut left = match (a, b) {
        (1, _) => return 1,
        (-1, _) => return 1 - 2 * (b & 1),
        (_, ..0) => return 0,
        _ => b,
    };
    let (mut square, mut product) = (a, 1i64);
    while left > 0 {
        if left & 1 == 1 {
            product = product.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        left >>= 1;
    }
    product
}

/// With respect to the base.
fn power_by_base(a: &DTensor, b: &DTensor, g: &DTensor) -> Result<DTensor> {
    let slope = b.mul(&a.pow(&b.add_scalar(-1.0)?)?)?;
    b.eq(&zero(b)?)?.where_cond(&zero(g)?, &g.mul(&slope)?)
}

/// With respect to the exponent. At zero a power with a positive exponent stays zero.
fn power_by_exponent(a: &DTensor, b: &DTensor, g: &DTensor) -> Result<DTensor> {
    let flat = a.eq(&zero(a)?)?.logical_and(&b.ge(&zero(b)?)?)?;
    flat.where_cond(&zero(g)?, &g.mul(&a.pow(b)?)?.mul(&a.log()?)?)
}

/// 1 where true, and a half where the operands are equal: these share the gradient.
fn share(truth: &DTensor, a: &DTensor, b: &DTensor) -> Result<DTensor> {
    let dtype = dtype::promote(a.dtype(), b.dtype());
    truth.to_dtype(dtype)?.add(&a.eq(b)?.to_dtype(dtype)?.mul_scalar(0.5)?)
}

/// An error if integers are to be divided by a zero.
fn check_divisors(name: &str, divisors: &Tensor) -> Result<()> {
    let none = reduce_dims(DimReduction::All, divisors, &(0..divisors.rank()).collect::<Vec<_>>(), &[], DType::U8)?;
    if none.to_scalar::<u8>()? == 1 {
        return Ok(());
    }
    let found = format!("{} 0 in {name}", divisors.dtype().as_str());
    let fix = "replace the zeros first, or divide floating-point numbers";
    Err(ErrorKind::Argument.error("divisor", found, "integers other than 0", fix))
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
        ErrorKind::shape(&inputs[0].shape).error(
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

    /// Whether it refuses a zero among integers.
    const fn divides(self) -> bool {
        matches!(self, Binary::div_floor | Binary::div_trunc | Binary::fmod | Binary::remainder)
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
            return Err(ErrorKind::dtype(meet).error("operands", found, "integers", "convert the tensors first"));
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
        let arithmetic = if whole { ComputeType::I64 } else { ComputeType::float_for([a.dtype(), b.dtype()]) };
        if self.divides() && whole && !shape.contains(&0) {
            check_divisors(self.name(), b)?;
        }
        Ok(vec![(self.function().run)([a, b], &shape, arithmetic, self.dtype(meet))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        let Some(of) = &self.function().gradients else { return Gradient::NotDifferentiable };
        Gradient::From(of_two_keeps(of), |op, saved, gradients| match (&op.function().gradients, &gradients[0]) {
            (Some(of), Some(gradient)) => of_two(op.name(), of, saved, gradient),
            _ => Ok(vec![None, None]),
        })
    }
}

fn samples() -> Vec<Vec<Sample>> {
    samples_of(DType::I64)
}

/// Samples have zeros, which integers are not divided by.
fn real_samples() -> Vec<Vec<Sample>> {
    samples_of(DType::F64)
}

fn samples_of(dtype: DType) -> Vec<Vec<Sample>> {
    let shapes: [(&[usize], &[usize]); 5] =
        [(&[4, 6], &[4, 6]), (&[5, 3], &[3]), (&[5, 1], &[1, 4]), (&[0, 2], &[2]), (&[1], &[5])];
    shapes.iter().map(|(a, b)| vec![Sample::new(a, dtype), Sample::new(b, dtype)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_divide_towards_the_floor() {
        for a in -7..=7i64 {
            for b in (-4..=4i64).filter(|b| *b != 0) {
                let floor = (a as f64 / b as f64).floor() as i64;
                assert_eq!((floor_of_quotient(a, b), remainder_of_quotient(a, b)), (floor, a - b * floor), "{a} {b}");
            }
        }
        assert_eq!((floor_of_quotient(i64::MIN, -1), remainder_of_quotient(i64::MIN, -1)), (i64::MIN, 0));
        assert_eq!([power(-1, -3), power(-1, 4), power(1, -9), power(2, -1), power(3, 4)], [-1, 1, 1, 0, 81]);
        assert_eq!(power(i64::MIN, -1), 0);
        assert_eq!(
            (remainder_of_quotient(i64::MAX - 1, i64::MAX), floor_of_quotient(i64::MAX - 1, i64::MAX)),
            (i64::MAX - 1, 0)
        );
        assert_eq!(
            [power(2, 1 << 32), power(3, 1 << 32), power(3, (1 << 40) + 3)],
            [0, 2491309678558969857, 9120277428587986971]
        );
    }
}
