//! Substitution: solutions of triangular systems.

use candle_core::Tensor;

use super::batch::{MatrixOperand, broadcast, item, over_items, with_slices};
use super::real::{MatrixElement, with_real};
use super::row_operations::{add_multiple, transposed, two_rows};
use crate::error::Result;

/// Which triangle of a matrix is used, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Triangle {
    /// The upper triangle instead of the lower one.
    pub upper: bool,
    /// The diagonal is taken to be ones.
    pub unit: bool,
    /// The transpose of the matrix is solved with.
    pub transposed: bool,
}

/// Solves `A X = B`, or `X A = B` unless `left`, with one triangle of `A`. The batch dimensions broadcast. f32 and f64.
///
/// # Errors
/// If the types are neither f32 nor f64, or memory does not suffice.
pub fn solve_triangular(a: &Tensor, b: &Tensor, triangle: Triangle, left: bool) -> Result<Tensor> {
    let (of_a, of_b) = (MatrixOperand::new(a, 2), MatrixOperand::new(b, 2));
    let batch = broadcast(&[of_a.batch(), of_b.batch()]);
    let (n, rows, columns) = (of_a.size(1), of_b.size(2), of_b.size(1));
    with_real!(a.dtype(), T => with_slices::<T, T, _>(a, b, |a, b| {
        let cost = n * rows * columns;
        let ([x], []) = over_items::<T, i32, 1, 0>(&batch, [&[rows, columns]], [], cost, |at, [x], []| {
            let a = item(a, of_a.place(&batch, at), n * n);
            x.copy_from_slice(item(b, of_b.place(&batch, at), rows * columns));
            on_side(x, rows, columns, left, |x, columns| {
                let transposed = triangle.transposed == left;
                substitute(a, n, x, columns, Triangle { transposed, ..triangle });
            });
        })?;
        Ok(x)
    }))
}

/// Runs a solver of `A X = B` on `x`, or on its transpose if the unknown is on the left side of `A`. The solver gets the number of
/// columns.
pub(super) fn on_side<T: MatrixElement>(
    x: &mut [T],
    rows: usize,
    columns: usize,
    left: bool,
    solve: impl FnOnce(&mut [T], usize),
) {
    if left {
        return solve(x, columns);
    }
    let mut other = transposed(x, rows, columns);
    solve(&mut other, rows);
    x.copy_from_slice(&transposed(&other, columns, rows));
}

/// Overwrites the right-hand sides, rows of `columns` elements, with the solutions.
pub(super) fn substitute<T: MatrixElement>(a: &[T], n: usize, x: &mut [T], columns: usize, triangle: Triangle) {
    let Triangle { upper, unit, transposed } = triangle;
    // The transpose of an upper triangle is a lower one, which is solved from the first row on.
    let forward = upper == transposed;
    for step in 0..n {
        let i = if forward { step } else { n - 1 - step };
        if !transposed {
            let known = if forward { 0..i } else { i + 1..n };
            for j in known {
                let (row, other) = two_rows(x, columns, i, j);
                add_multiple(row, -a[i * n + j], other);
            }
        }
        if !unit {
            let row = &mut x[i * columns..(i + 1) * columns];
            let pivot = a[i * n + i];
            row.iter_mut().for_each(|x| *x /= pivot);
        }
        if transposed {
            let unknown = if forward { i + 1..n } else { 0..i };
            for j in unknown {
                let (row, other) = two_rows(x, columns, j, i);
                add_multiple(row, -a[i * n + j], other);
            }
        }
    }
}
