//! PyTorch's distributed checkpoint (DCP): a pickled `.metadata` file, and `.distcp` files with one `torch.save` archive per
//! chunk or value.

mod names;
mod read;
mod write;

use std::fs::File;
use std::io::BufWriter;

use serde::Deserialize;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::{
    CheckpointFormat, FileRole, FileToWrite, FormatWriter, ValueStorage, WrittenFile,
};
use crate::checkpoint::metadata::stored::{Contents, StoredTensor};
use crate::error::{Error, Result};
use names::METADATA;
use write::{ArchiveLocation, metadata_bytes, write_file};

/// See the module's documentation.
pub(in crate::checkpoint) struct Dcp;

impl CheckpointFormat for Dcp {
    fn name(&self) -> &'static str {
        "dcp"
    }

    fn about(&self) -> &'static str {
        "PyTorch's distributed checkpoint"
    }

    fn detect(&self, files: &Files) -> bool {
        files.single_file().is_none() && files.has(METADATA)
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        read::contents(files)
    }

    fn owns(&self, name: &str) -> bool {
        name == METADATA || name.ends_with(".distcp")
    }

    fn writer(&self) -> Option<&dyn FormatWriter> {
        Some(self)
    }
}

impl FormatWriter for Dcp {
    fn values(&self) -> ValueStorage {
        ValueStorage::InFiles
    }

    fn torch_state(&self) -> bool {
        true
    }

    fn file_name(&self, file: FileRole) -> String {
        let (FileRole::Whole { index, .. } | FileRole::OfRank { rank: index, .. }) = file;
        format!("__{index}_0.distcp")
    }

    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile> {
        let tensors: Vec<_> = file.boxes.into_iter().map(|b| (b.key, b.part, b.content)).collect();
        let values: Vec<_> = file.values.iter().map(|(key, value)| (key.clone(), value)).collect();
        let locations = write_file(out, file.name, &tensors, &values, file.progress)?;
        let chunks =
            locations.iter().filter_map(|location| Some((location.key.clone(), location.chunk.clone()?))).collect();
        let note = serde_json::to_value(locations).map_err(Error::other)?;
        Ok(WrittenFile { name: file.name.to_string(), chunks, note })
    }

    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>> {
        let mut locations = Vec::new();
        for file in files {
            locations.extend(Vec::<ArchiveLocation>::deserialize(&file.note).map_err(Error::other)?);
        }
        let described = |(key, t): (&String, &StoredTensor)| (key.clone(), (t.element, t.shape.clone()));
        let tensors = contents.tensors.iter().map(described).collect();
        Ok(Some((
            METADATA.to_string(),
            metadata_bytes(&tensors, &locations, &contents.paths, contents.save_id.as_deref())?,
        )))
    }
}

#[cfg(test)]
mod tests;
