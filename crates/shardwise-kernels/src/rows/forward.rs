//! Forward kernels over rows.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor};

use super::{
    NormKind, RowFloat, RowWriter, in_type_of, over_rows, per_element, rows_and_width, scratch_of, sum, write,
    zip_in_place,
};
use crate::error::Result;
use crate::simd::{self, Kernel};

/// Softmax over the last dimension. Returns a tensor of the shape and type of `x`.
pub fn softmax_rows(x: &Tensor) -> Result<Tensor> {
    in_type_of!(x, T => map_rows::<T>(x, &|row, out| simd::run(Softmax { row, out })))
}

/// Log-softmax over the last dimension. Returns a tensor of the shape and type of `x`.
pub fn log_softmax_rows(x: &Tensor) -> Result<Tensor> {
    in_type_of!(x, T => map_rows::<T>(x, &|row, out| simd::run(LogSoftmax { row, out })))
}

/// Writes a row, given that of the input.
type MapRow<'a, T> = &'a (dyn Fn(&[T], &mut [MaybeUninit<T>]) + Sync);

/// A new tensor of which `body` writes every row, given that of `x`.
fn map_rows<T: RowFloat>(x: &Tensor, body: MapRow<'_, T>) -> Result<Tensor> {
    let (count, width) = rows_and_width(x);
    let target = RowWriter::new(x.dtype(), count, width)?;
    over_rows::<T, 1>(&[x], 1, &|i, [row], scratch| {
        // SAFETY: the kernels write the whole row, and each row once.
        unsafe { target.write(i, scratch_of(scratch, width), |out| body(row, out)) };
    })?;
    // SAFETY: every row was written.
    Ok(unsafe { target.finish(x.dims()) })
}

/// `log(sum(exp(x)))` over the last dimension, whose size becomes 1.
pub fn logsumexp_rows(x: &Tensor) -> Result<Tensor> {
    let [sums] = log_sums(x, [x.dtype()], |shift, log| [shift + log])?;
    Ok(sums)
}

/// `log(sum(exp(x)))` over the last dimension, whose size becomes 1, in f64 and compressed ([`terms_of_compressed`]): those of parts of
/// a row combine to that of the row, [`ReduceOp::LogSumExp`](crate::ReduceOp::LogSumExp). For elements that f32 represents.
pub fn logsumexp_rows_compressed(x: &Tensor) -> Result<Tensor> {
    let [sums] = log_sums(x, [DType::F64], |shift, log| [compressed(shift) + log])?;
    Ok(sums)
}

/// From here on, neighbours in f32 are so far apart that the smaller one adds nothing to a sum of exponentials.
const FAR: f32 = (1 << 30) as f32;

/// The distance that compressed neighbours get, more than the logarithm of any number of elements.
const APART: f64 = 128.0;

/// A number of f32 on a scale on which neighbours beyond [`FAR`] are [`APART`], so that in f64 its distance to the logarithm of a
/// sum keeps digits: of a row of the lowest number of f32, which masks use, it would have none.
fn compressed(x: f64) -> f64 {
    if x.abs() < f64::from(FAR) || !x.is_finite() {
        return x;
    }
    let steps = (x.abs() as f32).to_bits() - FAR.to_bits();
    (f64::from(FAR) + APART * f64::from(steps)).copysign(x)
}

/// The two terms in f32 of a compressed logarithm of a sum of exponentials, as [`logsumexp_rows_in_terms`] returns them.
pub fn terms_of_compressed(log_sum: f64) -> [f32; 2] {
    if log_sum.abs() < f64::from(FAR) || !log_sum.is_finite() {
        let high = log_sum as f32;
        return [high, (log_sum - f64::from(high)) as f32];
    }
    let largest = (log_sum / APART).floor() * APART;
    let steps = (largest.abs() - f64::from(FAR)) / APART;
    [f32::from_bits(FAR.to_bits() + steps as u32).copysign(largest as f32), (log_sum - largest) as f32]
}

/// `log(sum(exp(x)))` over the last dimension, whose size becomes 1, as two terms in the type of `x`: the largest element, and the
/// logarithm of the rest. Differences from the sum keep their digits if the terms are added one after the other. Of an infinite sum
/// the second term is NaN, as the softmax is.
pub fn logsumexp_rows_in_terms(x: &Tensor) -> Result<[Tensor; 2]> {
    log_sums(x, [x.dtype(); 2], |shift, log| if log.is_infinite() { [log, f64::NAN] } else { [shift, log] })
}

/// Tensors of these types with one element per row, from the shift of a row and the logarithm of the sum of shifted exponentials.
fn log_sums<const K: usize>(
    x: &Tensor,
    types: [DType; K],
    body: impl Fn(f64, f64) -> [f64; K] + Sync,
) -> Result<[Tensor; K]> {
    let mut shape = x.dims().to_vec();
    shape.last_mut().into_iter().for_each(|last| *last = 1);
    let (_, width) = rows_and_width(x);
    let count = shape.iter().product();
    let targets = types.iter().map(|&dtype| RowWriter::new(dtype, count, 1)).collect::<Result<Vec<_>>>()?;
    let write = |i: usize, shift: f64, log: f64| {
        for (target, value) in targets.iter().zip(body(shift, log)) {
            // SAFETY: the row has one element, and each row is written once.
            unsafe {
                target.write(i, &mut [MaybeUninit::<f64>::uninit()], |out| {
                    out[0].write(value);
                });
            };
        }
    };
    if width == 0 {
        // The sum of no exponentials.
        (0..count).for_each(|i| write(i, 0.0, f64::NEG_INFINITY));
    }
    in_type_of!(x, T => {
        over_rows::<T, 1>(&[x], 1, &|i, [row], scratch| {
            let (shift, log) = simd::run(LogSumExp { row, scratch: scratch_of(scratch, width.max(1)) });
            write(i, shift, log);
        })?;
    });
    let mut targets = targets.into_iter();
    // SAFETY: every row was written.
    Ok(types.map(|_| unsafe { targets.next().expect("one per type").finish(&shape) }))
}

/// Layer norm over the last dimension: `(x - mean) / sqrt(var + eps) * weight + bias`, with the biased variance.
///
/// Weight and bias have one element per element of a row, and any type.
///
/// # Errors
/// If weight or bias has another number of elements.
pub fn layer_norm_rows(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    norm_rows(NormKind::Layer, x, weight, bias, eps)
}

/// RMS norm over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.
///
/// The weight has one element per element of a row, and any type.
///
/// # Errors
/// If the weight has another number of elements.
pub fn rms_norm_rows(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    norm_rows(NormKind::RootMeanSquare, x, weight, None, eps)
}

fn norm_rows(norm: NormKind, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    in_type_of!(x, T => {
        let (_, width) = rows_and_width(x);
        let weight = weight.map(|w| per_element::<T>(w, width)).transpose()?;
        let bias = bias.map(|b| per_element::<T>(b, width)).transpose()?;
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        map_rows::<T>(x, &|row, out| simd::run(NormForward { norm, row, weight, bias, eps, out }))
    })
}

/// Writes `exp(x - shift)` of a row and returns it with its sum. The shift avoids overflow.
#[inline(always)]
fn exponentials<'a, const FMA: bool, T: RowFloat>(
    row: &[T],
    shift: T,
    out: &'a mut [MaybeUninit<T>],
) -> (&'a mut [T], f64) {
    let out = write(out, [row], |[x]| (x - shift).exp::<FMA>());
    let total = sum(out, out, |e, _| e);
    (out, total)
}

struct Softmax<'a, T> {
    row: &'a [T],
    out: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for Softmax<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (out, total) = exponentials::<FMA, T>(self.row, T::max_of(self.row), self.out);
        // A product takes a quarter of the time of a division, for half a unit in the last place.
        let share = T::narrow(1.0 / total);
        out.iter_mut().for_each(|e| *e *= share);
    }
}

struct LogSoftmax<'a, T> {
    row: &'a [T],
    out: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for LogSoftmax<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let largest = T::max_of(self.row);
        let (out, total) = exponentials::<FMA, T>(self.row, largest, self.out);
        let total = T::narrow(total.ln());
        zip_in_place(out, self.row, |_, x| x - largest - total);
    }
}

struct LogSumExp<'a, T> {
    row: &'a [T],
    scratch: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for LogSumExp<'_, T> {
    /// The shift, and the logarithm of the sum of shifted exponentials.
    type Output = (f64, f64);

    #[inline(always)]
    fn run<const FMA: bool>(self) -> (f64, f64) {
        let largest = T::max_of(self.row);
        // An infinite shift would turn every element into NaN.
        let shift = if largest.wide().is_infinite() { T::narrow(0.0) } else { largest };
        (shift.wide(), exponentials::<FMA, T>(self.row, shift, self.scratch).1.ln())
    }
}

pub(super) struct NormForward<'a, T> {
    pub(super) norm: NormKind,
    pub(super) row: &'a [T],
    pub(super) weight: Option<&'a [T]>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) eps: f64,
    pub(super) out: &'a mut [MaybeUninit<T>],
}

impl<T: RowFloat> Kernel for NormForward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let stats = self.norm.stats(self.row, self.eps);
        match self.weight {
            Some(weight) => match self.bias {
                Some(bias) => {
                    write(self.out, [self.row, weight, bias], |[x, w, b]| stats.normalize(x) * w + b);
                }
                None => {
                    write(self.out, [self.row, weight], |[x, w]| stats.normalize(x) * w);
                }
            },
            None => {
                let out = write(self.out, [self.row], |[x]| stats.normalize(x));
                if let Some(bias) = self.bias {
                    zip_in_place(out, bias, |x, b| x + b);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_close, others, rows, samples};
    use super::*;
    use candle_core::Device;

    fn log_sum(row: &[f64]) -> f64 {
        row.iter().map(|x| x.exp()).sum::<f64>().ln()
    }

    fn each_row(x: &Tensor, f: impl Fn(&[f64], f64) -> Vec<f64>) -> Vec<f64> {
        rows(x).iter().flat_map(|row| f(row, log_sum(row))).collect()
    }

    #[test]
    fn softmax_and_logsumexp_equal_the_plain_formulas() {
        for (x, precision) in samples() {
            let softmax = each_row(&x, |row, sum| row.iter().map(|x| (x - sum).exp()).collect());
            assert_close(&softmax_rows(&x).unwrap(), &softmax, &x, precision);
            let log_softmax = each_row(&x, |row, sum| row.iter().map(|x| x - sum).collect());
            assert_close(&log_softmax_rows(&x).unwrap(), &log_softmax, &x, precision);
            let logsumexp = each_row(&x, |_, sum| vec![sum]);
            assert_close(&logsumexp_rows(&x).unwrap(), &logsumexp, &x, precision);
            let [shift, log] = logsumexp_rows_in_terms(&x).unwrap();
            assert_close(&(shift + log).unwrap(), &logsumexp, &x, precision);
        }
    }

    #[test]
    fn compressed_sums_are_those_of_rows_of_any_size() {
        for largest in [0.0, -1.5, 1e9, -1e9, f32::from_bits(FAR.to_bits() + 1), -FAR, 3e38, f32::MIN, f32::MAX, -2e20]
        {
            let lower = -f32::from_bits((-largest).to_bits() + 1);
            let row = [largest, if largest < 0.0 { lower } else { -1e3 - largest }, largest, largest];
            let sum = logsumexp_rows_compressed(&Tensor::new(&[row], &Device::Cpu).unwrap()).unwrap();
            let [high, low] = terms_of_compressed(rows(&sum)[0][0]);
            let expected = row.iter().map(|&x| (f64::from(x) - f64::from(largest)).exp()).sum::<f64>().ln();
            let found = (f64::from(high) - f64::from(largest)) + f64::from(low);
            assert!((found - expected).abs() < 3e-5, "{largest}: {high} + {low}, not {expected} more");
        }
        for nothing in [f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(f64::from(terms_of_compressed(nothing)[0]), nothing);
        }
    }

    #[test]
    fn norms_equal_the_plain_formulas() {
        for (x, precision) in samples() {
            let width = *x.dims().last().unwrap();
            let first = others(&x, 1.7).flatten_all().unwrap().narrow(0, 0, width).unwrap();
            let (weight, bias) = (first.affine(1.0, 1.5).unwrap(), first.affine(-2.0, 0.3).unwrap());
            for (w, b) in [(None, None), (Some(&weight), None), (Some(&weight), Some(&bias))] {
                let number = |t: Option<&Tensor>, i: usize, otherwise: f64| t.map_or(otherwise, |t| rows(t)[0][i]);
                let scaled = |row: &[f64], mean: f64, b: Option<&Tensor>| -> Vec<f64> {
                    let square = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
                    let normal = row.iter().map(|x| (x - mean) / (square + 1e-3).sqrt());
                    normal.enumerate().map(|(i, x)| x * number(w, i, 1.0) + number(b, i, 0.0)).collect()
                };
                let layer = each_row(&x, |row, _| scaled(row, row.iter().sum::<f64>() / row.len() as f64, b));
                assert_close(&layer_norm_rows(&x, w, b, 1e-3).unwrap(), &layer, &x, 4.0 * precision);
                let rms = each_row(&x, |row, _| scaled(row, 0.0, None));
                assert_close(&rms_norm_rows(&x, w, 1e-3).unwrap(), &rms, &x, 4.0 * precision);
            }
        }
    }

    #[test]
    fn infinities_and_empty_tensors_are_accepted() {
        let (low, high) = (f32::NEG_INFINITY, f32::INFINITY);
        let x = Tensor::new(&[[1e30f32, -1e30, 0.0], [low, low, 1.0], [low, low, low], [high, 0.0, 0.0]], &Device::Cpu);
        let x = x.unwrap();
        assert_eq!(rows(&softmax_rows(&x).unwrap())[..2], [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]);
        let sums = rows(&logsumexp_rows(&x).unwrap()).concat();
        assert_eq!(sums, [f64::from(1e30f32), 1.0, f64::NEG_INFINITY, f64::INFINITY]);
        for shape in [[0, 3], [3, 0]] {
            let none = Tensor::zeros(&shape, DType::F32, &Device::Cpu).unwrap();
            assert_eq!(softmax_rows(&none).unwrap().dims(), shape);
            assert_eq!(layer_norm_rows(&none, None, None, 1e-5).unwrap().dims(), shape);
        }
        let nothing = logsumexp_rows(&Tensor::zeros((3, 0), DType::F32, &Device::Cpu).unwrap()).unwrap();
        assert_eq!((nothing.dims(), rows(&nothing).concat()), (&[3, 1][..], vec![f64::NEG_INFINITY; 3]));
        let short = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let refused = layer_norm_rows(&x, Some(&short), None, 1e-5).unwrap_err().to_string();
        assert!(refused.contains("rows of 3 elements"), "{refused}");
    }
}
