//! Reductions and normalizations of the elements that a mask selects, `torch.masked`.
//!
//! The other elements are replaced by the identity of the operation, with `mask.where_cond(&x, identity)`.

use candle_core::DType;
use shardwise::prelude::*;
use shardwise::tensor::Number;

use super::arguments::Arguments;
use super::calls::calls;
use super::reductions::spread;

calls! {
    "masked.sum(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        filled(a, 0)?.sum(&a.ints("dim"), a.flag("keepdim"));
    "masked.prod(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        filled(a, 1)?.prod(&a.ints("dim"), a.flag("keepdim"));
    "masked.cumsum(input, dim, *, dtype=None, mask=None)" => |a| filled(a, 0)?.cumsum(a.int("dim")?);
    "masked.cumprod(input, dim, *, dtype=None, mask=None)" => |a| filled(a, 1)?.cumprod(a.int("dim")?);
    "masked.amax(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        filled(a, least(a)?)?.amax(&a.ints("dim"), a.flag("keepdim"));
    "masked.amin(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        filled(a, most(a)?)?.amin(&a.ints("dim"), a.flag("keepdim"));
    // Indices have the type of the tensor.
    "masked.argmax(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        filled(a, least(a)?)?.argmax(a.optional_int("dim"), a.flag("keepdim"))?.to_dtype(a.tensor("input")?.dtype());
    "masked.argmin(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a|
        filled(a, most(a)?)?.argmin(a.optional_int("dim"), a.flag("keepdim"))?.to_dtype(a.tensor("input")?.dtype());
    "masked.mean(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a| {
        let (dims, keepdim) = (a.ints("dim"), a.flag("keepdim"));
        filled(a, 0)?.sum(&dims, keepdim)?.div(&count(a, &dims, keepdim)?)
    };
    "masked.median(input, dim=-1, *, keepdim=False, dtype=None, mask=None)" => |a|
        Ok::<_, Error>(filled(a, f64::NAN)?.nanmedian(a.int("dim")?, a.flag("keepdim"))?.0);
    "masked.norm(input, ord=2.0, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a| {
        let order = a.float("ord")?;
        filled(a, norm_identity(order))?.norm(order, &a.ints("dim"), a.flag("keepdim"))
    };
    "masked.normalize(input, ord, dim, *, eps=1e-12, dtype=None, mask=None)" => |a| {
        let order = a.float("ord")?;
        let norms = filled(a, norm_identity(order))?.norm(order, &[a.int("dim")?], true)?;
        filled(a, 0)?.div(&norms.maximum(a.float("eps")?)?)
    };
    "masked.var(input, dim=None, unbiased=None, *, correction=1, keepdim=False, dtype=None, mask=None)" => |a| variance(a);
    "masked.std(input, dim=None, unbiased=None, *, correction=1, keepdim=False, dtype=None, mask=None)" => |a| {
        let variance = variance(a)?;
        variance.sqrt()
    };
    "masked.softmax(input, dim, *, dtype=None, mask=None)" => |a| filled(a, f64::NEG_INFINITY)?.softmax(a.int("dim")?);
    "masked.log_softmax(input, dim, *, dtype=None, mask=None)" => |a|
        filled(a, f64::NEG_INFINITY)?.log_softmax(a.int("dim")?);
    "masked.softmin(input, dim, *, dtype=None, mask=None)" => |a| filled(a, f64::INFINITY)?.softmin(a.int("dim")?);
    "masked.logsumexp(input, dim=None, *, keepdim=False, dtype=None, mask=None)" => |a| {
        let (x, dtype) = (filled(a, least(a)?)?, a.tensor("input")?.dtype());
        x.logsumexp(&a.ints("dim"), a.flag("keepdim"))?.to_dtype(dtype)
    };
    "masked.logaddexp(input, other, *, dtype=None, input_mask=None, other_mask=None)" => |a| {
        let one = |name: &str, mask: &str| -> Result<DTensor> {
            let x = a.tensor(name)?;
            a.optional_tensor(mask).map_or(Ok(x.clone()), |mask| mask.where_cond(&x, f64::NEG_INFINITY))
        };
        one("input", "input_mask")?.logaddexp(&one("other", "other_mask")?)
    };
}

/// The tensor with a number where the mask is not set.
fn filled(a: &Arguments<'_>, identity: impl Into<Number>) -> Result<DTensor> {
    let x = a.converted(&a.tensor("input")?, "dtype")?;
    match a.optional_tensor("mask") {
        Some(mask) => {
            let both = DTensor::broadcast_tensors(&[&mask, &x])?;
            // The result has the shape of the tensor.
            both[0].where_cond(&both[1], identity.into())
        }
        None => Ok(x),
    }
}

/// How many elements count along some dimensions.
fn count(a: &Arguments<'_>, dims: &[isize], keepdim: bool) -> Result<DTensor> {
    let x = a.tensor("input")?.detach();
    let ones = match a.optional_tensor("mask") {
        Some(mask) => DTensor::broadcast_tensors(&[&mask, &x])?.swap_remove(0),
        None => x.eq(&x)?.logical_or(1)?,
    };
    ones.ne(0)?.sum(dims, keepdim)
}

fn variance(a: &Arguments<'_>) -> Result<DTensor> {
    let (dims, correction) = spread(a);
    let keepdim = a.flag("keepdim");
    let x = a.tensor("input")?;
    let dtype = if x.dtype().is_float() { x.dtype() } else { DType::F32 };
    let x = x.to_dtype(dtype)?;
    let total = filled(a, 0)?.to_dtype(dtype)?.sum(&dims, true)?;
    let mean = total.div(&count(a, &dims, true)?.to_dtype(dtype)?)?;
    let squares = x.sub(&mean)?.square()?;
    let squares = match a.optional_tensor("mask") {
        Some(mask) => mask.where_cond(&squares, 0.0)?,
        None => squares,
    };
    let left = count(a, &dims, keepdim)?.to_dtype(dtype)?.add_scalar(-correction)?.clamp_min(0.0)?;
    squares.sum(&dims, keepdim)?.div(&left)
}

fn norm_identity(order: f64) -> f64 {
    if order == f64::NEG_INFINITY { f64::INFINITY } else { 0.0 }
}

/// The identity of a maximum.
fn least(a: &Arguments<'_>) -> Result<Number> {
    Ok(match a.tensor("input")?.dtype() {
        dtype if dtype.is_float() => Number::Real(f64::NEG_INFINITY),
        DType::U8 => Number::Integer(0),
        _ => Number::Integer(i64::MIN),
    })
}

/// The identity of a minimum.
fn most(a: &Arguments<'_>) -> Result<Number> {
    Ok(match a.tensor("input")?.dtype() {
        dtype if dtype.is_float() => Number::Real(f64::INFINITY),
        DType::U8 => Number::Integer(1),
        _ => Number::Integer(i64::MAX),
    })
}
