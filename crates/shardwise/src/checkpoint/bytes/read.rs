//! Reading boxes of tensors: only the bytes that are needed, directly into the target, each verified by its checksum.

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::blocks::BlockChecksums;
use crate::checkpoint::metadata::encoding::ChunkEncoding;
use crate::checkpoint::metadata::stored::{Chunk, StoredTensor, row_major};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;

/// Runs shorter than this are read together with the bytes between them: below it a system call costs more than the bytes.
pub(in crate::checkpoint) const SHORT_RUN: usize = 16 << 10;
/// Runs further apart than this are read one by one: reading the gap would cost more than another call.
pub(in crate::checkpoint) const FAR_APART: u64 = 256 << 10;
/// Bytes that are read at a time: few enough to still be in the core's cache when they are hashed and copied.
pub(in crate::checkpoint) const WINDOW: u64 = 1 << 20;

impl Files {
    /// Fills `into` with a box of a tensor, row-major, from the chunks that overlap it. Chunks with block checksums are read by
    /// whole blocks and verified; a chunk with a single checksum is verified only if all of it is read.
    pub(in crate::checkpoint) fn read_box(
        &self,
        key: &str,
        tensor: &StoredTensor,
        part: &TensorBox,
        into: &mut [u8],
    ) -> Result<()> {
        for chunk in &tensor.chunks {
            let Some(both) = chunk.part.intersect(part) else { continue };
            let size = tensor.element.size_in_bytes();
            self.check_first(&chunk.file)?;
            if let Some(ChunkEncoding::Quantized(block)) = chunk.encoding {
                let bytes = self.read_quantized(chunk, block, &both, part, into)?;
                self.count(key, bytes, false);
                continue;
            }
            let runs = ByteRuns::new(chunk, &both, part, size);
            let bytes = (both.volume() * size) as u64;
            if let (Some(blocks), Some(length), None) = (&chunk.blocks, chunk.span(tensor.element), &chunk.strides) {
                let window = ReadWindow { start: 0, bytes: Vec::new() };
                BlockReader { files: self, key, chunk, blocks, length, window }.read_runs(&runs, into)?;
                self.count(key, bytes, true);
                continue;
            }
            self.read_runs(chunk, &runs, into)?;
            let whole_crc = chunk.crc32.filter(|_| both == chunk.part && chunk.strides.is_none());
            if let Some(expected) = whole_crc {
                let mut hasher = crc32fast::Hasher::new();
                runs.for_each(|_, target| {
                    hasher.update(&into[target..target + runs.bytes]);
                    Ok(())
                })?;
                check_crc(key, chunk, 0, expected, hasher.finalize())?;
            }
            self.count(key, bytes, whole_crc.is_some());
            if chunk.encoding == Some(ChunkEncoding::PlusOne) {
                Files::subtract_one(&runs, into)?;
            }
        }
        Ok(())
    }

    pub(in crate::checkpoint) fn read_runs(&self, chunk: &Chunk, runs: &ByteRuns, into: &mut [u8]) -> Result<()> {
        if runs.bytes >= SHORT_RUN || runs.step() > FAR_APART {
            return runs.for_each(|source, target| {
                self.read(&chunk.file, chunk.offset + source, &mut into[target..target + runs.bytes])
            });
        }
        let mut window = ReadWindow { start: 0, bytes: Vec::new() };
        runs.for_each(|source, target| {
            let end = source + runs.bytes as u64;
            if !window.covers(source, end) {
                window.start = source;
                window.bytes.resize((runs.end - source).min(WINDOW).max(runs.bytes as u64) as usize, 0);
                self.read(&chunk.file, chunk.offset + source, &mut window.bytes)?;
            }
            into[target..target + runs.bytes].copy_from_slice(window.get(source, end));
            Ok(())
        })
    }
}

/// A buffered byte range of a chunk.
struct ReadWindow {
    start: u64,
    bytes: Vec<u8>,
}

impl ReadWindow {
    fn covers(&self, from: u64, to: u64) -> bool {
        from >= self.start && to <= self.start + self.bytes.len() as u64
    }

    fn get(&self, from: u64, to: u64) -> &[u8] {
        &self.bytes[(from - self.start) as usize..(to - self.start) as usize]
    }
}

/// Reads a chunk by whole blocks; no byte of a block is used before its checksum is verified.
struct BlockReader<'a> {
    files: &'a Files,
    key: &'a str,
    chunk: &'a Chunk,
    blocks: &'a BlockChecksums,
    /// Length of the chunk in bytes.
    length: u64,
    /// The blocks that were read last: neighbouring runs share them.
    window: ReadWindow,
}

impl BlockReader<'_> {
    fn read_runs(&mut self, runs: &ByteRuns, into: &mut [u8]) -> Result<()> {
        // Where nearly every block has a run, or runs are short, many blocks are read at a time, gaps included.
        let near = runs.step() <= 2 * self.blocks.block_bytes || runs.bytes < SHORT_RUN && runs.step() <= FAR_APART;
        let ahead = if near && !runs.sizes.is_empty() { WINDOW.min(runs.end - runs.source) } else { 0 };
        runs.for_each(|source, target| self.read(source, runs, ahead, &mut into[target..target + runs.bytes]))
    }

    /// Fills `into` with the bytes from `source` on.
    fn read(&mut self, source: u64, runs: &ByteRuns, ahead: u64, into: &mut [u8]) -> Result<()> {
        let (block, end) = (self.blocks.block_bytes, source + into.len() as u64);
        let (first, last) =
            (source.next_multiple_of(block), if end == self.length { end } else { end / block * block });
        if ahead > 0 || first >= last {
            let whole = self.load(source, end, ahead, runs.end)?;
            into.copy_from_slice(whole.get(source, end));
            return Ok(());
        }
        // Blocks that are needed completely are read into the target; those at both ends go through the window.
        let (head, rest) = into.split_at_mut((first - source) as usize);
        let (inner, tail) = rest.split_at_mut((last - first) as usize);
        if !head.is_empty() {
            head.copy_from_slice(self.load(source, first, 0, runs.end)?.get(source, first));
        }
        let mut at = first;
        for piece in inner.chunks_mut(WINDOW.next_multiple_of(block) as usize) {
            self.fill(at, piece)?;
            at += piece.len() as u64;
        }
        if !tail.is_empty() {
            tail.copy_from_slice(self.load(last, end, 0, runs.end)?.get(last, end));
        }
        Ok(())
    }

    /// Returns the window with a range in it, reading up to `ahead` bytes further if they will be needed.
    fn load(&mut self, from: u64, to: u64, ahead: u64, needed: u64) -> Result<&ReadWindow> {
        if !self.window.covers(from, to) {
            let block = self.blocks.block_bytes;
            let start = from / block * block;
            let end = to.max(needed.min(start + ahead)).next_multiple_of(block).min(self.length);
            let mut bytes = std::mem::take(&mut self.window.bytes);
            bytes.resize((end - start) as usize, 0);
            self.fill(start, &mut bytes)?;
            self.window = ReadWindow { start, bytes };
        }
        Ok(&self.window)
    }

    /// Reads and verifies whole blocks from byte `start` on, which is the beginning of a block.
    fn fill(&self, start: u64, into: &mut [u8]) -> Result<()> {
        self.files.read(&self.chunk.file, self.chunk.offset + start, into)?;
        let first = (start / self.blocks.block_bytes) as usize;
        for (i, block) in into.chunks(self.blocks.block_bytes as usize).enumerate() {
            let at = start + i as u64 * self.blocks.block_bytes;
            check_crc(self.key, self.chunk, at, self.blocks.crc32[first + i], crc32fast::hash(block))?;
        }
        Ok(())
    }
}

/// Compares the checksum of a chunk, or of its block that begins at byte `at`, with the stored one.
pub(in crate::checkpoint) fn check_crc(key: &str, chunk: &Chunk, at: u64, expected: u32, found: u32) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(ErrorKind::Damaged.error(
        "checkpoint",
        format!(
            "checksum {found:08x} for the chunk of tensor {key:?} at byte {} of {:?}",
            chunk.offset + at,
            chunk.file
        ),
        format!("{expected:08x}"),
        "the file is damaged; copy or save it again",
    ))
}

/// Byte ranges that are contiguous both in a chunk and in the target box, in the chunk's order.
pub(in crate::checkpoint) struct ByteRuns {
    /// Sizes of the dimensions that are iterated over; the dimensions inside them form one run.
    sizes: Vec<usize>,
    /// Byte steps in the chunk and in the target for each of these dimensions.
    source_steps: Vec<u64>,
    target_steps: Vec<usize>,
    source: u64,
    target: usize,
    /// Length of a run.
    pub(in crate::checkpoint) bytes: usize,
    /// End of the last byte that is needed of the chunk.
    pub(in crate::checkpoint) end: u64,
}

impl ByteRuns {
    /// The runs of the box `both`, the intersection of the chunk with the box `target`.
    pub(in crate::checkpoint) fn new(chunk: &Chunk, both: &TensorBox, target: &TensorBox, size: usize) -> Self {
        let (strides, target_strides) = (chunk.strides(), row_major(&target.sizes));
        let start = |inner: &TensorBox, strides: &[usize]| -> usize {
            both.offsets.iter().zip(&inner.offsets).zip(strides).map(|((b, o), s)| (b - o) * s).sum()
        };
        let (source, offset) = (start(&chunk.part, &strides), start(target, &target_strides));
        let last: usize = both.sizes.iter().zip(&strides).map(|(n, s)| (n - 1) * s).sum();
        // Dimensions join the run from the last one on, as long as both sides are contiguous.
        let (mut dims, mut run) = (both.sizes.len(), 1);
        while dims > 0 && (both.sizes[dims - 1] == 1 || strides[dims - 1] == run && target_strides[dims - 1] == run) {
            run *= both.sizes[dims - 1];
            dims -= 1;
        }
        // A transposed chunk is iterated in file order, so that each of its bytes is read once.
        let mut order: Vec<usize> = (0..dims).filter(|&dim| both.sizes[dim] != 1).collect();
        order.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
        ByteRuns {
            sizes: order.iter().map(|&dim| both.sizes[dim]).collect(),
            source_steps: order.iter().map(|&dim| (strides[dim] * size) as u64).collect(),
            target_steps: order.iter().map(|&dim| target_strides[dim] * size).collect(),
            source: (source * size) as u64,
            target: offset * size,
            bytes: run * size,
            end: ((source + last + 1) * size) as u64,
        }
    }

    /// Distance from one run to the next in the chunk.
    pub(in crate::checkpoint) fn step(&self) -> u64 {
        self.source_steps.last().copied().unwrap_or(0)
    }

    pub(in crate::checkpoint) fn for_each(&self, mut visit: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
        let mut index = vec![0; self.sizes.len()];
        let (mut source, mut target) = (self.source, self.target);
        loop {
            visit(source, target)?;
            let mut dim = self.sizes.len();
            loop {
                if dim == 0 {
                    return Ok(());
                }
                dim -= 1;
                index[dim] += 1;
                source += self.source_steps[dim];
                target += self.target_steps[dim];
                if index[dim] < self.sizes[dim] {
                    break;
                }
                source -= self.source_steps[dim] * self.sizes[dim] as u64;
                target -= self.target_steps[dim] * self.sizes[dim];
                index[dim] = 0;
            }
        }
    }
}
