//! Verifying that a checkpoint is complete and undamaged.

use std::collections::BTreeSet;
use std::path::Path;

use rayon::prelude::*;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::bytes::read::check_crc;
use crate::checkpoint::catalogs::catalog::{Catalog, cannot_read};
use crate::checkpoint::catalogs::open::open;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::Chunk;
use crate::error::Result;

/// The result of [`verify`].
#[derive(Debug)]
pub struct Verification {
    /// The checkpoint's metadata, if it could be opened.
    pub catalog: Option<Catalog>,
    /// Number of chunks whose checksum matches.
    pub verified: usize,
    /// Number of chunks that are stored without a checksum: they exist and have the right size.
    pub without_checksum: usize,
    /// Number of chunks with a single checksum and none per block: a load in another layout, which reads such a chunk in
    /// pieces, does not verify it.
    pub without_block_checksums: usize,
    /// The errors that were found, one message each.
    pub problems: Vec<String>,
    /// Keys of plain Python objects, such as an `argparse.Namespace`, whose bytes are intact and which nothing here can hold.
    pub python_objects: Vec<String>,
    /// Files in the directory that are not part of the checkpoint.
    pub unknown_files: Vec<String>,
}

impl Verification {
    /// Whether no problem was found.
    pub fn is_intact(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Bytes read at a time from chunks without blocks.
const READ_BYTES: u64 = 4 << 20;

/// Reads a whole checkpoint, verifies all checksums and checks that the chunks cover their tensors without gaps or overlaps.
///
/// A tensor that is named and cannot be read is a problem: its elements are lost to every reader.
///
/// Local: needs no world; uses all cores. Continues after an error and returns all of them in [`Verification::problems`].
/// `progress` is called with numbers of bytes.
pub fn verify(path: impl AsRef<Path>, progress: &(dyn Fn(u64) + Sync)) -> Verification {
    let catalog = match open(path) {
        Ok(catalog) => catalog,
        Err(error) => {
            let problems = vec![error.to_string()];
            let unknown_files = Vec::new();
            return Verification {
                catalog: None,
                verified: 0,
                without_checksum: 0,
                without_block_checksums: 0,
                problems,
                python_objects: Vec::new(),
                unknown_files,
            };
        }
    };
    let files = &*catalog.files;
    let chunks: Vec<(&String, ElementType, &Chunk)> =
        catalog.tensors.iter().flat_map(|(key, t)| t.chunks.iter().map(move |c| (key, t.element, c))).collect();
    let check = |(key, element, chunk): &(&String, ElementType, &Chunk)| match chunk.crc32 {
        None => Ok(false),
        Some(expected) => {
            let found = crc_of(files, key, chunk, *element, progress)?;
            check_crc(key, chunk, 0, expected, found).map(|()| true)
        }
    };
    let results: Vec<Result<bool>> = chunks.par_iter().map(check).collect();
    let verified = results.iter().filter(|r| matches!(r, Ok(true))).count();
    let without_checksum = results.iter().filter(|r| matches!(r, Ok(false))).count();
    let without_block_checksums = chunks.iter().filter(|(.., c)| c.crc32.is_some() && c.blocks.is_none()).count();
    let mut problems: Vec<String> = results.into_iter().filter_map(Result::err).map(|e| e.to_string()).collect();
    problems.extend(catalog.unreadable_data().map(|(key, reason)| cannot_read(key, reason).to_string()));
    problems.extend(catalog.format.0.verify(files).err().map(|e| e.to_string()));
    let unknown_files = unknown_files(&catalog);
    let python_objects = catalog.python_objects.iter().cloned().collect();
    Verification {
        catalog: Some(catalog),
        verified,
        without_checksum,
        without_block_checksums,
        problems,
        python_objects,
        unknown_files,
    }
}

/// CRC-32 of all bytes of a chunk; fails if the checksum of one of its blocks does not match.
fn crc_of(
    files: &Files,
    key: &str,
    chunk: &Chunk,
    element: ElementType,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<u32> {
    let length = chunk.span(element).unwrap_or(u64::MAX);
    let block = chunk.blocks.as_ref().map_or(READ_BYTES, |blocks| blocks.block_bytes);
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; block.min(length) as usize];
    let mut done = 0;
    while done < length {
        let size = block.min(length - done) as usize;
        files.read(&chunk.file, chunk.offset + done, &mut buffer[..size])?;
        hasher.update(&buffer[..size]);
        if let Some(blocks) = &chunk.blocks {
            let found = crc32fast::hash(&buffer[..size]);
            check_crc(key, chunk, done, blocks.crc32[(done / block) as usize], found)?;
        }
        progress(size as u64);
        done += size as u64;
    }
    Ok(hasher.finalize())
}

/// Files of the directory that hold no tensor and that the format does not expect.
fn unknown_files(catalog: &Catalog) -> Vec<String> {
    let used: BTreeSet<&str> =
        catalog.tensors.values().flat_map(|t| t.chunks.iter().map(|c| c.file.as_str())).collect();
    let Ok(names) = catalog.files.names() else { return Vec::new() };
    let belongs = |name: &String| used.contains(name.as_str()) || catalog.format.0.belongs(name);
    names.into_iter().filter(|name| !belongs(name)).collect()
}
