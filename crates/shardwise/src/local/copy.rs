//! Copying a block between two strided buffers in one pass.

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
    // The innermost dimension is copied as one run where both sides are dense in it, else element by element.
    let run = match dims.last() {
        Some(&(size, 1, 1)) => {
            dims.pop();
            size
        }
        _ => 1,
    };
    // SAFETY: forwarded from the caller; the loops visit exactly the block.
    unsafe {
        match (run, elem) {
            (1, 1) => walk(&dims, src, dst, elem, |s, d| d.write(s.read())),
            (1, 2) => walk(&dims, src, dst, elem, |s, d| d.cast::<[u8; 2]>().write(s.cast::<[u8; 2]>().read())),
            (1, 4) => walk(&dims, src, dst, elem, |s, d| d.cast::<[u8; 4]>().write(s.cast::<[u8; 4]>().read())),
            (1, 8) => walk(&dims, src, dst, elem, |s, d| d.cast::<[u8; 8]>().write(s.cast::<[u8; 8]>().read())),
            _ => walk(&dims, src, dst, elem, |s, d| std::ptr::copy_nonoverlapping(s, d, run * elem)),
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
        [(size, s, d), rest @ ..] => {
            for i in 0..*size {
                // SAFETY: index i is inside the block, so both addresses are inside their buffers.
                unsafe { walk(rest, src.add(i * s * elem), dst.add(i * d * elem), elem, copy) };
            }
        }
    }
}
