//! Order statistics of a dimension that several ranks share, from counts: the rank of the wanted element is found one byte after the
//! other, most significant first, by counting elements whose ranks begin with the bytes found so far.

use std::sync::Mutex;

use candle_core::{DType, Tensor};

use super::SortOrder;
use super::rank::{Rank, Ranked, Ranking};
use crate::error::Result;
use crate::parallel::over_ranges;
use crate::typed_slice::{LineShape, with_slice};
use crate::{check_supported, contiguous, with_type};

/// The values of a byte: how many counts [`byte_counts`] returns per wanted element.
pub const BYTE_VALUES: usize = 256;

/// The number of bytes in which ranks of elements of a type differ.
pub fn rank_bytes(dtype: DType) -> usize {
    match dtype {
        DType::U8 => 1,
        // All ranks of numbers are below 2^16 - 1, which is what is left of that of NaN.
        DType::F16 | DType::BF16 => 2,
        DType::I64 | DType::F64 => 8,
        _ => 4,
    }
}

/// Calls `visit(line, row, rank)` for elements of rows `rows` of an `[outer, n, inner]` tensor; lines are numbered over outer and inner.
fn for_each_rank<T: Ranked>(
    elements: &[T],
    lines: LineShape,
    order: SortOrder,
    mut visit: impl FnMut(usize, usize, u64),
) {
    let ranking = Ranking::new(order);
    let kept = u64::MAX >> (64 - 8 * rank_bytes(T::DTYPE));
    let LineShape { outer, n, inner } = lines;
    for matrix in 0..outer {
        for row in 0..n {
            let from = (matrix * n + row) * inner;
            for (i, &x) in elements[from..from + inner].iter().enumerate() {
                visit(matrix * inner + i, row, x.rank(ranking).to_usize() as u64 & kept);
            }
        }
    }
}

/// Where the number of wanted element `i` of a line is in a tensor `[outer, width, inner]`.
fn at(line: usize, i: usize, width: usize, inner: usize) -> usize {
    (line / inner * width + i) * inner + line % inner
}

/// Counts, for every wanted element, the elements of its line by byte number `byte` (from the least significant one) of their ranks.
/// Only those count whose bytes above are those of `prefixes`.
///
/// `prefixes` (i64) has the shape of `x`, but the number of wanted elements along `dim`; the result (i64) has [`BYTE_VALUES`] times as many.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
pub fn byte_counts(x: &Tensor, dim: usize, order: SortOrder, prefixes: &Tensor, byte: usize) -> Result<Tensor> {
    check_supported(x)?;
    let (x, prefixes) = (contiguous(x)?, contiguous(prefixes)?);
    let lines = LineShape::new(x.dims(), dim);
    let (wanted, inner) = (prefixes.dims()[dim], lines.inner);
    let mut shape = prefixes.dims().to_vec();
    shape[dim] = wanted * BYTE_VALUES;
    let mut counts = vec![0i64; shape.iter().product()];
    let (shift, above) = (8 * byte, 8 * byte + 8);
    let upper = |rank: u64| rank.checked_shr(above as u32).unwrap_or(0);
    with_slice::<i64, _>(&prefixes, |prefixes| {
        with_type!(x.dtype(), T => with_slice::<T, _>(&x, |elements| {
            let count = |elements: &[T], lines: LineShape, counts: &mut [i64]| {
                for_each_rank(elements, lines, order, |line, _, rank| {
                    for i in 0..wanted {
                        if upper(rank) == upper(prefixes[at(line, i, wanted, inner)] as u64) {
                            let digit = (rank >> shift) as usize % BYTE_VALUES;
                            counts[at(line, i * BYTE_VALUES + digit, wanted * BYTE_VALUES, inner)] += 1;
                        }
                    }
                });
            };
            if lines.outer > 1 {
                return count(elements, lines, &mut counts);
            }
            // Of one matrix the rows are divided; counts are integers, so that the order in which they are added does not matter.
            let (size, sum) = (counts.len(), Mutex::new(&mut counts));
            over_ranges(lines.n, inner * (1 + wanted), 1, |rows| {
                let mut own = vec![0i64; size];
                let part = LineShape { n: rows.len(), ..lines };
                count(&elements[rows.start * inner..rows.end * inner], part, &mut own);
                let mut sum = sum.lock().expect("no thread panics while it adds");
                sum.iter_mut().zip(&own).for_each(|(sum, own)| *sum += own);
            });
        }), otherwise unreachable!("checked above"))
    })??;
    Ok(Tensor::from_vec(counts, shape, x.device())?)
}

/// Extends prefixes by the byte in whose counts the wanted elements are. Returns the prefixes, and the places of the wanted elements among
/// those with these prefixes; `places` are those among the elements with the prefixes so far. All i64.
///
/// # Errors
/// If memory does not suffice.
pub fn next_byte(
    counts: &Tensor,
    dim: usize,
    prefixes: &Tensor,
    places: &Tensor,
    byte: usize,
) -> Result<(Tensor, Tensor)> {
    let shape = prefixes.dims().to_vec();
    let LineShape { outer, n: wanted, inner } = LineShape::new(&shape, dim);
    let numbers = |t: &Tensor| with_slice::<i64, _>(t, <[i64]>::to_vec);
    let (counts, mut prefixes, mut places) = (numbers(counts)?, numbers(prefixes)?, numbers(places)?);
    for line in 0..outer * inner {
        for i in 0..wanted {
            let own = at(line, i, wanted, inner);
            let count = |value: usize| counts[at(line, i * BYTE_VALUES + value, wanted * BYTE_VALUES, inner)];
            let mut value = 0;
            while value + 1 < BYTE_VALUES && places[own] >= count(value) {
                places[own] -= count(value);
                value += 1;
            }
            prefixes[own] |= (value << (8 * byte)) as i64;
        }
    }
    let tensor = |numbers: Vec<i64>| Tensor::from_vec(numbers, shape.as_slice(), &candle_core::Device::Cpu);
    Ok((tensor(prefixes)?, tensor(places)?))
}

/// Counts the elements of every line that have the rank of each wanted element (i64).
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
pub fn count_rank(x: &Tensor, dim: usize, order: SortOrder, ranks: &Tensor) -> Result<Tensor> {
    visit_equal(x, dim, order, ranks, 0, |_, found, _| *found += 1)
}

/// Returns the index, from `first` on, of element number `places` (i64) among those of the rank of each wanted element; 0 where there
/// are fewer.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
pub fn nth_of_rank(
    x: &Tensor,
    dim: usize,
    order: SortOrder,
    ranks: &Tensor,
    places: &Tensor,
    first: i64,
) -> Result<Tensor> {
    let mut left = with_slice::<i64, _>(places, <[i64]>::to_vec)?;
    visit_equal(x, dim, order, ranks, 0, |own, found, row| {
        if left[own] == 0 {
            *found = row as i64 + first;
        }
        left[own] -= 1;
    })
}

/// Calls `visit(wanted, result, row)` for every element with the rank of a wanted one.
fn visit_equal(
    x: &Tensor,
    dim: usize,
    order: SortOrder,
    ranks: &Tensor,
    start: i64,
    mut visit: impl FnMut(usize, &mut i64, usize),
) -> Result<Tensor> {
    check_supported(x)?;
    let (x, ranks) = (contiguous(x)?, contiguous(ranks)?);
    let lines = LineShape::new(x.dims(), dim);
    let wanted = ranks.dims()[dim];
    let mut found = vec![start; ranks.elem_count()];
    with_slice::<i64, _>(&ranks, |ranks| {
        with_type!(x.dtype(), T => with_slice::<T, _>(&x, |elements| {
            for_each_rank(elements, lines, order, |line, row, rank| {
                for i in 0..wanted {
                    let own = at(line, i, wanted, lines.inner);
                    if ranks[own] as u64 == rank {
                        visit(own, &mut found[own], row);
                    }
                }
            });
        }), otherwise unreachable!("checked above"))
    })??;
    Ok(Tensor::from_vec(found, ranks.dims(), x.device())?)
}

/// Counts the elements of a vector sorted in `order` that come before each separator: a rank, and the first index that does not come
/// before it among elements of that rank. `indices` (i64) are those of the sorted elements.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor.
pub fn count_before(
    sorted: &Tensor,
    indices: &Tensor,
    order: SortOrder,
    separators: &[(i64, i64)],
) -> Result<Vec<usize>> {
    check_supported(sorted)?;
    with_slice::<i64, _>(indices, |indices| {
        with_type!(sorted.dtype(), T => with_slice::<T, _>(sorted, |elements| {
            let (ranking, kept) = (Ranking::new(order), u64::MAX >> (64 - 8 * rank_bytes(sorted.dtype())));
            let rank = |x: &T| x.rank(ranking).to_usize() as u64 & kept;
            let one = |&(separator, index): &(i64, i64)| {
                let below = elements.partition_point(|x| rank(x) < separator as u64);
                let with_equal = elements.partition_point(|x| rank(x) <= separator as u64);
                below + indices[below..with_equal].partition_point(|&i| i < index)
            };
            separators.iter().map(one).collect()
        }), otherwise unreachable!("checked above"))
    })?
}

#[cfg(test)]
mod tests {
    use super::super::top_k;
    use super::*;
    use candle_core::Device;

    /// The index of the element at every place, found by counting over two parts of a tensor.
    fn by_counting(x: &Tensor, dim: usize, places: &Tensor) -> Tensor {
        let half = x.dims()[dim] / 2;
        let parts = [x.narrow(dim, 0, half).unwrap(), x.narrow(dim, half, x.dims()[dim] - half).unwrap()];
        let order = SortOrder::Ascending;
        let (mut prefixes, mut left) = (places.zeros_like().unwrap(), places.clone());
        for byte in (0..rank_bytes(x.dtype())).rev() {
            let count = |part: &Tensor| byte_counts(part, dim, order, &prefixes, byte).unwrap();
            let counts = (count(&parts[0]) + count(&parts[1])).unwrap();
            (prefixes, left) = next_byte(&counts, dim, &prefixes, &left, byte).unwrap();
        }
        let before = count_rank(&parts[0], dim, order, &prefixes).unwrap();
        let low = nth_of_rank(&parts[0], dim, order, &prefixes, &left, 0).unwrap();
        let high = nth_of_rank(&parts[1], dim, order, &prefixes, &(&left - &before).unwrap(), half as i64).unwrap();
        (low + high).unwrap()
    }

    #[test]
    fn counting_finds_what_sorting_finds_in_every_type() {
        let numbers: Vec<f64> =
            (0..90).map(|i: i64| ((i * 37 % 23) - 9) as f64 * if i % 5 == 0 { -0.0 } else { 1.5 }).collect();
        let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, f64::NAN];
        for dtype in
            [DType::U8, DType::U32, DType::I16, DType::I32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64]
        {
            let mut numbers = numbers.clone();
            match dtype.is_float() {
                true => numbers[20..26].copy_from_slice(&special),
                false => numbers
                    .iter_mut()
                    .for_each(|x| *x = if matches!(dtype, DType::U8 | DType::U32) { x.abs() } else { *x }),
            }
            let x = Tensor::from_vec(numbers, (2, 15, 3), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let (_, order) = top_k(&x, 1, 15, SortOrder::Ascending, 0).unwrap();
            let places = Tensor::arange(0i64, 15, &Device::Cpu).unwrap().reshape((1, 15, 1)).unwrap();
            let places = places.broadcast_as((2, 15, 3)).unwrap().contiguous().unwrap();
            let found = by_counting(&x, 1, &places).to_vec3::<i64>().unwrap();
            assert_eq!(found, order.to_vec3::<i64>().unwrap(), "{dtype:?}");
        }
    }

    #[test]
    fn a_separator_counts_smaller_elements_and_some_of_the_equal_ones() {
        let x = Tensor::new(&[1u8, 3, 3, 3, 7], &Device::Cpu).unwrap();
        let indices = Tensor::new(&[8i64, 2, 4, 9, 0], &Device::Cpu).unwrap();
        let separators = [(0, 0), (3, 0), (3, 5), (3, 20), (8, 0)];
        assert_eq!(count_before(&x, &indices, SortOrder::Ascending, &separators).unwrap(), [0, 1, 3, 4, 5]);
    }
}
