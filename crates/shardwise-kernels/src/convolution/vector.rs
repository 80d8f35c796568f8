//! Vectors of numbers in registers, for tiles whose accumulators the compiler does not keep in registers as arrays.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256d, __m512, __m512d, _mm256_fmadd_pd, _mm256_fmadd_ps, _mm256_loadu_pd, _mm256_loadu_ps,
    _mm256_set1_pd, _mm256_set1_ps, _mm256_storeu_pd, _mm256_storeu_ps, _mm512_fmadd_pd, _mm512_fmadd_ps,
    _mm512_loadu_pd, _mm512_loadu_ps, _mm512_reduce_add_pd, _mm512_reduce_add_ps, _mm512_set1_pd, _mm512_set1_ps,
    _mm512_storeu_pd, _mm512_storeu_ps,
};

use super::ConvNumber;

/// A vector of numbers.
///
/// # Safety
/// Methods run on a processor that has the instructions of the type, in functions that are compiled for them.
pub(super) unsafe trait Lanes: Copy {
    type Item: ConvNumber;
    const COUNT: usize;

    unsafe fn splat(x: Self::Item) -> Self;
    unsafe fn load(from: *const Self::Item) -> Self;
    unsafe fn store(self, to: *mut Self::Item);
    /// `self + a * b`.
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self;

    /// Adds the sums of the lanes of `count` stored vectors to the numbers at `out`.
    ///
    /// Reads them from memory: lanes of 256 bits have 16 registers only, so that adding them inside the loop of a tile would move
    /// its accumulators to memory.
    unsafe fn add_sums(vectors: *const Self::Item, count: usize, out: *mut Self::Item);
}

/// The sum of the lanes of a vector, as a tree.
#[inline(always)]
fn tree<T: ConvNumber, const L: usize>(mut lanes: [T; L]) -> T {
    let mut half = L / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] = lanes[l].plus(lanes[l + half]);
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(target_arch = "x86_64")]
macro_rules! vectors {
    ($($V:ident of $count:literal $T:ident, $features:literal:
        $splat:ident, $load:ident, $store:ident, $multiply_add:ident, $add_sums:ident |$lanes:ident| $sum:expr;)*) => {$(
        // SAFETY: the methods are those of this type.
        unsafe impl Lanes for $V {
            type Item = $T;
            const COUNT: usize = $count;

            #[inline(always)]
            unsafe fn splat(x: $T) -> Self {
                // SAFETY: the contract of the trait.
                unsafe { $splat(x) }
            }

            #[inline(always)]
            unsafe fn load(from: *const $T) -> Self {
                // SAFETY: the contract of the trait; the caller passes as many numbers.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut $T) {
                // SAFETY: as above.
                unsafe { $store(to, self) }
            }

            #[inline(always)]
            unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
                // SAFETY: the contract of the trait.
                unsafe { $multiply_add(a, b, self) }
            }

            unsafe fn add_sums(vectors: *const $T, count: usize, out: *mut $T) {
                // SAFETY: the contract of the trait.
                unsafe { $add_sums(vectors, count, out) }
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $add_sums(vectors: *const $T, count: usize, out: *mut $T) {
            for i in 0..count {
                // SAFETY: that of the caller.
                unsafe {
                    let $lanes = vectors.add(i * $count);
                    *out.add(i) += $sum;
                }
            }
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
vectors! {
    __m512 of 16 f32, "avx512f": _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, add_sums_m512
        |lanes| _mm512_reduce_add_ps(_mm512_loadu_ps(lanes));
    __m512d of 8 f64, "avx512f": _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_fmadd_pd, add_sums_m512d
        |lanes| _mm512_reduce_add_pd(_mm512_loadu_pd(lanes));
    __m256 of 8 f32, "avx2,fma": _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, add_sums_m256
        |lanes| tree(lanes.cast::<[f32; 8]>().read_unaligned());
    __m256d of 4 f64, "avx2,fma": _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_fmadd_pd, add_sums_m256d
        |lanes| tree(lanes.cast::<[f64; 4]>().read_unaligned());
}

/// Eight numbers in vectors of the compiler's choice.
#[derive(Clone, Copy)]
pub(super) struct AnyLanes<T, const FMA: bool>([T; 8]);

// SAFETY: the methods need no instructions beyond the baseline.
unsafe impl<T: ConvNumber, const FMA: bool> Lanes for AnyLanes<T, FMA> {
    type Item = T;
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        AnyLanes([x; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller passes eight numbers.
        AnyLanes(unsafe { from.cast::<[T; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: as above.
        unsafe { to.cast::<[T; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn multiply_add(mut self, a: Self, b: Self) -> Self {
        for l in 0..8 {
            self.0[l] = self.0[l].multiply_add::<FMA>(a.0[l], b.0[l]);
        }
        self
    }

    #[inline(always)]
    unsafe fn add_sums(vectors: *const T, count: usize, out: *mut T) {
        for i in 0..count {
            // SAFETY: that of the caller.
            unsafe { *out.add(i) = (*out.add(i)).plus(tree(vectors.add(i * 8).cast::<[T; 8]>().read_unaligned())) };
        }
    }
}
