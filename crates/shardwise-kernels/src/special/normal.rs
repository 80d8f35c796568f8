//! The error function, the normal distribution, and logarithmic functions.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI, SQRT_2};

/// `exp(x^2) erfc(x)`.
pub fn erfcx(x: f64) -> f64 {
    if x < 25.0 {
        // The square to twice the precision: its rounding would be multiplied by the exponential.
        let square = x * x;
        let rest = x.mul_add(x, -square);
        let grown = square.exp();
        return if grown == f64::INFINITY { grown } else { (grown + grown * rest) * libm::erfc(x) };
    }
    // The asymptotic series from its last term on: the next one is below 1e-17.
    let inverse = 1.0 / (x * x);
    let series = [6.5, 5.5, 4.5, 3.5, 2.5, 1.5, 0.5].iter().fold(1.0, |sum, factor| 1.0 - factor * inverse * sum);
    0.5 * FRAC_2_SQRT_PI / x * series
}

/// The normal distribution function.
pub fn ndtr(x: f64) -> f64 {
    if x < -5.0 && x > -40.0 {
        // In the tail a rounded argument of erfc would be multiplied by its square.
        let square = x * x;
        let rest = x.mul_add(x, -square);
        return 0.5 * erfcx(-x * FRAC_1_SQRT_2) * (-0.5 * square).exp() * (1.0 - 0.5 * rest);
    }
    0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
}

/// The logarithm of the normal distribution function.
pub fn log_ndtr(x: f64) -> f64 {
    if x < -1.0 {
        (0.5 * erfcx(-x * FRAC_1_SQRT_2)).ln() - 0.5 * x * x
    } else {
        (-0.5 * libm::erfc(x * FRAC_1_SQRT_2)).ln_1p()
    }
}

/// The inverse of [`ndtr`]: infinite at 0 and 1, NaN outside.
pub fn ndtri(p: f64) -> f64 {
    if !(0.0..=1.0).contains(&p) {
        return f64::NAN;
    }
    if p == 0.0 || p == 1.0 {
        return if p == 0.0 { f64::NEG_INFINITY } else { f64::INFINITY };
    }
    if p > 0.5 {
        return -lower_quantile(1.0 - p);
    }
    lower_quantile(p)
}

/// The quantile of the normal distribution for `p` up to a half.
fn lower_quantile(p: f64) -> f64 {
    // Near the middle the quantile is small, and the difference of p and a half is exact.
    if p > 0.25 {
        return -SQRT_2 * central_erfinv(2.0 * (0.5 - p));
    }
    // A first approximation from the tail, log p ~ -x^2 / 2 - log(-x sqrt(2 pi)), then Halley's steps for log ndtr(x) = log p: on this scale
    // the function is nearly a parabola, so that they converge from far away.
    let target = p.ln();
    let mut x = -(-2.0 * target - (-2.0 * target).ln().max(0.0) - (2.0 * PI).ln()).max(0.25).sqrt();
    for _ in 0..8 {
        let value = log_ndtr(x) - target;
        // ndtr'(x) / ndtr(x).
        let slope = FRAC_2_SQRT_PI * FRAC_1_SQRT_2 / erfcx(-x * FRAC_1_SQRT_2);
        let curvature = -slope * (x + slope);
        let step = value / slope;
        let change = step / (1.0 - 0.5 * step * curvature / slope);
        x -= change;
        if change.abs() <= 1e-16 * x.abs() {
            break;
        }
    }
    x
}

/// The inverse of the error function: infinite at -1 and 1, NaN outside.
pub fn erfinv(x: f64) -> f64 {
    let size = x.abs();
    if size > 1.0 || size.is_nan() {
        return f64::NAN;
    }
    if size == 1.0 {
        return f64::INFINITY.copysign(x);
    }
    if size <= 0.5 {
        return central_erfinv(x);
    }
    // 1 - |x| is exact from a half on.
    (-lower_quantile(0.5 * (1.0 - size)) * FRAC_1_SQRT_2).copysign(x)
}

/// The inverse of the error function up to a half: the first terms of its series, then Halley's steps.
fn central_erfinv(x: f64) -> f64 {
    let square = PI * x * x;
    let mut z = 0.5 * PI.sqrt() * x * (1.0 + square / 12.0 + 7.0 * square * square / 480.0);
    for _ in 0..3 {
        let step = (libm::erf(z) - x) / (FRAC_2_SQRT_PI * (-z * z).exp());
        z -= step / (1.0 + z * step);
    }
    z
}

/// `-x log(x)`: 0 at 0, and negative infinity below.
pub fn entr(x: f64) -> f64 {
    if x > 0.0 {
        -x * x.ln()
    } else if x == 0.0 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        f64::NEG_INFINITY
    }
}

/// `sin(pi x) / (pi x)`, 1 at 0.
pub fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let product = PI * x;
    product.sin() / product
}

/// `x log(1 + y)`: 0 where `x` is 0, unless `y` is NaN.
pub fn xlog1py(x: f64, y: f64) -> f64 {
    if x == 0.0 && !y.is_nan() { 0.0 } else { x * y.ln_1p() }
}
