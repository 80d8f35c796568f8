//! The gradient of a convolution with respect to its weight.

use std::ops::Range;

use candle_core::Tensor;

use super::geometry::{ConvGeometry, TapAxis};
use super::pack::{AlignedBuffer, PackBlock, Packing, PixelBlock};
use super::tile::{ROWS_OF_TILE, TileNumber, WeightProduct};
use super::{ConvElement, ConvNumber};
use crate::error::Result;
use crate::meta::TensorMeta;
use crate::parallel::{SharedPtr, over_ranges};
use crate::{Assembly, contiguous, simd, with_slice, with_type};

/// The gradient of [`convolve`](super::convolve) with respect to its weight of shape `shape`, from that of its result and the
/// input.
///
/// `gradient` is `[n, out, ...]`, `x` is `[n, channels, ...]`. Sums are added block by block in an order that depends on sizes only.
///
/// # Panics
/// If sizes do not fit the geometry.
pub fn convolve_weight(gradient: &Tensor, x: &Tensor, geometry: &ConvGeometry, shape: &[usize]) -> Result<Tensor> {
    let dtype = x.dtype();
    let output = Assembly::new(TensorMeta { shape: shape.to_vec(), dtype })?;
    let (gradient, x) = (contiguous(gradient)?, contiguous(x)?);
    with_type!(dtype, T => with_slice::<T, _>(&gradient, |gradient| with_slice::<T, _>(&x, |source| {
        // SAFETY: the output has this shape and type, and nobody else writes to it.
        let out = SharedPtr::new(unsafe { output.range::<T>(0) });
        WeightSums {
            gradient,
            source,
            out,
            images: x.dims()[0],
            rows: shape[0] / geometry.groups,
            channels: shape[1],
            geometry,
        }
        .run();
    }))??, otherwise unreachable!("`Assembly` checks it"));
    // SAFETY: the items of `run` together write all elements.
    Ok(unsafe { output.finish() })
}

/// Operands and sizes of one call.
struct WeightSums<'a, S> {
    gradient: &'a [S],
    source: &'a [S],
    out: SharedPtr<S>,
    images: usize,
    /// Output channels per group, and channels per group.
    rows: usize,
    channels: usize,
    geometry: &'a ConvGeometry,
}

impl<S: ConvElement> WeightSums<'_, S> {
    fn run(&self) {
        let axes = self.geometry.axes.each_ref().map(TapAxis::forward);
        let packing = Packing::new(axes, self.channels, size_of::<S::Number>());
        let taps = packing.taps(1);
        let depth = self.channels * taps.len();
        let reads = depth > 0 && self.geometry.inputs() > 0;
        // Threads take output channels, not images, so that the terms of a sum are added in one order.
        let per_item = self.rows.div_ceil(rayon::current_num_threads()).next_multiple_of(ROWS_OF_TILE).max(1);
        let parts = self.rows.div_ceil(per_item);
        let cost = self.images * self.geometry.outputs() * (per_item * depth / 16 + self.channels);
        over_ranges(self.geometry.groups * parts, cost, 1, |range| {
            let mut scratch = Scratch {
                packed: AlignedBuffer::new(if reads { packing.scratch(self.channels) } else { 0 }),
                gradient: AlignedBuffer::new(per_item * gradient_stride(packing.max_pixels())),
                taps: (0, Vec::new()),
            };
            let mut sums = Vec::new();
            for item in range {
                let (group, first) = (item / parts, item % parts * per_item);
                let rows = first..(first + per_item).min(self.rows);
                sums.clear();
                sums.resize(rows.len() * depth, S::Number::ZERO);
                for image in (0..self.images).filter(|_| reads) {
                    for block in 0..packing.blocks() {
                        let channels = (image * self.geometry.groups + group, rows.clone());
                        self.add_block(&packing, &packing.block(block), channels, &mut scratch, &mut sums);
                    }
                }
                self.store(group * self.rows + first, &taps, &sums);
            }
        });
    }

    /// Adds the terms of one block of an image and group, for some of its output channels.
    fn add_block(
        &self,
        packing: &Packing,
        block: &PixelBlock,
        (image, rows): (usize, Range<usize>),
        scratch: &mut Scratch<S::Number>,
        sums: &mut [S::Number],
    ) {
        let columns = block.columns.len();
        if scratch.taps.0 != columns {
            scratch.taps = (columns, packing.taps(columns).into_iter().map(|(_, at)| at).collect());
        }
        let (volume, outputs) = (self.geometry.inputs(), self.geometry.outputs());
        let source = &self.source[image * self.channels * volume..][..self.channels * volume];
        simd::run(PackBlock { packing, block, source, packed: scratch.packed.numbers() });
        let [_, height, width] = self.geometry.axes.map(|a| a.output);
        let first = (block.plane * height + block.rows.start) * width + block.columns.start;
        let start = (image * self.rows + rows.start) * outputs + first;
        let gradient = &self.gradient[start..start + (rows.len() - 1) * outputs + block.pixels()];
        let stride = gradient_stride(block.pixels());
        simd::run(PackRows {
            rows: gradient,
            distance: outputs,
            width: block.pixels(),
            packed: scratch.gradient.numbers(),
            stride,
        });
        let product = WeightProduct {
            gradient: scratch.gradient.numbers(),
            gradient_stride: stride,
            count: rows.len(),
            packed: scratch.packed.numbers(),
            channels: self.channels,
            channel_stride: packing.channel_stride(columns),
            taps: &scratch.taps.1,
            pixels: block.pixels(),
            out: sums.as_mut_ptr(),
        };
        // SAFETY: gradient and block are packed in this way, and there is a sum for every row, channel and tap.
        unsafe { S::Number::multiply_weight(&product) };
    }

    /// Writes the sums of output channels from `first`, in the order of the weight.
    fn store(&self, first: usize, taps: &[([usize; 3], usize)], sums: &[S::Number]) {
        let [_, height, width] = self.geometry.axes.map(|a| a.kernel);
        for (i, sums) in sums.chunks_exact(taps.len().max(1)).enumerate() {
            for (&([z, y, x], _), &sum) in taps.iter().zip(sums) {
                let at = (first * self.channels + i) * taps.len() + (z * height + y) * width + x;
                // SAFETY: inside of the result; other items have other output channels.
                unsafe { self.out.get().add(at).write(S::narrow(sum)) };
            }
        }
    }
}

/// Buffers of a thread.
struct Scratch<T: ConvNumber> {
    packed: AlignedBuffer<T>,
    gradient: AlignedBuffer<T>,
    /// Where the taps begin in a block of so many columns.
    taps: (usize, Vec<usize>),
}

/// Distance of the rows of a packed gradient: so many pixels, to the end of a cache line.
fn gradient_stride(pixels: usize) -> usize {
    pixels.next_multiple_of(16)
}

/// Converts rows of `width` elements that are `distance` apart.
struct PackRows<'a, S: ConvElement> {
    rows: &'a [S],
    distance: usize,
    width: usize,
    packed: &'a mut [S::Number],
    stride: usize,
}

impl<S: ConvElement> simd::Kernel for PackRows<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (row, packed) in self.rows.chunks(self.distance).zip(self.packed.chunks_exact_mut(self.stride)) {
            packed[..self.width].iter_mut().zip(&row[..self.width]).for_each(|(to, from)| *to = from.widen());
        }
    }
}
