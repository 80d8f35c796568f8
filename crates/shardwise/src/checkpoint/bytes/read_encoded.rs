//! Reading boxes of encoded chunks: quantized blocks are expanded to `f32` while they are read.

use shardwise_kernels::quantized::BlockType;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::bytes::read::{ByteRuns, FAR_APART, SHORT_RUN, WINDOW};
use crate::checkpoint::metadata::encoding::ChunkEncoding;
use crate::checkpoint::metadata::stored::{Chunk, StoredTensor};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;

/// Elements that are expanded at a time: their `f32` fit into the cache of a core.
const EXPANDED: u64 = 1 << 16;

impl Files {
    /// Fills the box `both` of a chunk of quantized blocks into the box `part`, as `f32`. Reads only blocks that the box
    /// touches, and the bytes between them where they are too few for a separate read. Returns the bytes of these blocks.
    pub(in crate::checkpoint) fn read_quantized(
        &self,
        chunk: &Chunk,
        block: BlockType,
        both: &TensorBox,
        part: &TensorBox,
        into: &mut [u8],
    ) -> Result<u64> {
        // In elements: a step of one byte stands for an element.
        let runs = ByteRuns::new(chunk, both, part, 1);
        let (elements, bytes) = (block.elements() as u64, block.bytes() as u64);
        let is_short = (runs.bytes as u64) / elements * bytes < SHORT_RUN as u64;
        let is_near = is_short && runs.step() / elements * bytes <= FAR_APART;
        let ahead = if is_near { runs.end.div_ceil(elements) } else { 0 };
        let mut reader = QuantizedReader::new(self, chunk, block, ahead);
        runs.for_each(|source, target| {
            let (mut at, end) = (source, source + runs.bytes as u64);
            while at < end {
                let until = end.min(at / elements * elements + EXPANDED);
                let values = reader.elements(at, until, end)?;
                let first = target + (at - source) as usize;
                let place = &mut into[first * 4..(first + values.len()) * 4];
                for (place, value) in place.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                    *place = value.to_le_bytes();
                }
                at = until;
            }
            Ok(())
        })?;
        Ok(reader.blocks_used * bytes)
    }

    /// Fills `into` with a box of a quantized tensor as it is stored: `[.., blocks, bytes of a block]`. `part` is in elements
    /// and begins and ends between blocks.
    pub(in crate::checkpoint) fn read_blocks(
        &self,
        key: &str,
        tensor: &StoredTensor,
        block: BlockType,
        part: &TensorBox,
        into: &mut [u8],
    ) -> Result<()> {
        let elements = block.elements();
        let refused = |found: String| {
            let needed = format!("rows of whole {block} blocks, {elements} elements each");
            Err(ErrorKind::Argument.error("quantized tensor", found, needed, "read it as f32"))
        };
        // A block is an element of as many bytes.
        let in_blocks = |part: &TensorBox| {
            let mut scaled = part.clone();
            let last = scaled.sizes.len() - 1;
            let is_whole = part.offsets[last].is_multiple_of(elements) && part.sizes[last].is_multiple_of(elements);
            scaled.offsets[last] /= elements;
            scaled.sizes[last] /= elements;
            is_whole.then_some(scaled)
        };
        let Some(target) = (!part.sizes.is_empty()).then(|| in_blocks(part)).flatten() else {
            return refused(format!("a box of sizes {:?} at {:?} of {key:?}", part.sizes, part.offsets));
        };
        for chunk in &tensor.chunks {
            let Some(both) = chunk.part.intersect(part) else { continue };
            let mut strides = chunk.strides();
            let is_row_major = strides.pop() == Some(1) && chunk.encoding == Some(ChunkEncoding::Quantized(block));
            let (Some(scaled), Some(both), true) = (in_blocks(&chunk.part), in_blocks(&both), is_row_major) else {
                return refused(format!("a chunk of {key:?} with strides {:?}", chunk.strides()));
            };
            let strides = strides.iter().map(|stride| stride / elements).chain([1]).collect();
            let scaled = Chunk { part: scaled, strides: Some(strides), ..chunk.clone() };
            self.check_first(&chunk.file)?;
            let runs = ByteRuns::new(&scaled, &both, &target, block.bytes());
            self.read_runs(chunk, &runs, into)?;
            self.count(key, (both.volume() * block.bytes()) as u64, false);
        }
        Ok(())
    }

    /// Subtracts 1 from the `f32` elements of the runs that were just read.
    pub(in crate::checkpoint) fn subtract_one(runs: &ByteRuns, into: &mut [u8]) -> Result<()> {
        runs.for_each(|_, target| {
            for element in into[target..target + runs.bytes].as_chunks_mut::<4>().0 {
                *element = (f32::from_le_bytes(*element) - 1.0).to_le_bytes();
            }
            Ok(())
        })
    }
}

/// Expands ranges of elements of a chunk, which come in file order.
struct QuantizedReader<'a> {
    files: &'a Files,
    chunk: &'a Chunk,
    block: BlockType,
    /// Block up to which bytes are read ahead, because all blocks until there are near each other.
    ahead: u64,
    /// The bytes of blocks `first_raw..`, as they are in the file.
    raw: Vec<u8>,
    first_raw: u64,
    /// The elements of blocks `first_expanded..`.
    expanded: Vec<f32>,
    first_expanded: u64,
    /// Blocks that were needed so far, and the end of the last one: neighbouring ranges share blocks.
    blocks_used: u64,
    used_until: u64,
}

impl<'a> QuantizedReader<'a> {
    fn new(files: &'a Files, chunk: &'a Chunk, block: BlockType, ahead: u64) -> Self {
        QuantizedReader {
            files,
            chunk,
            block,
            ahead,
            raw: Vec::new(),
            first_raw: 0,
            expanded: Vec::new(),
            first_expanded: 0,
            blocks_used: 0,
            used_until: 0,
        }
    }

    /// The elements `from..to`; those up to `end` will be needed next.
    fn elements(&mut self, from: u64, to: u64, end: u64) -> Result<&[f32]> {
        let elements = self.block.elements() as u64;
        let (first, last) = (from / elements, to.div_ceil(elements));
        self.blocks_used += last - first.max(self.used_until).min(last);
        self.used_until = self.used_until.max(last);
        let known = self.first_expanded..self.first_expanded + self.expanded.len() as u64 / elements;
        if !(known.contains(&first) && last <= known.end) {
            self.expanded.resize(((last - first) * elements) as usize, 0.0);
            let (start, length) = (self.load(first, last, end.div_ceil(elements))?, last - first);
            let bytes = &self.raw[start..start + length as usize * self.block.bytes()];
            self.block.dequantize(bytes, &mut self.expanded)?;
            self.first_expanded = first;
        }
        let offset = self.first_expanded * elements;
        Ok(&self.expanded[(from - offset) as usize..(to - offset) as usize])
    }

    /// Reads the blocks `first..last` unless they are in memory. Returns where their bytes begin in `raw`.
    fn load(&mut self, first: u64, last: u64, end: u64) -> Result<usize> {
        let bytes = self.block.bytes() as u64;
        let known = self.first_raw..self.first_raw + self.raw.len() as u64 / bytes;
        if !(known.contains(&first) && last <= known.end) {
            let until = end.max(self.ahead).min(first + WINDOW / bytes).max(last);
            self.raw.resize(((until - first) * bytes) as usize, 0);
            self.files.read(&self.chunk.file, self.chunk.offset + first * bytes, &mut self.raw)?;
            self.first_raw = first;
        }
        Ok(((first - self.first_raw) * bytes) as usize)
    }
}
