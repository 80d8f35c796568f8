//! Selection by index along one dimension: whole slices (`index_select`) or single elements (`gather`).

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Tensor};

use super::index_range::{INDEX_BLOCK, IndexElements, IndexRange, NO_INDEX};
use super::parallel::{SharedPtr, over_ranges};
use super::typed_slice::LineShape;
use super::{Assembly, contiguous, with_first_element};
use crate::error::Result;
use crate::meta::TensorMeta;

/// Selects the slices of `x` at `indices` along `dim`, as `torch.index_select`; zeros for [`NO_INDEX`].
///
/// The result has the shape of `x` with `indices.len()` along `dim`. Any supported type; one copy of each slice, divided over
/// the threads of the pool.
///
/// # Panics
/// If an index is not below the size of the dimension.
pub fn index_select(x: &Tensor, dim: usize, indices: &[usize]) -> Result<Tensor> {
    let zero = vec![0; slice_bytes(x, dim)];
    select(x, dim, &[indices.len()], &zero, |range, body| body(range.start, &indices[range]))
}

/// Selects the slices of `x` along `dim` by an integer tensor of any shape, whose dimensions replace that one.
///
/// `held` says which indices are where in `x`; the slices of missing ones are neutral elements of a sum, -0.0 in floating
/// point. Any supported type.
///
/// # Panics
/// If `held` has more indices than the dimension.
pub fn index_select_by(x: &Tensor, dim: usize, index: &Tensor, held: &IndexRange) -> Result<Tensor> {
    let index = contiguous(index)?;
    let elements = IndexElements::new(&index);
    let missing = neutral_of_sums(x.dtype()).repeat(slice_bytes(x, dim) / x.dtype().size_in_bytes());
    select(x, dim, index.dims(), &missing, |range, body| elements.for_each_block(range, held, body))
}

/// The bytes of the number that changes no term which it is added to: -0.0 in floating point, because `-0.0 + 0.0` is `0.0`.
pub(super) fn neutral_of_sums(dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0; dtype.size_in_bytes()];
    if dtype.is_float() {
        let last = if cfg!(target_endian = "little") { bytes.len() - 1 } else { 0 };
        bytes[last] = 0x80;
    }
    bytes
}

/// The bytes of one slice of a dimension.
fn slice_bytes(x: &Tensor, dim: usize) -> usize {
    LineShape::new(x.dims(), dim).inner * x.dtype().size_in_bytes()
}

/// Selects slices, `missing` for [`NO_INDEX`]; `blocks` passes on the numbers and positions of indices in a range, block after block.
fn select(
    x: &Tensor,
    dim: usize,
    index_shape: &[usize],
    missing: &[u8],
    blocks: impl Fn(Range<usize>, &mut dyn FnMut(usize, &[usize])) + Sync,
) -> Result<Tensor> {
    let shape = [&x.dims()[..dim], index_shape, &x.dims()[dim + 1..]].concat();
    let LineShape { outer, n, inner } = LineShape::new(x.dims(), dim);
    let (count, bytes) = (index_shape.iter().product::<usize>(), inner * x.dtype().size_in_bytes());
    let selected = Assembly::new(TensorMeta { shape, dtype: x.dtype() })?;
    let x = contiguous(x)?;
    if bytes == 0 || count == 0 || outer == 0 {
        // SAFETY: there are no elements.
        return Ok(unsafe { selected.finish() });
    }
    with_first_element(&x, |source, _| {
        let source = SharedPtr::new(source.cast_mut());
        // Slices are copied at about 8 bytes per unit of cost; an index takes a few.
        over_ranges(outer * count, bytes / 8 + 8, 1, |range| {
            for matrix in range.start / count..range.end.div_ceil(count) {
                let first = matrix * count;
                let part = range.start.max(first) - first..range.end.min(first + count) - first;
                blocks(part, &mut |from, positions| {
                    assert!(positions.iter().all(|&p| p < n || p == NO_INDEX), "an index outside of {n}");
                    // SAFETY: the tensor is contiguous, positions are below `n` or NO_INDEX, and the slices of this range
                    // are inside the target and written by no other.
                    unsafe {
                        let to = selected.range::<u8>((first + from) * bytes);
                        let matrix = source.get().cast_const().add(matrix * n * bytes);
                        match bytes {
                            1 => copy_slices::<[u8; 1]>(matrix, to, positions, missing),
                            2 => copy_slices::<[u8; 2]>(matrix, to, positions, missing),
                            4 => copy_slices::<[u8; 4]>(matrix, to, positions, missing),
                            8 => copy_slices::<[u8; 8]>(matrix, to, positions, missing),
                            _ => {
                                for (i, &position) in positions.iter().enumerate() {
                                    if let Some(&next) = positions.get(i + AHEAD) {
                                        prefetch(matrix.wrapping_add(next.wrapping_mul(bytes)), bytes);
                                    }
                                    let to = to.add(i * bytes);
                                    match position {
                                        NO_INDEX => to.copy_from_nonoverlapping(missing.as_ptr(), bytes),
                                        _ => to.copy_from_nonoverlapping(matrix.add(position * bytes), bytes),
                                    }
                                }
                            }
                        }
                    }
                });
            }
        });
    });
    // SAFETY: the ranges are all slices, and each was written.
    Ok(unsafe { selected.finish() })
}

/// Slices between the one that is copied and the one that is requested from memory, where the processor cannot foresee the
/// next address. 4 hide the latency for rows of 1 KiB (measured).
const AHEAD: usize = 4;

/// Requests the beginning of a slice from memory; the processor foresees the rest of longer ones. Any address is allowed.
#[inline(always)]
fn prefetch(slice: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes.min(1024)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, and it faults at no address.
        unsafe { _mm_prefetch(slice.wrapping_add(line).cast(), _MM_HINT_T0) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, bytes);
}

/// Copies slices of the size of `B`.
///
/// # Safety
/// Positions are [`NO_INDEX`] or those of slices that can be read from `source`; as many slices can be written at `to`, and
/// `missing` has the size of one.
unsafe fn copy_slices<B: Copy>(source: *const u8, to: *mut u8, positions: &[usize], missing: &[u8]) {
    let (source, to) = (source.cast::<B>(), to.cast::<B>());
    // SAFETY: the caller's promise; an array of bytes needs no alignment.
    let missing = unsafe { missing.as_ptr().cast::<B>().read() };
    for (i, &position) in positions.iter().enumerate() {
        // SAFETY: the caller's promise; arrays of bytes need no alignment.
        unsafe {
            match position {
                NO_INDEX => to.add(i).write(missing),
                _ => to.add(i).write(source.add(position).read()),
            }
        }
    }
}

/// Selects one element of `x` for every element of an integer tensor, as `torch.gather`.
///
/// `held` says which indices are where along `dim` of `x`; the results of missing ones are neutral elements of a sum, -0.0 in
/// floating point. The other coordinates are those of the element of `index`. Any supported type; divided over the threads of the pool.
///
/// # Panics
/// If a coordinate is outside of `x`.
pub fn gather(x: &Tensor, dim: usize, index: &Tensor, held: &IndexRange) -> Result<Tensor> {
    let elem = x.dtype().size_in_bytes();
    let gathered = Assembly::new(TensorMeta { shape: index.dims().to_vec(), dtype: x.dtype() })?;
    let (x, index) = (contiguous(x)?, contiguous(index)?);
    let elements = IndexElements::new(&index);
    let offsets = ElementOffsets::new(x.dims(), dim, index.dims());
    let missing = neutral_of_sums(x.dtype());
    with_first_element(&x, |source, _| {
        let source = SharedPtr::new(source.cast_mut());
        offsets.for_each_segment(elements, held, |segment| {
            let source = source.get().cast_const();
            // SAFETY: the tensor is contiguous, the offsets of a segment are inside it or NO_INDEX, and every element of the
            // target is in one segment.
            unsafe {
                let to = gathered.range::<u8>(segment.from * elem);
                match elem {
                    1 => gather_segment::<[u8; 1]>(source.cast(), to.cast(), segment, &missing),
                    2 => gather_segment::<[u8; 2]>(source.cast(), to.cast(), segment, &missing),
                    4 => gather_segment::<[u8; 4]>(source.cast(), to.cast(), segment, &missing),
                    8 => gather_segment::<[u8; 8]>(source.cast(), to.cast(), segment, &missing),
                    _ => unreachable!("no element type has {elem} bytes"),
                }
            }
        });
    });
    // SAFETY: every element was written.
    Ok(unsafe { gathered.finish() })
}

/// Copies the elements at the offsets of a segment.
///
/// # Safety
/// Every offset is [`NO_INDEX`] or that of an element that can be read from `source`; as many can be written at `to`, and
/// `missing` has the size of one.
unsafe fn gather_segment<B: Copy>(source: *const B, to: *mut B, segment: &OffsetSegment<'_>, missing: &[u8]) {
    // SAFETY: the caller's promise; arrays of bytes need no alignment.
    let missing = unsafe { missing.as_ptr().cast::<B>().read() };
    for (i, &offset) in segment.offsets.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(i).write(if offset == NO_INDEX { missing } else { source.add(offset).read() }) };
    }
}

/// Offsets into a contiguous tensor for `gather` and `scatter`: the coordinates of an index tensor with one of them replaced by
/// the index.
pub(super) struct ElementOffsets {
    /// The index tensor as `[outer, n, inner]`.
    lines: LineShape,
    /// Per dimension before and after the indexed one, the size of the index tensor and the stride of the tensor.
    outer: Vec<(usize, usize)>,
    inner: Vec<(usize, usize)>,
    /// Size and stride of the indexed dimension in the tensor.
    size: usize,
    stride: usize,
}

/// Adjacent elements of an index tensor, from number `from` on, and their offsets in the tensor.
pub(super) struct OffsetSegment<'a> {
    pub(super) from: usize,
    pub(super) offsets: &'a [usize],
}

impl ElementOffsets {
    /// For an index tensor of `index_shape` into dimension `dim` of a contiguous tensor of `sizes`.
    ///
    /// # Panics
    /// If the index is longer than the tensor in another dimension.
    pub(super) fn new(sizes: &[usize], dim: usize, index_shape: &[usize]) -> Self {
        assert_eq!(sizes.len(), index_shape.len(), "an index with as many dimensions");
        assert!((0..sizes.len()).all(|d| d == dim || index_shape[d] <= sizes[d]), "{index_shape:?} in {sizes:?}");
        let strides: Vec<usize> = (0..sizes.len()).map(|d| sizes[d + 1..].iter().product()).collect();
        let of = |dims: Range<usize>| -> Vec<(usize, usize)> {
            let mut merged: Vec<(usize, usize)> = Vec::new();
            for d in dims {
                match merged.last_mut() {
                    // The index covers this dimension, so the two count as one.
                    Some((n, stride)) if index_shape[d] == sizes[d] => (*n, *stride) = (*n * sizes[d], strides[d]),
                    _ => merged.push((index_shape[d], strides[d])),
                }
            }
            merged
        };
        ElementOffsets {
            lines: LineShape::new(index_shape, dim),
            outer: of(0..dim),
            inner: of(dim + 1..sizes.len()),
            size: sizes[dim],
            stride: strides[dim],
        }
    }

    /// The offset of an element of some dimensions, given its number in row-major order over the index tensor.
    fn offset(dims: &[(usize, usize)], mut number: usize) -> usize {
        let mut offset = 0;
        for &(n, stride) in dims.iter().rev() {
            offset += number % n * stride;
            number /= n;
        }
        offset
    }

    /// Calls `body` with segments that together are all elements of the index tensor, on the threads of the pool if there are
    /// many. The elements of a line along the dimension are visited in order and on one thread.
    ///
    /// # Panics
    /// If an index is held outside of the tensor.
    pub(super) fn for_each_segment(
        &self,
        elements: IndexElements<'_>,
        held: &IndexRange,
        body: impl Fn(&OffsetSegment<'_>) + Sync,
    ) {
        let LineShape { outer, n, inner } = self.lines;
        assert!(held.len() <= self.size, "{} indices held of {}", held.len(), self.size);
        if outer * n * inner == 0 {
            return;
        }
        // Reading an index and moving one element takes about 2 ns.
        const COST: usize = 8;
        if inner == 1 {
            over_ranges(outer, n * COST, 1, |range| {
                for line in range {
                    let base = Self::offset(&self.outer, line);
                    self.segment(elements, held, line * n..(line + 1) * n, |_| base, &body);
                }
            });
            return;
        }
        // Columns are divided too, 16 of them at least, so that threads do not write to the same cache lines.
        over_ranges(outer * inner, n * COST, 16, |range| {
            for matrix in range.start / inner..range.end.div_ceil(inner) {
                let first = matrix * inner;
                let columns = range.start.max(first) - first..range.end.min(first + inner) - first;
                let base = Self::offset(&self.outer, matrix);
                for row in 0..n {
                    let line = (matrix * n + row) * inner;
                    let part = line + columns.start..line + columns.end;
                    match self.inner[..] {
                        [(_, 1)] => self.segment(elements, held, part, |i| base + i - line, &body),
                        _ => self.segment(elements, held, part, |i| base + Self::offset(&self.inner, i - line), &body),
                    }
                }
            }
        });
    }

    /// Calls `body` with the segments of a range of adjacent elements; `base` is the offset of an element at index 0.
    #[inline(always)]
    fn segment(
        &self,
        elements: IndexElements<'_>,
        held: &IndexRange,
        range: Range<usize>,
        base: impl Fn(usize) -> usize,
        body: &impl Fn(&OffsetSegment<'_>),
    ) {
        let mut offsets = [MaybeUninit::uninit(); INDEX_BLOCK];
        elements.for_each_block(range, held, |from, positions| {
            for (i, (offset, &position)) in offsets.iter_mut().zip(positions).enumerate() {
                offset.write(if position == NO_INDEX { NO_INDEX } else { base(from + i) + position * self.stride });
            }
            // SAFETY: as many were just written as there are positions.
            let offsets = unsafe { offsets[..positions.len()].assume_init_ref() };
            body(&OffsetSegment { from, offsets });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn gather_equals_the_definition_for_every_dimension_and_narrower_indices() {
        let sizes = [3, 4, 5, 2];
        let x = Tensor::arange(0i64, 120, &Device::Cpu).unwrap().reshape(&sizes[..]).unwrap();
        let at = |c: [usize; 4]| (((c[0] * 4 + c[1]) * 5 + c[2]) * 2 + c[3]) as i64;
        for dim in 0..4 {
            for shape in [[3, 4, 5, 2], [2, 4, 5, 2], [3, 3, 5, 1], [2, 2, 2, 2], [1, 4, 3, 2]] {
                let mut shape = shape;
                shape[dim] = 6;
                let count: usize = shape.iter().product();
                for dtype in [DType::U8, DType::I64] {
                    let indices: Vec<i64> = (0..count).map(|i| (i * 7 % sizes[dim]) as i64).collect();
                    let index = Tensor::new(indices.clone(), &Device::Cpu).unwrap().reshape(&shape[..]).unwrap();
                    let got = gather(&x, dim, &index.to_dtype(dtype).unwrap(), &IndexRange::all(sizes[dim])).unwrap();
                    let got: Vec<i64> = got.flatten_all().unwrap().to_vec1().unwrap();
                    for i in 0..count {
                        let mut c = [0; 4];
                        let mut rest = i;
                        for d in (0..4).rev() {
                            (c[d], rest) = (rest % shape[d], rest / shape[d]);
                        }
                        c[dim] = indices[i] as usize;
                        assert_eq!(got[i], at(c), "{shape:?} along {dim}, element {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn slices_of_every_size_are_selected_and_missing_ones_are_neutral() {
        for (inner, dtype) in
            [(1, DType::U8), (1, DType::BF16), (1, DType::F32), (1, DType::F64), (3, DType::U8), (5, DType::F32)]
        {
            let x = Tensor::arange(1f32, (2 * 6 * inner + 1) as f32, &Device::Cpu).unwrap();
            let x = x.reshape((2, 6, inner)).unwrap().to_dtype(dtype).unwrap();
            // Indices 4 to 9 of a longer dimension are held.
            let index = Tensor::new(&[[4u8, 9, 3], [0, 7, 10]], &Device::Cpu).unwrap();
            let got = index_select_by(&x, 1, &index, &IndexRange::new([4..10])).unwrap();
            assert_eq!(got.dims(), [2, 2, 3, inner]);
            let got: Vec<f64> = got.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
            let mut expected = Vec::new();
            for outer in 0..2 {
                for place in [Some(0), Some(5), None, None, Some(3), None] {
                    let neutral = if dtype.is_float() { -0.0 } else { 0.0 };
                    let at = |i| place.map_or(neutral, |p: usize| ((outer * 6 + p) * inner + i + 1) as f64);
                    expected.extend((0..inner).map(at));
                }
            }
            let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&expected), "{inner} of {dtype:?}");
        }
    }
}
