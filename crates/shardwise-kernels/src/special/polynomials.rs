//! Orthogonal polynomials by their recurrences, in the type of the argument. The degree is a number that is truncated; for degrees
//! below zero and degrees that are not finite the value is 0, as in PyTorch.

use std::ops::{Add, Div, Mul, Sub};

/// f32 or f64.
pub trait Field:
    Copy + From<f32> + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The largest degree of a Hermite polynomial that PyTorch computes; beyond, it is NaN.
    const MAX_HERMITE: f64;
}

impl Field for f32 {
    const MAX_HERMITE: f64 = 128.0;
}

impl Field for f64 {
    const MAX_HERMITE: f64 = 512.0;
}

/// The polynomial of degree `n` of a family: those of degree 0 and 1 are 1 and `first`, and `next` gets `k` and the polynomials of
/// degree `k` and `k - 1`.
#[inline(always)]
fn recurrence<T: Field>(n: f64, first: T, next: impl Fn(T, T, T) -> T) -> T {
    let (one, n) = (T::from(1.0), n.trunc());
    if !(n >= 0.0 && n.is_finite()) {
        return T::from(0.0);
    }
    if n == 0.0 {
        return one;
    }
    let (mut before, mut at, mut k) = (one, first, one);
    let mut degree = 1.0;
    while degree < n {
        (before, at) = (at, next(k, at, before));
        k = k + one;
        degree += 1.0;
    }
    at
}

#[inline(always)]
fn chebyshev<T: Field>(x: T, n: f64, first: T) -> T {
    recurrence(n, first, |_, at, before| (x + x) * at - before)
}

/// The Chebyshev polynomial of the first kind.
#[inline(always)]
pub fn chebyshev_t<T: Field>(x: T, n: f64) -> T {
    chebyshev(x, n, x)
}

/// The Chebyshev polynomial of the second kind.
#[inline(always)]
pub fn chebyshev_u<T: Field>(x: T, n: f64) -> T {
    chebyshev(x, n, x + x)
}

/// The Chebyshev polynomial of the third kind.
#[inline(always)]
pub fn chebyshev_v<T: Field>(x: T, n: f64) -> T {
    chebyshev(x, n, x + x - T::from(1.0))
}

/// The Chebyshev polynomial of the fourth kind.
#[inline(always)]
pub fn chebyshev_w<T: Field>(x: T, n: f64) -> T {
    chebyshev(x, n, x + x + T::from(1.0))
}

/// The Hermite polynomial of the physicists; NaN for degrees that overflow the type in any case.
#[inline(always)]
pub fn hermite_h<T: Field>(x: T, n: f64) -> T {
    if n.is_finite() && n.trunc() > T::MAX_HERMITE {
        return T::from(f32::NAN);
    }
    recurrence(n, x + x, |k, at, before| (x + x) * at - (k + k) * before)
}

/// The Hermite polynomial of probability theory; NaN for degrees that overflow the type in any case.
#[inline(always)]
pub fn hermite_he<T: Field>(x: T, n: f64) -> T {
    if n.is_finite() && n.trunc() > T::MAX_HERMITE {
        return T::from(f32::NAN);
    }
    recurrence(n, x, |k, at, before| x * at - k * before)
}

/// The Laguerre polynomial.
#[inline(always)]
pub fn laguerre_l<T: Field>(x: T, n: f64) -> T {
    let one = T::from(1.0);
    recurrence(n, one - x, |k, at, before| ((k + k + (one - x)) * at - k * before) / (k + one))
}

/// The Legendre polynomial.
#[inline(always)]
pub fn legendre_p<T: Field>(x: T, n: f64) -> T {
    let one = T::from(1.0);
    recurrence(n, x, |k, at, before| ((k + k + one) * x * at - k * before) / (k + one))
}
