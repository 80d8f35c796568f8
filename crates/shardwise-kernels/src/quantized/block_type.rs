//! The types of blocks, by the names and numbers that GGUF files use.

use std::fmt;
use std::str::FromStr;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0, BlockQ8_1,
    BlockQ8K, GgmlType,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, ErrorKind, Result};

macro_rules! block_types {
    ($($variant:ident $name:literal $number:literal $candle:ident $block:ty, $doc:literal;)*) => {
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

            /// Candle's name of the type.
            pub fn candle(self) -> GgmlDType {
                match self { $(BlockType::$variant => GgmlDType::$candle,)* }
            }

            fn expand(self, bytes: &[u8], into: &mut [f32]) {
                match self { $(BlockType::$variant => expand::<$block>(bytes, into),)* }
            }
        }
    };
}

block_types! {
    Q4_0 "Q4_0" 2 Q4_0 BlockQ4_0, "32 elements of 4 bits with a scale.";
    Q4_1 "Q4_1" 3 Q4_1 BlockQ4_1, "32 elements of 4 bits with a scale and a minimum.";
    Q5_0 "Q5_0" 6 Q5_0 BlockQ5_0, "32 elements of 5 bits with a scale.";
    Q5_1 "Q5_1" 7 Q5_1 BlockQ5_1, "32 elements of 5 bits with a scale and a minimum.";
    Q8_0 "Q8_0" 8 Q8_0 BlockQ8_0, "32 elements of 8 bits with a scale.";
    Q8_1 "Q8_1" 9 Q8_1 BlockQ8_1, "32 elements of 8 bits with a scale and a sum.";
    Q2K "Q2_K" 10 Q2K BlockQ2K, "256 elements of 2 bits in 16 groups with scales and minima of 4 bits.";
    Q3K "Q3_K" 11 Q3K BlockQ3K, "256 elements of 3 bits in 16 groups with scales of 6 bits.";
    Q4K "Q4_K" 12 Q4K BlockQ4K, "256 elements of 4 bits in 8 groups with scales and minima of 6 bits.";
    Q5K "Q5_K" 13 Q5K BlockQ5K, "256 elements of 5 bits in 8 groups with scales and minima of 6 bits.";
    Q6K "Q6_K" 14 Q6K BlockQ6K, "256 elements of 6 bits in 16 groups with scales of 8 bits.";
    Q8K "Q8_K" 15 Q8K BlockQ8K, "256 elements of 8 bits with a scale of 32 bits, and sums.";
}

impl BlockType {
    /// Number of elements of a block.
    pub fn elements(self) -> usize {
        self.candle().block_size()
    }

    /// Number of bytes of a block.
    pub fn bytes(self) -> usize {
        self.candle().type_size()
    }

    /// Returns the type with a number of GGUF files, `None` if it is not one of these.
    pub fn from_number(number: u32) -> Option<BlockType> {
        BlockType::ALL.iter().copied().find(|block| block.number() == number)
    }

    /// Returns the type whose blocks have this many bytes: no two types have the same.
    pub fn of_size(bytes: usize) -> Option<BlockType> {
        BlockType::ALL.iter().copied().find(|block| block.bytes() == bytes)
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

/// Expands blocks of one type. `bytes` is a multiple of the block's size and `into` as long as its elements.
fn expand<B: GgmlType + Clone>(bytes: &[u8], into: &mut [f32]) {
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
    fn blocks_are_known_by_their_size_number_and_name() {
        for &block in BlockType::ALL {
            assert_eq!(BlockType::of_size(block.bytes()), Some(block));
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
}
