//! LU factorization with partial pivoting, and what follows from it: solutions and inverses.

use candle_core::{DType, Tensor};

use super::batch::{MatrixOperand, broadcast, item, over_items, with_slices};
use super::real::{MatrixElement, with_real};
use super::row_operations::{add_multiple, swap_rows};
use super::triangular::{Triangle, on_side, substitute};
use crate::error::Result;
use crate::typed_slice::with_slice;

/// The result of [`lu_factor`].
#[derive(Debug, Clone)]
pub struct Factors {
    /// `L` below the diagonal, whose own diagonal is ones, and `U` on and above it.
    pub lu: Tensor,
    /// Per step the row (i32, from 1) that was exchanged with the one of the step, as LAPACK counts.
    pub pivots: Tensor,
    /// Per matrix (i32) 0, or the step, from 1, whose pivot is exactly zero.
    pub info: Tensor,
}

/// Factorizes matrices of any shape as `A = P L U`, without exchanges of rows unless `pivot`. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn lu_factor(a: &Tensor, pivot: bool) -> Result<Factors> {
    let of = MatrixOperand::new(a, 2);
    let (m, n) = (of.size(2), of.size(1));
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let (real, whole): ([&[usize]; 1], [&[usize]; 2]) = ([&[m, n]], [&[m.min(n)], &[]]);
        let ([lu], [pivots, info]) =
            over_items::<T, i32, 1, 2>(of.batch(), real, whole, m * n * m.min(n), |at, [lu], [pivots, info]| {
                lu.copy_from_slice(item(elements, at, m * n));
                info[0] = factorize(lu, m, n, pivots, pivot);
            })?;
        Ok(Factors { lu, pivots, info })
    })?)
}

/// Overwrites a matrix with its factors; returns 0 or the first step with a zero pivot.
fn factorize<T: MatrixElement>(a: &mut [T], m: usize, n: usize, pivots: &mut [i32], pivot: bool) -> i32 {
    let mut info = 0;
    for k in 0..m.min(n) {
        let mut best = k;
        if pivot {
            for i in k + 1..m {
                if a[i * n + k].abs() > a[best * n + k].abs() {
                    best = i;
                }
            }
        }
        pivots[k] = best as i32 + 1;
        swap_rows(a, n, k, best);
        let head = a[k * n + k];
        if head == T::ZERO {
            info = if info == 0 { k as i32 + 1 } else { info };
            continue;
        }
        let (above, below) = a.split_at_mut((k + 1) * n);
        let row = &above[k * n + k + 1..];
        for other in below.chunks_exact_mut(n) {
            let factor = other[k] / head;
            other[k] = factor;
            add_multiple(&mut other[k + 1..], -factor, row);
        }
    }
    info
}

/// Solves `A X = B` with the factors of `A`, or with those of `A^T` if `adjoint`; `X A = B` unless `left`. The batch dimensions
/// broadcast. f32 and f64.
///
/// # Errors
/// If the types are neither f32 nor f64, or memory does not suffice.
pub fn lu_solve(lu: &Tensor, pivots: &Tensor, b: &Tensor, left: bool, adjoint: bool) -> Result<Tensor> {
    let (of_lu, of_pivots, of_b) = (MatrixOperand::new(lu, 2), MatrixOperand::new(pivots, 1), MatrixOperand::new(b, 2));
    let batch = broadcast(&[of_lu.batch(), of_b.batch()]);
    let (n, rows, columns) = (of_lu.size(1), of_b.size(2), of_b.size(1));
    with_real!(lu.dtype(), T => with_slices::<T, T, _>(lu, b, |lu, b| with_slice::<i32, _>(pivots, |pivots| {
        let cost = n * rows * columns;
        let ([x], []) = over_items::<T, i32, 1, 0>(&batch, [&[rows, columns]], [], cost, |at, [x], []| {
            let lu = item(lu, of_lu.place(&batch, at), n * n);
            let pivots = item(pivots, of_pivots.place(&batch, at), n);
            x.copy_from_slice(item(b, of_b.place(&batch, at), rows * columns));
            // X A = B is A^T X^T = B^T.
            on_side(x, rows, columns, left, |x, columns| solve_with(lu, n, pivots, x, columns, adjoint == left));
        })?;
        Ok(x)
    })?))
}

/// Overwrites right-hand sides with the solutions.
fn solve_with<T: MatrixElement>(lu: &[T], n: usize, pivots: &[i32], x: &mut [T], columns: usize, adjoint: bool) {
    let lower = Triangle { upper: false, unit: true, transposed: adjoint };
    let upper = Triangle { upper: true, unit: false, transposed: adjoint };
    let row = |pivot: i32| (pivot as usize).clamp(1, n) - 1;
    if adjoint {
        substitute(lu, n, x, columns, upper);
        substitute(lu, n, x, columns, lower);
        for (k, &pivot) in pivots.iter().enumerate().rev() {
            swap_rows(x, columns, k, row(pivot));
        }
        return;
    }
    for (k, &pivot) in pivots.iter().enumerate() {
        swap_rows(x, columns, k, row(pivot));
    }
    substitute(lu, n, x, columns, lower);
    substitute(lu, n, x, columns, upper);
}

/// Solves `A X = B`, or `X A = B` unless `left`; returns the solutions and the factors of `A`. The batch dimensions broadcast.
///
/// # Errors
/// As for [`lu_factor`].
pub fn solve(a: &Tensor, b: &Tensor, left: bool) -> Result<(Tensor, Factors)> {
    let factors = lu_factor(a, true)?;
    Ok((lu_solve(&factors.lu, &factors.pivots, b, left, false)?, factors))
}

/// Inverts matrices; returns the inverses and, per matrix, 0 or the step of its factorization with a zero pivot.
///
/// # Errors
/// As for [`lu_factor`].
pub fn inverse(a: &Tensor) -> Result<(Tensor, Tensor)> {
    let factors = lu_factor(a, true)?;
    let n = MatrixOperand::new(a, 2).size(1);
    let identity: Result<Tensor> = with_real!(a.dtype(), T => {
        let ([identity], []) = over_items::<T, i32, 1, 0>(&[], [&[n, n]], [], 0, |_, [identity], []| {
            (0..n).for_each(|i| identity[i * n + i] = T::ONE);
        })?;
        Ok(identity)
    });
    Ok((lu_solve(&factors.lu, &factors.pivots, &identity?, true, false)?, factors.info))
}

/// Returns the permutation matrices `P`, `rows` by `rows` in this type, of the exchanges in `pivots`.
///
/// # Errors
/// If the type is neither f32 nor f64, or memory does not suffice.
pub fn permutation(pivots: &Tensor, rows: usize, dtype: DType) -> Result<Tensor> {
    let of = MatrixOperand::new(pivots, 1);
    let steps = of.size(1);
    with_real!(dtype, T => with_slice::<i32, _>(pivots, |pivots| {
        let ([p], []) = over_items::<T, i32, 1, 0>(of.batch(), [&[rows, rows]], [], rows * rows, |at, [p], []| {
            let mut from: Vec<usize> = (0..rows).collect();
            for (k, &pivot) in item(pivots, at, steps).iter().enumerate() {
                from.swap(k, (pivot as usize).clamp(1, rows) - 1);
            }
            from.iter().enumerate().for_each(|(to, &from)| p[from * rows + to] = T::ONE);
        })?;
        Ok(p)
    })?)
}

/// Overwrites right-hand sides, rows of `columns` elements, with the solutions, and the matrix with its factors.
pub(super) fn solve_in_place<T: MatrixElement>(a: &mut [T], n: usize, x: &mut [T], columns: usize) {
    let mut pivots = vec![0; n];
    factorize(a, n, n, &mut pivots, true);
    solve_with(a, n, &pivots, x, columns, false);
}

/// The result of [`determinant`].
#[derive(Debug, Clone)]
pub struct Determinants {
    /// The determinants.
    pub value: Tensor,
    /// Their signs, -1, 0 or 1.
    pub sign: Tensor,
    /// The logarithms of their magnitudes.
    pub log_magnitude: Tensor,
    /// The factors of the matrices.
    pub factors: Factors,
}

/// Returns the determinants of square matrices, and signs and logarithms of them, which do not overflow. f32 and f64.
///
/// # Errors
/// As for [`lu_factor`].
pub fn determinant(a: &Tensor) -> Result<Determinants> {
    let of = MatrixOperand::new(a, 2);
    let n = of.size(1);
    let factors = lu_factor(a, true)?;
    let numbers: Result<[Tensor; 3]> = with_real!(a.dtype(), T => with_slice::<T, _>(&factors.lu, |lu| {
        with_slice::<i32, _>(&factors.pivots, |pivots| {
            let shapes: [&[usize]; 3] = [&[], &[], &[]];
            let (numbers, []) =
                over_items::<T, i32, 3, 0>(of.batch(), shapes, [], n, |at, [value, sign, log_magnitude], []| {
                    let exchanges = item(pivots, at, n).iter().enumerate().filter(|&(k, &p)| p != k as i32 + 1).count();
                    let (mut product, mut signs) = (T::ONE, T::ONE);
                    if exchanges % 2 == 1 {
                        (product, signs) = (-T::ONE, -T::ONE);
                    }
                    let mut logarithm = 0.0;
                    for i in 0..n {
                        let x = item(lu, at, n * n)[i * n + i];
                        product *= x;
                        logarithm += x.abs().wide().ln();
                        // NaN stays NaN.
                        signs *= if x == T::ZERO || x.is_nan() { x } else { T::ONE.copysign(x) };
                    }
                    (value[0], sign[0], log_magnitude[0]) = (product, signs, T::narrow(logarithm));
                })?;
            Ok(numbers)
        })?
    })?);
    let [value, sign, log_magnitude] = numbers?;
    Ok(Determinants { value, sign, log_magnitude, factors })
}
