//! The gamma function and its kin.

use std::f64::consts::PI;

/// Bernoulli numbers of even order from 2 on, divided by the factorials of their orders.
const BERNOULLI: [f64; 14] = [
    1.0 / 12.0,
    -1.0 / 720.0,
    1.0 / 30_240.0,
    -1.0 / 1_209_600.0,
    1.0 / 47_900_160.0,
    -691.0 / 1_307_674_368_000.0,
    1.0 / 74_724_249_600.0,
    -3.389_680_296_322_582_6e-13,
    8.586_062_056_277_845e-15,
    -2.174_868_698_558_062e-16,
    5.509_002_828_360_23e-18,
    -1.395_446_468_581_252_4e-19,
    3.534707039629467e-21,
    -8.953_517_427_037_546e-23,
];

/// The logarithm of the magnitude of the gamma function; infinite at 0 and the negative integers.
pub fn lgamma(x: f64) -> f64 {
    libm::lgamma(x)
}

/// The derivative of [`lgamma`]; NaN at the negative integers, and infinite with the sign of `-x` at 0.
pub fn digamma(x: f64) -> f64 {
    if x == 0.0 {
        return f64::INFINITY.copysign(-x);
    }
    if x < 0.0 {
        // Exact, and from -1/2 to 1/2: near a pole the tangent of a rounded multiple of pi would be wrong.
        let fraction = x - x.round();
        if fraction == 0.0 {
            return f64::NAN;
        }
        return digamma(1.0 - x) - PI / (PI * fraction).tan();
    }
    // Its zero: near it, the terms below would cancel.
    if (x - ROOT).abs() < 0.25 {
        return near_root(x);
    }
    let (mut x, mut sum) = (x, 0.0);
    while x < 10.0 {
        sum -= 1.0 / x;
        x += 1.0;
    }
    if x > 1e17 {
        return x.ln() + sum;
    }
    let square = 1.0 / (x * x);
    // Bernoulli numbers divided by their orders: b / (2k)! * (2k - 1)!
    let (mut series, mut power, mut factorial) = (0.0, square, 1.0);
    for (k, b) in BERNOULLI.iter().enumerate().take(9) {
        series += b * factorial * power;
        power *= square;
        let order = 2.0 * (k as f64 + 1.0);
        factorial *= order * (order + 1.0);
    }
    sum + (x.ln() - 0.5 / x - series)
}

/// The positive zero of [`digamma`], and what its f64 lacks.
const ROOT: f64 = 1.461_632_144_968_362_3;
const ROOT_REST: f64 = 9.549_995_429_965_697e-17;

/// The Taylor series of `digamma` at its zero; its coefficients are values of the zeta function there.
fn near_root(x: f64) -> f64 {
    let d = (x - ROOT) - ROOT_REST;
    let (mut sum, mut power) = (0.0, d);
    for k in 2..60 {
        let term = zeta(f64::from(k), ROOT) * power;
        sum += term;
        if term.abs() <= 1e-18 * sum.abs() {
            break;
        }
        power *= -d;
    }
    sum
}

/// The Hurwitz zeta function, the sum of `(q + k)^-s` over all k from 0; as in PyTorch NaN for `s < 1` and infinite for `s == 1`.
pub fn zeta(s: f64, q: f64) -> f64 {
    if s == 1.0 {
        return f64::INFINITY;
    }
    if s < 1.0 || s.is_nan() || s == f64::INFINITY || q.is_nan() || q == f64::INFINITY {
        return f64::NAN;
    }
    if q <= 0.0 {
        if q == q.floor() {
            return f64::INFINITY;
        }
        // Powers of negative numbers are real for integers alone.
        if s != s.floor() {
            return f64::NAN;
        }
        // The terms with a negative base are those of a positive one, up to the sign.
        let below = -q.floor();
        let fraction = q + below;
        let sign = if s % 2.0 == 0.0 { 1.0 } else { -1.0 };
        let negative = positive_zeta(s, 1.0 - fraction) - positive_zeta(s, below + 1.0 - fraction);
        return positive_zeta(s, fraction) + sign * negative;
    }
    positive_zeta(s, q)
}

/// Euler-Maclaurin summation from a term on that is large enough for its series, which needs one beyond `s`.
fn positive_zeta(s: f64, q: f64) -> f64 {
    let (mut sum, mut a) = (0.0, q);
    while a < 10.0 + s {
        let term = a.powf(-s);
        sum += term;
        // Equal where both are 0: the powers of a large order.
        if term == f64::INFINITY || term <= 1e-17 * sum {
            return sum;
        }
        a += 1.0;
    }
    let last = a.powf(-s);
    sum += last * (a / (s - 1.0) + 0.5);
    let (mut factor, mut term) = (s, last / a);
    for (k, b) in BERNOULLI.iter().enumerate() {
        let next = b * factor * term;
        sum += next;
        if next.abs() < 1e-17 * sum.abs() {
            break;
        }
        let order = 2.0 * k as f64 + 1.0;
        factor *= (s + order) * (s + order + 1.0);
        term /= a * a;
    }
    sum
}

/// The derivative of [`digamma`]. At the negative integers it is large instead of infinite, as in PyTorch, because the sine of a
/// rounded multiple of pi is not 0.
pub fn trigamma(x: f64) -> f64 {
    if x < 0.5 {
        let fraction = x - x.round();
        let ratio = PI / (PI * if fraction == 0.0 { x } else { fraction }).sin();
        return ratio * ratio - trigamma(1.0 - x);
    }
    if x == f64::INFINITY { 0.0 } else { zeta(2.0, x) }
}

/// As [`trigamma`]; its values at the negative integers are those of sines in f32.
pub fn trigamma_f32(x: f32) -> f32 {
    if x < 0.5 {
        let ratio = std::f32::consts::PI / (std::f32::consts::PI * x).sin();
        return ratio * ratio - trigamma(1.0 - f64::from(x)) as f32;
    }
    trigamma(f64::from(x)) as f32
}

/// The derivative of order `n` of [`digamma`].
pub fn polygamma(n: u32, x: f64) -> f64 {
    if n < 2 {
        return if n == 0 { digamma(x) } else { trigamma(x) };
    }
    let sign = if n.is_multiple_of(2) { -1.0 } else { 1.0 };
    let order = f64::from(n) + 1.0;
    sign * libm::tgamma(order) * zeta(order, x)
}

/// The regularized lower incomplete gamma function `P(a, x)`; NaN where an argument is negative.
pub fn igamma(a: f64, x: f64) -> f64 {
    if !(x >= 0.0 && a >= 0.0) || a == f64::INFINITY && x == f64::INFINITY || a == 0.0 && x == 0.0 {
        return f64::NAN;
    }
    if a == 0.0 || x == f64::INFINITY {
        return 1.0;
    }
    if x == 0.0 || a == f64::INFINITY {
        return 0.0;
    }
    if below_mean(a, x) { series(a, x) } else { 1.0 - fraction(a, x) }
}

/// The regularized upper incomplete gamma function `Q(a, x)`; NaN where an argument is negative.
pub fn igammac(a: f64, x: f64) -> f64 {
    if !(x >= 0.0 && a >= 0.0) || a == f64::INFINITY && x == f64::INFINITY || a == 0.0 && x == 0.0 {
        return f64::NAN;
    }
    if a == 0.0 || x == f64::INFINITY {
        return 0.0;
    }
    if x == 0.0 || a == f64::INFINITY {
        return 1.0;
    }
    if below_mean(a, x) {
        // For small a and x, Q is the difference of numbers near one: it is found from what both lack.
        if a < 0.5 && x < 1.0 { upper_for_small(a, x) } else { 1.0 - series(a, x) }
    } else {
        fraction(a, x)
    }
}

/// Whether the series converges fast; above, the continued fraction does.
fn below_mean(a: f64, x: f64) -> bool {
    x < a + 1.0 && !(a < 0.5 && x > 1.0)
}

/// `x^a e^-x / Gamma(a + 1)`.
fn prefactor(a: f64, x: f64) -> f64 {
    if a < 10.0 {
        return (a * x.ln() - x - libm::lgamma(a + 1.0)).exp();
    }
    // With Stirling's formula, so that large terms do not cancel: exp(a (log(x / a) - x / a + 1)) / sqrt(2 pi a) / correction.
    let d = (x - a) / a;
    let square = 1.0 / (a * a);
    let correction = (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0))) / a;
    (a * log1p_minus(d, x / a) - correction).exp() / (2.0 * PI * a).sqrt()
}

/// `log(1 + d) - d` without cancellation; `ratio` is `1 + d`.
fn log1p_minus(d: f64, ratio: f64) -> f64 {
    if d.abs() > 0.5 {
        return ratio.ln() - d;
    }
    // With w = d / (2 + d), the logarithm is 2 atanh(w), and d is 2 w / (1 - w).
    let w = d / (2.0 + d);
    let square = w * w;
    let (mut sum, mut power) = (0.0, w * square);
    for k in 1..40 {
        let term = power / f64::from(2 * k + 1);
        sum += term;
        if term.abs() < 1e-18 * sum.abs() {
            break;
        }
        power *= square;
    }
    2.0 * sum - w * d
}

/// Terms after which a sum is accepted: enough for `a` up to 10^9.
const MAX_TERMS: usize = 400_000;

fn series(a: f64, x: f64) -> f64 {
    let (mut sum, mut term, mut k) = (1.0, 1.0, a);
    for _ in 0..MAX_TERMS {
        k += 1.0;
        term *= x / k;
        sum += term;
        if term <= 1e-17 * sum {
            break;
        }
    }
    sum * prefactor(a, x)
}

/// The continued fraction of `Q`, by Lentz's method.
fn fraction(a: f64, x: f64) -> f64 {
    const LEAST: f64 = 1e-300;
    let mut b = x + 1.0 - a;
    let mut c = 1.0 / LEAST;
    let mut d = 1.0 / b;
    let mut h = d;
    for i in 1..MAX_TERMS {
        let i = i as f64;
        let numerator = -i * (i - a);
        b += 2.0;
        d = numerator * d + b;
        d = if d.abs() < LEAST { LEAST } else { d };
        c = b + numerator / c;
        c = if c.abs() < LEAST { LEAST } else { c };
        d = 1.0 / d;
        let step = d * c;
        h *= step;
        if (step - 1.0).abs() < 1e-16 {
            break;
        }
    }
    // x^a e^-x / Gamma(a) is a times the prefactor.
    prefactor(a, x) * a * h
}

/// `Q` for small `a` and `x`: `1 - x^a / Gamma(1 + a)` and the rest of the series of `P`, each without cancellation.
fn upper_for_small(a: f64, x: f64) -> f64 {
    let power = a * x.ln();
    let head = -(power - libm::lgamma(1.0 + a)).exp_m1();
    let (mut sum, mut factorial) = (0.0, 1.0);
    for k in 1..60 {
        let k = f64::from(k);
        factorial *= -x / k;
        let term = factorial / (a + k);
        sum += term;
        if term.abs() < 1e-18 * sum.abs() {
            break;
        }
    }
    head - (power - libm::lgamma(a)).exp() * sum
}
