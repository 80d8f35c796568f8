//! Files of `torch.save`: a zip archive with a pickle, and an entry per storage.

mod saved;
mod write;

use std::path::Path;
use std::sync::Arc;

use super::catalog::{Catalog, Chunk, Format, NOT_OURS, StoredTensor};
use super::element::ElementType;
use super::files::Files;
use super::value::{Key, flat_key};
use crate::error::{Error, Result};
use crate::layout::TensorBox;

pub(super) use saved::{Leaf, Located, Saved, at_key};
pub(super) use write::{write_tensor, write_value};

/// What is in one file of `torch.save`: nested dicts and lists become keys with dots, as PyTorch's distributed checkpoint has
/// them.
pub(super) fn open(directory: &Path, files: &Arc<Files>, name: &str) -> Result<Catalog> {
    let size = files.size(name).unwrap_or(0);
    let saved = Saved::open(files, name, 0, size)?;
    let mut catalog = Catalog::new(Format::Torch, directory, files);
    for (path, leaf) in saved.flatten(&[])? {
        if path.is_empty() {
            let needed = "a dict or list of tensors";
            return Err(Error::invalid("torch.save file", "one tensor or value", needed, "save {\"name\": tensor}"));
        }
        add(&mut catalog, name, path, leaf)?;
    }
    Ok(catalog)
}

/// Adds what was found in a file to a catalog; an error if its key is taken.
pub(super) fn add(catalog: &mut Catalog, file: &str, path: Vec<Key>, leaf: Leaf) -> Result<()> {
    let key = flat_key(&path);
    let taken = match leaf {
        Leaf::Value(value) => catalog.values.insert(key.clone(), value).is_some(),
        Leaf::Tensor(located) => catalog.tensors.insert(key.clone(), located.whole(file)).is_some(),
    };
    if taken || catalog.tensors.contains_key(&key) && catalog.values.contains_key(&key) {
        let found = format!("two entries with the flat key {key:?}");
        return Err(Error::invalid("checkpoint", found, "different keys", NOT_OURS));
    }
    catalog.paths.insert(key, path);
    Ok(())
}

impl Located {
    /// The tensor as one that a checkpoint has in one piece.
    fn whole(self, file: &str) -> StoredTensor {
        let (element, shape) = (self.element, self.sizes.clone());
        let part = TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() };
        StoredTensor { element, shape, chunks: vec![self.chunk(part, file)] }
    }

    /// The tensor as a chunk of another.
    pub(super) fn chunk(self, part: TensorBox, file: &str) -> Chunk {
        let Located { offset, strides, crc32, blocks, .. } = self;
        Chunk { part, file: file.to_string(), offset, strides, crc32, blocks }
    }
}

/// The entry with the checksums of the blocks of storage 0, in archives of one tensor that this library wrote. PyTorch does
/// not look at it.
const CHECKSUMS: &str = ".shardwise_crc32";

/// The classes of storages that have a type of elements; other types lie in storages of bytes.
const STORAGES: &[(&str, ElementType)] = &[
    ("FloatStorage", ElementType::F32),
    ("DoubleStorage", ElementType::F64),
    ("HalfStorage", ElementType::F16),
    ("BFloat16Storage", ElementType::BF16),
    ("LongStorage", ElementType::I64),
    ("IntStorage", ElementType::I32),
    ("ShortStorage", ElementType::I16),
    ("CharStorage", ElementType::I8),
    ("ByteStorage", ElementType::U8),
    ("BoolStorage", ElementType::Bool),
    ("ComplexFloatStorage", ElementType::C64),
];

#[cfg(test)]
mod tests;
