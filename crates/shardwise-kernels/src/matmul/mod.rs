//! Batched matrix product of strided tensors, copied only where strides do not allow it, with threads for large products.
//!
//! The kernels are this crate's own because products of other crates round half types between blocks or convert them
//! beforehand, and their bits depend on the number of threads and on the instruction set.

mod blocks;
mod few_rows;
mod instruction_set;
mod registers;
mod pack;
mod product;
mod tile;

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor};
use float8::F8E4M3;
use half::{bf16, f16};
use rayon::prelude::*;

use super::accumulate::over_memory;
use super::parallel::{MIN_WORK_FOR_THREADS, SharedPtr};
use super::{Assembly, contiguous, first_element, reserve};
use crate::error::Result;
use crate::meta::TensorMeta;
use blocks::{MULTIPLICATIONS_PER_UNIT, multiply};
use few_rows::Real;
use instruction_set::Vectorized;
use pack::{MatmulElement, Source};
use product::{Epilogue, MatrixProduct};

/// Multiplies two batches of matrices, each group of dimensions flattened, like JAX's `dot_general`.
///
/// `a` has dimensions `[batch.., rows.., inner..]` and `b` has `[batch.., inner.., columns..]`, with `batch` batch dimensions
/// and `inner` contracted ones; the result has `[batch.., rows.., columns..]`. Both have one floating-point type. f32
/// accumulates in f32 and f64 in f64; f16 and bf16 are converted to f32 block by block, multiplied, and rounded once.
///
/// Large products use the rayon pool of the calling thread: a single one is divided, several are distributed. The bits do not
/// depend on the number of threads. A tensor is copied only if one of its groups of dimensions cannot be walked with one
/// stride.
///
/// # Panics
/// If the batch or inner sizes differ.
pub fn batched_matmul(a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<Tensor> {
    batched_matmul_bias(a, b, batch, inner, None)
}

/// As [`batched_matmul`] of factors in f16, bf16 or f8, with the sums in f32 as they are before they would be rounded: terms of a
/// larger sum. Reads the factors in their own type.
///
/// # Panics
/// If sizes or types differ, or the factors have another type.
pub fn batched_matmul_f32(a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<Tensor> {
    let product = BatchedProduct::new(a, b, batch, inner)?;
    let output = Assembly::new(TensorMeta { shape: product.shape.clone(), dtype: DType::F32 })?;
    // SAFETY: the output has room for every product; all of it is written; the type is that of the tensors.
    unsafe {
        match a.dtype() {
            DType::BF16 => product.multiply_all::<bf16, f32>(None, output.range(0), None)?,
            DType::F16 => product.multiply_all::<f16, f32>(None, output.range(0), None)?,
            DType::F8E4M3 => product.multiply_all::<F8E4M3, f32>(None, output.range(0), None)?,
            other => unreachable!("sums of {other:?}, which are not rounded to f32"),
        }
        Ok(output.finish())
    }
}

/// As [`batched_matmul`], and adds a bias to every row of the product, rounded once with it.
///
/// The bias has the type of the factors and the dimensions `[columns..]`.
///
/// # Panics
/// If sizes differ.
pub fn batched_matmul_bias(
    a: &Tensor,
    b: &Tensor,
    batch: usize,
    inner: usize,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let dtype = a.dtype();
    let product = BatchedProduct::new(a, b, batch, inner)?;
    let bias = bias.map(contiguous).transpose()?;
    let columns = product.b.sizes[2];
    assert!(bias.as_ref().is_none_or(|bias| bias.elem_count() == columns && bias.dtype() == dtype), "{bias:?}");
    let output = Assembly::new(TensorMeta { shape: product.shape.clone(), dtype })?;
    // SAFETY: the output has room for every product; all of it is written; the type is that of the tensors.
    unsafe {
        match dtype {
            DType::F64 => product.multiply_all::<f64, f64>(bias.as_ref(), output.range(0), None)?,
            DType::F32 => product.multiply_all::<f32, f32>(bias.as_ref(), output.range(0), None)?,
            DType::BF16 => product.multiply_all::<bf16, bf16>(bias.as_ref(), output.range(0), None)?,
            DType::F16 => product.multiply_all::<f16, f16>(bias.as_ref(), output.range(0), None)?,
            other => unreachable!("a product of {other:?}, which callers convert"),
        }
        Ok(output.finish())
    }
}

/// Multiplies two matrices of f32 as [`batched_matmul_bias`] does, and applies an elementwise function to parts of the product
/// as they are completed.
///
/// `a` has dimensions `[rows.., inner]` and `b` has `[inner, columns]`. Returns the results of the function and, if
/// `keeps_product`, the product itself; otherwise the results overwrite it.
///
/// # Panics
/// If sizes differ or a type is not f32.
pub fn matmul_activation(
    a: &Tensor,
    b: &Tensor,
    bias: Option<&Tensor>,
    function: fn(&[f32], &mut [MaybeUninit<f32>]),
    keeps_product: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    assert!(a.dtype() == DType::F32 && bias.is_none_or(|bias| bias.dtype() == DType::F32), "{a:?} and {bias:?}");
    let product = BatchedProduct::new(a, b, 0, 1)?;
    let bias = bias.map(contiguous).transpose()?;
    assert!(bias.as_ref().is_none_or(|bias| bias.elem_count() == product.b.sizes[2]), "{bias:?}");
    let meta = TensorMeta { shape: product.shape.clone(), dtype: DType::F32 };
    let results = Assembly::new(meta.clone())?;
    let kept = keeps_product.then(|| Assembly::new(meta)).transpose()?;
    // SAFETY: both outputs have room for the product; all of it is written.
    unsafe {
        let epilogue = Epilogue { apply: &function, results: SharedPtr::new(results.range(0)) };
        let output = kept.as_ref().unwrap_or(&results).range(0);
        product.multiply_all::<f32, f32>(bias.as_ref(), output, Some(epilogue))?;
        Ok((results.finish(), kept.map(|kept| kept.finish())))
    }
}

/// Adds a product to `target` in place: the blocks of the sum over `inner` dimensions are added to what it holds, one by one.
///
/// As [`batched_matmul`] otherwise. `target` is contiguous, has the shape of the product and the type of the factors, f32 or
/// f64; no other tensor uses its memory.
///
/// # Panics
/// If sizes or types differ, or `target` is not contiguous.
pub fn add_batched_matmul(target: &Tensor, a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<()> {
    let product = BatchedProduct { accumulates: true, ..BatchedProduct::new(a, b, batch, inner)? };
    assert!(target.dims() == product.shape && target.dtype() == a.dtype(), "{:?} and {:?}", target, product.shape);
    // SAFETY: the target has an element for each of the product, of this type, and is locked for writing.
    over_memory(target, |first| unsafe {
        match target.dtype() {
            DType::F64 => product.multiply_all::<f64, f64>(None, first.cast(), None),
            DType::F32 => product.multiply_all::<f32, f32>(None, first.cast(), None),
            other => unreachable!("a sum of {other:?}, which callers round"),
        }
    })
}

/// Two batches of matrices whose sizes fit, and the shape of their product.
struct BatchedProduct {
    a: MatrixBatch,
    b: MatrixBatch,
    shape: Vec<usize>,
    /// Whether it is added to what the result holds.
    accumulates: bool,
}

impl BatchedProduct {
    fn new(a: &Tensor, b: &Tensor, batch: usize, inner: usize) -> Result<Self> {
        assert!(a.dtype() == b.dtype(), "product of {:?} and {:?}", a.dtype(), b.dtype());
        let rows = a.dims().len() - inner;
        let shape = [&a.dims()[..rows], &b.dims()[batch + inner..]].concat();
        let (a, b) = (MatrixBatch::new(a, batch, rows)?, MatrixBatch::new(b, batch, batch + inner)?);
        assert!(a.sizes[0] == b.sizes[0] && a.sizes[2] == b.sizes[1], "product of {:?} and {:?}", a.sizes, b.sizes);
        Ok(BatchedProduct { a, b, shape, accumulates: false })
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

impl BatchedProduct {
    /// Writes all products to `output`, one contiguous matrix after the other. With an epilogue there is one product.
    ///
    /// # Safety
    /// The tensors have elements of type `S`, and there is room for the products.
    unsafe fn multiply_all<S: MatmulElement, O: MatmulElement<Wide = S::Wide>>(
        &self,
        bias: Option<&Tensor>,
        output: *mut O,
        epilogue: Option<Epilogue<'_, S::Wide>>,
    ) -> Result<()>
    where
        S::Wide: Vectorized + Real,
    {
        let BatchedProduct { a, b, .. } = self;
        let ([count, m, k], n) = (a.sizes, b.sizes[2]);
        let guards = [&a.tensor, &b.tensor].map(Tensor::storage_and_layout);
        let [left, right] = guards
            .each_ref()
            .map(|(storage, layout)| SharedPtr::new(first_element(storage, layout).0.cast::<S>().cast_mut()));
        let bias = bias.map(|bias| wide_elements::<S>(bias)).transpose()?;
        let bias = bias.as_ref().map(|bias| SharedPtr::new(bias.as_ptr().cast_mut()));
        let output = SharedPtr::new(output);
        debug_assert!(epilogue.is_none() || count == 1, "{count} products with an epilogue");
        let one_product = |i: usize, threads: bool| -> Result<()> {
            // SAFETY: strides and sizes are those of live tensors; the products do not overlap.
            unsafe {
                let product = MatrixProduct {
                    m,
                    n,
                    k,
                    left: Source { first: left.get().add(i * a.strides[0]), across: a.strides[1], along: a.strides[2] },
                    right: Source {
                        first: right.get().add(i * b.strides[0]),
                        across: b.strides[2],
                        along: b.strides[1],
                    },
                    bias: bias.map(|bias| bias.get().cast_const()),
                    accumulates: self.accumulates,
                };
                multiply(product, output.get().add(i * m * n), threads, epilogue)
            }
        };
        let is_large = (m * n).saturating_mul(k * count) / MULTIPLICATIONS_PER_UNIT >= MIN_WORK_FOR_THREADS;
        match (is_large && rayon::current_num_threads() > 1, count) {
            (true, 2..) => (0..count).into_par_iter().try_for_each(|i| one_product(i, false)),
            (threads, _) => (0..count).try_for_each(|i| one_product(i, threads)),
        }
    }
}

/// The elements of a contiguous tensor in the type in which they are added.
fn wide_elements<S: MatmulElement>(tensor: &Tensor) -> Result<Vec<S::Wide>> {
    let (storage, layout) = tensor.storage_and_layout();
    let first = first_element(&storage, layout).0.cast::<S>();
    let mut values = reserve(tensor.elem_count())?;
    // SAFETY: the elements of a contiguous tensor of this type.
    values.extend((0..tensor.elem_count()).map(|i| unsafe { (*first.add(i)).wide() }));
    Ok(values)
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

    /// Small integers, whose products and sums are exact in every type.
    fn integers(shape: [usize; 2], seed: u64, dtype: DType) -> Tensor {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % 3) as f64 - 1.0
        };
        let values: Vec<f64> = (0..shape[0] * shape[1]).map(|_| next()).collect();
        Tensor::from_vec(values, &shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn numbers(t: &Tensor) -> Vec<f64> {
        t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Sizes around those of tiles, panels, blocks and groups of columns, of each instruction set.
    const SIZES: [[usize; 3]; 14] = [
        [1, 1, 1],
        [3, 5, 7],
        [8, 48, 16],
        [9, 49, 33],
        [7, 64, 512],
        [15, 16, 513],
        [17, 97, 1030],
        [64, 481, 40],
        [13, 500, 12],
        [1, 600, 300],
        [2, 70, 1100],
        [3, 300, 64],
        [4, 33, 520],
        [20, 0, 5],
    ];

    #[test]
    fn an_activation_sees_every_element_of_the_product_once() {
        let negate_and_add = |x: &[f32], out: &mut [MaybeUninit<f32>]| {
            x.iter().zip(out).for_each(|(x, out)| _ = out.write(0.5 - x));
        };
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for [m, n, k] in SIZES.into_iter().chain([[130, 4000, 70], [4000, 50, 600]]) {
                let (a, b) = (integers([m, k], 1, DType::F32), integers([n, k], 2, DType::F32).t().unwrap());
                for bias in [None, Some(integers([1, n], 3, DType::F32).flatten_all().unwrap())] {
                    let product = batched_matmul_bias(&a, &b, 0, 1, bias.as_ref()).unwrap();
                    let expected: Vec<f64> = numbers(&product).iter().map(|x| 0.5 - x).collect();
                    for keeps in [true, false] {
                        let run = || matmul_activation(&a, &b, bias.as_ref(), negate_and_add, keeps).unwrap();
                        let (results, kept) = pool.install(run);
                        let case = format!("{m} x {k} x {n}, kept: {keeps}, {threads} threads");
                        assert_eq!(kept.map(|kept| numbers(&kept)), keeps.then(|| numbers(&product)), "{case}");
                        assert_eq!(numbers(&results), expected, "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn products_are_exact_for_all_sizes_types_and_strides() {
        for [m, n, k] in SIZES {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                for transposed in [[false, false], [false, true], [true, false], [true, true]] {
                    let factor = |[rows, columns]: [usize; 2], seed: u64, transposed: bool| match transposed {
                        false => integers([rows, columns], seed, dtype),
                        true => integers([columns, rows], seed, dtype).t().unwrap(),
                    };
                    let (a, b) = (factor([m, k], 1, transposed[0]), factor([k, n], 2, transposed[1]));
                    let bias = integers([1, n], 3, dtype).flatten_all().unwrap();
                    let (left, right, added) = (numbers(&a), numbers(&b), numbers(&bias));
                    let product = |e: usize| {
                        let (i, j) = (e / n, e % n);
                        (0..k).map(|p| left[i * k + p] * right[p * n + j]).sum::<f64>()
                    };
                    let plain: Vec<f64> = (0..m * n).map(product).collect();
                    let sums: Vec<f64> = plain.iter().enumerate().map(|(e, x)| x + added[e % n]).collect();
                    let rounded = |x: &[f64]| {
                        let x = Tensor::from_slice(x, (m, n), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                        numbers(&x)
                    };
                    let case = format!("{m} x {k} x {n} of {dtype:?}, {transposed:?}");
                    assert_eq!(numbers(&batched_matmul(&a, &b, 0, 1).unwrap()), rounded(&plain), "{case}");
                    let got = batched_matmul_bias(&a, &b, 0, 1, Some(&bias)).unwrap();
                    assert_eq!(numbers(&got), rounded(&sums), "{case}");
                    if matches!(dtype, DType::F32 | DType::F64) {
                        let target = integers([m, n], 4, dtype);
                        let expected: Vec<f64> = numbers(&target).iter().zip(&plain).map(|(x, y)| x + y).collect();
                        add_batched_matmul(&target, &a, &b, 0, 1).unwrap();
                        assert_eq!(numbers(&target), expected, "{case}");
                    } else {
                        let got = batched_matmul_f32(&a, &b, 0, 1).unwrap();
                        assert_eq!((got.dtype(), numbers(&got)), (DType::F32, plain), "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_rows_or_columns() {
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap();
        let bits = |t: &Tensor| -> Vec<u32> {
            t.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
        };
        let (a, b) = (random(&[200, 700]), random(&[700, 530]));
        let expected = pool(1).install(|| batched_matmul(&a, &b, 0, 1)).unwrap();
        for threads in [2, 4] {
            let got = pool(threads).install(|| batched_matmul(&a, &b, 0, 1)).unwrap();
            assert_eq!(bits(&got), bits(&expected), "{threads} threads");
        }
        // A part of the product is the product of parts, also of few rows.
        for (rows, columns) in [((3, 50), (7, 100)), ((10, 2), (0, 530)), ((199, 1), (16, 333))] {
            let (a, b) = (a.narrow(0, rows.0, rows.1).unwrap(), b.narrow(1, columns.0, columns.1).unwrap());
            let part = expected.narrow(0, rows.0, rows.1).unwrap().narrow(1, columns.0, columns.1).unwrap();
            assert_eq!(bits(&batched_matmul(&a, &b, 0, 1).unwrap()), bits(&part), "{rows:?} {columns:?}");
        }
        let (a, b) = (random(&[6, 90, 80]), random(&[6, 80, 70]));
        let expected = pool(1).install(|| batched_matmul(&a, &b, 1, 1)).unwrap();
        let got = pool(3).install(|| batched_matmul(&a, &b, 1, 1)).unwrap();
        assert_eq!(bits(&got), bits(&expected));
    }
}
