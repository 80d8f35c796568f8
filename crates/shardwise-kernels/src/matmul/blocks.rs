//! The outer loops of a product: blocks of both factors are packed into panels, and tiles of the result computed from them.
//!
//! Every element of the result is the sum over blocks of [`DEPTH`] products, each block summed in order. So its bits depend
//! neither on the other sizes nor on threads, and are the same with AVX2 and AVX-512.

use std::any::TypeId;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::f16;

use super::few_rows::{self, Real, multiply_few_rows};
use super::instruction_set::{RegisterKernel, Vectorized};
use super::pack::{MatmulElement, Panels, Source, pack};
use super::product::{DEPTH, Epilogue, MatrixProduct};
use super::registers::{MAX_LANES, Register};
use super::tile::{Store, Tile, multiply_panels};
use crate::error::Result;
use crate::parallel::{SharedPtr, over_ranges};
use crate::reserve;
use crate::simd::{self, Kernel};

/// Columns of the right factor whose panels (1 MiB in f32) stay in the second cache while all rows pass. A multiple of the
/// width of a tile on every instruction set.
const CACHED_COLUMNS: usize = 480;

/// Rows and columns of the result that are packed at once, to bound the memory of panels.
const MAX_SIDE: usize = 3840;

/// Multiplications that take as long as one unit of [`over_ranges`].
pub(super) const MULTIPLICATIONS_PER_UNIT: usize = 16;

/// Elements of panels that are on the stack, for products so small that an allocation would show.
const ON_STACK: usize = 1024;

/// Rows and columns of the result that are summed before they are rounded to a half type.
const ROUNDED_SIDE: usize = 960;

/// Bytes of a line of the cache.
const LINE: usize = 64;

#[repr(align(64))]
struct StackPanels<T>([T; ON_STACK]);

/// Writes a product to `output`, a contiguous matrix, on the threads of the pool if `threads` is set and it is large; then applies
/// the epilogue to it, which only a result that is not rounded may have.
///
/// # Safety
/// All addresses, sizes and strides belong to live memory, and nobody else uses the output.
pub(super) unsafe fn multiply<S: MatmulElement, O: MatmulElement<Wide = S::Wide>>(
    product: MatrixProduct<S>,
    output: *mut O,
    threads: bool,
    epilogue: Option<Epilogue<'_, S::Wide>>,
) -> Result<()>
where
    S::Wide: Vectorized + Real,
{
    if few_rows::applies(&product) {
        // SAFETY: the caller's promises.
        unsafe {
            multiply_few_rows(product, output, threads);
            if let Some(epilogue) = epilogue {
                epilogue.apply_to(output.cast(), 0, product.m * product.n);
            }
        }
        return Ok(());
    }
    let is_rounded = TypeId::of::<O>() != TypeId::of::<S::Wide>();
    debug_assert!(!is_rounded || epilogue.is_none(), "an epilogue sees sums before they are rounded");
    let side = if is_rounded { ROUNDED_SIDE } else { MAX_SIDE };
    let (m, n, depth) = (product.m.min(side), product.n.min(side), product.k.min(DEPTH));
    let [left, right] = [m * depth, n.min(CACHED_COLUMNS + MAX_LANES).next_multiple_of(MAX_LANES) * depth];
    let sums = if is_rounded { m * n } else { 0 };
    let left = left.next_multiple_of(MAX_LANES);
    let mut stack = MaybeUninit::<StackPanels<S::Wide>>::uninit();
    let mut heap = Vec::new();
    let scratch: *mut S::Wide = if left + right + sums <= ON_STACK {
        stack.as_mut_ptr().cast()
    } else {
        heap = reserve::<MaybeUninit<S::Wide>>(left + right + sums + MAX_LANES)?;
        // Registers that are read across two lines of the cache would take twice as long.
        let first = heap.as_mut_ptr();
        // SAFETY: there is room for as many elements as the longest register has.
        unsafe { first.add(first.align_offset(LINE)).cast() }
    };
    // SAFETY: three parts of the memory, one after the other, each at the beginning of a line.
    let [left, right, sums] = unsafe { [scratch, scratch.add(left), scratch.add(left + right)] };
    for i in (0..product.m).step_by(side) {
        for j in (0..product.n).step_by(side) {
            // SAFETY: parts of the operands, with room for their panels and sums.
            unsafe {
                let part = MatrixProduct {
                    m: m.min(product.m - i),
                    n: n.min(product.n - j),
                    left: Source { first: product.left.first.add(i * product.left.across), ..product.left },
                    right: Source { first: product.right.first.add(j * product.right.across), ..product.right },
                    bias: product.bias.map(|bias| bias.add(j)),
                    ..product
                };
                let to = output.add(i * product.n + j);
                if is_rounded {
                    part.multiply([left, right], (sums, part.n), threads, None);
                    round_rows(sums, to, [part.m, part.n], product.n, threads);
                } else {
                    let results =
                        |epilogue: Epilogue<'_, S::Wide>| SharedPtr::new(epilogue.results.get().add(i * product.n + j));
                    let epilogue = epilogue.map(|epilogue| Epilogue { results: results(epilogue), ..epilogue });
                    part.multiply([left, right], (to.cast(), product.n), threads, epilogue);
                }
            }
        }
    }
    drop(heap);
    Ok(())
}

/// Rounds a contiguous matrix of sums to the type of the result, whose rows are `stride` apart.
///
/// # Safety
/// Both matrices have these sizes.
unsafe fn round_rows<O: MatmulElement>(
    sums: *const O::Wide,
    output: *mut O,
    [m, n]: [usize; 2],
    stride: usize,
    threads: bool,
) {
    let (sums, output) = (SharedPtr::new(sums.cast_mut()), SharedPtr::new(output));
    divide(threads, m, n, |rows| {
        for row in rows {
            // SAFETY: the row is inside both matrices, and no other range has it.
            let (from, to) =
                unsafe { (std::slice::from_raw_parts(sums.get().add(row * n), n), output.get().add(row * stride)) };
            simd::run(RoundRow { from, to });
        }
    });
}

struct RoundRow<'a, O: MatmulElement> {
    from: &'a [O::Wide],
    to: *mut O,
}

impl<O: MatmulElement> Kernel for RoundRow<'_, O> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        #[allow(unused_mut, reason = "other processors round one by one")]
        let mut done = 0;
        #[cfg(target_arch = "x86_64")]
        if FMA && TypeId::of::<O>() == TypeId::of::<f16>() {
            use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm_storeu_si128, _mm256_cvtps_ph, _mm256_loadu_ps};
            while done + 8 <= self.from.len() {
                // SAFETY: the row has as many elements, the sums of f16 are f32, and the sets with fused multiply-add include F16C.
                unsafe {
                    let sums = _mm256_loadu_ps(self.from.as_ptr().add(done).cast());
                    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(sums);
                    _mm_storeu_si128(self.to.add(done).cast(), halves);
                }
                done += 8;
            }
        }
        for (i, &x) in self.from.iter().enumerate().skip(done) {
            // SAFETY: the row has as many elements.
            unsafe { self.to.add(i).write(O::narrow(x)) };
        }
    }
}

impl<S: MatmulElement> MatrixProduct<S>
where
    S::Wide: Vectorized,
{
    /// # Safety
    /// As [`multiply`]; the addresses in `panels` have room for those of one block of the contracted dimension. `output` is the
    /// address of the result and the stride of its rows.
    unsafe fn multiply(
        self,
        panels: [*mut S::Wide; 2],
        output: (*mut S::Wide, usize),
        threads: bool,
        epilogue: Option<Epilogue<'_, S::Wide>>,
    ) {
        let shape = S::Wide::run(QueryShape);
        for begin in (0..self.k.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(self.k - begin);
            let block = PackedBlock { product: self, begin, depth, panels };
            let store = match self.bias {
                _ if begin > 0 || self.accumulates => Store::Accumulate,
                Some(bias) => Store::AddRow(bias),
                None => Store::Overwrite,
            };
            let rows = self.m.div_ceil(shape.rows);
            divide(threads, rows, shape.rows * depth * 2, |panels| S::Wide::run(PackLeft(&block, panels)));
            let mut group = 0..0;
            while group.end < self.n {
                // A last group of one register per row would be slow.
                let rest = self.n - group.end;
                let width = if rest <= CACHED_COLUMNS + MAX_LANES { rest } else { CACHED_COLUMNS };
                group = group.end..group.end + width;
                let columns = ColumnPanels { group: group.clone(), shape };
                let pack = |panels| S::Wide::run(PackRight { block: &block, columns: &columns, panels });
                divide(threads, columns.count(), shape.columns() * depth * 2, pack);
                let epilogue = epilogue.filter(|_| begin + depth == self.k);
                let tiles = TileGrid { m: self.m, columns: &columns, depth, panels, output, store, epilogue };
                let cost = shape.rows * width * depth / MULTIPLICATIONS_PER_UNIT;
                divide(threads, rows, cost, |rows| S::Wide::run(TileRange { tiles: &tiles, rows }));
            }
        }
    }
}

fn divide(threads: bool, count: usize, cost: usize, body: impl Fn(Range<usize>) + Sync) {
    if threads {
        over_ranges(count, cost, 1, body);
    } else if count > 0 {
        body(0..count);
    }
}

/// A full tile of the instruction set in use.
#[derive(Clone, Copy)]
struct TileShape {
    rows: usize,
    /// Registers per row.
    vectors: usize,
    /// Elements in a register.
    lanes: usize,
}

impl TileShape {
    fn columns(self) -> usize {
        self.vectors * self.lanes
    }
}

struct QueryShape;

impl<T> RegisterKernel<T> for QueryShape {
    type Output = TileShape;

    #[inline(always)]
    unsafe fn run<V: Register<Element = T>>(self) -> TileShape {
        TileShape { rows: V::ROWS, vectors: V::VECTORS, lanes: V::COUNT }
    }
}

/// The panels of a group of columns: as wide as a tile, except that where a tile has three registers the last four are two panels
/// of two and not three and one, because a tile of one register per row waits for its own sums.
struct ColumnPanels {
    group: Range<usize>,
    shape: TileShape,
}

impl ColumnPanels {
    /// Registers across all columns.
    fn registers(&self) -> usize {
        self.group.len().div_ceil(self.shape.lanes)
    }

    fn ends_with_two_pairs(&self) -> bool {
        self.shape.vectors == 3 && self.registers() >= 4 && self.registers() % 3 == 1
    }

    fn count(&self) -> usize {
        self.registers().div_ceil(self.shape.vectors)
    }

    /// The columns of a panel, counted from the first of the group.
    #[inline(always)]
    fn columns(&self, panel: usize) -> Range<usize> {
        let (width, total) = (self.shape.columns(), self.group.len());
        let (mut begin, mut end) = (panel * width, ((panel + 1) * width).min(total));
        if self.ends_with_two_pairs() {
            let last = self.count() - 1;
            end = if panel + 1 == last { end - self.shape.lanes } else { end };
            begin = if panel == last { begin - self.shape.lanes } else { begin };
        }
        begin..end
    }
}

/// A block of the contracted dimension, and the addresses of its panels.
///
/// The panel of rows that begin at `i` is `i * depth` elements after the first, and so it is for columns.
struct PackedBlock<S: MatmulElement> {
    product: MatrixProduct<S>,
    begin: usize,
    depth: usize,
    panels: [*mut S::Wide; 2],
}

// SAFETY: threads read the operands, and write panels that do not overlap.
unsafe impl<S: MatmulElement> Sync for PackedBlock<S> {}

struct PackLeft<'a, S: MatmulElement>(&'a PackedBlock<S>, Range<usize>);

impl<S: MatmulElement> RegisterKernel<S::Wide> for PackLeft<'_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Register<Element = S::Wide>>(self) {
        let PackedBlock { product: MatrixProduct { m, left, .. }, begin, depth, panels: [first, _] } = *self.0;
        let (start, end) = (self.1.start * V::ROWS, (self.1.end * V::ROWS).min(m));
        let full = end - end % V::ROWS;
        // SAFETY: the rows are inside the matrix, and the panels inside their memory.
        unsafe {
            let source = Source { first: left.first.add(begin * left.along), ..left };
            let mut panels = Panels { first, width: V::ROWS, multiple: 1, depth };
            pack::<V, S>(source, start..full.max(start), panels);
            // The last rows are several panels, each half as wide as the one before or less.
            for (row, rows) in row_parts::<V>(full.max(start) / V::ROWS, end) {
                panels.width = rows;
                pack::<V, S>(source, row..row + rows, panels);
            }
        }
    }
}

/// Packs some panels of a group of columns.
struct PackRight<'a, S: MatmulElement> {
    block: &'a PackedBlock<S>,
    columns: &'a ColumnPanels,
    panels: Range<usize>,
}

impl<S: MatmulElement> RegisterKernel<S::Wide> for PackRight<'_, S> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Register<Element = S::Wide>>(self) {
        let PackedBlock { product: MatrixProduct { right, .. }, begin, depth, panels: [_, first] } = *self.block;
        // SAFETY: the columns are inside the matrix, and the panels inside their memory.
        unsafe {
            let at = begin * right.along + self.columns.group.start * right.across;
            let source = Source { first: right.first.add(at), ..right };
            let panels = Panels { first, width: V::VECTORS * V::COUNT, multiple: V::COUNT, depth };
            // All full panels at once, so that rows of the matrix are read in order, then the narrower ones.
            let full = self.panels.clone().filter(|&panel| self.columns.columns(panel).len() == panels.width).count();
            let begin = self.columns.columns(self.panels.start).start;
            pack::<V, S>(source, begin..begin + full * panels.width, panels);
            for panel in self.panels.start + full..self.panels.end {
                let columns = self.columns.columns(panel);
                pack::<V, S>(source, columns.clone(), Panels { width: columns.len(), ..panels });
            }
        }
    }
}

/// The rows of a panel as (first, number): one full part, or several at the end of the matrix, whose numbers are powers of two.
#[inline(always)]
fn row_parts<V: Register>(panel: usize, m: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut row = panel * V::ROWS;
    let end = (row + V::ROWS).min(m);
    std::iter::from_fn(move || {
        let left = end - row;
        let rows = match left {
            0 => return None,
            left if left == V::ROWS => left,
            left => 1usize << left.ilog2(),
        };
        row += rows;
        Some((row - rows, rows))
    })
}

/// All tiles of a group of columns, for one block of the contracted dimension.
struct TileGrid<'a, T> {
    m: usize,
    columns: &'a ColumnPanels,
    depth: usize,
    panels: [*mut T; 2],
    /// The first element of the result, and the stride of its rows.
    output: (*mut T, usize),
    store: Store<T>,
    /// Set for the last block of the contracted dimension.
    epilogue: Option<Epilogue<'a, T>>,
}

// SAFETY: threads read panels, and write tiles and results that do not overlap.
unsafe impl<T> Sync for TileGrid<'_, T> {}

/// The tiles of some panels of rows.
struct TileRange<'a, T> {
    tiles: &'a TileGrid<'a, T>,
    rows: Range<usize>,
}

impl<T: Copy> RegisterKernel<T> for TileRange<'_, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Register<Element = T>>(self) {
        let TileGrid { m, columns: group, depth, panels: [left, right], output: (output, stride), store, epilogue } =
            *self.tiles;
        for panel in self.rows {
            for (row, rows) in row_parts::<V>(panel, m) {
                for panel in 0..group.count() {
                    let columns = group.columns(panel);
                    // SAFETY: panels and tile are inside their memory, and no other item has this tile.
                    unsafe {
                        let column = group.group.start + columns.start;
                        let first = output.add(row * stride + column);
                        let tile = Tile { first, stride, rows, columns: columns.len() };
                        let store = match store {
                            Store::AddRow(bias) => Store::AddRow(bias.add(column)),
                            other => other,
                        };
                        multiply_panels::<V>(
                            depth,
                            left.add(row * depth),
                            right.add(columns.start * depth),
                            tile,
                            store,
                        );
                    }
                }
                let Some(epilogue) = epilogue else { continue };
                for row in row..row + rows {
                    // SAFETY: the tiles above completed these elements.
                    unsafe { epilogue.apply_to(output, row * stride + group.group.start, group.group.len()) };
                }
            }
        }
    }
}
