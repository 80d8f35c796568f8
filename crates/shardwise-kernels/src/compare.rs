//! Whether two tensors of one shape have the same elements.

use candle_core::{DType, Tensor};

use crate::error::Result;

/// Whether all elements are equal.
pub fn all_equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    all_hold(a, || Ok(a.eq(b)?))
}

/// Whether `|a - b| <= atol + rtol * |b|` for all elements.
pub fn all_close(a: &Tensor, b: &Tensor, rtol: f64, atol: f64) -> Result<bool> {
    if rtol == 0.0 && atol == 0.0 && a.dtype() == b.dtype() {
        return all_equal(a, b); // also where an f64 would not hold the numbers
    }
    all_hold(a, || {
        let (a, b) = (a.to_dtype(DType::F64)?, b.to_dtype(DType::F64)?);
        // An infinity is close to itself alone.
        let difference = (&a - &b)?.abs()?;
        let close = difference.le(&((b.abs()? * rtol)? + atol)?)?.minimum(&difference.lt(f64::INFINITY)?)?;
        Ok(close.maximum(&a.eq(&b)?)?)
    })
}

/// Whether a test of elements, 0 or 1 each, holds for all; a tensor without elements passes.
fn all_hold(a: &Tensor, test: impl FnOnce() -> Result<Tensor>) -> Result<bool> {
    Ok(a.elem_count() == 0 || test()?.flatten_all()?.to_vec1::<u8>()?.iter().all(|&r| r == 1))
}
