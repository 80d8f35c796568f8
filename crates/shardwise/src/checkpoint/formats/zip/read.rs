//! Locating entries of an archive with a few small reads. Nothing is ever decompressed.

use std::collections::BTreeMap;

use super::records::{
    CENTRAL, CENTRAL_LENGTH, END, END_64, END_64_LENGTH, END_LENGTH, EXTRA_64, LOCAL, LOCAL_LENGTH, LOCATOR_64,
    LOCATOR_64_LENGTH,
};
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::stored::NOT_A_CHECKPOINT;
use crate::error::{Error, ErrorKind, Result};

/// Bytes read at both ends of an archive: in most single-tensor archives everything but the elements.
const END_READ_BYTES: u64 = 2 << 10;
/// Longest comment after the end of the central directory, by the format.
const MAX_COMMENT: u64 = u16::MAX as u64;
/// Longest central directory that is read: a bound on what a hostile file can make a reader allocate.
const MAX_DIRECTORY: u64 = 1 << 28;

/// An archive in a byte range of a file.
pub(in crate::checkpoint) struct Archive<'a> {
    files: &'a Files,
    file: &'a str,
    start: u64,
    length: u64,
    /// The first and the last bytes of the archive, read when it was opened.
    head: Vec<u8>,
    tail: Vec<u8>,
    entries: BTreeMap<String, ZipEntry>,
}

/// An entry of the central directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::checkpoint) struct ZipEntry {
    /// Offset of the local header in the archive.
    header: u64,
    /// Size of the data in bytes.
    pub(in crate::checkpoint) bytes: u64,
    /// CRC-32 of the data; `None` if it is 0, which PyTorch writes when `set_crc32_options(False)` is in effect.
    pub(in crate::checkpoint) crc32: Option<u32>,
}

impl<'a> Archive<'a> {
    /// Opens the archive in a byte range of a file.
    pub(in crate::checkpoint) fn open(files: &'a Files, file: &'a str, start: u64, length: u64) -> Result<Self> {
        let mut archive =
            Archive { files, file, start, length, head: Vec::new(), tail: Vec::new(), entries: BTreeMap::new() };
        let size = files.size(file).ok_or_else(|| archive.bad("no such file", "a file"))?;
        if start.checked_add(length).is_none_or(|end| end > size) {
            let found = format!("{size} bytes");
            return Err(archive.bad(found, format!("an archive of {length} bytes from byte {start} on")));
        }
        let ends = length.min(END_READ_BYTES);
        archive.tail = archive.bytes(length - ends, ends)?;
        archive.head = if length <= END_READ_BYTES { archive.tail.clone() } else { archive.bytes(0, ends)? };
        let (at, length, count) = archive.directory()?;
        let bytes = archive.bytes(at, length)?;
        archive.entries = archive.parse(&bytes, count)?;
        Ok(archive)
    }

    /// Names of all entries, in order.
    pub(in crate::checkpoint) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(in crate::checkpoint) fn entry(&self, name: &str) -> Result<ZipEntry> {
        self.entries.get(name).copied().ok_or_else(|| self.bad(format!("no entry {name:?}"), "one"))
    }

    /// Offset of an entry's data in the file.
    pub(in crate::checkpoint) fn locate(&self, name: &str) -> Result<u64> {
        let entry = self.entry(name)?;
        let end = |from: u64, length: u64| from.checked_add(length).filter(|&end| end <= self.length);
        let outside =
            || self.bad(format!("entry {name:?} that ends outside the archive"), "entries inside the archive");
        end(entry.header, LOCAL_LENGTH).ok_or_else(outside)?;
        let local = self.bytes(entry.header, LOCAL_LENGTH)?;
        let (name_length, extra_length) = (u64::from(u16_at(&local, 26)), u64::from(u16_at(&local, 28)));
        if u32_at(&local, 0) != LOCAL || name_length != name.len() as u64 {
            return Err(self.bad(format!("entry {name:?} without its header"), "the header of the entry"));
        }
        let data = end(entry.header + LOCAL_LENGTH, name_length + extra_length).ok_or_else(outside)?;
        end(data, entry.bytes).ok_or_else(outside)?;
        if self.bytes(entry.header + LOCAL_LENGTH, name_length)? != name.as_bytes() {
            return Err(self.bad(format!("entry {name:?} with the header of another"), "the header of the entry"));
        }
        Ok(self.start + data)
    }

    /// Reads an entry of at most `most` bytes and verifies its checksum.
    pub(in crate::checkpoint) fn read(&self, name: &str, most: u64) -> Result<Vec<u8>> {
        let entry = self.entry(name)?;
        if entry.bytes > most {
            return Err(self.bad(format!("entry {name:?} of {} bytes", entry.bytes), format!("{most} at most")));
        }
        let at = self.locate(name)? - self.start;
        let bytes = self.bytes(at, entry.bytes)?;
        let found = crc32fast::hash(&bytes);
        match entry.crc32 {
            Some(crc32) if crc32 != found => {
                let needed = format!("{crc32:08x}, as the directory says");
                Err(self.bad(format!("entry {name:?} with checksum {found:08x}"), needed))
            }
            _ => Ok(bytes),
        }
    }

    fn bad(&self, found: impl std::fmt::Display, needed: impl std::fmt::Display) -> Error {
        ErrorKind::Damaged.error("zip archive", format!("{found} in {:?}", self.file), needed, NOT_A_CHECKPOINT)
    }

    /// Reads a range that is known to be inside the archive.
    fn bytes(&self, at: u64, length: u64) -> Result<Vec<u8>> {
        let within = |kept: &[u8], begin: u64| {
            let from = usize::try_from(at.checked_sub(begin)?).ok()?;
            Some(kept.get(from..from.checked_add(length as usize)?)?.to_vec())
        };
        let tail = self.length - self.tail.len() as u64;
        if let Some(kept) = within(&self.head, 0).or_else(|| within(&self.tail, tail)) {
            return Ok(kept);
        }
        let mut bytes = vec![0; length as usize];
        self.files.read(self.file, self.start + at, &mut bytes)?;
        Ok(bytes)
    }

    /// Finds the central directory: offset, length and number of entries.
    fn directory(&self) -> Result<(u64, u64, u64)> {
        let none = || self.bad("no central directory at the end", "a torch.save file of PyTorch 1.6 or later");
        if self.length < END_LENGTH {
            return Err(none());
        }
        let mut end_at = self.length - END_LENGTH;
        let mut end = self.bytes(end_at, END_LENGTH)?;
        if u32_at(&end, 0) != END {
            let reach = self.length.min(END_LENGTH + MAX_COMMENT);
            let last = self.bytes(self.length - reach, reach)?;
            let signature = END.to_le_bytes();
            let found = last[..=last.len() - END_LENGTH as usize + 3].windows(4).rposition(|w| w == signature);
            let found = found.ok_or_else(none)?;
            end_at = self.length - reach + found as u64;
            end = last[found..found + END_LENGTH as usize].to_vec();
        }
        let mut count = u64::from(u16_at(&end, 10));
        let mut length = u64::from(u32_at(&end, 12));
        let mut at = u64::from(u32_at(&end, 16));
        if count == u64::from(u16::MAX) || length == u64::from(u32::MAX) || at == u64::from(u32::MAX) {
            let wide = || self.bad("an end record without its Zip64 record", "a complete end of the archive");
            let locator_at = end_at.checked_sub(LOCATOR_64_LENGTH).ok_or_else(wide)?;
            let locator = self.bytes(locator_at, LOCATOR_64_LENGTH)?;
            let record_at = u64_at(&locator, 8);
            let reaches = record_at.checked_add(END_64_LENGTH).is_some_and(|record_end| record_end <= locator_at);
            if u32_at(&locator, 0) != LOCATOR_64 || !reaches {
                return Err(wide());
            }
            let record = self.bytes(record_at, END_64_LENGTH)?;
            if u32_at(&record, 0) != END_64 {
                return Err(wide());
            }
            (count, length, at) = (u64_at(&record, 32), u64_at(&record, 40), u64_at(&record, 48));
        }
        if length > MAX_DIRECTORY || at.checked_add(length).is_none_or(|end| end > end_at) {
            let found = format!("a central directory of {length} bytes at {at}");
            return Err(self.bad(found, "one that is in the archive, and below 256 MB"));
        }
        Ok((at, length, count))
    }

    fn parse(&self, bytes: &[u8], count: u64) -> Result<BTreeMap<String, ZipEntry>> {
        let truncated = || self.bad("a truncated central directory", "all its entries");
        let mut entries = BTreeMap::new();
        let mut rest = bytes;
        for _ in 0..count {
            if rest.len() < CENTRAL_LENGTH || u32_at(rest, 0) != CENTRAL {
                return Err(truncated());
            }
            let (fixed, behind) = rest.split_at(CENTRAL_LENGTH);
            let lengths = [28, 30, 32].map(|at| usize::from(u16_at(fixed, at)));
            let [name_length, extra_length, comment_length] = lengths;
            if behind.len() < name_length + extra_length + comment_length {
                return Err(truncated());
            }
            let name = std::str::from_utf8(&behind[..name_length])
                .map_err(|_| self.bad("an entry name that is not UTF-8", "a UTF-8 name"))?;
            let extra = &behind[name_length..name_length + extra_length];
            rest = &behind[name_length + extra_length + comment_length..];
            let (flags, method) = (u16_at(fixed, 8), u16_at(fixed, 10));
            let mut numbers = [24, 20, 42].map(|at| u64::from(u32_at(fixed, at)));
            widen(&mut numbers, extra).ok_or_else(|| self.bad(format!("entry {name:?} without a size"), "one"))?;
            let [bytes, stored, header] = numbers;
            if method != 0 || flags & 1 != 0 || bytes != stored {
                let found = format!("entry {name:?} that is compressed or encrypted");
                let fix = "torch.save compresses nothing: this file was packed by something else; unpack it first";
                let found = format!("{found} in {:?}", self.file);
                return Err(ErrorKind::Unsupported.error("zip archive", found, "uncompressed entries", fix));
            }
            if bytes > self.length || header > self.length {
                let found = format!("entry {name:?} of {bytes} bytes at {header}");
                return Err(self.bad(found, "entries inside the archive"));
            }
            let crc32 = Some(u32_at(fixed, 16)).filter(|&crc32| crc32 != 0);
            if entries.insert(name.to_string(), ZipEntry { header, bytes, crc32 }).is_some() {
                return Err(self.bad(format!("two entries {name:?}"), "different names"));
            }
        }
        Ok(entries)
    }
}

/// Replaces numbers that did not fit in 32 bits by those of the Zip64 extra field; `None` if it lacks them.
fn widen(numbers: &mut [u64; 3], extra: &[u8]) -> Option<()> {
    if numbers.iter().all(|&n| n != u64::from(u32::MAX)) {
        return Some(());
    }
    let mut rest = extra;
    while rest.len() >= 4 {
        let (tag, length) = (u16_at(rest, 0), usize::from(u16_at(rest, 2)));
        let mut field = rest.get(4..4 + length)?;
        rest = &rest[4 + length..];
        if tag == EXTRA_64 {
            for number in numbers.iter_mut().filter(|n| **n == u64::from(u32::MAX)) {
                let (wide, behind) = field.split_first_chunk::<8>()?;
                (*number, field) = (u64::from_le_bytes(*wide), behind);
            }
            return Some(());
        }
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
