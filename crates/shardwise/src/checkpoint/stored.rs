//! What a checkpoint holds, whatever its format: tensors as boxes at places in files, and values.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::blocks::Blocks;
use super::element::ElementType;
use super::value::{Key, Value, flat_key};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;
use crate::sharded::{ShardMetadata, ShardedTensorMetadata};

/// The tensors and values of a checkpoint by flat key: what a [`CheckpointFormat`](super::CheckpointFormat) reads and writes.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    /// Tensors by flat key.
    pub tensors: BTreeMap<String, StoredTensor>,
    /// Values by flat key.
    pub values: BTreeMap<String, Value>,
    /// The path of every flat key in nested state; a key that is not here is its own path.
    pub paths: BTreeMap<String, Vec<Key>>,
}

/// A tensor in a checkpoint.
#[doc(alias = "TensorStorageMetadata")]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredTensor {
    /// Type of its elements.
    pub element: ElementType,
    /// Shape of the whole.
    pub shape: Vec<usize>,
    /// The boxes that it is stored in; together they fill it.
    pub chunks: Vec<Chunk>,
}

/// A box of a tensor, and where its elements are.
#[doc(alias = "ChunkStorageMetadata")]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The box.
    #[serde(flatten)]
    pub part: TensorBox,
    /// File, relative to the checkpoint's directory.
    pub file: String,
    /// Where its first element begins in the file.
    pub offset: u64,
    /// Distance between neighbours in every dimension, in elements, unless the box is stored row-major.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<usize>>,
    /// CRC-32 of its bytes, if the format has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
    /// CRC-32 of its blocks, if it was written with them: then a part of it is checked too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Blocks>,
}

impl StoredTensor {
    /// Number of elements.
    pub fn elem_count(&self) -> usize {
        self.shape.iter().fold(1, |count, &n| count.saturating_mul(n))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.elem_count().saturating_mul(self.element.size_in_bytes())
    }

    /// An error unless the chunks fill the tensor, each element once.
    fn check(&self, key: &str) -> Result<()> {
        let bounded = self.shape.iter().try_fold(self.element.size_in_bytes(), |count, &n| count.checked_mul(n.max(1)));
        if bounded.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let found = format!("tensor {key:?} of shape {:?}", self.shape);
            return Err(ErrorKind::Damaged.error("checkpoint", found, "a tensor that memory can address", NOT_OURS));
        }
        let shard = |chunk: &Chunk| ShardMetadata::new(chunk.part.offsets.clone(), chunk.part.sizes.clone(), None);
        let shards = self.chunks.iter().map(shard).collect::<Result<Vec<_>>>()?;
        let size = self.shape.clone();
        let whole = ShardedTensorMetadata { size, dtype: DType::U8, requires_grad: false, shards };
        whole.check_covering().map_err(|error| {
            let found = format!("tensor {key:?} whose chunks do not fit together ({error})");
            ErrorKind::Damaged.error("checkpoint", found, "chunks that fill the tensor, each element once", INCOMPLETE)
        })
    }
}

impl Chunk {
    /// Distances between neighbours, in elements.
    pub fn strides(&self) -> Vec<usize> {
        self.strides.clone().unwrap_or_else(|| row_major(&self.part.sizes))
    }

    /// Number of bytes from its first element to behind its last one; `None` if no file is that long.
    pub fn span(&self, element: ElementType) -> Option<u64> {
        if self.part.volume() == 0 {
            return Some(0);
        }
        let strides = self.strides();
        let last = self
            .part
            .sizes
            .iter()
            .zip(&strides)
            .try_fold(0u64, |last, (&n, &stride)| last.checked_add((n as u64 - 1).checked_mul(stride as u64)?))?;
        last.checked_add(1)?.checked_mul(element.size_in_bytes() as u64)
    }
}

impl Contents {
    /// Adds a tensor at a path of nested state.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if something has its flat key already.
    pub fn add_tensor(&mut self, path: Vec<Key>, tensor: StoredTensor) -> Result<()> {
        let key = self.free_key(&path)?;
        self.tensors.insert(key.clone(), tensor);
        self.paths.insert(key, path);
        Ok(())
    }

    /// Adds a value at a path of nested state; as [`add_tensor`](Self::add_tensor).
    pub fn add_value(&mut self, path: Vec<Key>, value: Value) -> Result<()> {
        let key = self.free_key(&path)?;
        self.values.insert(key.clone(), value);
        self.paths.insert(key, path);
        Ok(())
    }

    fn free_key(&self, path: &[Key]) -> Result<String> {
        let key = flat_key(path);
        if self.tensors.contains_key(&key) || self.values.contains_key(&key) {
            let found = format!("two entries with the flat key {key:?}");
            return Err(ErrorKind::Damaged.error("checkpoint", found, "different keys", NOT_OURS));
        }
        Ok(key)
    }

    /// Size of all tensors in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.tensors.values().map(StoredTensor::bytes).fold(0, usize::saturating_add)
    }

    /// An error unless everything fits together and is inside the files. `sizes` gives the size of a file by name, `None` if
    /// there is no such file.
    pub(super) fn check(&self, sizes: &dyn Fn(&str) -> Option<u64>) -> Result<()> {
        if let Some((key, _)) = self.paths.iter().find(|(_, path)| path.len() > MAX_DEPTH) {
            let (found, needed) = (format!("key {key:.40?}... of great depth"), format!("{MAX_DEPTH} steps at most"));
            return Err(ErrorKind::Damaged.error("checkpoint", found, needed, NOT_OURS));
        }
        for (key, tensor) in &self.tensors {
            tensor.check(key)?;
            for chunk in &tensor.chunks {
                check_file_name(&chunk.file)?;
                let Some(size) = sizes(&chunk.file) else {
                    let found = format!("no file {:?}, which has a part of tensor {key:?}", chunk.file);
                    return Err(ErrorKind::Damaged.error("checkpoint", found, "all files", INCOMPLETE));
                };
                if chunk.strides.as_ref().is_some_and(|strides| strides.len() != chunk.part.sizes.len()) {
                    let found = format!("tensor {key:?} with strides {:?}", chunk.strides);
                    return Err(ErrorKind::Damaged.error("checkpoint", found, "one stride per dimension", NOT_OURS));
                }
                // Strides of zero would make much of little: a file of a few bytes must not fill the memory.
                let bytes = chunk.part.volume().saturating_mul(tensor.element.size_in_bytes()) as u64;
                if chunk.strides.is_some() && bytes > size.max(MAX_EXPANDED) {
                    let found = format!("tensor {key:?} of {bytes} bytes, made by strides of a file of {size}");
                    return Err(ErrorKind::Damaged.error(
                        "checkpoint",
                        found,
                        "as many bytes as there are elements",
                        NOT_OURS,
                    ));
                }
                let span = chunk.span(tensor.element);
                if let Some(blocks) = &chunk.blocks
                    && !(chunk.strides.is_none() && span.is_some_and(|span| blocks.fits(span)))
                {
                    let found = format!("{} checksums of a part of tensor {key:?}", blocks.crc32.len());
                    return Err(ErrorKind::Damaged.error("checkpoint", found, "one per block of its bytes", NOT_OURS));
                }
                let end = span.and_then(|span| span.checked_add(chunk.offset));
                if end.is_none_or(|end| end > size) {
                    let found = format!("file {:?} of {size} bytes", chunk.file);
                    let needed = format!("{}, the end of a part of tensor {key:?}", end.unwrap_or(u64::MAX));
                    return Err(ErrorKind::Damaged.error(
                        "checkpoint",
                        found,
                        needed,
                        "the file is cut off; copy it again",
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Distances between neighbours of a box that is stored row-major.
pub(super) fn row_major(sizes: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(sizes[dim]);
    }
    strides
}

/// An error for a name that could lead out of the checkpoint's directory.
pub(super) fn check_file_name(name: &str) -> Result<()> {
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let path = Path::new(name);
    if !name.is_empty() && path.components().all(plain) && !name.contains('\\') && !name.contains('\0') {
        return Ok(());
    }
    let needed = "a name inside the checkpoint's directory";
    Err(ErrorKind::Damaged.error(
        "file name",
        format!("{name:?}"),
        needed,
        "do not load this checkpoint: it was made to do harm",
    ))
}

/// How deep state may be nested: nobody does, and walking it takes the stack.
const MAX_DEPTH: usize = 128;
/// What strides may make of a file that is smaller.
const MAX_EXPANDED: u64 = 64 << 20;

pub(super) const INCOMPLETE: &str = "the checkpoint is incomplete; copy or save it again";
pub(super) const NOT_OURS: &str = "the file is damaged, or was not written as a checkpoint";
