//! Searches: the first NaN, the positions of nonzero elements, and the buckets of numbers between boundaries.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use super::convert::{Block, Compute};
use super::parallel::over_ranges;
use super::typed_slice::{filled_by, with_slice};
use super::{check_supported, contiguous, simd, with_first_element, with_type};
use crate::error::Result;

/// Elements that are tested at a time before the search looks at each of them.
const BLOCK: usize = 256;

/// Whether any element of a block is found; `test` is a closure that is inlined into the loop.
struct AnyOf<'a, T, F> {
    block: &'a [T],
    test: F,
}

impl<T: Copy, F: Fn(T) -> bool> simd::Kernel for AnyOf<'_, T, F> {
    type Output = bool;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> bool {
        self.block.iter().fold(false, |any, &x| any | (self.test)(x))
    }
}

/// How many elements of a slice are nonzero.
struct CountOf<'a, T>(&'a [T]);

impl<T: WithDType + Default> simd::Kernel for CountOf<'_, T> {
    type Output = usize;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> usize {
        self.0
            .chunks(BLOCK)
            .map(|block| block.iter().map(|x| u32::from(*x != T::default())).sum::<u32>() as usize)
            .sum()
    }
}

/// The position of the first NaN of a tensor in row-major order; integers have none.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor.
pub fn first_nan(tensor: &Tensor) -> Result<Option<usize>> {
    fn search<T: Copy>(tensor: &[T], is_nan: impl Fn(T) -> bool + Copy) -> Option<usize> {
        let block = tensor.chunks(BLOCK).position(|block| simd::run(AnyOf { block, test: is_nan }))?;
        let at = tensor[block * BLOCK..].iter().position(|&x| is_nan(x))?;
        Some(block * BLOCK + at)
    }
    match tensor.dtype() {
        DType::F64 => with_slice(tensor, |x| search(x, f64::is_nan)),
        DType::F32 => with_slice(tensor, |x| search(x, f32::is_nan)),
        DType::F16 => with_slice(tensor, |x| search(x, half::f16::is_nan)),
        DType::BF16 => with_slice(tensor, |x| search(x, half::bf16::is_nan)),
        _ => Ok(None),
    }
}

/// The number of nonzero elements of a mask of any type; NaN is nonzero.
///
/// # Errors
/// If the kernels do not support the type or device of the mask.
pub fn count_nonzero(mask: &Tensor) -> Result<usize> {
    super::check_dtype(mask.dtype())?;
    with_type!(mask.dtype(), T => with_slice::<T, _>(mask, |mask| simd::run(CountOf(mask))),
        otherwise unreachable!("checked above"))
}

/// The positions of the nonzero elements of a mask of any type, in row-major order.
///
/// # Errors
/// If the kernels do not support the type or device of the mask.
pub fn nonzero_positions(mask: &Tensor) -> Result<Vec<usize>> {
    let mut positions = Vec::with_capacity(count_nonzero(mask)?);
    with_type!(mask.dtype(), T => with_slice::<T, _>(mask, |mask| {
        for (number, block) in mask.chunks(BLOCK).enumerate() {
            if simd::run(AnyOf { block, test: |x: T| x != T::default() }) {
                let set = block.iter().enumerate().filter(|(_, x)| **x != T::default());
                positions.extend(set.map(|(i, _)| number * BLOCK + i));
            }
        }
    })?, otherwise unreachable!("counted above"));
    Ok(positions)
}

/// Returns for each element of `x` the index (i64) of the first of ascending `boundaries` that is not below it.
///
/// Equal types are compared as they are. Otherwise integers are compared as i64, and a float with anything as f64. NaN comes
/// after all boundaries, as in PyTorch.
///
/// # Errors
/// If the kernels do not support a type or device, or memory does not suffice.
pub fn bucketize(x: &Tensor, boundaries: &Tensor) -> Result<Tensor> {
    check_supported(x)?;
    let (own, other) = (x.dtype(), boundaries.dtype());
    let found = if own == other {
        with_type!(own, T => with_slice::<T, _>(boundaries, |boundaries| {
            with_slice::<T, _>(x, |x| buckets(x, boundaries))
        })??, otherwise unreachable!("checked above"))
    } else if own.is_float() || other.is_float() {
        converted_buckets::<f64>(&contiguous(x)?, boundaries)
    } else {
        converted_buckets::<i64>(&contiguous(x)?, boundaries)
    };
    Ok(found?.reshape(x.dims())?)
}

/// As [`buckets`], for elements of another type than the boundaries, which are converted block by block.
fn converted_buckets<C: Compute>(x: &Tensor, boundaries: &Tensor) -> Result<Tensor> {
    let (count, dtype) = (x.elem_count(), x.dtype());
    let mut buffer = [MaybeUninit::<C>::uninit(); BLOCK];
    with_slice::<C, _>(&boundaries.to_dtype(C::DTYPE)?, |boundaries| {
        // SAFETY: the blocks together are all elements of the contiguous tensor, and the buffer has the size of one.
        with_first_element(x, |first, _| unsafe {
            filled_by::<i64>(&[count], |to| {
                for from in (0..count).step_by(BLOCK) {
                    let width = BLOCK.min(count - from);
                    let block = Block { rows: 1, row_stride: 0, width, stride: 1 };
                    C::load(dtype, first.add(from * dtype.size_in_bytes()), block, &mut buffer[..width]);
                    for (i, x) in buffer[..width].assume_init_ref().iter().enumerate() {
                        to.get().add(from + i).write(boundaries.partition_point(|b| is_before(b, x)) as i64);
                    }
                }
            })
        })
    })?
}

/// Whether a boundary is below an element, or the element is NaN.
#[inline(always)]
fn is_before<T: PartialOrd>(boundary: &T, x: &T) -> bool {
    boundary < x || x.partial_cmp(x).is_none()
}

fn buckets<T: WithDType>(x: &[T], boundaries: &[T]) -> Result<Tensor> {
    // SAFETY: the ranges are all elements, and each writes its own.
    unsafe {
        filled_by::<i64>(&[x.len()], |to| {
            // A binary search takes about as many steps as the number of boundaries has bits, of a few units each.
            let cost = 4 * (1 + boundaries.len().checked_ilog2().unwrap_or(0) as usize);
            over_ranges(x.len(), cost, 1, |range| {
                for i in range {
                    to.get().add(i).write(boundaries.partition_point(|b| is_before(b, &x[i])) as i64);
                }
            });
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_first_nan_is_found_in_every_float_type_and_block() {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            for at in [0, 255, 256, 600] {
                let mut x = vec![1f64; 601];
                (x[at], x[600]) = (f64::NAN, f64::NAN);
                let x = Tensor::new(x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(first_nan(&x).unwrap(), Some(at), "{dtype:?}");
                assert_eq!(first_nan(&x.narrow(0, 0, at).unwrap()).unwrap(), None);
            }
        }
    }

    #[test]
    fn nonzero_positions_are_those_of_the_plain_loop() {
        for dtype in [DType::U8, DType::I64, DType::BF16, DType::F32, DType::U32, DType::I16, DType::I32] {
            let x: Vec<u8> = (0..1000u32).map(|i| u8::from(i % 7 == 3 || i > 990) * 5).collect();
            let expected: Vec<usize> = (0..1000).filter(|&i| x[i] != 0).collect();
            let x = Tensor::new(x, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            assert_eq!(nonzero_positions(&x).unwrap(), expected, "{dtype:?}");
            assert_eq!(count_nonzero(&x).unwrap(), expected.len());
        }
        // -0.0 is zero, NaN and subnormal numbers are not.
        let x = Tensor::new(&[-0.0f32, f32::NAN, 1e-40, 0.0], &Device::Cpu).unwrap();
        assert_eq!(nonzero_positions(&x).unwrap(), [1, 2]);
    }

    #[test]
    fn buckets_of_large_integers_are_exact() {
        let big = 1i64 << 53;
        let boundaries = Tensor::new(&[-1i64, big, big + 1, i64::MAX], &Device::Cpu).unwrap();
        let x = Tensor::new(&[[i64::MIN, -1, big], [big + 1, big + 2, i64::MAX]], &Device::Cpu).unwrap();
        assert_eq!(bucketize(&x, &boundaries).unwrap().to_vec2::<i64>().unwrap(), [[0, 0, 1], [2, 3, 3]]);
        let mixed = Tensor::new(&[0.5f32, -2.0, f32::NAN], &Device::Cpu).unwrap();
        assert_eq!(bucketize(&mixed, &boundaries).unwrap().to_vec1::<i64>().unwrap(), [1, 0, 4]);
    }
}
