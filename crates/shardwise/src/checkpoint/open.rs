//! Finding out what is in a checkpoint, whatever its format.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::catalog::{Catalog, Format};
use super::directory::{aside, parent_of};
use super::files::Files;
use super::{dcp, hf, native, torch};
use crate::error::{Error, Result};

/// How often a checkpoint is opened anew because another save has replaced it meanwhile.
const ATTEMPTS: u32 = 100;

/// What is in the checkpoint at a path: a directory, or one file of safetensors or `torch.save`. Only descriptions are read,
/// and everything about them is checked: what is found lies inside the files, and the boxes of every tensor fill it.
///
/// Local: every rank may open it by itself. If a save replaces the checkpoint meanwhile, the new one is opened; what is
/// returned is always one of them and never parts of two.
pub fn open(path: impl AsRef<Path>) -> Result<Catalog> {
    let path = path.as_ref();
    let mut attempt = 1;
    loop {
        let (files, single) = hold(path)?;
        let opened = read_descriptions(&files, single.as_deref());
        // What looks like damage may be that files are being removed because there is a newer checkpoint.
        if opened.is_ok() || attempt >= ATTEMPTS || !files.is_replaced() {
            return opened;
        }
        attempt += 1;
    }
}

/// Holds the directory that a checkpoint is in, and the name of the file if it is one.
fn hold(path: &Path) -> Result<(Arc<Files>, Option<String>)> {
    // Where directories cannot be exchanged, the old checkpoint is moved aside before the new one takes its place, and
    // removed after: between two looks it may have changed places.
    for _ in 0..3 {
        for candidate in [path.to_path_buf(), aside(path)] {
            let directory = if candidate.is_file() { parent_of(&candidate) } else { candidate.clone() };
            match Files::hold(&candidate, &directory) {
                Ok(files) => {
                    let name = || candidate.file_name().map(|name| name.to_string_lossy().into_owned());
                    return Ok((Arc::new(files), candidate.is_file().then(name).flatten()));
                }
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                Err(error) => return Err(not_one(format!("{error}: {}", candidate.display()))),
            }
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(not_one(format!("nothing there: {}", path.display())))
}

fn read_descriptions(files: &Arc<Files>, single: Option<&str>) -> Result<Catalog> {
    let directory: PathBuf = files.directory().to_path_buf();
    let catalog = match format_within(files, single)? {
        Format::Native => native::open(&directory, files)?,
        Format::HuggingFace => hf::open(&directory, files, single)?,
        Format::Dcp => dcp::open(&directory, files)?,
        Format::Torch => torch::open(&directory, files, single.unwrap_or_default())?,
    };
    let used = catalog.tensors.values().flat_map(|tensor| tensor.chunks.iter().map(|chunk| chunk.file.as_str()));
    let used: BTreeSet<&str> = used.filter(|name| files.size(name).is_some()).collect();
    files.keep(used)?;
    catalog.check(&|name| files.size(name))?;
    Ok(catalog)
}

/// The format of what is at a path.
pub(super) fn format_of(path: &Path) -> Result<Format> {
    let (files, single) = hold(path)?;
    format_within(&files, single.as_deref())
}

fn format_within(files: &Files, single: Option<&str>) -> Result<Format> {
    if let Some(name) = single {
        return Ok(if hf::is_safetensors(name) { Format::HuggingFace } else { Format::Torch });
    }
    for (name, format) in
        [(native::MANIFEST, Format::Native), (dcp::METADATA, Format::Dcp), (hf::INDEX, Format::HuggingFace)]
    {
        if files.size(name).is_some() {
            return Ok(format);
        }
    }
    if files.names()?.iter().any(|name| hf::is_safetensors(name)) {
        return Ok(Format::HuggingFace);
    }
    Err(not_one(format!("a directory without one: {}", files.directory().display())))
}

fn not_one(found: String) -> Error {
    let needed = "manifest.json, .metadata, *.safetensors or a file of torch.save";
    Error::invalid("checkpoint", found, needed, "name the directory or the file of a checkpoint")
}
