//! A checkpoint that was opened: what is in it, and the files to read it from.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::files::Files;
use super::format::Format;
use super::state::State;
use super::stored::{Contents, StoredTensor};
use super::value::{Key, Value};
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::fnv::Fnv;
use crate::layout::TensorBox;

/// The contents of a checkpoint. One that exists has been checked: boxes fill their tensors, bytes lie inside files, and no
/// file is outside the directory.
///
/// It stays what it was when it was opened: a later save to the same path does not change what is read through it. Up to 64
/// files are kept open for that; of a checkpoint of more files a read may report that it was replaced.
#[doc(alias = "Metadata")]
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

impl Catalog {
    /// What a format found in files, after it was checked.
    pub(super) fn new(format: Format, contents: Contents, files: Arc<Files>) -> Self {
        let Contents { tensors, values, paths } = contents;
        Catalog { format, directory: files.directory().to_path_buf(), tensors, values, paths, files }
    }

    /// A number for what is in the checkpoint, the same on all ranks that have opened the same one.
    pub(super) fn fingerprint(&self) -> Result<u64> {
        let mut hash = Fnv::default();
        let all = (self.format, &self.tensors, &self.values, &self.paths);
        serde_json::to_writer(&mut hash, &all).map_err(Error::other)?;
        Ok(hash.finish())
    }

    /// Tensors that are checked only where a part is read as a whole, or not at all: their files have no checksums of blocks.
    pub fn unchecked(&self) -> impl Iterator<Item = &str> {
        let partly = |tensor: &StoredTensor| tensor.chunks.iter().any(|c| c.blocks.is_none() && c.part.volume() > 0);
        self.tensors.iter().filter(move |(_, tensor)| partly(tensor)).map(|(key, _)| key.as_str())
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
            return Err(ErrorKind::Argument.error("box", found, needed, "correct its offsets or sizes"));
        }
        let length = part.volume().saturating_mul(tensor.element.size_in_bytes());
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| {
            let found = format!("{length} bytes of tensor {key:?}");
            ErrorKind::Argument.error::<Error>("box", found, "what memory can hold", "read smaller boxes")
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
            ErrorKind::unknown(path).error(
                "checkpoint",
                found,
                format!("value {path:?}"),
                "name a value that was saved",
            )
        })
    }

    /// The tensor with a key.
    #[doc(alias = "MetadataIndex")]
    pub fn tensor(&self, key: &str) -> Result<&StoredTensor> {
        self.tensors.get(key).ok_or_else(|| {
            let near = nearest(key, self.tensors.keys());
            let found = if near.is_empty() { "no tensors".to_string() } else { format!("{near} as the nearest names") };
            ErrorKind::unknown(key).error(
                "checkpoint",
                found,
                format!("tensor {key:?}"),
                "rename it, or leave it out of the load",
            )
        })
    }
}
