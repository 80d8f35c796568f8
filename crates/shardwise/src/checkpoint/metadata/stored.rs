//! Checkpoint metadata, independent of the format: tensors as chunks at offsets in files, and values.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use candle_core::DType;
use serde::{Deserialize, Serialize};
use shardwise_kernels::quantized::BlockType;

use crate::checkpoint::metadata::blocks::BlockChecksums;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::encoding::ChunkEncoding;
use crate::checkpoint::metadata::value::{Key, Value, flat_key};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorBox;
use crate::sharded::{ShardMetadata, ShardedTensorMetadata};

/// The metadata that a [`CheckpointFormat`](crate::checkpoint::CheckpointFormat) reads and writes: tensors and values by flat key.
///
/// [`open`](crate::checkpoint::open) validates it and returns it as a [`Catalog`](crate::checkpoint::Catalog).
#[derive(Debug, Clone, Default)]
pub struct Contents {
    /// Tensors by flat key, the path in the nested state joined with dots.
    pub tensors: BTreeMap<String, StoredTensor>,
    /// Non-tensor values by flat key.
    pub values: BTreeMap<String, Value>,
    /// The path of each flat key in the nested state; a key that is absent here is a path of one name.
    pub paths: BTreeMap<String, Vec<Key>>,
    /// Entries that cannot be read, such as instances of Python classes, by flat key, with the reason.
    pub unreadable: BTreeMap<String, String>,
    /// The keys among [`unreadable`](Self::unreadable) of plain Python objects: read without damage, and nothing here holds them.
    pub python_objects: BTreeSet<String>,
    /// Version of the format, if the checkpoint states one.
    pub version: Option<String>,
    /// Identifier of the save that wrote the checkpoint, if it has one.
    pub save_id: Option<String>,
}

/// The metadata of one tensor in a checkpoint: type, global shape, and the chunks it is stored in.
#[doc(alias = "TensorStorageMetadata")]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredTensor {
    /// Type of the stored elements.
    pub element: ElementType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// The chunks; together they cover every element exactly once.
    pub chunks: Vec<Chunk>,
}

/// A box of a tensor that is stored in one file: its offsets and sizes, the file, and the position in it.
#[doc(alias = "ChunkStorageMetadata")]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The box of the tensor that this chunk holds: offsets and sizes.
    #[serde(flatten)]
    pub part: TensorBox,
    /// Name of the file, relative to the checkpoint's directory.
    pub file: String,
    /// Byte offset of the first element in the file.
    pub offset: u64,
    /// Strides in elements; `None` if the chunk is stored row-major.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<Vec<usize>>,
    /// CRC-32 of all bytes of the chunk, if the format stores one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crc32: Option<u32>,
    /// CRC-32 per block, if the chunk was written with them: then partial reads are verified too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<BlockChecksums>,
    /// How the elements are stored; `None` for plain elements of the tensor's type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<ChunkEncoding>,
}

impl StoredTensor {
    /// Number of elements of the global tensor.
    pub fn elem_count(&self) -> usize {
        self.shape.iter().fold(1, |count, &n| count.saturating_mul(n))
    }

    /// Size of the global tensor in bytes, in the type that it is read as.
    pub fn bytes(&self) -> usize {
        self.elem_count().saturating_mul(self.element.size_in_bytes())
    }

    /// Number of bytes that the chunks take in their files: fewer than [`bytes`](Self::bytes) if they are quantized.
    pub fn stored_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.stored_bytes(self.element)).fold(0, u64::saturating_add)
    }

    /// Number of bytes of files that a box takes: whole blocks where it is quantized.
    pub fn box_bytes(&self, part: &TensorBox) -> u64 {
        let of_chunk = |chunk: &Chunk| {
            let Some(both) = chunk.part.intersect(part) else { return 0 };
            let (volume, strides) = (both.volume() as u64, chunk.strides());
            let Some(ChunkEncoding::Quantized(block)) = chunk.encoding else {
                return volume.saturating_mul(self.element.size_in_bytes() as u64);
            };
            let Some(inner) = strides.iter().rposition(|&stride| stride == 1) else { return block.bytes() as u64 };
            let (first, size) = (both.offsets[inner] - chunk.part.offsets[inner], both.sizes[inner]);
            let blocks = (first + size).div_ceil(block.elements()) - first / block.elements();
            volume / (size.max(1) as u64) * (blocks * block.bytes()) as u64
        };
        self.chunks.iter().map(of_chunk).fold(0, u64::saturating_add)
    }

    /// The blocks that all chunks are stored in, if the tensor is quantized.
    pub fn quantization(&self) -> Option<BlockType> {
        let block = |chunk: &Chunk| match chunk.encoding {
            Some(ChunkEncoding::Quantized(block)) => Some(block),
            _ => None,
        };
        let first = block(self.chunks.first()?)?;
        self.chunks.iter().all(|chunk| block(chunk) == Some(first)).then_some(first)
    }

    /// Name of the type that the elements are stored in: `f32`, or `Q4_1` if they are quantized.
    pub fn type_name(&self) -> String {
        self.quantization().map_or_else(|| self.element.to_string(), |block| block.to_string())
    }

    /// Checks that the chunks cover the tensor, each element once.
    fn check(&self, key: &str) -> Result<()> {
        let bounded = self.shape.iter().try_fold(self.element.size_in_bytes(), |count, &n| count.checked_mul(n.max(1)));
        if bounded.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let found = format!("tensor {key:?} of shape {:?}", self.shape);
            return Err(ErrorKind::Damaged.error(
                "checkpoint",
                found,
                "a tensor that memory can address",
                NOT_A_CHECKPOINT,
            ));
        }
        let shard = |chunk: &Chunk| ShardMetadata::new(chunk.part.offsets.clone(), chunk.part.sizes.clone(), None);
        let shards = self.chunks.iter().map(shard).collect::<Result<Vec<_>>>()?;
        let size = self.shape.clone();
        let whole = ShardedTensorMetadata { size, dtype: DType::U8, requires_grad: false, shards };
        whole.check_covering().map_err(|error| {
            let found = format!("tensor {key:?} whose chunks do not fit together: {}", error.found());
            ErrorKind::Damaged.error("checkpoint", found, "chunks that cover the tensor, each element once", INCOMPLETE)
        })
    }
}

impl Chunk {
    /// Returns the strides in elements, those of a row-major box if none are stored.
    pub fn strides(&self) -> Vec<usize> {
        self.strides.clone().unwrap_or_else(|| row_major(&self.part.sizes))
    }

    /// Number of bytes that the elements take in the file.
    pub(in crate::checkpoint) fn stored_bytes(&self, element: ElementType) -> u64 {
        self.bytes_of(self.part.volume() as u64, element).unwrap_or(u64::MAX)
    }

    fn bytes_of(&self, elements: u64, element: ElementType) -> Option<u64> {
        match self.encoding {
            Some(encoding) => encoding.bytes(elements, element),
            None => elements.checked_mul(element.size_in_bytes() as u64),
        }
    }

    /// Number of bytes from the first element to the end of the last one in the file; `None` if that overflows.
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
        self.bytes_of(last.checked_add(1)?, element)
    }
}

impl Contents {
    /// Adds a tensor at a path of the nested state.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if the flat key is already taken.
    pub fn add_tensor(&mut self, path: Vec<Key>, tensor: StoredTensor) -> Result<()> {
        let key = self.free_key(&path)?;
        self.tensors.insert(key.clone(), tensor);
        self.paths.insert(key, path);
        Ok(())
    }

    /// Adds a value at a path of the nested state.
    ///
    /// # Errors
    /// As [`add_tensor`](Self::add_tensor).
    pub fn add_value(&mut self, path: Vec<Key>, value: Value) -> Result<()> {
        let key = self.free_key(&path)?;
        self.values.insert(key.clone(), value);
        self.paths.insert(key, path);
        Ok(())
    }

    /// Lists an entry that is present and cannot be read, with the reason.
    ///
    /// # Errors
    /// As [`add_tensor`](Self::add_tensor).
    pub fn add_unreadable(&mut self, path: Vec<Key>, reason: String) -> Result<()> {
        let key = self.free_key(&path)?;
        self.unreadable.insert(key.clone(), reason);
        self.paths.insert(key, path);
        Ok(())
    }

    /// Lists an object of Python that was read without damage and that no [`Value`] can hold, with its description.
    ///
    /// # Errors
    /// As [`add_tensor`](Self::add_tensor).
    pub fn add_python_object(&mut self, path: Vec<Key>, reason: String) -> Result<()> {
        let key = flat_key(&path);
        self.add_unreadable(path, reason)?;
        self.python_objects.insert(key);
        Ok(())
    }

    fn free_key(&self, path: &[Key]) -> Result<String> {
        let key = flat_key(path);
        if self.tensors.contains_key(&key) || self.values.contains_key(&key) || self.unreadable.contains_key(&key) {
            let found = format!("two entries with the flat key {key:?}");
            return Err(ErrorKind::Damaged.error("checkpoint", found, "different keys", NOT_A_CHECKPOINT));
        }
        Ok(key)
    }

    /// Total size of all tensors in bytes.
    pub(in crate::checkpoint) fn bytes(&self) -> usize {
        self.tensors.values().map(StoredTensor::bytes).fold(0, usize::saturating_add)
    }

    /// Checks that chunks cover their tensors and are inside their files. `sizes` returns the size of a file by name, `None`
    /// if there is no such file.
    pub(in crate::checkpoint) fn check(&self, sizes: &dyn Fn(&str) -> Option<u64>) -> Result<()> {
        if let Some((key, _)) = self.paths.iter().find(|(_, path)| path.len() > MAX_DEPTH) {
            let (found, needed) =
                (format!("key {key:.40?}..., nested too deeply"), format!("at most {MAX_DEPTH} levels"));
            return Err(ErrorKind::Damaged.error("checkpoint", found, needed, NOT_A_CHECKPOINT));
        }
        for (key, tensor) in &self.tensors {
            tensor.check(key)?;
            for chunk in &tensor.chunks {
                check_file_name(&chunk.file)?;
                let Some(size) = sizes(&chunk.file) else {
                    let found = format!("no file {:?}, which has a chunk of tensor {key:?}", chunk.file);
                    return Err(ErrorKind::Damaged.error("checkpoint", found, "all files", INCOMPLETE));
                };
                if chunk.strides.as_ref().is_some_and(|strides| strides.len() != chunk.part.sizes.len()) {
                    let found = format!("tensor {key:?} with strides {:?}", chunk.strides);
                    return Err(ErrorKind::Damaged.error(
                        "checkpoint",
                        found,
                        "one stride per dimension",
                        NOT_A_CHECKPOINT,
                    ));
                }
                if let Some(encoding) = chunk.encoding
                    && !(tensor.element == ElementType::F32
                        && chunk.blocks.is_none()
                        && encoding.fits(&chunk.strides(), &chunk.part.sizes))
                {
                    let found = format!("tensor {key:?} of type {} with encoding {encoding:?}", tensor.element);
                    let needed = "f32, and rows of whole blocks without checksums";
                    return Err(ErrorKind::Damaged.error("checkpoint", found, needed, NOT_A_CHECKPOINT));
                }
                // With strides of zero a file of a few bytes could claim a tensor that fills the memory.
                let bytes = chunk.stored_bytes(tensor.element);
                if chunk.strides.is_some() && bytes > size.max(MAX_EXPANDED) {
                    let found = format!("tensor {key:?} of {bytes} bytes, expanded by strides from a file of {size}");
                    return Err(ErrorKind::Damaged.error(
                        "checkpoint",
                        found,
                        "as many bytes as there are elements",
                        NOT_A_CHECKPOINT,
                    ));
                }
                let span = chunk.span(tensor.element);
                if let Some(blocks) = &chunk.blocks
                    && !(chunk.strides.is_none() && span.is_some_and(|span| blocks.fits(span)))
                {
                    let found = format!("{} checksums of a chunk of tensor {key:?}", blocks.crc32.len());
                    return Err(ErrorKind::Damaged.error(
                        "checkpoint",
                        found,
                        "one per block of its bytes",
                        NOT_A_CHECKPOINT,
                    ));
                }
                let end = span.and_then(|span| span.checked_add(chunk.offset));
                if end.is_none_or(|end| end > size) {
                    let found = format!("file {:?} of {size} bytes", chunk.file);
                    let needed = format!("{}, the end of a chunk of tensor {key:?}", end.unwrap_or(u64::MAX));
                    return Err(ErrorKind::Damaged.error(
                        "checkpoint",
                        found,
                        needed,
                        "the file is truncated; copy it again",
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The strides of a row-major box, in elements.
pub(in crate::checkpoint) fn row_major(sizes: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(sizes[dim]);
    }
    strides
}

/// Refuses a file name that could lead out of the checkpoint's directory.
pub(in crate::checkpoint) fn check_file_name(name: &str) -> Result<()> {
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
        "do not load this checkpoint: it may be malicious",
    ))
}

/// Deepest nesting of state that is accepted: deeper than any real state dict, and shallow enough to recurse over.
const MAX_DEPTH: usize = 128;
/// A tensor whose strides repeat elements may exceed the size of its file up to this many bytes: expanded tensors that
/// people save are small, and a hostile file must not fill the memory.
const MAX_EXPANDED: u64 = 64 << 20;

/// What to do about a checkpoint that lacks files or chunks.
pub(in crate::checkpoint) const INCOMPLETE: &str = "the checkpoint is incomplete; copy or save it again";
/// What to do about a file with inconsistent content.
pub(in crate::checkpoint) const NOT_A_CHECKPOINT: &str = "the file is damaged, or was not written as a checkpoint";
