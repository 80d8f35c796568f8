//! Sorting and selection along a dimension.
//!
//! Elements are compared by unsigned ranks (`rank`) in which the order, NaN and -0.0 are settled, and are never converted to
//! another type. Lines are independent of each other and divided over the threads.

mod count;
mod first;
mod rank;
mod select;
mod sort;

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Tensor};

use super::parallel::{SharedPtr, over_ranges};
use super::typed_slice::{LineShape, filled_by, filled_with, with_slice};
use super::{contiguous, simd, with_type};
use crate::error::{ErrorKind, Result};
use rank::{Ranked, RankedIndex, Ranking};

pub use count::{BYTE_VALUES, byte_counts, count_before, count_rank, next_byte, nth_of_rank, rank_bytes};
pub use rank::SortOrder;

/// Returns the first `k` elements along `dim` in `order`, and their indices (i64) plus `first_index`.
///
/// With `k` the size of the dimension this is a stable sort; with 1 it is a maximum or minimum and its first index. Elements
/// keep their bits. Any supported type; lines are divided over the threads of the pool.
///
/// # Errors
/// If the kernels do not support the type, if memory does not suffice, or if more than one element is asked of lines that have
/// more than `u32::MAX`.
///
/// # Panics
/// If `k` exceeds the size of the dimension.
pub fn top_k(x: &Tensor, dim: usize, k: usize, order: SortOrder, first_index: i64) -> Result<(Tensor, Tensor)> {
    let x = contiguous(x)?;
    let lines = LineShape::new(x.dims(), dim);
    assert!(k <= lines.n, "{k} elements of {}", lines.n);
    if k > 1 && u32::try_from(lines.n).is_err() {
        return Err(ErrorKind::shape(x.dims()).error(
            "dimension to sort",
            format!("{} elements", lines.n),
            format!("at most {}", u32::MAX),
            "sort parts of it",
        ));
    }
    let mut shape = x.dims().to_vec();
    shape[dim] = k;
    with_type!(x.dtype(), T => {
        let mut values = None;
        // SAFETY: every index and, inside, every value is written: see `write_lines`.
        let indices = unsafe {
            filled_by::<i64>(&shape, |indices| {
                values = Some(filled_by::<T>(&shape, |values| {
                    let write = |elements: &[T]| {
                        let output = OutputLines { values, indices, first_index };
                        write_lines::<T>(elements, lines, k, order, output);
                    };
                    if x.elem_count() > 0 && k > 0 {
                        with_slice::<T, _>(&x, write).expect("contiguous and of this type");
                    }
                }));
            })?
        };
        Ok((values.expect("built inside")?, indices))
    }, otherwise unreachable!("`contiguous` checks it; {} is a type without kernels", DType::as_str(&x.dtype())))
}

/// The memory of the results, with `k` elements in every line.
#[derive(Clone, Copy)]
struct OutputLines<T> {
    values: SharedPtr<T>,
    indices: SharedPtr<i64>,
    first_index: i64,
}

impl<T: Copy> OutputLines<T> {
    /// Writes result number `at` in row-major order.
    ///
    /// # Safety
    /// There is such a result, and no other thread writes it.
    #[inline(always)]
    unsafe fn write(self, at: usize, value: T, index: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            self.values.get().add(at).write(value);
            self.indices.get().add(at).write(index as i64 + self.first_index);
        }
    }
}

/// Writes all results of a tensor that has elements.
fn write_lines<T: Ranked>(elements: &[T], lines: LineShape, k: usize, order: SortOrder, output: OutputLines<T>) {
    let LineShape { outer, n, inner } = lines;
    let ranking = Ranking::new(order);
    if k == 1 && inner > 1 {
        // Strips of adjacent columns, numbered over all matrices.
        let strips = inner.div_ceil(first::COLUMNS);
        over_ranges(outer * strips, n * inner.min(first::COLUMNS), 1, |range| {
            for strip in range {
                let (matrix, column) = (strip / strips, strip % strips * first::COLUMNS);
                let width = first::COLUMNS.min(inner - column);
                let from = &elements[matrix * n * inner + column..(matrix + 1) * n * inner];
                let mut found = [MaybeUninit::uninit(); first::COLUMNS];
                let found = filled_with(&mut found[..width], 0);
                simd::run(first::FirstOfColumns { elements: from, stride: inner, rows: n, ranking, found });
                for (i, &row) in found.iter().enumerate() {
                    // SAFETY: this strip's columns are inside the matrix, and no other range has them.
                    unsafe { output.write(matrix * inner + column + i, from[row * inner + i], row) };
                }
            }
        });
        return;
    }
    if k == 1 {
        over_ranges(outer, n, 1, |range| {
            for line in range {
                let row = &elements[line * n..(line + 1) * n];
                let at = simd::run(first::FirstOfLine { line: row, ranking });
                // SAFETY: there are `outer` results, and no other range has this one.
                unsafe { output.write(line, row[at], at) };
            }
        });
        return;
    }
    if inner == 1 {
        over_ranges(outer, n * COST, 1, |range| {
            let mut sorter = LineSorter::<T>::new(k, ranking);
            for line in range {
                let row = &elements[line * n..(line + 1) * n];
                // SAFETY: there are `outer` lines of results, and no other range has this one.
                sorter.first_of(row, |j, value, index| unsafe { output.write(line * k + j, value, index) });
            }
        });
        return;
    }
    over_ranges(outer * inner, n * COST, STRIP, |range| {
        let mut sorter = LineSorter::<T>::new(k, ranking);
        let (mut strip, mut chosen) = (Vec::new(), vec![0u32; STRIP * k]);
        for matrix in range.start / inner..range.end.div_ceil(inner) {
            let from = &elements[matrix * n * inner..(matrix + 1) * n * inner];
            let columns = range.start.saturating_sub(matrix * inner)..(range.end - matrix * inner).min(inner);
            for column in columns.clone().step_by(STRIP) {
                let columns = column..columns.end.min(column + STRIP);
                transpose_strip(from, inner, columns.clone(), &mut strip);
                for (line, chosen) in strip.chunks_exact(n).zip(chosen.chunks_exact_mut(k)) {
                    sorter.first_of(line, |j, _, index| chosen[j] = index as u32);
                }
                for j in 0..k {
                    for (i, column) in columns.clone().enumerate() {
                        let index = chosen[i * k + j] as usize;
                        // SAFETY: as above, with lines that are columns.
                        unsafe { output.write((matrix * k + j) * inner + column, strip[i * n + index], index) };
                    }
                }
            }
        }
    });
}

/// Adjacent columns that are read together: 16 elements of 4 bytes fill a cache line.
const STRIP: usize = 16;

/// Work per element of sorting, in the unit of [`over_ranges`]: about 5 ns (measured on lines of 1024 f32).
const COST: usize = 16;

/// Copies some columns of a matrix, one after the other.
fn transpose_strip<T: Copy>(matrix: &[T], width: usize, columns: Range<usize>, strip: &mut Vec<T>) {
    let (rows, count) = (matrix.len() / width, columns.len());
    strip.clear();
    strip.reserve(rows * count);
    let target = strip.spare_capacity_mut();
    for (row, line) in matrix.chunks_exact(width).enumerate() {
        for (i, &x) in line[columns.clone()].iter().enumerate() {
            target[i * rows + row] = MaybeUninit::new(x);
        }
    }
    // SAFETY: every row of every column was written.
    unsafe { strip.set_len(rows * count) };
}

/// Sorts lines or selects their first elements, with buffers that are reused from line to line.
struct LineSorter<T: Ranked> {
    k: usize,
    ranking: Ranking<T::Rank>,
    items: Vec<RankedIndex<T::Rank>>,
    spare: Vec<RankedIndex<T::Rank>>,
}

impl<T: Ranked> LineSorter<T> {
    fn new(k: usize, ranking: Ranking<T::Rank>) -> Self {
        LineSorter { k, ranking, items: Vec::new(), spare: Vec::new() }
    }

    /// Calls `write` with the position, the value and the index of each of the first `k` elements.
    fn first_of(&mut self, line: &[T], mut write: impl FnMut(usize, T, usize)) {
        // Selecting sorts what it keeps by comparisons; beyond a quarter of a line a radix sort of all of it is faster.
        if self.k <= line.len() / 4 {
            let (ranking, kept) = (self.ranking, &mut self.items);
            simd::run(select::SelectLine { line, k: self.k, ranking, kept });
        } else {
            simd::run(RankLine { line, ranking: self.ranking, items: &mut self.items });
            sort::sort_items(&mut self.items, &mut self.spare);
        }
        for (j, item) in self.items[..self.k].iter().enumerate() {
            write(j, line[item.index as usize], item.index as usize);
        }
    }
}

/// Ranks all elements of a line.
struct RankLine<'a, T: Ranked> {
    line: &'a [T],
    ranking: Ranking<T::Rank>,
    items: &'a mut Vec<RankedIndex<T::Rank>>,
}

impl<T: Ranked> simd::Kernel for RankLine<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        self.items.clear();
        let ranked = |(i, x): (usize, &T)| RankedIndex { rank: x.rank(self.ranking), index: i as u32 };
        self.items.extend(self.line.iter().enumerate().map(ranked));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use std::cmp::Ordering;

    /// The indices of a line in order, by the definition: a stable sort by comparisons of f64.
    fn sorted(line: &[f64], order: SortOrder) -> Vec<i64> {
        let nan_last = |a: &f64, b: &f64| a.is_nan().cmp(&b.is_nan()).then(a.partial_cmp(b).unwrap_or(Ordering::Equal));
        let mut indices: Vec<i64> = (0..line.len() as i64).collect();
        indices.sort_by(|&i, &j| {
            let (a, b) = (line[i as usize], line[j as usize]);
            match order {
                SortOrder::Ascending => nan_last(&a, &b),
                SortOrder::Descending => nan_last(&b, &a),
                SortOrder::Smallest => b.is_nan().cmp(&a.is_nan()).then(a.partial_cmp(&b).unwrap_or(Ordering::Equal)),
            }
        });
        indices
    }

    #[test]
    fn every_k_order_type_and_dimension_equals_a_stable_sort() {
        let dtypes = [
            DType::F64,
            DType::F32,
            DType::F16,
            DType::BF16,
            DType::I64,
            DType::I32,
            DType::I16,
            DType::U32,
            DType::U8,
        ];
        let special = [f64::NAN, -0.0, 0.0, f64::INFINITY, f64::NEG_INFINITY, -f64::NAN, 1e-5, -1e-5];
        for (rows, n) in [(3, 7), (2, 130), (20, 300), (1, 2000)] {
            for dtype in dtypes {
                // Many equal numbers, and a few special ones.
                let number = |i: usize| match i % 11 {
                    3 if dtype.is_float() => special[i / 11 % special.len()],
                    _ => {
                        f64::from((i as u32).wrapping_mul(2_654_435_761) >> 24)
                            - if matches!(dtype, DType::U8 | DType::U32) { 0.0 } else { 128.0 }
                    }
                };
                let x = Tensor::new((0..rows * n).map(number).collect::<Vec<_>>(), &Device::Cpu).unwrap();
                let x = x.reshape((rows, n)).unwrap().to_dtype(dtype).unwrap();
                let wide = x.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap();
                for order in [SortOrder::Ascending, SortOrder::Descending, SortOrder::Smallest] {
                    let expected: Vec<Vec<i64>> = wide.iter().map(|line| sorted(line, order)).collect();
                    for k in [0, 1, 2, 50, 60, n] {
                        let k = k.min(n);
                        for (x, dim) in [(x.clone(), 1), (contiguous(&x.t().unwrap()).unwrap(), 0)] {
                            let (values, indices) = top_k(&x, dim, k, order, 5).unwrap();
                            if k == 0 {
                                assert_eq!(values.dims()[dim], 0);
                                continue;
                            }
                            let turn = |t: Tensor| if dim == 0 { t.t().unwrap() } else { t };
                            let (values, indices) = (turn(values), turn(indices).to_vec2::<i64>().unwrap());
                            let values = values.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap();
                            for row in 0..rows {
                                let first: Vec<i64> = expected[row][..k].iter().map(|i| i + 5).collect();
                                assert_eq!(indices[row], first, "{k} of {n} {dtype:?} {order:?} along {dim}");
                                for (value, i) in values[row].iter().zip(&expected[row]) {
                                    assert_eq!(value.to_bits(), wide[row][*i as usize].to_bits());
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn large_integers_are_ordered_exactly() {
        let big = 1i64 << 53;
        let line = [big + 1, big, i64::MAX, i64::MAX - 1, -big, -big - 1, i64::MIN, 0];
        let x = Tensor::new(&line, &Device::Cpu).unwrap();
        let (values, indices) = top_k(&x, 0, 8, SortOrder::Ascending, 0).unwrap();
        assert_eq!(indices.to_vec1::<i64>().unwrap(), [6, 5, 4, 7, 1, 0, 3, 2]);
        assert_eq!(values.to_vec1::<i64>().unwrap()[6..], [i64::MAX - 1, i64::MAX]);
        assert_eq!(top_k(&x, 0, 1, SortOrder::Descending, 0).unwrap().1.to_vec1::<i64>().unwrap(), [2]);
    }
}
