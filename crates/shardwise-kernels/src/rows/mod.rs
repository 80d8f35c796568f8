//! Softmax, log-softmax, logsumexp, layer norm and RMS norm over the last dimension, with their gradients.
//!
//! All other dimensions are flattened to rows. Each row is read from memory once and stays in the cache while it is computed.
//! f64 is computed in f64; f32, f16 and bf16 in f32; sums and means of more than a few elements accumulate in f64. The result
//! has the type of the input.
//! Large inputs are divided over the threads of the pool by rows; one that is not contiguous is copied first.

mod backward;
mod forward;
mod residual;

pub use backward::{
    add_layer_norm_backward_rows, add_rms_norm_backward_rows, layer_norm_backward_rows, log_softmax_backward_rows,
    rms_norm_backward_rows, softmax_backward_rows,
};
pub use forward::{
    layer_norm_rows, log_softmax_rows, logsumexp_rows, logsumexp_rows_compressed, logsumexp_rows_in_terms,
    rms_norm_rows, softmax_rows, terms_of_compressed,
};
pub use residual::{add_layer_norm_rows, add_rms_norm_rows};

use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::{Add, AddAssign, Mul, MulAssign, Sub};

use candle_core::{DType, Tensor};

use super::convert::{Block, Compute};
use super::parallel::{SharedPtr, over_ranges};
use super::pointwise::each;
use super::reduce_dims::{Accumulate, LANES, Max, Sum, accumulate_lanes, combine_lanes};
use super::uninit_buffer::UninitBuffer;
use super::{contiguous, first_element, math};
use crate::error::{ErrorKind, Result};

/// The floating-point types in which rows are computed: f32 and f64.
trait RowFloat: Compute + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + AddAssign + MulAssign {
    fn wide(self) -> f64;
    fn narrow(x: f64) -> Self;
    /// `exp(x)`; `FMA` as in [`math`].
    fn exp<const FMA: bool>(self) -> Self;
    /// The maximum; NaN if any element is NaN.
    fn max_of(row: &[Self]) -> Self;
}

macro_rules! row_floats {
    ($($T:ident: |$x:ident| $exp:expr;)*) => {$(
        impl RowFloat for $T {
            #[inline(always)]
            fn wide(self) -> f64 {
                self as f64
            }

            #[inline(always)]
            fn narrow(x: f64) -> Self {
                x as $T
            }

            #[inline(always)]
            fn exp<const FMA: bool>(self) -> Self {
                let $x = self;
                $exp
            }

            #[inline(always)]
            fn max_of(row: &[Self]) -> Self {
                combine_lanes::<$T, Max>(accumulate_lanes::<$T, Max>([<Max as Accumulate<$T>>::NEUTRAL; LANES], row))
            }
        }
    )*};
}
row_floats! {
    f32: |x| math::exp::<FMA>(x);
    f64: |x| x.exp();
}

/// Terms that are added in the type of the row before they are added to sums in f64: three roundings per term, and an eighth
/// of the conversions.
const CHAIN: usize = 8;

/// Sums `f(a[i], b[i])` over two rows, in f64 but for short chains.
#[inline(always)]
fn sum<T: RowFloat>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> f64 {
    let [total] = sums([a, b], |[a, b]| [f(a, b)]);
    total
}

/// Sums several functions of rows in one pass, as [`sum`] does.
#[inline(always)]
fn sums<T: RowFloat, const N: usize, const K: usize>(rows: [&[T]; N], f: impl Fn([T; N]) -> [T; K]) -> [f64; K] {
    let mut lanes = [[<Sum as Accumulate<f64>>::NEUTRAL; LANES]; K];
    let width = rows[0].len();
    // Arrays of a known length, so that the loop over lanes becomes vector instructions.
    let chains: [&[[T; CHAIN * LANES]]; N] = rows.map(|row| &row[..width].as_chunks().0[..width / (CHAIN * LANES)]);
    for c in 0..width / (CHAIN * LANES) {
        let chain: [&[T; CHAIN * LANES]; N] = from_fn(|n| &chains[n][c]);
        // Converted in a loop of their own: in one loop, vectors of T would be as short as those of f64 have to be.
        let mut short = [[T::narrow(0.0); LANES]; K];
        for i in 0..LANES {
            let term = |k: usize| f(from_fn(|n| chain[n][k * LANES + i]));
            let terms: [[T; K]; CHAIN] = [term(0), term(1), term(2), term(3), term(4), term(5), term(6), term(7)];
            for k in 0..K {
                let pair = |c: usize| terms[c][k] + terms[c + 1][k];
                short[k][i] = (pair(0) + pair(2)) + (pair(4) + pair(6));
            }
        }
        for k in 0..K {
            for i in 0..LANES {
                lanes[k][i] += short[k][i].wide();
            }
        }
    }
    for i in width - width % (CHAIN * LANES)..width {
        let terms = f(from_fn(|n| rows[n][i]));
        for k in 0..K {
            lanes[k][i % LANES] += terms[k].wide();
        }
    }
    lanes.map(combine_lanes::<f64, Sum>)
}

/// Sums the squares of `f(x)` over a row. Where they leave the range of the type, they are computed in f64.
#[inline(always)]
fn sum_of_squares<T: RowFloat>(row: &[T], f: impl Fn(T) -> T) -> f64 {
    let squares = sum(row, row, |x, _| f(x) * f(x));
    // Below this, squares of f32 may have lost digits or vanished.
    if squares.is_finite() && squares > 1e-24 { squares } else { row.iter().map(|&x| f(x).wide().powi(2)).sum() }
}

/// Writes an elementwise function of rows to memory that may be uninitialised, and returns it as initialised.
#[inline(always)]
fn write<'a, T: Copy, const N: usize>(
    out: &'a mut [MaybeUninit<T>],
    rows: [&[T]; N],
    f: impl Fn([T; N]) -> T,
) -> &'a mut [T] {
    each(rows, out, f);
    // SAFETY: `each` writes every element.
    unsafe { out.assume_init_mut() }
}

/// Replaces every element of `row` by a function of it and the same element of `by`.
#[inline(always)]
fn zip_in_place<T: Copy>(row: &mut [T], by: &[T], f: impl Fn(T, T) -> T) {
    row.iter_mut().zip(by).for_each(|(x, &y)| *x = f(*x, y));
}

/// Statistics that normalise a row: the mean that is subtracted, and one over the standard deviation.
#[derive(Clone, Copy)]
struct RowStats<T> {
    /// The mean as a number of the type and the rest, so that differences from a large mean keep their digits.
    mean: [T; 2],
    rstd: T,
}

impl<T: RowFloat> RowStats<T> {
    /// Mean and standard deviation of a row, for layer norm.
    #[inline(always)]
    fn layer(row: &[T], eps: f64) -> Self {
        let mean = sum(row, row, |x, _| x) / row.len() as f64;
        let high = T::narrow(mean);
        let mean = [high, T::narrow(mean - high.wide())];
        let square = sum_of_squares(row, |x| x - mean[0] - mean[1]);
        RowStats { mean, rstd: T::narrow(1.0 / (square / row.len() as f64 + eps).sqrt()) }
    }

    /// No mean, and the root mean square of a row, for RMS norm.
    #[inline(always)]
    fn root_mean_square(row: &[T], eps: f64) -> Self {
        let square = sum_of_squares(row, |x| x);
        RowStats { mean: [T::narrow(0.0); 2], rstd: T::narrow(1.0 / (square / row.len() as f64 + eps).sqrt()) }
    }

    #[inline(always)]
    fn normalize(self, x: T) -> T {
        (x - self.mean[0] - self.mean[1]) * self.rstd
    }
}

/// Layer norm or RMS norm.
#[derive(Clone, Copy, PartialEq)]
enum NormKind {
    Layer,
    RootMeanSquare,
}

impl NormKind {
    #[inline(always)]
    fn stats<T: RowFloat>(self, row: &[T], eps: f64) -> RowStats<T> {
        match self {
            NormKind::Layer => RowStats::layer(row, eps),
            NormKind::RootMeanSquare => RowStats::root_mean_square(row, eps),
        }
    }
}

/// Number of rows of a tensor, and their length.
fn rows_and_width(x: &Tensor) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or(1);
    (x.elem_count().checked_div(width).unwrap_or(0), width)
}

/// Runs `$body` with `$T` as the type in which rows of this tensor are computed.
macro_rules! in_type_of {
    ($x:expr, $T:ident => $body:expr) => {
        if $x.dtype() == candle_core::DType::F64 {
            type $T = f64;
            $body
        } else {
            type $T = f32;
            $body
        }
    };
}
use in_type_of;

/// The elements of a weight or bias, of which there must be one per element of a row.
fn per_element<T: Compute>(parameter: &Tensor, width: usize) -> Result<Vec<T>> {
    if parameter.elem_count() != width {
        let found = format!("shape {:?} next to rows of {width} elements", parameter.dims());
        return Err(ErrorKind::shape(parameter.dims()).error(
            "operands",
            found,
            "as many elements as a row has",
            "reshape the tensors",
        ));
    }
    let parameter = contiguous(parameter)?;
    let (storage, layout) = parameter.storage_and_layout();
    let (first, dtype) = first_element(&storage, layout);
    let mut values = Vec::with_capacity(width);
    let block = Block { rows: 1, row_stride: 0, width, stride: 1 };
    // SAFETY: the tensor is contiguous with `width` elements, for which the vector has room.
    unsafe {
        T::load(dtype, first, block, &mut values.spare_capacity_mut()[..width]);
        values.set_len(width);
    }
    Ok(values)
}

/// Work per element of a row, in units of [`over_ranges`]: an exponential, or several passes over a row in the cache.
const COST: usize = 4;

/// Memory of one thread for a row before it is converted, and for what a kernel keeps of it.
type RowScratch<T> = Vec<MaybeUninit<T>>;

/// Takes the number of a row, the row of each tensor, and scratch memory.
type RowBody<'a, T, const N: usize> = &'a (dyn Fn(usize, [&[T]; N], &mut RowScratch<T>) + Sync);

/// Calls `body` with the number of a row and the row of each tensor, all of one shape, on the threads of the pool if there is
/// enough work. The rows of a block of `block` rows are visited in order by one thread.
fn over_rows<T: Compute, const N: usize>(tensors: &[&Tensor; N], block: usize, body: RowBody<'_, T, N>) -> Result<()> {
    if let Some(other) = tensors.iter().find(|t| t.dims() != tensors[0].dims()) {
        let found = format!("rows of shapes {:?} and {:?}", tensors[0].dims(), other.dims());
        return Err(ErrorKind::shape(other.dims()).error(
            "operands",
            found,
            "tensors of one shape",
            "reshape or expand the tensors",
        ));
    }
    let (count, width) = rows_and_width(tensors[0]);
    if count == 0 {
        return Ok(());
    }
    let mut contiguous_tensors = tensors.map(Tensor::clone);
    for tensor in &mut contiguous_tensors {
        *tensor = contiguous(tensor)?;
    }
    let guards: [_; N] = from_fn(|k| contiguous_tensors[k].storage_and_layout());
    let sources: [_; N] = from_fn(|k| first_element(&guards[k].0, guards[k].1));
    let sources = sources.map(|(first, dtype)| (SharedPtr::new(first.cast_mut()), dtype));
    over_ranges(count, width * COST, block, |range| {
        let mut buffers: [Vec<T>; N] = from_fn(|_| Vec::new());
        let mut scratch = RowScratch::new();
        for row in range {
            let mut rows = [&[][..]; N];
            for (((first, dtype), buffer), values) in sources.iter().zip(&mut buffers).zip(&mut rows) {
                // SAFETY: the row is inside the tensor, which is contiguous and kept by its guard. The buffer has room for a
                // row, which is written before it is read.
                *values = unsafe {
                    let first = first.get().add(row * width * dtype.size_in_bytes()).cast_const();
                    if *dtype == T::DTYPE {
                        std::slice::from_raw_parts(first.cast(), width)
                    } else {
                        buffer.reserve(width);
                        let block = Block { rows: 1, row_stride: 0, width, stride: 1 };
                        T::load(*dtype, first, block, &mut buffer.spare_capacity_mut()[..width]);
                        std::slice::from_raw_parts(buffer.as_ptr(), width)
                    }
                };
            }
            body(row, rows, &mut scratch);
        }
    });
    Ok(())
}

/// The first `count` elements of the scratch memory, which grows to that size.
fn scratch_of<T: Copy>(scratch: &mut RowScratch<T>, count: usize) -> &mut [MaybeUninit<T>] {
    if scratch.len() < count {
        scratch.resize(count, MaybeUninit::uninit());
    }
    &mut scratch[..count]
}

/// Writes the rows of a new tensor, in any order.
struct RowWriter {
    memory: UninitBuffer,
    first: SharedPtr<u8>,
    dtype: DType,
    width: usize,
}

impl RowWriter {
    fn new(dtype: DType, rows: usize, width: usize) -> Result<Self> {
        let memory = UninitBuffer::new(dtype, rows * width)?;
        let first = SharedPtr::new(memory.first());
        Ok(RowWriter { memory, first, dtype, width })
    }

    /// Writes a row with `body`, through the scratch memory if it has to be converted.
    ///
    /// # Safety
    /// The row exists, no other thread writes it, and `body` writes every element of the slice.
    unsafe fn write<T: Compute>(
        &self,
        row: usize,
        scratch: &mut [MaybeUninit<T>],
        body: impl FnOnce(&mut [MaybeUninit<T>]),
    ) {
        // SAFETY: the caller's promises.
        unsafe {
            let to = self.first.get().add(row * self.width * self.dtype.size_in_bytes());
            if self.dtype == T::DTYPE {
                return body(std::slice::from_raw_parts_mut(to.cast(), self.width));
            }
            let converted = &mut scratch[..self.width];
            body(converted);
            T::store(self.dtype, converted.assume_init_ref(), to);
        }
    }

    /// Returns the tensor.
    ///
    /// # Safety
    /// All rows have been written.
    unsafe fn finish(self, shape: &[usize]) -> Tensor {
        // SAFETY: the caller's promise.
        unsafe { self.memory.finish(shape) }
    }
}

// SAFETY: threads write rows that do not overlap.
unsafe impl Sync for RowWriter {}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Tensors of every type that is computed differently, with rows shorter and longer than the lanes, and transposed.
    pub(super) fn samples() -> Vec<(Tensor, f64)> {
        let mut all = Vec::new();
        for (dtype, precision) in [(DType::F64, 1e-13), (DType::F32, 3e-6), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            for shape in [&[3, 5][..], &[2, 3, 37], &[4, 200], &[1, 1], &[7]] {
                let count: usize = shape.iter().product();
                let values: Vec<f64> = (0..count).map(|i| ((i * i) as f64 * 0.37 + 1.0).sin() * 3.0 + 0.5).collect();
                let x = Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                all.push((x.clone(), precision));
                if shape.len() > 1 {
                    all.push((x.transpose(0, shape.len() - 1).unwrap(), precision));
                }
            }
        }
        all
    }

    /// Other numbers in the same shape and type.
    pub(super) fn others(x: &Tensor, factor: f64) -> Tensor {
        let values = rows(x).concat().into_iter().map(|x| (x * factor).cos()).collect::<Vec<_>>();
        Tensor::from_vec(values, x.dims(), &Device::Cpu).unwrap().to_dtype(x.dtype()).unwrap()
    }

    pub(super) fn rows(x: &Tensor) -> Vec<Vec<f64>> {
        let width = x.dims().last().copied().unwrap_or(1);
        let values: Vec<f64> = x.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
        values.chunks(width).map(<[f64]>::to_vec).collect()
    }

    pub(super) fn assert_close(got: &Tensor, expected: &[f64], like: &Tensor, precision: f64) {
        assert_eq!(got.dtype(), like.dtype());
        let got = rows(got).concat();
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            let limit = precision * expected.abs().max(1.0);
            assert!((got - expected).abs() <= limit, "{got} and not {expected} for {:?}", like.layout());
        }
    }
}
