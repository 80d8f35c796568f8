//! Powers and the length of a vector, computed in f64.

use super::{fma_wide, wide};

/// `x` to the power of `y`, with the special cases of C's `powf`.
#[inline(always)]
pub fn pow<const FMA: bool>(x: f32, y: f64) -> f32 {
    let size = f64::from(x.abs());
    let log = wide::log::<FMA>(size);
    let log = if size == 0.0 { f64::NEG_INFINITY } else { log };
    let log = if size < f64::INFINITY { log } else { size };
    let exponent = if size == 1.0 { 0.0 } else { y * log };
    // Beyond these the result is zero or infinite in f32.
    let exponent = if exponent > 120.0 { 120.0 } else { exponent };
    let exponent = if exponent < -120.0 { -120.0 } else { exponent };
    let value = wide::exp::<FMA>(exponent) as f32;
    // Numbers of 2^51 and more are even integers or count as such.
    let small = y.abs() < 2_251_799_813_685_248.0;
    let rounded = y + wide::ROUNDER;
    let integer = !small || rounded - wide::ROUNDER == y;
    let odd = small && integer && rounded.to_bits() & 1 == 1;
    let value = if odd { value.copysign(x) } else { value };
    let value = if x < 0.0 && x > f32::NEG_INFINITY && !integer { f32::NAN } else { value };
    let value = if y.is_nan() { f32::NAN } else { value };
    if x == 1.0 || y == 0.0 { 1.0 } else { value }
}

/// `sqrt(x^2 + y^2)`, infinite if either argument is.
#[inline(always)]
pub fn hypot<const FMA: bool>(x: f32, y: f32) -> f32 {
    let (wide_x, wide_y) = (f64::from(x), f64::from(y));
    // The square of an f32 is exact in f64.
    let value = fma_wide::<FMA>(wide_x, wide_x, wide_y * wide_y).sqrt() as f32;
    if x.abs() == f32::INFINITY || y.abs() == f32::INFINITY { f32::INFINITY } else { value }
}
