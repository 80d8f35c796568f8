//! How the elements of a chunk are stored, where that is not plain elements of the tensor's type.

use serde::{Deserialize, Serialize};
use shardwise_kernels::quantized::BlockType;

use crate::checkpoint::metadata::element::ElementType;

/// An encoding of the elements of a chunk. They are decoded while they are read, and seen as `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ChunkEncoding {
    /// Quantized blocks. One stride of the chunk is 1; the other ones are multiples of the elements of a block.
    Quantized(BlockType),
    /// Every element is stored with 1 added, as GGUF files have the norm weights of Gemma.
    PlusOne,
}

impl ChunkEncoding {
    /// Number of bytes from the first of `elements` consecutive elements to the end of the last one; `None` if it overflows.
    pub(in crate::checkpoint) fn bytes(self, elements: u64, element: ElementType) -> Option<u64> {
        match self {
            ChunkEncoding::Quantized(block) => {
                elements.div_ceil(block.elements() as u64).checked_mul(block.bytes() as u64)
            }
            ChunkEncoding::PlusOne => elements.checked_mul(element.size_in_bytes() as u64),
        }
    }

    /// Whether a chunk of these strides and sizes can be stored so: blocks begin where rows begin.
    pub(in crate::checkpoint) fn fits(self, strides: &[usize], sizes: &[usize]) -> bool {
        let ChunkEncoding::Quantized(block) = self else { return true };
        let moves = strides.iter().zip(sizes).filter(|&(_, &size)| size > 1).map(|(&stride, _)| stride);
        let (ones, others): (Vec<usize>, Vec<usize>) = moves.partition(|&stride| stride == 1);
        ones.len() <= 1 && others.iter().all(|stride| *stride > 0 && stride.is_multiple_of(block.elements()))
    }
}
