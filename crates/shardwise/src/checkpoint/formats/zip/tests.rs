//! Round trips of archives; damaged and malicious archives.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::records::{CENTRAL, END_64, END_LENGTH};
use super::*;
use crate::checkpoint::bytes::files::Files;
use crate::error::Result;

/// A directory that is removed on drop.
struct ZipScratch(PathBuf);

impl ZipScratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("shardwise-zip-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        ZipScratch(path)
    }

    fn files(&self, bytes: &[u8]) -> Files {
        std::fs::write(self.0.join("file"), bytes).unwrap();
        Files::open_at(&self.0, &self.0).unwrap()
    }
}

impl Drop for ZipScratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn sample() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = ZipWriter::new(&mut bytes);
    writer.small("archive/data.pkl", b"a pickle").unwrap();
    writer.small("archive/empty", b"").unwrap();
    let (at, crc32) =
        writer.entry("archive/data/0", 6, &mut |put| [&b"abc"[..], b"def"].into_iter().try_for_each(put)).unwrap();
    assert_eq!((at % 64, crc32), (0, crc32fast::hash(b"abcdef")));
    assert_eq!(writer.finish().unwrap(), bytes.len() as u64);
    bytes
}

fn read_all(files: &Files, start: u64, length: u64) -> Result<Vec<(String, Vec<u8>)>> {
    let archive = Archive::open(files, "file", start, length)?;
    archive.names().map(|name| Ok((name.to_string(), archive.read(name, 100)?))).collect()
}

#[test]
fn entries_round_trip_at_any_offset_of_the_archive() {
    let scratch = ZipScratch::new("back");
    let sample = sample();
    for (before, comment) in [(0, 0), (13, 0), (5000, 0), (7, 40), (0, 65535)] {
        let mut bytes = vec![b'P'; before];
        bytes.extend_from_slice(&sample);
        let length = bytes.len();
        bytes.resize(length + comment, b'c');
        bytes[length - 2..length].copy_from_slice(&(comment as u16).to_le_bytes());
        let files = scratch.files(&bytes);
        let found = read_all(&files, before as u64, (bytes.len() - before) as u64).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["archive/data.pkl", "archive/data/0", "archive/empty"]);
        assert_eq!(found[1].1, b"abcdef");
        let archive = Archive::open(&files, "file", before as u64, (bytes.len() - before) as u64).unwrap();
        let at = archive.locate("archive/data/0").unwrap() as usize;
        assert_eq!(&bytes[at..at + 6], b"abcdef");
    }
}

/// More than 4 GiB, written to a sparse file.
#[test]
fn large_entries_use_zip64() {
    struct Sparse(std::fs::File);
    impl std::io::Write for Sparse {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            use std::io::Seek;
            match bytes.len() == BLOCK {
                true => self.0.seek_relative(bytes.len() as i64)?,
                false => self.0.write_all(bytes)?,
            }
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    const BLOCK: usize = 64 << 20;
    let scratch = ZipScratch::new("large");
    let mut out = Sparse(std::fs::File::create(scratch.0.join("file")).unwrap());
    let block = vec![0; BLOCK];
    let large = 65 * BLOCK as u64;
    let mut writer = ZipWriter::new(&mut out);
    let (at, _) = writer.entry("archive/data/0", large, &mut |put| (0..65).try_for_each(|_| put(&block))).unwrap();
    writer.small("archive/version", b"3\n").unwrap();
    let length = writer.finish().unwrap();
    let files = Files::open_at(&scratch.0, &scratch.0).unwrap();
    let archive = Archive::open(&files, "file", 0, length).unwrap();
    assert_eq!(
        (archive.entry("archive/data/0").unwrap().bytes, archive.locate("archive/data/0").unwrap()),
        (large, at)
    );
    assert_eq!(archive.read("archive/version", 2).unwrap(), b"3\n");
}

#[test]
fn compressed_entries_and_sizes_beyond_the_file_are_refused() {
    let scratch = ZipScratch::new("hostile");
    let sample = sample();
    let central = sample.windows(4).position(|w| w == CENTRAL.to_le_bytes()).unwrap();
    let changed = |at: usize, with: &[u8]| {
        let mut bytes = sample.clone();
        bytes[central + at..central + at + with.len()].copy_from_slice(with);
        read_all(&scratch.files(&bytes), 0, bytes.len() as u64).unwrap_err().to_string()
    };
    assert!(changed(10, &[8, 0]).contains("compressed"));
    assert!(changed(8, &[9]).contains("encrypted"));
    assert!(changed(20, &[0xfe; 8]).contains("inside the archive"));
    assert!(changed(20, &[0xff; 8]).contains("without a size"));
    assert!(changed(42, &[0xf0; 4]).contains("inside the archive"));
    // A Zip64 end record with a directory of 2^60 bytes.
    let record = sample.windows(4).position(|w| w == END_64.to_le_bytes()).unwrap();
    let mut bytes = sample.clone();
    bytes[record + 40..record + 48].copy_from_slice(&(1u64 << 60).to_le_bytes());
    let end = bytes.len() - END_LENGTH as usize;
    bytes[end + 12..end + 20].fill(0xff);
    let error = read_all(&scratch.files(&bytes), 0, bytes.len() as u64).unwrap_err().to_string();
    assert!(error.contains("below 256 MB"), "{error}");
    assert!(read_all(&scratch.files(&sample), 0, 1 << 60).is_err());
    assert!(read_all(&scratch.files(&sample), u64::MAX, 10).is_err());
}

#[test]
fn truncated_and_changed_archives_are_detected_or_harmless() {
    let scratch = ZipScratch::new("flips");
    let sample = sample();
    let whole = read_all(&scratch.files(&sample), 0, sample.len() as u64).unwrap();
    let files = scratch.files(&sample);
    for length in 0..sample.len() {
        assert!(read_all(&files, 0, length as u64).is_err(), "{length}");
    }
    let file = std::fs::File::options().write(true).open(scratch.0.join("file")).unwrap();
    for at in 0..sample.len() {
        for mask in [1, 2, 4, 8, 16, 32, 64, 128, 255] {
            file.write_all_at(&[sample[at] ^ mask], at as u64).unwrap();
            // A checksum of 0 means none, and names may change; the content under a name may not.
            for (name, content) in read_all(&files, 0, sample.len() as u64).unwrap_or_default() {
                let same = whole.iter().find(|(known, _)| *known == name);
                assert!(same.is_none_or(|(_, known)| *known == content), "byte {at}, {name}");
            }
        }
        file.write_all_at(&sample[at..=at], at as u64).unwrap();
    }
}
