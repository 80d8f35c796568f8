//! Weighted sums of slices along a dimension, by a table: interpolation, windows, borders, and their gradients.

use std::hash::{Hash, Hasher};
use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{Tensor, WithDType};

use super::parallel::over_ranges;
use super::typed_slice::{LineShape, filled_by, filled_with, with_slice};
use super::{check_supported, contiguous, simd, with_type};
use crate::error::Result;

/// Columns of a slice that are added up at a time.
const BLOCK: usize = 256;

/// Per slice of a result the slices of a tensor that it is the weighted sum of: the rows of a sparse matrix.
#[derive(Debug, Clone)]
pub struct SliceTable {
    /// The number of slices of the tensor.
    slices: usize,
    /// Where the terms of each row begin, and one end.
    starts: Vec<usize>,
    places: Vec<usize>,
    weights: Vec<f64>,
    /// Of everything above: tables are compared with those of cached decisions by every call.
    digest: u64,
}

impl SliceTable {
    /// A table from the terms of every row, `(slice, weight)`.
    ///
    /// # Panics
    /// If a term is not below `slices`.
    pub fn new(slices: usize, rows: impl IntoIterator<Item = impl IntoIterator<Item = (usize, f64)>>) -> Self {
        let mut table =
            SliceTable { slices, starts: vec![0], places: Vec::new(), weights: Vec::new(), digest: FNV_OFFSET };
        for row in rows {
            for (place, weight) in row {
                assert!(place < slices, "slice {place} of {slices}");
                table.places.push(place);
                table.weights.push(weight);
            }
            table.starts.push(table.places.len());
        }
        let weights = table.weights.iter().map(|w| w.to_bits());
        let numbers = table.starts.iter().chain(&table.places).map(|&n| n as u64).chain(weights).chain([slices as u64]);
        table.digest = numbers.fold(FNV_OFFSET, |hash, n| (hash ^ n).wrapping_mul(FNV_PRIME));
        table
    }

    /// The number of slices of the tensor.
    pub fn slices(&self) -> usize {
        self.slices
    }

    /// The number of slices of the result.
    pub fn rows(&self) -> usize {
        self.starts.len() - 1
    }

    /// The slices that a row is the sum of.
    pub fn places(&self, row: usize) -> &[usize] {
        &self.places[self.starts[row]..self.starts[row + 1]]
    }

    /// Whether every row is a copy of one slice, or has no terms.
    pub fn is_copy(&self) -> bool {
        self.starts.is_sorted_by(|a, b| b - a <= 1) && self.weights.iter().all(|&w| w == 1.0)
    }

    /// Whether a row has no terms.
    pub fn has_empty_rows(&self) -> bool {
        !self.starts.is_sorted_by(|a, b| a < b)
    }

    /// The table of the gradient: rows and slices exchanged.
    pub fn transposed(&self) -> Self {
        let mut rows = vec![Vec::new(); self.slices];
        for row in 0..self.rows() {
            for term in self.starts[row]..self.starts[row + 1] {
                rows[self.places[term]].push((row, self.weights[term]));
            }
        }
        SliceTable::new(self.rows(), rows)
    }
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x100_0000_01b3;

impl PartialEq for SliceTable {
    fn eq(&self, other: &Self) -> bool {
        let bits = |table: &Self| table.weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        self.digest == other.digest
            && (self.slices, &self.starts, &self.places) == (other.slices, &other.starts, &other.places)
            && bits(self) == bits(other)
    }
}

impl Eq for SliceTable {}

impl Hash for SliceTable {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

/// How slices of a type are added up.
trait WeightedSum: WithDType {
    /// f32 for half precision, i64 for integers, whose weights are integers.
    type Sum: Copy + Default;

    fn weight(w: f64) -> Self::Sum;

    fn plus<const FMA: bool>(sum: Self::Sum, weight: Self::Sum, x: Self) -> Self::Sum;

    fn rounded(sum: Self::Sum) -> Self;
}

macro_rules! integers {
    ($($T:ty),*) => {$(
        impl WeightedSum for $T {
            type Sum = i64;

            #[inline(always)]
            fn weight(w: f64) -> i64 {
                w as i64
            }

            #[inline(always)]
            fn plus<const FMA: bool>(sum: i64, weight: i64, x: $T) -> i64 {
                sum.wrapping_add(weight.wrapping_mul(x as i64))
            }

            #[inline(always)]
            fn rounded(sum: i64) -> $T {
                sum as $T
            }
        }
    )*};
}
integers!(u8, u32, i16, i32, i64);

macro_rules! floats {
    ($($T:ty as $Sum:ty: |$x:ident| $wide:expr, |$sum:ident| $rounded:expr;)*) => {$(
        impl WeightedSum for $T {
            type Sum = $Sum;

            #[inline(always)]
            fn weight(w: f64) -> $Sum {
                w as $Sum
            }

            #[inline(always)]
            fn plus<const FMA: bool>(sum: $Sum, weight: $Sum, $x: $T) -> $Sum {
                if FMA { weight.mul_add($wide, sum) } else { sum + weight * $wide }
            }

            #[inline(always)]
            fn rounded($sum: $Sum) -> $T {
                $rounded
            }
        }
    )*};
}
floats! {
    f32 as f32: |x| x, |sum| sum;
    f64 as f64: |x| x, |sum| sum;
    half::f16 as f32: |x| x.to_f32(), |sum| half::f16::from_f32(sum);
    half::bf16 as f32: |x| x.to_f32(), |sum| half::bf16::from_f32(sum);
}

/// One row of a table applied to the slices of a matrix.
struct WeightedRow<'a, T> {
    /// The matrix, `inner` elements per slice.
    elements: &'a [T],
    inner: usize,
    places: &'a [usize],
    weights: &'a [f64],
    /// The slice that comes first in the matrix.
    first: usize,
    to: &'a mut [MaybeUninit<T>],
}

impl<T: WeightedSum> simd::Kernel for WeightedRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let mut memory = [MaybeUninit::<T::Sum>::uninit(); BLOCK];
        for (block, to) in self.to.chunks_mut(BLOCK).enumerate() {
            let sums = filled_with(&mut memory[..to.len()], T::Sum::default());
            for (&place, &weight) in self.places.iter().zip(self.weights) {
                let from = (place - self.first) * self.inner + block * BLOCK;
                let weight = T::weight(weight);
                for (sum, &x) in sums.iter_mut().zip(&self.elements[from..from + to.len()]) {
                    *sum = T::plus::<FMA>(*sum, weight, x);
                }
            }
            for (to, &sum) in to.iter_mut().zip(&*sums) {
                to.write(T::rounded(sum));
            }
        }
    }
}

/// Rows of a table applied to a line, whose slices are single elements.
struct LineSums<'a, T> {
    line: &'a [T],
    table: &'a SliceTable,
    /// The first row.
    row: usize,
    /// The slice that comes first in the line.
    first: usize,
    to: &'a mut [MaybeUninit<T>],
}

impl<T: WeightedSum> simd::Kernel for LineSums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (i, to) in self.to.iter_mut().enumerate() {
            let mut sum = T::Sum::default();
            for term in self.table.starts[self.row + i]..self.table.starts[self.row + i + 1] {
                let x = self.line[self.table.places[term] - self.first];
                sum = T::plus::<FMA>(sum, T::weight(self.table.weights[term]), x);
            }
            to.write(T::rounded(sum));
        }
    }
}

/// Returns rows `rows` of a table as weighted sums of slices of `x` along `dim`; a row without terms is zeros.
///
/// `x` holds the slices of the table from `first` on. f16 and bf16 are added up in f32; integers wrap, and their weights are integers.
/// Any supported type; rows are divided over the threads of the pool.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
///
/// # Panics
/// If `x` lacks a slice that a row needs.
pub fn weighted_slices(x: &Tensor, dim: usize, table: &SliceTable, rows: Range<usize>, first: usize) -> Result<Tensor> {
    check_supported(x)?;
    let x = contiguous(x)?;
    let LineShape { outer, n, inner } = LineShape::new(x.dims(), dim);
    let mut shape = x.dims().to_vec();
    shape[dim] = rows.len();
    let count = rows.len();
    let terms = table.starts[rows.end] - table.starts[rows.start];
    with_type!(x.dtype(), T => with_slice::<T, _>(&x, |elements| {
        // SAFETY: the ranges are all rows of all matrices, and each row is written whole.
        unsafe {
            filled_by::<T>(&shape, |to| {
                over_ranges(outer * count, inner * (1 + terms / count.max(1)), 1, |range| {
                    let mut line = range.start;
                    while line < range.end {
                        let (matrix, row) = (line / count, rows.start + line % count);
                        let matrix_of = &elements[matrix * n * inner..(matrix + 1) * n * inner];
                        let target = to.get().add(line * inner).cast::<MaybeUninit<T>>();
                        if inner == 1 {
                            let end = range.end.min((matrix + 1) * count);
                            let to = std::slice::from_raw_parts_mut(target, end - line);
                            simd::run(LineSums { line: matrix_of, table, row, first, to });
                            line = end;
                            continue;
                        }
                        let terms = table.starts[row]..table.starts[row + 1];
                        simd::run(WeightedRow {
                            elements: matrix_of,
                            inner,
                            places: &table.places[terms.clone()],
                            weights: &table.weights[terms],
                            first,
                            to: std::slice::from_raw_parts_mut(target, inner),
                        });
                        line += 1;
                    }
                });
            })
        }
    })?, otherwise unreachable!("checked above"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn table() -> SliceTable {
        SliceTable::new(4, [vec![(0, 1.0), (1, 2.0)], vec![], vec![(3, 1.0)], vec![(1, 1.0), (2, -1.0), (3, 4.0)]])
    }

    #[test]
    fn rows_are_weighted_sums_in_every_type() {
        for dtype in [DType::U8, DType::I64, DType::F16, DType::BF16, DType::F32, DType::F64] {
            for inner in [1, 3, 300] {
                let x = Tensor::arange(0i64, 2 * 4, &Device::Cpu).unwrap().reshape((2, 4, 1)).unwrap();
                let x = x.broadcast_as((2, 4, inner)).unwrap().to_dtype(dtype).unwrap();
                let got = weighted_slices(&x, 1, &table(), 0..4, 0).unwrap();
                assert_eq!((got.dims(), got.dtype()), ([2, 4, inner].as_slice(), dtype));
                let got = got.to_dtype(DType::F64).unwrap().to_vec3::<f64>().unwrap();
                for (i, matrix) in got.iter().enumerate() {
                    let first = 4.0 * i as f64;
                    let expected = [3.0 * first + 2.0, 0.0, first + 3.0, 4.0 * first + 11.0];
                    for (row, expected) in matrix.iter().zip(expected) {
                        assert!(row.iter().all(|&x| x == expected), "{dtype:?} {inner}: {row:?}, not {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_part_of_the_slices_gives_the_rows_that_need_no_others() {
        let x = Tensor::arange(0f32, 4.0, &Device::Cpu).unwrap();
        let got = weighted_slices(&x.narrow(0, 1, 3).unwrap(), 0, &table(), 1..4, 1).unwrap();
        assert_eq!(got.to_vec1::<f32>().unwrap(), [0.0, 3.0, 11.0]);
        let none = weighted_slices(&x.narrow(0, 0, 0).unwrap(), 0, &table(), 2..2, 0).unwrap();
        assert_eq!(none.dims(), [0]);
    }

    #[test]
    fn the_transposed_table_is_the_adjoint() {
        let x = Tensor::new(&[3.0, -1.0, 4.0, 1.5], &Device::Cpu).unwrap();
        let y = Tensor::new(&[2.0, 7.0, 1.0, -8.0], &Device::Cpu).unwrap();
        let dot = |a: &Tensor, b: &Tensor| (a * b).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
        let forward = weighted_slices(&x, 0, &table(), 0..4, 0).unwrap();
        let backward = weighted_slices(&y, 0, &table().transposed(), 0..4, 0).unwrap();
        assert_eq!(dot(&forward, &y), dot(&x, &backward));
        assert_eq!(table().transposed().transposed(), table());
        assert!(table().has_empty_rows() && !table().is_copy());
        let copy = SliceTable::new(2, [vec![(1, 1.0)], vec![(0, 1.0)]]);
        assert!(copy.is_copy() && !copy.has_empty_rows());
    }
}
