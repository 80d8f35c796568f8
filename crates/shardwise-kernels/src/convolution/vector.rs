//! Vectors of numbers in registers, for tiles whose accumulators the compiler does not keep in registers as arrays.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256d, __m512, __m512d, _mm256_fmadd_pd, _mm256_fmadd_ps, _mm256_loadu_pd, _mm256_loadu_ps,
    _mm256_set1_pd, _mm256_set1_ps, _mm256_storeu_pd, _mm256_storeu_ps, _mm512_fmadd_pd, _mm512_fmadd_ps,
    _mm512_loadu_pd, _mm512_loadu_ps, _mm512_maskz_loadu_pd, _mm512_maskz_loadu_ps, _mm512_reduce_add_pd,
    _mm512_reduce_add_ps, _mm512_set1_pd, _mm512_set1_ps, _mm512_storeu_pd, _mm512_storeu_ps,
};

use super::ConvNumber;

/// A vector of numbers.
///
/// # Safety
/// Methods run on a processor that has the instructions of the type, in functions that are compiled for them.
pub(super) unsafe trait Lanes: Copy {
    type Item: ConvNumber;
    /// Numbers in a vector.
    const COUNT: usize;
    /// Vectors of pixels in a tile.
    const PER_TILE: usize;

    unsafe fn splat(x: Self::Item) -> Self;
    unsafe fn load(from: *const Self::Item) -> Self;
    unsafe fn store(self, to: *mut Self::Item);
    /// `self + a * b`.
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self;

    /// Loads the first `count` numbers, less than there are lanes, and zeros.
    unsafe fn load_first(from: *const Self::Item, count: usize) -> Self;

    /// Adds the sums of the lanes of `rows` times `columns` stored vectors to numbers of which rows are `stride` apart.
    ///
    /// Reads them from memory: lanes of 256 bits have 16 registers only, so that adding them inside the loop of a tile would move
    /// its accumulators to memory.
    unsafe fn add_sums(vectors: *const Self::Item, size: [usize; 2], out: *mut Self::Item, stride: usize);
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

/// The first `count` numbers, and zeros.
///
/// # Safety
/// There are so many numbers, and less than `L`.
#[inline(always)]
unsafe fn first<T: ConvNumber, const L: usize>(from: *const T, count: usize) -> [T; L] {
    let mut lanes = [T::ZERO; L];
    for (l, lane) in lanes.iter_mut().enumerate().take(count) {
        // SAFETY: that of the caller.
        *lane = unsafe { *from.add(l) };
    }
    lanes
}

#[cfg(target_arch = "x86_64")]
macro_rules! vectors {
    ($($V:ident of $count:literal $T:ident, $features:literal:
        $splat:ident, $load:ident, $store:ident, $multiply_add:ident, $add_sums:ident |$lanes:ident| $sum:expr,
        |$from:ident, $count_of:ident| $first:expr;)*) => {$(
        // SAFETY: the methods are those of this type.
        unsafe impl Lanes for $V {
            type Item = $T;
            const COUNT: usize = $count;
            // As many as fill the registers together with the channels of `rows_of_tile`.
            const PER_TILE: usize = if size_of::<$V>() == 64 { 3 } else { 2 };

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

            #[inline(always)]
            unsafe fn load_first(from: *const $T, count: usize) -> Self {
                // SAFETY: the contract of the trait; lanes that are not loaded are not read.
                unsafe {
                    let ($from, $count_of) = (from, count);
                    $first
                }
            }

            unsafe fn add_sums(vectors: *const $T, size: [usize; 2], out: *mut $T, stride: usize) {
                // SAFETY: the contract of the trait.
                unsafe { $add_sums(vectors, size, out, stride) }
            }
        }

        #[target_feature(enable = $features)]
        unsafe fn $add_sums(vectors: *const $T, [rows, columns]: [usize; 2], out: *mut $T, stride: usize) {
            for row in 0..rows {
                for column in 0..columns {
                    // SAFETY: that of the caller.
                    unsafe {
                        let $lanes = vectors.add((row * columns + column) * $count);
                        *out.add(row * stride + column) += $sum;
                    }
                }
            }
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
vectors! {
    __m512 of 16 f32, "avx512f": _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, add_sums_m512
        |lanes| _mm512_reduce_add_ps(_mm512_loadu_ps(lanes)),
        |from, count| _mm512_maskz_loadu_ps((1 << count) - 1, from);
    __m512d of 8 f64, "avx512f": _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_fmadd_pd, add_sums_m512d
        |lanes| _mm512_reduce_add_pd(_mm512_loadu_pd(lanes)),
        |from, count| _mm512_maskz_loadu_pd((1 << count) - 1, from);
    __m256 of 8 f32, "avx2,fma": _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, add_sums_m256
        |lanes| tree(lanes.cast::<[f32; 8]>().read_unaligned()),
        |from, count| _mm256_loadu_ps(first::<f32, 8>(from, count).as_ptr());
    __m256d of 4 f64, "avx2,fma": _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_fmadd_pd, add_sums_m256d
        |lanes| tree(lanes.cast::<[f64; 4]>().read_unaligned()),
        |from, count| _mm256_loadu_pd(first::<f64, 4>(from, count).as_ptr());
}

/// Two vectors as one of twice the length.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct LanePair<V>([V; 2]);

#[cfg(target_arch = "x86_64")]
// SAFETY: the methods are those of the vectors.
unsafe impl<V: Lanes> Lanes for LanePair<V> {
    type Item = V::Item;
    const COUNT: usize = 2 * V::COUNT;
    const PER_TILE: usize = V::PER_TILE;

    #[inline(always)]
    unsafe fn splat(x: V::Item) -> Self {
        // SAFETY: the contract of the trait, here and below.
        LanePair(unsafe { [V::splat(x); 2] })
    }

    #[inline(always)]
    unsafe fn load(from: *const V::Item) -> Self {
        // SAFETY: as above.
        LanePair(unsafe { [V::load(from), V::load(from.add(V::COUNT))] })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut V::Item) {
        // SAFETY: as above.
        unsafe {
            self.0[0].store(to);
            self.0[1].store(to.add(V::COUNT));
        }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self {
        // SAFETY: as above.
        LanePair(unsafe { [self.0[0].multiply_add(a.0[0], b.0[0]), self.0[1].multiply_add(a.0[1], b.0[1])] })
    }

    #[inline(always)]
    unsafe fn load_first(from: *const V::Item, count: usize) -> Self {
        // SAFETY: as above; of the second vector nothing is read unless the first one is full.
        LanePair(unsafe {
            match count.checked_sub(V::COUNT) {
                None => [V::load_first(from, count), V::splat(V::Item::ZERO)],
                Some(rest) => [V::load(from), V::load_first(from.add(V::COUNT), rest)],
            }
        })
    }

    #[inline(always)]
    unsafe fn add_sums(vectors: *const V::Item, [rows, columns]: [usize; 2], out: *mut V::Item, stride: usize) {
        for row in 0..rows {
            for column in 0..columns {
                // SAFETY: as above. No vector has more than 8 numbers twice.
                unsafe {
                    let lanes = vectors.add((row * columns + column) * Self::COUNT);
                    let mut halves = [V::Item::ZERO; 8];
                    for l in 0..V::COUNT {
                        halves[l] = (*lanes.add(l)).plus(*lanes.add(l + V::COUNT));
                    }
                    V::add_sums(halves.as_ptr(), [1, 1], out.add(row * stride + column), stride);
                }
            }
        }
    }
}

/// Eight numbers in vectors of the compiler's choice.
#[derive(Clone, Copy)]
pub(super) struct AnyLanes<T, const FMA: bool>([T; 8]);

// SAFETY: the methods need no instructions beyond the baseline.
unsafe impl<T: ConvNumber, const FMA: bool> Lanes for AnyLanes<T, FMA> {
    type Item = T;
    const COUNT: usize = 8;
    const PER_TILE: usize = 3;

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
    unsafe fn load_first(from: *const T, count: usize) -> Self {
        // SAFETY: the caller passes so many numbers.
        AnyLanes(unsafe { first(from, count) })
    }

    #[inline(always)]
    unsafe fn add_sums(vectors: *const T, [rows, columns]: [usize; 2], out: *mut T, stride: usize) {
        for row in 0..rows {
            for column in 0..columns {
                // SAFETY: that of the caller.
                unsafe {
                    let lanes = vectors.add((row * columns + column) * 8).cast::<[T; 8]>().read_unaligned();
                    let sum = out.add(row * stride + column);
                    *sum = (*sum).plus(tree(lanes));
                }
            }
        }
    }
}
