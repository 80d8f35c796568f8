//! The convolution and its transpose: every element of the result gathers what it reads, so blocks of it are independent.

use std::any::TypeId;

use candle_core::Tensor;

use super::geometry::{ConvGeometry, TapAxis};
use super::pack::{AlignedBuffer, PackBlock, Packing, PixelBlock};
use super::tile::{BlockProduct, TileNumber, channel_tiles};
use super::{ConvElement, ConvNumber};
use crate::error::Result;
use crate::meta::TensorMeta;
use crate::parallel::{SharedPtr, over_ranges};
use crate::{Assembly, contiguous, simd, with_slice, with_type};

/// Convolves `[n, channels, ...]` with a weight `[out, channels / groups, ...]`; the result has shape `shape`.
///
/// The type is that of both tensors. Large convolutions use the rayon pool of the calling thread. Beyond the result and a copy
/// of the weight, memory of a few blocks of input rows is used.
///
/// # Panics
/// If sizes do not fit the geometry.
pub fn convolve(x: &Tensor, weight: &Tensor, geometry: &ConvGeometry, shape: &[usize]) -> Result<Tensor> {
    let axes = geometry.axes.each_ref().map(TapAxis::forward);
    let (out, inner, window) = (shape[1] / geometry.groups, x.dims()[1] / geometry.groups, geometry.window());
    let weights = WeightAt { group: out * inner * window, row: inner * window, column: window };
    gather(x, weight, geometry, shape, weights, &[axes])
}

/// The gradient of [`convolve`] with respect to its input of shape `shape`, from that of its result: a transposed convolution.
///
/// `gradient` is `[n, out, ...]`, `weight` is `[out, channels / groups, ...]`; otherwise as [`convolve`].
///
/// # Panics
/// If sizes do not fit the geometry.
pub fn convolve_input(gradient: &Tensor, weight: &Tensor, geometry: &ConvGeometry, shape: &[usize]) -> Result<Tensor> {
    let [depth, height, width] = geometry.axes.each_ref().map(TapAxis::transposed);
    let mut phases = Vec::with_capacity(depth.len() * height.len() * width.len());
    for z in &depth {
        for y in &height {
            phases.extend(width.iter().map(|x| [z.clone(), y.clone(), x.clone()]));
        }
    }
    let (channels, out) = (shape[1] / geometry.groups, gradient.dims()[1] / geometry.groups);
    let window = geometry.window();
    let weights = WeightAt { group: out * channels * window, row: window, column: channels * window };
    gather(gradient, weight, geometry, shape, weights, &phases)
}

/// Strides of a weight: between groups, between channels of the result, and between channels of the source.
#[derive(Clone, Copy)]
struct WeightAt {
    group: usize,
    row: usize,
    column: usize,
}

fn gather(
    source: &Tensor,
    weight: &Tensor,
    geometry: &ConvGeometry,
    shape: &[usize],
    weights: WeightAt,
    phases: &[[TapAxis; 3]],
) -> Result<Tensor> {
    let dtype = source.dtype();
    let output = Assembly::new(TensorMeta { shape: shape.to_vec(), dtype })?;
    let (source, weight) = (contiguous(source)?, contiguous(weight)?);
    let (images, groups) = (source.dims()[0], geometry.groups);
    let [channels, rows] = [source.dims()[1], shape[1]].map(|n| n / groups);
    let mut sizes = [1; 3];
    sizes[5 - shape.len()..].copy_from_slice(&shape[2..]);
    let kernel = geometry.axes.map(|a| a.kernel);
    with_type!(dtype, T => with_slice::<T, _>(&source, |source| with_slice::<T, _>(&weight, |weight| {
        // SAFETY: the output has this shape and type, and nobody else writes to it.
        let out = SharedPtr::new(unsafe { output.range::<T>(0) });
        let all = Gather { source, weight, out, images, groups, channels, rows, sizes, kernel, weights };
        phases.iter().for_each(|axes| all.phase(axes));
    }))??, otherwise unreachable!("`Assembly` checks it"));
    // SAFETY: the phases together write all elements.
    Ok(unsafe { output.finish() })
}

/// Operands and sizes of one call.
struct Gather<'a, S> {
    source: &'a [S],
    weight: &'a [S],
    out: SharedPtr<S>,
    images: usize,
    groups: usize,
    /// Channels of the source and of the result, per group.
    channels: usize,
    rows: usize,
    /// Spatial sizes of the result and of the window.
    sizes: [usize; 3],
    kernel: [usize; 3],
    weights: WeightAt,
}

impl<S: ConvElement> Gather<'_, S> {
    /// Writes the elements of the result that have these taps.
    fn phase(&self, axes: &[TapAxis; 3]) {
        let reads = axes.iter().all(|a| !a.taps.is_empty() && a.source > 0) && self.channels > 0;
        let volume: usize = axes.iter().map(|a| a.source).product();
        let packing = Packing::new(axes.clone(), self.channels, size_of::<S::Number>());
        let (tiles, taps) = (channel_tiles(self.rows, S::Number::rows_of_tile()), packing.taps(1));
        let weights = if reads { self.packed_weights(&tiles, &taps) } else { Vec::new() };
        let (blocks, images) = (packing.blocks(), self.images * self.groups);
        let depth = self.channels * taps.len();
        // A multiply-add of a register tile takes about a sixteenth of the unit of cost; packing and storing are added.
        let cost = packing.max_pixels() * (self.rows * depth / 16 + self.rows + self.channels);
        over_ranges(images * blocks, cost, 1, |range| {
            let mut packed = AlignedBuffer::new(if reads { packing.scratch(self.channels) } else { 0 });
            let mut product = Vec::new();
            let mut offsets: (usize, Vec<usize>) = (0, Vec::new());
            for item in range {
                let (image, block) = (item / blocks, packing.block(item % blocks));
                if !reads {
                    product.resize(self.rows * block.pixels(), S::Number::ZERO);
                    self.store(axes, image, &block, &product);
                    continue;
                }
                let columns = block.columns.len();
                if offsets.0 != columns {
                    offsets = (columns, packing.taps(columns).into_iter().map(|(_, at)| at).collect());
                }
                let source = &self.source[image * self.channels * volume..][..self.channels * volume];
                simd::run(PackBlock { packing: &packing, block: &block, source, packed: packed.numbers() });
                let in_place = TypeId::of::<S>() == TypeId::of::<S::Number>()
                    && axes[2].gap == 1
                    && (axes[1].gap == 1 || block.rows.len() == 1);
                let (out, out_stride) = if in_place {
                    // SAFETY: the block is inside of the result.
                    (unsafe { self.out.get().add(self.first(axes, image, &block)).cast() }, self.sizes.iter().product())
                } else {
                    product.resize(self.rows * block.pixels(), S::Number::ZERO);
                    (product.as_mut_ptr(), block.pixels())
                };
                let group = image % self.groups * (weights.len() / self.groups);
                let product_of = BlockProduct {
                    weights: &weights[group..],
                    tiles: &tiles,
                    count: self.rows,
                    packed: packed.numbers(),
                    channels: self.channels,
                    channel_stride: packing.channel_stride(columns),
                    taps: &offsets.1,
                    pixels: block.pixels(),
                    out,
                    out_stride,
                };
                // SAFETY: weights and block are packed in this way, with room to read ahead. In place, rows of the block are
                // consecutive in the result, and no other item has them.
                unsafe { S::Number::multiply_block(&product_of) };
                if !in_place {
                    self.store(axes, image, &block, &product);
                }
            }
        });
    }

    /// Index in the result of the first pixel of a block, in the first channel of an image and group.
    fn first(&self, axes: &[TapAxis; 3], image: usize, block: &PixelBlock) -> usize {
        let [z, y, x] = [block.plane, block.rows.start, block.columns.start];
        let [z, y, x] =
            [axes[0].start + z * axes[0].gap, axes[1].start + y * axes[1].gap, axes[2].start + x * axes[2].gap];
        ((image * self.rows * self.sizes[0] + z) * self.sizes[1] + y) * self.sizes[2] + x
    }

    /// Converts the product of a block to the type of the result, and writes it to its pixels.
    fn store(&self, axes: &[TapAxis; 3], image: usize, block: &PixelBlock, product: &[S::Number]) {
        let first = self.first(axes, image, block);
        // SAFETY: the block is inside of the result, and no other item has its pixels.
        let out = unsafe { self.out.get().add(first) };
        simd::run(StoreBlock {
            product,
            out,
            columns: block.columns.len(),
            rows: block.rows.len(),
            steps: [self.sizes.iter().product(), axes[1].gap * self.sizes[2], axes[2].gap],
        });
    }

    /// The weights of every group: tile after tile, per channel and tap one number for every output channel of the tile.
    fn packed_weights(&self, tiles: &[(usize, usize)], taps: &[([usize; 3], usize)]) -> Vec<S::Number> {
        let padded: usize = tiles.iter().map(|(_, size)| size).sum();
        let mut packed = Vec::with_capacity(self.groups * padded * self.channels * taps.len());
        let index = |&([z, y, x], _): &([usize; 3], usize)| (z * self.kernel[1] + y) * self.kernel[2] + x;
        let taps: Vec<usize> = taps.iter().map(index).collect();
        for group in 0..self.groups {
            for &(first, size) in tiles {
                for channel in 0..self.channels {
                    for tap in &taps {
                        let at = group * self.weights.group + channel * self.weights.column + tap;
                        packed.extend((first..first + size).map(|row| match row < self.rows {
                            true => self.weight[at + row * self.weights.row].widen(),
                            false => S::Number::ZERO,
                        }));
                    }
                }
            }
        }
        packed
    }
}

/// Writes a product to the pixels of a block, which may be apart.
struct StoreBlock<'a, S: ConvElement> {
    product: &'a [S::Number],
    out: *mut S,
    rows: usize,
    columns: usize,
    /// Distance in the result of channels, rows and pixels.
    steps: [usize; 3],
}

impl<S: ConvElement> simd::Kernel for StoreBlock<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (i, line) in self.product.chunks_exact(self.columns.max(1)).enumerate() {
            let (channel, row) = (i / self.rows, i % self.rows);
            // SAFETY: whoever creates it promises that the pixels are inside of the result.
            unsafe {
                let out = self.out.add(channel * self.steps[0] + row * self.steps[1]);
                if self.steps[2] == 1 {
                    line.iter().enumerate().for_each(|(x, value)| out.add(x).write(S::narrow(*value)));
                } else {
                    line.iter().enumerate().for_each(|(x, value)| out.add(x * self.steps[2]).write(S::narrow(*value)));
                }
            }
        }
    }
}
