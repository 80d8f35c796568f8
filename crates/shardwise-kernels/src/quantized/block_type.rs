//! The types of blocks, by the names and numbers that GGUF files use.

use std::fmt;
use std::str::FromStr;

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, BlockQ8_1,
    BlockQ8K, GgmlType,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, ErrorKind, Result};

macro_rules! block_types {
    ($($variant:ident $name:literal $number:literal $block:ty, $doc:literal;)*) => {
        /// A type of quantized blocks: how many elements share one block, and how they are packed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum BlockType {
            $(#[doc = $doc] $variant,)*
        }

        impl BlockType {
            /// All types.
            pub const ALL: &'static [BlockType] = &[$(BlockType::$variant),*];

            /// Name in llama.cpp and GGUF files, such as `Q4_1`.
            pub fn name(self) -> &'static str {
                match self { $(BlockType::$variant => $name,)* }
            }

            /// Number that stands for the type in a GGUF file.
            pub fn number(self) -> u32 {
                match self { $(BlockType::$variant => $number,)* }
            }

            /// Number of elements of a block.
            pub fn elements(self) -> usize {
                match self { $(BlockType::$variant => <$block>::ELEMENTS,)* }
            }

            /// Number of bytes of a block. Two types may have the same: `IQ4_NL` and `Q4_0` both have 18.
            pub fn bytes(self) -> usize {
                match self { $(BlockType::$variant => <$block>::BYTES,)* }
            }

            fn expand(self, bytes: &[u8], into: &mut [f32]) {
                match self { $(BlockType::$variant => <$block>::expand(bytes, into),)* }
            }
        }
    };
}

block_types! {
    Q4_0 "Q4_0" 2 BlockQ4_0, "32 elements of 4 bits with a scale.";
    Q4_1 "Q4_1" 3 BlockQ4_1, "32 elements of 4 bits with a scale and a minimum.";
    Q5_0 "Q5_0" 6 BlockQ5_0, "32 elements of 5 bits with a scale.";
    Q5_1 "Q5_1" 7 BlockQ5_1, "32 elements of 5 bits with a scale and a minimum.";
    Q8_0 "Q8_0" 8 BlockQ8_0, "32 elements of 8 bits with a scale.";
    Q8_1 "Q8_1" 9 BlockQ8_1, "32 elements of 8 bits with a scale and a sum.";
    Q2K "Q2_K" 10 BlockQ2K, "256 elements of 2 bits in 16 groups with scales and minima of 4 bits.";
    Q3K "Q3_K" 11 BlockQ3K, "256 elements of 3 bits in 16 groups with scales of 6 bits.";
    Q4K "Q4_K" 12 BlockQ4K, "256 elements of 4 bits in 8 groups with scales and minima of 6 bits.";
    Q5K "Q5_K" 13 BlockQ5K, "256 elements of 5 bits in 8 groups with scales and minima of 6 bits.";
    Q6K "Q6_K" 14 BlockQ6K, "256 elements of 6 bits in 16 groups with scales of 8 bits.";
    Q8K "Q8_K" 15 BlockQ8K, "256 elements of 8 bits with a scale of 32 bits, and sums.";
    IQ4NL "IQ4_NL" 20 BlockIQ4NL, "32 elements of 4 bits, numbers of 16 values that are not evenly spaced, with a scale.";
}

impl BlockType {
    /// Returns the type with a number of GGUF files, `None` if it is not one of these.
    pub fn from_number(number: u32) -> Option<BlockType> {
        BlockType::ALL.iter().copied().find(|block| block.number() == number)
    }

    /// Expands blocks to f32.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] if `bytes` are not the blocks of as many elements as `into` has.
    pub fn dequantize(self, bytes: &[u8], into: &mut [f32]) -> Result<()> {
        if !bytes.len().is_multiple_of(self.bytes()) || bytes.len() / self.bytes() * self.elements() != into.len() {
            let found = format!("{} bytes of {self} for {} elements", bytes.len(), into.len());
            let needed = format!("{} bytes per {} elements", self.bytes(), self.elements());
            return Err(ErrorKind::Argument.error("quantized blocks", found, needed, "pass whole blocks"));
        }
        self.expand(bytes, into);
        Ok(())
    }
}

/// Blocks of one type.
trait ExpandBlocks {
    /// Elements of a block.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;

    /// Expands blocks: `bytes` are whole ones, and `into` is as long as their elements.
    fn expand(bytes: &[u8], into: &mut [f32]);
}

/// The types that candle has.
impl<B: GgmlType + Clone> ExpandBlocks for B {
    const ELEMENTS: usize = B::BLCK_SIZE;
    const BYTES: usize = size_of::<B>();

    fn expand(bytes: &[u8], into: &mut [f32]) {
        // SAFETY: blocks are integers and half floats in C order, for which every bit pattern is valid.
        let (before, blocks, after) = unsafe { bytes.align_to::<B>() };
        if before.is_empty() && after.is_empty() {
            return B::to_float(blocks, into);
        }
        // The bytes are not aligned: a copy is.
        let mut blocks = vec![B::zeros(); bytes.len() / size_of::<B>()];
        // SAFETY: the lengths are equal and the regions distinct; any bytes are valid blocks.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), blocks.as_mut_ptr().cast::<u8>(), bytes.len()) };
        B::to_float(&blocks, into);
    }
}

/// A scale in half precision, and 32 numbers of 4 bits: of byte `i` the lower ones are element `i`, the upper ones `i + 16`.
enum BlockIQ4NL {}

impl BlockIQ4NL {
    /// What the numbers stand for, as llama.cpp defines it: close to the quantiles of a normal distribution.
    const VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
}

impl ExpandBlocks for BlockIQ4NL {
    const ELEMENTS: usize = 32;
    const BYTES: usize = 18;

    fn expand(bytes: &[u8], into: &mut [f32]) {
        for (block, into) in bytes.chunks_exact(Self::BYTES).zip(into.chunks_exact_mut(Self::ELEMENTS)) {
            let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
            let (lower, upper) = into.split_at_mut(16);
            for ((lower, upper), byte) in lower.iter_mut().zip(upper).zip(&block[2..]) {
                *lower = scale * f32::from(Self::VALUES[usize::from(byte & 15)]);
                *upper = scale * f32::from(Self::VALUES[usize::from(byte >> 4)]);
            }
        }
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BlockType {
    type Err = Error;

    /// Parses a name such as `Q4_1`, ignoring case.
    fn from_str(text: &str) -> Result<Self> {
        BlockType::ALL.iter().copied().find(|block| block.name().eq_ignore_ascii_case(text)).ok_or_else(|| {
            let all: Vec<&str> = BlockType::ALL.iter().map(|block| block.name()).collect();
            ErrorKind::unknown(text).error("block type", format!("{text:?}"), all.join(", "), "use one of these")
        })
    }
}

impl Serialize for BlockType {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for BlockType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_known_by_their_number_and_name() {
        for &block in BlockType::ALL {
            assert_eq!(BlockType::from_number(block.number()), Some(block));
            assert_eq!(block.name().parse::<BlockType>().unwrap(), block);
        }
        assert!("Q9_9".parse::<BlockType>().is_err() && BlockType::from_number(1).is_none());
        assert!(BlockType::Q8_0.dequantize(&[0; 33], &mut [0.0; 32]).is_err());
        // Bytes at an odd address are blocks too.
        let mut bytes = [0u8; 35];
        bytes[1..3].copy_from_slice(&0x3c00u16.to_le_bytes());
        bytes[3] = 5;
        let mut elements = [0.0; 32];
        BlockType::Q8_0.dequantize(&bytes[1..], &mut elements).unwrap();
        assert_eq!(elements[..2], [5.0, 0.0]);
    }

    /// The same bytes are other elements: the type is not in the bytes.
    #[test]
    fn types_of_one_size_are_expanded_differently() {
        let mut bytes = [0u8; 36];
        for block in bytes.chunks_exact_mut(18) {
            block[..2].copy_from_slice(&0x3800u16.to_le_bytes());
            block[2] = 0xf0;
            block[17] = 0x08;
        }
        assert_eq!(BlockType::IQ4NL.bytes(), BlockType::Q4_0.bytes());
        let expanded = |block: BlockType| {
            let mut elements = [0.0; 64];
            block.dequantize(&bytes, &mut elements).unwrap();
            assert_eq!(elements[..32], elements[32..]);
            [0, 1, 15, 16, 31].map(|i| elements[i])
        };
        assert_eq!(expanded(BlockType::IQ4NL), [-63.5, -63.5, 0.5, 56.5, -63.5]);
        assert_eq!(expanded(BlockType::Q4_0), [-4.0, -4.0, 0.0, 3.5, -4.0]);
    }
}
