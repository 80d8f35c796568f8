//! Elementwise functions of two tensors that broadcast: arithmetic, comparisons, logic and bits.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::broadcast::{broadcast, broadcast_shape};
use crate::ops::gradients::derivative::{OperandGradient, operand_gradients, saved_operands, zero};
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Operand};
use shardwise_kernels::{ComputeType, DimReduction, PerType, PointwiseFn, math, pointwise, reduce_dims};

/// The element type of the result of a function of two tensors.
#[derive(Clone, Copy, PartialEq)]
enum BinaryResultType {
    /// The promoted type of both operands.
    Promoted,
    /// Floating point: integers become f32.
    Float,
    /// u8, 0 or 1.
    Bool,
}

/// `Partial` placements that pass unreduced: the reductions of both operands (`None`: not partial) and that of the result.
type PartialOperands = (Option<ReduceOp>, Option<ReduceOp>, ReduceOp);

/// One row of the table.
struct BinaryFunction {
    name: &'static str,
    result_type: BinaryResultType,
    passes: &'static [PartialOperands],
    /// Gradient with respect to each operand; `None` if the function is not differentiable.
    gradients: Option<[OperandGradient; 2]>,
    run: fn([&Tensor; 2], &[usize], ComputeType, DType) -> Result<Tensor>,
}

use ReduceOp::{Avg, Max, Min, Sum};

/// Sums and means add term by term, and a replicated value may be added to every term of a mean. Maxima and minima do not pass:
/// integers wrap, and `inf + -inf` of two ranks' terms would be NaN.
const ADD: &[PartialOperands] =
    &[(Some(Sum), Some(Sum), Sum), (Some(Avg), Some(Avg), Avg), (Some(Avg), None, Avg), (None, Some(Avg), Avg)];
const MUL: &[PartialOperands] =
    &[(Some(Sum), None, Sum), (None, Some(Sum), Sum), (Some(Avg), None, Avg), (None, Some(Avg), Avg)];
/// The maximum of maxima; an operand that is not partial takes part on every rank, which does not change a maximum.
const MAXIMUM: &[PartialOperands] = &[
    (Some(Max), Some(Max), Max),
    (Some(Max), None, Max),
    (None, Some(Max), Max),
    (Some(Min), None, Min),
    (None, Some(Min), Min),
];
const MINIMUM: &[PartialOperands] = &[
    (Some(Min), Some(Min), Min),
    (Some(Min), None, Min),
    (None, Some(Min), Min),
    (Some(Max), None, Max),
    (None, Some(Max), Max),
];

/// Defines the methods of [`DTensor`], the enum [`Binary`] and the table from one entry per function.
///
/// The kernel is `each` (the same expression in f32 and f64), `fast` (f32 has a vectorized function in [`math`]) or `near` (f32 has one
/// for the operands that a condition accepts), and `integer` for integers.
/// After the arrow comes the gradient, which every entry must state: one [`OperandGradient`] per operand, or
/// `not_differentiable`.
macro_rules! functions {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident: $result_type:ident, $passes:expr, |$a:ident, $b:ident| $form:ident $real:tt, integer($integer:expr)
            => $gradient:ident $(($left:ident($of_left:expr), $right:ident($of_right:expr)))?;
    )*) => {
        impl DTensor {
            $(
                $(#[doc = $doc])*
                ///
                /// `other` is a tensor that broadcasts with this one, or a number. Elementwise: communicates only if the operands
                /// are sharded differently, or `Partial` with a reduction that does not commute with the function. Then the
                /// operands that are cheaper to move are redistributed, which is collective.
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

        static FUNCTIONS: &[BinaryFunction] = &[
            $(BinaryFunction {
                name: stringify!($name),
                result_type: BinaryResultType::$result_type,
                passes: $passes,
                gradients: functions!(@$gradient $(($left($of_left), $right($of_right)))?),
                run: |inputs, shape, arithmetic, dtype| {
                    let integer = |[$a, $b]: [i64; 2]| $integer;
                    Ok(pointwise(functions!(@$form $a, $b, $real, integer), inputs, shape, arithmetic, dtype)?)
                },
            },)*
        ];

        pub(in crate::ops) const OPS: &[OpEntry] = &[
            $(OpEntry {
                name: stringify!($name),
                samples: if Binary::$name.divides() || Binary::$name.is_for_reals() { real_samples } else { samples },
                apply: |x| Ok(vec![x[0].$name(&x[1])?]),
            },)*
        ];
    };
    (@not_differentiable) => { None };
    (@gradients ($left:ident($of_left:expr), $right:ident($of_right:expr))) => {
        Some([functions!(@$left $of_left), functions!(@$right $of_right)])
    };
    (@gradient_only $of:expr) => { OperandGradient::GradientOnly($of) };
    (@linear $of:expr) => { OperandGradient::LinearInOperands($of) };
    (@nonlinear $of:expr) => { OperandGradient::Nonlinear($of) };
    (@each $a:ident, $b:ident, ($real:expr), $integer:ident) => {
        PerType(|[$a, $b]: [f32; 2]| $real, |[$a, $b]: [f64; 2]| $real, $integer)
    };
    (@fast $a:ident, $b:ident, ($fast:expr, $real:expr), $integer:ident) => {{
        #[derive(Clone, Copy)]
        struct F32Binary<W>(W);
        impl<W: Fn([i64; 2]) -> i64 + Copy + Sync> PointwiseFn<2> for F32Binary<W> {
            #[inline(always)]
            fn f32<const FMA: bool>(self, [$a, $b]: [f32; 2]) -> f32 {
                $fast
            }
            #[inline(always)]
            fn f64(self, [$a, $b]: [f64; 2]) -> f64 {
                $real
            }
            #[inline(always)]
            fn i64(self, x: [i64; 2]) -> i64 {
                (self.0)(x)
            }
        }
        F32Binary($integer)
    }};
    (@near $a:ident, $b:ident, ($is_near:expr, $near:expr, $real:expr), $integer:ident) => {{
        #[derive(Clone, Copy)]
        struct NearBinary<W>(W);
        impl<W: Fn([i64; 2]) -> i64 + Copy + Sync> PointwiseFn<2> for NearBinary<W> {
            const HAS_NEAR: bool = true;

            #[inline(always)]
            fn f32<const FMA: bool>(self, [$a, $b]: [f32; 2]) -> f32 {
                $real
            }
            #[inline(always)]
            fn f32_near<const FMA: bool>(self, [$a, $b]: [f32; 2]) -> f32 {
                $near
            }
            #[inline(always)]
            fn is_near(self, [$a, $b]: [f32; 2]) -> bool {
                $is_near
            }
            #[inline(always)]
            fn f64(self, [$a, $b]: [f64; 2]) -> f64 {
                $real
            }
            #[inline(always)]
            fn i64(self, x: [i64; 2]) -> i64 {
                (self.0)(x)
            }
        }
        NearBinary($integer)
    }};
}

/// The remainder with the sign of the divisor: from fmod, which is exact, and not from the rounded quotient.
macro_rules! remainder_of_division {
    ($left:expr, $b:ident) => {{
        let left = $left;
        if left != 0.0 && ($b < 0.0) != (left < 0.0) { left + $b } else { left }
    }};
}

/// The floor of a quotient as PyTorch and Python compute it: after subtracting the remainder, the quotient is an integer up
/// to rounding.
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
    /// Adds two tensors.
    add: Promoted, ADD, |a, b| each(a + b), integer(a.wrapping_add(b))
        => gradients(gradient_only(|g| Ok(g.clone())), gradient_only(|g| Ok(g.clone())));
    /// Subtracts `other` from this tensor.
    sub: Promoted, ADD, |a, b| each(a - b), integer(a.wrapping_sub(b))
        => gradients(gradient_only(|g| Ok(g.clone())), gradient_only(DTensor::neg));
    /// Multiplies two tensors elementwise.
    mul: Promoted, MUL, |a, b| each(a * b), integer(a.wrapping_mul(b))
        => gradients(linear(|_, b, g| g.mul(b)), linear(|a, _, g| g.mul(a)));
    /// Divides this tensor by `other`; the result is floating point.
    div: Float, &[], |a, b| each(a / b), integer(float_only(a, b))
        // The square of the divisor may be beyond the type where the quotient is not.
        => gradients(linear(|_, b, g| g.div(b)), nonlinear(|a, b, g| g.mul(&a.div(b)?.div(b)?)?.neg()));
    /// Divides and rounds the exact quotient down: PyTorch's `div(rounding_mode="floor")`. An integer divided by zero is an error,
    /// as in [`fmod`](Self::fmod).
    div_floor: Promoted, &[], |a, b| each(floor_of_division!(a, b)), integer(floor_of_quotient(a, b))
        => gradients(gradient_only(zero), gradient_only(zero));
    /// Divides and rounds the quotient towards zero: PyTorch's `div(rounding_mode="trunc")`. An integer divided by zero is an error,
    /// as in [`fmod`](Self::fmod).
    div_trunc: Promoted, &[], |a, b| each((a / b).trunc()), integer(a.wrapping_div(b))
        => gradients(gradient_only(zero), gradient_only(zero));
    /// Raises this tensor to the power `other`.
    pow: Promoted, &[], |a, b| fast(math::pow::<FMA>(a, f64::from(b)), a.powf(b)), integer(power(a, b))
        => gradients(nonlinear(power_by_base), nonlinear(power_by_exponent));
    /// Returns the elementwise maximum; NaN if either operand is NaN.
    maximum: Promoted, MAXIMUM, |a, b| each(if a > b || a.is_nan() { a } else { b }), integer(a.max(b))
        => gradients(nonlinear(|a, b, g| g.mul(&share(&a.gt(b)?, a, b)?)), nonlinear(|a, b, g| g.mul(&share(&b.gt(a)?, a, b)?)));
    /// Returns the elementwise minimum; NaN if either operand is NaN.
    minimum: Promoted, MINIMUM, |a, b| each(if a < b || a.is_nan() { a } else { b }), integer(a.min(b))
        => gradients(nonlinear(|a, b, g| g.mul(&share(&a.lt(b)?, a, b)?)), nonlinear(|a, b, g| g.mul(&share(&b.lt(a)?, a, b)?)));
    /// Returns the remainder of the division, with the sign of the dividend. An integer divided by zero is an error on the ranks
    /// that hold the zero; the other ranks get it with their next collective.
    fmod: Promoted, &[], |a, b| near(math::is_near::fmod(a, b), math::near::fmod(a, b), a % b), integer(a.wrapping_rem(b))
        => gradients(gradient_only(|g| Ok(g.clone())), nonlinear(|a, b, g| g.mul(&a.div_trunc(b)?)?.neg()));
    /// Returns the remainder of the division, with the sign of the divisor as in Python. An integer divided by zero is an error,
    /// as in [`fmod`](Self::fmod).
    remainder: Promoted, &[], |a, b| near(
        math::is_near::fmod(a, b),
        remainder_of_division!(math::near::fmod(a, b), b),
        remainder_of_division!(a % b, b)
    ), integer(remainder_of_quotient(a, b))
        => gradients(gradient_only(|g| Ok(g.clone())), nonlinear(|a, b, g| g.mul(&a.div_floor(b)?)?.neg()));
    /// Returns the angle of the point `(other, self)`, from -pi to pi.
    atan2: Float, &[], |a, b| fast(math::atan2::<FMA>(a, b), a.atan2(b)), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| over_square(b, &a.hypot(b)?, g)), nonlinear(|a, b, g| over_square(a, &a.hypot(b)?, g)?.neg()));
    /// Returns `sqrt(self^2 + other^2)` without intermediate overflow.
    hypot: Float, &[], |a, b| fast(math::hypot::<FMA>(a, b), a.hypot(b)), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| g.mul(a)?.div(&a.hypot(b)?)), nonlinear(|a, b, g| g.mul(b)?.div(&a.hypot(b)?)));
    /// Returns 1 where the elements are equal and 0 otherwise, as u8.
    eq: Bool, &[], |a, b| each(if a == b { 1.0 } else { 0.0 }), integer(i64::from(a == b))
        => not_differentiable;
    /// Returns 1 where the elements differ and 0 otherwise, as u8.
    ne: Bool, &[], |a, b| each(if a != b { 1.0 } else { 0.0 }), integer(i64::from(a != b))
        => not_differentiable;
    /// Returns 1 where `self < other` and 0 otherwise, as u8.
    lt: Bool, &[], |a, b| each(if a < b { 1.0 } else { 0.0 }), integer(i64::from(a < b))
        => not_differentiable;
    /// Returns 1 where `self <= other` and 0 otherwise, as u8.
    le: Bool, &[], |a, b| each(if a <= b { 1.0 } else { 0.0 }), integer(i64::from(a <= b))
        => not_differentiable;
    /// Returns 1 where `self > other` and 0 otherwise, as u8.
    gt: Bool, &[], |a, b| each(if a > b { 1.0 } else { 0.0 }), integer(i64::from(a > b))
        => not_differentiable;
    /// Returns 1 where `self >= other` and 0 otherwise, as u8.
    ge: Bool, &[], |a, b| each(if a >= b { 1.0 } else { 0.0 }), integer(i64::from(a >= b))
        => not_differentiable;
    /// Returns 1 where both elements are nonzero and 0 otherwise, as u8.
    logical_and: Bool, &[], |a, b| each(if a != 0.0 && b != 0.0 { 1.0 } else { 0.0 }),
        integer(i64::from(a != 0 && b != 0))
        => not_differentiable;
    /// Returns 1 where either element is nonzero and 0 otherwise, as u8.
    logical_or: Bool, &[], |a, b| each(if a != 0.0 || b != 0.0 { 1.0 } else { 0.0 }),
        integer(i64::from(a != 0 || b != 0))
        => not_differentiable;
    /// Returns 1 where exactly one element is nonzero and 0 otherwise, as u8.
    logical_xor: Bool, &[], |a, b| each(if (a != 0.0) != (b != 0.0) { 1.0 } else { 0.0 }),
        integer(i64::from((a != 0) != (b != 0)))
        => not_differentiable;
    /// Returns the elementwise maximum; where one operand is NaN, the other.
    fmax: Promoted, &[], |a, b| each(if a >= b || b.is_nan() { a } else { b }), integer(a.max(b))
        => gradients(nonlinear(|a, b, g| first_counts(&a.ge(b)?, b)?.where_cond(g, &zero(g)?)),
            nonlinear(|a, b, g| first_counts(&a.ge(b)?, b)?.where_cond(&zero(g)?, g)));
    /// Returns the elementwise minimum; where one operand is NaN, the other.
    fmin: Promoted, &[], |a, b| each(if a <= b || b.is_nan() { a } else { b }), integer(a.min(b))
        => gradients(nonlinear(|a, b, g| first_counts(&a.le(b)?, b)?.where_cond(g, &zero(g)?)),
            nonlinear(|a, b, g| first_counts(&a.le(b)?, b)?.where_cond(&zero(g)?, g)));
    /// Returns the larger of each element and a lower bound; NaN if either is. Equal tensors share the gradient; where an
    /// element equals a number it is 0, as in [`clamp`](Self::clamp).
    clamp_min: Promoted, MAXIMUM, |a, b| each(if a > b || a.is_nan() { a } else { b }), integer(a.max(b))
        => gradients(nonlinear(|a, b, g| g.mul(&share(&a.gt(b)?, a, b)?)), nonlinear(|a, b, g| g.mul(&share(&b.gt(a)?, a, b)?)));
    /// Returns the smaller of each element and an upper bound; NaN if either is. Equal tensors share the gradient; where an
    /// element equals a number it is 0, as in [`clamp`](Self::clamp).
    clamp_max: Promoted, MINIMUM, |a, b| each(if a < b || a.is_nan() { a } else { b }), integer(a.min(b))
        => gradients(nonlinear(|a, b, g| g.mul(&share(&a.lt(b)?, a, b)?)), nonlinear(|a, b, g| g.mul(&share(&b.lt(a)?, a, b)?)));
    /// Returns the magnitude of this tensor with the sign of `other`.
    copysign: Float, &[], |a, b| each(a.copysign(b)), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| {
            let flips = a.copysign(b)?.div(a)?;
            g.mul(&a.eq(&zero(a)?)?.where_cond(&zero(a)?, &flips)?)
        }), gradient_only(zero));
    /// Returns the next floating-point number after this tensor's, towards `other`.
    nextafter: Promoted, &[], |a, b| each(
        if a.is_nan() || b.is_nan() { a + b } else if a == b { b } else if a < b { a.next_up() } else { a.next_down() }
    ), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| a.eq(b)?.where_cond(&zero(g)?, g)), nonlinear(|a, b, g| a.eq(b)?.where_cond(g, &zero(g)?)));
    /// Returns `log(exp(self) + exp(other))` without overflow.
    logaddexp: Float, &[], |a, b| each({
        let (most, distance) = (if a > b || a.is_nan() { a } else { b }, (a - b).abs());
        if a == b && a.is_infinite() { a } else { most + (-distance).exp().ln_1p() }
    }), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| g.div(&b.sub(a)?.exp()?.add_scalar(1.0)?)),
            nonlinear(|a, b, g| g.div(&a.sub(b)?.exp()?.add_scalar(1.0)?)));
    /// Returns `log2(2^self + 2^other)` without overflow.
    logaddexp2: Float, &[], |a, b| each({
        let (most, distance) = (if a > b || a.is_nan() { a } else { b }, (a - b).abs());
        if a == b && a.is_infinite() { a } else { most + (1.0 + (-distance).exp2()).log2() }
    }), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| g.div(&b.sub(a)?.exp2()?.add_scalar(1.0)?)),
            nonlinear(|a, b, g| g.div(&a.sub(b)?.exp2()?.add_scalar(1.0)?)));
    /// Returns `self * log(other)`: 0 where this tensor is 0, NaN where `other` is.
    xlogy: Float, &[], |a, b| each(if b.is_nan() { b } else if a == 0.0 { 0.0 } else { a * b.ln() }), integer(float_only(a, b))
        => gradients(nonlinear(|a, b, g| {
            let flat = a.eq(&zero(a)?)?.logical_and(&b.le(&zero(b)?)?)?;
            flat.where_cond(&zero(g)?, &g.mul(&b.log()?)?)
        }), nonlinear(|a, b, g| g.mul(&a.div(b)?)));
    /// Returns the Heaviside step function: 0 for negative elements, 1 for positive ones, `other` for zeros.
    heaviside: Promoted, &[], |a, b| each(if a == 0.0 { b } else if a > 0.0 { 1.0 } else { 0.0 }),
        integer(if a == 0 { b } else { i64::from(a > 0) })
        => not_differentiable;
    /// Returns the greatest common divisor of integers, which is not negative.
    gcd: Promoted, &[], |a, b| each(integer_only(a, b)), integer(greatest_divisor(a, b))
        => not_differentiable;
    /// Returns the least common multiple of integers, which is not negative.
    lcm: Promoted, &[], |a, b| each(integer_only(a, b)), integer(match greatest_divisor(a, b) {
        0 => 0,
        divisor => (a / divisor).wrapping_mul(b).wrapping_abs(),
    })
        => not_differentiable;
    /// Shifts the bits of integers to the left; a negative number of bits, or more than the type has, gives 0.
    bitwise_left_shift: Promoted, &[], |a, b| each(integer_only(a, b)),
        integer(if (0..64).contains(&b) { a.wrapping_shl(b as u32) } else { 0 })
        => not_differentiable;
    /// Shifts the bits of integers to the right and keeps the sign; a negative number of bits shifts all of them out.
    bitwise_right_shift: Promoted, &[], |a, b| each(integer_only(a, b)),
        integer(a >> if (0..64).contains(&b) { b } else { 63 })
        => not_differentiable;
    /// Returns the bitwise AND of integers.
    bitwise_and: Promoted, &[], |a, b| each(integer_only(a, b)), integer(a & b)
        => not_differentiable;
    /// Returns the bitwise OR of integers.
    bitwise_or: Promoted, &[], |a, b| each(integer_only(a, b)), integer(a | b)
        => not_differentiable;
    /// Returns the bitwise XOR of integers.
    bitwise_xor: Promoted, &[], |a, b| each(integer_only(a, b)), integer(a ^ b)
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
        // The bounds of integers are compared exactly, as tensors; they have no gradient.
        (Binary::clamp_min, Operand::Number(number)) if x.dtype().is_float() => {
            return x.clamp(Some(number.to_f64()), None);
        }
        (Binary::clamp_max, Operand::Number(number)) if x.dtype().is_float() => {
            return x.clamp(None, Some(number.to_f64()));
        }
        _ => {}
    }
    let other = other.tensor(x)?;
    Ok(dispatch(&op, &[x, &other], Location::caller())?.swap_remove(0))
}

/// The integer kernel of a function whose result is floating point: never called, because integers are converted first.
fn float_only(_: i64, _: i64) -> i64 {
    unreachable!("computed in a floating-point type")
}

/// The floating-point kernel of a function on bits: never called, because its plan refuses floating-point operands.
fn integer_only<T>(_: T, _: T) -> T {
    unreachable!("refused when planned")
}

/// The floor of the exact quotient; the divisor is not zero.
fn floor_of_quotient(a: i64, b: i64) -> i64 {
    a.wrapping_div(b) - i64::from(a.wrapping_rem(b) != 0 && (a < 0) != (b < 0))
}

/// The remainder with the sign of the divisor, which is not zero.
fn remainder_of_quotient(a: i64, b: i64) -> i64 {
    let left = a.wrapping_rem(b);
    if left != 0 && (left < 0) != (b < 0) { left + b } else { left }
}

/// The power of integers: wraps on overflow, and a negative exponent truncates the reciprocal.
pub(in crate::ops) fn power(a: i64, b: i64) -> i64 {
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

/// Gradient of `a^b` with respect to the base.
fn power_by_base(a: &DTensor, b: &DTensor, g: &DTensor) -> Result<DTensor> {
    let slope = b.mul(&a.pow(&b.add_scalar(-1.0)?)?)?;
    b.eq(&zero(b)?)?.where_cond(&zero(g)?, &g.mul(&slope)?)
}

/// Gradient of `a^b` with respect to the exponent; zero where the base is zero and the exponent is not negative.
fn power_by_exponent(a: &DTensor, b: &DTensor, g: &DTensor) -> Result<DTensor> {
    let flat = a.eq(&zero(a)?)?.logical_and(&b.ge(&zero(b)?)?)?;
    flat.where_cond(&zero(g)?, &g.mul(&a.pow(b)?)?.mul(&a.log()?)?)
}

/// 1 where `truth` holds and a half where the operands are equal: ties share the gradient.
fn share(truth: &DTensor, a: &DTensor, b: &DTensor) -> Result<DTensor> {
    let dtype = dtype::promote(a.dtype(), b.dtype());
    truth.to_dtype(dtype)?.add(&a.eq(b)?.to_dtype(dtype)?.mul_scalar(0.5)?)
}

/// 1 where the first operand is the result of `fmax` or `fmin`: where it wins, or the second is NaN.
fn first_counts(wins: &DTensor, second: &DTensor) -> Result<DTensor> {
    wins.logical_or(&second.isnan()?)
}

/// `g * x / length^2`, and 0 where the length is 0, as in PyTorch. Small lengths have no square.
fn over_square(x: &DTensor, length: &DTensor, g: &DTensor) -> Result<DTensor> {
    let divided = g.mul(&x.div(length)?)?.div(length)?;
    length.eq(0.0)?.where_cond(&zero(&divided)?, &divided)
}

/// The greatest common divisor, not negative.
fn greatest_divisor(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.wrapping_abs(), b.wrapping_abs());
    while b != 0 {
        (a, b) = (b, a.wrapping_rem(b));
    }
    a
}

/// Fails if an integer divisor is zero.
fn check_divisors(name: &str, divisors: &Tensor) -> Result<()> {
    let none = reduce_dims(DimReduction::All, divisors, &(0..divisors.rank()).collect::<Vec<_>>(), &[], DType::U8)?;
    if none.to_scalar::<u8>()? == 1 {
        return Ok(());
    }
    let found = format!("{} 0 in {name}", divisors.dtype().as_str());
    let fix = "replace the zeros first, or divide floating-point numbers";
    Err(ErrorKind::Argument.error("divisor", found, "integers other than 0", fix))
}

impl Binary {
    fn function(self) -> &'static BinaryFunction {
        &FUNCTIONS[self as usize]
    }

    /// Whether an integer zero as divisor is an error.
    const fn divides(self) -> bool {
        matches!(self, Binary::div_floor | Binary::div_trunc | Binary::fmod | Binary::remainder)
    }

    /// Whether floating-point operands are refused.
    const fn is_for_integers(self) -> bool {
        use Binary::{bitwise_and, bitwise_left_shift, bitwise_or, bitwise_right_shift, bitwise_xor, gcd, lcm};
        matches!(self, bitwise_and | bitwise_or | bitwise_xor | bitwise_left_shift | bitwise_right_shift | gcd | lcm)
    }

    /// Whether integer operands are refused.
    const fn is_for_reals(self) -> bool {
        matches!(self, Binary::nextafter)
    }

    /// The type of the result, given the promoted type of the operands.
    fn dtype(self, meet: DType) -> DType {
        match self.function().result_type {
            BinaryResultType::Promoted => meet,
            BinaryResultType::Float => dtype::real(meet),
            BinaryResultType::Bool => DType::U8,
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
        if self.is_for_integers() && meet.is_float() {
            let found = format!("{} and {} in {}", inputs[0].dtype.as_str(), inputs[1].dtype.as_str(), self.name());
            return Err(ErrorKind::dtype(meet).error("operands", found, "integers", "convert the tensors first"));
        }
        if self.is_for_reals() && !meet.is_float() {
            let found = format!("{} and {} in {}", inputs[0].dtype.as_str(), inputs[1].dtype.as_str(), self.name());
            let fix = "convert the tensors first";
            return Err(ErrorKind::dtype(meet).error("operands", found, "floating-point numbers", fix));
        }
        let dtype = self.dtype(meet);
        let mut signature = Signature::pointwise(&[&inputs[0].shape, &inputs[1].shape], &shape);
        for &(a, b, result) in self.function().passes {
            // A partial operand that would be converted is reduced first: converting its terms would round each of them.
            let converted = |partial: Option<ReduceOp>, from: DType| partial.is_some() && from != dtype;
            if !converted(a, inputs[0].dtype) && !converted(b, inputs[1].dtype) {
                signature = signature.allow_partial([a, b], result);
            }
        }
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let shape = broadcast_shape(&[a.dims(), b.dims()]).expect("parts of tensors that broadcast");
        let meet = dtype::promote(a.dtype(), b.dtype());
        let integer = !meet.is_float() && self.function().result_type != BinaryResultType::Float;
        let arithmetic = if integer { ComputeType::I64 } else { ComputeType::float_for([a.dtype(), b.dtype()]) };
        if self.divides() && integer && !shape.contains(&0) {
            check_divisors(self.name(), b)?;
        }
        Ok(vec![(self.function().run)([a, b], &shape, arithmetic, self.dtype(meet))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        let Some(of) = &self.function().gradients else { return Gradient::NotDifferentiable };
        Gradient::From(saved_operands(of), |op, saved, gradients| match (&op.function().gradients, &gradients[0]) {
            (Some(of), Some(gradient)) => operand_gradients(op.name(), of, saved, gradient),
            _ => Ok(vec![None, None]),
        })
    }
}

fn samples() -> Vec<Vec<SampleInput>> {
    samples_of(DType::I64)
}

/// For divisions: sample values include zeros, by which integers cannot be divided.
fn real_samples() -> Vec<Vec<SampleInput>> {
    samples_of(DType::F64)
}

fn samples_of(dtype: DType) -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 5] =
        [(&[4, 6], &[4, 6]), (&[5, 3], &[3]), (&[5, 1], &[1, 4]), (&[0, 2], &[2]), (&[1], &[5])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, dtype), SampleInput::new(b, dtype)]).collect()
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
