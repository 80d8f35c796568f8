//! This tensor's contribution to a vector norm, in one pass and in f64: the sum of `|x|^p` without the root, or the maximum.
//!
//! Contributions of the shards of a tensor, or of several tensors, add up (or take the maximum), and the root is taken once
//! at the end.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor};

use super::optimizer_update::{StateElement, read};
use super::{check_supported, contiguous, first_element, simd};
use crate::error::Result;

/// Elements converted at a time: a buffer of them stays in the first-level cache.
const CHUNK: usize = 512;

/// Independent accumulators: a multiple of the vector length of every processor, so that additions do not wait for each other.
const LANES: usize = 16;

/// How absolute values combine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormPartial {
    /// Sum of their powers with this exponent, for a p-norm.
    PowerSum(f64),
    /// Maximum, for the infinity norm; NaN if any element is NaN.
    MaxAbs,
}

/// Combines the absolute values of all elements; 0 without elements.
///
/// Any shape and supported type. Accumulates in f64, in a fixed order, on the calling thread.
pub fn norm_partial(x: &Tensor, kind: NormPartial) -> Result<f64> {
    check_supported(x)?;
    match x.dtype() {
        DType::F64 => norm_partial_in::<f64>(x, kind),
        _ => norm_partial_in::<f32>(x, kind),
    }
}

/// Reads the elements as `S`, which represents them exactly (f32 for all but f64; integers above 2^24 are rounded), and
/// accumulates in f64.
fn norm_partial_in<S: StateElement>(x: &Tensor, kind: NormPartial) -> Result<f64> {
    let x = contiguous(x)?;
    let guard = x.storage_and_layout();
    let (first, dtype) = first_element(&guard.0, guard.1);
    let mut buffer = [MaybeUninit::<S>::uninit(); CHUNK];
    let mut lanes = [0.0; LANES];
    for start in (0..x.elem_count()).step_by(CHUNK) {
        let n = CHUNK.min(x.elem_count() - start);
        // SAFETY: the tensor is contiguous, the guard keeps it alive, and the range is inside.
        let numbers = unsafe { read(dtype, first.add(start * dtype.size_in_bytes()), &mut buffer[..n]) };
        simd::run(AccumulateNorm { numbers, lanes: &mut lanes, kind });
    }
    let join = |a, b| if kind == NormPartial::MaxAbs { max_or_nan(a, b) } else { a + b };
    Ok(lanes.into_iter().fold(0.0, join))
}

#[inline(always)]
fn max_or_nan(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}

struct AccumulateNorm<'a, S> {
    numbers: &'a [S],
    lanes: &'a mut [f64; LANES],
    kind: NormPartial,
}

impl<S: StateElement> simd::Kernel for AccumulateNorm<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let AccumulateNorm { numbers, lanes, kind } = self;
        match kind {
            NormPartial::MaxAbs => accumulate(numbers, lanes, |lane, x| max_or_nan(lane, x.abs())),
            NormPartial::PowerSum(1.0) => accumulate(numbers, lanes, |lane, x| lane + x.abs()),
            NormPartial::PowerSum(2.0) => accumulate(numbers, lanes, |lane, x| lane + x * x),
            NormPartial::PowerSum(exponent) => accumulate(numbers, lanes, |lane, x| lane + x.abs().powf(exponent)),
        }
    }
}

/// Combines every number with the lane of its position modulo `LANES`.
#[inline(always)]
fn accumulate<S: StateElement>(numbers: &[S], lanes: &mut [f64; LANES], join: impl Fn(f64, f64) -> f64) {
    let (blocks, rest) = numbers.as_chunks::<LANES>();
    let mut joined = *lanes;
    for block in blocks {
        for (lane, &x) in joined.iter_mut().zip(block) {
            *lane = join(*lane, x.wide());
        }
    }
    for (lane, &x) in joined.iter_mut().zip(rest) {
        *lane = join(*lane, x.wide());
    }
    *lanes = joined;
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn every_element_contributes_once_and_nan_propagates() {
        for n in [0usize, 1, 16, 17, 512, 1000] {
            let x = Tensor::arange(0f64, n as f64, &Device::Cpu).unwrap();
            let x = (x * -0.5).unwrap();
            for dtype in [DType::F64, DType::F32, DType::F16] {
                let x = x.to_dtype(dtype).unwrap();
                let sum = |p: i32| (0..n).map(|i| (i as f64 / 2.0).powi(p)).sum::<f64>();
                for p in 1..4 {
                    let got = norm_partial(&x, NormPartial::PowerSum(f64::from(p))).unwrap();
                    assert!((got - sum(p)).abs() <= 1e-12 * sum(p), "{got} {n} {p}");
                }
                assert_eq!(norm_partial(&x, NormPartial::MaxAbs).unwrap(), n.saturating_sub(1) as f64 / 2.0);
            }
        }
        let odd = Tensor::new(&[1.0, f64::NAN, 2.0], &Device::Cpu).unwrap();
        assert!(norm_partial(&odd, NormPartial::MaxAbs).unwrap().is_nan());
        assert!(norm_partial(&odd, NormPartial::PowerSum(2.0)).unwrap().is_nan());
    }
}
