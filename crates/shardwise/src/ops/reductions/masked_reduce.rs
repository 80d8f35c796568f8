//! Reductions and normalizations of the elements that a mask selects, PyTorch's `torch.masked`.
//!
//! The other elements are replaced by the identity of the operation. A mask broadcasts to the shape of the tensor; without one all
//! elements count. Each communicates as the operator without a mask does, and moves the mask if it is sharded differently.

use candle_core::DType;

use crate::error::Result;
use crate::ops::{OpEntry, SampleInput, arguments::dtype};
use crate::tensor::{DTensor, Number};

impl DTensor {
    /// Adds the elements that the mask selects along some dimensions; none means all of them.
    #[doc(alias = "masked.sum")]
    #[track_caller]
    pub fn masked_sum(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, 0)?.sum(dims, keepdim)
    }

    /// Multiplies the elements that the mask selects along some dimensions; none means all of them.
    #[doc(alias = "masked.prod")]
    #[track_caller]
    pub fn masked_prod(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, 1)?.prod(dims, keepdim)
    }

    /// Computes the mean of the elements that the mask selects along some dimensions; NaN where it selects none.
    #[doc(alias = "masked.mean")]
    #[track_caller]
    pub fn masked_mean(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.masked_sum(dims, keepdim, mask)?.div(&self.selected_count(dims, keepdim, mask)?)
    }

    /// Takes the largest of the elements that the mask selects along some dimensions; the smallest number of the type where it selects
    /// none.
    #[doc(alias = "masked.amax")]
    #[track_caller]
    pub fn masked_amax(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, smallest(self.dtype()))?.amax(dims, keepdim)
    }

    /// Takes the smallest of the elements that the mask selects along some dimensions; the largest number of the type where it selects
    /// none.
    #[doc(alias = "masked.amin")]
    #[track_caller]
    pub fn masked_amin(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, largest(self.dtype()))?.amin(dims, keepdim)
    }

    /// Returns the index of the largest element that the mask selects along a dimension, as i64; of all elements without one.
    #[doc(alias = "masked.argmax")]
    #[track_caller]
    pub fn masked_argmax(&self, dim: Option<isize>, keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, smallest(self.dtype()))?.argmax(dim, keepdim)
    }

    /// Returns the index of the smallest element that the mask selects along a dimension, as i64; of all elements without one.
    #[doc(alias = "masked.argmin")]
    #[track_caller]
    pub fn masked_argmin(&self, dim: Option<isize>, keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, largest(self.dtype()))?.argmin(dim, keepdim)
    }

    /// Takes the median of the elements that the mask selects along a dimension, the lower of two; NaN where it selects none.
    #[doc(alias = "masked.median")]
    #[track_caller]
    pub fn masked_median(&self, dim: isize, keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        Ok(self.selected(mask, f64::NAN)?.nanmedian(dim, keepdim)?.0)
    }

    /// Adds up the elements that the mask selects along a dimension.
    #[doc(alias = "masked.cumsum")]
    #[track_caller]
    pub fn masked_cumsum(&self, dim: isize, mask: Option<&DTensor>) -> Result<DTensor> {
        self.in_own_type(self.selected(mask, 0)?.cumsum(dim)?)
    }

    /// Multiplies up the elements that the mask selects along a dimension.
    #[doc(alias = "masked.cumprod")]
    #[track_caller]
    pub fn masked_cumprod(&self, dim: isize, mask: Option<&DTensor>) -> Result<DTensor> {
        self.in_own_type(self.selected(mask, 1)?.cumprod(dim)?)
    }

    /// Masked scans keep the type of integers, unlike those without a mask, as in PyTorch. A u8 may be a bool, whose scans count.
    fn in_own_type(&self, scan: DTensor) -> Result<DTensor> {
        if self.dtype() == DType::U8 { Ok(scan) } else { scan.to_dtype(self.dtype()) }
    }

    /// Computes the variance of the elements that the mask selects along some dimensions; see [`var`](Self::var).
    #[doc(alias = "masked.var")]
    #[track_caller]
    pub fn masked_var(
        &self,
        dims: &[isize],
        correction: f64,
        keepdim: bool,
        mask: Option<&DTensor>,
    ) -> Result<DTensor> {
        let real = dtype::real(self.dtype());
        let x = self.to_dtype(real)?;
        let mean = x.masked_sum(dims, true, mask)?.div(&self.selected_count(dims, true, mask)?.to_dtype(real)?)?;
        let squares = x.sub(&mean)?.square()?.selected(mask, 0)?;
        let left = self.selected_count(dims, keepdim, mask)?.to_dtype(real)?.add_scalar(-correction)?.clamp_min(0.0)?;
        squares.sum(dims, keepdim)?.div(&left)
    }

    /// Computes the standard deviation of the elements that the mask selects along some dimensions; see [`std`](Self::std).
    #[doc(alias = "masked.std")]
    #[track_caller]
    pub fn masked_std(
        &self,
        dims: &[isize],
        correction: f64,
        keepdim: bool,
        mask: Option<&DTensor>,
    ) -> Result<DTensor> {
        self.masked_var(dims, correction, keepdim, mask)?.sqrt()
    }

    /// Computes the norm of the elements that the mask selects along some dimensions; see [`norm`](Self::norm).
    #[doc(alias = "masked.norm")]
    #[track_caller]
    pub fn masked_norm(&self, order: f64, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        let identity = if order == f64::NEG_INFINITY { f64::INFINITY } else { 0.0 };
        self.selected(mask, identity)?.norm(order, dims, keepdim)
    }

    /// Divides the elements that the mask selects by their norm along a dimension, which counts as at least `eps`; the other elements are 0.
    #[doc(alias = "masked.normalize")]
    #[track_caller]
    pub fn masked_normalize(&self, order: f64, dim: isize, eps: f64, mask: Option<&DTensor>) -> Result<DTensor> {
        let norms = self.masked_norm(order, &[dim], true, mask)?;
        self.selected(mask, 0)?.div(&norms.maximum(eps)?)
    }

    /// Applies the softmax along a dimension to the elements that the mask selects; the other elements are 0.
    #[doc(alias = "masked.softmax")]
    #[track_caller]
    pub fn masked_softmax(&self, dim: isize, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, f64::NEG_INFINITY)?.softmax(dim)
    }

    /// Applies the logarithm of the softmax along a dimension to the elements that the mask selects; the other elements are minus infinity.
    #[doc(alias = "masked.log_softmax")]
    #[track_caller]
    pub fn masked_log_softmax(&self, dim: isize, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, f64::NEG_INFINITY)?.log_softmax(dim)
    }

    /// Applies the softmax of the negated elements along a dimension to the elements that the mask selects; the other elements are 0.
    #[doc(alias = "masked.softmin")]
    #[track_caller]
    pub fn masked_softmin(&self, dim: isize, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, f64::INFINITY)?.softmin(dim)
    }

    /// Computes the logarithm of the sum of exponentials of the elements that the mask selects along some dimensions.
    #[doc(alias = "masked.logsumexp")]
    #[track_caller]
    pub fn masked_logsumexp(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        self.selected(mask, smallest(self.dtype()))?.logsumexp(dims, keepdim)
    }

    /// Computes `log(exp(self) + exp(other))`, where each term counts only if its mask selects it.
    #[doc(alias = "masked.logaddexp")]
    #[track_caller]
    pub fn masked_logaddexp(
        &self,
        other: &DTensor,
        mask: Option<&DTensor>,
        other_mask: Option<&DTensor>,
    ) -> Result<DTensor> {
        self.selected(mask, f64::NEG_INFINITY)?.logaddexp(&other.selected(other_mask, f64::NEG_INFINITY)?)
    }

    /// Applies the softmax along a dimension, with zeros where all elements are minus infinity: scores of which a mask leaves none.
    ///
    /// Communicates as [`softmax`](Self::softmax) does, and one number per line if the dimension is sharded.
    #[doc(alias = "_safe_softmax")]
    #[track_caller]
    pub fn safe_softmax(&self, dim: isize) -> Result<DTensor> {
        let masked = self.detach().eq(f64::NEG_INFINITY)?.all(&[dim], true)?;
        masked.where_cond(0.0, &masked.where_cond(0.0, self)?.softmax(dim)?)
    }

    /// The tensor with a number where the mask is not set.
    #[track_caller]
    fn selected(&self, mask: Option<&DTensor>, identity: impl Into<Number>) -> Result<DTensor> {
        let Some(mask) = mask else { return Ok(self.clone()) };
        // The result has the shape of the tensor, not a larger one of the mask.
        let shape: Vec<isize> = self.shape().iter().map(|&n| n as isize).collect();
        mask.expand(&shape)?.where_cond(self, identity.into())
    }

    /// How many elements the mask selects along some dimensions.
    #[track_caller]
    fn selected_count(&self, dims: &[isize], keepdim: bool, mask: Option<&DTensor>) -> Result<DTensor> {
        let ones = self.detach().zeros_like()?.eq(0)?;
        ones.selected(mask, 0)?.ne(0)?.sum(dims, keepdim)
    }
}

/// The identity of a maximum.
fn smallest(dtype: DType) -> Number {
    match dtype {
        DType::U8 | DType::U32 => Number::Integer(0),
        DType::I16 => Number::Integer(i16::MIN.into()),
        DType::I32 => Number::Integer(i32::MIN.into()),
        DType::I64 => Number::Integer(i64::MIN),
        _ => Number::Real(f64::NEG_INFINITY),
    }
}

/// The identity of a minimum.
fn largest(dtype: DType) -> Number {
    match dtype {
        DType::U8 => Number::Integer(u8::MAX.into()),
        DType::U32 => Number::Integer(u32::MAX.into()),
        DType::I16 => Number::Integer(i16::MAX.into()),
        DType::I32 => Number::Integer(i32::MAX.into()),
        DType::I64 => Number::Integer(i64::MAX),
        _ => Number::Real(f64::INFINITY),
    }
}

macro_rules! masked {
    ($($name:ident, |$x:ident, $mask:ident| $($call:expr),+;)*) => {
        pub(in crate::ops) const OPS: &[OpEntry] = &[
            $(OpEntry {
                name: stringify!($name),
                samples: with_mask,
                apply: |inputs| {
                    let ($x, $mask) = (&inputs[0], Some(&inputs[1]));
                    Ok(vec![$($call?),+])
                },
            },)*
            OpEntry {
                name: "masked_logaddexp",
                samples: two_masks,
                apply: |x| Ok(vec![x[0].masked_logaddexp(&x[1], Some(&x[2]), None)?]),
            },
            OpEntry {
                name: "safe_softmax",
                samples: one,
                apply: |x| {
                    let row = x[0].tril(-1)?.eq(0)?.where_cond(f64::NEG_INFINITY, &x[0])?;
                    Ok(vec![row.safe_softmax(1)?])
                },
            },
        ];
    };
}

masked! {
    masked_sum, |x, mask| x.masked_sum(&[1], false, mask), x.masked_sum(&[], false, None);
    masked_prod, |x, mask| x.masked_prod(&[0], true, mask);
    masked_mean, |x, mask| x.masked_mean(&[1], true, mask), x.masked_mean(&[], false, mask);
    masked_amax, |x, mask| x.masked_amax(&[1], false, mask);
    masked_amin, |x, mask| x.masked_amin(&[0], false, mask);
    masked_argmax, |x, mask| x.masked_argmax(Some(1), false, mask);
    masked_argmin, |x, mask| x.masked_argmin(None, false, mask);
    masked_median, |x, mask| x.masked_median(1, false, mask);
    masked_cumsum, |x, mask| x.masked_cumsum(0, mask);
    masked_cumprod, |x, mask| x.masked_cumprod(1, mask);
    masked_var, |x, mask| x.masked_var(&[1], 0.0, false, mask);
    masked_std, |x, mask| x.masked_std(&[0], 0.5, true, mask);
    masked_norm, |x, mask| x.masked_norm(2.0, &[1], false, mask);
    masked_normalize, |x, mask| x.masked_normalize(2.0, 1, 1e-12, mask);
    masked_softmax, |x, mask| x.masked_softmax(1, mask);
    masked_log_softmax, |x, mask| x.masked_log_softmax(0, mask);
    masked_softmin, |x, mask| x.masked_softmin(1, mask);
    masked_logsumexp, |x, mask| x.masked_logsumexp(&[1], false, mask);
}

fn with_mask() -> Vec<Vec<SampleInput>> {
    let x = SampleInput::new(&[5, 3], DType::F64);
    vec![vec![x.clone(), SampleInput::index(&[5, 3], 2)], vec![x, SampleInput::index(&[3], 2)]]
}

fn two_masks() -> Vec<Vec<SampleInput>> {
    let x = SampleInput::new(&[5, 3], DType::F64);
    vec![vec![x.clone(), x, SampleInput::index(&[5, 3], 2)]]
}

fn one() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64)]]
}
