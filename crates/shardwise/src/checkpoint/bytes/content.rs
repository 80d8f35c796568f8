//! The elements of a box that is written to a checkpoint: from memory, or from another checkpoint.

use std::io::{Seek, Write};
use std::sync::Arc;

use candle_core::Tensor;

use crate::checkpoint::bytes::cast::convert_elements;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::blocks::BlockHasher;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Chunk, StoredTensor};
use crate::error::Result;
use crate::layout::TensorBox;
use shardwise_kernels::with_bytes;

/// A box of a tensor that a [`FormatWriter`](crate::checkpoint::FormatWriter) writes to a file.
pub struct BoxToWrite {
    /// Flat key of the tensor.
    pub key: String,
    /// Offsets and sizes of the box in the tensor.
    pub part: TensorBox,
    /// Whether the box is the whole tensor.
    pub is_whole: bool,
    /// Where the elements come from.
    pub(in crate::checkpoint) content: BoxContent,
}

impl BoxToWrite {
    /// Element type to write.
    pub fn element(&self) -> ElementType {
        self.content.element()
    }

    /// Number of bytes that [`write`](Self::write) writes.
    pub fn bytes(&self) -> usize {
        self.content.bytes()
    }

    /// Calls `take` with all bytes in order, row-major and little-endian, at most 16 MiB at a time.
    pub fn for_each_block(&self, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.content.for_each_block(take)
    }

    /// Writes all bytes at the current position of `out` and returns the chunk's metadata with checksums.
    ///
    /// `file` is the name that is stored in the metadata; `progress` is called with the number of bytes of each block.
    pub fn write(&self, out: &mut (impl Write + Seek), file: &str, progress: &dyn Fn(u64)) -> Result<Chunk> {
        let offset = out.stream_position()?;
        let mut hasher = BlockHasher::new(self.bytes() as u64);
        self.for_each_block(&mut |block| {
            hasher.update(block);
            progress(block.len() as u64);
            Ok(out.write_all(block)?)
        })?;
        let (crc32, blocks) = hasher.finish();
        let (part, file) = (self.part.clone(), file.to_string());
        Ok(Chunk { part, file, offset, strides: None, crc32: Some(crc32), blocks: Some(blocks), encoding: None })
    }
}

/// Where the elements of a box that is written come from.
pub(in crate::checkpoint) enum BoxContent {
    /// A dense tensor in memory.
    Memory {
        /// Element type to write; of the same representation as the tensor's dtype.
        element: ElementType,
        /// The elements of the box.
        tensor: Tensor,
    },
    /// A box of a tensor in another checkpoint, converted while it is copied.
    Stored {
        /// The files of the source checkpoint.
        files: Arc<Files>,
        /// Flat key of the tensor in the source.
        key: String,
        /// Metadata of the tensor in the source.
        tensor: Arc<StoredTensor>,
        /// The box to copy.
        part: TensorBox,
        /// Element type to write.
        element: ElementType,
    },
}

/// Bytes that are read from another checkpoint at a time: long sequential reads, and the bound on a conversion's memory per
/// writing thread.
const READ_BYTES: usize = 16 << 20;

impl BoxContent {
    pub(in crate::checkpoint) fn element(&self) -> ElementType {
        match self {
            BoxContent::Memory { element, .. } | BoxContent::Stored { element, .. } => *element,
        }
    }

    pub(in crate::checkpoint) fn shape(&self) -> &[usize] {
        match self {
            BoxContent::Memory { tensor, .. } => tensor.dims(),
            BoxContent::Stored { part, .. } => &part.sizes,
        }
    }

    pub(in crate::checkpoint) fn bytes(&self) -> usize {
        self.shape().iter().product::<usize>() * self.element().size_in_bytes()
    }

    /// Calls `take` with all bytes in row-major order, at most [`READ_BYTES`] of the source at a time.
    pub(in crate::checkpoint) fn for_each_block(&self, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match self {
            BoxContent::Memory { tensor, .. } => {
                with_bytes(tensor, |bytes| bytes.chunks(READ_BYTES).try_for_each(&mut *take))?
            }
            BoxContent::Stored { files, key, tensor, part, element } => {
                let mut buffer = Vec::new();
                for piece in split_box(part, READ_BYTES / tensor.element.size_in_bytes()) {
                    buffer.resize(piece.volume() * tensor.element.size_in_bytes(), 0);
                    files.read_box(key, tensor, &piece, &mut buffer)?;
                    take(&convert_elements(&buffer, tensor.element, *element)?)?;
                }
                Ok(())
            }
        }
    }
}

/// Splits a box into boxes of at most `elements` elements, in row-major order.
pub(in crate::checkpoint) fn split_box(part: &TensorBox, elements: usize) -> Vec<TensorBox> {
    if part.volume() <= elements.max(1) {
        return if part.volume() == 0 { Vec::new() } else { vec![part.clone()] };
    }
    let dim = part.sizes.iter().position(|&n| n > 1).expect("a box of several elements has a dimension above 1");
    let inner = part.volume() / part.sizes[dim];
    let rows = (elements / inner).max(1);
    let slab = |start: usize| {
        let mut slab = part.clone();
        slab.offsets[dim] += start;
        slab.sizes[dim] = rows.min(part.sizes[dim] - start);
        slab
    };
    (0..part.sizes[dim]).step_by(rows).flat_map(|start| split_box(&slab(start), elements)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_boxes_are_small_and_cover_the_box_in_order() {
        for sizes in [vec![7, 5, 3], vec![1, 1, 100], vec![4], vec![], vec![0, 3]] {
            for elements in [1, 2, 7, 15, 1000] {
                let part = TensorBox { offsets: vec![2; sizes.len()], sizes: sizes.clone() };
                let all = split_box(&part, elements);
                assert!(all.iter().all(|p| p.volume() <= elements));
                assert_eq!(all.iter().map(TensorBox::volume).sum::<usize>(), part.volume());
                assert!(all.windows(2).all(|w| w[0].offsets < w[1].offsets));
            }
        }
    }
}
