//! Copy of a block between two buffers of any strides, in one pass.

use std::mem::MaybeUninit;

use smallvec::SmallVec;

use super::parallel::{MIN_WORK_FOR_THREADS, SharedPtr, over_ranges};
#[cfg(target_arch = "x86_64")]
use super::simd::InstructionSet;

/// One dimension of a copy: size, source stride, destination stride, in elements.
type CopyDim = (usize, usize, usize);

/// One of the functions that copy a block: source and its strides, destination and its strides, sizes, bytes per element.
pub(super) type CopyBlock = unsafe fn(*const u8, &[usize], *mut u8, &[usize], &[usize], usize);

/// Copies a block of shape `sizes` with elements of `elem` bytes, on the calling thread.
///
/// # Safety
/// `src` and `dst` point to the first element of the block, and every element that the sizes and strides reach from
/// there is readable at `src` and writable at `dst`. The two do not overlap.
pub(super) unsafe fn copy_block(
    src: *const u8,
    src_strides: &[usize],
    dst: *mut u8,
    dst_strides: &[usize],
    sizes: &[usize],
    elem: usize,
) {
    if sizes.contains(&0) {
        return;
    }
    let mut dims = merged_dims(sizes, src_strides, dst_strides);
    // Where both sides have stride 1 in the innermost dimension, it is copied as runs of bytes. Where the two sides have
    // stride 1 in different dimensions (a transpose), these two become the innermost and are copied in tiles. Everything
    // else is copied element by element.
    if let Some(&(run, 1, 1)) = dims.last() {
        dims.pop();
        // SAFETY: forwarded from the caller; the loops visit exactly the block.
        unsafe {
            // A call of memcpy costs more than copying a short run: common short lengths are copied as one value.
            match run * elem {
                4 => for_each_index(&dims, src, dst, elem, |s, d| copy_run::<4>(s, d)),
                8 => for_each_index(&dims, src, dst, elem, |s, d| copy_run::<8>(s, d)),
                16 => for_each_index(&dims, src, dst, elem, |s, d| copy_run::<16>(s, d)),
                32 => for_each_index(&dims, src, dst, elem, |s, d| copy_run::<32>(s, d)),
                64 => for_each_index(&dims, src, dst, elem, |s, d| copy_run::<64>(s, d)),
                bytes => for_each_index(&dims, src, dst, elem, |s, d| copy_bytes(s, d, bytes)),
            }
        }
        return;
    }
    let unit_stride_dim = |stride: fn(&CopyDim) -> usize| dims.iter().rposition(|d| stride(d) == 1);
    let plane = match (unit_stride_dim(|d| d.1), unit_stride_dim(|d| d.2)) {
        (Some(s), Some(d)) if s != d => {
            let plane = [dims[s], dims[d]];
            dims.remove(s.max(d));
            dims.remove(s.min(d));
            plane
        }
        _ => [(1, 0, 0), dims.pop().unwrap_or((1, 0, 0))],
    };
    // SAFETY: as above.
    unsafe {
        match elem {
            1 => for_each_index(&dims, src, dst, elem, |s, d| copy_plane(s.cast::<u8>(), d.cast(), plane)),
            2 => for_each_index(&dims, src, dst, elem, |s, d| copy_plane(s.cast::<u16>(), d.cast(), plane)),
            4 => for_each_index(&dims, src, dst, elem, |s, d| copy_plane(s.cast::<u32>(), d.cast(), plane)),
            8 => for_each_index(&dims, src, dst, elem, |s, d| copy_plane(s.cast::<u64>(), d.cast(), plane)),
            _ => unreachable!("no element type has {elem} bytes"),
        }
    }
}

/// As [`copy_block`], on the threads of the pool if the block is large.
///
/// # Safety
/// As for [`copy_block`].
pub(super) unsafe fn copy_block_on_threads(
    src: *const u8,
    src_strides: &[usize],
    dst: *mut u8,
    dst_strides: &[usize],
    sizes: &[usize],
    elem: usize,
) {
    let count: usize = sizes.iter().product();
    let Some(dim) = sizes.iter().position(|&n| n > 1).filter(|_| count * elem / 4 >= MIN_WORK_FOR_THREADS) else {
        // SAFETY: the caller's promise.
        return unsafe { copy_block(src, src_strides, dst, dst_strides, sizes, elem) };
    };
    let (src, dst) = (SharedPtr::new(src.cast_mut()), SharedPtr::new(dst));
    // Whole lines of the cache, unless there are few indices.
    let align = if sizes[dim] >= 256 { 32 } else { 1 };
    over_ranges(sizes[dim], count / sizes[dim] * elem / 4, align, |range| {
        let mut part: SmallVec<[usize; 6]> = sizes.into();
        part[dim] = range.len();
        // SAFETY: the ranges are different parts of the block.
        unsafe {
            let from = src.get().cast_const().add(range.start * src_strides[dim] * elem);
            let to = dst.get().add(range.start * dst_strides[dim] * elem);
            copy_block(from, src_strides, to, dst_strides, &part, elem);
        }
    });
}

/// Copies `BYTES` bytes.
///
/// # Safety
/// They can be read at `src` and written at `dst`.
#[inline(always)]
unsafe fn copy_run<const BYTES: usize>(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's promise; an array of bytes needs no alignment.
    unsafe { dst.cast::<[u8; BYTES]>().write(src.cast::<[u8; BYTES]>().read()) };
}

/// Runs that are copied by [`copy_with_avx2`]: for these, glibc's memcpy takes the string instruction of processors that announce a
/// fast one. From the third cache of a Zen 5, runs of 4 KiB take 1.5 times as long with it, those of 16 KiB no longer.
#[cfg(target_arch = "x86_64")]
const VECTOR_RUNS: std::ops::RangeInclusive<usize> = 256..=8192;

/// Copies a run of bytes.
///
/// # Safety
/// They can be read at `src` and written at `dst`, which do not overlap.
#[inline]
pub(super) unsafe fn copy_bytes(src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise; the processor has the selected instruction set, of which AVX-512 includes AVX2.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if VECTOR_RUNS.contains(&bytes) && InstructionSet::selected() >= InstructionSet::Avx2 {
            return copy_with_avx2(src, dst, bytes);
        }
        std::ptr::copy_nonoverlapping(src, dst, bytes);
    }
}

/// Copies a run of bytes. Four registers per step: the compiler would turn a loop over one into a call of memcpy.
///
/// # Safety
/// As for [`copy_bytes`]; the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn copy_with_avx2(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_storeu_si256};
    const STEP: usize = 128;
    let whole = bytes - bytes % STEP;
    // SAFETY: all of it is inside the run.
    unsafe {
        for at in (0..whole).step_by(STEP) {
            let registers: [_; 4] = std::array::from_fn(|i| _mm256_loadu_si256(src.add(at + 32 * i).cast()));
            for (i, register) in registers.into_iter().enumerate() {
                _mm256_storeu_si256(dst.add(at + 32 * i).cast(), register);
            }
        }
        std::ptr::copy_nonoverlapping(src.add(whole), dst.add(whole), bytes - whole);
    }
}

/// Bytes of a tile along a line of the source (two lines of the cache), and elements along one of the destination. Short runs of the
/// destination would be written line by line to as many pages: for a matrix of 4096 x 1024 f32 in the third cache, tiles of
/// 32 x 32 take 3.1 ms, 64 x 64 take 1.8 and 128 x 32 take 1.3. With 16 KiB a tile stays in the first cache.
const TILE_BYTES: usize = 128;
const TILE_RUN: usize = 128;

#[repr(align(64))]
#[allow(dead_code, reason = "used by address")]
struct TileMemory([[u8; TILE_BYTES]; TILE_RUN]);

/// Copies two dimensions. Where the source has stride 1 in the first and the destination in the second, it transposes tile
/// by tile, so that every cache line is read and written once, whatever the other strides are.
///
/// # Safety
/// As for [`copy_block`].
unsafe fn copy_plane<T: Copy>(src: *const T, dst: *mut T, plane: [CopyDim; 2]) {
    let [(m, src_far, dst_far), (n, src_near, dst_near)] = plane;
    let squares = if (src_far, dst_near) == (1, 1) { (m - m % SQUARE, n - n % SQUARE) } else { (0, 0) };
    let pitch = TILE_BYTES / size_of::<T>();
    // Uninitialised, because most planes are small.
    let mut tile = MaybeUninit::<TileMemory>::uninit();
    let tile: *mut T = tile.as_mut_ptr().cast();
    // SAFETY: all indices are inside the block, so all addresses are inside their buffers; tensors are aligned to their
    // elements.
    unsafe {
        for left in (0..squares.1).step_by(TILE_RUN) {
            let run = TILE_RUN.min(squares.1 - left);
            for top in (0..squares.0).step_by(pitch) {
                let width = pitch.min(squares.0 - top);
                for j in 0..run {
                    let (from, to) = (src.add(top + (left + j) * src_near), tile.add(j * pitch));
                    if width == pitch {
                        copy_run::<TILE_BYTES>(from.cast(), to.cast());
                    } else {
                        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast(), width * size_of::<T>());
                    }
                }
                for i in (0..width).step_by(SQUARE) {
                    for j in (0..run).step_by(SQUARE) {
                        transpose_square(tile.add(j * pitch + i), dst.add((top + i) * dst_far + left + j), dst_far);
                    }
                }
            }
        }
        for i in 0..m {
            for j in if i < squares.0 { squares.1..n } else { 0..n } {
                *dst.add(i * dst_far + j * dst_near) = *src.add(i * src_far + j * src_near);
            }
        }
    }
}

/// Elements along one side of a square that is transposed in registers: 4 elements of 4 bytes fill one SSE register.
const SQUARE: usize = 4;

/// Writes the transpose of a square of a tile.
///
/// # Safety
/// The square that begins at `src` is inside a tile, and as many elements can be written in rows of this stride at `dst`.
#[inline(always)]
unsafe fn transpose_square<T: Copy>(src: *const T, dst: *mut T, stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<T>() == 4 {
        use std::arch::x86_64::*;
        // SAFETY: every x86-64 processor has these SSE2 instructions; addresses are inside by the caller's promise.
        unsafe {
            let line = |j: usize| _mm_loadu_si128(src.add(j * TILE_BYTES / 4).cast());
            let [a, b, c, d] = [line(0), line(1), line(2), line(3)];
            let (left, right) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
            _mm_storeu_si128(dst.cast(), _mm_unpacklo_epi64(left, right));
            _mm_storeu_si128(dst.add(stride).cast(), _mm_unpackhi_epi64(left, right));
            let (left, right) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
            _mm_storeu_si128(dst.add(2 * stride).cast(), _mm_unpacklo_epi64(left, right));
            _mm_storeu_si128(dst.add(3 * stride).cast(), _mm_unpackhi_epi64(left, right));
        }
        return;
    }
    for i in 0..SQUARE {
        for j in 0..SQUARE {
            // SAFETY: the caller's promise.
            unsafe { *dst.add(i * stride + j) = *src.add(j * (TILE_BYTES / size_of::<T>()) + i) };
        }
    }
}

/// Drops dimensions of size 1 and merges adjacent dimensions that are contiguous on both sides.
fn merged_dims(sizes: &[usize], src_strides: &[usize], dst_strides: &[usize]) -> SmallVec<[CopyDim; 6]> {
    let mut dims: SmallVec<[CopyDim; 6]> = SmallVec::new();
    for ((&size, &src), &dst) in sizes.iter().zip(src_strides).zip(dst_strides) {
        match dims.last_mut() {
            _ if size == 1 => {}
            Some((n, s, d)) if *s == src * size && *d == dst * size => (*n, *s, *d) = (*n * size, src, dst),
            _ => dims.push((size, src, dst)),
        }
    }
    dims
}

/// Calls `copy` with the source and destination address of every index of `dims`.
///
/// # Safety
/// As for [`copy_block`].
unsafe fn for_each_index(
    dims: &[CopyDim],
    src: *const u8,
    dst: *mut u8,
    elem: usize,
    copy: impl Fn(*const u8, *mut u8) + Copy,
) {
    match dims {
        [] => copy(src, dst),
        [(size, s, d)] => {
            for i in 0..*size {
                // SAFETY: index i is inside the block, so both addresses are inside their buffers.
                copy(unsafe { src.add(i * s * elem) }, unsafe { dst.add(i * d * elem) });
            }
        }
        [(size, s, d), rest @ ..] => {
            for i in 0..*size {
                // SAFETY: index i is inside the block, so both addresses are inside their buffers.
                unsafe { for_each_index(rest, src.add(i * s * elem), dst.add(i * d * elem), elem, copy) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_of_any_size_are_transposed() {
        fn check<T: Copy + PartialEq + std::fmt::Debug>(m: usize, n: usize, number: fn(usize) -> T) {
            let src: Vec<T> = (0..m * n).map(number).collect();
            let mut dst = vec![number(0); m * n];
            // SAFETY: both hold m * n elements, and the strides stay inside.
            unsafe {
                copy_block_on_threads(
                    src.as_ptr().cast(),
                    &[1, m],
                    dst.as_mut_ptr().cast(),
                    &[n, 1],
                    &[m, n],
                    size_of::<T>(),
                );
            };
            for (i, x) in dst.iter().enumerate() {
                assert_eq!(*x, src[i % n * m + i / n], "{m} x {n}, element {i}");
            }
        }
        for m in [1, 3, 31, 32, 33, 70] {
            for n in [1, 2, 32, 65, 96] {
                check(m, n, |i| i as u8);
                check(m, n, |i| i as u16);
                check(m, n, |i| i as u32);
                check(m, n, |i| i as u64);
            }
        }
        // Large enough for several tiles, and for threads.
        check(300, 1000, |i| i as u32);
        check(301, 130, |i| i as u64);
        check(133, 515, |i| i as u16);
    }

    #[test]
    fn runs_of_any_length_are_copied() {
        for length in (1..300).chain([383, 384, 385, 4096, 8191, 8192, 8193]) {
            let src: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8 + 1).collect();
            let mut dst = vec![0u8; length + 1];
            // SAFETY: both have as many bytes.
            unsafe { copy_bytes(src.as_ptr(), dst.as_mut_ptr(), length) };
            assert!(dst[..length] == src && dst[length] == 0, "{length}");
        }
    }
}
