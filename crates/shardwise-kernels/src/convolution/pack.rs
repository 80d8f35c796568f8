//! Packing of a block of source rows, so that every tap reads consecutive elements for consecutive pixels of the result.
//!
//! A packed channel has one plane per tap along the width and the depth; a plane has the rows that the pixels of the block read,
//! as wide as the block. Rows are shared by the taps along the height. So a block takes `kernel width` times the memory of the
//! rows that it reads, and not one copy per element of the window.

use std::ops::Range;

use super::geometry::{TapAxis, valid};
use super::{ConvElement, ConvNumber};
use crate::simd;

/// Bytes of a packed block, if the shape allows it: half of the 1 MiB of second-level cache that current cores have at least.
const BLOCK_BYTES: usize = 512 << 10;

/// Pixels of a block in a row that is divided. Narrower blocks would leave many register tiles unfilled.
const MIN_PIXELS: usize = 96;

/// Elements that register tiles may read past the end of a block.
pub(super) const READ_AHEAD: usize = 64;

/// Numbers in memory that begins at a cache line: a vector that crosses cache lines takes two reads.
pub(super) struct AlignedBuffer<T> {
    memory: Vec<T>,
    first: usize,
    count: usize,
}

impl<T: ConvNumber> AlignedBuffer<T> {
    /// A buffer of zeros.
    pub(super) fn new(count: usize) -> Self {
        const LINE: usize = 64;
        let memory = vec![T::ZERO; count + LINE / size_of::<T>()];
        let first = memory.as_ptr().align_offset(LINE);
        AlignedBuffer { memory, first, count }
    }

    pub(super) fn numbers(&mut self) -> &mut [T] {
        &mut self.memory[self.first..self.first + self.count]
    }
}

/// A block of the result: rows of one plane, or a part of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PixelBlock {
    pub(super) plane: usize,
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl PixelBlock {
    pub(super) fn pixels(&self) -> usize {
        self.rows.len() * self.columns.len()
    }
}

/// Source rows that are packed one after the other.
#[derive(Debug)]
struct RowRun {
    /// Where they begin, and how many more than the rows of the block they are.
    slot: usize,
    more: usize,
    /// Offset of the first.
    first: isize,
}

/// How blocks of a convolution are packed.
#[derive(Debug)]
pub(super) struct Packing {
    axes: [TapAxis; 3],
    /// Rows and columns of a full block.
    rows: usize,
    columns: usize,
    runs: Vec<RowRun>,
    /// Per tap along the height the slot of its first row.
    slots: Vec<usize>,
    /// Packed rows of a full block.
    packed_rows: usize,
}

impl Packing {
    /// Chooses blocks of at most [`BLOCK_BYTES`] where rows are short enough for it; depends on sizes only.
    pub(super) fn new(axes: [TapAxis; 3], channels: usize, bytes: usize) -> Self {
        let [_, height, width] = &axes;
        let planes = axes[0].taps.len() * width.taps.len();
        let pixel_bytes = (channels * planes * bytes).max(1);
        let slots = |rows: usize| Packing::row_slots(height, rows).2;
        let fits = |rows: usize| slots(rows) * width.count * pixel_bytes <= BLOCK_BYTES;
        let (rows, columns) = if fits(1) {
            // The number of packed rows grows with the rows of a block.
            let (mut low, mut high) = (1, height.count.max(1));
            while low < high {
                let middle = (low + high).div_ceil(2);
                if fits(middle) { low = middle } else { high = middle - 1 }
            }
            // Blocks of one height, instead of a low one at the end.
            (height.count.max(1).div_ceil(height.count.max(1).div_ceil(low)), width.count)
        } else {
            let most = (BLOCK_BYTES / (slots(1) * pixel_bytes)).max(MIN_PIXELS).min(width.count);
            (1, width.count.div_ceil(width.count.div_ceil(most)))
        };
        let (runs, slots, packed_rows) = Packing::row_slots(height, rows);
        Packing { axes, rows, columns, runs, slots, packed_rows }
    }

    /// The runs of source rows that blocks of `rows` rows read, the slot of every tap, and the number of slots.
    fn row_slots(height: &TapAxis, rows: usize) -> (Vec<RowRun>, Vec<usize>, usize) {
        let step = height.step as isize;
        let mut runs: Vec<RowRun> = Vec::new();
        let mut of_tap = vec![(0, 0); height.taps.len()];
        let mut next = 0;
        let mut ascending: Vec<usize> = (0..height.taps.len()).collect();
        ascending.sort_by_key(|&tap| height.taps[tap].1);
        for tap in ascending {
            let offset = height.taps[tap].1;
            // Taps whose offsets differ by a multiple of the step share rows, unless these are far apart.
            let shared = runs.iter().position(|run| {
                let distance = offset - run.first;
                distance.rem_euclid(step) == 0 && (0..=(rows + run.more) as isize).contains(&(distance / step))
            });
            match shared {
                Some(i) => {
                    let distance = ((offset - runs[i].first) / step) as usize;
                    of_tap[tap] = (i, distance);
                    runs[i].more = runs[i].more.max(distance);
                }
                None => {
                    of_tap[tap] = (runs.len(), 0);
                    runs.push(RowRun { slot: 0, more: 0, first: offset });
                }
            }
        }
        for run in &mut runs {
            run.slot = next;
            next += rows + run.more;
        }
        let slots = of_tap.iter().map(|&(i, distance)| runs[i].slot + distance).collect();
        (runs, slots, next)
    }

    /// Elements of a packed block, with what register tiles may read past its end.
    pub(super) fn scratch(&self, channels: usize) -> usize {
        channels * self.channel_stride(self.columns) + READ_AHEAD
    }

    /// Distance of channels in a packed block of `columns`.
    pub(super) fn channel_stride(&self, columns: usize) -> usize {
        self.axes[0].taps.len() * self.axes[2].taps.len() * self.packed_rows * columns
    }

    /// The element of the window of every tap, and the offset at which its pixels begin in a channel of a block of `columns`.
    pub(super) fn taps(&self, columns: usize) -> Vec<([usize; 3], usize)> {
        let [depth, height, width] = &self.axes;
        let mut taps = Vec::new();
        for (x, &(kx, _)) in width.taps.iter().enumerate() {
            for (z, &(kz, _)) in depth.taps.iter().enumerate() {
                for (y, &(ky, _)) in height.taps.iter().enumerate() {
                    let row = (x * depth.taps.len() + z) * self.packed_rows + self.slots[y];
                    taps.push(([kz, ky, kx], row * columns));
                }
            }
        }
        taps
    }

    /// The number of blocks of one image.
    pub(super) fn blocks(&self) -> usize {
        let [depth, height, width] = &self.axes;
        depth.count * height.count.div_ceil(self.rows) * width.count.div_ceil(self.columns.max(1))
    }

    pub(super) fn block(&self, index: usize) -> PixelBlock {
        let [_, height, width] = &self.axes;
        let across = width.count.div_ceil(self.columns);
        let down = height.count.div_ceil(self.rows);
        let (column, row, plane) = (index % across, index / across % down, index / across / down);
        PixelBlock {
            plane,
            rows: row * self.rows..((row + 1) * self.rows).min(height.count),
            columns: column * self.columns..((column + 1) * self.columns).min(width.count),
        }
    }

    /// The largest number of pixels of a block.
    pub(super) fn max_pixels(&self) -> usize {
        self.rows * self.columns
    }
}

/// Packs one block of the channels of one image.
pub(super) struct PackBlock<'a, S: ConvElement> {
    pub(super) packing: &'a Packing,
    pub(super) block: &'a PixelBlock,
    /// The channels, each of which is a contiguous volume of the source.
    pub(super) source: &'a [S],
    pub(super) packed: &'a mut [S::Number],
}

impl<S: ConvElement> simd::Kernel for PackBlock<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let [depth, height, width] = &self.packing.axes;
        let (rows, columns) = (self.packing.packed_rows, self.block.columns.len());
        let volume = depth.source * height.source * width.source;
        let stride = self.packing.channel_stride(columns);
        for (source, packed) in self.source.chunks_exact(volume).zip(self.packed.chunks_exact_mut(stride)) {
            let mut planes = packed.chunks_exact_mut(rows * columns);
            for &(_, x) in &width.taps {
                let start = (self.block.columns.start * width.step) as isize + x;
                let inside = valid(start, width.step, width.source, columns);
                let first = (start + (inside.start * width.step) as isize).max(0) as usize;
                for &(_, z) in &depth.taps {
                    let Some(plane) = planes.next() else { return };
                    let at = (self.block.plane * depth.step) as isize + z;
                    if at < 0 || at as usize >= depth.source {
                        plane.fill(S::Number::ZERO);
                        continue;
                    }
                    let slice = &source[at as usize * height.source * width.source..][..height.source * width.source];
                    for run in &self.packing.runs {
                        for row in 0..self.block.rows.len() + run.more {
                            let packed = &mut plane[(run.slot + row) * columns..][..columns];
                            let at = ((self.block.rows.start + row) * height.step) as isize + run.first;
                            if at < 0 || at as usize >= height.source || inside.is_empty() {
                                packed.fill(S::Number::ZERO);
                                continue;
                            }
                            let line = &slice[at as usize * width.source..][..width.source];
                            packed[..inside.start].fill(S::Number::ZERO);
                            packed[inside.end..].fill(S::Number::ZERO);
                            let packed = &mut packed[inside.clone()];
                            if width.step == 1 {
                                let line = &line[first..first + packed.len()];
                                packed.iter_mut().zip(line).for_each(|(to, from)| *to = from.widen());
                            } else {
                                let line = line[first..].iter().step_by(width.step);
                                packed.iter_mut().zip(line).for_each(|(to, from)| *to = from.widen());
                            }
                        }
                    }
                }
            }
        }
    }
}
