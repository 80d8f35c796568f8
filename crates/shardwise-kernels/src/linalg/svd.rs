//! Singular value decomposition: QR, then one-sided Jacobi rotations, which find small singular values to high relative accuracy.

use candle_core::Tensor;

use super::batch::{MatrixOperand, item, over_items};
use super::householder::{product, reflect};
use super::real::{MatrixElement, with_real};
use super::row_operations::{add_multiple, dot, largest, norm, rotate, scale, transposed, two_rows};
use super::symmetric::add_outer_products;
use crate::error::Result;
use crate::typed_slice::with_slice;

/// Sweeps over all pairs of columns after which the result is accepted as it is; six to ten are usual.
const MAX_SWEEPS: usize = 60;

/// Returns `U`, the singular values in descending order, and `V^T`, of matrices of any shape: `A = U S V^T`. `U` and `V` are square if
/// `full`. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn svd(a: &Tensor, full: bool) -> Result<(Tensor, Tensor, Tensor)> {
    let of = MatrixOperand::new(a, 2);
    let (m, n) = (of.size(2), of.size(1));
    let k = m.min(n);
    let (left, right) = if full { (m, n) } else { (k, k) };
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let shapes: [&[usize]; 3] = [&[m, left], &[k], &[right, n]];
        let cost = 30 * m.max(n) * k * k;
        let ([u, s, vh], []) = over_items::<T, i32, 3, 0>(of.batch(), shapes, [], cost, |at, [u, s, vh], []| {
            let found = Svd::new(item(elements, at, m * n), m, n);
            s.copy_from_slice(&found.values);
            u.copy_from_slice(&transposed(&completed(found.left, m, left), left, m));
            vh.copy_from_slice(&completed(found.right, n, right));
        })?;
        Ok((u, s, vh))
    })?)
}

/// The decomposition of one matrix.
pub(super) struct Svd<T> {
    /// Left singular vectors, as rows.
    pub(super) left: Vec<T>,
    pub(super) values: Vec<T>,
    /// Right singular vectors, as rows.
    pub(super) right: Vec<T>,
}

impl<T: MatrixElement> Svd<T> {
    /// Decomposes a matrix of `m` rows.
    pub(super) fn new(a: &[T], m: usize, n: usize) -> Self {
        let k = m.min(n);
        let size = largest(a);
        if !size.is_finite() {
            return Svd { left: vec![T::NAN; k * m], values: vec![T::NAN; k], right: vec![T::NAN; k * n] };
        }
        // A wide matrix is decomposed by its transpose. The columns of a tall one are the rows of its transpose.
        let mut columns = if m >= n { transposed(a, m, n) } else { a.to_vec() };
        // Scaled, so that squares neither overflow nor vanish.
        if size > T::ZERO {
            columns.iter_mut().for_each(|x| *x /= size);
        }
        let (long, mut values, short) = decompose_tall(columns, m.max(n), k);
        scale(&mut values, size);
        if m >= n { Svd { left: long, values, right: short } } else { Svd { left: short, values, right: long } }
    }
}

/// Decomposes a matrix of `m >= k` rows, given by its columns: returns left singular vectors, values and right singular vectors, vectors
/// as rows.
fn decompose_tall<T: MatrixElement>(mut columns: Vec<T>, m: usize, k: usize) -> (Vec<T>, Vec<T>, Vec<T>) {
    // A = Q R. The rows of R, which are short, are rotated until they are orthogonal: G R = S V^T for a product G of rotations, so that
    // A = (Q G^T) S V^T.
    let taus = reflect(&mut columns, m, k);
    let mut rows = vec![T::ZERO; k * k];
    for (i, row) in rows.chunks_exact_mut(k.max(1)).enumerate() {
        (i..k).for_each(|j| row[j] = columns[j * m + i]);
    }
    let mut left = product(&columns, &taus, m, k);
    for _ in 0..MAX_SWEEPS {
        if !sweep(&mut rows, &mut left, m, k) {
            break;
        }
    }
    let lengths: Vec<T> = rows.chunks_exact(k.max(1)).map(norm).collect();
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by(|&i, &j| lengths[j].wide().total_cmp(&lengths[i].wide()));
    let values: Vec<T> = order.iter().map(|&i| lengths[i]).collect();
    let mut right = Vec::with_capacity(k * k);
    // Shorter rows have squares that vanish, so that nothing made them orthogonal.
    for &i in order.iter().filter(|&&i| lengths[i] > T::TINY.sqrt()) {
        right.extend(rows[i * k..(i + 1) * k].iter().map(|&x| x / lengths[i]));
    }
    let left = order.iter().flat_map(|&i| left[i * m..(i + 1) * m].to_vec()).collect();
    // For the rows without a direction, any orthogonal ones will do.
    (left, values, completed(right, k, k))
}

/// Rotates every pair of rows until it is orthogonal; returns whether a pair was not.
fn sweep<T: MatrixElement>(rows: &mut [T], left: &mut [T], m: usize, k: usize) -> bool {
    let mut rotated = false;
    // The rounding of a dot product of k terms.
    let limit = T::EPSILON * T::narrow((k as f64).sqrt().max(1.0));
    for i in 0..k {
        for j in i + 1..k {
            let (x, y) = two_rows(rows, k, i, j);
            let (a, b, along) = (dot(x, x), dot(y, y), dot(x, y));
            if along.abs() <= limit * (a.sqrt() * b.sqrt()) || along == T::ZERO {
                continue;
            }
            rotated = true;
            let zeta = (b - a) / (T::narrow(2.0) * along);
            let t = T::ONE.copysign(zeta) / (zeta.abs() + norm(&[zeta, T::ONE]));
            let c = T::ONE / norm(&[t, T::ONE]);
            rotate(x, y, c, c * t);
            let (x, y) = two_rows(left, m, i, j);
            rotate(x, y, c, c * t);
        }
    }
    rotated
}

/// Extends orthonormal rows of `n` elements to `count` of them.
fn completed<T: MatrixElement>(mut rows: Vec<T>, n: usize, count: usize) -> Vec<T> {
    let mut unit = 0;
    while rows.len() < count * n {
        // The unit vectors span everything, so one of them is far enough from the rows so far.
        let mut next = vec![T::ZERO; n];
        next[unit % n] = T::ONE;
        // Twice: once leaves the rounding errors of what was subtracted.
        for _ in 0..2 {
            for row in rows.chunks_exact(n) {
                let along = dot(row, &next);
                add_multiple(&mut next, -along, row);
            }
        }
        let length = norm(&next);
        // At least one of n unit vectors has a part of 1/sqrt(n) outside the span of fewer than n rows.
        if length * length * T::narrow(2.0 * n as f64) > T::ONE || unit >= n {
            rows.extend(next.iter().map(|&x| x / length));
        }
        unit += 1;
    }
    rows
}

/// The result of [`polar`].
#[derive(Debug, Clone)]
pub struct PolarFactors {
    /// Orthonormal columns.
    pub u: Tensor,
    /// Symmetric positive-semidefinite.
    pub h: Tensor,
    /// The eigenvalues of `h`.
    pub values: Tensor,
    /// The eigenvectors of `h`, in columns.
    pub vectors: Tensor,
}

/// Factorizes matrices with at least as many rows as columns as `A = U H`. f32 and f64.
///
/// # Errors
/// As for [`svd`].
pub fn polar(a: &Tensor) -> Result<PolarFactors> {
    let of = MatrixOperand::new(a, 2);
    let (m, n) = (of.size(2), of.size(1));
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let shapes: [&[usize]; 4] = [&[m, n], &[n, n], &[n], &[n, n]];
        let ([u, h, values, vectors], []) =
            over_items::<T, i32, 4, 0>(of.batch(), shapes, [], 30 * m * n * n, |at, [u, h, values, vectors], []| {
                let found = Svd::new(item(elements, at, m * n), m, n);
                values.copy_from_slice(&found.values);
                vectors.copy_from_slice(&transposed(&found.right, n, n));
                add_outer_products(u, &found.left, &vec![T::ONE; n], &found.right, n);
                add_outer_products(h, &found.right, values, &found.right, n);
            })?;
        Ok(PolarFactors { u, h, values, vectors })
    })?)
}
