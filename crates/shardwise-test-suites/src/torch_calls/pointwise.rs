//! Elementwise functions, arithmetic, comparisons and conversions of the type.

use candle_core::DType;
use shardwise::prelude::*;
use shardwise::tensor::{Number, Operand};

use super::arguments::{Arguments, OperandArgument};
use super::calls::{CallOutput, calls};

calls! {
    "abs(input)" => |a| a.tensor("input")?.abs();
    "asin(input)" => |a| a.tensor("input")?.asin();
    "asinh(input)" => |a| a.tensor("input")?.asinh();
    "atan(input)" => |a| a.tensor("input")?.atan();
    "ceil(input)" => |a| a.tensor("input")?.ceil();
    "cos(input)" => |a| a.tensor("input")?.cos();
    "cosh(input)" => |a| a.tensor("input")?.cosh();
    "erf(input)" => |a| a.tensor("input")?.erf();
    "erfc(input)" => |a| a.tensor("input")?.erfc();
    "exp(input)" => |a| a.tensor("input")?.exp();
    "exp2(input)" => |a| a.tensor("input")?.exp2();
    "expm1(input)" => |a| a.tensor("input")?.expm1();
    "floor(input)" => |a| a.tensor("input")?.floor();
    "frac(input)" => |a| a.tensor("input")?.frac();
    "isfinite(input)" => |a| a.tensor("input")?.isfinite();
    "isinf(input)" => |a| a.tensor("input")?.isinf();
    "isnan(input)" => |a| a.tensor("input")?.isnan();
    "log(input)" => |a| a.tensor("input")?.log();
    "log10(input)" => |a| a.tensor("input")?.log10();
    "log1p(input)" => |a| a.tensor("input")?.log1p();
    "log2(input)" => |a| a.tensor("input")?.log2();
    "logical_not(input)" => |a| a.tensor("input")?.logical_not();
    "neg(input)" => |a| a.tensor("input")?.neg();
    "reciprocal(input)" => |a| a.tensor("input")?.reciprocal();
    "rsqrt(input)" => |a| a.tensor("input")?.rsqrt();
    "sigmoid(input)" => |a| a.tensor("input")?.sigmoid();
    "sign(input)" => |a| a.tensor("input")?.sign();
    "sgn(input)" => |a| a.tensor("input")?.sign(); // the sign of a complex number; of a real one the same
    "signbit(input)" => |a| a.tensor("input")?.signbit();
    "sin(input)" => |a| a.tensor("input")?.sin();
    "sinh(input)" => |a| a.tensor("input")?.sinh();
    "sqrt(input)" => |a| a.tensor("input")?.sqrt();
    "square(input)" => |a| a.tensor_beyond_bool("input")?.square();
    "tan(input)" => |a| a.tensor("input")?.tan();
    "tanh(input)" => |a| a.tensor("input")?.tanh();
    "trunc(input)" => |a| a.tensor("input")?.trunc();
    "nan_to_num(input, nan=0.0, posinf=None, neginf=None)" => |a| {
        let x = a.tensor("input")?;
        let (most, least) = largest(x.dtype());
        x.nan_to_num(a.float("nan")?, a.optional_float("posinf").unwrap_or(most),
            a.optional_float("neginf").unwrap_or(least))
    };
    // A tensor is immutable here, and real: these are the tensor itself.
    "clone(input)" => |a| a.tensor("input");
    "contiguous(input)" => |a| a.tensor("input");
    "positive(input)" => |a| a.tensor("input");
    "conj(input)" => |a| a.tensor("input");
    "conj_physical(input)" => |a| a.tensor("input");
    "resolve_conj(input)" => |a| a.tensor("input");
    "resolve_neg(input)" => |a| a.tensor("input");
    "real(input)" => |a| a.tensor("input");

    // Arithmetic. A number on the left side is written as such: `2 - &x`.
    "add(input, other, *, alpha=1)" => |a| match both_bool(a) {
        true => left(a)?.logical_or(a.operand("other")?.operand()),
        false => sum(&left(a)?, &a.operand("other")?, a.number("alpha")?),
    };
    "sub(input, other, *, alpha=1)" => |a| sum(&left(a)?, &a.operand("other")?, negative(a.number("alpha")?));
    "rsub(input, other, *, alpha=1)" => |a| {
        let x = left(a)?;
        let y = a.as_tensor("other", &x)?;
        sum(&y, &OperandArgument::Tensor(x), negative(a.number("alpha")?))
    };
    "mul(input, other)" => |a| match both_bool(a) {
        true => left(a)?.logical_and(a.operand("other")?.operand()),
        false => left(a)?.mul(a.operand("other")?.operand()),
    };
    "div(input, other, *, rounding_mode=None)" => |a| match a.text("rounding_mode").as_deref() {
        None => left(a)?.div(a.operand("other")?.operand()),
        Some("floor") => left(a)?.div_floor(a.operand("other")?.operand()),
        Some(_) => left(a)?.div_trunc(a.operand("other")?.operand()),
    };
    "true_divide(input, other)" => |a| left(a)?.div(a.operand("other")?.operand());
    "floor_divide(input, other)" => |a| left(a)?.div_floor(a.operand("other")?.operand());
    "fmod(input, other)" => |a| left(a)?.fmod(a.operand("other")?.operand());
    "remainder(input, other)" => |a| left(a)?.remainder(a.operand("other")?.operand());
    "pow(input, exponent)" => |a| power(a, "input", "exponent");
    "atan2(input, other)" => |a| a.tensor("input")?.atan2(a.operand("other")?.operand());
    "hypot(input, other)" => |a| a.tensor("input")?.hypot(a.operand("other")?.operand());
    "maximum(input, other)" => |a| a.tensor("input")?.maximum(a.operand("other")?.operand());
    "minimum(input, other)" => |a| a.tensor("input")?.minimum(a.operand("other")?.operand());
    "__radd__(input, other)" => |a| match both_bool(a) {
        true => left(a)?.logical_or(a.operand("other")?.operand()),
        false => left(a)?.add(a.operand("other")?.operand()),
    };
    "__rsub__(input, other)" => |a| right(a)?.sub(&left(a)?);
    "__rmul__(input, other)" => |a| match both_bool(a) {
        true => left(a)?.logical_and(a.operand("other")?.operand()),
        false => left(a)?.mul(a.operand("other")?.operand()),
    };
    "__rdiv__(input, other)" => |a| right(a)?.div(&left(a)?);
    "__rmod__(input, other)" => |a| right(a)?.remainder(&left(a)?);
    "__rpow__(input, other)" => |a| power(a, "other", "input");

    // Comparisons return u8, 0 or 1.
    "eq(input, other)" => |a| a.tensor("input")?.eq(a.operand("other")?.operand());
    "ne(input, other)" => |a| a.tensor("input")?.ne(a.operand("other")?.operand());
    "lt(input, other)" => |a| a.tensor("input")?.lt(a.operand("other")?.operand());
    "le(input, other)" => |a| a.tensor("input")?.le(a.operand("other")?.operand());
    "gt(input, other)" => |a| a.tensor("input")?.gt(a.operand("other")?.operand());
    "ge(input, other)" => |a| a.tensor("input")?.ge(a.operand("other")?.operand());
    "logical_and(input, other)" => |a| a.tensor("input")?.logical_and(a.operand("other")?.operand());
    "logical_or(input, other)" => |a| a.tensor("input")?.logical_or(a.operand("other")?.operand());
    "logical_xor(input, other)" => |a| a.tensor("input")?.logical_xor(a.operand("other")?.operand());
    "bitwise_and(input, other)" => |a| left(a)?.bitwise_and(a.operand("other")?.operand());
    "bitwise_or(input, other)" => |a| left(a)?.bitwise_or(a.operand("other")?.operand());
    "bitwise_xor(input, other)" => |a| left(a)?.bitwise_xor(a.operand("other")?.operand());
    "__rand__(input, other)" => |a| left(a)?.bitwise_and(a.operand("other")?.operand());
    "__ror__(input, other)" => |a| left(a)?.bitwise_or(a.operand("other")?.operand());
    "__rxor__(input, other)" => |a| left(a)?.bitwise_xor(a.operand("other")?.operand());
    "equal(input, other)" => |a| a.tensor("input")?.equal(&a.tensor("other")?);
    "allclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False)" => |a|
        a.tensor("input")?.allclose(&a.tensor("other")?, a.float("rtol")?, a.float("atol")?);

    // Three tensors.
    "where(input, condition, other)" => |a|
        a.tensor("condition")?.where_cond(a.operand("input")?.operand(), a.operand("other")?.operand());
    "addcmul(input, tensor1, tensor2, *, value=1)" => |a|
        a.tensor("input")?.addcmul(&a.tensor("tensor1")?, &a.tensor("tensor2")?, a.float("value")?);
    "addcdiv(input, tensor1, tensor2, *, value=1)" => |a|
        a.tensor("input")?.addcdiv(&a.tensor("tensor1")?, &a.tensor("tensor2")?, a.float("value")?);

    // Conversions.
    "bfloat16(input)" => |a| a.tensor("input")?.to_dtype(DType::BF16);
    "bool(input)" => |a| a.tensor("input")?.ne(0);
    // Integers that a type does not hold wrap, real numbers saturate: PyTorch's wrap in both cases.
    "byte(input)" => |a| a.tensor("input")?.to_dtype(DType::I64)?.to_dtype(DType::U8);
    // Candle has no i8: the low eight bits of an i16, with their sign.
    "char(input)" => |a|
        a.tensor("input")?.to_dtype(DType::I64)?.add(128)?.remainder(256)?.sub(128)?.to_dtype(DType::I16);
    "double(input)" => |a| a.tensor("input")?.to_dtype(DType::F64);
    "float(input)" => |a| a.tensor("input")?.to_dtype(DType::F32);
    "half(input)" => |a| a.tensor("input")?.to_dtype(DType::F16);
    "int(input)" => |a| a.tensor("input")?.to_dtype(DType::I64)?.to_dtype(DType::I32);
    "long(input)" => |a| a.tensor("input")?.to_dtype(DType::I64);
    "short(input)" => |a| a.tensor("input")?.to_dtype(DType::I64)?.to_dtype(DType::I16);
    "to(input, first, second=None, third=None, fourth=None)" => |a| match a.optional_tensor("first") {
        Some(like) => a.tensor("input")?.to_dtype(like.dtype()),
        None => a.converted(&a.converted(&a.tensor("input")?, "first")?, "second"),
    };

    "acos(input)" => |a| a.tensor("input")?.acos();
    "acosh(input)" => |a| a.tensor("input")?.acosh();
    "atanh(input)" => |a| a.tensor("input")?.atanh();
    "angle(input)" => |a| a.tensor("input")?.angle();
    "deg2rad(input)" => |a| a.tensor("input")?.deg2rad();
    "rad2deg(input)" => |a| a.tensor("input")?.rad2deg();
    "isposinf(input)" => |a| a.tensor("input")?.isposinf();
    "isneginf(input)" => |a| a.tensor("input")?.isneginf();
    "isreal(input)" => |a| a.tensor("input")?.zeros_like()?.eq(0);
    "bitwise_not(input)" => |a| match a.is_bool("input") {
        true => a.tensor("input")?.logical_not(),
        false => a.tensor("input")?.bitwise_not(),
    };
    "round(input, *, decimals=0)" => |a| a.tensor("input")?.round_decimals(a.int("decimals")? as i32);
    "frexp(input)" => |a| a.tensor("input")?.frexp();
    "logit(input, eps=None)" => |a| a.tensor("input")?.logit(a.optional_float("eps"));
    "fmax(input, other)" => |a| a.tensor("input")?.fmax(a.operand("other")?.operand());
    "fmin(input, other)" => |a| a.tensor("input")?.fmin(a.operand("other")?.operand());
    "copysign(input, other)" => |a| a.tensor("input")?.copysign(a.operand("other")?.operand());
    "nextafter(input, other)" => |a| a.tensor("input")?.nextafter(a.operand("other")?.operand());
    "logaddexp(input, other)" => |a| a.tensor("input")?.logaddexp(a.operand("other")?.operand());
    "logaddexp2(input, other)" => |a| a.tensor("input")?.logaddexp2(a.operand("other")?.operand());
    "xlogy(input, other)" => |a| a.tensor("input")?.xlogy(a.operand("other")?.operand());
    "heaviside(input, values)" => |a| a.tensor("input")?.heaviside(a.operand("values")?.operand());
    "gcd(input, other)" => |a| a.tensor("input")?.gcd(a.operand("other")?.operand());
    "lcm(input, other)" => |a| a.tensor("input")?.lcm(a.operand("other")?.operand());
    "bitwise_left_shift(input, other)" => |a| left(a)?.bitwise_left_shift(a.operand("other")?.operand());
    "bitwise_right_shift(input, other)" => |a| left(a)?.bitwise_right_shift(a.operand("other")?.operand());
    "ldexp(input, other)" => |a| a.tensor("input")?.ldexp(&a.tensor("other")?);
    "float_power(input, exponent)" => |a| match a.operand("input")? {
        OperandArgument::Tensor(x) => x.float_power(a.operand("exponent")?.operand()),
        OperandArgument::Number(x) => {
            DTensor::full(x, (), DType::F64, a.mesh(), a.replicated())?.float_power(&a.tensor("exponent")?)
        }
    };
    "isclose(input, other, rtol=1e-05, atol=1e-08, equal_nan=False)" => |a|
        a.tensor("input")?.isclose(&a.tensor("other")?, a.float("rtol")?, a.float("atol")?, a.flag("equal_nan"));
    "clamp_min(input, min)" => |a| a.tensor("input")?.clamp_min(a.operand("min")?.operand());
    "clamp_max(input, max)" => |a| a.tensor("input")?.clamp_max(a.operand("max")?.operand());
    "clamp(input, min=None, max=None)" => |a| match (a.optional_tensor("min"), a.optional_tensor("max")) {
        (Some(min), Some(max)) => a.tensor("input")?.clamp_tensor(&min, &max),
        // Not `clamp_min`, which shares the gradient of equal elements.
        (Some(min), None) => a.tensor("input")?.clamp_tensor(&min, &limit(&min, 1)?),
        (None, Some(max)) => a.tensor("input")?.clamp_tensor(&limit(&max, -1)?, &max),
        (None, None) => a.tensor("input")?.clamp(a.optional_float("min"), a.optional_float("max")),
    };
    "lerp(input, end, weight)" => |a| a.tensor("input")?.lerp(&a.tensor("end")?, a.operand("weight")?.operand());
    "item(input)" => |a| {
        let x = a.tensor("input")?;
        Ok::<_, Error>(match a.is_bool("input") {
            true => CallOutput::Bool(x.to_dtype(DType::F64)?.reshape(&[])?.item::<f64>()? != 0.0),
            false => CallOutput::Number(x.to_dtype(DType::F64)?.reshape(&[])?.item::<f64>()?),
        })
    };
    "zero_(input)" => |a| a.tensor("input")?.zeros_like(); // a tensor is immutable: the new value
    "fill(input, value)" => |a| match a.optional_tensor("value") {
        Some(value) => {
            let x = a.tensor("input")?;
            value.to_dtype(x.dtype())?.expand(&super::views::signed(x.shape()))
        }
        None => a.tensor("input")?.full_like(a.number("value")?),
    };
}

/// Whether both operands are PyTorch's bool, whose sum is its logical or.
fn both_bool(a: &Arguments<'_>) -> bool {
    a.is_bool("input") && a.is_bool("other")
}

/// The first operand. A bool together with a number that is not one becomes i64 first, as PyTorch promotes it.
fn left(a: &Arguments<'_>) -> Result<DTensor> {
    if !a.is_tensor("input") {
        return match a.operand("other")? {
            OperandArgument::Tensor(other) => a.as_tensor("input", &other),
            OperandArgument::Number(_) => a.number_tensor("input"),
        };
    }
    let number = !a.is_tensor("other") && !a.is_bool("other");
    if number { a.tensor_beyond_bool("input") } else { a.tensor("input") }
}

/// The second operand as a tensor.
fn right(a: &Arguments<'_>) -> Result<DTensor> {
    a.as_tensor("other", &left(a)?)
}

/// `x + alpha * y`.
fn sum(x: &DTensor, y: &OperandArgument, alpha: Number) -> Result<DTensor> {
    match y {
        OperandArgument::Tensor(y) if alpha.to_f64() == 1.0 => x.add(y),
        OperandArgument::Tensor(y) if alpha.to_f64() == -1.0 => x.sub(y),
        OperandArgument::Tensor(y) => x.add(&y.mul(alpha)?),
        OperandArgument::Number(y) => match (alpha, *y) {
            (Number::Integer(alpha), Number::Integer(y)) => x.add(alpha.wrapping_mul(y)),
            (alpha, y) => x.add(alpha.to_f64() * y.to_f64()),
        },
    }
}

fn negative(number: Number) -> Number {
    match number {
        Number::Integer(n) => Number::Integer(n.wrapping_neg()),
        Number::Real(x) => Number::Real(-x),
    }
}

/// Base and exponent, either of which may be a number.
fn power(a: &Arguments<'_>, base: &str, exponent: &str) -> Result<DTensor> {
    match (a.operand(base)?, a.operand(exponent)?) {
        (OperandArgument::Tensor(x), y) => x.pow(y.operand()),
        (x, OperandArgument::Tensor(y)) => {
            let OperandArgument::Number(number) = x else { unreachable!("tensors are above") };
            let dtype = match number {
                Number::Real(_) if !y.dtype().is_float() => DType::F32,
                _ => y.dtype(),
            };
            DTensor::full(number, (), dtype, a.mesh(), a.replicated())?.pow(Operand::Tensor(&y))
        }
        _ => Err(Error::other("a power of two numbers".to_string())),
    }
}

/// The largest and the smallest finite number of a type.
fn largest(dtype: DType) -> (f64, f64) {
    let most = match dtype {
        DType::F64 => f64::MAX,
        DType::F32 => f64::from(f32::MAX),
        DType::BF16 => f64::from(half::bf16::MAX),
        DType::F16 => f64::from(half::f16::MAX),
        _ => 0.0,
    };
    (most, -most)
}

/// A bound of the type of a tensor that bounds nothing: the largest number, or the smallest.
fn limit(like: &DTensor, sign: i64) -> Result<DTensor> {
    match like.dtype() {
        dtype if dtype.is_float() => like.full_like(f64::INFINITY * sign as f64),
        DType::U8 => like.full_like(if sign > 0 { 255 } else { 0 }),
        DType::I32 => like.full_like(if sign > 0 { i32::MAX } else { i32::MIN }),
        _ => like.full_like(if sign > 0 { i64::MAX } else { i64::MIN }),
    }
}
