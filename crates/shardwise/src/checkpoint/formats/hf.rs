//! Hugging Face safetensors: `model.safetensors`, several files with `model.safetensors.index.json`, or one file per rank with
//! the offsets of its boxes in the header, as PyTorch's `HuggingFaceStorageWriter` writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::BufWriter;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::checkpoint::bytes::content::BoxToWrite;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::{
    CheckpointFormat, FileRole, FileToWrite, FormatWriter, ValueStorage, WrittenFile,
};
use crate::checkpoint::formats::safetensors::{self, UniqueMap, is_safetensors, read_header};
use crate::checkpoint::formats::weight_index::{index_text, missing_tensor, read_weight_index};
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Chunk, Contents, INCOMPLETE, NOT_A_CHECKPOINT, StoredTensor};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorBox;

/// See the module's documentation.
pub(in crate::checkpoint) struct HuggingFace;

/// The index file: which tensor is in which file.
const INDEX: &str = "model.safetensors.index.json";
/// The header entry with the offsets of the boxes in the file, in PyTorch's form.
const SHARDING_INFO: &str = "DCP_SHARDING_INFO";

#[derive(Serialize, Deserialize)]
struct SavedOffsets {
    saved_offsets: Vec<usize>,
}

/// Reads the metadata of a directory of safetensors files, or of a single file.
fn contents(files: &Files) -> Result<Contents> {
    let bad = |found: String, needed: &str| {
        ErrorKind::Damaged.error("safetensors checkpoint", found, needed, NOT_A_CHECKPOINT)
    };
    let index = match files.single_file().is_none() && files.has(INDEX) {
        false => None,
        true => Some(read_weight_index(files, INDEX)?),
    };
    let names: BTreeSet<String> = match (files.single_file(), &index) {
        (Some(name), _) => BTreeSet::from([name.to_string()]),
        (None, Some(index)) => index.values().cloned().collect(),
        (None, None) => files.names()?.into_iter().filter(|name| is_safetensors(name)).collect(),
    };
    let mut found: BTreeMap<String, Vec<(ElementType, Chunk)>> = BTreeMap::new();
    for name in &names {
        let header = read_header(files, name)?;
        let UniqueMap(saved): UniqueMap<SavedOffsets> = match header.metadata.get(SHARDING_INFO) {
            None => UniqueMap::default(),
            Some(text) => serde_json::from_str(text).map_err(|error| bad(error.to_string(), "offsets of boxes"))?,
        };
        for (key, (element, sizes, offset)) in header.tensors {
            // If two files have a tensor, the index decides.
            if index.as_ref().is_some_and(|index| index.get(&key) != Some(name)) {
                continue;
            }
            let offsets = saved.get(&key).map_or_else(|| vec![0; sizes.len()], |saved| saved.saved_offsets.clone());
            if offsets.len() != sizes.len() {
                return Err(bad(
                    format!("tensor {key:?} at {offsets:?} of shape {sizes:?}"),
                    "one offset per dimension",
                ));
            }
            let part = TensorBox { offsets, sizes };
            let chunk =
                Chunk { part, file: name.clone(), offset, strides: None, crc32: None, blocks: None, encoding: None };
            found.entry(key).or_default().push((element, chunk));
        }
    }
    if let Some(missing) = index.iter().flatten().map(|(key, _)| key).find(|key| !found.contains_key(*key)) {
        return Err(missing_tensor(missing, INCOMPLETE));
    }
    let tensors = found.into_iter().map(|(key, chunks)| Ok((key.clone(), tensor_of_chunks(&key, chunks)?)));
    Ok(Contents { tensors: tensors.collect::<Result<_>>()?, ..Contents::default() })
}

/// A tensor from its chunks. The format stores no global shape, so the shape is the extent of the chunks.
fn tensor_of_chunks(key: &str, chunks: Vec<(ElementType, Chunk)>) -> Result<StoredTensor> {
    let (element, first) = &chunks[0];
    let (element, dims) = (*element, first.part.sizes.len());
    if let Some((other, _)) = chunks.iter().find(|(e, c)| *e != element || c.part.sizes.len() != dims) {
        let found = format!("tensor {key:?} of types {element} and {other}, or of different numbers of dimensions");
        return Err(ErrorKind::Damaged.error(
            "safetensors checkpoint",
            found,
            "chunks of one type and number of dimensions",
            NOT_A_CHECKPOINT,
        ));
    }
    let end = |dim: usize| {
        chunks.iter().map(|(_, c)| c.part.offsets[dim].saturating_add(c.part.sizes[dim])).max().unwrap_or(0)
    };
    let shape = (0..dims).map(end).collect();
    Ok(StoredTensor { element, shape, chunks: chunks.into_iter().map(|(_, chunk)| chunk).collect() })
}

/// The `__metadata__` of a file with sharded boxes: their offsets, in PyTorch's form.
fn sharding_info(boxes: &[BoxToWrite]) -> Result<BTreeMap<String, String>> {
    let saved: BTreeMap<&str, SavedOffsets> =
        boxes.iter().map(|b| (b.key.as_str(), SavedOffsets { saved_offsets: b.part.offsets.clone() })).collect();
    let text = serde_json::to_string(&saved).map_err(Error::other)?;
    let pairs = [("DCP_VERSION", "1.0"), ("format", "pt"), (SHARDING_INFO, &text)];
    Ok(pairs.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect())
}

impl CheckpointFormat for HuggingFace {
    fn name(&self) -> &'static str {
        "hugging-face"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["hf", "safetensors"]
    }

    fn about(&self) -> &'static str {
        "Hugging Face safetensors files"
    }

    fn detect(&self, files: &Files) -> bool {
        match files.single_file() {
            Some(name) => is_safetensors(name),
            None => files.names().is_ok_and(|names| names.iter().any(|name| self.owns(name))),
        }
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        contents(files)
    }

    fn owns(&self, name: &str) -> bool {
        name == INDEX || is_safetensors(name)
    }

    fn belongs(&self, name: &str) -> bool {
        // Model repositories have tokenizers, configs and readmes next to these files.
        !is_safetensors(name)
    }

    fn writer(&self) -> Option<&dyn FormatWriter> {
        Some(self)
    }
}

impl FormatWriter for HuggingFace {
    fn values(&self) -> ValueStorage {
        ValueStorage::Nowhere
    }

    fn one_box_per_file(&self) -> bool {
        true
    }

    fn file_name(&self, file: FileRole) -> String {
        match file {
            FileRole::Whole { count: 1, .. } | FileRole::OfRank { ranks: 1, count: 1, .. } => {
                "model.safetensors".to_string()
            }
            FileRole::Whole { index, count } => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            // The names that PyTorch's writer uses.
            FileRole::OfRank { rank, index, count, .. } => {
                format!("shard-{:05}-model-{:05}-of-{count:05}.safetensors", rank + 1, index + 1)
            }
        }
    }

    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile> {
        let metadata = match file.boxes.iter().all(|b| b.is_whole) {
            true => BTreeMap::from([("format".to_string(), "pt".to_string())]),
            false => sharding_info(&file.boxes)?,
        };
        let boxes: Vec<(String, BoxToWrite)> = file.boxes.into_iter().map(|b| (b.key.clone(), b)).collect();
        let (chunks, _) = safetensors::write(out, file.name, &metadata, &boxes, file.progress)?;
        Ok(WrittenFile { name: file.name.to_string(), chunks, note: Json::Null })
    }

    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>> {
        // The index lists one file per tensor: sharded boxes are found by the headers of their files instead.
        if files.len() < 2 || contents.tensors.values().any(|t| t.chunks.len() > 1) {
            return Ok(None);
        }
        Ok(Some((INDEX.to_string(), index_text(&contents.tensors)?.into_bytes())))
    }
}
