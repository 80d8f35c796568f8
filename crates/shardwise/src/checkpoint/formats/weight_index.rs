//! The index of weights in several files, in Hugging Face's form: which tensor is in which file.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::json;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::formats::safetensors::UniqueMap;
use crate::checkpoint::metadata::stored::{NOT_A_CHECKPOINT, StoredTensor, check_file_name};
use crate::error::{Error, ErrorKind, Result, listed};

/// Longest index that is read: a bound on what a hostile file can make a reader allocate.
const MAX_INDEX: u64 = 1 << 28;

#[derive(Deserialize)]
struct WeightIndex {
    weight_map: UniqueMap<String>,
}

/// Reads an index: file names by tensor. The names are those of files inside the directory.
pub(in crate::checkpoint) fn read_weight_index(files: &Files, name: &str) -> Result<BTreeMap<String, String>> {
    let bytes = files.read_small(name, MAX_INDEX)?;
    let index: WeightIndex = serde_json::from_slice(&bytes).map_err(|error| -> Error {
        let found = format!("{name}: {error}");
        ErrorKind::Damaged.error("index of weights", found, "an index with a weight_map", NOT_A_CHECKPOINT)
    })?;
    index.weight_map.0.values().try_for_each(|name| check_file_name(name))?;
    check_files(files, &index.weight_map.0)?;
    Ok(index.weight_map.0)
}

/// Checks that the files of an index exist: one that was not downloaded or copied is not a damaged one.
fn check_files(files: &Files, index: &BTreeMap<String, String>) -> Result<()> {
    let names: BTreeSet<&String> = index.values().collect();
    let missing: Vec<&String> = names.iter().copied().filter(|name| files.size(name).is_none()).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let found =
        format!("no file {} in {}, of {} in the index", listed(&missing), files.directory().display(), names.len());
    let fix = "download or copy the files that are missing";
    Err(ErrorKind::path(files.directory().join(first)).error("checkpoint", found, "all files of the index", fix))
}

/// The error for a tensor that the index lists and the files lack.
pub(in crate::checkpoint) fn missing_tensor(missing: &str, fix: &str) -> Error {
    let found = format!("no tensor {missing:?} in the file that the index lists for it");
    ErrorKind::Damaged.error("index of weights", found, "all tensors of the index", fix)
}

/// The JSON text of the index.
pub(in crate::checkpoint) fn index_text(tensors: &BTreeMap<String, StoredTensor>) -> Result<String> {
    let total: usize = tensors.values().map(StoredTensor::bytes).sum();
    let map: BTreeMap<&String, &String> =
        tensors.iter().filter_map(|(k, t)| Some((k, &t.chunks.first()?.file))).collect();
    serde_json::to_string_pretty(&json!({ "metadata": { "total_size": total }, "weight_map": map }))
        .map_err(Error::other)
}
