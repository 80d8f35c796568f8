//! An opened checkpoint: its metadata, and the files to read it from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::catalogs::format::Format;
use crate::checkpoint::metadata::state::State;
use crate::checkpoint::metadata::stored::{Contents, StoredTensor};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::{Error, ErrorKind, Result, nearest};
use crate::fnv::Fnv;
use crate::layout::TensorBox;

/// The validated metadata of an opened checkpoint, and access to its elements. Returned by [`open`](crate::checkpoint::open).
///
/// It is a snapshot: a later save to the same path does not change what is read through it. To that end up to 64 files are
/// kept open; reading a further file of a replaced checkpoint fails with an error that says so.
#[doc(alias = "Metadata")]
#[derive(Debug, Clone)]
pub struct Catalog {
    /// The format the checkpoint is stored in.
    pub format: Format,
    /// The directory with the checkpoint's files.
    pub directory: PathBuf,
    /// Tensors by flat key, the path in the nested state joined with dots (PyTorch's FQN).
    pub tensors: BTreeMap<String, StoredTensor>,
    /// Non-tensor values by flat key.
    pub values: BTreeMap<String, Value>,
    /// The path of each flat key in the nested state; a key that is absent here is a path of one name.
    pub paths: BTreeMap<String, Vec<Key>>,
    /// Entries that are present and cannot be read, by flat key, with the reason: instances of Python classes, sets, integers
    /// beyond 64 bits, tensors of unknown types. They do not hinder other entries; loading one is an error with the reason.
    pub unreadable: BTreeMap<String, String>,
    /// The keys among [`unreadable`](Self::unreadable) of plain Python objects, which were read without damage. Every other key
    /// there is of a tensor or of an archive that cannot be read, which [`verify`](crate::checkpoint::verify()) reports as a problem.
    pub python_objects: BTreeSet<String>,
    /// Version of the format, if the checkpoint states one.
    pub version: Option<String>,
    /// Identifier of the save that wrote the checkpoint, if it has one. Two saves of the same state have different ones.
    #[doc(alias = "StorageMeta")]
    pub save_id: Option<String>,
    /// The files, opened together with the checkpoint.
    pub(in crate::checkpoint) files: Arc<Files>,
}

impl Catalog {
    /// A catalog of contents that have been validated.
    pub(in crate::checkpoint) fn new(format: Format, contents: Contents, files: Arc<Files>) -> Self {
        let Contents { tensors, values, paths, unreadable, python_objects, version, save_id } = contents;
        let directory = files.directory().to_path_buf();
        Catalog { format, directory, tensors, values, paths, unreadable, python_objects, version, save_id, files }
    }

    /// A hash of the metadata, equal on all ranks that opened the same checkpoint.
    pub(in crate::checkpoint) fn fingerprint(&self) -> Result<u64> {
        let mut hash = Fnv::default();
        let all = (self.format, &self.tensors, &self.values, &self.paths, &self.save_id);
        serde_json::to_writer(&mut hash, &all).map_err(Error::other)?;
        Ok(hash.finish())
    }

    /// The keys of tensors that a load may read without verifying a checksum, because some chunk has none per block.
    ///
    /// Such a chunk is verified only where it is read completely and has one checksum for all of its bytes.
    pub fn unchecked(&self) -> impl Iterator<Item = &str> {
        let lacks_checksums =
            |tensor: &StoredTensor| tensor.chunks.iter().any(|c| c.blocks.is_none() && c.part.volume() > 0);
        self.tensors.iter().filter(move |(_, tensor)| lacks_checksums(tensor)).map(|(key, _)| key.as_str())
    }

    /// Reads a whole tensor as bytes, row-major and little-endian, in its stored type.
    ///
    /// # Errors
    /// As [`read_box`](Self::read_box).
    pub fn read(&self, key: &str) -> Result<Vec<u8>> {
        let shape = &self.tensor(key)?.shape;
        self.read_box(key, &TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() })
    }

    /// Reads a box of a tensor as bytes, row-major and little-endian, in its stored type.
    ///
    /// Local. Reads only the blocks that the box touches and verifies their checksums; a chunk with a single checksum is
    /// verified only if it is read completely.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownName`] if there is no such tensor, [`ErrorKind::Argument`] if the box is outside it or larger than
    /// memory, [`ErrorKind::Damaged`] if a checksum does not match.
    pub fn read_box(&self, key: &str, part: &TensorBox) -> Result<Vec<u8>> {
        let tensor = self.tensor(key)?;
        let inside =
            |(n, (offset, size)): (&usize, (&usize, &usize))| offset.checked_add(*size).is_some_and(|e| e <= *n);
        let ndim = tensor.shape.len();
        let same_ndim = part.offsets.len() == ndim && part.sizes.len() == ndim;
        if !same_ndim || !tensor.shape.iter().zip(part.offsets.iter().zip(&part.sizes)).all(inside) {
            let found = format!("a box of sizes {:?} at {:?}", part.sizes, part.offsets);
            let needed = format!("one inside tensor {key:?} of shape {:?}", tensor.shape);
            return Err(ErrorKind::Argument.error("box", found, needed, "correct the offsets or sizes"));
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

    /// Tensors and archives that are named and cannot be read, with the reason: [`unreadable`](Self::unreadable) without
    /// [`python_objects`](Self::python_objects).
    pub fn unreadable_data(&self) -> impl Iterator<Item = (&str, &str)> {
        let is_data = |(key, _): &(&String, &String)| !self.python_objects.contains(*key);
        self.unreadable.iter().filter(is_data).map(|(key, reason)| (key.as_str(), reason.as_str()))
    }

    /// Total size of all tensors in bytes, in their stored types.
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(StoredTensor::bytes).fold(0, usize::saturating_add)
    }

    /// Returns the value at a dotted path of names and list positions; a path to a nested map or list returns all of it.
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
        let path_of = |key: &String| self.paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.clone())]);
        let mut leaves: Vec<_> =
            self.values.iter().map(|(k, value)| (path_of(k), State::Value(value.clone()))).collect();
        // `unflatten` needs list positions in ascending order.
        leaves.sort_by(|a, b| a.0.cmp(&b.0));
        State::unflatten(leaves).value(path).map_err(|_| {
            if let Some(reason) = self.unreadable.get(path) {
                return cannot_read(path, reason);
            }
            let found = match self.values.is_empty() {
                true => "no values".to_string(),
                false => format!("{} as the nearest names", nearest(path, self.values.keys())),
            };
            ErrorKind::unknown(path).error(
                "checkpoint",
                found,
                format!("value {path:?}"),
                "use the key of a saved value",
            )
        })
    }

    /// Returns the metadata of the tensor with a flat key.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownName`] with the nearest names if there is none.
    #[doc(alias = "MetadataIndex")]
    pub fn tensor(&self, key: &str) -> Result<&StoredTensor> {
        self.tensors.get(key).ok_or_else(|| {
            if let Some(reason) = self.unreadable.get(key) {
                return cannot_read(key, reason);
            }
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

/// The error for an entry that is present and cannot be read.
pub(in crate::checkpoint) fn cannot_read(key: &str, reason: &str) -> Error {
    let found = format!("entry {key:?}, which is {reason}");
    let fix = "leave it out of the load, or save it with PyTorch as tensors and plain values";
    ErrorKind::Unsupported.error("checkpoint", found, "an entry that can be read without executing code", fix)
}
