//! Writing `torch.save` archives: of one tensor or one value, and of nested state.

use std::collections::BTreeMap;
use std::io::Write;

use super::names::{CHECKSUMS, STORAGES};
use crate::checkpoint::bytes::content::{BoxContent, BoxToWrite};
use crate::checkpoint::catalogs::format::FileToWrite;
use crate::checkpoint::formats::pickle::PickleWriter;
use crate::checkpoint::formats::zip::ZipWriter;
use crate::checkpoint::metadata::blocks::{BlockChecksums, BlockHasher};
use crate::checkpoint::metadata::stored::{Chunk, row_major};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::{ErrorKind, Result};

/// The layout of an archive that was written.
pub(in crate::checkpoint) struct WrittenArchive {
    /// Length of the archive in bytes.
    pub(in crate::checkpoint) length: u64,
    /// Offset of the tensor's elements in the archive.
    pub(in crate::checkpoint) data: u64,
    /// CRC-32 of all elements.
    pub(in crate::checkpoint) crc32: u32,
    /// CRC-32 per block of the elements.
    pub(in crate::checkpoint) blocks: BlockChecksums,
}

/// Writes an archive of one row-major tensor.
pub(in crate::checkpoint) fn write_tensor(
    out: &mut impl Write,
    content: &BoxContent,
    progress: &dyn Fn(u64),
) -> Result<WrittenArchive> {
    let mut archive = ZipWriter::new(out);
    archive.small("archive/data.pkl", &tensor_pickle(content))?;
    begin(&mut archive)?;
    let mut hasher = BlockHasher::new(content.bytes() as u64);
    let (data, _) = archive.entry("archive/data/0", content.bytes() as u64, &mut |put| {
        content.for_each_block(&mut |block| {
            hasher.update(block);
            progress(block.len() as u64);
            put(block)
        })
    })?;
    let (crc32, blocks) = hasher.finish();
    archive.small("archive/version", b"3\n")?;
    archive.small(&format!("archive/{CHECKSUMS}"), &blocks.to_bytes())?;
    Ok(WrittenArchive { length: archive.finish()?, data, crc32, blocks })
}

/// Writes an archive of one value and returns its length.
pub(in crate::checkpoint) fn write_value(out: &mut impl Write, value: &Value) -> Result<u64> {
    let mut pickle = PickleWriter::new();
    pickle.value(value);
    let mut archive = ZipWriter::new(out);
    archive.small("archive/data.pkl", &pickle.finish())?;
    begin(&mut archive)?;
    archive.small("archive/version", b"3\n")?;
    archive.finish()
}

/// Writes the entries between the pickle and the data.
fn begin(archive: &mut ZipWriter<'_, impl Write>) -> Result<()> {
    archive.small("archive/.format_version", b"1")?;
    archive.small("archive/.storage_alignment", b"64")?;
    archive.small("archive/byteorder", b"little")
}

/// The pickle of a tensor that consists of all of storage 0.
fn tensor_pickle(content: &BoxContent) -> Vec<u8> {
    let mut pickle = PickleWriter::new();
    put_tensor(&mut pickle, content, "0");
    pickle.finish()
}

/// Writes a tensor that consists of all of the storage with this name.
fn put_tensor(pickle: &mut PickleWriter, content: &BoxContent, name: &str) {
    let (element, sizes) = (content.element(), content.shape());
    let storage = STORAGES.iter().find(|(_, of)| *of == element).map(|(name, _)| *name);
    pickle.global("torch._utils", if storage.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" });
    pickle.begin_tuple();
    pickle.begin_tuple();
    pickle.text("storage");
    match storage {
        Some(name) => pickle.global("torch", name),
        None => pickle.global("torch.storage", "UntypedStorage"),
    }
    pickle.text(name);
    pickle.text("cpu");
    let unit = if storage.is_some() { element.size_in_bytes() } else { 1 };
    pickle.int((content.bytes() / unit) as i64);
    pickle.end_tuple();
    pickle.persistent_id();
    pickle.int(0);
    pickle.sizes(sizes);
    pickle.sizes(&row_major(&sizes.iter().map(|&n| n.max(1)).collect::<Vec<_>>()));
    pickle.bool(false);
    pickle.global("collections", "OrderedDict");
    pickle.empty_tuple();
    pickle.call();
    if storage.is_none() {
        pickle.global("torch", element.torch_name());
    }
    pickle.end_tuple();
    pickle.call();
}

/// A node of the object that a file holds: what `torch.load` returns.
enum SavedNode<'a> {
    Tensor(usize),
    Value(&'a Value),
    Map(BTreeMap<String, SavedNode<'a>>),
    List(BTreeMap<usize, SavedNode<'a>>),
}

impl<'a> SavedNode<'a> {
    /// Puts a leaf at a path. Flat keys are unique, so paths do not lead through leaves.
    fn insert(&mut self, path: &[Key], leaf: SavedNode<'a>) {
        let Some((first, rest)) = path.split_first() else {
            *self = leaf;
            return;
        };
        let fresh = || SavedNode::Map(BTreeMap::new());
        match (first, &mut *self) {
            (Key::Name(name), SavedNode::Map(entries)) => {
                entries.entry(name.clone()).or_insert_with(fresh).insert(rest, leaf);
            }
            (Key::Index(index), SavedNode::List(entries)) => {
                entries.entry(*index).or_insert_with(fresh).insert(rest, leaf);
            }
            (Key::Name(_), _) => {
                *self = fresh();
                self.insert(path, leaf);
            }
            (Key::Index(_), _) => {
                *self = SavedNode::List(BTreeMap::new());
                self.insert(path, leaf);
            }
        }
    }

    fn put(&self, pickle: &mut PickleWriter, boxes: &[BoxToWrite]) {
        match self {
            SavedNode::Tensor(index) => put_tensor(pickle, &boxes[*index].content, &index.to_string()),
            SavedNode::Value(value) => pickle.value(value),
            SavedNode::Map(entries) => {
                pickle.begin_dict();
                for (name, node) in entries {
                    pickle.text(name);
                    node.put(pickle, boxes);
                }
                pickle.end_dict();
            }
            // Of a list whose other entries are in other files, or were not selected, positions are kept as keys.
            SavedNode::List(entries) if !entries.keys().copied().eq(0..entries.len()) => {
                pickle.begin_dict();
                for (position, node) in entries {
                    pickle.text(&position.to_string());
                    node.put(pickle, boxes);
                }
                pickle.end_dict();
            }
            SavedNode::List(entries) => {
                pickle.begin_list();
                entries.values().for_each(|node| node.put(pickle, boxes));
                pickle.end_list();
            }
        }
    }
}

/// Writes a file that `torch.load` reads: nested dicts and lists with these tensors and values. Returns the chunks in it.
pub(super) fn write_state(out: &mut impl Write, file: &FileToWrite<'_>) -> Result<Vec<(String, Chunk)>> {
    let path_of = |key: &String| file.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.clone())]);
    let mut root = SavedNode::Map(BTreeMap::new());
    for (key, value) in file.values {
        root.insert(&path_of(key), SavedNode::Value(value));
    }
    for (index, part) in file.boxes.iter().enumerate() {
        if !part.is_whole {
            let found = format!("a part of tensor {:?}", part.key);
            let fix = "save in another format and convert it, or replicate the tensor";
            return Err(ErrorKind::Unsupported.error("torch.save file", found, "whole tensors", fix));
        }
        root.insert(&path_of(&part.key), SavedNode::Tensor(index));
    }
    let mut pickle = PickleWriter::new();
    root.put(&mut pickle, &file.boxes);
    let mut archive = ZipWriter::new(out);
    archive.small("archive/data.pkl", &pickle.finish())?;
    begin(&mut archive)?;
    let mut chunks = Vec::new();
    for (index, part) in file.boxes.iter().enumerate() {
        let content = &part.content;
        let (offset, crc32) = archive.entry(&format!("archive/data/{index}"), content.bytes() as u64, &mut |put| {
            content.for_each_block(&mut |block| {
                (file.progress)(block.len() as u64);
                put(block)
            })
        })?;
        let (part, name) = (part.part.clone(), file.name.to_string());
        let crc32 = Some(crc32);
        let chunk = Chunk { part, file: name, offset, strides: None, crc32, blocks: None, encoding: None };
        chunks.push((file.boxes[index].key.clone(), chunk));
    }
    archive.small("archive/version", b"3\n")?;
    archive.finish()?;
    Ok(chunks)
}
