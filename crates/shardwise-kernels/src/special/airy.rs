//! The Airy function.

use std::f64::consts::{FRAC_PI_4, PI};

use super::modified_bessel::second_kind_scaled;

/// The value and the derivative at 0.
const AT_ZERO: f64 = 0.355_028_053_887_817_2;
const SLOPE_AT_ZERO: f64 = -0.258_819_403_792_806_8;

/// Below this, the smallest term of the asymptotic series is below exp(-55).
const FAR: f64 = -12.0;

/// The Airy function `Ai`; NaN at the infinities, as in PyTorch.
pub fn airy_ai(x: f64) -> f64 {
    if !x.is_finite() {
        return f64::NAN;
    }
    if x >= 2.0 {
        let zeta = 2.0 / 3.0 * x * x.sqrt();
        return (x / 3.0).sqrt() / PI * second_kind_scaled(1.0 / 3.0, zeta) * (-zeta).exp();
    }
    if x >= FAR { by_steps(x) } else { oscillating(x) }
}

/// Solves `y'' = x y` from 0 to `x` with Taylor series of steps of at most one.
fn by_steps(x: f64) -> f64 {
    let count = x.abs().ceil().max(1.0);
    let h = x / count;
    let (mut y, mut slope) = (AT_ZERO, SLOPE_AT_ZERO);
    for step in 0..count as usize {
        let from = step as f64 * h;
        // Terms a_k h^k, with a_(k + 2) (k + 1) (k + 2) = from a_k + a_(k - 1).
        let (mut before, mut at, mut next) = (0.0, y, slope * h);
        let (mut sum, mut derivative) = (at + next, next);
        for k in 0..60 {
            let k = f64::from(k);
            let further = h * h * (from * at + h * before) / ((k + 1.0) * (k + 2.0));
            sum += further;
            derivative += (k + 2.0) * further;
            (before, at, next) = (at, next, further);
            if next.abs() + at.abs() + before.abs() < 1e-19 {
                break;
            }
        }
        (y, slope) = (sum, derivative / h);
    }
    y
}

/// The asymptotic series for negative numbers.
fn oscillating(x: f64) -> f64 {
    let size = -x;
    let zeta = 2.0 / 3.0 * size * size.sqrt();
    let (mut even, mut odd, mut term) = (0.0, 0.0, 1.0f64);
    for k in 0..40 {
        // The signs of pairs of terms alternate.
        let signed = if k / 2 % 2 == 0 { term } else { -term };
        if k % 2 == 0 {
            even += signed;
        } else {
            odd += signed;
        }
        let n = f64::from(k);
        let next =
            term * (6.0 * n + 1.0) * (6.0 * n + 3.0) * (6.0 * n + 5.0) / (216.0 * (2.0 * n + 1.0) * (n + 1.0) * zeta);
        if next >= term || next < 1e-18 {
            break;
        }
        term = next;
    }
    let phase = zeta - FRAC_PI_4;
    (phase.cos() * even + phase.sin() * odd) / (PI.sqrt() * size.sqrt().sqrt())
}
