//! `torch.save` files: a zip archive with a pickle, and an entry per storage. One file, or several with
//! `pytorch_model.bin.index.json` in a directory.

mod names;
mod archive;
mod write;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufWriter;

use serde_json::Value as Json;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::{
    CheckpointFormat, FileRole, FileToWrite, FormatWriter, ValueStorage, WrittenFile,
};
use crate::checkpoint::formats::weight_index::{index_text, missing_tensor, read_weight_index};
use crate::checkpoint::metadata::stored::{Contents, INCOMPLETE};
use crate::error::{ErrorKind, Result};

pub(in crate::checkpoint) use archive::{TorchArchive, TorchLeaf, at_key, unreadable};
use write::write_state;
pub(in crate::checkpoint) use write::{write_tensor, write_value};

/// See the module's documentation.
pub(in crate::checkpoint) struct Torch;

/// The index of several files.
const INDEX: &str = "pytorch_model.bin.index.json";
/// The file of a directory without an index.
const SINGLE: &str = "pytorch_model.bin";

impl CheckpointFormat for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn about(&self) -> &'static str {
        "A torch.save file of whole tensors, or several with an index"
    }

    /// A single file that begins as an archive: what is wrong with one of them is then an error of this format.
    fn detect(&self, files: &Files) -> bool {
        files.single_file().is_some_and(|name| is_archive(files, name))
            || [INDEX, SINGLE].iter().any(|name| files.has(name))
    }

    /// Nested dicts and lists become dotted keys, as in a DCP checkpoint.
    fn open(&self, files: &Files) -> Result<Contents> {
        if let Some(name) = files.single_file() {
            return contents(files, name);
        }
        if !files.has(INDEX) {
            return contents(files, SINGLE);
        }
        let index = read_weight_index(files, INDEX)?;
        let mut names: BTreeSet<&String> = index.values().collect();
        // A rank that had no tensor to write may have written the values: its file has the number of files in its name too.
        let all_names = files.names()?;
        let count_of = |name: &str| name.rsplit_once("-of-").map(|(_, count)| count.to_string());
        let counts: BTreeSet<_> = names.iter().filter_map(|name| count_of(name)).collect();
        names.extend(
            all_names.iter().filter(|name| self.owns(name) && count_of(name).is_some_and(|c| counts.contains(&c))),
        );
        let mut all = Contents::default();
        for name in names {
            let found = contents(files, name)?;
            // If two files have a tensor, the index decides.
            let of_file = |key: &String| index.get(key) == Some(name);
            let of_values = |key: &String| found.values.contains_key(key) || found.unreadable.contains_key(key);
            all.paths.extend(found.paths.iter().filter(|(key, _)| of_values(key)).map(|(k, p)| (k.clone(), p.clone())));
            all.values.extend(found.values);
            all.unreadable.extend(found.unreadable);
            all.python_objects.extend(found.python_objects);
            all.tensors.extend(found.tensors.into_iter().filter(|(key, _)| of_file(key)));
            all.paths.extend(found.paths.into_iter().filter(|(key, _)| of_file(key)));
        }
        match index.keys().find(|key| !all.tensors.contains_key(*key) && !all.unreadable.contains_key(*key)) {
            Some(missing) => Err(missing_tensor(missing, INCOMPLETE)),
            None => Ok(all),
        }
    }

    fn owns(&self, name: &str) -> bool {
        name == INDEX || name.starts_with("pytorch_model") && name.ends_with(".bin")
    }

    /// The checkpoint is a single file, or those of an index: other files of its directory do not matter.
    fn belongs(&self, _: &str) -> bool {
        true
    }

    fn writer(&self) -> Option<&dyn FormatWriter> {
        Some(self)
    }
}

/// Whole tensors in files that `torch.load` returns as nested dicts and lists. A save by several ranks writes one file per rank
/// that has tensors to write, with an index, and refuses parts of tensors; conversions write whole tensors.
impl FormatWriter for Torch {
    fn values(&self) -> ValueStorage {
        ValueStorage::InFiles
    }

    fn torch_state(&self) -> bool {
        true
    }

    fn file_name(&self, file: FileRole) -> String {
        match file {
            FileRole::Whole { count: 1, .. } | FileRole::OfRank { ranks: 1, .. } => SINGLE.to_string(),
            FileRole::Whole { index, count } | FileRole::OfRank { rank: index, ranks: count, .. } => {
                format!("pytorch_model-{:05}-of-{count:05}.bin", index + 1)
            }
        }
    }

    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile> {
        let chunks = write_state(out, &file)?;
        Ok(WrittenFile { name: file.name.to_string(), chunks, note: Json::Null })
    }

    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>> {
        let is_single = matches!(files, [file] if file.name == SINGLE);
        Ok(if is_single { None } else { Some((INDEX.to_string(), index_text(&contents.tensors)?.into_bytes())) })
    }
}

fn is_archive(files: &Files, name: &str) -> bool {
    let mut begin = [0; 4];
    files.size(name).is_some_and(|size| size >= 4) && files.read(name, 0, &mut begin).is_ok() && &begin == b"PK\x03\x04"
}

/// The tensors and values of one file.
fn contents(files: &Files, name: &str) -> Result<Contents> {
    let saved = TorchArchive::open(files, name, 0, files.size(name).unwrap_or(0))?;
    let mut contents = Contents::default();
    for (path, leaf) in saved.flatten(&[])? {
        if path.is_empty() {
            let found = match leaf {
                TorchLeaf::Unreadable(reason) | TorchLeaf::Object(reason) => {
                    format!("nothing but {reason}; nothing was executed")
                }
                _ => "one tensor or value".to_string(),
            };
            let needed = "a dict or list of tensors";
            let fix = "save {\"name\": tensor}";
            return Err(ErrorKind::Unsupported.error("torch.save file", found, needed, fix));
        }
        leaf.add_to(&mut contents, name, path)?;
    }
    Ok(contents)
}

#[cfg(test)]
mod tests;
