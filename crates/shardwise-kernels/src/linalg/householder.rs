//! Householder reflections: QR factorization, products of reflections and their gradient.
//!
//! Reflection `i` is `I - tau v v^T`, where `v` is zero above row `i`, one in it, and below it is stored in column `i` of a matrix.
//! Matrices are transposed first, so that columns are contiguous.

use candle_core::Tensor;

use super::batch::{MatrixOperand, item, over_items, with_slices};
use super::real::{MatrixElement, with_real};
use super::row_operations::{add_multiple, dot, norm, scale, transposed};
use crate::error::Result;
use crate::typed_slice::with_slice;

/// Factorizes matrices as `A = Q R` with orthonormal columns of `Q`, of which there are as many as rows if `full`, else the smaller of
/// rows and columns, and no negative number on the diagonal of `R`. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn qr(a: &Tensor, full: bool) -> Result<(Tensor, Tensor)> {
    let of = MatrixOperand::new(a, 2);
    let (m, n) = (of.size(2), of.size(1));
    let k = if full { m } else { m.min(n) };
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let ([q, r], []) =
            over_items::<T, i32, 2, 0>(of.batch(), [&[m, k], &[k, n]], [], 4 * m * n * k, |at, [q, r], []| {
                let mut columns = transposed(item(elements, at, m * n), m, n);
                let taus = reflect(&mut columns, m, n);
                for (i, row) in r.chunks_exact_mut(n.max(1)).enumerate() {
                    (i..n).for_each(|j| row[j] = columns[j * m + i]);
                }
                columns.resize(k * m, T::ZERO);
                let mut found = product(&columns, &taus, m, k);
                for i in (0..k.min(n)).filter(|&i| columns[i * m + i] < T::ZERO) {
                    scale(&mut r[i * n..(i + 1) * n], -T::ONE);
                    scale(&mut found[i * m..(i + 1) * m], -T::ONE);
                }
                q.copy_from_slice(&transposed(&found, k, m));
            })?;
        Ok((q, r))
    })?)
}

/// Overwrites a matrix, given by its columns of `m` elements, with `R` on and above the diagonal and the vectors of the reflections
/// below it; returns their factors.
pub(super) fn reflect<T: MatrixElement>(columns: &mut [T], m: usize, n: usize) -> Vec<T> {
    let mut taus = Vec::with_capacity(m.min(n));
    for j in 0..m.min(n) {
        let (head, rest) = columns.split_at_mut((j + 1) * m);
        let column = &mut head[j * m + j..];
        let tail = norm(&column[1..]);
        if tail == T::ZERO {
            taus.push(T::ZERO);
            continue;
        }
        let alpha = column[0];
        let beta = -norm(&[alpha, tail]).copysign(alpha);
        let tau = (beta - alpha) / beta;
        // Not multiplied by the reciprocal, which overflows for the smallest numbers.
        let divisor = alpha - beta;
        column[1..].iter_mut().for_each(|x| *x /= divisor);
        column[0] = T::ONE;
        for other in rest.chunks_exact_mut(m) {
            let along = dot(column, &other[j..]);
            add_multiple(&mut other[j..], -(tau * along), column);
        }
        column[0] = beta;
        taus.push(tau);
    }
    taus
}

/// The vector of reflection `i` from row `i` on.
fn vector<T: MatrixElement>(columns: &[T], m: usize, i: usize) -> Vec<T> {
    let mut v = columns[i * m + i..(i + 1) * m].to_vec();
    v[0] = T::ONE;
    v
}

/// The first `k` columns of the product of the reflections.
pub(super) fn product<T: MatrixElement>(columns: &[T], taus: &[T], m: usize, k: usize) -> Vec<T> {
    let mut q = vec![T::ZERO; k * m];
    (0..k.min(m)).for_each(|i| q[i * m + i] = T::ONE);
    for i in (0..taus.len()).rev() {
        apply(&mut q, m, i, &vector(columns, m, i), taus[i]);
    }
    q
}

/// Applies reflection `i` to columns of `m` elements.
fn apply<T: MatrixElement>(columns: &mut [T], m: usize, i: usize, v: &[T], tau: T) {
    for column in columns.chunks_exact_mut(m) {
        let along = dot(v, &column[i..]);
        add_multiple(&mut column[i..], -(tau * along), v);
    }
}

/// Returns the first columns, as many as `a` has, of the product of the reflections in `a` and `tau`. f32 and f64.
///
/// # Errors
/// If the types are neither f32 nor f64, or memory does not suffice.
pub fn householder_product(a: &Tensor, tau: &Tensor) -> Result<Tensor> {
    let (of, of_tau) = (MatrixOperand::new(a, 2), MatrixOperand::new(tau, 1));
    let (m, n, count) = (of.size(2), of.size(1), of_tau.size(1));
    with_real!(a.dtype(), T => with_slices::<T, T, _>(a, tau, |a, tau| {
        let ([q], []) = over_items::<T, i32, 1, 0>(of.batch(), [&[m, n]], [], 2 * m * n * count, |at, [q], []| {
            let columns = transposed(item(a, at, m * n), m, n);
            q.copy_from_slice(&transposed(&product(&columns, item(tau, at, count), m, n), n, m));
        })?;
        Ok(q)
    }))
}

/// Returns the gradients of [`householder_product`] with respect to `a` and `tau`, for the gradient `g` of its result.
///
/// # Errors
/// As for [`householder_product`].
pub fn householder_product_backward(a: &Tensor, tau: &Tensor, g: &Tensor) -> Result<(Tensor, Tensor)> {
    let (of, of_tau) = (MatrixOperand::new(a, 2), MatrixOperand::new(tau, 1));
    let (m, n, count) = (of.size(2), of.size(1), of_tau.size(1));
    with_real!(a.dtype(), T => with_slices::<T, T, _>(a, tau, |a, tau| with_slice::<T, _>(g, |g| {
        let cost = 6 * m * n * count;
        let ([of_a, of_tau], []) =
            over_items::<T, i32, 2, 0>(of.batch(), [&[m, n], &[count]], [], cost, |at, [of_a, of_tau], []| {
                let columns = transposed(item(a, at, m * n), m, n);
                let mut gradient = transposed(item(g, at, m * n), m, n);
                let moved = product_backward(&columns, item(tau, at, count), m, n, &mut gradient, of_tau);
                of_a.copy_from_slice(&transposed(&moved, n, m));
            })?;
        Ok((of_a, of_tau))
    })?))
}

/// `gradient` is that of the result, by columns, and is overwritten.
///
/// With `Q = L H R` for one reflection `H`, the gradient of `H` is `M = L^T G R^T`, of which only products with `v` are needed.
fn product_backward<T: MatrixElement>(
    columns: &[T],
    taus: &[T],
    m: usize,
    n: usize,
    gradient: &mut [T],
    of_tau: &mut [T],
) -> Vec<T> {
    let mut moved = vec![T::ZERO; n * m];
    // What the later reflections give, for every reflection. They cannot be undone one by one: with a factor that is not 2 / |v|^2,
    // as a user may pass, a reflection is not orthogonal, and possibly singular.
    let mut after = Vec::with_capacity(taus.len());
    let mut q = product(columns, &[], m, n);
    for i in (0..taus.len()).rev() {
        after.push(q.clone());
        apply(&mut q, m, i, &vector(columns, m, i), taus[i]);
    }
    for (i, (&tau, right)) in taus.iter().zip(after.iter().rev()).enumerate() {
        let v = vector(columns, m, i);
        // M v and M^T v, from row i on; `gradient` is L^T G.
        let (mut forward, mut backward) = (vec![T::ZERO; m - i], vec![T::ZERO; m - i]);
        for (g, r) in gradient.chunks_exact(m).zip(right.chunks_exact(m)) {
            add_multiple(&mut forward, dot(&r[i..], &v), &g[i..]);
            add_multiple(&mut backward, dot(&g[i..], &v), &r[i..]);
        }
        of_tau[i] = -dot(&v, &forward);
        let to = &mut moved[i * m + i + 1..(i + 1) * m];
        add_multiple(to, T::ONE, &forward[1..]);
        add_multiple(to, T::ONE, &backward[1..]);
        scale(to, -tau);
        apply(gradient, m, i, &v, tau);
    }
    moved
}
