//! The inner loop of a product: a tile of the result, held in registers while a panel of each factor is read.

use std::mem::MaybeUninit;

use super::registers::Register;

/// What happens to the product of a tile.
#[derive(Clone, Copy)]
pub(super) enum Store<T> {
    /// Replaces what the result holds.
    Overwrite,
    /// Is added to what the result holds.
    Accumulate,
    /// Replaces what the result holds, after adding a row of as many elements as the result has columns.
    AddRow(*const T),
}

/// A tile of the result: `rows` by `columns` elements, rows `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Tile<T> {
    pub(super) first: *mut T,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Multiplies a panel of the left factor, `depth` by `tile.rows`, with one of the right factor, `depth` by as many registers
/// as the columns fill.
///
/// # Safety
/// The processor has the instructions of `V`; panels and tile have these sizes; `tile.rows` is [`Register::ROWS`] or a smaller
/// power of two, and `tile.columns` at most [`Register::VECTORS`] registers.
#[inline(always)]
pub(super) unsafe fn multiply_panels<V: Register>(
    depth: usize,
    left: *const V::Element,
    right: *const V::Element,
    tile: Tile<V::Element>,
    store: Store<V::Element>,
) {
    macro_rules! sized {
        ($($rows:literal x $registers:literal)*) => {
            match (tile.rows, tile.columns.div_ceil(V::COUNT)) {
                $(
                    // SAFETY: the caller's promises, with the sizes as constants.
                    ($rows, $registers) => unsafe { sized_tile::<V, $rows, $registers>(depth, left, right, tile, store) },
                )*
                sizes => unreachable!("a tile of {sizes:?}"),
            }
        };
    }
    match (V::ROWS, V::VECTORS) {
        (8, 3) => sized!(8 x 3 8 x 2 8 x 1 4 x 3 4 x 2 4 x 1 2 x 3 2 x 2 2 x 1 1 x 3 1 x 2 1 x 1),
        (6, 2) => sized!(6 x 2 6 x 1 4 x 2 4 x 1 2 x 2 2 x 1 1 x 2 1 x 1),
        (4, 2) => sized!(4 x 2 4 x 1 2 x 2 2 x 1 1 x 2 1 x 1),
        shape => unreachable!("tiles of {shape:?} registers"),
    }
}

/// As [`multiply_panels`], for a number of rows and registers that is known when it is compiled, so that the sums stay in
/// registers.
#[inline(always)]
unsafe fn sized_tile<V: Register, const R: usize, const N: usize>(
    depth: usize,
    mut left: *const V::Element,
    mut right: *const V::Element,
    tile: Tile<V::Element>,
    store: Store<V::Element>,
) {
    // SAFETY: the caller's promises: every address is inside a panel or the tile.
    unsafe {
        let mut sums = [[V::zero(); N]; R];
        for _ in 0..depth {
            let mut columns = [V::zero(); N];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = V::load(right.add(n * V::COUNT));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = V::splat(*left.add(r));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = x.mul_add(column, *sum);
                }
            }
            left = left.add(R);
            right = right.add(N * V::COUNT);
        }
        if tile.columns < N * V::COUNT {
            return store_parts(&spilled(&sums), tile, store);
        }
        // Loops of constant length over few instructions: they are unrolled, so that the sums never leave their registers.
        match store {
            Store::Overwrite => {
                for (r, sums) in sums.iter().enumerate() {
                    for (n, &sum) in sums.iter().enumerate() {
                        sum.store(tile.first.add(r * tile.stride + n * V::COUNT));
                    }
                }
            }
            Store::Accumulate => {
                for (r, sums) in sums.iter().enumerate() {
                    for (n, &sum) in sums.iter().enumerate() {
                        let to = tile.first.add(r * tile.stride + n * V::COUNT);
                        V::load(to).add(sum).store(to);
                    }
                }
            }
            Store::AddRow(summand) => {
                for (r, sums) in sums.iter().enumerate() {
                    for (n, &sum) in sums.iter().enumerate() {
                        let row = V::load(summand.add(n * V::COUNT));
                        row.add(sum).store(tile.first.add(r * tile.stride + n * V::COUNT));
                    }
                }
            }
        }
    }
}

/// The sums of a tile in memory of their own: loops that index them would keep the sums themselves in memory.
#[inline(always)]
unsafe fn spilled<V: Register, const R: usize, const N: usize>(sums: &[[V; N]; R]) -> [[V; N]; R] {
    let mut copy = MaybeUninit::<[[V; N]; R]>::uninit();
    let first = copy.as_mut_ptr().cast::<V>();
    // SAFETY: every element is written.
    unsafe {
        for (r, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                first.add(r * N + n).write(sum);
            }
        }
        copy.assume_init()
    }
}

/// Stores a tile whose last columns fill no register.
///
/// # Safety
/// As [`multiply_panels`].
#[inline(always)]
unsafe fn store_parts<V: Register, const R: usize, const N: usize>(
    sums: &[[V; N]; R],
    tile: Tile<V::Element>,
    store: Store<V::Element>,
) {
    // SAFETY: the caller's promises.
    unsafe {
        for (r, sums) in sums.iter().enumerate() {
            let row = tile.first.add(r * tile.stride);
            for (n, &sum) in sums.iter().enumerate() {
                let valid = (tile.columns - n * V::COUNT).min(V::COUNT);
                store_part(sum, row.add(n * V::COUNT), valid, store, n * V::COUNT);
            }
        }
    }
}

/// Stores the first `valid` elements of a register, through memory of a full one.
///
/// # Safety
/// As many elements can be read and written at `to`, and read at `column` of an added row.
#[inline(always)]
unsafe fn store_part<V: Register>(sum: V, to: *mut V::Element, valid: usize, store: Store<V::Element>, column: usize) {
    // SAFETY: the buffer is as long as the longest register; the rest is the caller's promise.
    unsafe {
        let mut buffer = [sum; 2];
        let first = buffer.as_mut_ptr().cast::<V::Element>();
        let from = match store {
            Store::Overwrite => None,
            Store::Accumulate => Some(to.cast_const()),
            Store::AddRow(summand) => Some(summand.add(column)),
        };
        let sum = match from {
            None => sum,
            Some(from) => {
                std::ptr::copy_nonoverlapping(from, first, valid);
                V::load(first).add(sum)
            }
        };
        sum.store(first);
        std::ptr::copy_nonoverlapping(first, to, valid);
    }
}
