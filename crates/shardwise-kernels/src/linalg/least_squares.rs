//! Pseudo-inverses, ranks and least squares, from singular values or, for symmetric matrices, eigenvalues.

use candle_core::Tensor;

use super::batch::{MatrixOperand, broadcast, item, over_items, with_slices};
use super::real::{MatrixElement, with_real};
use super::row_operations::add_multiple;
use super::svd::Svd;
use super::symmetric::decompose;
use crate::error::Result;
use crate::typed_slice::with_slice;

/// Below which singular values count as zero: `max(absolute, relative * largest)`, per matrix.
#[derive(Debug, Clone)]
pub struct Tolerance {
    /// f64, of a shape that broadcasts to the batch dimensions.
    pub absolute: Tensor,
    /// f64, of a shape that broadcasts to the batch dimensions.
    pub relative: Tensor,
}

/// Returns the pseudo-inverses of matrices; of symmetric ones, of which the lower triangle is read, if `hermitian`. The batch
/// dimensions broadcast with those of the tolerance. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn pseudo_inverse(a: &Tensor, tolerance: &Tolerance, hermitian: bool) -> Result<Tensor> {
    let of = MatrixOperand::new(a, 2);
    let (m, n) = (of.size(2), of.size(1));
    with_real!(a.dtype(), T => per_matrix::<T, _>(a, tolerance, |a, batch, limit| {
        let cost = 30 * m.max(n) * m.min(n).pow(2);
        let ([inverse], []) = over_items::<T, i32, 1, 0>(batch, [&[n, m]], [], cost, |at, [inverse], []| {
            let found = singular(item(a, of.place(batch, at), m * n), m, n, hermitian);
            let least = limit(at, &found.values);
            for (i, &value) in found.values.iter().enumerate().filter(|(_, value)| value.abs().wide() > least) {
                let (left, right) = (&found.left[i * m..(i + 1) * m], &found.right[i * n..(i + 1) * n]);
                for (row, &x) in inverse.chunks_exact_mut(m).zip(right) {
                    add_multiple(row, x / value, left);
                }
            }
            if found.values.iter().any(|value| value.is_nan()) {
                inverse.fill(T::NAN);
            }
        })?;
        Ok(inverse)
    }))
}

/// Returns the ranks (i64) of matrices: how many singular values are above the tolerance, -1 for a matrix with NaN or infinities; of symmetric matrices, of which the lower
/// triangle is read, if `hermitian`. The batch dimensions broadcast with those of the tolerance. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn matrix_rank(a: &Tensor, tolerance: &Tolerance, hermitian: bool) -> Result<Tensor> {
    let of = MatrixOperand::new(a, 2);
    let (m, n) = (of.size(2), of.size(1));
    with_real!(a.dtype(), T => per_matrix::<T, _>(a, tolerance, |a, batch, limit| {
        let cost = 30 * m.max(n) * m.min(n).pow(2);
        let ([], [rank]) = over_items::<T, i64, 0, 1>(batch, [], [&[]], cost, |at, [], [rank]| {
            let found = singular(item(a, of.place(batch, at), m * n), m, n, hermitian);
            let least = limit(at, &found.values);
            // No rank is right for a matrix with NaN; -1 is none.
            rank[0] = match found.values.iter().any(|value| value.is_nan()) {
                true => -1,
                false => found.values.iter().filter(|value| value.abs().wide() > least).count() as i64,
            };
        })?;
        Ok(rank)
    }))
}

/// Runs `body` with the elements, the batch dimensions of the result, and the limit of every matrix.
fn per_matrix<T: MatrixElement, R>(
    a: &Tensor,
    tolerance: &Tolerance,
    body: impl FnOnce(&[T], &[usize], &(dyn Fn(usize, &[T]) -> f64 + Sync)) -> Result<R>,
) -> Result<R> {
    let (absolute, relative) = (&tolerance.absolute, &tolerance.relative);
    let batch = broadcast(&[MatrixOperand::new(a, 2).batch(), absolute.dims(), relative.dims()]);
    let (of_absolute, of_relative) = (MatrixOperand::new(absolute, 0), MatrixOperand::new(relative, 0));
    with_slices::<f64, f64, _>(absolute, relative, |absolute, relative| {
        let limit = |at: usize, values: &[T]| {
            let largest = values.iter().fold(0.0, |most: f64, value| most.max(value.abs().wide()));
            absolute[of_absolute.place(&batch, at)].max(relative[of_relative.place(&batch, at)] * largest)
        };
        with_slice::<T, _>(a, |a| body(a, &batch, &limit))?
    })
}

/// The singular values of a matrix; of a symmetric one, its eigenvalues with their signs.
fn singular<T: MatrixElement>(a: &[T], m: usize, n: usize, hermitian: bool) -> Svd<T> {
    if !hermitian {
        return Svd::new(a, m, n);
    }
    let mut whole = a.to_vec();
    for i in 0..n {
        (0..i).for_each(|j| whole[j * n + i] = whole[i * n + j]);
    }
    let mut values = vec![T::ZERO; n];
    let rows = decompose(&whole, n, &mut values);
    Svd { left: rows.clone(), values, right: rows }
}

/// Solves `min |A X - B|`, with the solution of smallest norm where there are several: returns the solutions, the ranks (i64) and the
/// singular values. Those below `relative` times the largest count as zero. The batch dimensions broadcast. f32 and f64.
///
/// # Errors
/// If the types are neither f32 nor f64, or memory does not suffice.
pub fn least_squares(a: &Tensor, b: &Tensor, relative: f64) -> Result<(Tensor, Tensor, Tensor)> {
    let (of_a, of_b) = (MatrixOperand::new(a, 2), MatrixOperand::new(b, 2));
    let batch = broadcast(&[of_a.batch(), of_b.batch()]);
    let (m, n, columns) = (of_a.size(2), of_a.size(1), of_b.size(1));
    let k = m.min(n);
    with_real!(a.dtype(), T => with_slices::<T, T, _>(a, b, |a, b| {
        let (shapes, cost): ([&[usize]; 2], _) = ([&[n, columns], &[k]], 30 * m.max(n) * k * k + m * n * columns);
        let ([x, values], [rank]) =
            over_items::<T, i64, 2, 1>(&batch, shapes, [&[]], cost, |at, [x, values], [rank]| {
                let found = Svd::new(item(a, of_a.place(&batch, at), m * n), m, n);
                let b = item(b, of_b.place(&batch, at), of_b.elements());
                values.copy_from_slice(&found.values);
                if values.iter().any(|value| value.is_nan()) {
                    x.fill(T::NAN);
                    return;
                }
                let least = relative * values.first().map_or(0.0, |first| first.wide());
                for (i, &value) in found.values.iter().enumerate().filter(|(_, value)| value.wide() > least) {
                    rank[0] += 1;
                    let mut along = vec![T::ZERO; columns];
                    for (&u, row) in found.left[i * m..(i + 1) * m].iter().zip(b.chunks_exact(columns.max(1))) {
                        add_multiple(&mut along, u / value, row);
                    }
                    for (row, &v) in x.chunks_exact_mut(columns.max(1)).zip(&found.right[i * n..(i + 1) * n]) {
                        add_multiple(row, v, &along);
                    }
                }
            })?;
        Ok((x, rank, values))
    }))
}
