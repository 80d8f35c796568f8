//! GGUF files of llama.cpp: tensors, quantized or not, and metadata that describes the model and its tokenizer.
//!
//! [`open`](crate::checkpoint::open) reads a file under the names it has: tensors with their dimensions in row-major order, quantized ones
//! as `f32`, and the metadata as values. [`open_as_hf`] sees the file as the Hugging Face directory that it comes from, with
//! the names, configuration and tokenizer of one; [`convert`](crate::checkpoint::convert()) to Hugging Face's format writes that directory.

mod config;
mod families;
mod header;
mod metadata;
mod pooling;
mod pre_tokenizer;
mod rope;
mod split;
mod tokenizer;
mod view;
mod wordpiece;

pub use pooling::FilePooling;
pub use view::{HfView, open_as_hf};

use std::path::{Path, PathBuf};

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::CheckpointFormat;
use crate::checkpoint::metadata::encoding::ChunkEncoding;
use crate::checkpoint::metadata::stored::{Chunk, Contents, StoredTensor};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;
use header::{GgufHeader, StoredType};

/// See the module's documentation.
pub(in crate::checkpoint) struct Gguf;

const MAGIC: &[u8] = b"GGUF";

impl CheckpointFormat for Gguf {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn about(&self) -> &'static str {
        "A GGUF file, or several of one model (read only)"
    }

    fn detect(&self, files: &Files) -> bool {
        match files.single_file() {
            Some(name) => is_gguf(name) || has_magic(files, name),
            None => files.names().is_ok_and(|names| names.iter().any(|name| is_gguf(name))),
        }
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        let names = split::parts(&file_name(files)?);
        let mut all = Contents::default();
        for (index, name) in names.iter().enumerate() {
            let header = GgufHeader::read(files, name)?;
            split::check(name, &header.values, index, names.len())?;
            // The first file describes the model.
            if index == 0 {
                all.values = header.values;
            }
            for tensor in header.tensors {
                let (element, encoding) = match tensor.stored {
                    StoredType::Plain(element) => (element, None),
                    StoredType::Blocks(block) => {
                        (crate::checkpoint::ElementType::F32, Some(ChunkEncoding::Quantized(block)))
                    }
                };
                let part = TensorBox { offsets: vec![0; tensor.shape.len()], sizes: tensor.shape.clone() };
                let (file, offset) = (name.clone(), tensor.offset);
                let chunk = Chunk { part, file, offset, strides: None, crc32: None, blocks: None, encoding };
                let stored = StoredTensor { element, shape: tensor.shape, chunks: vec![chunk] };
                if all.tensors.insert(tensor.name.clone(), stored).is_some() {
                    let found = format!("tensor {:?} in {name:?} and in a file before it", tensor.name);
                    let fix = "the files do not belong together; copy them again";
                    return Err(ErrorKind::Damaged.error("GGUF checkpoint", found, "each tensor once", fix));
                }
            }
        }
        Ok(all)
    }

    fn owns(&self, _: &str) -> bool {
        false
    }

    /// The checkpoint is a single file, or those it was split into: other files of its directory do not matter.
    fn belongs(&self, _: &str) -> bool {
        true
    }
}

/// The files of the model that a GGUF file is a part of: only the file, or all parts of a split.
pub(crate) fn parts_of(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    split::parts(&name).iter().map(|part| path.with_file_name(part)).collect()
}

fn is_gguf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

fn has_magic(files: &Files, name: &str) -> bool {
    let mut magic = [0; 4];
    files.size(name).is_some_and(|size| size >= 4) && files.read(name, 0, &mut magic).is_ok() && magic == MAGIC
}

/// The name of the GGUF file: the one that was opened, or the only one of the directory, or the first of those of one model.
fn file_name(files: &Files) -> Result<String> {
    if let Some(name) = files.single_file() {
        return Ok(name.to_string());
    }
    let names: Vec<String> = files.names()?.into_iter().filter(|name| is_gguf(name)).collect();
    match names.as_slice() {
        [name] => Ok(name.clone()),
        [first, ..] if split::parts(first) == names => Ok(first.clone()),
        several => {
            let found = format!("{} in {}", several.join(", "), files.directory().display());
            Err(ErrorKind::path(files.directory()).error(
                "GGUF checkpoint",
                found,
                "one GGUF file",
                "pass the path of the file instead of its directory",
            ))
        }
    }
}
