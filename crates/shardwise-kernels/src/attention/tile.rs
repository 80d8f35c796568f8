//! Products of small matrices whose accumulators stay in registers.

use super::float::AttentionFloat;

/// A matrix in memory that is read element by element: the address of its first element, and the strides of its rows and
/// columns.
#[derive(Clone, Copy)]
pub(super) struct Factor<F> {
    pub(super) first: *const F,
    pub(super) row: usize,
    pub(super) column: usize,
}

/// Adds `a b` to `c`, or writes it if `FRESH`, for `a` with `rows` rows and `inner` columns.
///
/// `b` and `c` have rows of `width` adjacent elements, with strides `b_row` and `c_row`. A tile of `MR` rows and `L` columns is
/// computed in registers, where every element of `a` meets `L` elements of `b`.
///
/// # Safety
/// All elements can be read, and those of `c` written. Rows of `b` can be read up to the next multiple of `L` of `width`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn product<F: AttentionFloat, const FMA: bool, const MR: usize, const L: usize, const FRESH: bool>(
    rows: usize,
    inner: usize,
    width: usize,
    a: Factor<F>,
    b: *const F,
    b_row: usize,
    c: *mut F,
    c_row: usize,
) {
    let mut column = 0;
    // SAFETY: every tile is inside the matrices, except for columns of `b` that the caller allows to read.
    unsafe {
        while column + L <= width {
            columns::<F, FMA, MR, L, FRESH>(rows, inner, a, b.add(column), b_row, c.add(column), c_row);
            column += L;
        }
        if column < width {
            // The last columns are computed in a buffer as wide as a tile, row by row.
            for row in 0..rows {
                let mut buffer = [F::ZERO; L];
                let to = c.add(row * c_row + column);
                if !FRESH {
                    std::ptr::copy_nonoverlapping(to, buffer.as_mut_ptr(), width - column);
                }
                let a = Factor { first: a.first.add(row * a.row), ..a };
                tile::<F, FMA, 1, L, FRESH>(inner, a, b.add(column), b_row, buffer.as_mut_ptr(), L);
                std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, width - column);
            }
        }
    }
}

/// `L` columns of a product: tiles of `MR` rows, then smaller ones.
#[inline(always)]
unsafe fn columns<F: AttentionFloat, const FMA: bool, const MR: usize, const L: usize, const FRESH: bool>(
    rows: usize,
    inner: usize,
    a: Factor<F>,
    b: *const F,
    b_row: usize,
    c: *mut F,
    c_row: usize,
) {
    let mut row = 0;
    // SAFETY: the caller's promise.
    unsafe {
        let from = |row: usize| Factor { first: a.first.add(row * a.row), ..a };
        while row + MR <= rows {
            tile::<F, FMA, MR, L, FRESH>(inner, from(row), b, b_row, c.add(row * c_row), c_row);
            row += MR;
        }
        while row + 2 <= rows {
            tile::<F, FMA, 2, L, FRESH>(inner, from(row), b, b_row, c.add(row * c_row), c_row);
            row += 2;
        }
        if row < rows {
            tile::<F, FMA, 1, L, FRESH>(inner, from(row), b, b_row, c.add(row * c_row), c_row);
        }
    }
}

/// One tile of a product in registers.
#[inline(always)]
unsafe fn tile<F: AttentionFloat, const FMA: bool, const MR: usize, const L: usize, const FRESH: bool>(
    inner: usize,
    a: Factor<F>,
    b: *const F,
    b_row: usize,
    c: *mut F,
    c_row: usize,
) {
    let mut sums = [[F::ZERO; L]; MR];
    // SAFETY: the caller's promise.
    unsafe {
        if !FRESH {
            for (i, sums) in sums.iter_mut().enumerate() {
                *sums = *c.add(i * c_row).cast::<[F; L]>();
            }
        }
        for t in 0..inner {
            let line = *b.add(t * b_row).cast::<[F; L]>();
            let element = a.first.add(t * a.column);
            for (i, sums) in sums.iter_mut().enumerate() {
                let x = *element.add(i * a.row);
                for l in 0..L {
                    sums[l] = x.multiply_add::<FMA>(line[l], sums[l]);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            *c.add(i * c_row).cast::<[F; L]>() = *sums;
        }
    }
}

/// Writes the transpose of `rows` rows of `width` elements, each times `factor`; unused columns of `to` become zero.
///
/// `to` has `width` rows of `to_row` elements.
///
/// # Safety
/// All elements can be read and written, and `rows <= to_row`.
#[inline(always)]
pub(super) unsafe fn transpose<F: AttentionFloat>(
    rows: usize,
    width: usize,
    from: *const F,
    from_row: usize,
    factor: F,
    to: *mut F,
    to_row: usize,
) {
    /// Rows at a time: the sixteen elements of a column of the source are adjacent in the target.
    const STRIP: usize = 16;
    // SAFETY: the caller's promise.
    unsafe {
        let mut row = 0;
        while row + STRIP <= rows {
            for d in 0..width {
                let source = from.add(row * from_row + d);
                let mut line = [F::ZERO; STRIP];
                for (i, x) in line.iter_mut().enumerate() {
                    *x = *source.add(i * from_row) * factor;
                }
                *to.add(d * to_row + row).cast::<[F; STRIP]>() = line;
            }
            row += STRIP;
        }
        for d in 0..width {
            for row in row..to_row {
                *to.add(d * to_row + row) = if row < rows { *from.add(row * from_row + d) * factor } else { F::ZERO };
            }
        }
    }
}
