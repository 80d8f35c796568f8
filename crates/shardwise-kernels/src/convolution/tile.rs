//! Products of packed blocks, in register tiles.
//!
//! With AVX-512 a tile of 8 channels by 3 vectors of pixels leaves the 32 registers room for the operands, and takes 11 loads for
//! 24 multiply-adds; with the 16 registers of AVX2, 6 by 2 does. Every element of a result is one chain of multiply-adds over
//! channels and taps, whatever tile it is in.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m256d, __m512, __m512d};

use super::ConvNumber;
#[cfg(target_arch = "x86_64")]
use super::vector::LanePair;
use super::vector::{AnyLanes, Lanes};
use crate::simd;
#[cfg(target_arch = "x86_64")]
use crate::simd::InstructionSet;

/// Output channels, at most, and channels and taps, of a tile of a weight gradient. Larger tiles take fewer loads, and were slower.
pub(super) const ROWS_OF_TILE: usize = 4;
const COLUMNS_OF_TILE: usize = 3;

/// One packed block times packed weights.
///
/// Contract: `weights` has, tile after tile, for every channel and tap one number per output channel of the tile; every tap
/// of every channel is followed by `pixels` and one tile's pixels more in `packed`; `out` has room for `pixels` numbers at every
/// `out_stride` per output channel.
pub(crate) struct BlockProduct<'a, T> {
    pub(super) weights: &'a [T],
    /// The first output channel of every tile, and their number, which may be more than there are.
    pub(super) tiles: &'a [(usize, usize)],
    /// Output channels.
    pub(super) count: usize,
    pub(super) packed: &'a [T],
    pub(super) channels: usize,
    pub(super) channel_stride: usize,
    pub(super) taps: &'a [usize],
    pub(super) pixels: usize,
    pub(super) out: *mut T,
    pub(super) out_stride: usize,
}

/// The sums over the pixels of a block of products of packed gradients and packed inputs, added to `out`.
///
/// Contract: `gradient` has `pixels` numbers at every `gradient_stride` per output channel; every tap of every channel is
/// followed by `pixels` numbers in `packed`; `out` has one number per output channel, channel and tap.
pub(crate) struct WeightProduct<'a, T> {
    pub(super) gradient: &'a [T],
    pub(super) gradient_stride: usize,
    /// Output channels.
    pub(super) count: usize,
    pub(super) packed: &'a [T],
    pub(super) channels: usize,
    pub(super) channel_stride: usize,
    pub(super) taps: &'a [usize],
    pub(super) pixels: usize,
    pub(super) out: *mut T,
}

/// A number type with the vectors that its tiles use.
pub(crate) trait TileNumber: ConvNumber {
    /// Output channels of the largest tile of a [`BlockProduct`].
    fn rows_of_tile() -> usize;

    /// Writes the product of a block.
    ///
    /// # Safety
    /// The contract of [`BlockProduct`] holds.
    unsafe fn multiply_block(block: &BlockProduct<'_, Self>);

    /// Adds the sums of a block.
    ///
    /// # Safety
    /// The contract of [`WeightProduct`] holds.
    unsafe fn multiply_weight(block: &WeightProduct<'_, Self>);
}

#[cfg(target_arch = "x86_64")]
macro_rules! tile_numbers {
    ($($T:ty: $V512:ty, $V256:ty;)*) => {$(
        impl TileNumber for $T {
            fn rows_of_tile() -> usize {
                match InstructionSet::selected() {
                    InstructionSet::Avx512 => 8,
                    InstructionSet::Avx2 => 6,
                    InstructionSet::Baseline => 4,
                }
            }

            unsafe fn multiply_block(block: &BlockProduct<'_, Self>) {
                // SAFETY: the contract of the caller; the processor has what the functions are compiled for.
                unsafe {
                    match InstructionSet::selected() {
                        InstructionSet::Avx512 => tiles_avx512::<$V512>(block),
                        InstructionSet::Avx2 => tiles_avx2::<$V256>(block),
                        InstructionSet::Baseline => simd::run(Tiles(block)),
                    }
                }
            }

            unsafe fn multiply_weight(block: &WeightProduct<'_, Self>) {
                // SAFETY: as above.
                unsafe {
                    match InstructionSet::selected() {
                        InstructionSet::Avx512 => dots_avx512::<$V512>(block),
                        // As many lanes as with AVX-512, for the same bits.
                        InstructionSet::Avx2 => dots_avx2::<LanePair<$V256>>(block),
                        InstructionSet::Baseline => simd::run(Dots(block)),
                    }
                }
            }
        }
    )*};
}
#[cfg(target_arch = "x86_64")]
tile_numbers! {
    f32: __m512, __m256;
    f64: __m512d, __m256d;
}

macro_rules! other_tile_numbers {
    ($($T:ty),*) => {$(
        impl TileNumber for $T {
            fn rows_of_tile() -> usize {
                4
            }

            unsafe fn multiply_block(block: &BlockProduct<'_, Self>) {
                simd::run(Tiles(block));
            }

            unsafe fn multiply_weight(block: &WeightProduct<'_, Self>) {
                simd::run(Dots(block));
            }
        }
    )*};
}
other_tile_numbers!(i64);
#[cfg(not(target_arch = "x86_64"))]
other_tile_numbers!(f32, f64);

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn tiles_avx512<V: Lanes>(block: &BlockProduct<'_, V::Item>) {
    // SAFETY: the contract of the caller, in a function that is compiled for these vectors.
    unsafe { tiles::<V>(block) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn tiles_avx2<V: Lanes>(block: &BlockProduct<'_, V::Item>) {
    // SAFETY: as above.
    unsafe { tiles::<V>(block) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn dots_avx512<V: Lanes>(block: &WeightProduct<'_, V::Item>) {
    // SAFETY: as above.
    unsafe { dots::<V, ROWS_OF_TILE>(block) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn dots_avx2<V: Lanes>(block: &WeightProduct<'_, V::Item>) {
    // SAFETY: as above. Half as many rows, because a pair takes two of the 16 registers.
    unsafe { dots::<V, { ROWS_OF_TILE / 2 }>(block) }
}

/// The tiles of a block in vectors of the compiler's choice.
struct Tiles<'a, T>(&'a BlockProduct<'a, T>);

impl<T: ConvNumber> simd::Kernel for Tiles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        // SAFETY: whoever creates it keeps to the contract of the block; the vectors need no instructions of their own.
        unsafe { tiles::<AnyLanes<T, FMA>>(self.0) }
    }
}

/// The sums of a block in vectors of the compiler's choice.
struct Dots<'a, T>(&'a WeightProduct<'a, T>);

impl<T: ConvNumber> simd::Kernel for Dots<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        // SAFETY: as above.
        unsafe { dots::<AnyLanes<T, FMA>, ROWS_OF_TILE>(self.0) }
    }
}

/// Divides `count` channels into tiles of at most `largest`: the first channel and the number of channels of each, which may be
/// more than are left.
pub(super) fn channel_tiles(count: usize, largest: usize) -> Vec<(usize, usize)> {
    let mut tiles = Vec::with_capacity(count.div_ceil(largest) + 1);
    let mut first = 0;
    while first < count {
        let size = (count - first).next_power_of_two().min(largest);
        tiles.push((first, size));
        first += size;
    }
    tiles
}

/// # Safety
/// The contract of [`BlockProduct`] and [`Lanes`].
#[inline(always)]
unsafe fn tiles<V: Lanes>(block: &BlockProduct<'_, V::Item>) {
    let depth = block.channels * block.taps.len();
    for first in (0..block.pixels).step_by(V::PER_TILE * V::COUNT) {
        let pixels = (block.pixels - first).min(V::PER_TILE * V::COUNT);
        let mut weights = 0;
        for &(channel, size) in block.tiles {
            let channels = (block.count - channel).min(size);
            let at = TileAt { weights, first, pixels, channel, channels };
            // SAFETY: the contract of the caller.
            unsafe {
                match (size, pixels.div_ceil(V::COUNT)) {
                    (8, 3) => tile::<V, 8, 3>(block, at),
                    (8, 2) => tile::<V, 8, 2>(block, at),
                    (8, _) => tile::<V, 8, 1>(block, at),
                    (6, 2) => tile::<V, 6, 2>(block, at),
                    (6, _) => tile::<V, 6, 1>(block, at),
                    (4, 3) => tile::<V, 4, 3>(block, at),
                    (4, 2) => tile::<V, 4, 2>(block, at),
                    (4, _) => tile::<V, 4, 1>(block, at),
                    (2, 3) => tile::<V, 2, 3>(block, at),
                    (2, _) => tile::<V, 2, 2>(block, at),
                    (_, 3) => tile::<V, 1, 3>(block, at),
                    (_, _) => tile::<V, 1, 2>(block, at),
                }
            }
            weights += depth * size;
        }
    }
}

/// A tile of a block: where its weights begin, its pixels, and its output channels.
#[derive(Clone, Copy)]
struct TileAt {
    weights: usize,
    first: usize,
    pixels: usize,
    channel: usize,
    channels: usize,
}

/// # Safety
/// The contract of [`BlockProduct`] and [`Lanes`], for a tile of the block.
#[inline(always)]
unsafe fn tile<V: Lanes, const M: usize, const N: usize>(block: &BlockProduct<'_, V::Item>, at: TileAt) {
    // SAFETY: `M` weights per channel and tap; `N` vectors after each tap, inside of what may be read. What a tile has beyond
    // the pixels and channels of the block is not written.
    unsafe {
        let zero = V::splat(V::Item::ZERO);
        let mut sums = [[zero; N]; M];
        let mut weights = block.weights.as_ptr().add(at.weights);
        let mut source = block.packed.as_ptr().add(at.first);
        for _ in 0..block.channels {
            for &tap in block.taps {
                let mut pixels = [zero; N];
                for (v, pixels) in pixels.iter_mut().enumerate() {
                    *pixels = V::load(source.add(tap + v * V::COUNT));
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add(m));
                    for (sum, pixels) in sums.iter_mut().zip(pixels) {
                        *sum = sum.multiply_add(weight, pixels);
                    }
                }
                weights = weights.add(M);
            }
            source = source.wrapping_add(block.channel_stride);
        }
        let out = block.out.add(at.channel * block.out_stride + at.first);
        if at.pixels == N * V::COUNT && at.channels == M {
            for (m, sums) in sums.iter().enumerate() {
                for (v, sum) in sums.iter().enumerate() {
                    sum.store(out.add(m * block.out_stride + v * V::COUNT));
                }
            }
            return;
        }
        for (m, sums) in sums.iter().take(at.channels).enumerate() {
            // Three vectors of 16 numbers are the most there are.
            let mut line = [V::Item::ZERO; 3 * 16];
            for (v, sum) in sums.iter().enumerate() {
                sum.store(line.as_mut_ptr().add(v * V::COUNT));
            }
            std::ptr::copy_nonoverlapping(line.as_ptr(), out.add(m * block.out_stride), at.pixels);
        }
    }
}

/// # Safety
/// The contract of [`WeightProduct`] and [`Lanes`].
#[inline(always)]
unsafe fn dots<V: Lanes, const ROWS: usize>(block: &WeightProduct<'_, V::Item>) {
    let (taps, depth) = (block.taps.len(), block.channels * block.taps.len());
    let mut first = 0;
    while first < block.count {
        let rows = if block.count - first >= ROWS { ROWS } else { 1 };
        let mut k = 0;
        while k < depth {
            let columns = if depth - k >= COLUMNS_OF_TILE { COLUMNS_OF_TILE } else { 1 };
            let source = |i: usize| (k + i) / taps * block.channel_stride + block.taps[(k + i) % taps];
            // SAFETY: the contract of the caller.
            unsafe {
                match (rows == ROWS, columns == COLUMNS_OF_TILE) {
                    (true, true) => {
                        dot_tile::<V, ROWS, COLUMNS_OF_TILE>(block, first, k, std::array::from_fn(source));
                    }
                    (true, false) => dot_tile::<V, ROWS, 1>(block, first, k, std::array::from_fn(source)),
                    (false, true) => dot_tile::<V, 1, COLUMNS_OF_TILE>(block, first, k, std::array::from_fn(source)),
                    (false, false) => dot_tile::<V, 1, 1>(block, first, k, std::array::from_fn(source)),
                }
            }
            k += columns;
        }
        first += rows;
    }
}

/// # Safety
/// The contract of [`WeightProduct`] and [`Lanes`], for `M` output channels from `first` and `K` channels and taps from `k`.
#[inline(always)]
unsafe fn dot_tile<V: Lanes, const M: usize, const K: usize>(
    block: &WeightProduct<'_, V::Item>,
    first: usize,
    k: usize,
    sources: [usize; K],
) {
    // SAFETY: every row has `pixels` numbers, of which all are read once: whole vectors, then the rest. `ROWS_OF_TILE` times
    // `COLUMNS_OF_TILE` vectors of 16 numbers are the most there are.
    unsafe {
        let zero = V::splat(V::Item::ZERO);
        let mut sums = [[zero; K]; M];
        let gradient = block.gradient.as_ptr().add(first * block.gradient_stride);
        let inputs = sources.map(|source| block.packed.as_ptr().add(source));
        let vectors = block.pixels / V::COUNT;
        for v in 0..vectors {
            let mut gradients = [zero; M];
            for (m, lanes) in gradients.iter_mut().enumerate() {
                *lanes = V::load(gradient.add(m * block.gradient_stride + v * V::COUNT));
            }
            for (i, input) in inputs.iter().enumerate() {
                let input = V::load(input.add(v * V::COUNT));
                for (sums, gradient) in sums.iter_mut().zip(gradients) {
                    sums[i] = sums[i].multiply_add(gradient, input);
                }
            }
        }
        let rest = block.pixels - vectors * V::COUNT;
        if rest > 0 {
            let mut gradients = [zero; M];
            for (m, lanes) in gradients.iter_mut().enumerate() {
                *lanes = V::load_first(gradient.add(m * block.gradient_stride + vectors * V::COUNT), rest);
            }
            for (i, input) in inputs.iter().enumerate() {
                let input = V::load_first(input.add(vectors * V::COUNT), rest);
                for (sums, gradient) in sums.iter_mut().zip(gradients) {
                    sums[i] = sums[i].multiply_add(gradient, input);
                }
            }
        }
        let mut lanes = [V::Item::ZERO; ROWS_OF_TILE * COLUMNS_OF_TILE * 16];
        for (m, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                sum.store(lanes.as_mut_ptr().add((m * K + i) * V::COUNT));
            }
        }
        let depth = block.channels * block.taps.len();
        V::add_sums(lanes.as_ptr(), [M, K], block.out.add(first * depth + k), depth);
    }
}
