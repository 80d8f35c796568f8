//! Safetensors as Hugging Face has them: `model.safetensors`, or several files with an index, or a file per rank with the
//! offsets of its boxes in the header, as PyTorch writes them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::catalog::{Catalog, Chunk, Format, INCOMPLETE, NOT_OURS, StoredTensor, check_file_name};
use super::element::ElementType;
use super::files::Files;
use super::safetensors::{Unique, read_header};
use crate::error::{Error, Result};
use crate::layout::TensorBox;

/// The file that says which tensor is in which file.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// The entry of a header with the offsets of the boxes in the file.
pub(super) const SHARDING_INFO: &str = "DCP_SHARDING_INFO";
const MAX_INDEX: u64 = 1 << 28;

#[derive(Deserialize)]
struct Index {
    weight_map: Unique<String>,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    saved_offsets: Vec<usize>,
}

/// What is in a directory of such files, or in one of them.
pub(super) fn open(directory: &Path, files: &Arc<Files>, single: Option<&str>) -> Result<Catalog> {
    let bad = |found: String, needed: &str| Error::invalid("safetensors checkpoint", found, needed, NOT_OURS);
    let index = match single.is_none().then(|| files.size(INDEX)).flatten() {
        None => None,
        Some(size) if size > MAX_INDEX => return Err(bad(format!("an index of {size} bytes"), "256 MB at most")),
        Some(size) => {
            let mut bytes = vec![0; size as usize];
            files.read(INDEX, 0, &mut bytes)?;
            let index: Index =
                serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string(), "an index with a weight_map"))?;
            index.weight_map.0.values().try_for_each(|name| check_file_name(name))?;
            Some(index.weight_map.0)
        }
    };
    let names: BTreeSet<String> = match (single, &index) {
        (Some(name), _) => BTreeSet::from([name.to_string()]),
        (None, Some(index)) => index.values().cloned().collect(),
        (None, None) => files.names()?.into_iter().filter(|name| is_safetensors(name)).collect(),
    };
    let mut found: BTreeMap<String, Vec<(ElementType, Chunk)>> = BTreeMap::new();
    for name in &names {
        let header = read_header(files, name)?;
        let Unique(saved): Unique<Saved> = match header.metadata.get(SHARDING_INFO) {
            None => Unique::default(),
            Some(text) => serde_json::from_str(text).map_err(|error| bad(error.to_string(), "offsets of boxes"))?,
        };
        for (key, (element, sizes, offset)) in header.tensors {
            // The index decides where a tensor is that two files have.
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
            let chunk = Chunk { part, file: name.clone(), offset, strides: None, crc32: None, blocks: None };
            found.entry(key).or_default().push((element, chunk));
        }
    }
    if let Some(missing) = index.iter().flatten().map(|(key, _)| key).find(|key| !found.contains_key(*key)) {
        let found = format!("no tensor {missing:?} in the file that the index names for it");
        return Err(Error::invalid("safetensors checkpoint", found, "all tensors of the index", INCOMPLETE));
    }
    let tensors = found.into_iter().map(|(key, chunks)| Ok((key.clone(), joined(&key, chunks)?)));
    Ok(Catalog { tensors: tensors.collect::<Result<_>>()?, ..Catalog::new(Format::HuggingFace, directory, files) })
}

/// A tensor from its boxes: it reaches as far as they do.
fn joined(key: &str, chunks: Vec<(ElementType, Chunk)>) -> Result<StoredTensor> {
    let (element, first) = &chunks[0];
    let (element, dims) = (*element, first.part.sizes.len());
    if let Some((other, _)) = chunks.iter().find(|(e, c)| *e != element || c.part.sizes.len() != dims) {
        let found = format!("tensor {key:?} of types {element} and {other}, or of different numbers of dimensions");
        return Err(Error::invalid("safetensors checkpoint", found, "boxes of one tensor", NOT_OURS));
    }
    let end = |dim: usize| {
        chunks.iter().map(|(_, c)| c.part.offsets[dim].saturating_add(c.part.sizes[dim])).max().unwrap_or(0)
    };
    let shape = (0..dims).map(end).collect();
    Ok(StoredTensor { element, shape, chunks: chunks.into_iter().map(|(_, chunk)| chunk).collect() })
}

/// Whether a file is one of safetensors, by its name.
pub(super) fn is_safetensors(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "safetensors")
}

/// The free part of the header of a file with boxes that begin at these offsets.
pub(super) fn sharding_info(boxes: &[(&str, &TensorBox)]) -> Result<BTreeMap<String, String>> {
    let saved: BTreeMap<&str, Saved> =
        boxes.iter().map(|(key, part)| (*key, Saved { saved_offsets: part.offsets.clone() })).collect();
    let text = serde_json::to_string(&saved).map_err(Error::other)?;
    let pairs = [("DCP_VERSION", "1.0"), ("format", "pt"), (SHARDING_INFO, &text)];
    Ok(pairs.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect())
}

/// The text of the index over files.
pub(super) fn index_text(tensors: &BTreeMap<String, StoredTensor>) -> Result<String> {
    let total: usize = tensors.values().map(StoredTensor::bytes).sum();
    let map: BTreeMap<&String, &String> =
        tensors.iter().filter_map(|(k, t)| Some((k, &t.chunks.first()?.file))).collect();
    serde_json::to_string_pretty(&json!({ "metadata": { "total_size": total }, "weight_map": map }))
        .map_err(Error::other)
}
