//! Gradients of scans, for a part of a dimension given what the other parts contribute.
//!
//! Numbers are read and written block by block in their own types and computed in f64.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor, WithDType};

use crate::assembly::copy_to_change;
use crate::convert::{Block, Compute};
use crate::error::Result;
use crate::typed_slice::{LineShape, with_slice};
use crate::uninit_buffer::UninitBuffer;
use crate::{contiguous, with_first_element, with_type};

/// Elements of a line that are converted at a time: two operands and the products take 6 KiB.
const BLOCK: usize = 256;

/// A cumulative product along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct ProductScan {
    /// The dimension.
    pub dim: usize,
    /// Whether it is scanned from the end.
    pub reverse: bool,
    /// Whether an element is left out of its own result.
    pub exclusive: bool,
}

/// The lines of a contiguous tensor along a dimension, with elements numbered in the order of a scan.
struct ScanLines<'a> {
    tensor: &'a Tensor,
    shape: LineShape,
    reverse: bool,
}

impl<'a> ScanLines<'a> {
    fn new(tensor: &'a Tensor, dim: usize, reverse: bool) -> Self {
        assert!(tensor.is_contiguous());
        ScanLines { tensor, shape: LineShape::new(tensor.dims(), dim), reverse }
    }

    /// Where elements `from..from + count` of a line begin in memory.
    fn start(&self, line: usize, from: usize, count: usize) -> usize {
        let LineShape { n, inner, .. } = self.shape;
        let from = if self.reverse { n - from - count } else { from };
        (line / inner * n + from) * inner + line % inner
    }

    /// Reads elements `from..from + count` of a line as f64.
    fn read<'b>(&self, line: usize, from: usize, count: usize, buffer: &'b mut [MaybeUninit<f64>; BLOCK]) -> &'b [f64] {
        let (dtype, start) = (self.tensor.dtype(), self.start(line, from, count));
        let block = Block { rows: 1, row_stride: 0, width: count, stride: self.shape.inner };
        assert!(start + count.saturating_sub(1) * self.shape.inner < self.tensor.elem_count());
        let buffer = &mut buffer[..count];
        // SAFETY: the first and the last element are inside the tensor, and the buffer has the size of the block.
        let read = unsafe {
            with_first_element(self.tensor, |first, _| {
                f64::load(dtype, first.add(start * dtype.size_in_bytes()), block, buffer);
            });
            buffer.assume_init_mut()
        };
        if self.reverse {
            read.reverse();
        }
        read
    }

    /// One element of a line as f64.
    fn at(&self, line: usize, j: usize) -> f64 {
        self.read(line, j, 1, &mut [MaybeUninit::uninit(); BLOCK])[0]
    }

    /// The blocks of a line: where they begin, and their lengths.
    fn blocks(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> + use<> {
        let n = self.shape.n;
        (0..n.div_ceil(BLOCK)).map(move |i| (i * BLOCK, BLOCK.min(n - i * BLOCK)))
    }
}

/// Rounds numbers to the elements of a line, with a distance of `stride` between them.
///
/// # Safety
/// `first` is the first of as many elements of type `dtype` that can be written.
unsafe fn write_strided(dtype: DType, first: *mut u8, stride: usize, numbers: impl Iterator<Item = f64>) {
    with_type!(dtype, T => {
        for (i, x) in numbers.enumerate() {
            // SAFETY: the caller's promise.
            unsafe { first.cast::<T>().add(i * stride).write(T::from_f64(x)) };
        }
    }, otherwise unreachable!("results have supported types"));
}

/// The sum `s` of an element of [`product_gradient`] given what follows it, and what the element before it gets.
fn step(scan: ProductScan, x: f64, gradient: f64, passed: f64) -> (f64, f64) {
    let s = if scan.exclusive { passed } else { gradient + passed };
    (s, x * s + if scan.exclusive { gradient } else { 0.0 })
}

/// Returns what a part of a dimension contributes to the gradients of cumulative products of the parts before it.
///
/// A part passes `a + b * c` to the part before it if it gets `c` from the part after it. Returns `a` and `b` for every line, in
/// the types given; the dimension becomes 1, or stays 0.
///
/// # Errors
/// If memory does not suffice.
pub fn product_parts(scan: ProductScan, x: &Tensor, gradient: &Tensor, dtypes: [DType; 2]) -> Result<[Tensor; 2]> {
    let (x, gradient) = (contiguous(x)?, contiguous(gradient)?);
    let mut shape = x.dims().to_vec();
    shape[scan.dim] = shape[scan.dim].min(1);
    let count = shape.iter().product();
    let outputs = [UninitBuffer::new(dtypes[0], count)?, UninitBuffer::new(dtypes[1], count)?];
    let (xs, gs) = (ScanLines::new(&x, scan.dim, scan.reverse), ScanLines::new(&gradient, scan.dim, scan.reverse));
    let mut buffers = [[MaybeUninit::uninit(); BLOCK]; 2];
    for line in 0..count {
        let [x_buffer, g_buffer] = &mut buffers;
        let mut passed = 0.0;
        for (from, length) in xs.blocks().rev() {
            let (x, g) = (xs.read(line, from, length, x_buffer), gs.read(line, from, length, g_buffer));
            passed = (0..length).rev().fold(passed, |passed, j| step(scan, x[j], g[j], passed).1);
        }
        let product = xs.blocks().fold(1.0, |product, (from, length)| {
            xs.read(line, from, length, x_buffer).iter().fold(product, |product, x| product * x)
        });
        for (output, number) in outputs.iter().zip([passed, product]) {
            // SAFETY: there is one element per line.
            unsafe {
                let to = output.first().add(line * output.dtype().size_in_bytes());
                write_strided(output.dtype(), to, 1, std::iter::once(number));
            }
        }
    }
    // SAFETY: every element was written.
    Ok(outputs.map(|output| unsafe { output.finish(shape.as_slice()) }))
}

/// Returns the gradient of the cumulative product of `x`, in the type of `gradient`, correct for any number of zeros.
///
/// `parts` are `a` and `b` of [`product_parts`] for all parts of the dimension, of which this is number `before` in the order of
/// the scan.
///
/// # Errors
/// If memory does not suffice.
pub fn product_gradient(
    scan: ProductScan,
    x: &Tensor,
    gradient: &Tensor,
    parts: [&Tensor; 2],
    before: usize,
) -> Result<Tensor> {
    let (x, gradient) = (contiguous(x)?, contiguous(gradient)?);
    let [a, b] = [contiguous(parts[0])?, contiguous(parts[1])?];
    let output = UninitBuffer::new(gradient.dtype(), gradient.elem_count())?;
    let lines = |tensor| ScanLines::new(tensor, scan.dim, scan.reverse);
    let (xs, gs, heads_a, heads_b) = (lines(&x), lines(&gradient), lines(&a), lines(&b));
    let mut buffers = [[MaybeUninit::uninit(); BLOCK]; 2];
    let mut results = [0.0; BLOCK];
    // The products of all elements before each block.
    let mut starts = Vec::with_capacity(xs.shape.n.div_ceil(BLOCK));
    for line in 0..x.elem_count() / xs.shape.n.max(1) {
        let [x_buffer, g_buffer] = &mut buffers;
        let later = (before + 1..heads_a.shape.n).rev();
        let mut passed = later.fold(0.0, |passed, part| heads_a.at(line, part) + heads_b.at(line, part) * passed);
        let mut product: f64 = (0..before).map(|part| heads_b.at(line, part)).product();
        starts.clear();
        for (from, length) in xs.blocks() {
            starts.push(product);
            product = xs.read(line, from, length, x_buffer).iter().fold(product, |product, x| product * x);
        }
        for (from, length) in xs.blocks().rev() {
            let (x, g) = (xs.read(line, from, length, x_buffer), gs.read(line, from, length, g_buffer));
            let mut product = starts[from / BLOCK];
            for j in 0..length {
                results[j] = product;
                product *= x[j];
            }
            for j in (0..length).rev() {
                let (s, next) = step(scan, x[j], g[j], passed);
                results[j] *= s;
                passed = next;
            }
            if scan.reverse {
                results[..length].reverse();
            }
            let (dtype, inner) = (gradient.dtype(), gs.shape.inner);
            // SAFETY: the elements of the block are inside the result, which has the shape of the gradient.
            unsafe {
                let to = output.first().add(gs.start(line, from, length) * dtype.size_in_bytes());
                write_strided(dtype, to, inner, results[..length].iter().copied());
            }
        }
    }
    // SAFETY: the blocks of all lines are all elements.
    Ok(unsafe { output.finish(gradient.dims()) })
}

/// Adds the gradients of cumulative maxima or minima of a part of a dimension, which begins at `first_index`, up by index.
///
/// Returns the gradient of the part's own elements, and for every line the sum that belongs to an earlier part, in `dtype`, with its
/// index (-1: none).
///
/// # Errors
/// If memory does not suffice.
///
/// # Panics
/// If an index is after the part.
pub fn extreme_sums(
    dim: usize,
    index: &Tensor,
    gradient: &Tensor,
    first_index: i64,
    dtype: DType,
) -> Result<[Tensor; 3]> {
    let gradient = contiguous(gradient)?;
    let mut shape = gradient.dims().to_vec();
    shape[dim] = shape[dim].min(1);
    let count: usize = shape.iter().product();
    let own = UninitBuffer::new(gradient.dtype(), gradient.elem_count())?;
    let sums = UninitBuffer::new(dtype, count)?;
    let mut places = vec![-1i64; count];
    let lines = ScanLines::new(&gradient, dim, false);
    let LineShape { n, inner, .. } = lines.shape;
    let mut buffer = [MaybeUninit::uninit(); BLOCK];
    with_slice::<i64, _>(index, |index| {
        // The sums of one line.
        let mut totals = vec![0.0; n];
        for (line, place) in places.iter_mut().enumerate() {
            totals.fill(0.0);
            let mut earlier = 0.0;
            for (from, length) in lines.blocks() {
                for (j, g) in lines.read(line, from, length, &mut buffer).iter().enumerate() {
                    let index = index[lines.start(line, from + j, 1)];
                    match usize::try_from(index - first_index) {
                        Ok(own) => totals[own] += g,
                        Err(_) => (earlier, *place) = (earlier + g, index),
                    }
                }
            }
            // SAFETY: a line of the result, and one sum per line.
            unsafe {
                let to = own.first().add(lines.start(line, 0, n) * gradient.dtype().size_in_bytes());
                write_strided(gradient.dtype(), to, inner, totals.iter().copied());
                let to = sums.first().add(line * dtype.size_in_bytes());
                write_strided(dtype, to, 1, std::iter::once(earlier));
            }
        }
    })?;
    let places = Tensor::from_vec(places, shape.as_slice(), &candle_core::Device::Cpu)?;
    // SAFETY: every line and every sum was written.
    Ok(unsafe { [own.finish(gradient.dims()), sums.finish(shape.as_slice()), places] })
}

/// Adds the sums of other parts to the elements of a gradient that they belong to; see [`extreme_sums`].
///
/// `gradient` is that of a part which begins at `first_index`; `sums` and `places` have one element per part along `dim`.
///
/// # Errors
/// If memory does not suffice.
pub fn add_to_places(
    dim: usize,
    gradient: &Tensor,
    sums: &Tensor,
    places: &Tensor,
    first_index: i64,
) -> Result<Tensor> {
    let (gradient, sums) = (contiguous(gradient)?, contiguous(sums)?);
    let copy = copy_to_change(&gradient)?;
    let (lines, heads) = (ScanLines::new(&gradient, dim, false), ScanLines::new(&sums, dim, false));
    let (n, parts) = (lines.shape.n, heads.shape.n);
    with_slice::<i64, _>(places, |places| {
        for line in 0..gradient.elem_count() / n.max(1) {
            let index = |part: usize| places[heads.start(line, part, 1)];
            for part in 0..parts {
                // -1 is before every part. The sums for one place are added when the first of them is found.
                let place = usize::try_from(index(part) - first_index).ok().filter(|&place| place < n);
                let Some(place) = place.filter(|_| (0..part).all(|earlier| index(earlier) != index(part))) else {
                    continue;
                };
                let same = (part..parts).filter(|&other| index(other) == index(part));
                let sum = same.fold(lines.at(line, place), |sum, other| sum + heads.at(line, other));
                let (dtype, at) = (gradient.dtype(), lines.start(line, place, 1));
                // SAFETY: the element is inside the copy.
                unsafe {
                    write_strided(dtype, copy.range(at * dtype.size_in_bytes()), 1, std::iter::once(sum));
                }
            }
        }
    })?;
    // SAFETY: the copy was complete.
    Ok(unsafe { copy.finish() })
}
