//! The native format: one safetensors file per rank, and a manifest with the metadata of all tensors.
//!
//! A checksum covers every byte: the manifest has one of its own content, one per file header and one per block of each chunk.
//! Manifests written before block checksums have only one checksum per chunk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::checkpoint::bytes::content::BoxToWrite;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::{
    CheckpointFormat, FileRole, FileToWrite, FormatWriter, ValueStorage, WrittenFile,
};
use crate::checkpoint::formats::safetensors::{self, header_bytes, is_safetensors, read_header};
use crate::checkpoint::metadata::stored::{Contents, NOT_A_CHECKPOINT, StoredTensor};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::{Error, ErrorKind, Result};

/// See the module's documentation.
pub(in crate::checkpoint) struct Native;

/// The manifest's file name; a directory that has it is a native checkpoint.
const MANIFEST: &str = "manifest.json";
/// Longest manifest that is read: a bound on what a hostile file can make a reader allocate.
const MAX_MANIFEST: u64 = 1 << 30;
const VERSION: u32 = 1;

/// The content of the manifest.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    save_id: Option<String>,
    tensors: BTreeMap<String, StoredTensor>,
    values: BTreeMap<String, Value>,
    paths: BTreeMap<String, Vec<Key>>,
    files: BTreeMap<String, FileInfo>,
}

/// Size and header checksum of a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct FileInfo {
    /// Size of the file.
    bytes: u64,
    /// CRC-32 of the safetensors header with its length field.
    header_crc32: u32,
}

/// The manifest file: the content as raw JSON, and its checksum.
#[derive(Serialize, Deserialize)]
struct SealedManifest {
    format: String,
    crc32: u32,
    content: Box<RawValue>,
}

impl Manifest {
    fn new(contents: &Contents, files: BTreeMap<String, FileInfo>) -> Self {
        let Contents { tensors, values, paths, save_id, .. } = contents.clone();
        Manifest { version: VERSION, save_id, tensors, values, paths, files }
    }

    /// The JSON text of the manifest file.
    fn to_text(&self) -> Result<String> {
        let content = serde_json::value::to_raw_value(self).map_err(Error::other)?;
        let crc32 = crc32fast::hash(content.get().as_bytes());
        serde_json::to_string(&SealedManifest { format: "shardwise".to_string(), crc32, content }).map_err(Error::other)
    }
}

/// Reads the manifest and verifies its checksum and version.
fn read_manifest(files: &Files) -> Result<Manifest> {
    let bad = |found: String, needed: &str| ErrorKind::Damaged.error("manifest", found, needed, NOT_A_CHECKPOINT);
    let bytes = files.read_small(MANIFEST, MAX_MANIFEST)?;
    let sealed: SealedManifest =
        serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string(), "a manifest"))?;
    let found = crc32fast::hash(sealed.content.get().as_bytes());
    if found != sealed.crc32 || sealed.format != "shardwise" {
        let found = format!("format {:?} with checksum {found:08x}", sealed.format);
        return Err(bad(found, &format!("\"shardwise\" with {:08x}", sealed.crc32)));
    }
    let manifest: Manifest =
        serde_json::from_str(sealed.content.get()).map_err(|error| bad(error.to_string(), "a manifest"))?;
    if manifest.version != VERSION {
        let found = format!("version {}", manifest.version);
        return Err(ErrorKind::Unsupported.error(
            "manifest",
            found,
            format!("version {VERSION}"),
            "use a newer shardwise",
        ));
    }
    Ok(manifest)
}

impl CheckpointFormat for Native {
    fn name(&self) -> &'static str {
        "native"
    }

    fn about(&self) -> &'static str {
        "Safetensors files with a manifest and checksums"
    }

    fn detect(&self, files: &Files) -> bool {
        files.single_file().is_none() && files.has(MANIFEST)
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        let Manifest { version, save_id, tensors, values, paths, files: listed } = read_manifest(files)?;
        for (name, info) in listed {
            let found = files.size(&name);
            if found != Some(info.bytes) {
                let found = found.map_or("no such file".to_string(), |size| format!("{size} bytes"));
                let (needed, fix) =
                    (format!("{} bytes in {name:?}", info.bytes), "the file is missing or truncated; copy it again");
                return Err(ErrorKind::Damaged.error("checkpoint", found, needed, fix));
            }
            let expected = info.header_crc32;
            files.check_before_read(&name.clone(), move |files| {
                check_header(&name, &header_bytes(files, &name)?, expected)
            });
        }
        let version = Some(version.to_string());
        Ok(Contents { tensors, values, paths, version, save_id, ..Contents::default() })
    }

    fn owns(&self, name: &str) -> bool {
        name == MANIFEST || is_safetensors(name)
    }

    fn belongs(&self, name: &str) -> bool {
        name == MANIFEST
    }

    /// Compares the headers of all files with their checksums.
    fn verify(&self, files: &Files) -> Result<()> {
        let check = |(name, info): (&String, &FileInfo)| {
            check_header(name, &read_header(files, name)?.bytes, info.header_crc32)
        };
        read_manifest(files)?.files.iter().try_for_each(check)
    }

    fn writer(&self) -> Option<&dyn FormatWriter> {
        Some(self)
    }
}

fn check_header(name: &str, header: &[u8], expected: u32) -> Result<()> {
    let found = crc32fast::hash(header);
    if found == expected {
        return Ok(());
    }
    let found = format!("checksum {found:08x} for the header of {name:?}");
    let fix = "the file is damaged; copy or save it again";
    Err(ErrorKind::Damaged.error("checkpoint", found, format!("{expected:08x}"), fix))
}

impl FormatWriter for Native {
    fn values(&self) -> ValueStorage {
        ValueStorage::InIndex
    }

    fn file_name(&self, file: FileRole) -> String {
        let (FileRole::Whole { index, .. } | FileRole::OfRank { rank: index, .. }) = file;
        format!("part-{index:05}.safetensors")
    }

    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile> {
        // The manifest identifies the boxes; offsets in the names only keep them unique within the file.
        let name = |b: &BoxToWrite| match b.is_whole {
            true => b.key.clone(),
            false => {
                let offsets: Vec<String> = b.part.offsets.iter().map(ToString::to_string).collect();
                format!("{}@{}", b.key, offsets.join(","))
            }
        };
        let boxes: Vec<(String, BoxToWrite)> = file.boxes.into_iter().map(|b| (name(&b), b)).collect();
        let (chunks, header_crc32) = safetensors::write(out, file.name, &BTreeMap::new(), &boxes, file.progress)?;
        let info = FileInfo { bytes: out.stream_position()?, header_crc32 };
        let note = serde_json::to_value(info).map_err(Error::other)?;
        Ok(WrittenFile { name: file.name.to_string(), chunks, note })
    }

    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>> {
        let info = |file: &WrittenFile| {
            let info = FileInfo::deserialize(&file.note).map_err(Error::other)?;
            Ok((file.name.clone(), info))
        };
        let infos = files.iter().map(info).collect::<Result<_>>()?;
        Ok(Some((MANIFEST.to_string(), Manifest::new(contents, infos).to_text()?.into_bytes())))
    }
}
