//! The inner loops of all factorizations, on contiguous rows, compiled for every instruction set.

use super::real::MatrixElement;
use crate::simd::{self, Kernel};

/// Partial sums of a dot product: as many as four vectors of AVX-512 hold f64, so that AVX2 and AVX-512 add in one order.
const LANES: usize = 32;

/// Adds a multiple of a row to another: `y += factor * x`.
#[inline]
pub(super) fn add_multiple<T: MatrixElement>(y: &mut [T], factor: T, x: &[T]) {
    simd::run(AddMultiple { y, factor, x });
}

/// Returns the sum of the products of the elements of two rows.
#[inline]
pub(super) fn dot<T: MatrixElement>(x: &[T], y: &[T]) -> T {
    simd::run(Dot { x, y })
}

/// Replaces two rows by `c * x - s * y` and `s * x + c * y`.
#[inline]
pub(super) fn rotate<T: MatrixElement>(x: &mut [T], y: &mut [T], c: T, s: T) {
    simd::run(PlaneRotation { x, y, c, s });
}

/// Multiplies a row by a number.
pub(super) fn scale<T: MatrixElement>(x: &mut [T], factor: T) {
    x.iter_mut().for_each(|x| *x *= factor);
}

/// The Euclidean norm, without overflow of the squares.
pub(super) fn norm<T: MatrixElement>(x: &[T]) -> T {
    let largest = largest(x);
    if largest == T::ZERO || !largest.is_finite() {
        return largest;
    }
    let sum = x.iter().fold(T::ZERO, |sum, &x| sum + (x / largest) * (x / largest));
    largest * sum.sqrt()
}

/// The largest magnitude; NaN if there is one.
pub(super) fn largest<T: MatrixElement>(x: &[T]) -> T {
    x.iter().fold(T::ZERO, |most, &x| if x.abs() > most || x.is_nan() { x.abs() } else { most })
}

/// Two different rows of a matrix with rows of `n` elements.
pub(super) fn two_rows<T>(a: &mut [T], n: usize, i: usize, j: usize) -> (&mut [T], &mut [T]) {
    if i < j {
        let (head, tail) = a.split_at_mut(j * n);
        (&mut head[i * n..(i + 1) * n], &mut tail[..n])
    } else {
        let (head, tail) = a.split_at_mut(i * n);
        (&mut tail[..n], &mut head[j * n..(j + 1) * n])
    }
}

/// Exchanges two rows of a matrix with rows of `n` elements.
pub(super) fn swap_rows<T>(a: &mut [T], n: usize, i: usize, j: usize) {
    if i != j {
        let (x, y) = two_rows(a, n, i, j);
        x.swap_with_slice(y);
    }
}

/// The transpose of a matrix with `rows` rows.
pub(super) fn transposed<T: Copy>(a: &[T], rows: usize, columns: usize) -> Vec<T> {
    let mut to = Vec::with_capacity(a.len());
    for j in 0..columns {
        to.extend((0..rows).map(|i| a[i * columns + j]));
    }
    to
}

struct AddMultiple<'a, T> {
    y: &'a mut [T],
    factor: T,
    x: &'a [T],
}

impl<T: MatrixElement> Kernel for AddMultiple<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (y, &x) in self.y.iter_mut().zip(self.x) {
            *y = x.multiply_add::<FMA>(self.factor, *y);
        }
    }
}

struct Dot<'a, T> {
    x: &'a [T],
    y: &'a [T],
}

impl<T: MatrixElement> Kernel for Dot<'_, T> {
    type Output = T;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> T {
        let mut sums = [T::ZERO; LANES];
        let (x, y) = (self.x.chunks_exact(LANES), self.y.chunks_exact(LANES));
        let (left, right) = (x.remainder(), y.remainder());
        for (x, y) in x.zip(y) {
            for lane in 0..LANES {
                sums[lane] = x[lane].multiply_add::<FMA>(y[lane], sums[lane]);
            }
        }
        for (lane, (&x, &y)) in left.iter().zip(right).enumerate() {
            sums[lane] = x.multiply_add::<FMA>(y, sums[lane]);
        }
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                sums[lane] += sums[lane + half];
            }
            half /= 2;
        }
        sums[0]
    }
}

struct PlaneRotation<'a, T> {
    x: &'a mut [T],
    y: &'a mut [T],
    c: T,
    s: T,
}

impl<T: MatrixElement> Kernel for PlaneRotation<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            let (a, b) = (*x, *y);
            *x = a.multiply_add::<FMA>(self.c, -(self.s * b));
            *y = a.multiply_add::<FMA>(self.s, self.c * b);
        }
    }
}
