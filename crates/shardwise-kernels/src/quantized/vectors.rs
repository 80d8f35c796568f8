//! Vectors of one instruction set, as the inner loop of a product with blocks needs them.

/// Elements that are decoded and multiplied at a time.
pub(super) const HALF: usize = 16;
/// Sums of products that are kept apart: the same number on every instruction set, for the same bits.
pub(super) const LANES: usize = 8;

/// Registers of 16 bytes, and of 8 sums.
///
/// Methods are `#[inline(always)]` and compile to few instructions inside a function with the target features of the
/// registers. Integers are exact, and f32 is rounded at the same places, so that all instruction sets give the same bits.
///
/// # Safety
/// All methods require that the processor has the instructions of the registers.
pub(super) trait Vectors {
    type Bytes: Copy;
    type Integers: Copy;
    type Floats: Copy;
    /// Two f32.
    type Pair: Copy;

    /// The first 16 bytes.
    unsafe fn load(from: &[u8]) -> Self::Bytes;
    /// In each byte the bits of `mask` after a shift to the right by `shift` places.
    unsafe fn field(bytes: Self::Bytes, shift: usize, mask: u8) -> Self::Bytes;
    /// `value` in each byte whose bit of `bits` is set, 0 in each byte whose bit is not set.
    unsafe fn where_set(bits: u16, value: u8) -> Self::Bytes;
    /// Each byte times a power of two, of which no bit is lost.
    unsafe fn shift_left(bytes: Self::Bytes, shift: usize) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn subtract(bytes: Self::Bytes, from_each: u8) -> Self::Bytes;
    /// Products of signed bytes and the first 16 elements of `x`, summed in pairs of neighbours.
    unsafe fn dot(bytes: Self::Bytes, x: &[i16]) -> Self::Integers;
    unsafe fn add(a: Self::Integers, b: Self::Integers) -> Self::Integers;
    unsafe fn zero() -> Self::Floats;
    /// `sums + scale * integers`, rounded once.
    unsafe fn add_scaled(sums: Self::Floats, scale: f32, integers: Self::Integers) -> Self::Floats;
    unsafe fn lanes(sums: Self::Floats) -> [f32; LANES];
    /// Two half floats, the first one in the lower bits.
    unsafe fn halves(bits: u32) -> Self::Pair;
    unsafe fn pair(values: [f32; 2]) -> Self::Pair;
    unsafe fn values(pair: Self::Pair) -> [f32; 2];
    unsafe fn multiply_pairs(a: Self::Pair, b: Self::Pair) -> Self::Pair;
    unsafe fn add_pairs(a: Self::Pair, b: Self::Pair) -> Self::Pair;
}

/// Arrays, for any processor.
pub(super) struct Arrays;

impl Vectors for Arrays {
    type Bytes = [u8; HALF];
    type Integers = [i32; LANES];
    type Floats = [f32; LANES];
    type Pair = [f32; 2];

    #[inline(always)]
    unsafe fn load(from: &[u8]) -> [u8; HALF] {
        let mut bytes = [0; HALF];
        bytes.copy_from_slice(&from[..HALF]);
        bytes
    }

    #[inline(always)]
    unsafe fn field(bytes: [u8; HALF], shift: usize, mask: u8) -> [u8; HALF] {
        bytes.map(|byte| byte >> shift & mask)
    }

    #[inline(always)]
    unsafe fn where_set(bits: u16, value: u8) -> [u8; HALF] {
        std::array::from_fn(|i| if bits >> i & 1 == 1 { value } else { 0 })
    }

    #[inline(always)]
    unsafe fn shift_left(bytes: [u8; HALF], shift: usize) -> [u8; HALF] {
        bytes.map(|byte| byte << shift)
    }

    #[inline(always)]
    unsafe fn or(a: [u8; HALF], b: [u8; HALF]) -> [u8; HALF] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn subtract(bytes: [u8; HALF], from_each: u8) -> [u8; HALF] {
        bytes.map(|byte| byte.wrapping_sub(from_each))
    }

    #[inline(always)]
    unsafe fn dot(bytes: [u8; HALF], x: &[i16]) -> [i32; LANES] {
        let x = &x[..HALF];
        let product = |i: usize| i32::from(bytes[i].cast_signed()) * i32::from(x[i]);
        std::array::from_fn(|lane| product(2 * lane) + product(2 * lane + 1))
    }

    #[inline(always)]
    unsafe fn add(a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }

    #[inline(always)]
    unsafe fn zero() -> [f32; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn add_scaled(sums: [f32; LANES], scale: f32, integers: [i32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|lane| scale.mul_add(integers[lane] as f32, sums[lane]))
    }

    #[inline(always)]
    unsafe fn lanes(sums: [f32; LANES]) -> [f32; LANES] {
        sums
    }

    #[inline(always)]
    unsafe fn halves(bits: u32) -> [f32; 2] {
        [half(bits & 0xffff), half(bits >> 16)]
    }

    #[inline(always)]
    unsafe fn pair(values: [f32; 2]) -> [f32; 2] {
        values
    }

    #[inline(always)]
    unsafe fn values(pair: [f32; 2]) -> [f32; 2] {
        pair
    }

    #[inline(always)]
    unsafe fn multiply_pairs(a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
        [a[0] * b[0], a[1] * b[1]]
    }

    #[inline(always)]
    unsafe fn add_pairs(a: [f32; 2], b: [f32; 2]) -> [f32; 2] {
        [a[0] + b[0], a[1] + b[1]]
    }
}

/// A half float. Not the `half` crate's conversion, which asks for the instructions of the processor at every call.
#[inline(always)]
fn half(bits: u32) -> f32 {
    let magnitude = (bits & 0x7fff) << 13;
    // 2^112 moves the exponent of a half float to that of an f32; subnormal ones become normal by the product.
    let finite = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000);
    let value = if bits & 0x7c00 == 0x7c00 { f32::from_bits(magnitude | 0x7f80_0000) } else { finite };
    f32::from_bits(value.to_bits() | (bits & 0x8000) << 16)
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Avx2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{HALF, LANES, Vectors};
    use core::arch::x86_64::*;

    /// AVX2 with F16C and FMA, which processors with AVX-512 use as well: a group of 32 elements has no work for longer registers.
    pub(in super::super) struct Avx2;

    // SAFETY, for all of them: the processor has the instructions, as the trait requires, and slices are as long as what is
    // read from them.
    impl Vectors for Avx2 {
        type Bytes = __m128i;
        type Integers = __m256i;
        type Floats = __m256;
        /// The lower half of a register.
        type Pair = __m128;

        #[inline(always)]
        unsafe fn load(from: &[u8]) -> __m128i {
            // SAFETY: see above.
            unsafe { _mm_loadu_si128(from[..HALF].as_ptr().cast()) }
        }

        #[inline(always)]
        unsafe fn field(bytes: __m128i, shift: usize, mask: u8) -> __m128i {
            // Bits of the neighbour that are shifted into a byte are above those of a mask that the byte could have.
            // SAFETY: see above.
            unsafe {
                let shifted = _mm_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32));
                _mm_and_si128(shifted, _mm_set1_epi8(mask.cast_signed()))
            }
        }

        #[inline(always)]
        unsafe fn where_set(bits: u16, value: u8) -> __m128i {
            // SAFETY: see above.
            unsafe {
                let spread = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
                let bytes = _mm_shuffle_epi8(_mm_cvtsi32_si128(i32::from(bits)), spread);
                let of_lane = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 1, 2, 4, 8, 16, 32, 64, -128);
                let is_set = _mm_cmpeq_epi8(_mm_and_si128(bytes, of_lane), of_lane);
                _mm_and_si128(is_set, _mm_set1_epi8(value.cast_signed()))
            }
        }

        #[inline(always)]
        unsafe fn shift_left(bytes: __m128i, shift: usize) -> __m128i {
            // SAFETY: see above.
            unsafe { _mm_sll_epi16(bytes, _mm_cvtsi32_si128(shift as i32)) }
        }

        #[inline(always)]
        unsafe fn or(a: __m128i, b: __m128i) -> __m128i {
            // SAFETY: see above.
            unsafe { _mm_or_si128(a, b) }
        }

        #[inline(always)]
        unsafe fn subtract(bytes: __m128i, from_each: u8) -> __m128i {
            // SAFETY: see above.
            unsafe { _mm_sub_epi8(bytes, _mm_set1_epi8(from_each.cast_signed())) }
        }

        #[inline(always)]
        unsafe fn dot(bytes: __m128i, x: &[i16]) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), _mm256_loadu_si256(x[..HALF].as_ptr().cast())) }
        }

        #[inline(always)]
        unsafe fn add(a: __m256i, b: __m256i) -> __m256i {
            // SAFETY: see above.
            unsafe { _mm256_add_epi32(a, b) }
        }

        #[inline(always)]
        unsafe fn zero() -> __m256 {
            // SAFETY: see above.
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn add_scaled(sums: __m256, scale: f32, integers: __m256i) -> __m256 {
            // SAFETY: see above.
            unsafe { _mm256_fmadd_ps(_mm256_set1_ps(scale), _mm256_cvtepi32_ps(integers), sums) }
        }

        #[inline(always)]
        unsafe fn lanes(sums: __m256) -> [f32; LANES] {
            let mut lanes = [0.0; LANES];
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sums) };
            lanes
        }

        #[inline(always)]
        unsafe fn halves(bits: u32) -> __m128 {
            // SAFETY: see above.
            unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(bits.cast_signed())) }
        }

        #[inline(always)]
        unsafe fn pair(values: [f32; 2]) -> __m128 {
            // SAFETY: see above.
            unsafe { _mm_castsi128_ps(_mm_loadl_epi64(values.as_ptr().cast())) }
        }

        #[inline(always)]
        unsafe fn values(pair: __m128) -> [f32; 2] {
            // SAFETY: see above.
            unsafe { [_mm_cvtss_f32(pair), _mm_cvtss_f32(_mm_movehdup_ps(pair))] }
        }

        #[inline(always)]
        unsafe fn multiply_pairs(a: __m128, b: __m128) -> __m128 {
            // SAFETY: see above.
            unsafe { _mm_mul_ps(a, b) }
        }

        #[inline(always)]
        unsafe fn add_pairs(a: __m128, b: __m128) -> __m128 {
            // SAFETY: see above.
            unsafe { _mm_add_ps(a, b) }
        }
    }
}
