//! Finding out what is in a checkpoint, whatever its format.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::catalog::Catalog;
use super::directory::{aside, parent_of};
use super::files::Files;
use super::format::Format;
use crate::error::{Error, ErrorKind, Result};

/// How often a checkpoint is opened anew because another save has replaced it meanwhile.
const ATTEMPTS: u32 = 100;

/// What is in the checkpoint at a path: a directory, or one file of safetensors or `torch.save`. Only descriptions are read,
/// and everything about them is checked: what is found lies inside the files, and the boxes of every tensor fill it.
///
/// Local: every rank may open it by itself. If a save replaces the checkpoint meanwhile, the new one is opened; what is
/// returned is always one of them and never parts of two.
#[doc(alias = "FileSystemReader")]
#[doc(alias = "read_metadata")]
pub fn open(path: impl AsRef<Path>) -> Result<Catalog> {
    let path = path.as_ref();
    let mut attempt = 1;
    loop {
        let files = Arc::new(hold(path)?);
        let opened = read_descriptions(&files);
        // What looks like damage may be that files are being removed because there is a newer checkpoint.
        if opened.is_ok() || attempt >= ATTEMPTS || !files.is_replaced() {
            return opened;
        }
        attempt += 1;
    }
}

/// Holds the directory that a checkpoint is in.
fn hold(path: &Path) -> Result<Files> {
    // Where directories cannot be exchanged, the old checkpoint is moved aside before the new one takes its place, and
    // removed after: between two looks it may have changed places.
    for _ in 0..3 {
        for candidate in [path.to_path_buf(), aside(path)] {
            let directory = if candidate.is_file() { parent_of(&candidate) } else { candidate.clone() };
            match Files::hold(&candidate, &directory) {
                Ok(files) => return Ok(files),
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
                Err(error) => return Err(not_one(format!("{error}: {}", candidate.display()))),
            }
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(not_one(format!("nothing there: {}", path.display())))
}

fn read_descriptions(files: &Arc<Files>) -> Result<Catalog> {
    let format = format_within(files)?;
    let contents = format.0.open(files)?;
    let used = contents.tensors.values().flat_map(|tensor| tensor.chunks.iter().map(|chunk| chunk.file.as_str()));
    let used: BTreeSet<&str> = used.filter(|name| files.size(name).is_some()).collect();
    files.keep(used)?;
    contents.check(&|name| files.size(name))?;
    Ok(Catalog::new(format, contents, Arc::clone(files)))
}

/// The format of what is at a path.
pub(super) fn format_of(path: &Path) -> Result<Format> {
    format_within(&hold(path)?)
}

fn format_within(files: &Files) -> Result<Format> {
    let none = || not_one(format!("a directory without one: {}", files.directory().display()));
    Format::detect(files).ok_or_else(none)
}

fn not_one(found: String) -> Error {
    let known: Vec<&str> = Format::all().into_iter().map(Format::name).collect();
    let needed = format!("a checkpoint of a known format ({})", known.join(", "));
    ErrorKind::Damaged.error("checkpoint", found, needed, "name the directory or the file of a checkpoint")
}
