//! Copying a block between two strided buffers in one pass.

use std::mem::MaybeUninit;

use smallvec::SmallVec;

/// One dimension of a copy: size, source stride, destination stride, in elements.
type Dim = (usize, usize, usize);

/// Copies a block of `sizes` elements of `elem` bytes each.
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
    let mut dims = merged(sizes, src_strides, dst_strides);
    // The innermost dimension is copied as one run where both sides are dense in it. Where each side is dense in another
    // dimension, both go innermost and are copied in tiles. The rest goes element by element.
    if let Some(&(run, 1, 1)) = dims.last() {
        dims.pop();
        // SAFETY: forwarded from the caller; the loops visit exactly the block.
        unsafe {
            // A call for every run would cost more than copying a short one: those are moved as a value of their size.
            match run * elem {
                4 => walk(&dims, src, dst, elem, |s, d| move_run::<4>(s, d)),
                8 => walk(&dims, src, dst, elem, |s, d| move_run::<8>(s, d)),
                16 => walk(&dims, src, dst, elem, |s, d| move_run::<16>(s, d)),
                32 => walk(&dims, src, dst, elem, |s, d| move_run::<32>(s, d)),
                64 => walk(&dims, src, dst, elem, |s, d| move_run::<64>(s, d)),
                bytes => walk(&dims, src, dst, elem, |s, d| std::ptr::copy_nonoverlapping(s, d, bytes)),
            }
        }
        return;
    }
    let dense_in = |stride: fn(&Dim) -> usize| dims.iter().rposition(|d| stride(d) == 1);
    let plane = match (dense_in(|d| d.1), dense_in(|d| d.2)) {
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
            1 => walk(&dims, src, dst, elem, |s, d| turn(s.cast::<u8>(), d.cast(), plane)),
            2 => walk(&dims, src, dst, elem, |s, d| turn(s.cast::<u16>(), d.cast(), plane)),
            4 => walk(&dims, src, dst, elem, |s, d| turn(s.cast::<u32>(), d.cast(), plane)),
            8 => walk(&dims, src, dst, elem, |s, d| turn(s.cast::<u64>(), d.cast(), plane)),
            _ => unreachable!("no element type has {elem} bytes"),
        }
    }
}

/// Copies so many bytes.
///
/// # Safety
/// They can be read at `src` and written at `dst`.
#[inline(always)]
unsafe fn move_run<const BYTES: usize>(src: *const u8, dst: *mut u8) {
    // SAFETY: the caller's promise; an array of bytes needs no alignment.
    unsafe { dst.cast::<[u8; BYTES]>().write(src.cast::<[u8; BYTES]>().read()) };
}

/// Elements along one side of a tile.
const TILE: usize = 32;

/// Copies a plane of two dimensions. Where the source is dense in the first and the destination in the second, this goes
/// in tiles: every line of the cache is then read and written once, whatever the strides are.
///
/// # Safety
/// As for [`copy_block`].
unsafe fn turn<T: Copy>(src: *const T, dst: *mut T, plane: [Dim; 2]) {
    let [(m, src_far, dst_far), (n, src_near, dst_near)] = plane;
    let tiles = if (src_far, dst_near) == (1, 1) { (m - m % TILE, n - n % TILE) } else { (0, 0) };
    // Not initialised, since most planes are small and have no tiles.
    let mut tile = [MaybeUninit::<T>::uninit(); TILE * TILE];
    let tile: *mut T = tile.as_mut_ptr().cast();
    // SAFETY: all indices are inside the block, so all addresses are inside their buffers; tensors are aligned to their
    // elements.
    unsafe {
        for left in (0..tiles.1).step_by(TILE) {
            for top in (0..tiles.0).step_by(TILE) {
                for j in 0..TILE {
                    let from = src.add(top + (left + j) * src_near);
                    std::ptr::copy_nonoverlapping(from, tile.add(j * TILE), TILE);
                }
                for i in (0..TILE).step_by(SQUARE) {
                    for j in (0..TILE).step_by(SQUARE) {
                        turn_square(tile.add(j * TILE + i), dst.add((top + i) * dst_far + left + j), dst_far);
                    }
                }
            }
        }
        for i in 0..m {
            for j in if i < tiles.0 { tiles.1..n } else { 0..n } {
                *dst.add(i * dst_far + j * dst_near) = *src.add(i * src_far + j * src_near);
            }
        }
    }
}

/// Elements along one side of what is turned in registers.
const SQUARE: usize = 4;

/// Writes a square of a tile, turned.
///
/// # Safety
/// The square that begins at `src` is inside a tile, and as many elements can be written in rows of this stride at `dst`.
#[inline(always)]
unsafe fn turn_square<T: Copy>(src: *const T, dst: *mut T, stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<T>() == 4 {
        use std::arch::x86_64::*;
        // SAFETY: every processor of this kind has these instructions; addresses are inside by the caller's promise.
        unsafe {
            let line = |j: usize| _mm_loadu_si128(src.add(j * TILE).cast());
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
            unsafe { *dst.add(i * stride + j) = *src.add(j * TILE + i) };
        }
    }
}

/// Drops dimensions of size 1 and joins neighbours that are dense on both sides.
fn merged(sizes: &[usize], src_strides: &[usize], dst_strides: &[usize]) -> SmallVec<[Dim; 6]> {
    let mut dims: SmallVec<[Dim; 6]> = SmallVec::new();
    for ((&size, &src), &dst) in sizes.iter().zip(src_strides).zip(dst_strides) {
        match dims.last_mut() {
            _ if size == 1 => {}
            Some((n, s, d)) if *s == src * size && *d == dst * size => (*n, *s, *d) = (*n * size, src, dst),
            _ => dims.push((size, src, dst)),
        }
    }
    dims
}

/// Calls `copy` for every index of `dims`.
///
/// # Safety
/// As for [`copy_block`].
unsafe fn walk(dims: &[Dim], src: *const u8, dst: *mut u8, elem: usize, copy: impl Fn(*const u8, *mut u8) + Copy) {
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
                unsafe { walk(rest, src.add(i * s * elem), dst.add(i * d * elem), elem, copy) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_of_any_size_are_turned() {
        fn check<T: Copy + PartialEq + std::fmt::Debug>(m: usize, n: usize, number: fn(usize) -> T) {
            let src: Vec<T> = (0..m * n).map(number).collect();
            let mut dst = vec![number(0); m * n];
            // SAFETY: both hold m * n elements, and the strides stay inside.
            unsafe {
                copy_block(src.as_ptr().cast(), &[1, m], dst.as_mut_ptr().cast(), &[n, 1], &[m, n], size_of::<T>());
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
    }
}
