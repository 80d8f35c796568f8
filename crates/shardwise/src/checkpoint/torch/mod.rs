//! `torch.save` files: a zip archive with a pickle, and an entry per storage. One file, or several with
//! `pytorch_model.bin.index.json` in a directory.

mod names;
mod archive;
mod write;

use std::collections::BTreeSet;

use super::files::Files;
use super::format::CheckpointFormat;
use super::stored::{Contents, INCOMPLETE};
use super::weight_index::{missing_tensor, read_weight_index};
use crate::error::{ErrorKind, Result};

pub(super) use archive::{TorchArchive, at_key};
pub(super) use write::{write_tensor, write_value};

/// See the module's documentation.
pub(super) struct Torch;

/// The index of several files.
const INDEX: &str = "pytorch_model.bin.index.json";

impl CheckpointFormat for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn about(&self) -> &'static str {
        "A torch.save file, or several with an index (read only)"
    }

    /// Any single file: this format is tried last, and its error describes best what is wrong with some other file.
    fn detect(&self, files: &Files) -> bool {
        files.single_file().is_some() || files.size(INDEX).is_some()
    }

    /// Nested dicts and lists become dotted keys, as in a DCP checkpoint.
    fn open(&self, files: &Files) -> Result<Contents> {
        if let Some(name) = files.single_file() {
            return contents(files, name);
        }
        let index = read_weight_index(files, INDEX)?;
        let names: BTreeSet<&String> = index.values().collect();
        let mut all = Contents::default();
        for name in names {
            let found = contents(files, name)?;
            // If two files have a tensor, the index decides.
            let of_file = |key: &String| index.get(key) == Some(name);
            all.tensors.extend(found.tensors.into_iter().filter(|(key, _)| of_file(key)));
            all.paths.extend(found.paths.into_iter().filter(|(key, _)| of_file(key)));
        }
        match index.keys().find(|key| !all.tensors.contains_key(*key)) {
            Some(missing) => Err(missing_tensor(missing, INCOMPLETE)),
            None => Ok(all),
        }
    }

    fn owns(&self, _: &str) -> bool {
        false
    }

    /// The checkpoint is a single file, or those of an index: other files of its directory do not matter.
    fn belongs(&self, _: &str) -> bool {
        true
    }
}

/// The tensors and values of one file.
fn contents(files: &Files, name: &str) -> Result<Contents> {
    let saved = TorchArchive::open(files, name, 0, files.size(name).unwrap_or(0))?;
    let mut contents = Contents::default();
    for (path, leaf) in saved.flatten(&[])? {
        if path.is_empty() {
            let needed = "a dict or list of tensors";
            let fix = "save {\"name\": tensor}";
            return Err(ErrorKind::Unsupported.error("torch.save file", "one tensor or value", needed, fix));
        }
        leaf.add_to(&mut contents, name, path)?;
    }
    Ok(contents)
}

#[cfg(test)]
mod tests;
