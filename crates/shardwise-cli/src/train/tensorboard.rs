//! Scalars for TensorBoard: a file of events, each a protocol buffer in a frame with checksums (the TFRecord format).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use shardwise::Result;

use super::checkpoints::cannot_write;

/// The file of events of a run.
pub(super) struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventFile {
    /// Creates a new file in a directory, which is created if need be.
    pub(super) fn create(directory: &Path) -> Result<EventFile> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let path = directory.join(format!("events.out.tfevents.{}.{}", now.as_secs(), std::process::id()));
        let opened = std::fs::create_dir_all(directory).and_then(|()| File::create(&path));
        let file = BufWriter::new(opened.map_err(|error| cannot_write("event file", &path, &error))?);
        let mut events = EventFile { path, file };
        events.write(&event(seconds(), 0, &field(3, b"brain.Event:2")))?;
        Ok(events)
    }

    /// Adds scalars of a step.
    pub(super) fn scalars(&mut self, step: u64, scalars: &[(String, f64)]) -> Result<()> {
        let value = |(tag, value): &(String, f64)| {
            let mut bytes = field(1, tag.as_bytes());
            bytes.push(2 << 3 | 5);
            bytes.extend((*value as f32).to_le_bytes());
            field(1, &bytes)
        };
        let summary: Vec<u8> = scalars.iter().flat_map(value).collect();
        self.write(&event(seconds(), step, &field(5, &summary)))
    }

    fn write(&mut self, event: &[u8]) -> Result<()> {
        let written = self.file.write_all(&framed(event)).and_then(|()| self.file.flush());
        written.map_err(|error| cannot_write("event file", &self.path, &error))
    }
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// An `Event`: the time (field 1), the step (field 2) and the rest, which is encoded already.
fn event(seconds: f64, step: u64, rest: &[u8]) -> Vec<u8> {
    let mut bytes = vec![1 << 3 | 1];
    bytes.extend(seconds.to_le_bytes());
    bytes.push(2 << 3);
    varint(&mut bytes, step);
    bytes.extend(rest);
    bytes
}

/// A field with a length: a text or a message.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    varint(&mut bytes, content.len() as u64);
    bytes.extend(content);
    bytes
}

fn varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// A record: its length, the checksum of the length, the content, its checksum.
fn framed(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let mut bytes = length.to_vec();
    bytes.extend(masked_crc(&length).to_le_bytes());
    bytes.extend(content);
    bytes.extend(masked_crc(content).to_le_bytes());
    bytes
}

/// The format stores checksums rotated and with an offset, so that checksums of data with checksums differ.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The CRC with Castagnoli's polynomial, bit by bit: an event has some hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_and_frames_are_those_of_the_format() {
        // The check value of CRC-32C.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let record = framed(b"abc");
        assert_eq!((record.len(), &record[..8], &record[12..15]), (19, &[3, 0, 0, 0, 0, 0, 0, 0][..], &b"abc"[..]));
        // What the class `Event` of TensorBoard's Python package serializes to, with wall_time=1.0, step=300 and one value of the
        // summary, tag="loss" and simple_value=2.5.
        let mut value = field(1, b"loss");
        value.extend([0x15, 0, 0, 0x20, 0x40]);
        let expected: &[u8] = b"\x09\0\0\0\0\0\0\xf0\x3f\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\0\0\x20\x40";
        assert_eq!(event(1.0, 300, &field(5, &field(1, &value))), expected);
    }
}
