//! Writing `.distcp` files and `.metadata` such that PyTorch reads them.

use std::collections::BTreeMap;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::super::content::BoxContent;
use super::super::element::ElementType;
use super::super::pickle::PickleWriter;
use super::super::stored::{Chunk, row_major};
use super::super::torch::{write_tensor, write_value};
use super::super::value::{Key, Value};
use super::names::{CLASSES, FILESYSTEM};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorBox;

/// Where the archive of a chunk or value ended up. Places of all ranks together make `.metadata`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArchiveLocation {
    /// Flat key of the tensor or value.
    pub(super) key: String,
    /// File, relative to the checkpoint's directory.
    pub(super) file: String,
    /// Where the archive begins in the file.
    pub(super) offset: u64,
    /// Its length.
    pub(super) length: u64,
    /// For a part of a tensor: its box, and where its elements are.
    pub(super) chunk: Option<Chunk>,
}

/// Writes one `.distcp` file from its beginning: values first, then parts of tensors, in the given order. `name` is the name
/// of the file in the checkpoint's directory, such as `__0_0.distcp`; a part is the box of the whole tensor that its content
/// fills. `progress` is told how many bytes of elements were written. Returns the places in the order of writing.
pub(super) fn write_file(
    out: &mut impl Write,
    name: &str,
    tensors: &[(String, TensorBox, BoxContent)],
    values: &[(String, &Value)],
    progress: &dyn Fn(u64),
) -> Result<Vec<ArchiveLocation>> {
    let mut places = Vec::with_capacity(values.len() + tensors.len());
    let mut offset = 0;
    for (key, value) in values {
        let length = write_value(out, value)?;
        places.push(ArchiveLocation { key: key.clone(), file: name.to_string(), offset, length, chunk: None });
        offset += length;
    }
    for (key, part, content) in tensors {
        if part.sizes != content.shape() {
            let found = format!("content of shape {:?} for a part of {key:?}", content.shape());
            let needed = format!("{:?}, the shape of the part", part.sizes);
            return Err(ErrorKind::Argument.error(
                "checkpoint",
                found,
                needed,
                "give each part the elements that it has",
            ));
        }
        let written = write_tensor(out, content, progress)?;
        let chunk = Chunk {
            part: part.clone(),
            file: name.to_string(),
            offset: offset + written.data,
            strides: None,
            crc32: Some(written.crc32),
            blocks: Some(written.blocks),
        };
        let (key, file, length) = (key.clone(), name.to_string(), written.length);
        places.push(ArchiveLocation { key, file, offset, length, chunk: Some(chunk) });
        offset += length;
    }
    Ok(places)
}

/// The bytes of `.metadata`: type and shape of every tensor, the places of all chunks and values in all files, and the paths
/// of flat keys (a key without one is its own path). The format knows a chunk by its offsets: of several that begin at one
/// place, the first that is not empty counts.
pub(super) fn metadata_bytes(
    tensors: &BTreeMap<String, (ElementType, Vec<usize>)>,
    places: &[ArchiveLocation],
    paths: &BTreeMap<String, Vec<Key>>,
) -> Result<Vec<u8>> {
    let places = distinct(places);
    let mut chunks: BTreeMap<&str, Vec<&Chunk>> = tensors.keys().map(|key| (key.as_str(), Vec::new())).collect();
    for place in &places {
        let Some(chunk) = &place.chunk else { continue };
        let of_key = chunks.get_mut(place.key.as_str()).ok_or_else(|| {
            let found = format!("a part of tensor {:?} whose type and shape are not given", place.key);
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
    for place in places.iter().filter(|place| place.chunk.is_none()) {
        pickle.text(&place.key);
        pickle.object(CLASSES, "BytesStorageMetadata");
        // Without a state, as PyTorch has it: the class has no fields.
    }
    pickle.end_dict();
    pickle.text("planner_data");
    let values = places.iter().filter(|place| place.chunk.is_none()).map(|place| &place.key);
    put_paths(&mut pickle, tensors.keys().chain(values), paths);
    pickle.text("storage_data");
    pickle.begin_dict();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for place in &places {
        let position = seen.entry(&place.key).or_default();
        put_place(&mut pickle, place, *position);
        *position += 1;
    }
    pickle.end_dict();
    pickle.text("storage_meta");
    pickle.none();
    pickle.text("version");
    pickle.text("1.0.0");
    pickle.end_dict();
    pickle.build();
    Ok(pickle.finish())
}

/// The path of every key; one that is not listed is its own path.
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

/// One place per key and offsets, in order.
fn distinct(places: &[ArchiveLocation]) -> Vec<&ArchiveLocation> {
    let empty = |place: &ArchiveLocation| place.chunk.as_ref().is_some_and(|chunk| chunk.part.volume() == 0);
    let mut at: BTreeMap<(&str, Option<&[usize]>), usize> = BTreeMap::new();
    let mut kept: Vec<&ArchiveLocation> = Vec::new();
    for place in places {
        let offsets = place.chunk.as_ref().map(|chunk| chunk.part.offsets.as_slice());
        match at.get(&(place.key.as_str(), offsets)) {
            Some(&index) if empty(kept[index]) => kept[index] = place,
            Some(_) => {}
            None => {
                at.insert((&place.key, offsets), kept.len());
                kept.push(place);
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

/// The key and the value of a place; `position` is that of the chunk in the list of its tensor.
fn put_place(pickle: &mut PickleWriter, place: &ArchiveLocation, position: usize) {
    pickle.object(CLASSES, "MetadataIndex");
    pickle.begin_dict();
    pickle.text("fqn");
    pickle.text(&place.key);
    pickle.text("index");
    match &place.chunk {
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
    pickle.text(&place.file);
    pickle.text("offset");
    pickle.int(place.offset as i64);
    pickle.text("length");
    pickle.int(place.length as i64);
    pickle.end_dict();
    pickle.build();
}

/// A `torch.Size`.
fn put_size(pickle: &mut PickleWriter, sizes: &[usize]) {
    pickle.global("torch", "Size");
    pickle.begin_tuple();
    pickle.sizes(sizes);
    pickle.end_tuple();
    pickle.call();
}
