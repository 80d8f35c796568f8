//! Whether a checkpoint is whole.

use std::collections::BTreeSet;
use std::path::Path;

use rayon::prelude::*;

use super::catalog::Catalog;
use super::element::ElementType;
use super::files::Files;
use super::open::open;
use super::read::check_crc;
use super::stored::Chunk;
use crate::error::Result;

/// What was found out about a checkpoint.
#[derive(Debug)]
pub struct Verification {
    /// What is in it, as far as it can be opened.
    pub catalog: Option<Catalog>,
    /// Parts of tensors whose checksum is right.
    pub verified: usize,
    /// Parts of tensors that the format stores without a checksum. They are there and have the right size.
    pub unverified: usize,
    /// Parts with one checksum for all of their bytes and none per block: a load that reads such a part in pieces, as another
    /// layout may do, does not check it.
    pub whole_only: usize,
    /// What is wrong.
    pub problems: Vec<String>,
    /// Files in the directory that do not belong to the checkpoint.
    pub strangers: Vec<String>,
}

impl Verification {
    /// Whether nothing is wrong.
    pub fn is_whole(&self) -> bool {
        self.problems.is_empty()
    }
}

/// How much is read at a time.
const BLOCK: u64 = 4 << 20;

/// Reads all of a checkpoint and compares it with its checksums; looks for holes, overlaps and missing bytes. `progress`
/// hears of bytes. What is wrong is in the result; no error stands in the way of the next one.
pub fn verify(path: impl AsRef<Path>, progress: &(dyn Fn(u64) + Sync)) -> Verification {
    let catalog = match open(path) {
        Ok(catalog) => catalog,
        Err(error) => {
            let problems = vec![error.to_string()];
            let strangers = Vec::new();
            return Verification { catalog: None, verified: 0, unverified: 0, whole_only: 0, problems, strangers };
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
    let unverified = results.iter().filter(|r| matches!(r, Ok(false))).count();
    let whole_only = chunks.iter().filter(|(.., c)| c.crc32.is_some() && c.blocks.is_none()).count();
    let mut problems: Vec<String> = results.into_iter().filter_map(Result::err).map(|e| e.to_string()).collect();
    problems.extend(catalog.format.0.verify(files).err().map(|e| e.to_string()));
    let strangers = strangers(&catalog);
    Verification { catalog: Some(catalog), verified, unverified, whole_only, problems, strangers }
}

/// CRC-32 of the bytes of a chunk; an error if one of its blocks is not as it was written.
fn crc_of(
    files: &Files,
    key: &str,
    chunk: &Chunk,
    element: ElementType,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<u32> {
    let length = chunk.span(element).unwrap_or(u64::MAX);
    let block = chunk.blocks.as_ref().map_or(BLOCK, |blocks| blocks.bytes);
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

/// Files of the directory that no tensor is in.
fn strangers(catalog: &Catalog) -> Vec<String> {
    let used: BTreeSet<&str> =
        catalog.tensors.values().flat_map(|t| t.chunks.iter().map(|c| c.file.as_str())).collect();
    let Ok(names) = catalog.files.names() else { return Vec::new() };
    let belongs = |name: &String| used.contains(name.as_str()) || catalog.format.0.belongs(name);
    names.into_iter().filter(|name| !belongs(name)).collect()
}
