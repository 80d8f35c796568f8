//! Writing the files of a checkpoint in any format, and completing them with the index.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::Path;

use crate::checkpoint::bytes::content::BoxToWrite;
use crate::checkpoint::catalogs::directory::{sync, unwritable};
use crate::checkpoint::catalogs::format::{FileToWrite, FormatWriter, WrittenFile};
use crate::checkpoint::metadata::stored::Contents;
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::{Error, Result};

/// Distributes the boxes of one rank over files: one file, or several if the format allows only one box of a tensor per file.
pub(in crate::checkpoint) fn boxes_by_file(writer: &dyn FormatWriter, boxes: Vec<BoxToWrite>) -> Vec<Vec<BoxToWrite>> {
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

/// Writes boxes to a file and syncs it to disk. `values` are non-empty only for a format that stores them in such files;
/// `progress` is called with numbers of bytes.
pub(in crate::checkpoint) fn write_file(
    writer: &dyn FormatWriter,
    directory: &Path,
    name: &str,
    boxes: Vec<BoxToWrite>,
    (values, paths): (&BTreeMap<String, Value>, &BTreeMap<String, Vec<Key>>),
    progress: &dyn Fn(u64),
) -> Result<WrittenFile> {
    let path = directory.join(name);
    let file = FileToWrite { name, boxes, values, paths, progress };
    let written = write_to(writer, &path, file).map_err(|error| match error {
        // An I/O error without the path would not help.
        Error::Io(error) => unwritable(&path, &error),
        other => other,
    });
    if written.is_err() {
        // On a full disk this makes room for the report of the error.
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

/// Completes a checkpoint: collects the chunks of all files, writes the format's index and syncs the directory. `contents` has
/// all tensors without their chunks.
pub(in crate::checkpoint) fn finish_checkpoint(
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
