//! What is in a checkpoint, whatever its format: tensors as boxes that lie somewhere in files, and values.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::blocks::Blocks;
use super::element::ElementType;
use super::files::{Files, Fnv};
use super::state::State;
use super::value::{Key, Value};
use crate::error::{Error, Result, nearest};
use crate::layout::TensorBox;
use crate::sharded::{ShardMetadata, ShardedTensorMetadata};

/// The ways in which checkpoints are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Safetensors files and a manifest, of this library.
    Native,
    /// Safetensors files as Hugging Face has them: one, or several with an index, or one per rank.
    HuggingFace,
    /// `.metadata` and `.distcp` files of PyTorch's distributed checkpoint.
    Dcp,
    /// One file of `torch.save`.
    Torch,
}

/// A tensor in a checkpoint.
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

/// The contents of a checkpoint. One that exists has been checked: boxes fill their tensors, bytes lie inside files, and no
/// file is outside the directory.
///
/// It stays what it was when it was opened: a later save to the same path does not change what is read through it. Up to 64
/// files are kept open for that; of a checkpoint of more files a read may report that it was replaced.
#[derive(Debug, Clone)]
pub struct Catalog {
    /// How it is stored.
    pub format: Format,
    /// Where its files are.
    pub directory: PathBuf,
    /// Tensors by flat key.
    pub tensors: BTreeMap<String, StoredTensor>,
    /// Values by flat key.
    pub values: BTreeMap<String, Value>,
    /// The way to every flat key in nested state; a key that is not here is its own way.
    pub paths: BTreeMap<String, Vec<Key>>,
    /// Its files, opened when the checkpoint was.
    pub(super) files: Arc<Files>,
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
            return Err(Error::invalid("checkpoint", found, "a tensor that memory can address", NOT_OURS));
        }
        let shard = |chunk: &Chunk| ShardMetadata::new(chunk.part.offsets.clone(), chunk.part.sizes.clone(), None);
        let shards = self.chunks.iter().map(shard).collect::<Result<Vec<_>>>()?;
        let size = self.shape.clone();
        let whole = ShardedTensorMetadata { size, dtype: DType::U8, requires_grad: false, shards };
        whole.check_covering().map_err(|error| {
            let found = format!("tensor {key:?} whose chunks do not fit together ({error})");
            Error::invalid("checkpoint", found, "chunks that fill the tensor, each element once", INCOMPLETE)
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

impl Catalog {
    /// A checkpoint without contents yet, whose files are these.
    pub(super) fn new(format: Format, directory: &Path, files: &Arc<Files>) -> Self {
        let (tensors, values, paths) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Catalog { format, directory: directory.to_path_buf(), tensors, values, paths, files: Arc::clone(files) }
    }

    /// A checkpoint that is to be written.
    pub(super) fn unwritten(format: Format) -> Self {
        let nowhere = Path::new("");
        Catalog::new(format, nowhere, &Arc::new(Files::nowhere(nowhere)))
    }

    /// A number for what is in the checkpoint, the same on all ranks that have opened the same one.
    pub(super) fn fingerprint(&self) -> Result<u64> {
        let mut hash = Fnv::default();
        let all = (self.format, &self.tensors, &self.values, &self.paths);
        serde_json::to_writer(&mut hash, &all).map_err(Error::other)?;
        Ok(hash.0)
    }

    /// Tensors that are checked only where a part is read as a whole, or not at all: their files have no checksums of blocks.
    pub fn unchecked(&self) -> impl Iterator<Item = &str> {
        let partly = |tensor: &StoredTensor| tensor.chunks.iter().any(|c| c.blocks.is_none() && c.part.volume() > 0);
        self.tensors.iter().filter(move |(_, tensor)| partly(tensor)).map(|(key, _)| key.as_str())
    }

    /// An error unless everything fits together and lies in the files. `sizes` gives the size of a file by name, `None` if
    /// there is no such file.
    pub(super) fn check(&self, sizes: &dyn Fn(&str) -> Option<u64>) -> Result<()> {
        if let Some((key, _)) = self.paths.iter().find(|(_, path)| path.len() > MAX_DEPTH) {
            let (found, needed) = (format!("key {key:.40?}... of great depth"), format!("{MAX_DEPTH} steps at most"));
            return Err(Error::invalid("checkpoint", found, needed, NOT_OURS));
        }
        for (key, tensor) in &self.tensors {
            tensor.check(key)?;
            for chunk in &tensor.chunks {
                check_file_name(&chunk.file)?;
                let Some(size) = sizes(&chunk.file) else {
                    let found = format!("no file {:?}, which has a part of tensor {key:?}", chunk.file);
                    return Err(Error::invalid("checkpoint", found, "all files", INCOMPLETE));
                };
                if chunk.strides.as_ref().is_some_and(|strides| strides.len() != chunk.part.sizes.len()) {
                    let found = format!("tensor {key:?} with strides {:?}", chunk.strides);
                    return Err(Error::invalid("checkpoint", found, "one stride per dimension", NOT_OURS));
                }
                // Strides of zero would make much of little: a file of a few bytes must not fill the memory.
                let bytes = chunk.part.volume().saturating_mul(tensor.element.size_in_bytes()) as u64;
                if chunk.strides.is_some() && bytes > size.max(MAX_EXPANDED) {
                    let found = format!("tensor {key:?} of {bytes} bytes, made by strides of a file of {size}");
                    return Err(Error::invalid("checkpoint", found, "as many bytes as there are elements", NOT_OURS));
                }
                let span = chunk.span(tensor.element);
                if let Some(blocks) = &chunk.blocks
                    && !(chunk.strides.is_none() && span.is_some_and(|span| blocks.fits(span)))
                {
                    let found = format!("{} checksums of a part of tensor {key:?}", blocks.crc32.len());
                    return Err(Error::invalid("checkpoint", found, "one per block of its bytes", NOT_OURS));
                }
                let end = span.and_then(|span| span.checked_add(chunk.offset));
                if end.is_none_or(|end| end > size) {
                    let found = format!("file {:?} of {size} bytes", chunk.file);
                    let needed = format!("{}, the end of a part of tensor {key:?}", end.unwrap_or(u64::MAX));
                    return Err(Error::invalid("checkpoint", found, needed, "the file is cut off; copy it again"));
                }
            }
        }
        Ok(())
    }

    /// All elements of a tensor, row-major, as the files have them.
    pub fn read(&self, key: &str) -> Result<Vec<u8>> {
        let shape = &self.tensor(key)?.shape;
        self.read_box(key, &TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() })
    }

    /// The elements of a box of a tensor, row-major, as the files have them. Only what the box needs is read, by whole blocks,
    /// which are compared with their checksums; a chunk that has one checksum is compared if all of it is read.
    pub fn read_box(&self, key: &str, part: &TensorBox) -> Result<Vec<u8>> {
        let tensor = self.tensor(key)?;
        let inside =
            |(n, (offset, size)): (&usize, (&usize, &usize))| offset.checked_add(*size).is_some_and(|e| e <= *n);
        let dims = tensor.shape.len();
        let whole = part.offsets.len() == dims && part.sizes.len() == dims;
        if !whole || !tensor.shape.iter().zip(part.offsets.iter().zip(&part.sizes)).all(inside) {
            let found = format!("a box of sizes {:?} at {:?}", part.sizes, part.offsets);
            let needed = format!("one inside tensor {key:?} of shape {:?}", tensor.shape);
            return Err(Error::invalid("box", found, needed, "correct its offsets or sizes"));
        }
        let length = part.volume().saturating_mul(tensor.element.size_in_bytes());
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| {
            let found = format!("{length} bytes of tensor {key:?}");
            Error::invalid("box", found, "what memory can hold", "read smaller boxes")
        })?;
        bytes.resize(length, 0);
        self.files.read_box(key, tensor, part, &mut bytes)?;
        Ok(bytes)
    }

    /// Size of all tensors in bytes.
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(StoredTensor::bytes).fold(0, usize::saturating_add)
    }

    /// The value at a path of names and positions, joined with dots; put together if it was taken apart.
    ///
    /// ```
    /// use shardwise::checkpoint::{self, State, Value};
    /// use shardwise::prelude::*;
    ///
    /// # let directory = std::env::temp_dir().join(format!("shardwise-value-{}", std::process::id()));
    /// # let path = directory.clone();
    /// launch(1, move |world| checkpoint::save(&world, &path, &State::map([("sizes", State::map([("width", 8)]))])))?;
    /// let catalog = checkpoint::open(&directory)?;
    /// assert_eq!(catalog.value("sizes.width")?, Value::Int(8));
    /// assert_eq!(catalog.value("sizes")?.to_string(), r#"{"map":{"width":8}}"#);
    /// assert!(catalog.value("size").is_err());
    /// # std::fs::remove_dir_all(&directory).unwrap();
    /// # Ok::<(), Error>(())
    /// ```
    pub fn value(&self, path: &str) -> Result<Value> {
        let way = |key: &String| self.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.clone())]);
        let mut leaves: Vec<_> = self.values.iter().map(|(k, value)| (way(k), State::Value(value.clone()))).collect();
        // Positions in lists come in order.
        leaves.sort_by(|a, b| a.0.cmp(&b.0));
        State::unflatten(leaves).value(path).map_err(|_| {
            let found = match self.values.is_empty() {
                true => "no values".to_string(),
                false => format!("{} as the nearest names", nearest(path, self.values.keys())),
            };
            Error::invalid("checkpoint", found, format!("value {path:?}"), "name a value that was saved")
        })
    }

    /// The tensor with a key.
    pub fn tensor(&self, key: &str) -> Result<&StoredTensor> {
        self.tensors.get(key).ok_or_else(|| {
            let near = nearest(key, self.tensors.keys());
            let found = if near.is_empty() { "no tensors".to_string() } else { format!("{near} as the nearest names") };
            Error::invalid("checkpoint", found, format!("tensor {key:?}"), "rename it, or leave it out of the load")
        })
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
    Err(Error::invalid("file name", format!("{name:?}"), needed, "do not load this checkpoint: it was made to do harm"))
}

/// How deep state may be nested: nobody does, and walking it takes the stack.
const MAX_DEPTH: usize = 128;
/// What strides may make of a file that is smaller.
const MAX_EXPANDED: u64 = 64 << 20;

pub(super) const INCOMPLETE: &str = "the checkpoint is incomplete; copy or save it again";
pub(super) const NOT_OURS: &str = "the file is damaged, or was not written as a checkpoint";
