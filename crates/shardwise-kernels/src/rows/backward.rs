//! Backward kernels over rows.

use std::array::from_fn;
use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use super::{
    CHAIN, LANES, NormKind, RowFloat, RowStats, RowWriter, in_type_of, over_rows, per_element, rows_and_width,
    scratch_of, sum, sums, write,
};
use crate::accumulate::{AddSlices, over_memory};
use crate::error::Result;
use crate::parallel::SharedPtr;
use crate::simd::{self, Kernel};

/// Gradient of softmax: `y * (g - sum(g * y))`, given its output `y` and the gradient `g` of the output, of one shape.
pub fn softmax_backward_rows(y: &Tensor, g: &Tensor) -> Result<Tensor> {
    in_type_of!(y, T => map_row_pairs::<T>(y, g, &|y, g, out| simd::run(SoftmaxBackward { y, g, out })))
}

/// Gradient of log-softmax: `g - exp(y) * sum(g)`, given its output `y` and the gradient `g` of the output, of one shape.
pub fn log_softmax_backward_rows(y: &Tensor, g: &Tensor) -> Result<Tensor> {
    in_type_of!(y, T => map_row_pairs::<T>(y, g, &|y, g, out| simd::run(LogSoftmaxBackward { y, g, out })))
}

/// Writes a row, given the rows of an output and of its gradient.
type PairKernel<'a, T> = &'a (dyn Fn(&[T], &[T], &mut [MaybeUninit<T>]) + Sync);

/// A new tensor like `y` of which `body` writes every row.
fn map_row_pairs<T: RowFloat>(y: &Tensor, g: &Tensor, body: PairKernel<'_, T>) -> Result<Tensor> {
    let (count, width) = rows_and_width(y);
    let target = RowWriter::new(y.dtype(), count, width)?;
    over_rows::<T, 2>(&[y, g], 1, &|i, [y, g], scratch| {
        // SAFETY: the kernels write the whole row, and each row once.
        unsafe { target.write(i, scratch_of(scratch, width), |out| body(y, g, out)) };
    })?;
    // SAFETY: every row was written.
    Ok(unsafe { target.finish(y.dims()) })
}

/// Gradients of layer norm with respect to input, weight and bias, given the input `x` and the gradient `g` of the output.
///
/// Those of weight and bias are sums over the rows, accumulated in f64, in the type of the weight (of `x` without one).
pub fn layer_norm_backward_rows(
    x: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    norm_backward(NormKind::Layer, x, weight, g, eps, None)
}

/// As [`layer_norm_backward_rows`], and adds the gradient of the input to `sum`, in place, instead of returning it.
///
/// `sum` is contiguous, of the shape and type of `x`, which is f32 or f64; no other tensor uses its memory.
///
/// # Panics
/// If `sum` is not so.
pub fn add_layer_norm_backward_rows(
    sum: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let (_, dweight, dbias) = norm_backward(NormKind::Layer, x, weight, g, eps, Some(sum))?;
    Ok((dweight, dbias))
}

/// Gradients of RMS norm with respect to input and, if there is one, weight, given the input `x` and the gradient `g` of the
/// output.
///
/// That of the weight is a sum over the rows, accumulated in f64, in the type of the weight.
pub fn rms_norm_backward_rows(
    x: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    eps: f64,
) -> Result<(Tensor, Option<Tensor>)> {
    let (dx, dweight, _) = norm_backward(NormKind::RootMeanSquare, x, weight, g, eps, None)?;
    Ok((dx, weight.map(|_| dweight)))
}

/// As [`rms_norm_backward_rows`], and adds the gradient of the input to `sum`, as [`add_layer_norm_backward_rows`] does.
///
/// # Panics
/// As `add_layer_norm_backward_rows`.
pub fn add_rms_norm_backward_rows(
    sum: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    eps: f64,
) -> Result<Option<Tensor>> {
    let (_, dweight, _) = norm_backward(NormKind::RootMeanSquare, x, weight, g, eps, Some(sum))?;
    Ok(weight.map(|_| dweight))
}

/// The gradients of input, weight and bias; that of the input is added to `sum`, if there is one, and `sum` returned.
fn norm_backward(
    norm: NormKind,
    x: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    eps: f64,
    sum: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Some(sum) = sum else { return norm_backward_to(norm, x, weight, g, eps, None) };
    assert!(sum.dims() == x.dims() && sum.dtype() == x.dtype(), "{sum:?} and {x:?}");
    let mut found = None;
    over_memory(sum, |first| {
        found = Some(norm_backward_to(norm, x, weight, g, eps, Some(SharedPtr::new(first)))?);
        Ok(())
    })?;
    let (_, dweight, dbias) = found.expect("computed above");
    Ok((sum.clone(), dweight, dbias))
}

/// As [`norm_backward`]; `sum` is the address of a sum of the shape and type of `x`, which nobody else uses.
fn norm_backward_to(
    norm: NormKind,
    x: &Tensor,
    weight: Option<&Tensor>,
    g: &Tensor,
    eps: f64,
    sum: Option<SharedPtr<u8>>,
) -> Result<(Tensor, Tensor, Tensor)> {
    in_type_of!(x, T => {
        // Sums in place are not rounded on the way.
        assert!(sum.is_none() || x.dtype() == T::DTYPE, "{:?}", x.dtype());
        let (count, width) = rows_and_width(x);
        let dtype = weight.map_or(x.dtype(), Tensor::dtype);
        let weight = weight.map(|w| per_element::<T>(w, width)).transpose()?;
        let target = RowWriter::new(x.dtype(), if sum.is_some() { 0 } else { count }, width)?;
        // Every block of rows has sums of its own, which are added in order: the bits do not depend on threads.
        let block = count.div_ceil(MAX_BLOCKS).max(MIN_BLOCK_ROWS);
        let blocks = count.div_ceil(block);
        let mut sums = vec![0.0; blocks * 2 * width];
        let first = SharedPtr::new(sums.as_mut_ptr());
        over_rows::<T, 2>(&[x, g], block, &|i, [x, g], scratch| {
            let (row_in_block, end) = (i % block, (i / block + 1) * block);
            let (converted, sums) = scratch_of(scratch, 3 * width).split_at_mut(width);
            if row_in_block == 0 {
                sums.fill(MaybeUninit::new(T::narrow(0.0)));
            }
            let weight = weight.as_deref();
            // SAFETY: one thread has all rows of a block, and so its sums, which the first row has set to zero. The kernel
            // writes the whole row.
            unsafe {
                let sums = sums.assume_init_mut();
                if let Some(sum) = sum {
                    simd::run(NormBackward { norm, x, weight, g, eps, sums, out: converted });
                    let to = std::slice::from_raw_parts_mut(sum.get().cast::<T>().add(i * width), width);
                    simd::run(AddSlices { to, from: converted.assume_init_ref() });
                } else {
                    target.write(i, converted, |out| {
                        simd::run(NormBackward { norm, x, weight, g, eps, sums, out });
                    });
                }
                if (row_in_block + 1) % CHAIN == 0 || i + 1 == end || i + 1 == count {
                    let totals = std::slice::from_raw_parts_mut(first.get().add(i / block * 2 * width), 2 * width);
                    simd::run(FlushSums { sums, totals });
                }
            }
        })?;
        let mut totals = vec![0.0; 2 * width];
        for block in sums.chunks_exact((2 * width).max(1)) {
            totals.iter_mut().zip(block).for_each(|(total, sum)| *total += sum);
        }
        let (dweight, dbias) = totals.split_at(width);
        let shape = if sum.is_some() { &[0][..] } else { x.dims() };
        // SAFETY: every row was written.
        Ok((unsafe { target.finish(shape) }, one_row(dweight, dtype)?, one_row(dbias, dtype)?))
    })
}

/// Blocks of rows that have sums of their own, at most: enough for many threads, and few enough that adding them takes no
/// time.
const MAX_BLOCKS: usize = 64;

/// Rows per block, at least.
const MIN_BLOCK_ROWS: usize = 16;

/// Builds a tensor of one dimension.
fn one_row(values: &[f64], dtype: DType) -> Result<Tensor> {
    let target = RowWriter::new(dtype, 1, values.len())?;
    let mut scratch = vec![MaybeUninit::uninit(); values.len()];
    // SAFETY: `write` writes the whole row, the only one.
    unsafe {
        target.write::<f64>(0, &mut scratch, |out| {
            write(out, [values], |[x]| x);
        });
        Ok(target.finish(&[values.len()]))
    }
}

struct SoftmaxBackward<'a, T> {
    y: &'a [T],
    g: &'a [T],
    out: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for SoftmaxBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let dot = T::narrow(sum(self.y, self.g, |y, g| y * g));
        write(self.out, [self.y, self.g], |[y, g]| y * (g - dot));
    }
}

struct LogSoftmaxBackward<'a, T> {
    y: &'a [T],
    g: &'a [T],
    out: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for LogSoftmaxBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let total = T::narrow(sum(self.g, self.g, |g, _| g));
        write(self.out, [self.y, self.g], |[y, g]| g - y.exp::<FMA>() * total);
    }
}

struct NormBackward<'a, T> {
    norm: NormKind,
    x: &'a [T],
    weight: Option<&'a [T]>,
    g: &'a [T],
    eps: f64,
    /// The sums of the gradients of weight and bias over the last few rows.
    sums: &'a mut [T],
    out: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for NormBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let NormBackward { norm, x, weight, g, eps, sums, out } = self;
        let stats = norm.stats(x, eps);
        match weight {
            Some(weight) => norm_gradient(norm, stats, [g, x, weight], sums, out, |[g, _, w]| g * w),
            None => norm_gradient(norm, stats, [g, x], sums, out, |[g, _]| g),
        }
    }
}

/// Writes the gradient of a row, and adds to the sums of the gradients of weight and bias. The rows are the gradient, the input, and
/// what else `scaled` takes for the gradient of the normalised row. That and the normalised row are cheaper to compute twice than to
/// store.
#[inline(always)]
fn norm_gradient<T: RowFloat, const N: usize>(
    norm: NormKind,
    stats: RowStats<T>,
    rows: [&[T]; N],
    weight_sums: &mut [T],
    out: &mut [MaybeUninit<T>],
    scaled: impl Fn([T; N]) -> T,
) {
    let [along, total] = sums(rows, |row| {
        let g = scaled(row);
        [g * stats.normalize(row[1]), g]
    });
    let count = rows[0].len() as f64;
    let along = T::narrow(along / count);
    let mean = match norm {
        NormKind::Layer => T::narrow(total / count),
        NormKind::RootMeanSquare => T::narrow(0.0),
    };
    // The gradient of an element, and what it adds to those of weight and bias.
    let at = |row: [T; N]| {
        let x = stats.normalize(row[1]);
        [stats.rstd * (scaled(row) - mean - x * along), row[0] * x, row[0]]
    };
    let (dweight, dbias) = weight_sums.split_at_mut(out.len());
    let parts: [(&[[T; LANES]], &[T]); N] = rows.map(<[T]>::as_chunks);
    let ((out, last_out), (dweight, last_dweight), (dbias, last_dbias)) =
        (out.as_chunks_mut::<LANES>(), dweight.as_chunks_mut::<LANES>(), dbias.as_chunks_mut::<LANES>());
    // Arrays, so that nothing has to be checked to be apart from anything else.
    for c in 0..out.len() {
        let rows: [[T; LANES]; N] = from_fn(|n| parts[n].0[c]);
        let (mut results, mut weights, mut biases) = (out[c], dweight[c], dbias[c]);
        for i in 0..LANES {
            let [result, weight, bias] = at(from_fn(|n| rows[n][i]));
            results[i].write(result);
            weights[i] += weight;
            biases[i] += bias;
        }
        (out[c], dweight[c], dbias[c]) = (results, weights, biases);
    }
    for i in 0..last_out.len() {
        let [result, weight, bias] = at(from_fn(|n| parts[n].1[i]));
        last_out[i].write(result);
        last_dweight[i] += weight;
        last_dbias[i] += bias;
    }
}

/// Adds sums of a few rows to those of a block, and starts them anew.
struct FlushSums<'a, T> {
    sums: &'a mut [T],
    totals: &'a mut [f64],
}

impl<T: RowFloat> Kernel for FlushSums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (total, sum) in self.totals.iter_mut().zip(self.sums) {
            *total += sum.wide();
            *sum = T::narrow(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, others, rows, samples};
    use super::*;

    #[test]
    fn softmax_gradients_equal_the_plain_formulas() {
        for (x, precision) in samples() {
            let (y, g) = (others(&x, 0.9), others(&x, 2.3));
            let pairs: Vec<(Vec<f64>, Vec<f64>)> = rows(&y).into_iter().zip(rows(&g)).collect();
            let softmax: Vec<f64> = pairs
                .iter()
                .flat_map(|(y, g)| {
                    let dot: f64 = y.iter().zip(g).map(|(y, g)| y * g).sum();
                    y.iter().zip(g).map(move |(y, g)| y * (g - dot)).collect::<Vec<_>>()
                })
                .collect();
            assert_close(&softmax_backward_rows(&y, &g).unwrap(), &softmax, &x, precision);
            let log_softmax: Vec<f64> = pairs
                .iter()
                .flat_map(|(y, g)| {
                    let total: f64 = g.iter().sum();
                    y.iter().zip(g).map(move |(y, g)| g - y.exp() * total).collect::<Vec<_>>()
                })
                .collect();
            assert_close(&log_softmax_backward_rows(&y, &g).unwrap(), &log_softmax, &x, precision);
        }
    }

    /// The sum of the normalised rows times `g`, which is differentiated numerically.
    fn value(norm: NormKind, x: &[Vec<f64>], w: &[f64], g: &[Vec<f64>]) -> f64 {
        let row = |(x, g): (&Vec<f64>, &Vec<f64>)| -> f64 {
            let n = x.len() as f64;
            let mean = if norm == NormKind::Layer { x.iter().sum::<f64>() / n } else { 0.0 };
            let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            x.iter().zip(g).zip(w).map(|((x, g), w)| (x - mean) / (square + 1e-2).sqrt() * w * g).sum()
        };
        x.iter().zip(g).map(row).sum()
    }

    #[test]
    fn norm_gradients_equal_finite_differences() {
        for (x, precision) in samples() {
            let g = others(&x, 2.3);
            let width = *x.dims().last().unwrap();
            let weight = others(&x, 1.7).flatten_all().unwrap().narrow(0, 0, width).unwrap();
            let (all, gradients) = (rows(&x), rows(&g));
            for norm in [NormKind::Layer, NormKind::RootMeanSquare] {
                for weight in [None, Some(&weight)] {
                    let w = weight.map_or(vec![1.0; width], |w| rows(w).concat());
                    let step = 1e-5;
                    let mut dx = Vec::new();
                    for i in 0..all.len() {
                        for j in 0..width {
                            let at = |by: f64| {
                                let mut row = all[i].clone();
                                row[j] += by;
                                value(norm, &[row], &w, &gradients[i..=i])
                            };
                            dx.push((at(step) - at(-step)) / (2.0 * step));
                        }
                    }
                    let dweight = (0..width).map(|j| {
                        let mut unit = vec![0.0; width];
                        unit[j] = 1.0;
                        value(norm, &all, &unit, &gradients)
                    });
                    let dbias: Vec<f64> = (0..width).map(|j| gradients.iter().map(|g| g[j]).sum()).collect();
                    let precision = (10.0 * precision).max(1e-6);
                    let (got, got_weight, got_bias) = match norm {
                        NormKind::Layer => layer_norm_backward_rows(&x, weight, &g, 1e-2).unwrap(),
                        NormKind::RootMeanSquare => {
                            let (dx, dweight) = rms_norm_backward_rows(&x, weight, &g, 1e-2).unwrap();
                            assert_eq!(dweight.is_some(), weight.is_some());
                            let Some(dweight) = dweight else { continue };
                            (dx, dweight, one_row(&dbias, x.dtype()).unwrap())
                        }
                    };
                    assert_close(&got, &dx, &x, precision);
                    if matches!(x.dtype(), DType::F32 | DType::F64) {
                        // The gradient in place of a sum: twice the gradient, from memory that holds it once.
                        let sum = got.copy().unwrap();
                        match norm {
                            NormKind::Layer => drop(add_layer_norm_backward_rows(&sum, &x, weight, &g, 1e-2).unwrap()),
                            NormKind::RootMeanSquare => {
                                drop(add_rms_norm_backward_rows(&sum, &x, weight, &g, 1e-2).unwrap());
                            }
                        }
                        assert_eq!(rows(&sum), rows(&(&got + &got).unwrap()));
                    }
                    assert_close(&got_weight, &dweight.collect::<Vec<_>>(), &x, precision);
                    assert_close(&got_bias, &dbias, &x, precision);
                }
            }
        }
    }
}
