//! `torch.save` files: a zip archive with a pickle, and an entry per storage.

mod names;
mod archive;
mod write;

use super::files::Files;
use super::format::CheckpointFormat;
use super::stored::Contents;
use crate::error::{ErrorKind, Result};

pub(super) use archive::{TorchArchive, at_key};
pub(super) use write::{write_tensor, write_value};

/// See the module's documentation.
pub(super) struct Torch;

impl CheckpointFormat for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn about(&self) -> &'static str {
        "A single torch.save file (read only)"
    }

    /// Any single file: this format is tried last, and its error describes best what is wrong with some other file.
    fn detect(&self, files: &Files) -> bool {
        files.single_file().is_some()
    }

    /// Nested dicts and lists become dotted keys, as in a DCP checkpoint.
    fn open(&self, files: &Files) -> Result<Contents> {
        let name = files.single_file().unwrap_or_default();
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

    fn owns(&self, _: &str) -> bool {
        false
    }

    /// The checkpoint is a single file: other files of its directory do not matter.
    fn belongs(&self, _: &str) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;
