//! Sine, cosine and tangent, with a range reduction that is exact enough for the largest numbers.

use super::exponential::ROUNDER;
use super::wide::ROUNDER as ROUNDER_WIDE;
use super::{fma, polynomial, polynomial_wide};

/// Whether an angle is small enough for the shorter reduction.
#[inline(always)]
pub fn is_few_turns(x: f32) -> bool {
    x.abs() <= 30_000.0
}

/// An angle less a multiple of pi/2: `rest + low + n pi/2`, of n the low bits.
#[derive(Clone, Copy)]
struct Reduced {
    rest: f32,
    /// What the rest rounds off.
    low: f32,
    n: i32,
}

impl Reduced {
    #[inline(always)]
    fn new(rest: f64, n: i32) -> Self {
        let rounded = rest as f32;
        Reduced { rest: rounded, low: (rest - f64::from(rounded)) as f32, n }
    }
}

/// Subtracts the nearest multiple of pi/2, where [`is_few_turns`] holds.
#[inline(always)]
fn reduce_few_turns<const FMA: bool>(x: f32) -> Reduced {
    if FMA {
        let rounded = fma::<FMA>(x, std::f32::consts::FRAC_2_PI, ROUNDER);
        let n = rounded - ROUNDER;
        // pi/2 in three parts; the products are exact inside the fused operations.
        let first = fma::<FMA>(n, -f32::from_bits(0x3fc9_0fd8), x);
        let second = fma::<FMA>(n, -3.139_164_7e-7, first);
        let rest = fma::<FMA>(n, -5.390_302_5e-15, second);
        // The difference is exact unless the angle is near a multiple, where the rest has digits enough.
        let low = fma::<FMA>(n, -3.139_164_7e-7, first - second);
        return Reduced { rest, low: if rest.abs() > 0.03125 { low } else { 0.0 }, n: rounded.to_bits() as i32 };
    }
    // The first part has 33 bits, so that its product with n is exact.
    let wide = f64::from(x);
    let rounded = wide * std::f64::consts::FRAC_2_PI + ROUNDER_WIDE;
    let n = rounded - ROUNDER_WIDE;
    let rest = (wide - n * 1.570_796_326_734_125_6) - n * 6.077_100_506_506_192e-11;
    Reduced::new(rest, rounded.to_bits() as i32)
}

/// Binary digits of 2/pi after the point.
const TWO_OVER_PI: [u64; 4] =
    [0xa2f9_836e_4e44_1529, 0xfc27_57d1_f534_ddc0, 0xdb62_9599_3c43_9041, 0xfe51_63ab_debb_c561];

/// `count` binary digits of 2/pi from `first` on, as an integer.
const fn digits(first: i32, count: i32) -> u64 {
    let mut value = 0;
    let mut i = first;
    while i < first + count {
        let digit = if i < 0 { 0 } else { TWO_OVER_PI[i as usize / 64] >> (63 - i % 64) & 1 };
        value = value << 1 | digit;
        i += 1;
    }
    value
}

/// For every exponent of f32 (with its bias), the weight of the last mantissa digit in quarter turns, modulo 4. The first part
/// has 29 digits, so that its product with a mantissa of 24 is exact; the second has the next 53.
static QUARTER_TURNS: [[f64; 2]; 256] = {
    let mut table = [[0.0; 2]; 256];
    let mut exponent = 0;
    while exponent < 255 {
        // The digit with weight 2 is the first one that counts modulo 4. Small exponents are never looked up.
        let first = exponent as i32 - 150 - 2;
        if first > -64 {
            table[exponent] = [
                digits(first, 29) as f64 / (1u64 << 27) as f64,
                digits(first + 29, 53) as f64 / (1u64 << 40) as f64 / (1u64 << 40) as f64,
            ];
        }
        exponent += 1;
    }
    // Infinities and NaN.
    table[255] = [f64::NAN; 2];
    table
};

/// As [`reduce_few_turns`], for |x| >= 1 (Payne and Hanek).
#[inline(always)]
fn reduce_many_turns(x: f32) -> Reduced {
    let bits = x.to_bits();
    let [high, low] = QUARTER_TURNS[(bits >> 23 & 0xff) as usize];
    let size = f64::from((bits & 0x007f_ffff | 0x0080_0000) as i32);
    let mantissa = if x < 0.0 { -size } else { size };
    let turns = mantissa * high;
    let first = turns + ROUNDER_WIDE;
    let rest = (turns - (first - ROUNDER_WIDE)) + mantissa * low;
    let second = rest + ROUNDER_WIDE;
    let rest = rest - (second - ROUNDER_WIDE);
    let n = (first.to_bits() as i32).wrapping_add(second.to_bits() as i32);
    Reduced::new(rest * std::f64::consts::FRAC_PI_2, n)
}

#[inline(always)]
fn reduce<const FMA: bool>(x: f32) -> Reduced {
    let (few, many) = (reduce_few_turns::<FMA>(x), reduce_many_turns(x));
    let near = is_few_turns(x);
    Reduced {
        rest: if near { few.rest } else { many.rest },
        low: if near { few.low } else { many.low },
        n: if near { few.n } else { many.n },
    }
}

/// The sine of an angle, after adding quarter turns.
#[inline(always)]
fn sine<const FMA: bool>(angle: Reduced, quarters: i32) -> f32 {
    let (rest, n) = (angle.rest, angle.n.wrapping_add(quarters));
    // |rest| <= pi/4
    let square = rest * rest;
    // Adding zero turns a negative zero into a positive one; then the sum below has the sign of `rest`.
    let cube = fma::<FMA>(square, rest, 0.0);
    let p = polynomial::<FMA, 4>(square, [2.865_679_6e-6, -1.985_599_2e-4, 8.333_386e-3, -0.166_666_67]);
    let sine = fma::<FMA>(cube, p, rest);
    let p = polynomial::<FMA, 4>(square, [2.446_770_7e-5, -1.388_773e-3, 4.166_665_7e-2, -0.5]);
    let cosine = fma::<FMA>(square, p, 1.0);
    let value = if n & 1 == 0 { sine } else { cosine };
    f32::from_bits(value.to_bits() ^ (n as u32 & 2) << 30)
}

/// The tangent of an angle.
#[inline(always)]
fn tangent<const FMA: bool>(angle: Reduced) -> f32 {
    // |rest| <= pi/4
    const COEFFICIENTS: [f32; 7] =
        [4.385_734e-3, 7.095_394e-5, 1.085_000_7e-2, 2.127_688_2e-2, 5.406_091_5e-2, 0.133_326_55, 0.333_333_5];
    let Reduced { rest, low, n } = angle;
    if FMA {
        let square = rest * rest;
        let p = polynomial::<FMA, 7>(square, COEFFICIENTS);
        // The derivative is about 1 + rest^2.
        let tail = fma::<FMA>(square * rest, p, fma::<FMA>(low, square, low));
        // A negative zero stays one.
        let tangent = if rest == 0.0 { rest } else { rest + tail };
        let lost = tail - (tangent - rest);
        // -1 / (tangent + lost), by one step of Newton's method.
        let inverse = -1.0 / tangent;
        let residual = fma::<FMA>(inverse, lost, fma::<FMA>(inverse, tangent, 1.0));
        let inverse = fma::<FMA>(inverse, residual, inverse);
        return if n & 1 == 0 { tangent } else { inverse };
    }
    let rest = f64::from(rest) + f64::from(low);
    let square = rest * rest;
    let p = polynomial_wide::<FMA, 7>(square, COEFFICIENTS.map(f64::from));
    let tangent = if rest == 0.0 { f64::from(angle.rest) } else { rest + square * rest * p };
    (if n & 1 == 0 { tangent } else { -1.0 / tangent }) as f32
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident, $near:ident: |$angle:ident| $value:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<const FMA: bool>(x: f32) -> f32 {
            let $angle = reduce::<FMA>(x);
            $value
        }

        /// The same function where [`is_few_turns`] holds.
        #[inline(always)]
        pub fn $near<const FMA: bool>(x: f32) -> f32 {
            let $angle = reduce_few_turns::<FMA>(x);
            $value
        }
    )*};
}

functions! {
    /// Sine.
    sin, sin_near: |angle| sine::<FMA>(angle, 0);
    /// Cosine.
    cos, cos_near: |angle| sine::<FMA>(angle, 1);
    /// Tangent.
    tan, tan_near: |angle| tangent::<FMA>(angle);
}
