//! The sum of two tensors together with its norm, in one pass over memory: what follows a residual branch.

use candle_core::{DType, Tensor};

use super::forward::{NormForward, layer_norm_rows, rms_norm_rows};
use super::{NormKind, RowWriter, in_type_of, over_rows, per_element, rows_and_width, write};
use crate::error::Result;
use crate::pointwise::{ComputeType, PerType, pointwise};
use crate::simd::{self, Kernel};
use std::mem::MaybeUninit;

/// `x + branch`, and the [layer norm](super::layer_norm_rows) of the sum.
///
/// # Errors
/// If shapes differ, or weight or bias has another number of elements than a row.
pub fn add_layer_norm_rows(
    x: &Tensor,
    branch: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    if is_half(x) {
        let sum = sum_of(x, branch)?;
        let normal = layer_norm_rows(&sum, weight, bias, eps)?;
        return Ok((sum, normal));
    }
    add_norm_rows(NormKind::Layer, x, branch, weight, bias, eps)
}

/// `x + branch`, and the [RMS norm](super::rms_norm_rows) of the sum.
///
/// # Errors
/// If shapes differ, or the weight has another number of elements than a row.
pub fn add_rms_norm_rows(x: &Tensor, branch: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<(Tensor, Tensor)> {
    if is_half(x) {
        let sum = sum_of(x, branch)?;
        let normal = rms_norm_rows(&sum, weight, eps)?;
        return Ok((sum, normal));
    }
    add_norm_rows(NormKind::RootMeanSquare, x, branch, weight, None, eps)
}

/// The norm of a half-precision sum is that of the rounded sum, so the sum is written first.
fn is_half(x: &Tensor) -> bool {
    matches!(x.dtype(), DType::F16 | DType::BF16)
}

fn sum_of(x: &Tensor, branch: &Tensor) -> Result<Tensor> {
    let sum = PerType(|[a, b]: [f32; 2]| a + b, |[a, b]: [f64; 2]| a + b, |[a, b]: [i64; 2]| a + b);
    pointwise(sum, [x, branch], x.dims(), ComputeType::F32, x.dtype())
}

fn add_norm_rows(
    norm: NormKind,
    x: &Tensor,
    branch: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    in_type_of!(x, T => {
        let (count, width) = rows_and_width(x);
        let weight = weight.map(|w| per_element::<T>(w, width)).transpose()?;
        let bias = bias.map(|b| per_element::<T>(b, width)).transpose()?;
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        let (sums, normals) = (RowWriter::new(x.dtype(), count, width)?, RowWriter::new(x.dtype(), count, width)?);
        over_rows::<T, 2>(&[x, branch], 1, &|i, [x, branch], _| {
            // SAFETY: the kernels write whole rows, and each row once; both have the type that is computed in, so that no scratch
            // memory is used.
            unsafe {
                sums.write(i, &mut [], |sum| {
                    let row = &*simd::run(AddRows { x, branch, sum });
                    normals.write(i, &mut [], |out| simd::run(NormForward { norm, row, weight, bias, eps, out }));
                });
            }
        })?;
        // SAFETY: every row was written.
        Ok(unsafe { (sums.finish(x.dims()), normals.finish(x.dims())) })
    })
}

struct AddRows<'a, 'b, T> {
    x: &'a [T],
    branch: &'a [T],
    sum: &'b mut [MaybeUninit<T>],
}

impl<'b, T: super::RowFloat> Kernel for AddRows<'_, 'b, T> {
    type Output = &'b mut [T];

    #[inline(always)]
    fn run<const FMA: bool>(self) -> &'b mut [T] {
        write(self.sum, [self.x, self.branch], |[x, branch]| x + branch)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{others, rows, samples};
    use super::*;

    #[test]
    fn sum_and_norm_are_those_of_two_passes() {
        for (x, _) in samples() {
            let branch = others(&x, 1.3);
            let width = *x.dims().last().unwrap();
            let weight = others(&x, 1.7).flatten_all().unwrap().narrow(0, 0, width).unwrap();
            let bias = weight.affine(0.5, 0.1).unwrap();
            let sum = sum_in_type(&x, &branch);
            let (got, normal) = add_layer_norm_rows(&x, &branch, Some(&weight), Some(&bias), 1e-3).unwrap();
            assert_eq!(rows(&got), rows(&sum));
            assert_eq!(rows(&normal), rows(&layer_norm_rows(&sum, Some(&weight), Some(&bias), 1e-3).unwrap()));
            let (got, normal) = add_rms_norm_rows(&x, &branch, Some(&weight), 1e-3).unwrap();
            assert_eq!(rows(&got), rows(&sum));
            assert_eq!(rows(&normal), rows(&rms_norm_rows(&sum, Some(&weight), 1e-3).unwrap()));
        }
    }

    fn sum_in_type(x: &Tensor, branch: &Tensor) -> Tensor {
        let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        (x.to_dtype(wide).unwrap() + branch.to_dtype(wide).unwrap()).unwrap().to_dtype(x.dtype()).unwrap()
    }
}
