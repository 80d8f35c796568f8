//! Writing archives in one pass: sizes are known in advance, checksums follow the data.

use std::io::Write;

use super::records::{CENTRAL, DESCRIPTOR, END, END_64, END_64_LENGTH, EXTRA_64, LOCAL, LOCAL_LENGTH, LOCATOR_64};
use crate::error::{ErrorKind, Result};

/// Data of entries begins at multiples of this, counted from the archive's first byte, as in PyTorch.
const ALIGNMENT: u64 = 64;
/// General-purpose flags. Bit 3: checksum and sizes follow the data. Bit 11: names are UTF-8.
const FLAGS: u16 = 0x0808;
/// Sizes and offsets from this on need the Zip64 fields.
const MAX_32: u64 = u32::MAX as u64;

/// An archive under construction.
pub(in crate::checkpoint) struct ZipWriter<'a, W: Write> {
    out: &'a mut W,
    /// Number of bytes written so far: the offset of the next record.
    position: u64,
    entries: Vec<WrittenEntry>,
}

/// Receives the next bytes of an entry.
pub(super) type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

struct WrittenEntry {
    name: String,
    header: u64,
    bytes: u64,
    crc32: u32,
}

impl<'a, W: Write> ZipWriter<'a, W> {
    pub(in crate::checkpoint) fn new(out: &'a mut W) -> Self {
        ZipWriter { out, position: 0, entries: Vec::new() }
    }

    /// Adds an entry of `bytes` bytes, which `fill` passes to the sink in order. Returns the offset of the data in the archive
    /// and its CRC-32.
    pub(in crate::checkpoint) fn entry(
        &mut self,
        name: &str,
        bytes: u64,
        fill: &mut dyn FnMut(&mut Sink<'_>) -> Result<()>,
    ) -> Result<(u64, u32)> {
        let header = self.position;
        let wide = bytes >= MAX_32;
        let wide_field: Vec<u8> = if wide { extra_64(&[bytes, bytes]) } else { Vec::new() };
        let bare = header + LOCAL_LENGTH + name.len() as u64 + wide_field.len() as u64 + 4;
        let padding = bare.next_multiple_of(ALIGNMENT) - bare;
        let mut local = Vec::new();
        put32(&mut local, LOCAL);
        for n in [if wide { 45 } else { 0 }, FLAGS, 0, 0, 0] {
            put16(&mut local, n);
        }
        let size = if wide { u32::MAX } else { 0 };
        for n in [0, size, size] {
            put32(&mut local, n);
        }
        put16(&mut local, name.len() as u16);
        put16(&mut local, (wide_field.len() as u64 + 4 + padding) as u16);
        local.extend_from_slice(name.as_bytes());
        local.extend_from_slice(&wide_field);
        local.extend_from_slice(b"FB");
        put16(&mut local, padding as u16);
        local.resize(local.len() + padding as usize, b'Z');
        self.put(&local)?;
        let data = self.position;
        let mut hasher = crc32fast::Hasher::new();
        fill(&mut |block| {
            hasher.update(block);
            self.put(block)
        })?;
        if self.position - data != bytes {
            let found = format!("{} bytes for entry {name:?}", self.position - data);
            return Err(ErrorKind::Argument.error(
                "zip archive",
                found,
                bytes,
                "write as many bytes as were announced",
            ));
        }
        let crc32 = hasher.finalize();
        let mut descriptor = Vec::new();
        put32(&mut descriptor, DESCRIPTOR);
        put32(&mut descriptor, crc32);
        for _ in 0..2 {
            match wide {
                true => descriptor.extend_from_slice(&bytes.to_le_bytes()),
                false => put32(&mut descriptor, bytes as u32),
            }
        }
        self.put(&descriptor)?;
        self.entries.push(WrittenEntry { name: name.to_string(), header, bytes, crc32 });
        Ok((data, crc32))
    }

    /// Adds an entry from memory.
    pub(in crate::checkpoint) fn small(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.entry(name, bytes.len() as u64, &mut |put| put(bytes)).map(drop)
    }

    /// Writes the central directory and returns the length of the archive.
    pub(in crate::checkpoint) fn finish(mut self) -> Result<u64> {
        let directory = self.position;
        let mut bytes = Vec::new();
        for entry in &self.entries {
            let wide: Vec<u64> =
                [entry.bytes, entry.bytes, entry.header].into_iter().filter(|&n| n >= MAX_32).collect();
            let extra = if wide.is_empty() { Vec::new() } else { extra_64(&wide) };
            put32(&mut bytes, CENTRAL);
            let version = if wide.is_empty() { 0 } else { 45 };
            for n in [version, version, FLAGS, 0, 0, 0] {
                put16(&mut bytes, n);
            }
            for n in [entry.crc32, narrow(entry.bytes), narrow(entry.bytes)] {
                put32(&mut bytes, n);
            }
            for n in [entry.name.len() as u16, extra.len() as u16, 0, 0, 0] {
                put16(&mut bytes, n);
            }
            put32(&mut bytes, 0);
            put32(&mut bytes, narrow(entry.header));
            bytes.extend_from_slice(entry.name.as_bytes());
            bytes.extend_from_slice(&extra);
        }
        let (length, count) = (bytes.len() as u64, self.entries.len() as u64);
        let record = directory + length;
        put32(&mut bytes, END_64);
        bytes.extend_from_slice(&(END_64_LENGTH - 12).to_le_bytes());
        put16(&mut bytes, 45);
        put16(&mut bytes, 45);
        put32(&mut bytes, 0);
        put32(&mut bytes, 0);
        for n in [count, count, length, directory] {
            bytes.extend_from_slice(&n.to_le_bytes());
        }
        put32(&mut bytes, LOCATOR_64);
        put32(&mut bytes, 0);
        bytes.extend_from_slice(&record.to_le_bytes());
        put32(&mut bytes, 1);
        put32(&mut bytes, END);
        let few = count.min(u64::from(u16::MAX)) as u16;
        for n in [0, 0, few, few] {
            put16(&mut bytes, n);
        }
        put32(&mut bytes, narrow(length));
        put32(&mut bytes, narrow(directory));
        put16(&mut bytes, 0);
        self.put(&bytes)?;
        Ok(self.position)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes)?;
        self.position += bytes.len() as u64;
        Ok(())
    }
}

fn narrow(n: u64) -> u32 {
    n.min(MAX_32) as u32
}

fn extra_64(numbers: &[u64]) -> Vec<u8> {
    let mut field = Vec::new();
    put16(&mut field, EXTRA_64);
    put16(&mut field, numbers.len() as u16 * 8);
    numbers.iter().for_each(|n| field.extend_from_slice(&n.to_le_bytes()));
    field
}

fn put16(bytes: &mut Vec<u8>, n: u16) {
    bytes.extend_from_slice(&n.to_le_bytes());
}

fn put32(bytes: &mut Vec<u8>, n: u32) {
    bytes.extend_from_slice(&n.to_le_bytes());
}
