//! Products with few rows, as in decoding: the right factor is read once, where it is, because packing it would take longer
//! than multiplying.

use std::array::from_fn;
use std::ops::Range;

use super::instruction_set::{RegisterKernel, Vectorized};
use super::pack::{MatmulElement, Source, wide_lanes};
use super::product::{DEPTH, MatrixProduct};
use super::registers::{MAX_LANES, Register};
use crate::parallel::{SharedPtr, over_ranges};

/// Products with at most this many rows are computed here. With more, packing pays off (measured for 2048 x 8192).
pub(super) const MAX_ROWS: usize = 4;

/// Partial sums of a dot product, in as many registers as they take: the same on every instruction set, for the same bits.
const PARTS: usize = 32;

/// Registers of partial sums with the shortest registers.
const MAX_REGISTERS: usize = PARTS / 4;

/// A right factor of at least so many bytes is read column by column, that is, in the order of the memory: several columns at once
/// are several streams, which reach less of the bandwidth than one (14 compared with 23 GB/s measured, rows of 576 f32, one thread). A smaller one is in a
/// cache, where several columns at once share the elements of the left factor.
const SEQUENTIAL: usize = 256 << 10;

/// Columns that are summed together where those of the right factor are adjacent.
const COLUMNS: usize = 64;

/// Whether a product has few rows and a right factor whose rows or columns are contiguous.
pub(super) fn applies<S: MatmulElement>(product: &MatrixProduct<S>) -> bool {
    let one_stride = product.right.along == 1 && product.left.along == 1 || product.right.across == 1;
    product.m <= MAX_ROWS && !product.accumulates && one_stride && product.n * product.k >= 4096
}

/// Writes the product to `output`, a contiguous matrix.
///
/// # Safety
/// As `multiply`.
pub(super) unsafe fn multiply_few_rows<S: MatmulElement, O: MatmulElement<Wide = S::Wide>>(
    product: MatrixProduct<S>,
    output: *mut O,
    threads: bool,
) where
    S::Wide: Real + Vectorized,
{
    let shared = SharedProduct(product, SharedPtr::new(output));
    let body = |columns: Range<usize>| {
        // The whole value, so that the closure does not capture the addresses in it.
        let SharedProduct(product, output) = { shared };
        let mut row = 0;
        while row < product.m {
            // SAFETY: the rows are those of the factor and of the output.
            let (left, output) = unsafe {
                let left = Source { first: product.left.first.add(row * product.left.across), ..product.left };
                (left, output.get().add(row * product.n))
            };
            let (product, columns) = (MatrixProduct { left, ..product }, columns.clone());
            // Powers of two, to compile fewer loops.
            row += match product.m - row {
                1 => {
                    S::Wide::run(FewRows::<S, O, 1> { product, output, columns });
                    1
                }
                2 | 3 => {
                    S::Wide::run(FewRows::<S, O, 2> { product, output, columns });
                    2
                }
                _ => {
                    S::Wide::run(FewRows::<S, O, 4> { product, output, columns });
                    4
                }
            };
        }
    };
    // Reading an element of the right factor from memory takes about as long as writing one.
    let cost = product.k;
    if threads { over_ranges(product.n, cost, COLUMNS, body) } else { body(0..product.n) }
}

/// The type in which products are summed.
pub(super) trait Real: Copy + Default + Send + Sync + 'static {
    fn times(self, other: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

macro_rules! reals {
    ($($T:ty),*) => {$(
        impl Real for $T {
            #[inline(always)]
            fn times(self, other: $T) -> $T {
                self * other
            }
            #[inline(always)]
            fn plus(self, other: $T) -> $T {
                self + other
            }
        }
    )*};
}
reals!(f32, f64);

#[derive(Clone, Copy)]
struct SharedProduct<S: MatmulElement, O>(MatrixProduct<S>, SharedPtr<O>);
// SAFETY: threads read the factors, and write columns that do not overlap.
unsafe impl<S: MatmulElement, O> Send for SharedProduct<S, O> {}
// SAFETY: as above.
unsafe impl<S: MatmulElement, O> Sync for SharedProduct<S, O> {}

/// A range of columns of a product with `M` rows.
struct FewRows<S: MatmulElement, O, const M: usize> {
    product: MatrixProduct<S>,
    output: *mut O,
    columns: Range<usize>,
}

impl<S: MatmulElement, O: MatmulElement<Wide = S::Wide>, const M: usize> RegisterKernel<S::Wide> for FewRows<S, O, M>
where
    S::Wide: Real,
{
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Register<Element = S::Wide>>(self) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.product.right.along == 1 && self.product.left.along == 1 {
                self.dot_products::<V>();
            } else {
                self.sums_of_rows::<V>();
            }
        }
    }
}

impl<S: MatmulElement, O: MatmulElement<Wide = S::Wide>, const M: usize> FewRows<S, O, M>
where
    S::Wide: Real,
{
    #[inline(always)]
    fn write(&self, row: usize, column: usize, sum: S::Wide) {
        // SAFETY: the column is one of this range, and the bias has an element for it.
        unsafe {
            let sum = self.product.bias.map_or(sum, |bias| sum.plus(*bias.add(column)));
            self.output.add(row * self.product.n + column).write(O::narrow(sum));
        }
    }

    /// Columns of the right factor are contiguous: each is read once and multiplied with every row.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn dot_products<V: Register<Element = S::Wide>>(&self) {
        let mut column = self.columns.start;
        let in_cache = self.product.n * self.product.k * size_of::<S>() < SEQUENTIAL;
        // SAFETY: the caller's promise.
        unsafe {
            while in_cache && Self::fits::<V>(1, 4) && column + 4 <= self.columns.end {
                self.dot_rows::<V, 4>(column);
                column += 4;
            }
            while in_cache && Self::fits::<V>(1, 2) && column + 2 <= self.columns.end {
                self.dot_rows::<V, 2>(column);
                column += 2;
            }
            for column in column..self.columns.end {
                // What comes from memory is waited for, not computed: it is read and converted once.
                if in_cache { self.dot_rows::<V, 1>(column) } else { self.dot_columns::<V, M, 1>(0, column) }
            }
        }
    }

    /// Whether the registers have room for the sums of so many rows and columns.
    #[inline(always)]
    fn fits<V: Register>(rows: usize, columns: usize) -> bool {
        rows * columns * (PARTS / V::COUNT) <= V::SUMS
    }

    /// The products of some columns with all rows: as many rows at once as there are registers for their sums. The rows after these find
    /// the columns in the first cache.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn dot_rows<V: Register<Element = S::Wide>, const N: usize>(&self, column: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if Self::fits::<V>(M, N) {
                self.dot_columns::<V, M, N>(0, column);
            } else if M == 4 && Self::fits::<V>(2, N) {
                self.dot_columns::<V, 2, N>(0, column);
                self.dot_columns::<V, 2, N>(2, column);
            } else {
                for row in 0..M {
                    self.dot_columns::<V, 1, N>(row, column);
                }
            }
        }
    }

    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn dot_columns<V: Register<Element = S::Wide>, const R: usize, const N: usize>(
        &self,
        row: usize,
        column: usize,
    ) {
        let MatrixProduct { left, right, k, .. } = self.product;
        // SAFETY: rows and columns have `k` contiguous elements.
        unsafe {
            let rows: [*const S; R] = from_fn(|i| left.first.add((row + i) * left.across));
            let lines: [*const S; N] = from_fn(|j| right.first.add((column + j) * right.across));
            let mut sums = [[[V::zero(); MAX_REGISTERS]; N]; R];
            for begin in (0..k - k % PARTS).step_by(PARTS) {
                for l in 0..PARTS / V::COUNT {
                    let at = begin + l * V::COUNT;
                    let lines: [V; N] = from_fn(|j| wide_lanes::<V, S>(lines[j].add(at)));
                    for i in 0..R {
                        let row = wide_lanes::<V, S>(rows[i].add(at));
                        for j in 0..N {
                            sums[i][j][l] = row.mul_add(lines[j], sums[i][j][l]);
                        }
                    }
                }
            }
            for i in 0..R {
                for j in 0..N {
                    let mut parts = [S::Wide::default(); PARTS];
                    for (l, sum) in sums[i][j][..PARTS / V::COUNT].iter().enumerate() {
                        sum.store(parts.as_mut_ptr().add(l * V::COUNT));
                    }
                    for p in k - k % PARTS..k {
                        let part = &mut parts[p % PARTS];
                        *part = part.plus((*rows[i].add(p)).wide().times((*lines[j].add(p)).wide()));
                    }
                    // Halves are added until one sum is left.
                    let mut half = PARTS / 2;
                    while half > 0 {
                        for l in 0..half {
                            parts[l] = parts[l].plus(parts[l + half]);
                        }
                        half /= 2;
                    }
                    self.write(row + i, column + j, parts[0]);
                }
            }
        }
    }

    /// Rows of the right factor are contiguous: each adds a multiple of itself to the sums of its columns.
    ///
    /// # Safety
    /// The processor has the instructions of `V`.
    #[inline(always)]
    unsafe fn sums_of_rows<V: Register<Element = S::Wide>>(&self) {
        let mut column = self.columns.start;
        // SAFETY: the caller's promise.
        unsafe {
            // Four registers of four rows are more sums than AVX2 has registers for, and still faster than two: longer runs of each row
            // are read from memory.
            while column + 4 * V::COUNT <= self.columns.end {
                self.sum_columns::<V, 4>(column);
                column += 4 * V::COUNT;
            }
            while column + V::COUNT <= self.columns.end {
                self.sum_columns::<V, 1>(column);
                column += V::COUNT;
            }
        }
        let MatrixProduct { left, right, k, .. } = self.product;
        for column in column..self.columns.end {
            for i in 0..M {
                // One lane of a register, for the same rounding as in the other columns.
                // SAFETY: elements of both factors; the caller's promise.
                unsafe {
                    let mut total = V::zero();
                    for begin in (0..k).step_by(DEPTH) {
                        let mut sum = V::zero();
                        for p in begin..(begin + DEPTH).min(k) {
                            let x = V::splat((*left.first.add(i * left.across + p * left.along)).wide());
                            sum = x.mul_add(V::splat((*right.first.add(p * right.along + column)).wide()), sum);
                        }
                        total = total.add(sum);
                    }
                    let mut parts = [S::Wide::default(); MAX_LANES];
                    total.store(parts.as_mut_ptr());
                    self.write(i, column, parts[0]);
                }
            }
        }
    }

    /// # Safety
    /// The processor has the instructions of `V`, and this range has the columns.
    #[inline(always)]
    unsafe fn sum_columns<V: Register<Element = S::Wide>, const N: usize>(&self, column: usize) {
        let MatrixProduct { left, right, k, .. } = self.product;
        // SAFETY: elements of both factors and of the output.
        unsafe {
            let mut totals = [[V::zero(); N]; M];
            for begin in (0..k).step_by(DEPTH) {
                let mut sums = [[V::zero(); N]; M];
                for p in begin..(begin + DEPTH).min(k) {
                    let line = right.first.add(p * right.along + column);
                    let line: [V; N] = from_fn(|n| wide_lanes::<V, S>(line.add(n * V::COUNT)));
                    for i in 0..M {
                        let x = V::splat((*left.first.add(i * left.across + p * left.along)).wide());
                        for n in 0..N {
                            sums[i][n] = x.mul_add(line[n], sums[i][n]);
                        }
                    }
                }
                for i in 0..M {
                    for n in 0..N {
                        totals[i][n] = totals[i][n].add(sums[i][n]);
                    }
                }
            }
            for (i, totals) in totals.iter().enumerate() {
                let mut parts = [S::Wide::default(); MAX_LANES];
                for (n, total) in totals.iter().enumerate() {
                    total.store(parts.as_mut_ptr());
                    for (l, &part) in parts[..V::COUNT].iter().enumerate() {
                        self.write(i, column + n * V::COUNT + l, part);
                    }
                }
            }
        }
    }
}
