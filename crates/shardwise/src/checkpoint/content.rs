//! The elements of a box that is to be written: from memory, or from another checkpoint.

use std::io::{Seek, Write};
use std::sync::Arc;

use candle_core::Tensor;

use super::blocks::BlockHasher;
use super::cast::converted;
use super::element::ElementType;
use super::files::Files;
use super::stored::{Chunk, StoredTensor};
use crate::error::Result;
use crate::layout::TensorBox;
use shardwise_kernels::with_bytes;

/// A box of a tensor that is to be written to a file.
pub struct BoxToWrite {
    /// Flat key of the tensor.
    pub key: String,
    /// The box.
    pub part: TensorBox,
    /// Whether it is all of the tensor.
    pub is_whole: bool,
    /// Its elements.
    pub(super) content: Content,
}

impl BoxToWrite {
    /// Type of its elements in the file.
    pub fn element(&self) -> ElementType {
        self.content.element()
    }

    /// Number of bytes that its elements take.
    pub fn bytes(&self) -> usize {
        self.content.bytes()
    }

    /// Hands over all bytes, row-major and little-endian, a bounded number at a time.
    pub fn for_each_block(&self, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.content.for_each_block(take)
    }

    /// Writes all bytes where `out` is now, and returns the chunk that they are, with checksums. `file` is the name of the
    /// file, and `progress` is called with numbers of bytes.
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
        Ok(Chunk { part, file, offset, strides: None, crc32: Some(crc32), blocks: Some(blocks) })
    }
}

/// What is to be written of a tensor.
pub(super) enum Content {
    /// A dense tensor in memory.
    Memory {
        /// How its elements are called in files.
        element: ElementType,
        /// The tensor.
        tensor: Tensor,
    },
    /// A box of a tensor in another checkpoint, converted on the way.
    Stored {
        /// The files of that checkpoint.
        files: Arc<Files>,
        /// Its name there.
        key: String,
        /// Where it is there.
        tensor: Arc<StoredTensor>,
        /// The box.
        part: TensorBox,
        /// The type that is written.
        element: ElementType,
    },
}

/// How much is read from another checkpoint at a time.
const BLOCK: usize = 16 << 20;

impl Content {
    pub(super) fn element(&self) -> ElementType {
        match self {
            Content::Memory { element, .. } | Content::Stored { element, .. } => *element,
        }
    }

    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Content::Memory { tensor, .. } => tensor.dims(),
            Content::Stored { part, .. } => &part.sizes,
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.shape().iter().product::<usize>() * self.element().size_in_bytes()
    }

    /// Hands over all bytes, row-major, a bounded number at a time.
    pub(super) fn for_each_block(&self, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match self {
            Content::Memory { tensor, .. } => with_bytes(tensor, |bytes| bytes.chunks(BLOCK).try_for_each(&mut *take))?,
            Content::Stored { files, key, tensor, part, element } => {
                let mut buffer = Vec::new();
                for piece in pieces(part, BLOCK / tensor.element.size_in_bytes()) {
                    buffer.resize(piece.volume() * tensor.element.size_in_bytes(), 0);
                    files.read_box(key, tensor, &piece, &mut buffer)?;
                    take(&converted(&buffer, tensor.element, *element)?)?;
                }
                Ok(())
            }
        }
    }
}

/// A box cut into boxes of so many elements at most, in row-major order.
pub(super) fn pieces(part: &TensorBox, elements: usize) -> Vec<TensorBox> {
    if part.volume() <= elements.max(1) {
        return if part.volume() == 0 { Vec::new() } else { vec![part.clone()] };
    }
    let dim = part.sizes.iter().position(|&n| n > 1).expect("more than one element");
    let inner = part.volume() / part.sizes[dim];
    let rows = (elements / inner).max(1);
    let slab = |start: usize| {
        let mut slab = part.clone();
        slab.offsets[dim] += start;
        slab.sizes[dim] = rows.min(part.sizes[dim] - start);
        slab
    };
    (0..part.sizes[dim]).step_by(rows).flat_map(|start| pieces(&slab(start), elements)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_small_and_make_up_the_box_in_order() {
        for sizes in [vec![7, 5, 3], vec![1, 1, 100], vec![4], vec![], vec![0, 3]] {
            for elements in [1, 2, 7, 15, 1000] {
                let part = TensorBox { offsets: vec![2; sizes.len()], sizes: sizes.clone() };
                let all = pieces(&part, elements);
                assert!(all.iter().all(|p| p.volume() <= elements));
                assert_eq!(all.iter().map(TensorBox::volume).sum::<usize>(), part.volume());
                assert!(all.windows(2).all(|w| w[0].offsets < w[1].offsets));
            }
        }
    }
}
