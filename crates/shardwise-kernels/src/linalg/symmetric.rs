//! Eigenvalues and eigenvectors of symmetric matrices: Householder tridiagonalization, then implicit QL steps.

use candle_core::Tensor;

use super::batch::{MatrixOperand, item, over_items, with_slices};
use super::real::{MatrixElement, with_real};
use super::row_operations::{add_multiple, dot, largest, norm, rotate, scale, transposed, two_rows};
use crate::error::Result;
use crate::typed_slice::with_slice;

/// QL steps per eigenvalue after which the result is accepted as it is; two or three are usual.
const MAX_STEPS: usize = 60;

/// Returns the eigenvalues, ascending, and the eigenvectors in columns, of symmetric matrices, of which one triangle is read. f32
/// and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn eigh(a: &Tensor, upper: bool) -> Result<(Tensor, Tensor)> {
    let of = MatrixOperand::new(a, 2);
    let n = of.size(1);
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let ([values, vectors], []) =
            over_items::<T, i32, 2, 0>(of.batch(), [&[n], &[n, n]], [], 12 * n * n * n, |at, [values, vectors], []| {
                vectors.copy_from_slice(item(elements, at, n * n));
                for i in 0..n {
                    for j in 0..i {
                        let (to, from) = if upper { (i * n + j, j * n + i) } else { (j * n + i, i * n + j) };
                        vectors[to] = vectors[from];
                    }
                }
                let rows = decompose(vectors, n, values);
                vectors.copy_from_slice(&transposed(&rows, n, n));
            })?;
        Ok((values, vectors))
    })?)
}

/// Writes the eigenvalues of a symmetric matrix in ascending order, and returns its eigenvectors as rows.
pub(super) fn decompose<T: MatrixElement>(a: &[T], n: usize, values: &mut [T]) -> Vec<T> {
    let size = largest(a);
    if !size.is_finite() {
        values.fill(T::NAN);
        return vec![T::NAN; n * n];
    }
    let mut a = a.to_vec();
    // Scaled, so that squares neither overflow nor vanish.
    if size > T::ZERO {
        a.iter_mut().for_each(|x| *x /= size);
    }
    let mut beside = vec![T::ZERO; n];
    let mut rows = tridiagonalize(&mut a, n, values, &mut beside);
    ql(values, &mut beside, &mut rows, n);
    scale(values, size);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| values[i].wide().total_cmp(&values[j].wide()));
    let sorted: Vec<T> = order.iter().map(|&i| values[i]).collect();
    values.copy_from_slice(&sorted);
    order.iter().flat_map(|&i| rows[i * n..(i + 1) * n].to_vec()).collect()
}

/// Reduces a symmetric matrix to a tridiagonal one with the same eigenvalues. `diagonal` and `beside` (from its first element on) are
/// its elements; returns the transpose of the orthogonal matrix `Q` with `A = Q T Q^T`.
fn tridiagonalize<T: MatrixElement>(a: &mut [T], n: usize, diagonal: &mut [T], beside: &mut [T]) -> Vec<T> {
    let mut reflections = Vec::new();
    for k in 0..n.saturating_sub(1) {
        // The column below the diagonal becomes a multiple of the first unit vector.
        let mut v: Vec<T> = (k + 1..n).map(|i| a[i * n + k]).collect();
        let tail = norm(&v[1..]);
        diagonal[k] = a[k * n + k];
        if tail == T::ZERO {
            beside[k] = v[0];
            reflections.push(None);
            continue;
        }
        let beta = -norm(&[v[0], tail]).copysign(v[0]);
        let tau = (beta - v[0]) / beta;
        let divisor = v[0] - beta;
        v[1..].iter_mut().for_each(|x| *x /= divisor);
        v[0] = T::ONE;
        beside[k] = beta;
        // A - v w^T - w v^T, with w = tau (A v - tau / 2 (v^T A v) v).
        let mut w: Vec<T> = (k + 1..n).map(|i| tau * dot(&a[i * n + k + 1..(i + 1) * n], &v)).collect();
        let half = T::narrow(0.5) * tau * dot(&w, &v);
        add_multiple(&mut w, -half, &v);
        for i in k + 1..n {
            let row = &mut a[i * n + k + 1..(i + 1) * n];
            add_multiple(row, -v[i - k - 1], &w);
            add_multiple(row, -w[i - k - 1], &v);
        }
        reflections.push(Some((v, tau)));
    }
    if n > 0 {
        diagonal[n - 1] = a[n * n - 1];
    }
    let mut rows = vec![T::ZERO; n * n];
    (0..n).for_each(|i| rows[i * n + i] = T::ONE);
    for (k, reflection) in reflections.iter().enumerate().rev() {
        let Some((v, tau)) = reflection else { continue };
        for row in rows.chunks_exact_mut(n) {
            let along = dot(v, &row[k + 1..]);
            add_multiple(&mut row[k + 1..], -(*tau * along), v);
        }
    }
    rows
}

/// Diagonalizes a tridiagonal matrix, and rotates the rows of `rows` along.
fn ql<T: MatrixElement>(diagonal: &mut [T], beside: &mut [T], rows: &mut [T], n: usize) {
    for l in 0..n {
        for _ in 0..MAX_STEPS {
            // The first element from l on that is negligible ends a block.
            let negligible = |i: usize| {
                let around = diagonal[i].abs() + diagonal[i + 1].abs();
                beside[i].abs() <= T::EPSILON * around || beside[i].abs() <= T::TINY
            };
            let end = (l..n - 1).find(|&i| negligible(i)).unwrap_or(n - 1);
            if end == l {
                break;
            }
            step(diagonal, beside, rows, n, l, end);
        }
    }
}

/// One implicit QL step with Wilkinson's shift on rows `l..=end`.
fn step<T: MatrixElement>(diagonal: &mut [T], beside: &mut [T], rows: &mut [T], n: usize, l: usize, end: usize) {
    let two = T::narrow(2.0);
    let slope = (diagonal[l + 1] - diagonal[l]) / (two * beside[l]);
    let length = norm(&[slope, T::ONE]);
    let mut g = diagonal[end] - diagonal[l] + beside[l] / (slope + length.copysign(slope));
    let (mut s, mut c, mut p) = (T::ONE, T::ONE, T::ZERO);
    for i in (l..end).rev() {
        let (f, b) = (s * beside[i], c * beside[i]);
        let r = norm(&[f, g]);
        beside[i + 1] = r;
        if r == T::ZERO {
            // The block divides here: the next step finds the negligible element.
            diagonal[i + 1] -= p;
            beside[end] = T::ZERO;
            return;
        }
        (s, c) = (f / r, g / r);
        g = diagonal[i + 1] - p;
        let r = (diagonal[i] - g) * s + two * c * b;
        p = s * r;
        diagonal[i + 1] = g + p;
        g = c * r - b;
        let (x, y) = two_rows(rows, n, i, i + 1);
        rotate(x, y, c, s);
    }
    diagonal[l] -= p;
    beside[l] = g;
    beside[end] = T::ZERO;
}

/// The principal square roots of symmetric matrices, of which the lower triangle is read, and eigenvalues and eigenvectors of the
/// roots. Eigenvalues below zero count as zero. f32 and f64.
///
/// # Errors
/// As for [`eigh`].
pub fn symmetric_sqrt(a: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let n = MatrixOperand::new(a, 2).size(1);
    let (values, vectors) = eigh(a, false)?;
    with_real!(a.dtype(), T => with_slices::<T, T, _>(&values, &vectors, |values, vectors| {
        let batch = &a.dims()[..a.dims().len() - 2];
        let ([root, of_root], []) =
            over_items::<T, i32, 2, 0>(batch, [&[n, n], &[n]], [], n * n * n, |at, [root, of_root], []| {
                let rows = transposed(item(vectors, at, n * n), n, n);
                for (to, &value) in of_root.iter_mut().zip(item(values, at, n)) {
                    *to = if value < T::ZERO { T::ZERO } else { value.sqrt() };
                }
                add_outer_products(root, &rows, of_root, &rows, n);
            })?;
        Ok((root, of_root))
    }))
    .map(|(root, of_root)| (root, of_root, vectors))
}

/// Adds the outer products of rows `left[k]` and `right[k]`, each times `factors[k]`, to a matrix. Rows of `right` have `n` elements.
pub(super) fn add_outer_products<T: MatrixElement>(to: &mut [T], left: &[T], factors: &[T], right: &[T], n: usize) {
    let m = left.len() / factors.len().max(1);
    for (k, &factor) in factors.iter().enumerate() {
        for (row, &x) in to.chunks_exact_mut(n.max(1)).zip(&left[k * m..(k + 1) * m]) {
            add_multiple(row, x * factor, &right[k * n..(k + 1) * n]);
        }
    }
}
