//! Inverse sine and tangent.

use std::f32::consts::FRAC_PI_2;
use std::f64::consts::{FRAC_PI_2 as FRAC_PI_2_WIDE, FRAC_PI_4, PI, SQRT_2};

use super::{fma, polynomial, polynomial_wide};

/// pi/2 minus its value in f32.
const FRAC_PI_2_LOW: f32 = -4.371_139e-8;

/// Inverse sine.
#[inline(always)]
pub fn asin<const FMA: bool>(x: f32) -> f32 {
    let size = x.abs();
    // Below this 2 asin(..) would exceed 1 and round twice as coarsely as the result.
    let large = size > 0.57;
    // asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)); below -1 and above 1 the root is NaN.
    let half = 0.5 * (1.0 - size);
    let square = if large { half } else { size * size };
    let root = if large { half.sqrt() } else { size };
    // |root| <= 0.57
    let p = polynomial::<FMA, 6>(
        square,
        [4.958_652e-2, 4.900_295e-3, 3.460_732_5e-2, 4.414_515_3e-2, 7.502_647_5e-2, 0.166_666_2],
    );
    let value = fma::<FMA>(square * root, p, root);
    let beyond = FRAC_PI_2 - (2.0 * value - FRAC_PI_2_LOW);
    (if large { beyond } else { value }).copysign(x)
}

/// Inverse tangent.
#[inline(always)]
pub fn atan<const FMA: bool>(x: f32) -> f32 {
    let size = x.abs();
    let large = size > 1.0;
    let root = if large { 1.0 / size } else { size };
    let square = root * root;
    // |root| <= 1
    let p = polynomial::<FMA, 9>(
        square,
        [
            -1.793_233_7e-3,
            1.091_286_4e-2,
            -3.117_459_2e-2,
            5.795_432e-2,
            -8.403_259e-2,
            0.109_521_2,
            -0.142_642_29,
            0.199_985_47,
            -0.333_333,
        ],
    );
    let value = fma::<FMA>(square * root, p, root);
    let beyond = FRAC_PI_2 - (value - FRAC_PI_2_LOW);
    (if large { beyond } else { value }).copysign(x)
}

/// The angle of the point `(x, y)`, from -pi to pi. Computed in f64, because quotient and sums would each round.
#[inline(always)]
pub fn atan2<const FMA: bool>(y: f32, x: f32) -> f32 {
    // An infinity counts as a number that is large enough compared with every f32, so that two of them have the quotient 1.
    let finite = |x: f32| if x.abs() == f32::INFINITY { 1e200 } else { f64::from(x.abs()) };
    let (a, b) = (finite(y), finite(x));
    let steep = a > b;
    let (low, high) = (if steep { b } else { a }, if steep { a } else { b });
    // Not zero, so that the quotient of two zeros is zero.
    let high = if high > 0.0 { high } else { 1.0 };
    // atan(t) = pi/4 + atan((t - 1) / (t + 1)) for t above tan(pi/8).
    let upper = low > (SQRT_2 - 1.0) * high;
    let t = (if upper { low - high } else { low }) / (if upper { low + high } else { high });
    let square = t * t;
    // |t| <= tan(pi/8)
    let p = polynomial_wide::<FMA, 6>(
        square,
        [
            4.743_824_877_995_512e-2,
            -8.476_164_053_006_033e-2,
            0.110_446_733_069_157_06,
            -0.142_820_063_202_683_06,
            0.199_999_038_592_214_6,
            -0.333_333_324_986_001_16,
        ],
    );
    let angle = t + t * square * p + if upper { FRAC_PI_4 } else { 0.0 };
    let angle = if steep { FRAC_PI_2_WIDE - angle } else { angle };
    let angle = if x.is_sign_negative() { PI - angle } else { angle };
    if x.is_nan() || y.is_nan() { f32::NAN } else { (angle as f32).copysign(y) }
}
