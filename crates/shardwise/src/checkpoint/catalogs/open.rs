//! Opening a checkpoint of any format: recognizing it and reading its metadata.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::directory::{check_no_scheme, parent_of, previous_path};
use crate::checkpoint::catalogs::format::Format;
use crate::error::{Error, ErrorKind, Result};

/// How often [`open`] starts over because a concurrent save replaced the checkpoint. Far more saves than can complete during
/// one open: reaching it means that the directory is not what it seems.
const ATTEMPTS: u32 = 100;

/// Opens the checkpoint at `path`, a directory or a single safetensors, GGUF or `torch.save` file, and reads its metadata.
///
/// Local: any rank may call it, and it needs no world. Reads no tensor elements. The metadata is validated: every chunk is
/// inside its file, and the chunks of each tensor cover it exactly once. If a save replaces the checkpoint meanwhile, the
/// new one is opened; the result never mixes two saves.
///
/// # Errors
/// [`ErrorKind::Damaged`] if no known format recognizes the path or its metadata is inconsistent; [`ErrorKind::Path`] if a
/// file cannot be read.
#[doc(alias = "FileSystemReader")]
#[doc(alias = "read_metadata")]
pub fn open(path: impl AsRef<Path>) -> Result<Catalog> {
    let path = path.as_ref();
    check_no_scheme(path)?;
    let mut attempt = 1;
    loop {
        let files = Arc::new(open_directory(path)?);
        let opened = read_descriptions(&files);
        // An apparently damaged checkpoint may be one whose files are being removed because a newer one replaced it.
        if opened.is_ok() || attempt >= ATTEMPTS || !files.is_replaced() {
            return opened;
        }
        attempt += 1;
    }
}

/// Opens the directory that a checkpoint is in, and keeps the handle.
fn open_directory(path: &Path) -> Result<Files> {
    // Where directories cannot be exchanged, the old checkpoint is renamed before the new one takes its place, and removed
    // afterwards: between two looks it may have moved, so it is looked for three times.
    for _ in 0..3 {
        for candidate in [path.to_path_buf(), previous_path(path)] {
            let directory = if candidate.is_file() { parent_of(&candidate) } else { candidate.clone() };
            match Files::open_at(&candidate, &directory) {
                Ok(files) => return Ok(files),
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
                Err(error) => return Err(not_one(format!("{error}: {}", candidate.display()))),
            }
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Err(not_one(format!("no such file or directory: {}", path.display())))
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

/// The format of the checkpoint at a path.
pub(in crate::checkpoint) fn format_of(path: &Path) -> Result<Format> {
    format_within(&open_directory(path)?)
}

fn format_within(files: &Files) -> Result<Format> {
    let none = || {
        not_one(match files.single_file() {
            Some(name) => format!("a file of no known format: {}", files.directory().join(name).display()),
            None => format!("a directory without a checkpoint: {}", files.directory().display()),
        })
    };
    Format::detect(files).ok_or_else(none)
}

fn not_one(found: String) -> Error {
    let known: Vec<&str> = Format::all().into_iter().map(Format::name).collect();
    let needed = format!("a checkpoint of a known format ({})", known.join(", "));
    ErrorKind::Damaged.error("checkpoint", found, needed, "pass the path of a checkpoint's directory or file")
}
