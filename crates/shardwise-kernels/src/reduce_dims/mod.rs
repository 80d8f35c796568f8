//! Reductions over dimensions of a tensor: sum, product, max, min, any, all, count_nonzero.
//!
//! The elements of one result are numbered in row-major order; element `i` accumulates in lane `i % LANES` of span `i / SPAN`,
//! and the lanes and then the spans are combined in a fixed order. So the bits of a result depend on its own elements only, not
//! on strides, threads or the order in which memory is read: a tensor sharded on a dimension that is kept gives the same bits
//! as a replicated one. Lanes also keep the rounding error of sums small. f32 accumulates sums and products in f64, which
//! costs little because memory bandwidth is the bottleneck.

mod accumulate;
mod spans;

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Tensor};

use super::convert::{Block, Compute};
use super::parallel::{SharedPtr, over_ranges};
use super::typed_slice::filled_with;
use super::uninit_buffer::UninitBuffer;
use super::{Number, contiguous, filled, first_element, integer_range, simd};
use crate::error::Result;
use crate::meta::TensorMeta;
use accumulate::{All, Any, CountNonzero, Min, Product};
use spans::{SPAN, Spans, TOGETHER};

pub(super) use accumulate::{Accumulate, LANES, Max, Sum, accumulate_lanes, combine_lanes};

/// Results that are reduced together when the innermost dimension is kept: their lanes of f64 take 16 KiB and stay in the
/// first-level cache.
const COLUMNS: usize = 128;

/// Elements converted at a time.
const CHUNK: usize = LANES * COLUMNS;

/// A reduction over dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DimReduction {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Product,
    /// Maximum; NaN if any element is NaN.
    Max,
    /// Minimum; NaN if any element is NaN.
    Min,
    /// 1 if any element is nonzero, else 0.
    Any,
    /// 1 if all elements are nonzero, else 0.
    All,
    /// Number of nonzero elements.
    CountNonzero,
}

impl DimReduction {
    /// The result of reducing no elements.
    fn neutral(self, dtype: DType) -> Number {
        let (least, most) = integer_range(dtype)
            .map_or((f64::NEG_INFINITY.into(), f64::INFINITY.into()), |(least, most)| {
                (Number::Integer(least), Number::Integer(most))
            });
        match self {
            // 0.0 and not -0.0, the neutral element of floats: PyTorch returns 0.0 for no elements and for a sum of -0.0.
            DimReduction::Sum | DimReduction::Any | DimReduction::CountNonzero => Number::Integer(0),
            DimReduction::Product | DimReduction::All => Number::Integer(1),
            DimReduction::Max => least,
            DimReduction::Min => most,
        }
    }
}

/// Reduces the dimensions `dims` (in ascending order) of `x` and returns a tensor of `shape` and `dtype`.
///
/// `shape` has as many elements as the dimensions that are kept; it may contain the reduced dimensions as 1. Sums and
/// products of floats accumulate in f64, those of integers in i64; max and min in the type of `x` (f16 and bf16 in f32);
/// any, all and count in i64. The result converts to `dtype` once. Divided over the threads of the pool; copies `x` only if no
/// permutation of its dimensions is contiguous with the reduced dimensions first, last or adjacent in the middle.
pub fn reduce_dims(kind: DimReduction, x: &Tensor, dims: &[usize], shape: &[usize], dtype: DType) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return filled(kind.neutral(dtype), &TensorMeta { shape: shape.to_vec(), dtype });
    }
    let (x, extent) = with_adjacent_dims(x, dims)?;
    match x.dtype() {
        DType::F64 => reduce_in::<f64>(kind, &x, extent, shape, dtype),
        t if t.is_float() => reduce_in::<f32>(kind, &x, extent, shape, dtype),
        _ => reduce_in::<i64>(kind, &x, extent, shape, dtype),
    }
}

/// Sizes of a contiguous tensor seen as `[outer, reduced, inner]`, of which the middle is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReducedExtent {
    outer: usize,
    reduced: usize,
    inner: usize,
}

/// Permutes the dimensions so that those to reduce are adjacent, and copies only if the result is not contiguous.
fn with_adjacent_dims(x: &Tensor, dims: &[usize]) -> Result<(Tensor, ReducedExtent)> {
    if x.is_contiguous()
        && let Some(extent) = extent(x.dims(), dims)
    {
        return Ok((x.clone(), extent));
    }
    let kept: Vec<usize> = (0..x.dims().len()).filter(|d| !dims.contains(d)).collect();
    let reduced: usize = dims.iter().map(|&d| x.dims()[d]).product();
    let others = x.elem_count() / reduced;
    let last = x.permute([&kept, dims].concat())?;
    let first = x.permute([dims, &kept].concat())?;
    if first.is_contiguous() && !last.is_contiguous() {
        return Ok((first, ReducedExtent { outer: 1, reduced, inner: others }));
    }
    Ok((contiguous(&last)?, ReducedExtent { outer: others, reduced, inner: 1 }))
}

/// The sizes, if the dimensions to reduce are adjacent.
fn extent(shape: &[usize], dims: &[usize]) -> Option<ReducedExtent> {
    let mut extent = ReducedExtent { outer: 1, reduced: 1, inner: 1 };
    for (d, &size) in shape.iter().enumerate().filter(|&(_, &size)| size != 1) {
        match (dims.contains(&d), extent.reduced, extent.inner) {
            (true, _, 1) => extent.reduced *= size,
            (true, ..) => return None,
            (false, 1, _) => extent.outer *= size,
            (false, ..) => extent.inner *= size,
        }
    }
    if extent.reduced == 1 {
        // Nothing is reduced: one row of many results is faster than many rows of one element.
        (extent.outer, extent.inner) = (1, extent.outer);
    }
    Some(extent)
}

fn reduce_in<C>(kind: DimReduction, x: &Tensor, extent: ReducedExtent, shape: &[usize], dtype: DType) -> Result<Tensor>
where
    C: Compute,
    Sum: Accumulate<C>,
    Product: Accumulate<C>,
    Max: Accumulate<C>,
    Min: Accumulate<C>,
    Any: Accumulate<C>,
    All: Accumulate<C>,
    CountNonzero: Accumulate<C>,
{
    match kind {
        DimReduction::Sum => reduce_by::<C, Sum>(x, extent, shape, dtype),
        DimReduction::Product => reduce_by::<C, Product>(x, extent, shape, dtype),
        DimReduction::Max => reduce_by::<C, Max>(x, extent, shape, dtype),
        DimReduction::Min => reduce_by::<C, Min>(x, extent, shape, dtype),
        DimReduction::Any => reduce_by::<C, Any>(x, extent, shape, dtype),
        DimReduction::All => reduce_by::<C, All>(x, extent, shape, dtype),
        DimReduction::CountNonzero => reduce_by::<C, CountNonzero>(x, extent, shape, dtype),
    }
}

fn reduce_by<C: Compute, S: Accumulate<C>>(
    x: &Tensor,
    extent: ReducedExtent,
    shape: &[usize],
    dtype: DType,
) -> Result<Tensor> {
    let ReducedExtent { outer, reduced, inner } = extent;
    let output = UninitBuffer::new(dtype, outer * inner)?;
    let (storage, layout) = x.storage_and_layout();
    let (first, from) = first_element(&storage, layout);
    let source = Elements { first, dtype: from, count: x.elem_count() };
    let results = ResultMemory { first: SharedPtr::new(output.first()), dtype };
    let spans = reduced.div_ceil(SPAN);
    if spans == 1 && inner == 1 {
        over_ranges(outer, reduced, COLUMNS, |rows| reduce_rows::<C, S>(&source, rows, reduced, results));
    } else if spans == 1 {
        reduce_strips::<C, S>(&source, extent, |at, sums| results.write(at, sums));
    } else {
        // Results of the spans of all results, which are then combined in order.
        let mut partial = vec![S::NEUTRAL; outer * spans * inner];
        let address = SharedPtr::new(partial.as_mut_ptr());
        // SAFETY: the strips of the spans are different parts of the vector.
        let write = |at: usize, sums: &[S::Acc]| unsafe {
            address.get().add(at).copy_from_nonoverlapping(sums.as_ptr(), sums.len());
        };
        if inner == 1 {
            over_ranges(outer * spans, SPAN, 1, |range| {
                let mut item = range.start;
                while item < range.end {
                    let from = item % spans * SPAN;
                    let first = item / spans * reduced + from;
                    let whole = ((reduced - from) / SPAN).min(range.end - item);
                    if let (true, true, Some(elements)) =
                        (simd::has_wide_registers(), whole >= TOGETHER, source.in_place::<C>())
                    {
                        let elements = &elements[first..][..TOGETHER * SPAN];
                        write(item, &simd::run(Spans::<C, S>::new(elements)));
                        item += TOGETHER;
                    } else {
                        write(item, &[reduce_piece::<C, S>(&source, first, SPAN.min(reduced - from))]);
                        item += 1;
                    }
                }
            });
        } else {
            reduce_strips::<C, S>(&source, extent, write);
        }
        for (i, spans) in partial.chunks_exact_mut(spans * inner).enumerate() {
            let (first, others) = spans.split_at_mut(inner);
            for other in others.chunks_exact(inner) {
                first.iter_mut().zip(other).for_each(|(a, b)| *a = S::combine(*a, *b));
            }
            results.write(i * inner, first);
        }
    }
    // SAFETY: every result was written.
    Ok(unsafe { output.finish(shape) })
}

/// The elements of a contiguous tensor, which the caller keeps alive.
struct Elements {
    first: *const u8,
    dtype: DType,
    count: usize,
}

// SAFETY: the elements are only read.
unsafe impl Sync for Elements {}

impl Elements {
    /// The elements as a slice, if they have this type.
    fn in_place<C: Compute>(&self) -> Option<&[C]> {
        // SAFETY: there are `count` elements of this type, and whoever built this keeps them alive.
        (self.dtype == C::DTYPE).then(|| unsafe { std::slice::from_raw_parts(self.first.cast(), self.count) })
    }

    /// Converts a block that begins at element `from`.
    fn load<'a, C: Compute>(&self, from: usize, block: Block, buffer: &'a mut [MaybeUninit<C>; CHUNK]) -> &'a [C] {
        let buffer = &mut buffer[..block.rows * block.width];
        assert!(from + (block.rows - 1) * block.row_stride + (block.width - 1) * block.stride < self.count);
        // SAFETY: the last element of the block is inside; the buffer has the size of the block.
        unsafe {
            C::load(self.dtype, self.first.add(from * self.dtype.size_in_bytes()), block, buffer);
            buffer.assume_init_ref()
        }
    }
}

/// Memory with room for all results, of which threads write different ones.
#[derive(Clone, Copy)]
struct ResultMemory {
    first: SharedPtr<u8>,
    dtype: DType,
}

impl ResultMemory {
    /// Writes results from number `at` on.
    fn write<A: Compute>(self, at: usize, results: &[A]) {
        // SAFETY: results have numbers for which there is room, and each is written once.
        unsafe { A::store(self.dtype, results, self.first.get().add(at * self.dtype.size_in_bytes())) };
    }
}

/// Reduces some rows of a matrix: the innermost dimension is reduced.
fn reduce_rows<C: Compute, S: Accumulate<C>>(
    source: &Elements,
    range: Range<usize>,
    width: usize,
    results: ResultMemory,
) {
    let mut done = [S::NEUTRAL; COLUMNS];
    if let Some(elements) = source.in_place::<C>() {
        for row in range.clone().step_by(COLUMNS) {
            let done = &mut done[..COLUMNS.min(range.end - row)];
            let rows = &elements[row * width..(row + done.len()) * width];
            simd::run(RowBlock::<C, S> { rows, width, done });
            results.write(row, done);
        }
        return;
    }
    let mut buffer = [MaybeUninit::<C>::uninit(); CHUNK];
    let together = (CHUNK / width).clamp(1, COLUMNS);
    for row in range.clone().step_by(together) {
        let done = &mut done[..together.min(range.end - row)];
        if width <= CHUNK {
            let block = Block { rows: 1, row_stride: 0, width: done.len() * width, stride: 1 };
            let rows = source.load(row * width, block, &mut buffer);
            simd::run(RowBlock::<C, S> { rows, width, done });
        } else {
            done[0] = reduce_piece::<C, S>(source, row * width, width);
        }
        results.write(row, done);
    }
}

/// Reduces `length` adjacent elements from number `from` on.
fn reduce_piece<C: Compute, S: Accumulate<C>>(source: &Elements, from: usize, length: usize) -> S::Acc {
    let mut lanes = [S::NEUTRAL; LANES];
    if let Some(elements) = source.in_place::<C>() {
        lanes = simd::run(RowPiece::<C, S> { lanes, piece: &elements[from..from + length] });
        return combine_lanes::<C, S>(lanes);
    }
    let mut buffer = [MaybeUninit::<C>::uninit(); CHUNK];
    for start in (0..length).step_by(CHUNK) {
        let block = Block { rows: 1, row_stride: 0, width: CHUNK.min(length - start), stride: 1 };
        let piece = source.load(from + start, block, &mut buffer);
        lanes = simd::run(RowPiece::<C, S> { lanes, piece });
    }
    combine_lanes::<C, S>(lanes)
}

/// Reduces the columns of all matrices, span by span; the innermost dimension is kept. Calls `write` with the results of a strip
/// of columns and the number of the first, counted over matrices, spans and columns.
fn reduce_strips<C: Compute, S: Accumulate<C>>(
    source: &Elements,
    extent: ReducedExtent,
    write: impl Fn(usize, &[S::Acc]) + Sync,
) {
    let ReducedExtent { outer, reduced, inner } = extent;
    let (spans, strips) = (reduced.div_ceil(SPAN), inner.div_ceil(COLUMNS));
    over_ranges(outer * spans * strips, reduced.min(SPAN) * inner.min(COLUMNS), 1, |range| {
        let mut lanes = [MaybeUninit::uninit(); LANES * COLUMNS];
        for item in range {
            let (span, column) = (item / strips, item % strips * COLUMNS);
            let row = span % spans * SPAN;
            let strip = ColumnStrip {
                from: (span / spans * reduced + row) * inner + column,
                rows: SPAN.min(reduced - row),
                stride: inner,
                width: COLUMNS.min(inner - column),
            };
            write(span * inner + column, reduce_strip::<C, S>(source, strip, &mut lanes));
        }
    });
}

/// Adjacent columns of a matrix: the first element, the number of rows, the distance between them, and the columns.
#[derive(Clone, Copy)]
struct ColumnStrip {
    from: usize,
    rows: usize,
    stride: usize,
    width: usize,
}

/// Reduces every column of a strip.
fn reduce_strip<'a, C: Compute, S: Accumulate<C>>(
    source: &Elements,
    strip: ColumnStrip,
    lanes: &'a mut [MaybeUninit<S::Acc>; LANES * COLUMNS],
) -> &'a [S::Acc] {
    let ColumnStrip { from, rows, stride, width } = strip;
    let lanes = filled_with(&mut lanes[..LANES * width], S::NEUTRAL);
    if let Some(elements) = source.in_place::<C>() {
        let elements = &elements[from..from + (rows - 1) * stride + width];
        simd::run(StripInPlace::<C, S> { lanes: &mut *lanes, elements, strip });
    } else {
        let mut buffer = [MaybeUninit::<C>::uninit(); CHUNK];
        for row in (0..rows).step_by(LANES) {
            let block = Block { rows: LANES.min(rows - row), row_stride: stride, width, stride: 1 };
            simd::run(LaneBlock::<C, S>::new(lanes, source.load(from + row * stride, block, &mut buffer)));
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (left, right) = lanes.split_at_mut(half * width);
        left.iter_mut().zip(right).for_each(|(a, b)| *a = S::combine(*a, *b));
        half /= 2;
    }
    &lanes[..width]
}

/// Several rows, each reduced to one result.
struct RowBlock<'a, C, S: Accumulate<C>> {
    rows: &'a [C],
    width: usize,
    done: &'a mut [S::Acc],
}

impl<C: Compute, S: Accumulate<C>> simd::Kernel for RowBlock<'_, C, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (done, row) in self.done.iter_mut().zip(self.rows.chunks_exact(self.width)) {
            *done = combine_lanes::<C, S>(accumulate_lanes::<C, S>([S::NEUTRAL; LANES], row));
        }
    }
}

/// A piece of one long row; all but the last piece have a multiple of [`LANES`] elements.
struct RowPiece<'a, C, S: Accumulate<C>> {
    lanes: [S::Acc; LANES],
    piece: &'a [C],
}

impl<C: Compute, S: Accumulate<C>> simd::Kernel for RowPiece<'_, C, S> {
    type Output = [S::Acc; LANES];

    #[inline(always)]
    fn run<const FMA: bool>(self) -> Self::Output {
        accumulate_lanes::<C, S>(self.lanes, self.piece)
    }
}

/// Accumulators, and one element for each of the first of them.
struct LaneBlock<'a, C, S: Accumulate<C>> {
    acc: &'a mut [S::Acc],
    elements: &'a [C],
    step: PhantomData<S>,
}

impl<'a, C, S: Accumulate<C>> LaneBlock<'a, C, S> {
    fn new(acc: &'a mut [S::Acc], elements: &'a [C]) -> Self {
        LaneBlock { acc, elements, step: PhantomData }
    }
}

impl<C: Compute, S: Accumulate<C>> simd::Kernel for LaneBlock<'_, C, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (acc, &x) in self.acc.iter_mut().zip(self.elements) {
            *acc = S::step(*acc, x);
        }
    }
}

/// A strip of columns whose elements need no conversion, and the lanes of its columns.
struct StripInPlace<'a, C, S: Accumulate<C>> {
    lanes: &'a mut [S::Acc],
    elements: &'a [C],
    strip: ColumnStrip,
}

/// Rows of one lane that are accumulated at a time, so that a lane is read and written once for all of them.
const ROWS_OF_LANE: usize = 4;

impl<C: Compute, S: Accumulate<C>> simd::Kernel for StripInPlace<'_, C, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let ColumnStrip { rows, stride, width, .. } = self.strip;
        let line = |row: usize| &self.elements[row * stride..][..width];
        let blocks = rows / (LANES * ROWS_OF_LANE);
        for block in 0..blocks {
            let first = block * LANES * ROWS_OF_LANE;
            for (i, lane) in self.lanes.chunks_exact_mut(width).enumerate() {
                let at = |number: usize| line(first + number * LANES + i);
                let [a, b, c, d] = [at(0), at(1), at(2), at(3)];
                for j in 0..width {
                    let acc = S::step(S::step(lane[j], a[j]), b[j]);
                    lane[j] = S::step(S::step(acc, c[j]), d[j]);
                }
            }
        }
        for row in blocks * LANES * ROWS_OF_LANE..rows {
            let lane = &mut self.lanes[row % LANES * width..][..width];
            lane.iter_mut().zip(line(row)).for_each(|(acc, &x)| *acc = S::step(*acc, x));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    const ALL: [DimReduction; 7] = [
        DimReduction::Sum,
        DimReduction::Product,
        DimReduction::Max,
        DimReduction::Min,
        DimReduction::Any,
        DimReduction::All,
        DimReduction::CountNonzero,
    ];

    fn numbers(shape: &[usize], dtype: DType) -> Tensor {
        let count = shape.iter().product::<usize>() as u32;
        let t = Tensor::arange(0u32, count, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        let small = t.affine(0.7, 1.0).unwrap().sin().unwrap().affine(3.0, 2.0).unwrap();
        small.round().unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
    }

    fn values(t: &Tensor) -> Vec<f64> {
        match t.elem_count() {
            0 => Vec::new(),
            _ => t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap(),
        }
    }

    fn plain(kind: DimReduction, row: &[f64]) -> f64 {
        let nonzero = row.iter().filter(|x| **x != 0.0).count();
        match kind {
            DimReduction::Sum => row.iter().sum(),
            DimReduction::Product => row.iter().product(),
            DimReduction::Max => row.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            DimReduction::Min => row.iter().copied().fold(f64::INFINITY, f64::min),
            DimReduction::Any => f64::from(u8::from(nonzero > 0)),
            DimReduction::All => f64::from(u8::from(nonzero == row.len())),
            DimReduction::CountNonzero => nonzero as f64,
        }
    }

    #[test]
    fn every_choice_of_dimensions_equals_the_plain_loop() {
        let shapes: [&[usize]; 6] = [&[7], &[5, 37], &[3, 4, 5], &[2, 300, 3], &[40, 1, 140], &[2, 3, 2, 3]];
        for shape in shapes {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::I64, DType::I16] {
                let x = numbers(shape, dtype);
                let transposed = numbers(&shape.iter().rev().copied().collect::<Vec<_>>(), dtype);
                let transposed = transposed.permute((0..shape.len()).rev().collect::<Vec<_>>()).unwrap();
                for chosen in 0..1usize << shape.len() {
                    let (dims, kept): (Vec<usize>, Vec<usize>) = (0..shape.len()).partition(|d| chosen >> d & 1 == 1);
                    let sizes: Vec<usize> = kept.iter().map(|&d| shape[d]).collect();
                    let width: usize = dims.iter().map(|&d| shape[d]).product();
                    for x in [&x, &transposed] {
                        let rows = values(&x.permute([&kept[..], &dims].concat()).unwrap());
                        for kind in ALL {
                            // A product of many is not exact in any order.
                            if width > 12 && kind == DimReduction::Product {
                                continue;
                            }
                            // Counts and sums are not exact in small types.
                            let small = matches!(dtype, DType::I16 | DType::BF16);
                            let wide = if small { DType::I64 } else { dtype };
                            let expected: Vec<f64> = rows.chunks(width).map(|row| plain(kind, row)).collect();
                            let got = reduce_dims(kind, x, &dims, &sizes, wide).unwrap();
                            assert_eq!(got.dims(), sizes);
                            assert_eq!(values(&got), expected, "{kind:?} of {dtype:?} {shape:?} over {dims:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_bits_of_a_result_depend_on_its_own_elements_only() {
        for dtype in [DType::F64, DType::F32, DType::F16] {
            let x = numbers(&[1000, 200], DType::F64).affine(0.1, 1e3).unwrap().to_dtype(dtype).unwrap();
            let all = values(&reduce_dims(DimReduction::Sum, &x, &[0], &[200], DType::F64).unwrap());
            for (start, len) in [(0, 1), (3, 17), (7, 150)] {
                let part = x.narrow(1, start, len).unwrap();
                let got = values(&reduce_dims(DimReduction::Sum, &part, &[0], &[len], DType::F64).unwrap());
                assert_eq!(got, all[start..start + len], "{dtype:?}");
                let got =
                    values(&reduce_dims(DimReduction::Sum, &part.t().unwrap(), &[1], &[len], DType::F64).unwrap());
                assert_eq!(got, all[start..start + len], "{dtype:?}");
            }
        }
    }

    #[test]
    fn results_of_many_elements_do_not_depend_on_the_number_of_threads() {
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut all = Vec::new();
                for dtype in [DType::F32, DType::F16, DType::I64] {
                    let x = numbers(&[SPAN + 100, 3], DType::F64).affine(0.1, 1.0).unwrap().to_dtype(dtype).unwrap();
                    for (dims, shape) in [(vec![0], vec![3]), (vec![1], vec![SPAN + 100]), (vec![0, 1], vec![])] {
                        let sum = reduce_dims(DimReduction::Sum, &x, &dims, &shape, DType::F64).unwrap();
                        let line = reduce_dims(DimReduction::Sum, &x.t().unwrap(), &[1], &[3], DType::F64).unwrap();
                        if dims == [0] {
                            assert_eq!(values(&sum), values(&line), "{dtype:?}, by columns and by rows");
                        }
                        let exact: f64 = values(&x).iter().sum();
                        let found: f64 = values(&sum).iter().sum();
                        assert!((found - exact).abs() <= 1e-9 * exact.abs(), "{dtype:?} over {dims:?}");
                        all.push(values(&sum));
                    }
                }
                all
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(4));
    }

    #[test]
    fn no_elements_give_the_neutral_element_and_nan_propagates() {
        let none = Tensor::zeros((4, 3), DType::I16, &Device::Cpu).unwrap().narrow(0, 4, 0).unwrap();
        let of = |kind| values(&reduce_dims(kind, &none, &[0], &[3], DType::I16).unwrap());
        assert_eq!(of(DimReduction::Max), vec![f64::from(i16::MIN); 3]);
        assert_eq!(of(DimReduction::Min), vec![f64::from(i16::MAX); 3]);
        assert_eq!(of(DimReduction::Product), vec![1.0; 3]);
        assert_eq!(reduce_dims(DimReduction::Sum, &none, &[1], &[0], DType::I64).unwrap().dims(), [0]);
        for place in 0..40 {
            let mut x = vec![1f32; 40];
            x[place] = f32::NAN;
            let x = Tensor::new(x, &Device::Cpu).unwrap();
            for kind in [DimReduction::Max, DimReduction::Min] {
                assert!(values(&reduce_dims(kind, &x, &[0], &[], DType::F32).unwrap())[0].is_nan(), "{place}");
            }
        }
        let bytes = Tensor::new(vec![200u8; 700], &Device::Cpu).unwrap();
        assert_eq!(values(&reduce_dims(DimReduction::Sum, &bytes, &[0], &[], DType::I64).unwrap()), [140_000.0]);
    }
}
