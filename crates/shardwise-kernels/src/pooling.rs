//! Maxima and means over sliding windows of `[n, channels, ...]`, and their gradients, without a tensor of all windows.
//!
//! Planes of one image and channel are independent. A window has a maximum as in PyTorch: the first of equal elements, and NaN if
//! there is one. Means count the padding as zeros. f16 and bf16 are compared and added in f32, integers in i64.

use std::ops::Range;

use candle_core::Tensor;

use super::convolution::{ConvElement, ConvNumber, WindowAxis};
use super::parallel::{SharedPtr, over_ranges};
use super::{Assembly, contiguous, simd, with_slice, with_type};
use crate::error::Result;
use crate::meta::TensorMeta;

/// A function of windows: depth, height and width (missing dimensions are [`WindowAxis::UNIT`]).
#[derive(Debug, Clone)]
pub enum Pooling {
    /// The maximum of every window of `[x]`.
    Max,
    /// The element of `u` at the position of the maximum of every window of `x`, from `[u, x]`.
    Pick,
    /// The gradient of [`Max`](Self::Max), from `[g, x]`: what `g` has for a window goes to the position of its maximum.
    /// Returns these positions of the input, per dimension.
    MaxBackward([Range<usize>; 3]),
    /// The mean of every window of `[x]`.
    Mean,
    /// The gradient of [`Mean`](Self::Mean), from `[g]`.
    MeanBackward,
}

/// Applies a function of windows to contiguous or strided tensors of one type; the result has shape `shape`.
///
/// Large tensors use the rayon pool of the calling thread. Memory beyond the result is one plane per thread.
///
/// # Panics
/// If sizes do not fit the windows.
pub fn pool(pooling: &Pooling, inputs: &[&Tensor], axes: &[WindowAxis; 3], shape: &[usize]) -> Result<Tensor> {
    let dtype = inputs[0].dtype();
    let output = Assembly::new(TensorMeta { shape: shape.to_vec(), dtype })?;
    let (first, second) = (contiguous(inputs[0])?, contiguous(inputs[inputs.len() - 1])?);
    let size: usize = shape[2..].iter().product();
    let planes: usize = shape[..2].iter().product();
    let volume = |x: &Tensor| x.dims()[2..].iter().product::<usize>();
    let window: usize = axes.iter().map(|a| a.kernel).product();
    let windows: usize = axes.iter().map(|a| a.output).product();
    let mut axes = *axes;
    for axis in &mut axes {
        // The distance of a single window to the next may not be addressable.
        axis.stride = if axis.output <= 1 { 1 } else { axis.stride };
    }
    let work = Planes { pooling, axes, window };
    with_type!(dtype, T => with_slice::<T, _>(&first, |a| with_slice::<T, _>(&second, |b| {
        // SAFETY: the output has this shape and type, and nobody else writes to it.
        let out = SharedPtr::new(unsafe { output.range::<T>(0) });
        over_ranges(planes, windows * window + size, 1, |range| {
            let mut numbers = vec![<T as ConvElement>::Number::ZERO; size];
            for plane in range {
                let (a, b) = (&a[plane * volume(&first)..][..volume(&first)], &b[plane * volume(&second)..][..volume(&second)]);
                // SAFETY: planes are inside of the result and do not overlap.
                let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(plane * size).cast::<std::mem::MaybeUninit<T>>(), size) };
                simd::run(Plane { work: &work, a, b, numbers: &mut numbers, out });
            }
        });
    }))??, otherwise unreachable!("`Assembly` checks it"));
    // SAFETY: the planes together are all elements.
    Ok(unsafe { output.finish() })
}

struct Planes<'a> {
    pooling: &'a Pooling,
    axes: [WindowAxis; 3],
    /// Elements of a window.
    window: usize,
}

/// One plane of the inputs and of the result.
struct Plane<'a, S: ConvElement> {
    work: &'a Planes<'a>,
    a: &'a [S],
    b: &'a [S],
    numbers: &'a mut [S::Number],
    out: &'a mut [std::mem::MaybeUninit<S>],
}

impl<S: ConvElement<Number: PoolNumber>> simd::Kernel for Plane<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Plane { work: Planes { pooling, axes, window }, a, b, numbers, out } = self;
        match pooling {
            Pooling::Max => {
                numbers.fill(S::Number::LOWEST);
                gather_rows(a, axes, numbers, |largest, x| if replaces(x, largest) { x } else { largest });
            }
            Pooling::Pick => for_each_maximum(b, axes, |window, _, at| numbers[window] = a[at].widen()),
            Pooling::MaxBackward(kept) => {
                numbers.fill(S::Number::ZERO);
                scatter_maxima(a, b, axes, kept, numbers);
            }
            Pooling::Mean => {
                numbers.fill(S::Number::ZERO);
                gather_rows(a, axes, numbers, |sum, x| sum.plus(x));
                numbers.iter_mut().for_each(|sum| *sum = sum.over(*window));
            }
            Pooling::MeanBackward => {
                numbers.fill(S::Number::ZERO);
                scatter_rows(a, axes, numbers);
                numbers.iter_mut().for_each(|sum| *sum = sum.over(*window));
            }
        }
        out.iter_mut().zip(numbers).for_each(|(out, number)| {
            out.write(S::narrow(*number));
        });
    }
}

/// Numbers that are compared and divided.
trait PoolNumber: ConvNumber + PartialOrd {
    const LOWEST: Self;

    /// This number over the number of elements of a window.
    fn over(self, count: usize) -> Self;
}

macro_rules! pool_numbers {
    ($($T:ty: $lowest:expr;)*) => {$(
        impl PoolNumber for $T {
            const LOWEST: Self = $lowest;

            #[inline(always)]
            fn over(self, count: usize) -> Self {
                self / count as $T
            }
        }
    )*};
}
pool_numbers! {
    f32: f32::NEG_INFINITY;
    f64: f64::NEG_INFINITY;
    i64: i64::MIN;
}

/// Whether `x` replaces the largest element so far: it is larger, or NaN.
#[inline(always)]
#[expect(clippy::eq_op, reason = "NaN is not equal to itself")]
fn replaces<T: PoolNumber>(x: T, largest: T) -> bool {
    x > largest || x != x
}

/// Calls `body` with every row of windows and every row of elements that they read: `(windows, element, k)` as index of the
/// first window, index of the first element of the line, and element of the window along the width.
#[inline(always)]
fn for_each_row(axes: &[WindowAxis; 3], mut body: impl FnMut(usize, usize)) {
    let [depth, height, width] = axes;
    for z in 0..depth.output {
        for y in 0..height.output {
            for kz in 0..depth.kernel {
                for ky in 0..height.kernel {
                    let (z_at, y_at) = (depth.index(z, kz), height.index(y, ky));
                    let inside = |at: isize, size: usize| at >= 0 && (at as usize) < size;
                    if inside(z_at, depth.input) && inside(y_at, height.input) {
                        let line = (z_at as usize * height.input + y_at as usize) * width.input;
                        body((z * height.output + y) * width.output, line);
                    }
                }
            }
        }
    }
}

/// Combines every window with its elements, in the order of the window.
#[inline(always)]
fn gather_rows<S: ConvElement>(
    x: &[S],
    axes: &[WindowAxis; 3],
    out: &mut [S::Number],
    combine: impl Fn(S::Number, S::Number) -> S::Number,
) {
    let width = &axes[2];
    for_each_row(axes, |window, line| {
        let (out, line) = (&mut out[window..window + width.output], &x[line..line + width.input]);
        for k in 0..width.kernel {
            let inside = width.inside(k);
            if inside.is_empty() {
                continue;
            }
            let out = &mut out[inside.clone()];
            let line = &line[width.index(inside.start, k) as usize..];
            // Constant strides become vector instructions.
            match width.stride {
                1 => combine_line::<S, 1>(out, line, &combine),
                2 => combine_line::<S, 2>(out, line, &combine),
                stride => {
                    let line = line.iter().step_by(stride);
                    out.iter_mut().zip(line).for_each(|(out, x)| *out = combine(*out, x.widen()));
                }
            }
        }
    });
}

#[inline(always)]
fn combine_line<S: ConvElement, const STRIDE: usize>(
    out: &mut [S::Number],
    line: &[S],
    combine: &impl Fn(S::Number, S::Number) -> S::Number,
) {
    let line = &line[..(out.len() - 1) * STRIDE + 1];
    for i in 0..out.len() {
        // SAFETY: `i` is less than the number of windows, whose elements are in the line.
        let x = unsafe { line.get_unchecked(i * STRIDE) };
        out[i] = combine(out[i], x.widen());
    }
}

/// Adds what every window has to its elements.
#[inline(always)]
fn scatter_rows<S: ConvElement>(g: &[S], axes: &[WindowAxis; 3], out: &mut [S::Number]) {
    let width = &axes[2];
    for_each_row(axes, |window, line| {
        let (g, line) = (&g[window..window + width.output], &mut out[line..line + width.input]);
        for k in 0..width.kernel {
            let inside = width.inside(k);
            if inside.is_empty() {
                continue;
            }
            let line = line[width.index(inside.start, k) as usize..].iter_mut().step_by(width.stride);
            line.zip(&g[inside]).for_each(|(sum, g)| *sum = sum.plus(g.widen()));
        }
    });
}

/// The elements of a window that are inside of the input: where the first is, and how many there are.
#[derive(Clone, Copy)]
struct InsideWindow {
    first: usize,
    count: usize,
}

impl InsideWindow {
    fn of(axis: &WindowAxis, window: usize) -> Self {
        let inside = |k: &usize| (0..axis.input as isize).contains(&axis.index(window, *k));
        let first = (0..axis.kernel).find(inside).unwrap_or(0);
        let count = (first..axis.kernel).take_while(inside).count();
        InsideWindow { first: axis.index(window, first).max(0) as usize, count }
    }
}

/// Calls `body` with the index of every window, and the position of its maximum per dimension and as an index.
#[inline(always)]
fn for_each_maximum<S: ConvElement<Number: PoolNumber>>(
    x: &[S],
    axes: &[WindowAxis; 3],
    mut body: impl FnMut(usize, [usize; 3], usize),
) {
    let [depth, height, width] = axes;
    let columns: Vec<InsideWindow> = (0..width.output).map(|w| InsideWindow::of(width, w)).collect();
    let mut window = 0;
    for z in (0..depth.output).map(|w| InsideWindow::of(depth, w)) {
        for y in (0..height.output).map(|w| InsideWindow::of(height, w)) {
            for column in &columns {
                let (mut largest, mut at) = (S::Number::LOWEST, [z.first, y.first, column.first]);
                for kz in 0..z.count {
                    for ky in 0..y.count {
                        let (plane, row) = (z.first + kz * depth.dilation, y.first + ky * height.dilation);
                        let line = &x[(plane * height.input + row) * width.input..][..width.input];
                        for kx in 0..column.count {
                            let position = column.first + kx * width.dilation;
                            let element = line[position].widen();
                            if replaces(element, largest) {
                                (largest, at) = (element, [plane, row, position]);
                            }
                        }
                    }
                }
                body(window, at, (at[0] * height.input + at[1]) * width.input + at[2]);
                window += 1;
            }
        }
    }
}

/// Adds what every window has to the position of its maximum, if that is one of `kept`.
#[inline(always)]
fn scatter_maxima<S: ConvElement<Number: PoolNumber>>(
    g: &[S],
    x: &[S],
    axes: &[WindowAxis; 3],
    kept: &[Range<usize>; 3],
    out: &mut [S::Number],
) {
    if (0..3).all(|d| kept[d] == (0..axes[d].input)) {
        for_each_maximum(x, axes, |window, _, at| out[at] = out[at].plus(g[window].widen()));
        return;
    }
    let [_, height, width] = [0, 1, 2].map(|d| kept[d].len());
    for_each_maximum(x, axes, |window, at, _| {
        if (0..3).all(|d| kept[d].contains(&at[d])) {
            let [z, y, x] = [0, 1, 2].map(|d| at[d] - kept[d].start);
            let sum = &mut out[(z * height + y) * width + x];
            *sum = sum.plus(g[window].widen());
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn axes(size: usize, kernel: usize, stride: usize, padding: usize) -> [WindowAxis; 3] {
        let output = (size + 2 * padding - kernel) / stride + 1;
        let axis = WindowAxis { kernel, stride, dilation: 1, base: -(padding as isize), input: size, output };
        [WindowAxis::UNIT, axis, axis]
    }

    /// The windows of a plane as lists of positions, without those in the padding.
    fn windows(axes: &[WindowAxis; 3]) -> Vec<Vec<usize>> {
        let [_, height, width] = axes;
        let along = |axis: &WindowAxis, w: usize| {
            let inside = |i: &isize| *i >= 0 && *i < axis.input as isize;
            (0..axis.kernel).map(|k| (w * axis.stride + k) as isize + axis.base).filter(inside).collect::<Vec<_>>()
        };
        let mut all = Vec::new();
        for y in 0..height.output {
            for x in 0..width.output {
                let rows = along(height, y);
                let pairs = rows.iter().flat_map(|r| along(width, x).into_iter().map(move |c| (*r, c)));
                all.push(pairs.map(|(r, c)| r as usize * width.input + c as usize).collect());
            }
        }
        all
    }

    fn values(x: &Tensor) -> Vec<f64> {
        x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn pools_equal_functions_of_listed_windows() {
        for (size, kernel, stride, padding) in [(8, 2, 2, 0), (9, 3, 2, 1), (7, 3, 1, 1), (10, 4, 3, 2), (5, 5, 7, 0)] {
            for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::U8] {
                let axes = axes(size, kernel, stride, padding);
                let listed = windows(&axes);
                // Few values, so that windows have equal elements.
                let plane: Vec<f64> = (0..size * size).map(|i| (i * i * 7 % 11) as f64).collect();
                let x =
                    Tensor::from_vec(plane.clone(), (1, 1, size, size), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let shape = [1, 1, axes[1].output, axes[2].output];
                let first = |window: &Vec<usize>| {
                    let mut largest = window[0];
                    window.iter().for_each(|&i| largest = if plane[i] > plane[largest] { i } else { largest });
                    largest
                };
                let found = pool(&Pooling::Max, &[&x], &axes, &shape).unwrap();
                assert_eq!(values(&found), listed.iter().map(|w| plane[first(w)]).collect::<Vec<_>>(), "{dtype:?}");
                let counted: Vec<f64> = (0..listed.len()).map(|w| (w % 5) as f64).collect();
                let g = Tensor::from_vec(counted.clone(), &shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let mut expected = vec![0.0; size * size];
                listed.iter().zip(&counted).for_each(|(w, g)| expected[first(w)] += g);
                let whole = [0..1, 0..size, 0..size];
                let found = pool(&Pooling::MaxBackward(whole), &[&g, &x], &axes, x.dims()).unwrap();
                assert_eq!(values(&found), expected, "gradient of a maximum in {dtype:?}");
                // A part of the positions.
                let (rows, columns) = (1..size, 2..size - 1);
                let part: Vec<f64> =
                    rows.clone().flat_map(|r| expected[r * size..][columns.clone()].to_vec()).collect();
                let kept = [0..1, rows.clone(), columns.clone()];
                let found =
                    pool(&Pooling::MaxBackward(kept), &[&g, &x], &axes, &[1, 1, rows.len(), columns.len()]).unwrap();
                assert_eq!(values(&found), part, "part of a gradient in {dtype:?}");
                let picked = pool(&Pooling::Pick, &[&x, &x], &axes, &shape).unwrap();
                assert_eq!(values(&picked), listed.iter().map(|w| plane[first(w)]).collect::<Vec<_>>());
                if !dtype.is_float() {
                    continue;
                }
                let area = (kernel * kernel) as f64;
                let rounded = |numbers: Vec<f64>| {
                    let wide = Tensor::from_vec(
                        numbers.into_iter().map(|v| v as f32).collect::<Vec<_>>(),
                        shape.iter().product::<usize>().max(1),
                        &Device::Cpu,
                    );
                    values(&wide.unwrap().to_dtype(dtype).unwrap())
                };
                let means: Vec<f64> = listed.iter().map(|w| w.iter().map(|&i| plane[i]).sum::<f64>() / area).collect();
                let found = values(&pool(&Pooling::Mean, &[&x], &axes, &shape).unwrap());
                if dtype == DType::F64 {
                    assert_eq!(found, means);
                    let mut expected = vec![0.0; size * size];
                    listed.iter().zip(&counted).for_each(|(w, g)| w.iter().for_each(|&i| expected[i] += g));
                    let expected: Vec<f64> = expected.into_iter().map(|sum| sum / area).collect();
                    assert_eq!(values(&pool(&Pooling::MeanBackward, &[&g], &axes, x.dims()).unwrap()), expected);
                } else {
                    assert_eq!(found, rounded(means), "mean in {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn a_window_with_nan_has_the_maximum_nan() {
        let x =
            Tensor::from_vec(vec![1f32, f32::NAN, 3.0, 4.0, 5.0, f32::NEG_INFINITY], (1, 1, 6), &Device::Cpu).unwrap();
        let axis = WindowAxis { kernel: 2, stride: 2, dilation: 1, base: 0, input: 6, output: 3 };
        let axes = [WindowAxis::UNIT, WindowAxis::UNIT, axis];
        let found = values(&pool(&Pooling::Max, &[&x], &axes, &[1, 1, 3]).unwrap());
        assert!(found[0].is_nan());
        assert_eq!(found[1..], [4.0, 5.0]);
    }
}
