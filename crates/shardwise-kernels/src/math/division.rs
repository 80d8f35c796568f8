//! The remainder of a division.

/// Whether [`fmod_near`] may be used: the quotient has at most 28 bits, and no argument is infinite, NaN or a zero divisor.
#[inline(always)]
pub fn is_fmod_near(x: f32, y: f32) -> bool {
    (x / y).abs() < 268_435_456.0 && y.abs() < f32::INFINITY
}

/// The remainder of `x / y` with the sign of `x`, exact as C's `fmodf`, where [`is_fmod_near`] holds.
///
/// In f64 the quotient does not round up to an integer: it differs from one by at least a unit in the last place of `y`. So its
/// integer part is exact, and so are the product with 24 bits more and the difference.
#[inline(always)]
pub fn fmod_near(x: f32, y: f32) -> f32 {
    let (wide, by) = (f64::from(x), f64::from(y));
    ((wide - (wide / by).trunc() * by) as f32).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remainders_are_those_of_the_library() {
        let mut state = 7u64;
        let mut near = 0;
        for i in 0..2_000_000u32 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Any bits, and every other time numbers of similar size or multiples of each other.
            let (x, y) = (f32::from_bits(state as u32), f32::from_bits((state >> 32) as u32));
            let y = if i % 2 == 0 { f32::from_bits(y.to_bits() & 0x807f_ffff | x.to_bits() & 0x7f80_0000) } else { y };
            let x = if i % 4 == 0 { y * (i % 1000) as f32 } else { x };
            if is_fmod_near(x, y) {
                near += 1;
                assert_eq!(fmod_near(x, y).to_bits(), (x % y).to_bits(), "{x} and {y}");
            }
        }
        assert!(near > 1_000_000, "{near}");
        for (x, y) in
            [(1.0, 0.0), (f32::INFINITY, 1.0), (1.0, f32::INFINITY), (f32::NAN, 1.0), (1.0, f32::NAN), (1e38, 1.0)]
        {
            assert!(!is_fmod_near(x, y), "{x} and {y}");
        }
    }
}
