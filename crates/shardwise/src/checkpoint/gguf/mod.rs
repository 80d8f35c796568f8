//! GGUF files of llama.cpp: tensors, quantized or not, and metadata that describes the model and its tokenizer.
//!
//! [`open`](super::open) reads a file under the names it has: tensors with their dimensions in row-major order, quantized ones
//! as `f32`, and the metadata as values. [`open_as_hf`] sees the file as the Hugging Face directory that it comes from, with
//! the names, configuration and tokenizer of one; [`convert`](super::convert()) to Hugging Face's format writes that directory.

mod config;
mod families;
mod header;
mod metadata;
mod pre_tokenizer;
mod rope;
mod tokenizer;
mod view;

pub use view::{HfView, open_as_hf};

use std::collections::BTreeMap;
use std::path::Path;

use super::encoding::ChunkEncoding;
use super::files::Files;
use super::format::CheckpointFormat;
use super::stored::{Chunk, Contents, StoredTensor};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;
use header::{GgufHeader, StoredType};

/// See the module's documentation.
pub(super) struct Gguf;

const MAGIC: &[u8] = b"GGUF";

impl CheckpointFormat for Gguf {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn about(&self) -> &'static str {
        "A GGUF file (read only)"
    }

    fn detect(&self, files: &Files) -> bool {
        match files.single_file() {
            Some(name) => is_gguf(name) || has_magic(files, name),
            None => files.names().is_ok_and(|names| names.iter().any(|name| is_gguf(name))),
        }
    }

    fn open(&self, files: &Files) -> Result<Contents> {
        let name = file_name(files)?;
        let header = GgufHeader::read(files, &name)?;
        let mut tensors = BTreeMap::new();
        for tensor in header.tensors {
            let (element, encoding) = match tensor.stored {
                StoredType::Plain(element) => (element, None),
                StoredType::Blocks(block) => (super::ElementType::F32, Some(ChunkEncoding::Quantized(block))),
            };
            let part = TensorBox { offsets: vec![0; tensor.shape.len()], sizes: tensor.shape.clone() };
            let file = name.clone();
            let chunk = Chunk { part, file, offset: tensor.offset, strides: None, crc32: None, blocks: None, encoding };
            tensors.insert(tensor.name, StoredTensor { element, shape: tensor.shape, chunks: vec![chunk] });
        }
        Ok(Contents { tensors, values: header.values, paths: BTreeMap::new() })
    }

    fn owns(&self, _: &str) -> bool {
        false
    }

    /// The checkpoint is a single file: other files of its directory do not matter.
    fn belongs(&self, _: &str) -> bool {
        true
    }
}

fn is_gguf(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

fn has_magic(files: &Files, name: &str) -> bool {
    let mut magic = [0; 4];
    files.size(name).is_some_and(|size| size >= 4) && files.read(name, 0, &mut magic).is_ok() && magic == MAGIC
}

/// The name of the GGUF file: the one that was opened, or the only one of the directory.
fn file_name(files: &Files) -> Result<String> {
    if let Some(name) = files.single_file() {
        return Ok(name.to_string());
    }
    let names: Vec<String> = files.names()?.into_iter().filter(|name| is_gguf(name)).collect();
    match names.as_slice() {
        [name] => Ok(name.clone()),
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
