//! Vectors of one instruction set, as the inner loop of a product needs them.

/// A register of elements.
///
/// Methods are `#[inline(always)]` and compile to single instructions inside a function with the target features of the
/// register.
///
/// # Safety
/// All methods require that the processor has the instructions of the register; `load` and `store` access [`COUNT`]
/// elements from an address of any alignment.
///
/// [`COUNT`]: Register::COUNT
pub(super) trait Register: Copy {
    type Element: Copy;

    /// Elements in a register.
    const COUNT: usize;

    /// Rows of a full tile: 8, or 6 where that many rows of three registers would not fit.
    const ROWS: usize;

    /// Registers per row of a full tile. `ROWS` of them leave room for a row of operands and a factor: one sum too many, and the
    /// inner loop waits for memory instead of the multiplier.
    const VECTORS: usize;

    /// Sums that fit the registers together with their operands.
    const SUMS: usize = Self::ROWS * Self::VECTORS;

    /// Whether the instruction set includes AVX2 and F16C.
    const HAS_AVX2: bool;

    unsafe fn zero() -> Self;
    unsafe fn splat(x: Self::Element) -> Self;
    unsafe fn load(from: *const Self::Element) -> Self;
    unsafe fn store(self, to: *mut Self::Element);
    unsafe fn add(self, other: Self) -> Self;
    /// A register of f32 from its parts of eight elements, of which `part` returns one by number.
    #[cfg(target_arch = "x86_64")]
    unsafe fn from_eights(part: impl Fn(usize) -> core::arch::x86_64::__m256) -> Self;
    /// `self * factor + summand`, rounded once where the instruction set has fused multiply-add.
    unsafe fn mul_add(self, factor: Self, summand: Self) -> Self;
}

/// Elements in the longest register.
pub(super) const MAX_LANES: usize = 16;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{F32x8, F32x16, F64x4, F64x8};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Register;
    use core::arch::x86_64::*;

    macro_rules! registers {
        ($($Name:ident: $Register:ty, $T:ty, $count:expr, $rows:expr, $vectors:expr, $zero:ident, $splat:ident, $load:ident, $store:ident, $add:ident, $fma:ident, $eights:ident;)*) => {$(
            #[derive(Clone, Copy)]
            pub(in super::super) struct $Name($Register);

            impl Register for $Name {
                type Element = $T;
                const COUNT: usize = $count;
                const ROWS: usize = $rows;
                const VECTORS: usize = $vectors;
                const HAS_AVX2: bool = true;

                #[inline(always)]
                unsafe fn zero() -> Self {
                    // SAFETY: the processor has the instruction, as the trait requires.
                    $Name(unsafe { $zero() })
                }
                #[inline(always)]
                unsafe fn splat(x: $T) -> Self {
                    // SAFETY: as above.
                    $Name(unsafe { $splat(x) })
                }
                #[inline(always)]
                unsafe fn load(from: *const $T) -> Self {
                    // SAFETY: as above; the elements are readable.
                    $Name(unsafe { $load(from) })
                }
                #[inline(always)]
                unsafe fn store(self, to: *mut $T) {
                    // SAFETY: as above; the elements can be written.
                    unsafe { $store(to, self.0) }
                }
                #[inline(always)]
                unsafe fn add(self, other: Self) -> Self {
                    // SAFETY: as above.
                    $Name(unsafe { $add(self.0, other.0) })
                }
                #[inline(always)]
                unsafe fn from_eights(part: impl Fn(usize) -> __m256) -> Self {
                    // SAFETY: as above.
                    $Name(unsafe { $eights(part) })
                }
                #[inline(always)]
                unsafe fn mul_add(self, factor: Self, summand: Self) -> Self {
                    // SAFETY: as above.
                    $Name(unsafe { $fma(self.0, factor.0, summand.0) })
                }
            }
        )*};
    }
    /// # Safety
    /// None; a function like the next one.
    #[inline(always)]
    unsafe fn one_eight(part: impl Fn(usize) -> __m256) -> __m256 {
        part(0)
    }

    /// # Safety
    /// The processor has AVX-512 with DQ.
    #[inline(always)]
    unsafe fn two_eights(part: impl Fn(usize) -> __m256) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_insertf32x8::<1>(_mm512_castps256_ps512(part(0)), part(1)) }
    }

    /// # Safety
    /// None; a function like those before.
    #[inline(always)]
    unsafe fn no_eights<R>(_: impl Fn(usize) -> __m256) -> R {
        unreachable!("no other type is multiplied in f64")
    }

    // 24 sums, 3 columns and a factor are 28 of the 32 registers of AVX-512; 12 sums, 2 columns and a factor 15 of the 16 of AVX2.
    registers! {
        F32x16: __m512, f32, 16, 8, 3, _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps, two_eights;
        F64x8: __m512d, f64, 8, 8, 3, _mm512_setzero_pd, _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_fmadd_pd, no_eights;
        F32x8: __m256, f32, 8, 6, 2, _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_fmadd_ps, one_eight;
        F64x4: __m256d, f64, 4, 6, 2, _mm256_setzero_pd, _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_fmadd_pd, no_eights;
    }
}

/// Four elements without instructions of a particular set. On x86-64 with a rounding between multiplication and addition: a fused
/// one would be a library call on its baseline.
#[derive(Clone, Copy)]
pub(super) struct Plain<T>([T; 4]);

macro_rules! plain {
    ($($T:ty),*) => {$(
        impl Register for Plain<$T> {
            type Element = $T;
            const COUNT: usize = 4;
            // NEON has 32 registers. On x86-64 a product takes a register of its own before it is added.
            const ROWS: usize = if cfg!(target_arch = "aarch64") { 8 } else { 4 };
            const VECTORS: usize = if cfg!(target_arch = "aarch64") { 3 } else { 2 };
            const HAS_AVX2: bool = false;

            #[inline(always)]
            unsafe fn zero() -> Self {
                Plain([0.0; 4])
            }
            #[inline(always)]
            unsafe fn splat(x: $T) -> Self {
                Plain([x; 4])
            }
            #[inline(always)]
            unsafe fn load(from: *const $T) -> Self {
                // SAFETY: the elements are readable, as the trait requires.
                Plain(unsafe { from.cast::<[$T; 4]>().read_unaligned() })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $T) {
                // SAFETY: the elements can be written, as the trait requires.
                unsafe { to.cast::<[$T; 4]>().write_unaligned(self.0) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                Plain(std::array::from_fn(|i| self.0[i] + other.0[i]))
            }
            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn from_eights(_: impl Fn(usize) -> core::arch::x86_64::__m256) -> Self {
                unreachable!("the baseline has no AVX2")
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, summand: Self) -> Self {
                // NEON has fused multiply-add, as the other kernels assume.
                Plain(std::array::from_fn(|i| match cfg!(target_arch = "aarch64") {
                    true => self.0[i].mul_add(factor.0[i], summand.0[i]),
                    false => self.0[i] * factor.0[i] + summand.0[i],
                }))
            }
        }
    )*};
}
plain!(f32, f64);
