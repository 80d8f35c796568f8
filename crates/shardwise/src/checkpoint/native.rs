//! This library's own format: safetensors files, one or more per rank, and a manifest that says what is where.
//!
//! Every byte is under a checksum: the manifest's content under its own, headers of files and blocks of chunks under those in
//! the manifest. Manifests of earlier versions have no checksums of blocks, only one per chunk.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::catalog::{Catalog, Format, NOT_OURS, StoredTensor};
use super::files::Files;
use super::value::{Key, Value};
use crate::error::{Error, Result};

/// The file that makes a directory a checkpoint.
pub(super) const MANIFEST: &str = "manifest.json";
/// A longer manifest is refused.
const MAX_MANIFEST: u64 = 1 << 30;
const VERSION: u32 = 1;

/// What the manifest says.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    version: u32,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
    pub(super) values: BTreeMap<String, Value>,
    pub(super) paths: BTreeMap<String, Vec<Key>>,
    pub(super) files: BTreeMap<String, FileInfo>,
}

/// What the manifest says of a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct FileInfo {
    /// Its size.
    pub(super) bytes: u64,
    /// CRC-32 of its header.
    pub(super) header_crc32: u32,
}

/// The manifest as a file: the content, and its checksum.
#[derive(Serialize, Deserialize)]
struct Sealed {
    format: String,
    crc32: u32,
    content: Box<RawValue>,
}

impl Manifest {
    pub(super) fn new(catalog: &Catalog, files: BTreeMap<String, FileInfo>) -> Self {
        let (tensors, values, paths) = (catalog.tensors.clone(), catalog.values.clone(), catalog.paths.clone());
        Manifest { version: VERSION, tensors, values, paths, files }
    }

    /// The text of the file.
    pub(super) fn to_text(&self) -> Result<String> {
        let content = serde_json::value::to_raw_value(self).map_err(Error::other)?;
        let crc32 = crc32fast::hash(content.get().as_bytes());
        serde_json::to_string(&Sealed { format: "shardwise".to_string(), crc32, content }).map_err(Error::other)
    }
}

/// Reads the manifest of a checkpoint.
pub(super) fn read_manifest(files: &Files) -> Result<Manifest> {
    let bad = |found: String, needed: &str| Error::invalid("manifest", found, needed, NOT_OURS);
    let size = files.size(MANIFEST).unwrap_or(0);
    if size > MAX_MANIFEST {
        return Err(bad(format!("{size} bytes"), "1 GB at most"));
    }
    let mut bytes = vec![0; size as usize];
    files.read(MANIFEST, 0, &mut bytes)?;
    let sealed: Sealed = serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string(), "a manifest"))?;
    let found = crc32fast::hash(sealed.content.get().as_bytes());
    if found != sealed.crc32 || sealed.format != "shardwise" {
        let found = format!("format {:?} with checksum {found:08x}", sealed.format);
        return Err(bad(found, &format!("\"shardwise\" with {:08x}", sealed.crc32)));
    }
    let manifest: Manifest =
        serde_json::from_str(sealed.content.get()).map_err(|error| bad(error.to_string(), "a manifest"))?;
    if manifest.version != VERSION {
        let found = format!("version {}", manifest.version);
        return Err(Error::invalid("manifest", found, format!("version {VERSION}"), "use a newer shardwise"));
    }
    Ok(manifest)
}

/// What is in a checkpoint of this format.
pub(super) fn open(directory: &Path, files: &Arc<Files>) -> Result<Catalog> {
    let Manifest { tensors, values, paths, files: listed, .. } = read_manifest(files)?;
    for (name, info) in &listed {
        let found = files.size(name);
        if found != Some(info.bytes) {
            let found = found.map_or("no such file".to_string(), |size| format!("{size} bytes"));
            let needed = format!("{} bytes in {name:?}", info.bytes);
            return Err(Error::invalid("checkpoint", found, needed, "the file is missing or cut off; copy it again"));
        }
        files.expect_header(name, info.header_crc32);
    }
    Ok(Catalog { tensors, values, paths, ..Catalog::new(Format::Native, directory, files) })
}
