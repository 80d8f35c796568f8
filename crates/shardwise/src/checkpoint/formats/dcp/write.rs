//! Writing `.distcp` files and `.metadata` that PyTorch can read.

use std::collections::BTreeMap;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::names::{CLASSES, FILESYSTEM};
use crate::checkpoint::bytes::content::BoxContent;
use crate::checkpoint::formats::pickle::PickleWriter;
use crate::checkpoint::formats::torch::{write_tensor, write_value};
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Chunk, row_major};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorBox;

/// Where the archive of a chunk or value was written. `.metadata` lists those of all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchiveLocation {
    /// Flat key of the tensor or value.
    pub(super) key: String,
    /// Name of the file, relative to the checkpoint's directory.
    pub(super) file: String,
    /// Byte offset of the archive in the file.
    pub(super) offset: u64,
    /// Length of the archive in bytes.
    pub(super) length: u64,
    /// The chunk's metadata; `None` for a value.
    pub(super) chunk: Option<Chunk>,
}

/// Writes one `.distcp` file from its beginning: values first, then chunks of tensors, in the given order. `name` is the name
/// of the file, such as `__0_0.distcp`; `progress` is called with numbers of tensor bytes. Returns the locations in the order of
/// writing.
pub(super) fn write_file(
    out: &mut impl Write,
    name: &str,
    tensors: &[(String, TensorBox, BoxContent)],
    values: &[(String, &Value)],
    progress: &dyn Fn(u64),
) -> Result<Vec<ArchiveLocation>> {
    let mut locations = Vec::with_capacity(values.len() + tensors.len());
    let mut offset = 0;
    for (key, value) in values {
        let length = write_value(out, value)?;
        locations.push(ArchiveLocation { key: key.clone(), file: name.to_string(), offset, length, chunk: None });
        offset += length;
    }
    for (key, part, content) in tensors {
        if part.sizes != content.shape() {
            let found = format!("elements of shape {:?} for a chunk of {key:?}", content.shape());
            let needed = format!("{:?}, the shape of the chunk", part.sizes);
            return Err(ErrorKind::Argument.error("checkpoint", found, needed, "pass the elements of the chunk's box"));
        }
        let written = write_tensor(out, content, progress)?;
        let chunk = Chunk {
            part: part.clone(),
            file: name.to_string(),
            offset: offset + written.data,
            strides: None,
            crc32: Some(written.crc32),
            blocks: Some(written.blocks),
            encoding: None,
        };
        let (key, file, length) = (key.clone(), name.to_string(), written.length);
        locations.push(ArchiveLocation { key, file, offset, length, chunk: Some(chunk) });
        offset += length;
    }
    Ok(locations)
}

/// The bytes of `.metadata`: type and shape of every tensor, the locations of all chunks and values, and the paths of flat keys
/// (a key without one is a path of one name). DCP identifies a chunk by its offsets: of several chunks with the same offsets,
/// the first non-empty one is listed.
pub(super) fn metadata_bytes(
    tensors: &BTreeMap<String, (ElementType, Vec<usize>)>,
    locations: &[ArchiveLocation],
    paths: &BTreeMap<String, Vec<Key>>,
    save_id: Option<&str>,
) -> Result<Vec<u8>> {
    let locations = distinct(locations);
    let mut chunks: BTreeMap<&str, Vec<&Chunk>> = tensors.keys().map(|key| (key.as_str(), Vec::new())).collect();
    for location in &locations {
        let Some(chunk) = &location.chunk else { continue };
        let of_key = chunks.get_mut(location.key.as_str()).ok_or_else(|| {
            let found = format!("a chunk of tensor {:?}, whose type and shape are not listed", location.key);
            ErrorKind::Argument.error::<Error>("checkpoint", found, "type and shape of every tensor", "list the tensor")
        })?;
        of_key.push(chunk);
    }
    let mut pickle = PickleWriter::new();
    pickle.object(CLASSES, "Metadata");
    pickle.begin_dict();
    pickle.text("state_dict_metadata");
    pickle.begin_dict();
    for (key, (element, shape)) in tensors {
        pickle.text(key);
        put_tensor(&mut pickle, *element, shape, &chunks[key.as_str()]);
    }
    for location in locations.iter().filter(|location| location.chunk.is_none()) {
        pickle.text(&location.key);
        pickle.object(CLASSES, "BytesStorageMetadata");
        // No state follows: PyTorch's class has no fields.
    }
    pickle.end_dict();
    pickle.text("planner_data");
    let values = locations.iter().filter(|location| location.chunk.is_none()).map(|location| &location.key);
    put_paths(&mut pickle, tensors.keys().chain(values), paths);
    pickle.text("storage_data");
    pickle.begin_dict();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for location in &locations {
        let position = seen.entry(&location.key).or_default();
        put_location(&mut pickle, location, *position);
        *position += 1;
    }
    pickle.end_dict();
    pickle.text("storage_meta");
    put_storage_meta(&mut pickle, save_id);
    pickle.text("version");
    pickle.text("1.0.0");
    pickle.end_dict();
    pickle.build();
    Ok(pickle.finish())
}

/// Writes the identifier of the save as PyTorch's `StorageMeta`.
fn put_storage_meta(pickle: &mut PickleWriter, save_id: Option<&str>) {
    let Some(save_id) = save_id else { return pickle.none() };
    pickle.object(CLASSES, "StorageMeta");
    pickle.begin_dict();
    for name in ["checkpoint_id", "save_id", "load_id"] {
        pickle.text(name);
        if name == "save_id" { pickle.text(save_id) } else { pickle.none() }
    }
    pickle.text("modules");
    pickle.begin_list();
    pickle.end_list();
    pickle.end_dict();
    pickle.build();
}

/// Writes the path of every key; a key without one is a path of one name.
fn put_paths<'a>(
    pickle: &mut PickleWriter,
    keys: impl Iterator<Item = &'a String>,
    paths: &BTreeMap<String, Vec<Key>>,
) {
    pickle.begin_dict();
    for key in keys {
        pickle.text(key);
        pickle.begin_tuple();
        match paths.get(key) {
            None => pickle.text(key),
            Some(path) => path.iter().for_each(|step| match step {
                Key::Name(name) => pickle.text(name),
                Key::Index(index) => pickle.int(*index as i64),
            }),
        }
        pickle.end_tuple();
    }
    pickle.end_dict();
}

/// One location per key and offsets, in order.
fn distinct(locations: &[ArchiveLocation]) -> Vec<&ArchiveLocation> {
    let empty = |location: &ArchiveLocation| location.chunk.as_ref().is_some_and(|chunk| chunk.part.volume() == 0);
    let mut at: BTreeMap<(&str, Option<&[usize]>), usize> = BTreeMap::new();
    let mut kept: Vec<&ArchiveLocation> = Vec::new();
    for location in locations {
        let offsets = location.chunk.as_ref().map(|chunk| chunk.part.offsets.as_slice());
        match at.get(&(location.key.as_str(), offsets)) {
            Some(&index) if empty(kept[index]) => kept[index] = location,
            Some(_) => {}
            None => {
                at.insert((&location.key, offsets), kept.len());
                kept.push(location);
            }
        }
    }
    kept
}

fn put_tensor(pickle: &mut PickleWriter, element: ElementType, shape: &[usize], chunks: &[&Chunk]) {
    pickle.object(CLASSES, "TensorStorageMetadata");
    pickle.begin_dict();
    pickle.text("properties");
    pickle.object(CLASSES, "TensorProperties");
    pickle.begin_tuple();
    pickle.global("torch", element.torch_name());
    pickle.global("torch.serialization", "_get_layout");
    pickle.begin_tuple();
    pickle.text("torch.strided");
    pickle.end_tuple();
    pickle.call();
    pickle.bool(false);
    pickle.global(CLASSES, "_MEM_FORMAT_ENCODING");
    pickle.sizes(&[0]);
    pickle.call();
    pickle.bool(false);
    pickle.sizes(&row_major(&shape.iter().map(|&n| n.max(1)).collect::<Vec<_>>()));
    pickle.end_tuple();
    pickle.build();
    pickle.text("size");
    put_size(pickle, shape);
    pickle.text("chunks");
    pickle.begin_list();
    for chunk in chunks {
        pickle.object(CLASSES, "ChunkStorageMetadata");
        pickle.begin_dict();
        pickle.text("offsets");
        put_size(pickle, &chunk.part.offsets);
        pickle.text("sizes");
        put_size(pickle, &chunk.part.sizes);
        pickle.end_dict();
        pickle.build();
    }
    pickle.end_list();
    pickle.end_dict();
    pickle.build();
}

/// Writes the `MetadataIndex` and `_StorageInfo` of a location; `position` is the chunk's position in its tensor's list.
fn put_location(pickle: &mut PickleWriter, location: &ArchiveLocation, position: usize) {
    pickle.object(CLASSES, "MetadataIndex");
    pickle.begin_dict();
    pickle.text("fqn");
    pickle.text(&location.key);
    pickle.text("index");
    match &location.chunk {
        None => pickle.none(),
        Some(chunk) => {
            pickle.int(position as i64);
            pickle.text("offset");
            put_size(pickle, &chunk.part.offsets);
        }
    }
    pickle.end_dict();
    pickle.build();
    pickle.object(FILESYSTEM, "_StorageInfo");
    pickle.begin_dict();
    pickle.text("relative_path");
    pickle.text(&location.file);
    pickle.text("offset");
    pickle.int(location.offset as i64);
    pickle.text("length");
    pickle.int(location.length as i64);
    pickle.end_dict();
    pickle.build();
}

/// Writes a `torch.Size`.
fn put_size(pickle: &mut PickleWriter, sizes: &[usize]) {
    pickle.global("torch", "Size");
    pickle.begin_tuple();
    pickle.sizes(sizes);
    pickle.end_tuple();
    pickle.call();
}
