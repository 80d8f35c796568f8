//! Files of `torch.save`: a zip archive with a pickle, and an entry per storage.

mod names;
mod archive;
mod write;

use super::files::Files;
use super::format::CheckpointFormat;
use super::stored::Contents;
use crate::error::{ErrorKind, Result};

pub(super) use archive::{TorchArchive, at_key};
pub(super) use write::{write_tensor, write_value};

/// The format, see above.
pub(super) struct Torch;

impl CheckpointFormat for Torch {
    fn name(&self) -> &'static str {
        "torch"
    }

    fn about(&self) -> &'static str {
        "one file of torch.save"
    }

    /// Every single file: it is asked last, and an error of the archive says most about a file that is something else.
    fn detect(&self, files: &Files) -> bool {
        files.single_file().is_some()
    }

    /// Nested dicts and lists become keys with dots, as PyTorch's distributed checkpoint has them.
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

    /// The checkpoint is one file: others in its directory do not matter.
    fn belongs(&self, _: &str) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;
