//! Functions of the rows of a tensor, that is along its last dimension: each row is read once from memory and worked on
//! while it is in the cache. f16 and bf16 are computed in f32; means and sums are taken in f64.

mod backward;
mod forward;

pub use backward::{
    layer_norm_backward_rows, log_softmax_backward_rows, rms_norm_backward_rows, softmax_backward_rows,
};
pub use forward::{layer_norm_rows, log_softmax_rows, logsumexp_rows, rms_norm_rows, softmax_rows};

use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::{Add, DivAssign, Mul, Sub};

use candle_core::{DType, Tensor};

use super::convert::{Block, Compute};
use super::fold::{LANES, Max, Step, Sum, continued, joined};
use super::fresh::Fresh;
use super::map::each;
use super::{dense, first_element, math};
use crate::error::{ErrorKind, Result};

/// Real numbers as rows are computed in them.
trait Real: Compute + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + DivAssign {
    fn wide(self) -> f64;
    fn narrow(x: f64) -> Self;
    /// e to the power of x; `FMA` as in [`math`].
    fn exp<const FMA: bool>(self) -> Self;
    /// The largest; not-a-number wins.
    fn largest(row: &[Self]) -> Self;
}

macro_rules! reals {
    ($($T:ident: |$x:ident| $exp:expr;)*) => {$(
        impl Real for $T {
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
            fn largest(row: &[Self]) -> Self {
                joined::<$T, Max>(continued::<$T, Max>([<Max as Step<$T>>::NEUTRAL; LANES], row))
            }
        }
    )*};
}
reals! {
    f32: |x| math::exp::<FMA>(x);
    f64: |x| x.exp();
}

/// The sum of a function of two rows.
#[inline(always)]
fn sum<T: Real>(a: &[T], b: &[T], f: impl Fn(f64, f64) -> f64) -> f64 {
    let mut lanes = [<Sum as Step<f64>>::NEUTRAL; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += f(a[i].wide(), b[i].wide());
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += f(a.wide(), b.wide());
    }
    joined::<f64, Sum>(lanes)
}

/// Writes a function of rows to memory that may be uninitialised, and gives it as initialised.
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

/// Changes a row in place with the elements of another one.
#[inline(always)]
fn change<T: Copy>(row: &mut [T], by: &[T], f: impl Fn(T, T) -> T) {
    row.iter_mut().zip(by).for_each(|(x, &y)| *x = f(*x, y));
}

/// What a row is divided by: the centre that is subtracted, and one over the scale.
#[derive(Clone, Copy)]
struct Normal {
    centre: f64,
    inverse: f64,
}

impl Normal {
    /// The mean and the standard deviation of a row.
    #[inline(always)]
    fn layer<T: Real>(row: &[T], eps: f64) -> Self {
        let centre = sum(row, row, |x, _| x) / row.len() as f64;
        let square = sum(row, row, |x, _| (x - centre) * (x - centre));
        Normal { centre, inverse: 1.0 / (square / row.len() as f64 + eps).sqrt() }
    }

    /// No centre, and the root of the mean square of a row.
    #[inline(always)]
    fn root_mean_square<T: Real>(row: &[T], eps: f64) -> Self {
        let square = sum(row, row, |x, _| x * x);
        Normal { centre: 0.0, inverse: 1.0 / (square / row.len() as f64 + eps).sqrt() }
    }

    #[inline(always)]
    fn of<T: Real>(self, x: T) -> T {
        T::narrow((x.wide() - self.centre) * self.inverse)
    }
}

/// How a row is normalised.
#[derive(Clone, Copy, PartialEq)]
enum Norm {
    Layer,
    RootMeanSquare,
}

impl Norm {
    #[inline(always)]
    fn normal<T: Real>(self, row: &[T], eps: f64) -> Normal {
        match self {
            Norm::Layer => Normal::layer(row, eps),
            Norm::RootMeanSquare => Normal::root_mean_square(row, eps),
        }
    }
}

/// How many rows a tensor has, and how long they are.
fn extent(x: &Tensor) -> (usize, usize) {
    let width = x.dims().last().copied().unwrap_or(1);
    (x.elem_count().checked_div(width).unwrap_or(0), width)
}

/// Runs `$body` with `$T` standing for the type in which rows of this tensor are computed.
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

/// The elements of a weight or a bias, one for every element of a row.
fn per_element<T: Compute>(parameter: &Tensor, width: usize) -> Result<Vec<T>> {
    if parameter.elem_count() != width {
        let found = format!("shape {:?} beside rows of {width} elements", parameter.dims());
        return Err(ErrorKind::shape(parameter.dims()).error(
            "operands",
            found,
            "as many elements as a row has",
            "reshape the tensors",
        ));
    }
    let mut values = Vec::with_capacity(width);
    over_rows(&[parameter], &mut |[row]: [&[T]; 1]| values.extend_from_slice(row))?;
    Ok(values)
}

/// Gives `body` the rows of tensors of one shape, one after the other.
fn over_rows<T: Compute, const N: usize>(tensors: &[&Tensor; N], body: &mut dyn FnMut([&[T]; N])) -> Result<()> {
    if let Some(other) = tensors.iter().find(|t| t.dims() != tensors[0].dims()) {
        let found = format!("rows of shapes {:?} and {:?}", tensors[0].dims(), other.dims());
        return Err(ErrorKind::shape(other.dims()).error(
            "operands",
            found,
            "tensors of one shape",
            "reshape or expand the tensors",
        ));
    }
    let (count, width) = extent(tensors[0]);
    if count == 0 {
        return Ok(());
    }
    let mut dense_tensors = tensors.map(Tensor::clone);
    for tensor in &mut dense_tensors {
        *tensor = dense(tensor)?;
    }
    let guards: [_; N] = from_fn(|k| dense_tensors[k].storage_and_layout());
    let sources: [_; N] = from_fn(|k| first_element(&guards[k].0, guards[k].1));
    let mut buffers: [Vec<T>; N] = from_fn(|_| Vec::new());
    for row in 0..count {
        let mut rows = [&[][..]; N];
        for (((first, dtype), buffer), values) in sources.iter().zip(&mut buffers).zip(&mut rows) {
            // SAFETY: the row is inside the tensor, which is dense and kept by its guard. The buffer has room for a row,
            // which is written before it is read.
            *values = unsafe {
                let first = first.add(row * width * dtype.size_in_bytes());
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
        body(rows);
    }
    Ok(())
}

/// Rows of one length to be written, from the first to the last.
struct Target<T> {
    fresh: Fresh,
    dtype: DType,
    width: usize,
    /// Elements written so far.
    written: usize,
    /// A row before it is converted to the type of the tensor.
    buffer: Vec<T>,
}

impl<T: Compute> Target<T> {
    fn new(dtype: DType, rows: usize, width: usize) -> Result<Self> {
        Ok(Target { fresh: Fresh::new(dtype, rows * width)?, dtype, width, written: 0, buffer: Vec::new() })
    }

    /// Lets `body` write the next row.
    ///
    /// # Safety
    /// `body` writes every element that it gets.
    unsafe fn write(&mut self, body: impl FnOnce(&mut [MaybeUninit<T>])) {
        let begin = self.written;
        self.written += self.width;
        assert!(self.written <= self.fresh.count());
        if let Some(elements) = self.fresh.elements::<T>() {
            return body(&mut elements[begin..begin + self.width]);
        }
        self.buffer.reserve(self.width);
        body(&mut self.buffer.spare_capacity_mut()[..self.width]);
        // SAFETY: the buffer was written just now, and there is room for the row.
        unsafe {
            let row = std::slice::from_raw_parts(self.buffer.as_ptr(), self.width);
            T::store(self.dtype, row, self.fresh.first().add(begin * self.dtype.size_in_bytes()));
        }
    }

    /// The tensor of all rows.
    fn finish(self, shape: &[usize]) -> Tensor {
        assert_eq!(self.written, self.fresh.count());
        // SAFETY: every element was written.
        unsafe { self.fresh.finish(shape) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Tensors of every type that is computed differently, with rows shorter and longer than lanes, and turned.
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
