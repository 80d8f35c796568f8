//! Batched matrix product of strided tensors, copied only where strides do not allow it, with threads for large products.

use candle_core::{DType, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;

use super::parallel::SharedPtr;
use super::{Assembly, contiguous, with_first_element};
use crate::error::Result;
use crate::meta::TensorMeta;

/// Products with fewer multiplications than this run on the calling thread: they take some tens of microseconds, about as long
/// as waking the threads of the pool.
const MIN_MULTIPLICATIONS_FOR_THREADS: usize = 1 << 20;

/// Multiplies two batches of matrices, each group of dimensions flattened, like JAX's `dot_general`.
///
/// `a` has dimensions `[batch.., rows.., inner..]` and `b` has `[batch.., inner.., columns..]`, with `batch` batch dimensions
/// and `inner` contracted ones; the result has `[batch.., rows.., columns..]`. Both have one floating-point type. f32
/// accumulates in f32 and f64 in f64; f16 and bf16 are converted to f32, multiplied, and rounded once.
///
/// Large products use the rayon pool of the calling thread: a single one is divided, several are distributed. A tensor is
/// copied only if one of its groups of dimensions cannot be walked with one stride.
///
/// # Panics
/// If the batch or inner sizes differ.
pub fn batched_matmul(a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<Tensor> {
    let dtype = a.dtype();
    // `gemm` rounds its f16 product between blocks of the inner dimension, and has none for bf16.
    if matches!(dtype, DType::F16 | DType::BF16) {
        let wide = batched_matmul(&a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?, batch, inner)?;
        return Ok(wide.to_dtype(dtype)?);
    }
    let rows = a.dims().len() - inner;
    let shape = [&a.dims()[..rows], &b.dims()[batch + inner..]].concat();
    let (a, b) = (MatrixBatch::new(a, batch, rows)?, MatrixBatch::new(b, batch, batch + inner)?);
    assert!(a.sizes[0] == b.sizes[0] && a.sizes[2] == b.sizes[1], "product of {:?} and {:?}", a.sizes, b.sizes);
    let output = Assembly::new(TensorMeta { shape, dtype })?;
    // SAFETY: the output has room for every product; all of it is written; the type is that of the tensors.
    unsafe {
        match dtype {
            DType::F64 => multiply::<f64>(&a, &b, output.range(0), 0.0, 1.0),
            _ => multiply::<f32>(&a, &b, output.range(0), 0.0, 1.0),
        }
        Ok(output.finish())
    }
}

/// A tensor seen as a batch of matrices.
struct MatrixBatch {
    tensor: Tensor,
    /// Sizes of the batch and of the two dimensions of a matrix; `strides` in the same order.
    sizes: [usize; 3],
    strides: [usize; 3],
}

impl MatrixBatch {
    /// Dimensions `..batch` are the batch, `batch..first` the first dimension of a matrix and `first..` the second.
    fn new(tensor: &Tensor, batch: usize, first: usize) -> Result<Self> {
        let ranges = [0..batch, batch..first, first..tensor.dims().len()];
        let sizes = ranges.clone().map(|r| tensor.dims()[r].iter().product());
        let merged = ranges.map(|r| merged_stride(&tensor.dims()[r.clone()], &tensor.stride()[r]));
        if let [Some(a), Some(b), Some(c)] = merged
            && tensor.elem_count() > 0
        {
            return Ok(MatrixBatch { tensor: tensor.clone(), sizes, strides: [a, b, c] });
        }
        Ok(MatrixBatch { tensor: contiguous(tensor)?, sizes, strides: [sizes[1] * sizes[2], sizes[2], 1] })
    }
}

/// The stride with which adjacent dimensions can be walked as one; `None` if there is no such stride.
fn merged_stride(dims: &[usize], strides: &[usize]) -> Option<usize> {
    let mut walked: Option<(usize, usize)> = None;
    for (&n, &stride) in dims.iter().zip(strides).rev().filter(|(n, _)| **n != 1) {
        match walked {
            None => walked = Some((stride, stride * n)),
            Some((first, next)) if stride == next => walked = Some((first, next * n)),
            Some(_) => return None,
        }
    }
    Some(walked.map_or(1, |(stride, _)| stride))
}

/// Writes all products to `output`, one contiguous matrix after the other.
///
/// # Safety
/// The tensors have elements of type `T`, and there is room for the products.
unsafe fn multiply<T: 'static + Copy + Send + Sync>(a: &MatrixBatch, b: &MatrixBatch, output: *mut T, zero: T, one: T) {
    let ([count, m, k], n) = (a.sizes, b.sizes[2]);
    with_first_element(&a.tensor, |left, _| {
        with_first_element(&b.tensor, |right, _| {
            let (left, right, output) = (
                SharedPtr::new(left.cast::<T>().cast_mut()),
                SharedPtr::new(right.cast::<T>().cast_mut()),
                SharedPtr::new(output),
            );
            let work = m * n * k;
            let one_product = |i: usize, threads: Parallelism| {
                // SAFETY: strides and sizes are those of live tensors; the products do not overlap.
                unsafe {
                    gemm::gemm(
                        m,
                        n,
                        k,
                        output.get().add(i * m * n),
                        1,
                        n as isize,
                        false,
                        left.get().add(i * a.strides[0]).cast_const(),
                        a.strides[2] as isize,
                        a.strides[1] as isize,
                        right.get().add(i * b.strides[0]).cast_const(),
                        b.strides[2] as isize,
                        b.strides[1] as isize,
                        zero,
                        one,
                        false,
                        false,
                        false,
                        threads,
                    );
                }
            };
            let threads = if work * count < MIN_MULTIPLICATIONS_FOR_THREADS { 1 } else { rayon::current_num_threads() };
            match (threads, count) {
                (1, _) => (0..count).for_each(|i| one_product(i, Parallelism::None)),
                (_, 1) => one_product(0, Parallelism::Rayon(threads)),
                _ => (0..count).into_par_iter().for_each(|i| one_product(i, Parallelism::None)),
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn products_of_strided_views_equal_those_of_copies() {
        let x = Tensor::arange(0f32, 240.0, &Device::Cpu).unwrap().reshape((2, 3, 5, 8)).unwrap();
        let y = Tensor::arange(0f32, 192.0, &Device::Cpu).unwrap().reshape((2, 3, 4, 8)).unwrap();
        let turned = y.transpose(2, 3).unwrap();
        let expected = x.matmul(&turned.contiguous().unwrap()).unwrap();
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let got = batched_matmul(&x.to_dtype(dtype).unwrap(), &turned.to_dtype(dtype).unwrap(), 2, 1).unwrap();
            let rounded = expected.to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap();
            let difference = (got.to_dtype(DType::F64).unwrap() - &rounded).unwrap().abs().unwrap();
            let bound = if dtype == DType::BF16 { 0.02 } else { 0.0 };
            let worst = (difference / rounded.abs().unwrap()).unwrap().flatten_all().unwrap().max(0).unwrap();
            assert!(worst.to_scalar::<f64>().unwrap() <= bound, "{dtype:?}: {worst}");
        }
        // a batch that is one matrix, broadcast, and rows that are two dimensions
        let single = turned.narrow(0, 0, 1).unwrap().narrow(1, 0, 1).unwrap();
        let expanded = single.broadcast_as((2, 3, 8, 4)).unwrap();
        let expected = x.matmul(&expanded.contiguous().unwrap()).unwrap();
        let got = batched_matmul(&x, &expanded, 2, 1).unwrap();
        assert_eq!(
            got.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            expected.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        );
        let rows = batched_matmul(&x, &single.reshape((8, 4)).unwrap(), 0, 1).unwrap();
        assert_eq!(rows.dims(), [2, 3, 5, 4]);
    }
}
