//! Modified Bessel functions of the first and second kind.

use std::f64::consts::PI;

/// Euler's constant.
const GAMMA: f64 = 0.577_215_664_901_532_9;

/// Up to this argument the power series is used. Its terms are all positive; beyond, the smallest term of the asymptotic series is
/// below exp(-40), a thousandth of a unit in the last place.
const LARGE: f64 = 20.0;

/// The modified Bessel function of the first kind and order 0.
pub fn i0(x: f64) -> f64 {
    let x = x.abs();
    if x <= LARGE { first_kind_series(0, x) } else { grow(first_kind_scaled(0, x), x) }
}

/// `exp(-|x|)` times [`i0`].
pub fn i0e(x: f64) -> f64 {
    let x = x.abs();
    if x <= LARGE { first_kind_series(0, x) * (-x).exp() } else { first_kind_scaled(0, x) }
}

/// The modified Bessel function of the first kind and order 1.
pub fn i1(x: f64) -> f64 {
    let size = x.abs();
    let value = if size <= LARGE { first_kind_series(1, size) } else { grow(first_kind_scaled(1, size), size) };
    if x < 0.0 { -value } else { value }
}

/// `exp(-|x|)` times [`i1`].
pub fn i1e(x: f64) -> f64 {
    let size = x.abs();
    let value = if size <= LARGE { first_kind_series(1, size) * (-size).exp() } else { first_kind_scaled(1, size) };
    if x < 0.0 { -value } else { value }
}

/// `scaled * exp(x)`, in two steps: the exponential alone overflows earlier than the product.
fn grow(scaled: f64, x: f64) -> f64 {
    // As in PyTorch, where an infinity is multiplied by zero.
    if x == f64::INFINITY {
        return f64::NAN;
    }
    let half = (0.5 * x).exp();
    scaled * half * half
}

fn first_kind_series(order: u32, x: f64) -> f64 {
    let quarter = 0.25 * x * x;
    let mut term = if order == 0 { 1.0 } else { 0.5 * x };
    let mut sum = term;
    for k in 1..200 {
        term *= quarter / (f64::from(k) * f64::from(k + order));
        sum += term;
        if term <= 1e-17 * sum {
            break;
        }
    }
    // NaN ends the loop at its last term.
    if x.is_nan() { x } else { sum }
}

/// The asymptotic series of `exp(-x)` times the function of the first kind.
fn first_kind_scaled(order: u32, x: f64) -> f64 {
    if x == f64::INFINITY {
        return 0.0;
    }
    let square = 4.0 * f64::from(order * order);
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..60 {
        let odd = f64::from(2 * k - 1);
        let next = -term * (square - odd * odd) / (f64::from(8 * k) * x);
        if next.abs() >= term.abs() {
            break;
        }
        term = next;
        sum += term;
        if term.abs() < 1e-18 {
            break;
        }
    }
    sum / (2.0 * PI * x).sqrt()
}

/// The modified Bessel function of the second kind and order 0; infinite at 0, NaN for negative numbers.
pub fn k0(x: f64) -> f64 {
    if x <= 1.0 { second_kind_0(x) } else { second_kind_scaled(0.0, x) * (-x).exp() }
}

/// `exp(x)` times [`k0`].
pub fn k0e(x: f64) -> f64 {
    if x <= 1.0 { second_kind_0(x) * x.exp() } else { second_kind_scaled(0.0, x) }
}

/// The modified Bessel function of the second kind and order 1; infinite at 0, NaN for negative numbers.
pub fn k1(x: f64) -> f64 {
    if x <= 1.0 { second_kind_1(x) } else { second_kind_scaled(1.0, x) * (-x).exp() }
}

/// `exp(x)` times [`k1`].
pub fn k1e(x: f64) -> f64 {
    if x <= 1.0 { second_kind_1(x) * x.exp() } else { second_kind_scaled(1.0, x) }
}

/// The series of order 0 up to 1: logarithm and harmonic numbers.
fn second_kind_0(x: f64) -> f64 {
    if x <= 0.0 {
        return if x == 0.0 { f64::INFINITY } else { f64::NAN };
    }
    let quarter = 0.25 * x * x;
    let (mut term, mut harmonic, mut sum) = (1.0, 0.0, 0.0);
    for k in 1..30 {
        let k = f64::from(k);
        term *= quarter / (k * k);
        harmonic += 1.0 / k;
        sum += term * harmonic;
    }
    sum - ((0.5 * x).ln() + GAMMA) * first_kind_series(0, x)
}

/// The series of order 1 up to 1.
fn second_kind_1(x: f64) -> f64 {
    if x <= 0.0 {
        return if x == 0.0 { f64::INFINITY } else { f64::NAN };
    }
    let quarter = 0.25 * x * x;
    let (mut term, mut digammas, mut sum) = (1.0, 1.0 - 2.0 * GAMMA, 0.0);
    for k in 1..30 {
        sum += digammas * term;
        let k = f64::from(k);
        term *= quarter / (k * (k + 1.0));
        digammas += 1.0 / k + 1.0 / (k + 1.0);
    }
    1.0 / x + (0.5 * x).ln() * first_kind_series(1, x) - 0.25 * x * sum
}

/// `exp(x)` times the function of the second kind of any order up to 1, for `x` from 1 on: the trapezoidal rule for the integral
/// of `exp(-x (cosh t - 1)) cosh(order t)` over the positive half line, whose error falls exponentially with the number of points.
pub(super) fn second_kind_scaled(order: f64, x: f64) -> f64 {
    if x.is_nan() || x == f64::INFINITY {
        return if x.is_nan() { x } else { 0.0 };
    }
    // The error is about exp(-pi^2 / h + x) for small x and exp(-2 pi^2 / (h^2 x)) for large x, where the integrand is a bell.
    let h = 0.2f64.min(0.6 / x.sqrt());
    let mut sum = 0.5;
    for k in 1..200 {
        let t = f64::from(k) * h;
        // cosh t - 1 without cancellation.
        let half = (0.5 * t).sinh();
        let term = (-2.0 * x * half * half).exp() * (order * t).cosh();
        sum += term;
        if term < 1e-18 * sum {
            break;
        }
    }
    sum * h
}
