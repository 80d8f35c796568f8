//! Bessel functions of the first and second kind. At infinity they are NaN, as in PyTorch.

/// The Bessel function of the first kind and order 0.
pub fn j0(x: f64) -> f64 {
    if x.is_infinite() { f64::NAN } else { libm::j0(x) }
}

/// The Bessel function of the first kind and order 1.
pub fn j1(x: f64) -> f64 {
    if x.is_infinite() { f64::NAN } else { libm::j1(x) }
}

/// The Bessel function of the second kind and order 0; NaN for negative numbers.
pub fn y0(x: f64) -> f64 {
    if x.is_infinite() { f64::NAN } else { libm::y0(x) }
}

/// The Bessel function of the second kind and order 1; NaN for negative numbers.
pub fn y1(x: f64) -> f64 {
    if x.is_infinite() { f64::NAN } else { libm::y1(x) }
}

/// The spherical Bessel function of the first kind and order 0, `sin(x) / x`.
pub fn spherical_j0(x: f64) -> f64 {
    if x.is_infinite() {
        return 0.0;
    }
    if x == 0.0 { 1.0 } else { x.sin() / x }
}
