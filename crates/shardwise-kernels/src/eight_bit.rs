//! f8 (E4M3 without infinities, PyTorch's `float8_e4m3fn`): a type in which tensors are stored, moved and multiplied, and otherwise not
//! computed with.

use float8::F8E4M3;

/// What an f32 with the exponent and the digits of an f8 is multiplied by to get its value: the biases differ by 120.
const BIAS: f32 = f32::from_bits((127 + 120) << 23);

/// The largest number, and its bits.
const LARGEST: (f32, u8) = (448.0, 0x7e);

/// Converts to f32, which holds every f8.
#[inline(always)]
pub(super) fn f8_to_f32(x: F8E4M3) -> f32 {
    let bits = u32::from(x.to_bits());
    let (sign, magnitude) = ((bits & 0x80) << 24, bits & 0x7f);
    // The product is exact for subnormal numbers too.
    let value = f32::from_bits(magnitude << 20) * BIAS;
    let value = if magnitude == 0x7f { f32::NAN } else { value };
    f32::from_bits(value.to_bits() | sign)
}

/// Rounds to the nearest f8, ties to even. As in PyTorch, larger numbers than 448 and infinities become 448.
#[inline(always)]
pub(super) fn f32_to_f8(x: f32) -> F8E4M3 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let size = x.abs();
    let bits = if size < 2f32.powi(-6) {
        // Subnormal numbers are multiples of 2^-9; 8 of them are the smallest normal number.
        (size * 512.0).round_ties_even() as u8
    } else if size < LARGEST.0 {
        // Half of the last of three digits is added, less one bit where that digit is even.
        let bits = size.to_bits();
        let rounded = bits + 0x7_ffff + (bits >> 20 & 1);
        ((rounded >> 20) - (120 << 3)) as u8
    } else if size.is_nan() {
        0x7f
    } else {
        LARGEST.1
    };
    F8E4M3::from_bits(sign | bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of an f8 by its definition.
    fn defined(bits: u8) -> f64 {
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, digits) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
        match exponent {
            15 if digits == 7.0 => f64::NAN,
            0 => sign * digits / 8.0 * 2f64.powi(-6),
            e => sign * (1.0 + digits / 8.0) * 2f64.powi(e - 7),
        }
    }

    #[test]
    fn every_value_converts_as_defined_and_back() {
        for bits in 0..=255u8 {
            let x = f8_to_f32(F8E4M3::from_bits(bits));
            let expected = defined(bits);
            assert!(f64::from(x) == expected || x.is_nan() && expected.is_nan(), "{bits:#x}: {x}");
            assert_eq!(x.is_sign_negative(), bits & 0x80 != 0);
            assert_eq!(f32_to_f8(x).to_bits(), bits, "{x}");
        }
    }

    #[test]
    fn numbers_between_round_to_the_nearest_and_ties_to_even() {
        for bits in 0..0x7e_u8 {
            let (low, high) = (defined(bits) as f32, defined(bits + 1) as f32);
            let middle = (low + high) / 2.0;
            let even = if bits & 1 == 0 { bits } else { bits + 1 };
            let near = [(middle, even), (middle.next_down(), bits), (middle.next_up(), bits + 1)];
            for (x, expected) in near {
                assert_eq!(f32_to_f8(x).to_bits(), expected, "{x}");
                assert_eq!(f32_to_f8(-x).to_bits(), expected | 0x80, "-{x}");
            }
        }
        let borders = [(464.0, 0x7e), (1e9, 0x7e), (-1e9, 0xfe), (f32::INFINITY, 0x7e), (1e-30, 0), (-1e-30, 0x80)];
        for (x, expected) in borders {
            assert_eq!(f32_to_f8(x).to_bits(), expected, "{x}");
        }
        assert_eq!(f32_to_f8(f32::NAN).to_bits() & 0x7f, 0x7f);
    }
}
