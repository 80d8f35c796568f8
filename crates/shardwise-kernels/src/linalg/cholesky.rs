//! Cholesky factorization.

use candle_core::Tensor;

use super::batch::{MatrixOperand, item, over_items};
use super::real::{MatrixElement, with_real};
use super::row_operations::{dot, transposed};
use crate::error::Result;
use crate::typed_slice::with_slice;

/// Factorizes symmetric positive-definite matrices: `L` with `A = L L^T`, or `U` with `A = U^T U` if `upper`, and per matrix
/// (i32) 0 or the order of the first leading minor that is not positive, in which case the factor is not complete.
///
/// Reads the lower triangle (`upper`: the upper one) alone. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn cholesky(a: &Tensor, upper: bool) -> Result<(Tensor, Tensor)> {
    let of = MatrixOperand::new(a, 2);
    let n = of.size(1);
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let ([factor], [info]) =
            over_items::<T, i32, 1, 1>(of.batch(), [&[n, n]], [&[]], n * n * n, |at, [factor], [info]| {
                factor.copy_from_slice(item(elements, at, n * n));
                if upper {
                    let mut lower = transposed(factor, n, n);
                    info[0] = factorize(&mut lower, n);
                    factor.copy_from_slice(&transposed(&lower, n, n));
                } else {
                    info[0] = factorize(factor, n);
                }
            })?;
        Ok((factor, info))
    })?)
}

/// Overwrites the lower triangle with its factor and the rest with zeros.
fn factorize<T: MatrixElement>(a: &mut [T], n: usize) -> i32 {
    for i in 0..n {
        let (above, row) = a.split_at_mut(i * n);
        let row = &mut row[..n];
        for j in 0..i {
            let other = &above[j * n..(j + 1) * n];
            row[j] = (row[j] - dot(&row[..j], &other[..j])) / other[j];
        }
        let left = row[i] - dot(&row[..i], &row[..i]);
        row[i + 1..].fill(T::ZERO);
        if left <= T::ZERO || left.is_nan() {
            row[i] = left;
            for later in i + 1..n {
                a[later * n + i + 1..(later + 1) * n].fill(T::ZERO);
            }
            return i as i32 + 1;
        }
        row[i] = left.sqrt();
    }
    0
}
