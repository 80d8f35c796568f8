//! Bands of matrices: triangles, diagonals and causal masks.

use candle_core::Tensor;

use super::parallel::over_ranges;
use super::typed_slice::{filled_by, with_slice};
use super::{Number, check_supported, with_type};
use crate::error::Result;

/// Copies `x` with `outside` wherever the last two dimensions are not in `lower <= column - row <= upper`.
///
/// `rows` and `columns` are the ascending numbers that the last two dimensions of `x` stand for. Any supported type; rows are
/// divided over the threads of the pool.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
///
/// # Panics
/// If there is not one number per row and column.
pub fn band(
    x: &Tensor,
    rows: &[usize],
    columns: &[usize],
    [lower, upper]: [isize; 2],
    outside: impl Into<Number>,
) -> Result<Tensor> {
    check_supported(x)?;
    let (width, outside) = (columns.len(), outside.into());
    assert_eq!(&x.dims()[x.dims().len() - 2..], [rows.len(), width], "one number per row and column");
    with_type!(x.dtype(), T => with_slice::<T, _>(x, |elements| {
        let outside = outside.element::<T>();
        // SAFETY: the ranges are all lines; each line is copied inside the band and filled outside of it.
        unsafe {
            filled_by::<T>(x.dims(), |to| {
                over_ranges(elements.len() / width.max(1), width, 1, |range| {
                    for line in range {
                        let row = rows[line % rows.len()] as isize;
                        // Columns ascend, so those inside the band are one range.
                        let from = columns.partition_point(|&c| (c as isize) < row + lower);
                        let end = columns.partition_point(|&c| (c as isize) <= row + upper).max(from);
                        let target = std::slice::from_raw_parts_mut(
                            to.get().add(line * width).cast::<std::mem::MaybeUninit<T>>(),
                            width,
                        );
                        target[..from].fill(std::mem::MaybeUninit::new(outside));
                        let inside = &elements[line * width + from..line * width + end];
                        target[from..end].write_copy_of_slice(inside);
                        target[end..].fill(std::mem::MaybeUninit::new(outside));
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

    #[test]
    fn elements_outside_of_the_band_are_replaced_in_every_type() {
        let (rows, columns) = ([0, 1, 5], [1, 2, 4, 5, 9]);
        for dtype in [DType::U8, DType::I64, DType::BF16, DType::F32] {
            let x = Tensor::ones((2, 3, 5), dtype, &Device::Cpu).unwrap();
            for bounds in [[-1, 1], [-100, 0], [0, 100], [3, 1]] {
                let got = band(&x, &rows, &columns, bounds, 7).unwrap().to_dtype(DType::I64).unwrap();
                for (i, &got) in got.flatten_all().unwrap().to_vec1::<i64>().unwrap().iter().enumerate() {
                    let distance = columns[i % 5] as isize - rows[i / 5 % 3] as isize;
                    let inside = distance >= bounds[0] && distance <= bounds[1];
                    assert_eq!(got, if inside { 1 } else { 7 }, "{dtype:?} {bounds:?} {i}");
                }
            }
        }
    }
}
