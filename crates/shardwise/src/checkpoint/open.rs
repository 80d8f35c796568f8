//! Finding out what is in a checkpoint, whatever its format.

use std::path::Path;

use super::catalog::{Catalog, Format};
use super::directory::resolve;
use super::read::Files;
use super::{dcp, hf, native, torch};
use crate::error::{Error, Result};

/// What is in the checkpoint at a path: a directory, or one file of safetensors or `torch.save`. Only descriptions are read, and everything
/// about them is checked: what is found lies inside the files, and the boxes of every tensor fill it.
pub fn open(path: impl AsRef<Path>) -> Result<Catalog> {
    let path = resolve(path.as_ref());
    let (directory, single) = match path.is_file() {
        true => (super::directory::parent_of(&path), path.file_name().map(|n| n.to_string_lossy().into_owned())),
        false => (path.clone(), None),
    };
    let files = Files::new(&directory);
    let catalog = match format_of(&path)? {
        Format::Native => native::open(&directory, &files)?,
        Format::HuggingFace => hf::open(&directory, &files, single.as_deref())?,
        Format::Dcp => dcp::open(&directory, &files)?,
        Format::Torch => torch::open(&directory, &files, single.as_deref().unwrap_or_default())?,
    };
    catalog.check(&|name| files.size(name))?;
    Ok(catalog)
}

/// The format of what is at a path.
pub(super) fn format_of(path: &Path) -> Result<Format> {
    let has_extension = |p: &Path, e: &str| p.extension().is_some_and(|x| x == e);
    if path.join(native::MANIFEST).is_file() {
        return Ok(Format::Native);
    }
    if path.join(dcp::METADATA).is_file() {
        return Ok(Format::Dcp);
    }
    if has_extension(path, "safetensors") && path.is_file() || path.join(hf::INDEX).is_file() {
        return Ok(Format::HuggingFace);
    }
    let is_dir = path.is_dir();
    if is_dir && std::fs::read_dir(path)?.flatten().any(|entry| has_extension(&entry.path(), "safetensors")) {
        return Ok(Format::HuggingFace);
    }
    if path.is_file() {
        return Ok(Format::Torch);
    }
    let found = if is_dir { "a directory without one" } else { "nothing there" };
    Err(Error::invalid(
        "checkpoint",
        format!("{found}: {}", path.display()),
        "manifest.json, .metadata, *.safetensors or a file of torch.save",
        "name the directory or the file of a checkpoint",
    ))
}
