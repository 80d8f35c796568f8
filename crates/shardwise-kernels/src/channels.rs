//! Statistics and normalization per channel of `[n, channels, ...]`, as batch normalization needs them: each function reads its
//! tensors once.
//!
//! Sums accumulate in f64, in an order that depends on sizes only; f64 is normalized in f64, and f32, f16 and bf16 in f32.

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Tensor};

use super::convolution::ConvElement;
use super::parallel::{SharedPtr, over_ranges};
use super::{Assembly, contiguous, simd, to_f64_vec, with_slice};
use crate::error::Result;
use crate::meta::TensorMeta;
use half::{bf16, f16};

/// Mean and variance of every channel, and what is added to the variance.
#[derive(Clone, Copy)]
pub struct ChannelStats<'a> {
    /// One number per channel.
    pub mean: &'a Tensor,
    /// One number per channel.
    pub variance: &'a Tensor,
    /// Added to the variance.
    pub eps: f64,
}

/// The sum of every channel, or of the squares of its distances to a mean.
///
/// # Panics
/// If the type is not floating point, or sizes do not fit.
pub fn channel_sums(x: &Tensor, mean: Option<&Tensor>) -> Result<Vec<f64>> {
    let squares = mean.is_some();
    let mean = mean.map_or(Ok(vec![0.0; x.dims()[1]]), to_f64_vec)?;
    let [sums, _] = sum_channels(&[x], &mean, move |[x, _]| [if squares { x * x } else { x }, 0.0])?;
    Ok(sums)
}

/// The sum of the gradient `g` over every channel, and of its products with the normalized `x`.
///
/// # Panics
/// If the type is not floating point, or sizes do not fit.
pub fn channel_gradient_sums(g: &Tensor, x: &Tensor, stats: ChannelStats<'_>) -> Result<[Vec<f64>; 2]> {
    let mean = to_f64_vec(stats.mean)?;
    let [sums, mut products] = sum_channels(&[x, g], &mean, |[x, g]| [g, g * x])?;
    products.iter_mut().zip(rstd(stats)?).for_each(|(product, rstd)| *product *= rstd);
    Ok([sums, products])
}

/// `(x - mean) / sqrt(variance + eps) * weight + bias`, per channel.
///
/// # Panics
/// If the type is not floating point, or sizes do not fit.
pub fn channel_normalize(
    x: &Tensor,
    stats: ChannelStats<'_>,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (mean, scale) = (to_f64_vec(stats.mean)?, scale(stats, weight)?);
    let bias = bias.map_or(Ok(vec![0.0; mean.len()]), to_f64_vec)?;
    let channels = mean.iter().zip(scale).zip(bias);
    map_channels(&[x], &channels.map(|((&mean, scale), bias)| [mean, scale, 0.0, bias]).collect::<Vec<_>>())
}

/// The gradient of [`channel_normalize`] with respect to `x`, where mean and variance are those of `count` elements of every
/// channel of `x`: from `g` and the sums of [`channel_gradient_sums`].
///
/// # Panics
/// If the type is not floating point, or sizes do not fit.
pub fn channel_input_gradient(
    g: &Tensor,
    x: &Tensor,
    stats: ChannelStats<'_>,
    sums: [&Tensor; 2],
    weight: Option<&Tensor>,
    count: f64,
) -> Result<Tensor> {
    let (mean, scale, rstd) = (to_f64_vec(stats.mean)?, scale(stats, weight)?, rstd(stats)?);
    let [sums, products] = [to_f64_vec(sums[0])?, to_f64_vec(sums[1])?];
    let numbers = |c: usize| {
        let each = scale[c] / count;
        [mean[c], -each * rstd[c] * products[c], scale[c], -each * sums[c]]
    };
    map_channels(&[x, g], &(0..mean.len()).map(numbers).collect::<Vec<_>>())
}

/// One over the standard deviation of every channel.
fn rstd(stats: ChannelStats<'_>) -> Result<Vec<f64>> {
    Ok(to_f64_vec(stats.variance)?.into_iter().map(|variance| 1.0 / (variance + stats.eps).sqrt()).collect())
}

/// One over the standard deviation of every channel, times its weight.
fn scale(stats: ChannelStats<'_>, weight: Option<&Tensor>) -> Result<Vec<f64>> {
    let mut scale = rstd(stats)?;
    if let Some(weight) = weight {
        scale.iter_mut().zip(to_f64_vec(weight)?).for_each(|(scale, weight)| *scale *= weight);
    }
    Ok(scale)
}

/// Floating-point elements, and the type in which they are normalized.
trait ChannelElement: ConvElement<Number: ChannelNumber> {}
impl<S: ConvElement<Number: ChannelNumber>> ChannelElement for S {}

trait ChannelNumber: Copy + Send + Sync {
    fn wide(self) -> f64;
    fn from_wide(x: f64) -> Self;
    /// `self * a + b`.
    fn times_plus<const FMA: bool>(self, a: Self, b: Self) -> Self;
    fn minus(self, other: Self) -> Self;
}

macro_rules! channel_numbers {
    ($($T:ty),*) => {$(
        impl ChannelNumber for $T {
            #[inline(always)]
            fn wide(self) -> f64 {
                self as f64
            }

            #[inline(always)]
            fn from_wide(x: f64) -> Self {
                x as $T
            }

            #[inline(always)]
            fn times_plus<const FMA: bool>(self, a: Self, b: Self) -> Self {
                if FMA { self.mul_add(a, b) } else { self * a + b }
            }

            #[inline(always)]
            fn minus(self, other: Self) -> Self {
                self - other
            }
        }
    )*};
}
channel_numbers!(f32, f64);

/// Runs `$body` with `$T` as the floating-point type `$dtype`.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $T = f64;
                $body
            }
            DType::F32 => {
                type $T = f32;
                $body
            }
            DType::F16 => {
                type $T = f16;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            other => panic!("statistics of channels of type {other:?}"),
        }
    };
}

/// Images, channels, and elements of one channel of an image.
fn sizes(x: &Tensor) -> [usize; 3] {
    [x.dims()[0], x.dims()[1], x.dims()[2..].iter().product()]
}

/// Channels of fewer elements than this are added side by side, not one after the other.
const LANES: usize = 16;

/// Two sums over every channel of a function of elements, the first of them minus the mean. One tensor stands for both.
fn sum_channels(tensors: &[&Tensor], mean: &[f64], f: impl Fn([f64; 2]) -> [f64; 2] + Sync) -> Result<[Vec<f64>; 2]> {
    let [images, channels, size] = sizes(tensors[0]);
    let (first, last) = (contiguous(tensors[0])?, contiguous(tensors[tensors.len() - 1])?);
    let mut sums = [vec![0.0; channels], vec![0.0; channels]];
    let out = sums.each_mut().map(|sums| SharedPtr::new(sums.as_mut_ptr()));
    with_float!(first.dtype(), T => with_slice::<T, _>(&first, |a| with_slice::<T, _>(&last, |b| {
        over_ranges(channels, images * size * tensors.len(), LANES.min(channels.div_ceil(8)), |range| {
            // SAFETY: ranges of channels do not overlap.
            let sums = out.map(|out| unsafe { std::slice::from_raw_parts_mut(out.get().add(range.start), range.len()) });
            simd::run(ChannelSums { a, b, sizes: [images, channels, size], range, mean, f: &f, sums });
        });
    }))??);
    Ok(sums)
}

struct ChannelSums<'a, S, F> {
    a: &'a [S],
    b: &'a [S],
    sizes: [usize; 3],
    range: Range<usize>,
    mean: &'a [f64],
    f: &'a F,
    sums: [&'a mut [f64]; 2],
}

impl<S: ChannelElement, F: Fn([f64; 2]) -> [f64; 2]> simd::Kernel for ChannelSums<'_, S, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let [images, channels, size] = self.sizes;
        let term = |a: S, b: S, mean: f64| (self.f)([a.widen().wide() - mean, b.widen().wide()]);
        let [first, second] = self.sums;
        if size < LANES {
            for image in 0..images {
                for k in 0..size {
                    let at = (image * channels + self.range.start) * size + k;
                    for c in 0..self.range.len() {
                        let [p, q] =
                            term(self.a[at + c * size], self.b[at + c * size], self.mean[self.range.start + c]);
                        first[c] += p;
                        second[c] += q;
                    }
                }
            }
            return;
        }
        for (i, channel) in self.range.enumerate() {
            let mean = self.mean[channel];
            let mut lanes = [[0.0; LANES]; 2];
            for image in 0..images {
                let at = (image * channels + channel) * size;
                let (a, a_rest) = self.a[at..at + size].as_chunks::<LANES>();
                let (b, b_rest) = self.b[at..at + size].as_chunks::<LANES>();
                for (a, b) in a.iter().zip(b) {
                    for l in 0..LANES {
                        let [p, q] = term(a[l], b[l], mean);
                        lanes[0][l] += p;
                        lanes[1][l] += q;
                    }
                }
                for (l, (&a, &b)) in a_rest.iter().zip(b_rest).enumerate() {
                    let [p, q] = term(a, b, mean);
                    lanes[0][l] += p;
                    lanes[1][l] += q;
                }
            }
            first[i] = lanes[0].iter().sum();
            second[i] = lanes[1].iter().sum();
        }
    }
}

/// Per element `(a - m) * s + b * t + d`, with numbers `[m, s, t, d]` of its channel. One tensor stands for both, with `t` zero.
fn map_channels(tensors: &[&Tensor], numbers: &[[f64; 4]]) -> Result<Tensor> {
    let sizes = sizes(tensors[0]);
    let dtype = tensors[0].dtype();
    let (first, last) = (contiguous(tensors[0])?, contiguous(tensors[tensors.len() - 1])?);
    let output = Assembly::new(TensorMeta::new(first.dims(), dtype))?;
    let two = tensors.len() > 1;
    with_float!(dtype, T => with_slice::<T, _>(&first, |a| with_slice::<T, _>(&last, |b| {
        type Number = <T as ConvElement>::Number;
        let numbers: [Vec<Number>; 4] = std::array::from_fn(|i| numbers.iter().map(|n| Number::from_wide(n[i])).collect());
        // SAFETY: the output has this type and as many elements, and nobody else writes to it.
        let out = SharedPtr::new(unsafe { output.range::<MaybeUninit<T>>(0) });
        // Channels of one element are computed side by side: an item is then an image.
        let per_item = if sizes[2] == 1 { sizes[1] } else { sizes[2] };
        over_ranges(a.len() / per_item.max(1), per_item * 2, 1, |range| {
            let all = range.start * per_item..range.end * per_item;
            // SAFETY: ranges of items do not overlap.
            let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(all.start), all.len()) };
            let (a, b) = (&a[all.clone()], &b[all]);
            simd::run(MapChannels { a, b, two, sizes, first: range.start, per_item, numbers: &numbers, out });
        });
    }))??);
    // SAFETY: the items together are all elements.
    Ok(unsafe { output.finish() })
}

struct MapChannels<'a, S: ConvElement> {
    a: &'a [S],
    b: &'a [S],
    two: bool,
    sizes: [usize; 3],
    /// The first item, and the elements of one.
    first: usize,
    per_item: usize,
    numbers: &'a [Vec<S::Number>; 4],
    out: &'a mut [MaybeUninit<S>],
}

impl<S: ChannelElement> simd::Kernel for MapChannels<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let [m, s, t, d] = self.numbers;
        let one = |a: S, m: S::Number, s: S::Number, d: S::Number| a.widen().minus(m).times_plus::<FMA>(s, d);
        let items = self.a.chunks_exact(self.per_item).zip(self.b.chunks_exact(self.per_item));
        for (i, ((a, b), out)) in items.zip(self.out.chunks_exact_mut(self.per_item)).enumerate() {
            match (self.sizes[2] == 1, self.two) {
                (true, false) => {
                    for c in 0..a.len() {
                        out[c].write(S::narrow(one(a[c], m[c], s[c], d[c])));
                    }
                }
                (true, true) => {
                    for c in 0..a.len() {
                        let added = b[c].widen().times_plus::<FMA>(t[c], d[c]);
                        out[c].write(S::narrow(one(a[c], m[c], s[c], added)));
                    }
                }
                (false, false) => {
                    let c = (self.first + i) % self.sizes[1];
                    let (m, s, d) = (m[c], s[c], d[c]);
                    out.iter_mut().zip(a).for_each(|(out, a)| {
                        out.write(S::narrow(one(*a, m, s, d)));
                    });
                }
                (false, true) => {
                    let c = (self.first + i) % self.sizes[1];
                    let (m, s, t, d) = (m[c], s[c], t[c], d[c]);
                    out.iter_mut().zip(a).zip(b).for_each(|((out, a), b)| {
                        out.write(S::narrow(one(*a, m, s, b.widen().times_plus::<FMA>(t, d))));
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Compares with sums over a list of all elements in f64.
    #[test]
    fn statistics_and_normalization_equal_formulas_per_element() {
        for shape in [vec![3, 2, 5, 7], vec![9, 20], vec![2, 3, 4], vec![1, 1, 40]] {
            for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
                let count: usize = shape.iter().product();
                let draw = |step: usize| {
                    let values: Vec<f64> = (0..count).map(|i| ((i * step) % 23) as f64 / 8.0 - 1.0).collect();
                    Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
                };
                let (x, g) = (draw(7), draw(11));
                let (xs, gs) = (to_f64_vec(&x).unwrap(), to_f64_vec(&g).unwrap());
                let (channels, size) = (shape[1], shape[2..].iter().product::<usize>());
                let of = |i: usize| i / size % channels;
                let n = (count / channels) as f64;
                let per_channel = |f: &dyn Fn(usize) -> f64| {
                    let mut sums = vec![0.0; channels];
                    (0..count).for_each(|i| sums[of(i)] += f(i));
                    sums
                };
                let close = |found: &[f64], expected: &[f64], what: &str| {
                    for (f, e) in found.iter().zip(expected) {
                        assert!(
                            (f - e).abs() <= bound * (1.0 + e.abs()),
                            "{what} of {shape:?} in {dtype:?}: {f} for {e}"
                        );
                    }
                    assert_eq!(found.len(), expected.len());
                };
                let vector = |v: Vec<f64>| Tensor::from_vec(v, channels, &Device::Cpu).unwrap();
                let sums = per_channel(&|i| xs[i]);
                close(&channel_sums(&x, None).unwrap(), &sums, "sums");
                let mean: Vec<f64> = sums.iter().map(|s| s / n).collect();
                let squares = per_channel(&|i| (xs[i] - mean[of(i)]).powi(2));
                let m = vector(mean.clone());
                close(&channel_sums(&x, Some(&m)).unwrap(), &squares, "squares");
                let variance: Vec<f64> = squares.iter().map(|s| s / n).collect();
                let (v, eps) = (vector(variance.clone()), 1e-3);
                let stats = ChannelStats { mean: &m, variance: &v, eps };
                let normal: Vec<f64> =
                    (0..count).map(|i| (xs[i] - mean[of(i)]) / (variance[of(i)] + eps).sqrt()).collect();
                let weights: Vec<f64> = (0..channels).map(|c| 0.5 + c as f64 / 16.0).collect();
                let (w, b) = (vector(weights.clone()), vector(weights.iter().map(|w| w - 2.0).collect()));
                let affine: Vec<f64> = (0..count).map(|i| normal[i] * weights[of(i)] + weights[of(i)] - 2.0).collect();
                let found = to_f64_vec(&channel_normalize(&x, stats, Some(&w), Some(&b)).unwrap()).unwrap();
                close(&found, &affine, "normalized");
                let [sum_g, sum_gx] = channel_gradient_sums(&g, &x, stats).unwrap();
                let (expected_g, expected_gx) = (per_channel(&|i| gs[i]), per_channel(&|i| gs[i] * normal[i]));
                close(&sum_g, &expected_g, "sums of the gradient");
                close(&sum_gx, &expected_gx, "products with the gradient");
                let gradient: Vec<f64> = (0..count)
                    .map(|i| {
                        let c = of(i);
                        let scale = weights[c] / (variance[c] + eps).sqrt();
                        scale * (gs[i] - expected_g[c] / n - normal[i] * expected_gx[c] / n)
                    })
                    .collect();
                let sums = [&vector(sum_g), &vector(sum_gx)];
                let found = channel_input_gradient(&g, &x, stats, sums, Some(&w), n).unwrap();
                close(&to_f64_vec(&found).unwrap(), &gradient, "gradient");
            }
        }
    }
}
