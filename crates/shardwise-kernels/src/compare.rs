//! Comparison of two tensors of one shape, reduced to one boolean.

use candle_core::{DType, Tensor};

use super::convert::convert;
use crate::error::Result;

/// Whether all elements are equal, as `torch.equal`. NaN equals nothing; tensors without elements are equal.
pub fn all_equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dtype() == DType::F8E4M3 {
        return all_equal(&convert(a, DType::F32)?, &convert(b, DType::F32)?);
    }
    all_true(a, || Ok(a.eq(b)?))
}

/// Whether `|a - b| <= atol + rtol * |b|` for all elements, as `torch.allclose`.
///
/// Computed in f64. An infinity is close only to the same infinity, and NaN to nothing.
pub fn all_close(a: &Tensor, b: &Tensor, rtol: f64, atol: f64) -> Result<bool> {
    if rtol == 0.0 && atol == 0.0 && a.dtype() == b.dtype() {
        return all_equal(a, b); // exact also for i64 values that f64 would round
    }
    all_true(a, || {
        let (a, b) = (convert(a, DType::F64)?, convert(b, DType::F64)?);
        // With an infinite `b` the bound is infinite too and would accept every `a`.
        let difference = (&a - &b)?.abs()?;
        let close = difference.le(&((b.abs()? * rtol)? + atol)?)?.minimum(&difference.lt(f64::INFINITY)?)?;
        Ok(close.maximum(&a.eq(&b)?)?)
    })
}

/// Whether a mask of 0 and 1, which is not computed if `a` has no elements, is 1 everywhere.
fn all_true(a: &Tensor, mask: impl FnOnce() -> Result<Tensor>) -> Result<bool> {
    Ok(a.elem_count() == 0 || mask()?.flatten_all()?.to_vec1::<u8>()?.iter().all(|&r| r == 1))
}
