//! The matrix exponential: scaling, a Padé approximation, and repeated squaring.

use candle_core::Tensor;

use super::batch::{MatrixOperand, item, over_items};
use super::real::{MatrixElement, with_real};
use super::row_operations::add_multiple;
use crate::error::Result;
use crate::linalg::lu;
use crate::typed_slice::with_slice;

/// Coefficients of the numerator of the Padé approximation of degree 13; those of the denominator have alternating signs.
const PADE: [f64; 14] = [
    64_764_752_532_480_000.0,
    32_382_376_266_240_000.0,
    7_771_770_303_897_600.0,
    1_187_353_796_428_800.0,
    129_060_195_264_000.0,
    10_559_470_521_600.0,
    670_442_572_800.0,
    33_522_128_640.0,
    1_323_241_920.0,
    40_840_800.0,
    960_960.0,
    16_380.0,
    182.0,
    1.0,
];

/// The largest 1-norm for which the approximation is exact to the rounding of f64 (Higham 2005).
const MAX_NORM: f64 = 5.371920351148152;

/// Returns the exponentials of square matrices. f32 and f64.
///
/// # Errors
/// If the type is another one, or memory does not suffice.
pub fn matrix_exp(a: &Tensor) -> Result<Tensor> {
    let of = MatrixOperand::new(a, 2);
    let n = of.size(1);
    with_real!(a.dtype(), T => with_slice::<T, _>(a, |elements| {
        let ([result], []) = over_items::<T, i32, 1, 0>(of.batch(), [&[n, n]], [], 40 * n * n * n, |at, [to], []| {
            exponential(item(elements, at, n * n), n, to);
        })?;
        Ok(result)
    })?)
}

fn exponential<T: MatrixElement>(a: &[T], n: usize, to: &mut [T]) {
    let sum_of_column = |j: usize| (0..n).map(|i| a[i * n + j].wide().abs()).sum::<f64>();
    // NaN is larger than any maximum here: it must not be passed over.
    let size =
        (0..n).map(sum_of_column).fold(0.0, |most: f64, sum| if sum > most || sum.is_nan() { sum } else { most });
    if !size.is_finite() {
        to.fill(T::NAN);
        return;
    }
    let halvings = (size / MAX_NORM).log2().ceil().max(0.0) as i32;
    let factor = T::narrow(0.5f64.powi(halvings));
    let a: Vec<T> = a.iter().map(|&x| x * factor).collect();
    let square = product(&a, &a, n);
    let fourth = product(&square, &square, n);
    let sixth = product(&square, &fourth, n);
    // The even and the odd terms, the latter without one factor A.
    let part = |first: usize| {
        let sum = |c: [usize; 3]| {
            let mut sum = vec![T::ZERO; n * n];
            for (power, c) in [&sixth, &fourth, &square].into_iter().zip(c) {
                add_multiple(&mut sum, T::narrow(PADE[c]), power);
            }
            sum
        };
        let mut terms = product(&sixth, &sum([12 + first, 10 + first, 8 + first]), n);
        add_multiple(&mut terms, T::ONE, &sum([6 + first, 4 + first, 2 + first]));
        (0..n).for_each(|i| terms[i * n + i] += T::narrow(PADE[first]));
        terms
    };
    let (even, odd) = (part(0), product(&a, &part(1), n));
    to.copy_from_slice(&even);
    add_multiple(to, T::ONE, &odd);
    let mut denominator = even;
    add_multiple(&mut denominator, -T::ONE, &odd);
    lu::solve_in_place(&mut denominator, n, to, n);
    for _ in 0..halvings {
        let square = product(to, to, n);
        to.copy_from_slice(&square);
    }
}

/// The product of two square matrices.
fn product<T: MatrixElement>(a: &[T], b: &[T], n: usize) -> Vec<T> {
    let mut c = vec![T::ZERO; n * n];
    for (row, to) in a.chunks_exact(n.max(1)).zip(c.chunks_exact_mut(n.max(1))) {
        for (&x, from) in row.iter().zip(b.chunks_exact(n.max(1))) {
            add_multiple(to, x, from);
        }
    }
    c
}
