//! Cumulative sums and products.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use super::ScanKind;
use crate::error::Result;
use crate::parallel::{SharedPtr, over_ranges};
use crate::typed_slice::{LineShape, filled_by, filled_with, with_slice};
use crate::{check_supported, simd, with_type};

/// A type in which totals are computed.
trait Total: Copy + Send + Sync {
    /// What a sum begins with: -0.0 for floats, because 0.0 would turn a first -0.0 into 0.0.
    const ZERO: Self;
    const ONE: Self;

    fn plus(self, x: Self) -> Self;

    fn times(self, x: Self) -> Self;
}

impl Total for f64 {
    const ZERO: Self = -0.0;
    const ONE: Self = 1.0;

    #[inline(always)]
    fn plus(self, x: Self) -> Self {
        self + x
    }

    #[inline(always)]
    fn times(self, x: Self) -> Self {
        self * x
    }
}

impl Total for i64 {
    const ZERO: Self = 0;
    const ONE: Self = 1;

    #[inline(always)]
    fn plus(self, x: Self) -> Self {
        self.wrapping_add(x)
    }

    #[inline(always)]
    fn times(self, x: Self) -> Self {
        self.wrapping_mul(x)
    }
}

/// An element that is added up or multiplied.
trait Scanned: WithDType {
    type Total: Total;
    /// The type of results: i64 for integers.
    type Rounded: WithDType;

    fn widened(self) -> Self::Total;

    fn rounded(total: Self::Total) -> Self::Rounded;
}

macro_rules! scanned {
    ($($T:ty as $Total:ty, $Output:ty: |$x:ident| $widened:expr, |$total:ident| $rounded:expr;)*) => {$(
        impl Scanned for $T {
            type Total = $Total;
            type Rounded = $Output;

            #[inline(always)]
            fn widened(self) -> $Total {
                let $x = self;
                $widened
            }

            #[inline(always)]
            fn rounded($total: $Total) -> $Output {
                $rounded
            }
        }
    )*};
}
scanned! {
    f64 as f64, f64: |x| x, |total| total;
    f32 as f64, f32: |x| f64::from(x), |total| total as f32;
    half::f16 as f64, half::f16: |x| x.to_f64(), |total| half::f16::from_f64(total);
    half::bf16 as f64, half::bf16: |x| x.to_f64(), |total| half::bf16::from_f64(total);
    i64 as i64, i64: |x| x, |total| total;
    i32 as i64, i64: |x| i64::from(x), |total| total;
    i16 as i64, i64: |x| i64::from(x), |total| total;
    u32 as i64, i64: |x| i64::from(x), |total| total;
    u8 as i64, i64: |x| i64::from(x), |total| total;
}

/// Rows that are scanned together: each total waits for the one before it, and eight independent ones hide that latency.
const ROWS: usize = 8;

/// Adjacent elements of a row that are scanned before those of the next row: a cache line of f32. Element by element, rows
/// whose distance is a power of two share the sets of the first-level cache, and reads follow writes to addresses with the
/// same low bits.
const TILE: usize = 16;

/// Adjacent columns that are scanned together: 4 KiB of totals.
const COLUMNS: usize = 512;

/// Returns the cumulative sums or products along `dim`, and the total of every line (the dimension becomes 1, or stays 0).
///
/// `reverse` scans from the end; `exclusive` leaves the element itself out of its result, though not out of the total. Integers
/// give i64. Lines are divided over the threads of the pool.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
///
/// # Panics
/// If the kind is not a sum or a product.
pub fn scan_totals(x: &Tensor, dim: usize, kind: ScanKind, reverse: bool, exclusive: bool) -> Result<(Tensor, Tensor)> {
    check_supported(x)?;
    let direction = Direction { reverse, exclusive };
    with_type!(x.dtype(), T => match kind {
        ScanKind::Sum => with_slice::<T, _>(x, |elements| scan_by::<T, false>(elements, x.dims(), dim, direction))?,
        ScanKind::Prod => with_slice::<T, _>(x, |elements| scan_by::<T, true>(elements, x.dims(), dim, direction))?,
        _ => unreachable!("maxima and minima have indices"),
    }, otherwise unreachable!("checked above"))
}

#[derive(Clone, Copy)]
struct Direction {
    reverse: bool,
    exclusive: bool,
}

fn scan_by<T: Scanned, const PRODUCT: bool>(
    elements: &[T],
    dims: &[usize],
    dim: usize,
    direction: Direction,
) -> Result<(Tensor, Tensor)> {
    let lines = LineShape::new(dims, dim);
    let mut shape = dims.to_vec();
    shape[dim] = lines.n.min(1);
    let mut totals = None;
    // SAFETY: `scan_lines` writes every result, and the total of every line.
    let values = unsafe {
        filled_by::<T::Rounded>(dims, |values| {
            totals = Some(filled_by::<T::Rounded>(&shape, |totals| {
                if !elements.is_empty() {
                    scan_lines::<T, PRODUCT>(elements, lines, direction, values, totals);
                }
            }));
        })?
    };
    Ok((values, totals.expect("built inside")?))
}

fn scan_lines<T: Scanned, const PRODUCT: bool>(
    elements: &[T],
    lines: LineShape,
    direction: Direction,
    values: SharedPtr<T::Rounded>,
    totals: SharedPtr<T::Rounded>,
) {
    let LineShape { outer, n, inner } = lines;
    // Two elements are moved and one is added.
    const COST: usize = 4;
    let scan = |first: usize, total: usize, lanes: usize| {
        // SAFETY: the lanes begin at different elements of the tensor or different totals, and no other range has them.
        let (to, totals) =
            unsafe { (values.get().add(first), std::slice::from_raw_parts_mut(totals.get().add(total), lanes)) };
        ScanBlock::<T, PRODUCT> { from: &elements[first..], to, n, stride: inner, direction, totals }
    };
    if inner == 1 {
        over_ranges(outer, n * COST, ROWS, |range| {
            for row in range.clone().step_by(ROWS) {
                let rows = ROWS.min(range.end - row);
                if rows == ROWS {
                    simd::run(ScanRows(scan(row * n, row, ROWS)));
                } else {
                    (row..row + rows).for_each(|row| simd::run(ScanColumns(scan(row * n, row, 1))));
                }
            }
        });
        return;
    }
    let strips = inner.div_ceil(COLUMNS);
    over_ranges(outer * strips, n * inner.min(COLUMNS) * COST, 1, |range| {
        for strip in range {
            let (matrix, column) = (strip / strips, strip % strips * COLUMNS);
            let width = COLUMNS.min(inner - column);
            simd::run(ScanColumns(scan(matrix * n * inner + column, matrix * inner + column, width)));
        }
    });
}

/// Lines that are scanned together; `from` begins with the first element of the first one.
struct ScanBlock<'a, T: Scanned, const PRODUCT: bool> {
    from: &'a [T],
    to: *mut T::Rounded,
    n: usize,
    /// The distance between elements of a line.
    stride: usize,
    direction: Direction,
    /// One per line.
    totals: &'a mut [T::Rounded],
}

impl<T: Scanned, const PRODUCT: bool> ScanBlock<'_, T, PRODUCT> {
    const START: T::Total = if PRODUCT { T::Total::ONE } else { T::Total::ZERO };

    #[inline(always)]
    fn step(total: T::Total, x: T) -> T::Total {
        if PRODUCT { total.times(x.widened()) } else { total.plus(x.widened()) }
    }
}

impl<T: Scanned, const PRODUCT: bool> ScanBlock<'_, T, PRODUCT> {
    /// Scans adjacent elements of a row, and returns the total after them.
    #[inline(always)]
    fn tile(
        mut total: T::Total,
        line: &[T],
        results: &mut [MaybeUninit<T::Rounded>; TILE],
        direction: Direction,
    ) -> T::Total {
        for j in 0..line.len() {
            let at = if direction.reverse { line.len() - 1 - j } else { j };
            let next = Self::step(total, line[at]);
            results[at].write(T::rounded(if direction.exclusive { total } else { next }));
            total = next;
        }
        total
    }
}

/// Scans [`ROWS`] adjacent rows.
struct ScanRows<'a, T: Scanned, const PRODUCT: bool>(ScanBlock<'a, T, PRODUCT>);

impl<T: Scanned, const PRODUCT: bool> simd::Kernel for ScanRows<'_, T, PRODUCT> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let ScanBlock { from, to, n, direction, totals, .. } = self.0;
        let mut total = [ScanBlock::<T, PRODUCT>::START; ROWS];
        assert!(from.len() >= ROWS * n);
        let tiles = n.div_ceil(TILE);
        for tile in 0..tiles {
            let start = TILE * if direction.reverse { tiles - 1 - tile } else { tile };
            let width = TILE.min(n - start);
            for (row, total) in total.iter_mut().enumerate() {
                let line = &from[row * n + start..][..width];
                let mut results = [MaybeUninit::<T::Rounded>::uninit(); TILE];
                *total = match <&[T; TILE]>::try_from(line) {
                    // Of known length, so that the loop is unrolled.
                    Ok(line) => ScanBlock::<T, PRODUCT>::tile(*total, line, &mut results, direction),
                    Err(_) => ScanBlock::<T, PRODUCT>::tile(*total, line, &mut results, direction),
                };
                // SAFETY: there is a result for each of these elements, and as many were just written.
                unsafe { to.add(row * n + start).copy_from_nonoverlapping(results.as_ptr().cast(), width) };
            }
        }
        totals.iter_mut().zip(total).for_each(|(to, total)| *to = T::rounded(total));
    }
}

/// Scans up to [`COLUMNS`] adjacent columns.
struct ScanColumns<'a, T: Scanned, const PRODUCT: bool>(ScanBlock<'a, T, PRODUCT>);

impl<T: Scanned, const PRODUCT: bool> simd::Kernel for ScanColumns<'_, T, PRODUCT> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let ScanBlock { from, to, n, stride, direction, totals } = self.0;
        let width = totals.len();
        let mut total = [MaybeUninit::uninit(); COLUMNS];
        let total = filled_with(&mut total[..width], ScanBlock::<T, PRODUCT>::START);
        for j in 0..n {
            let at = if direction.reverse { n - 1 - j } else { j };
            let line = &from[at * stride..][..width];
            // SAFETY: there is a result for each of these elements, which no other block writes.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(at * stride), width) };
            if direction.exclusive {
                to.iter_mut().zip(total.iter()).for_each(|(to, total)| *to = T::rounded(*total));
            }
            for (total, &x) in total.iter_mut().zip(line) {
                *total = ScanBlock::<T, PRODUCT>::step(*total, x);
            }
            if !direction.exclusive {
                to.iter_mut().zip(total.iter()).for_each(|(to, total)| *to = T::rounded(*total));
            }
        }
        totals.iter_mut().zip(total.iter()).for_each(|(to, total)| *to = T::rounded(*total));
    }
}

/// Combines the scan `x` of a part of a dimension with the totals of the parts that are scanned before it.
///
/// `totals` has one total per part along `dim`; the first `before` of them count, from the end if `reverse`. The result has the
/// type of `x`, which is that of `totals`.
///
/// # Errors
/// If memory does not suffice.
///
/// # Panics
/// If the kind is not a sum or a product, or the type not that of a scan.
pub fn carry_totals(
    x: &Tensor,
    totals: &Tensor,
    dim: usize,
    kind: ScanKind,
    before: usize,
    reverse: bool,
) -> Result<Tensor> {
    match x.dtype() {
        DType::F64 => carry::<f64>(x, totals, dim, kind, before, reverse),
        DType::F32 => carry::<f32>(x, totals, dim, kind, before, reverse),
        DType::F16 => carry::<half::f16>(x, totals, dim, kind, before, reverse),
        DType::BF16 => carry::<half::bf16>(x, totals, dim, kind, before, reverse),
        DType::I64 => carry::<i64>(x, totals, dim, kind, before, reverse),
        other => unreachable!("no scan returns {other:?}"),
    }
}

fn carry<T: Scanned<Rounded = T>>(
    x: &Tensor,
    totals: &Tensor,
    dim: usize,
    kind: ScanKind,
    before: usize,
    reverse: bool,
) -> Result<Tensor> {
    let (LineShape { outer, n, inner }, parts) = (LineShape::new(x.dims(), dim), totals.dims()[dim]);
    let step = |total: T::Total, x: T| match kind {
        ScanKind::Sum => total.plus(x.widened()),
        ScanKind::Prod => total.times(x.widened()),
        _ => unreachable!("maxima and minima have indices"),
    };
    with_slice::<T, _>(totals, |totals| {
        // The total before this part, for every line.
        let head = |line: usize| {
            let (matrix, column) = (line / inner, line % inner);
            let part = |i: usize| totals[(matrix * parts + if reverse { parts - 1 - i } else { i }) * inner + column];
            (1..before).fold(part(0).widened(), |total, i| step(total, part(i)))
        };
        let heads: Vec<T::Total> = (0..outer * inner).map(head).collect();
        // SAFETY: the loop writes every element.
        with_slice::<T, _>(x, |elements| unsafe {
            filled_by::<T>(x.dims(), |to| {
                for (row, line) in elements.chunks_exact(inner.max(1)).enumerate() {
                    for (column, &x) in line.iter().enumerate() {
                        let total = step(heads[row / n * inner + column], x);
                        to.get().add(row * inner + column).write(T::rounded(total));
                    }
                }
            })
        })
    })??
}
