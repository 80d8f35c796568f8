//! Panels: parts of a factor copied so that the inner loop reads them one element after the other. Half types are converted
//! on the way.

use std::any::TypeId;
use std::ops::Range;

use float8::F8E4M3;
use half::{bf16, f16};

use super::super::eight_bit::{f8_to_f32, f32_to_f8};
use super::registers::{MAX_LANES, Register};

/// An element of a factor, and the type in which it is multiplied.
pub(super) trait MatmulElement: Copy + Send + Sync + 'static {
    type Wide: Copy + Default + Send + Sync + 'static;
    fn wide(self) -> Self::Wide;
    fn narrow(x: Self::Wide) -> Self;

    /// Eight adjacent elements as f32, for the types that are multiplied in f32.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C; eight elements are readable.
    #[cfg(target_arch = "x86_64")]
    unsafe fn eight_f32(from: *const Self) -> std::arch::x86_64::__m256;
}

macro_rules! factors {
    ($($T:ty => $W:ty: $wide:expr, $narrow:expr, $eight:expr;)*) => {$(
        impl MatmulElement for $T {
            type Wide = $W;
            #[inline(always)]
            fn wide(self) -> $W {
                $wide(self)
            }
            #[inline(always)]
            fn narrow(x: $W) -> Self {
                $narrow(x)
            }
            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn eight_f32(from: *const Self) -> std::arch::x86_64::__m256 {
                $eight(from)
            }
        }
    )*};
}
factors! {
    // SAFETY: the caller's promise, here and below.
    f32 => f32: |x| x, |x| x, |from| unsafe { x86::eight_from_f32(from) };
    f64 => f64: |x| x, |x| x, |_| unreachable!("f64 is multiplied in f64");
    // SAFETY: as above.
    bf16 => f32: bf16_to_f32, f32_to_bf16, |from| unsafe { x86::eight_from_bf16(from) };
    // SAFETY: as above.
    f16 => f32: f16::to_f32, f16::from_f32, |from| unsafe { x86::eight_from_f16(from) };
    // SAFETY: as above.
    F8E4M3 => f32: f8_to_f32, f32_to_f8, |from| unsafe { x86::eight_from_f8(from) };
}

/// The bits of a bf16 are the upper half of those of an f32. As in `half`, but without its look-up of processor features, so
/// that loops over it become vector instructions; a signalling NaN stays one.
#[inline(always)]
fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Rounds to nearest, ties to even; NaN becomes a quiet NaN.
#[inline(always)]
fn f32_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    bf16::from_bits(if x.is_nan() { (bits >> 16 | 0x40) as u16 } else { rounded as u16 })
}

/// A matrix in memory: the address of its first element, and the strides of its two dimensions in elements.
#[derive(Clone, Copy)]
pub(super) struct Source<S> {
    pub(super) first: *const S,
    /// Stride of the dimension that panels divide: rows of the left factor, columns of the right one.
    pub(super) across: usize,
    /// Stride of the contracted dimension.
    pub(super) along: usize,
}

/// Steps along that are copied together where elements across are adjacent: as many lines of the matrix stay in the first
/// cache, and each of them is read in order.
const STEPS: usize = 8;

/// A run of adjacent panels: the first element of a panel that begins at position `i` across is `i * depth` after the first.
#[derive(Clone, Copy)]
pub(super) struct Panels<T> {
    pub(super) first: *mut T,
    /// Elements across that a full panel holds.
    pub(super) width: usize,
    /// Panels are filled with zeros up to a multiple of this width.
    pub(super) multiple: usize,
    /// Steps along.
    pub(super) depth: usize,
}

/// Copies the positions `across` of a matrix to panels, in which elements that are adjacent across follow each other.
///
/// # Safety
/// The processor has the instructions of `V`. The elements are inside the matrix and the panels have room for them; `across`
/// begins at a full panel.
#[inline(always)]
pub(super) unsafe fn pack<V: Register<Element = S::Wide>, S: MatmulElement>(
    source: Source<S>,
    across: Range<usize>,
    panels: Panels<S::Wide>,
) {
    let Panels { width: full, multiple, depth, .. } = panels;
    // SAFETY: the caller's promises.
    unsafe {
        if source.across == 1 {
            for begin in (0..depth).step_by(STEPS) {
                for i in across.clone().step_by(full) {
                    let width = full.min(across.end - i);
                    let pitch = width.next_multiple_of(multiple);
                    let panel = panels.first.add(i * depth);
                    for p in begin..(begin + STEPS).min(depth) {
                        let (from, to) = (source.first.add(i + p * source.along), panel.add(p * pitch));
                        match (width == pitch, width) {
                            (true, 48) if V::COUNT == 16 => copy_registers::<V, S>(from, to, 48),
                            (true, 16) if V::COUNT == 8 => copy_registers::<V, S>(from, to, 16),
                            (true, _) if width.is_multiple_of(V::COUNT) => copy_registers::<V, S>(from, to, width),
                            _ => {
                                for i in 0..pitch {
                                    to.add(i).write(if i < width { (*from.add(i)).wide() } else { S::Wide::default() });
                                }
                            }
                        }
                    }
                }
            }
            return;
        }
        for i in across.clone().step_by(full) {
            let width = full.min(across.end - i);
            let pitch = width.next_multiple_of(multiple);
            let panel = panels.first.add(i * depth);
            let source = Source { first: source.first.add(i * source.across), ..source };
            let whole_depth = depth - depth % SQUARE;
            let whole_width = if (width, pitch) == (SIX, SIX) { SIX } else { width - width % SQUARE };
            for p in (0..whole_depth).step_by(SQUARE) {
                if whole_width == SIX {
                    let from = source.first.add(p * source.along);
                    transpose_six::<V, S>(Source { first: from, ..source }, panel.add(p * SIX));
                    continue;
                }
                for i in (0..whole_width).step_by(SQUARE) {
                    let from = source.first.add(i * source.across + p * source.along);
                    transpose_square::<V, S>(Source { first: from, ..source }, panel.add(p * pitch + i), pitch);
                }
            }
            for p in 0..depth {
                let begin = if p < whole_depth { whole_width } else { 0 };
                for i in begin..pitch {
                    let inside = i < width;
                    let from = source.first.add(if inside { i * source.across + p * source.along } else { 0 });
                    panel.add(p * pitch + i).write(if inside { (*from).wide() } else { S::Wide::default() });
                }
            }
        }
    }
}

/// Copies a number of elements that is a multiple of a register's.
///
/// # Safety
/// The processor has the instructions of `V`, and both addresses have `count` elements.
#[inline(always)]
unsafe fn copy_registers<V: Register<Element = S::Wide>, S: MatmulElement>(
    from: *const S,
    to: *mut S::Wide,
    count: usize,
) {
    for i in (0..count).step_by(V::COUNT) {
        // SAFETY: the caller's promise.
        unsafe { wide_lanes::<V, S>(from.add(i)).store(to.add(i)) };
    }
}

/// A register of adjacent elements, converted to the type in which they are multiplied.
///
/// # Safety
/// The processor has the instructions of `V`, and as many elements are readable.
#[inline(always)]
pub(super) unsafe fn wide_lanes<V: Register<Element = S::Wide>, S: MatmulElement>(from: *const S) -> V {
    // SAFETY: the caller's promise; the buffer has the elements of the longest register.
    unsafe {
        if TypeId::of::<S>() == TypeId::of::<S::Wide>() {
            return V::load(from.cast());
        }
        #[cfg(target_arch = "x86_64")]
        if V::HAS_AVX2 && TypeId::of::<S::Wide>() == TypeId::of::<f32>() {
            return V::from_eights(|i| S::eight_f32(from.add(8 * i)));
        }
        let mut buffer = [S::Wide::default(); MAX_LANES];
        for (l, x) in buffer[..V::COUNT].iter_mut().enumerate() {
            *x = (*from.add(l)).wide();
        }
        V::load(buffer.as_ptr())
    }
}

/// Side of the squares that are transposed in registers.
const SQUARE: usize = 8;

/// Transposes a square: element `(i, p)` of the source becomes element `(p, i)` of the panel.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn transpose_square<V: Register, S: MatmulElement>(source: Source<S>, to: *mut S::Wide, pitch: usize) {
    // SAFETY: the caller's promises.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if V::HAS_AVX2 && source.along == 1 && TypeId::of::<S::Wide>() == TypeId::of::<f32>() {
            let rows = std::array::from_fn(|i| S::eight_f32(source.first.add(i * source.across)));
            return x86::store_transposed(rows, to.cast(), pitch);
        }
        for p in 0..SQUARE {
            for i in 0..SQUARE {
                to.add(p * pitch + i).write((*source.first.add(i * source.across + p * source.along)).wide());
            }
        }
    }
}

/// Rows of a tile on the instruction sets that have no room for eight.
const SIX: usize = 6;

/// Transposes six rows of eight steps to a panel that is six wide.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn transpose_six<V: Register, S: MatmulElement>(source: Source<S>, to: *mut S::Wide) {
    // SAFETY: the caller's promises.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if V::HAS_AVX2 && source.along == 1 && TypeId::of::<S::Wide>() == TypeId::of::<f32>() {
            // The last two rows of the square are not stored.
            let rows = std::array::from_fn(|i| S::eight_f32(source.first.add(i.min(SIX - 1) * source.across)));
            return x86::store_six_transposed(rows, to.cast());
        }
        for p in 0..SQUARE {
            for i in 0..SIX {
                to.add(p * SIX + i).write((*source.first.add(i * source.across + p * source.along)).wide());
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    /// Writes the columns of a square of 8 by 8 elements as rows that are `pitch` elements apart.
    ///
    /// # Safety
    /// The processor has AVX; the rows can be written.
    #[inline(always)]
    pub(super) unsafe fn store_transposed(rows: [__m256; 8], to: *mut f32, pitch: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            for (i, column) in transposed(rows).into_iter().enumerate() {
                _mm256_storeu_ps(to.add(i * pitch), column);
            }
        }
    }

    /// Writes the first six elements of each column of a square of 8 by 8 elements, one after the other.
    ///
    /// # Safety
    /// As [`store_transposed`].
    #[inline(always)]
    pub(super) unsafe fn store_six_transposed(rows: [__m256; 8], to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe {
            for (i, column) in transposed(rows).into_iter().enumerate() {
                _mm_storeu_ps(to.add(i * 6), _mm256_castps256_ps128(column));
                let last = _mm_castps_pd(_mm256_extractf128_ps::<1>(column));
                _mm_storel_pd(to.add(i * 6 + 4).cast(), last);
            }
        }
    }

    /// The columns of a square of 8 by 8 elements.
    ///
    /// # Safety
    /// The processor has AVX.
    #[inline(always)]
    unsafe fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
        // SAFETY: the caller's promise.
        unsafe {
            // Pairs of rows are interleaved, then pairs of pairs, and last the halves are exchanged.
            let [a, b, c, d, e, f, g, h] = rows;
            let pairs = [
                (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)),
                (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)),
                (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f)),
                (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h)),
            ];
            let fours = |x: (__m256, __m256), y: (__m256, __m256)| {
                [
                    _mm256_shuffle_ps::<0x44>(x.0, y.0),
                    _mm256_shuffle_ps::<0xee>(x.0, y.0),
                    _mm256_shuffle_ps::<0x44>(x.1, y.1),
                    _mm256_shuffle_ps::<0xee>(x.1, y.1),
                ]
            };
            let (upper, lower) = (fours(pairs[0], pairs[1]), fours(pairs[2], pairs[3]));
            [
                _mm256_permute2f128_ps::<0x20>(upper[0], lower[0]),
                _mm256_permute2f128_ps::<0x20>(upper[1], lower[1]),
                _mm256_permute2f128_ps::<0x20>(upper[2], lower[2]),
                _mm256_permute2f128_ps::<0x20>(upper[3], lower[3]),
                _mm256_permute2f128_ps::<0x31>(upper[0], lower[0]),
                _mm256_permute2f128_ps::<0x31>(upper[1], lower[1]),
                _mm256_permute2f128_ps::<0x31>(upper[2], lower[2]),
                _mm256_permute2f128_ps::<0x31>(upper[3], lower[3]),
            ]
        }
    }

    /// # Safety
    /// The processor has AVX2; eight elements are readable.
    #[inline(always)]
    pub(super) unsafe fn eight_from_f32(from: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }

    /// # Safety
    /// As [`eight_from_f32`].
    #[inline(always)]
    pub(super) unsafe fn eight_from_bf16(from: *const half::bf16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    /// # Safety
    /// As [`eight_from_f32`], and the processor has F16C.
    #[inline(always)]
    pub(super) unsafe fn eight_from_f16(from: *const half::f16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    /// # Safety
    /// As [`eight_from_f32`].
    #[inline(always)]
    pub(super) unsafe fn eight_from_f8(from: *const float8::F8E4M3) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { eight_from_f32((*from.cast::<[float8::F8E4M3; 8]>()).map(super::f8_to_f32).as_ptr()) }
    }
}
