//! Bunch-Kaufman factorization of symmetric matrices, `A = L D L^T` with rows exchanged and diagonal blocks of one or two rows, in
//! the form of LAPACK's `sytrf` with the lower triangle.

use candle_core::Tensor;

use super::batch::{MatrixOperand, broadcast, item, over_items, with_slices};
use super::real::{MatrixElement, with_real};
use super::row_operations::{add_multiple, swap_rows, two_rows};
use crate::error::Result;
use crate::typed_slice::with_slice;

/// Factorizes symmetric matrices, of which the lower triangle is read: factors, pivots (i32, see [`ldl_solve`]) and per matrix
/// (i32) 0, or the step, from 1, whose block is exactly zero. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn ldl_factor(a: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let of = MatrixOperand::new(a, 2);
    let n = of.size(1);
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let ([ld], [pivots, info]) =
            over_items::<T, i32, 1, 2>(of.batch(), [&[n, n]], [&[n], &[]], n * n * n, |at, [ld], [pivots, info]| {
                ld.copy_from_slice(item(elements, at, n * n));
                info[0] = factorize(ld, n, pivots);
            })?;
        Ok((ld, pivots, info))
    })?)
}

/// Overwrites the lower triangle with the factors.
fn factorize<T: MatrixElement>(a: &mut [T], n: usize, pivots: &mut [i32]) -> i32 {
    // Bounds the growth of elements for blocks of one and of two rows alike (Bunch and Kaufman 1977).
    let alpha = T::narrow((1.0 + 17f64.sqrt()) / 8.0);
    let (mut k, mut info) = (0, 0);
    while k < n {
        // The largest element of a column below row k, and its row.
        let below = |a: &[T], column: usize, from: usize| {
            (from..n).fold((T::ZERO, from), |(most, at), i| {
                let size = a[i * n + column].abs();
                if size > most { (size, i) } else { (most, at) }
            })
        };
        let (most, row) = below(a, k, k + 1);
        let head = a[k * n + k].abs();
        if head.larger(most) == T::ZERO || head.is_nan() {
            info = if info == 0 { k as i32 + 1 } else { info };
            pivots[k] = k as i32 + 1;
            k += 1;
            continue;
        }
        let mut wide = false;
        let mut exchange = k;
        if head < alpha * most {
            let left = (k..row).fold(T::ZERO, |most, j| most.larger(a[row * n + j].abs()));
            let across = if row + 1 < n { left.larger(below(a, row, row + 1).0) } else { left };
            if head * across >= alpha * most * most {
                exchange = k;
            } else if a[row * n + row].abs() >= alpha * across {
                exchange = row;
            } else {
                (exchange, wide) = (row, true);
            }
        }
        let at = if wide { k + 1 } else { k };
        exchange_symmetric(a, n, at, exchange, k);
        if wide {
            eliminate_two(a, n, k);
            pivots[k] = -(exchange as i32 + 1);
            pivots[k + 1] = pivots[k];
            k += 2;
        } else {
            let pivot = a[k * n + k];
            for j in k + 1..n {
                let factor = a[j * n + k] / pivot;
                for i in j..n {
                    let other = a[i * n + k];
                    a[i * n + j] -= factor * other;
                }
            }
            (k + 1..n).for_each(|i| a[i * n + k] /= pivot);
            pivots[k] = exchange as i32 + 1;
            k += 1;
        }
    }
    info
}

/// Exchanges rows and columns `at < other` of the lower triangle from column `from` on.
fn exchange_symmetric<T: MatrixElement>(a: &mut [T], n: usize, at: usize, other: usize, from: usize) {
    if at == other {
        return;
    }
    for i in other + 1..n {
        a.swap(i * n + at, i * n + other);
    }
    for i in at + 1..other {
        a.swap(i * n + at, other * n + i);
    }
    a.swap(at * n + at, other * n + other);
    for column in from..at {
        a.swap(at * n + column, other * n + column);
    }
}

/// Eliminates the block of rows `k` and `k + 1`.
fn eliminate_two<T: MatrixElement>(a: &mut [T], n: usize, k: usize) {
    let (p, q, r) = (a[k * n + k], a[(k + 1) * n + k], a[(k + 1) * n + k + 1]);
    // Divided by the element next to the diagonal, the largest one: nothing overflows.
    let (p1, r1) = (p / q, r / q);
    let scale = T::ONE / ((p1 * r1 - T::ONE) * q);
    for j in k + 2..n {
        let (x, y) = (a[j * n + k], a[j * n + k + 1]);
        let (first, second) = ((r1 * x - y) * scale, (p1 * y - x) * scale);
        for i in j..n {
            let (x, y) = (a[i * n + k], a[i * n + k + 1]);
            a[i * n + j] -= x * first + y * second;
        }
        (a[j * n + k], a[j * n + k + 1]) = (first, second);
    }
}

/// Solves `A X = B` with the factors of [`ldl_factor`]. The batch dimensions broadcast. f32 and f64.
///
/// A pivot above zero is the row (from 1) that was exchanged with the one of its step; two equal ones below zero are a block of two
/// rows, of which the second was exchanged.
///
/// # Errors
/// If the types are neither f32 nor f64, or memory does not suffice.
pub fn ldl_solve(ld: &Tensor, pivots: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (of_ld, of_pivots, of_b) = (MatrixOperand::new(ld, 2), MatrixOperand::new(pivots, 1), MatrixOperand::new(b, 2));
    let batch = broadcast(&[of_ld.batch(), of_b.batch()]);
    let (n, columns) = (of_ld.size(1), of_b.size(1));
    with_real!(ld.dtype(), T => with_slices::<T, T, _>(ld, b, |ld, b| with_slice::<i32, _>(pivots, |pivots| {
        let ([x], []) = over_items::<T, i32, 1, 0>(&batch, [&[n, columns]], [], n * n * columns, |at, [x], []| {
            let ld = item(ld, of_ld.place(&batch, at), n * n);
            let pivots = item(pivots, of_pivots.place(&batch, at), n);
            x.copy_from_slice(item(b, of_b.place(&batch, at), n * columns));
            solve_with(ld, n, pivots, x, columns);
        })?;
        Ok(x)
    })?))
}

/// Overwrites right-hand sides with the solutions.
fn solve_with<T: MatrixElement>(ld: &[T], n: usize, pivots: &[i32], x: &mut [T], columns: usize) {
    let row = |pivot: i32| (pivot.unsigned_abs() as usize).clamp(1, n) - 1;
    let subtract = |x: &mut [T], i: usize, j: usize, factor: T| {
        let (to, from) = two_rows(x, columns, i, j);
        add_multiple(to, -factor, from);
    };
    let mut k = 0;
    while k < n {
        let wide = pivots[k] < 0 && k + 1 < n;
        let last = if wide { k + 1 } else { k };
        swap_rows(x, columns, last, row(pivots[k]));
        for i in last + 1..n {
            (k..=last).for_each(|j| subtract(x, i, j, ld[i * n + j]));
        }
        if wide {
            let (p, q, r) = (ld[k * n + k], ld[(k + 1) * n + k], ld[(k + 1) * n + k + 1]);
            let (p1, r1) = (p / q, r / q);
            let scale = T::ONE / ((p1 * r1 - T::ONE) * q);
            let (first, second) = two_rows(x, columns, k, k + 1);
            for (a, b) in first.iter_mut().zip(second) {
                (*a, *b) = ((r1 * *a - *b) * scale, (p1 * *b - *a) * scale);
            }
        } else {
            let pivot = ld[k * n + k];
            x[k * columns..(k + 1) * columns].iter_mut().for_each(|x| *x /= pivot);
        }
        k = last + 1;
    }
    let mut end = n;
    while end > 0 {
        let last = end - 1;
        let first = if pivots[last] < 0 && last > 0 { last - 1 } else { last };
        for i in end..n {
            (first..=last).for_each(|j| subtract(x, j, i, ld[i * n + j]));
        }
        swap_rows(x, columns, last, row(pivots[last]));
        end = first;
    }
}
