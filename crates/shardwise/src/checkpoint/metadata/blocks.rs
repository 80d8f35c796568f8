//! Checksums per block, so that every byte is verified no matter which layout reads it.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// CRC-32 checksums of a chunk, one per block of fixed length from its first byte on; the last block may be shorter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ChecksumText", into = "ChecksumText")]
pub struct BlockChecksums {
    /// Length of a block in bytes.
    pub block_bytes: u64,
    /// CRC-32 of each block, in order.
    pub crc32: Vec<u32>,
}

/// The form in a manifest: eight hexadecimal digits per checksum, because a list of JSON numbers takes twice the space.
#[derive(Serialize, Deserialize)]
struct ChecksumText {
    bytes: u64,
    crc32: String,
}

/// Length of a block in all but the largest chunks. A load that needs some columns of a row-major chunk reads whole blocks:
/// shorter ones read fewer unneeded bytes, longer ones take less space (8 bytes of manifest per block: 1/8192 of the data).
const MIN_BLOCK_BYTES: u64 = 64 << 10;
/// Most blocks of a chunk: larger chunks (above 256 MiB) get longer blocks, which bounds the manifest.
const MAX_BLOCKS: u64 = 4096;
/// Longest block that is read: a reader holds one in memory, so a hostile manifest must not choose its length.
const MAX_BLOCK_BYTES: u64 = 1 << 30;

impl BlockChecksums {
    /// Whether these can be the checksums of `length` bytes.
    pub(in crate::checkpoint) fn fits(&self, length: u64) -> bool {
        (1..=MAX_BLOCK_BYTES).contains(&self.block_bytes)
            && self.crc32.len() as u64 == length.div_ceil(self.block_bytes)
    }

    /// The form in a `torch.save` archive: length of a block, then all checksums, little-endian.
    pub(in crate::checkpoint) fn to_bytes(&self) -> Vec<u8> {
        let checksums = self.crc32.iter().flat_map(|crc32| crc32.to_le_bytes());
        self.block_bytes.to_le_bytes().into_iter().chain(checksums).collect()
    }

    /// Parses what [`to_bytes`](Self::to_bytes) returns; `None` if it is malformed.
    pub(in crate::checkpoint) fn from_bytes(bytes: &[u8]) -> Option<BlockChecksums> {
        let (length, checksums) = bytes.split_first_chunk::<8>()?;
        let (checksums, rest) = checksums.as_chunks::<4>();
        let crc32 = checksums.iter().map(|&crc32| u32::from_le_bytes(crc32)).collect();
        rest.is_empty().then_some(BlockChecksums { block_bytes: u64::from_le_bytes(*length), crc32 })
    }
}

impl From<BlockChecksums> for ChecksumText {
    fn from(blocks: BlockChecksums) -> Self {
        use std::fmt::Write as _;
        let mut crc32 = String::with_capacity(blocks.crc32.len() * 8);
        for checksum in &blocks.crc32 {
            write!(crc32, "{checksum:08x}").expect("writing to a String cannot fail");
        }
        ChecksumText { bytes: blocks.block_bytes, crc32 }
    }
}

impl TryFrom<ChecksumText> for BlockChecksums {
    type Error = Error;

    fn try_from(text: ChecksumText) -> Result<Self> {
        let (digits, rest) = text.crc32.as_bytes().as_chunks::<8>();
        let number = |digits: &[u8; 8]| {
            let text = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+'))?;
            u32::from_str_radix(text, 16).ok()
        };
        let crc32 = digits.iter().map(number).collect::<Option<Vec<u32>>>().filter(|_| rest.is_empty());
        let crc32 = crc32.ok_or_else(|| {
            let needed = "eight hexadecimal digits per block";
            ErrorKind::Damaged.error::<Error>(
                "checksums",
                format!("{:.20?}...", text.crc32),
                needed,
                "copy or save the checkpoint again",
            )
        })?;
        Ok(BlockChecksums { block_bytes: text.bytes, crc32 })
    }
}

/// Computes the checksums of a chunk while its bytes are written.
pub(in crate::checkpoint) struct BlockHasher {
    block_bytes: u64,
    /// Bytes of the current block so far.
    filled: u64,
    current: crc32fast::Hasher,
    whole: crc32fast::Hasher,
    done: Vec<u32>,
}

impl BlockHasher {
    /// A hasher for a chunk of `length` bytes.
    pub(in crate::checkpoint) fn new(length: u64) -> Self {
        let block_bytes = length.div_ceil(MAX_BLOCKS).next_power_of_two().max(MIN_BLOCK_BYTES);
        let hasher = crc32fast::Hasher::new;
        BlockHasher { block_bytes, filled: 0, current: hasher(), whole: hasher(), done: Vec::new() }
    }

    pub(in crate::checkpoint) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (self.block_bytes - self.filled) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            // Hashes the same cached bytes twice: combining block checksums into the whole one takes a matrix product per block
            // and costs more.
            self.current.update(now);
            self.whole.update(now);
            self.filled += now.len() as u64;
            bytes = later;
            if self.filled == self.block_bytes {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        self.done.push(std::mem::take(&mut self.current).finalize());
        self.filled = 0;
    }

    /// Returns the CRC-32 of all bytes and those of the blocks.
    pub(in crate::checkpoint) fn finish(mut self) -> (u32, BlockChecksums) {
        if self.filled > 0 {
            self.end_block();
        }
        (self.whole.finalize(), BlockChecksums { block_bytes: self.block_bytes, crc32: self.done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_do_not_depend_on_how_the_bytes_are_split() {
        for length in [0usize, 1, 65_535, 65_536, 65_537, 200_000] {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
            for piece in [1, 7_919, 65_536, 1 << 20] {
                let mut hasher = BlockHasher::new(length as u64);
                bytes.chunks(piece.max(length / 50 + 1)).for_each(|piece| hasher.update(piece));
                let (whole, blocks) = hasher.finish();
                assert_eq!(whole, crc32fast::hash(&bytes));
                assert_eq!(blocks.crc32, bytes.chunks(65_536).map(crc32fast::hash).collect::<Vec<_>>());
                assert!(blocks.fits(length as u64) && !blocks.fits(length as u64 + 65_536));
                assert_eq!(BlockChecksums::from_bytes(&blocks.to_bytes()).as_ref(), Some(&blocks));
                let text = serde_json::to_string(&blocks).unwrap();
                assert_eq!(serde_json::from_str::<BlockChecksums>(&text).unwrap(), blocks);
            }
        }
        assert_eq!(BlockHasher::new(1 << 40).block_bytes, 1 << 28, "a large chunk has few blocks");
        for bad in [r#"{"bytes":1,"crc32":"0000000"}"#, r#"{"bytes":1,"crc32":"+0000000"}"#, r#"{"bytes":1}"#] {
            assert!(serde_json::from_str::<BlockChecksums>(bad).is_err(), "{bad}");
        }
    }
}
