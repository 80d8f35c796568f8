//! Files of a checkpoint written in any format, and what makes files a checkpoint.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;

use super::content::BoxToWrite;
use super::directory::{sync, unwritable};
use super::format::{FileToWrite, FormatWriter, WrittenFile};
use super::stored::Contents;
use super::value::Value;
use crate::error::{Error, Result};

/// The boxes of one rank by file, one file at least. In a format that knows boxes by the name of their tensor alone, boxes of
/// one tensor go to different files.
pub(super) fn in_files(writer: &dyn FormatWriter, boxes: Vec<BoxToWrite>) -> Vec<Vec<BoxToWrite>> {
    let mut files: Vec<Vec<BoxToWrite>> = vec![Vec::new()];
    for next in boxes {
        let free = |file: &&mut Vec<BoxToWrite>| {
            !writer.one_box_per_file() || file.iter().all(|written| written.key != next.key)
        };
        match files.iter_mut().find(free) {
            Some(file) => file.push(next),
            None => files.push(vec![next]),
        }
    }
    files
}

/// Writes boxes to a file of a directory and makes it durable. `values` go along in a format that has them in such files;
/// `progress` hears of bytes.
pub(super) fn write_file(
    writer: &dyn FormatWriter,
    directory: &Path,
    name: &str,
    boxes: Vec<BoxToWrite>,
    values: &BTreeMap<String, Value>,
    progress: &dyn Fn(u64),
) -> Result<WrittenFile> {
    let path = directory.join(name);
    let file = FileToWrite { name, boxes, values, progress };
    let written = write_to(writer, &path, file).map_err(|error| match error {
        // Which file it was is what helps.
        Error::Io(error) => unwritable(&path, &error),
        other => other,
    });
    if written.is_err() {
        // The space is needed to say what went wrong.
        let _ = fs::remove_file(&path);
    }
    written
}

fn write_to(writer: &dyn FormatWriter, path: &Path, file: FileToWrite<'_>) -> Result<WrittenFile> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let written = writer.write_file(&mut out, file)?;
    out.into_inner().map_err(|error| Error::from(error.into_error()))?.sync_all()?;
    Ok(written)
}

/// Makes written files a checkpoint: adds the file that says what is where. `contents` has all tensors but for their chunks.
pub(super) fn seal(
    writer: &dyn FormatWriter,
    directory: &Path,
    mut contents: Contents,
    mut files: Vec<WrittenFile>,
) -> Result<()> {
    for file in &mut files {
        for (key, chunk) in std::mem::take(&mut file.chunks) {
            if let Some(tensor) = contents.tensors.get_mut(&key) {
                tensor.chunks.push(chunk);
            }
        }
    }
    contents.tensors.values_mut().for_each(|t| t.chunks.sort_by(|a, b| a.part.offsets.cmp(&b.part.offsets)));
    if let Some((name, bytes)) = writer.index(&contents, &files)? {
        let path = directory.join(name);
        fs::write(&path, bytes).map_err(|error| unwritable(&path, &error))?;
    }
    sync(directory)
}
