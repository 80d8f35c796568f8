//! Checksums block by block, so that every byte that is read is checked, in whatever layout it is read.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// CRC-32 of the bytes of a chunk, block by block from its first byte on; the last block may be shorter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "Text")]
pub struct Blocks {
    /// Length of a block in bytes.
    pub bytes: u64,
    /// One checksum per block.
    pub crc32: Vec<u32>,
}

/// The form in a manifest: checksums as hexadecimal digits, eight each, because a list of numbers takes twice the space.
#[derive(Serialize, Deserialize)]
struct Text {
    bytes: u64,
    crc32: String,
}

/// Length of a block. A load that needs some columns of a row-major chunk reads whole blocks: shorter ones read less that is
/// not needed, longer ones take less space (8 bytes of manifest per block, so 1/8192 of the data).
const BLOCK: u64 = 64 << 10;
/// A longer chunk has longer blocks, so that this many are enough.
const MOST: u64 = 4096;
/// A longer block is refused when it is read: one is held in memory.
const LONGEST: u64 = 1 << 30;

impl Blocks {
    /// Whether this can be the checksums of so many bytes.
    pub(super) fn fits(&self, length: u64) -> bool {
        (1..=LONGEST).contains(&self.bytes) && self.crc32.len() as u64 == length.div_ceil(self.bytes)
    }

    /// The form in an archive: length of a block, then all checksums, little-endian.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let checksums = self.crc32.iter().flat_map(|crc32| crc32.to_le_bytes());
        self.bytes.to_le_bytes().into_iter().chain(checksums).collect()
    }

    /// What [`to_bytes`](Self::to_bytes) wrote; `None` if it is something else.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Blocks> {
        let (length, checksums) = bytes.split_first_chunk::<8>()?;
        let (checksums, rest) = checksums.as_chunks::<4>();
        let crc32 = checksums.iter().map(|&crc32| u32::from_le_bytes(crc32)).collect();
        rest.is_empty().then_some(Blocks { bytes: u64::from_le_bytes(*length), crc32 })
    }
}

impl From<Blocks> for Text {
    fn from(blocks: Blocks) -> Self {
        use std::fmt::Write as _;
        let mut crc32 = String::with_capacity(blocks.crc32.len() * 8);
        for checksum in &blocks.crc32 {
            write!(crc32, "{checksum:08x}").expect("text takes everything");
        }
        Text { bytes: blocks.bytes, crc32 }
    }
}

impl TryFrom<Text> for Blocks {
    type Error = Error;

    fn try_from(text: Text) -> Result<Self> {
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
        Ok(Blocks { bytes: text.bytes, crc32 })
    }
}

/// Computes the checksums of a chunk while its bytes are written.
pub(super) struct BlockHasher {
    block: u64,
    /// Bytes in the current block.
    filled: u64,
    current: crc32fast::Hasher,
    whole: crc32fast::Hasher,
    done: Vec<u32>,
}

impl BlockHasher {
    /// For a chunk of so many bytes.
    pub(super) fn new(length: u64) -> Self {
        let block = length.div_ceil(MOST).next_power_of_two().max(BLOCK);
        let hasher = crc32fast::Hasher::new;
        BlockHasher { block, filled: 0, current: hasher(), whole: hasher(), done: Vec::new() }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (self.block - self.filled) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            // Twice over the same bytes, which are in the cache: a matrix product per block to combine checksums costs more.
            self.current.update(now);
            self.whole.update(now);
            self.filled += now.len() as u64;
            bytes = later;
            if self.filled == self.block {
                self.end_block();
            }
        }
    }

    fn end_block(&mut self) {
        self.done.push(std::mem::take(&mut self.current).finalize());
        self.filled = 0;
    }

    /// CRC-32 of everything, and of its blocks.
    pub(super) fn finish(mut self) -> (u32, Blocks) {
        if self.filled > 0 {
            self.end_block();
        }
        (self.whole.finalize(), Blocks { bytes: self.block, crc32: self.done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_blocks_and_of_the_whole_however_bytes_arrive() {
        for length in [0usize, 1, 65_535, 65_536, 65_537, 200_000] {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
            for piece in [1, 7_919, 65_536, 1 << 20] {
                let mut hasher = BlockHasher::new(length as u64);
                bytes.chunks(piece.max(length / 50 + 1)).for_each(|piece| hasher.update(piece));
                let (whole, blocks) = hasher.finish();
                assert_eq!(whole, crc32fast::hash(&bytes));
                assert_eq!(blocks.crc32, bytes.chunks(65_536).map(crc32fast::hash).collect::<Vec<_>>());
                assert!(blocks.fits(length as u64) && !blocks.fits(length as u64 + 65_536));
                assert_eq!(Blocks::from_bytes(&blocks.to_bytes()).as_ref(), Some(&blocks));
                let text = serde_json::to_string(&blocks).unwrap();
                assert_eq!(serde_json::from_str::<Blocks>(&text).unwrap(), blocks);
            }
        }
        assert_eq!(BlockHasher::new(1 << 40).block, 1 << 28, "a long chunk has few blocks");
        for bad in [r#"{"bytes":1,"crc32":"0000000"}"#, r#"{"bytes":1,"crc32":"+0000000"}"#, r#"{"bytes":1}"#] {
            assert!(serde_json::from_str::<Blocks>(bad).is_err(), "{bad}");
        }
    }
}
