//! The traits of a checkpoint format: how it is recognized, read and written.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::BufWriter;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value as Json;

use crate::checkpoint::bytes::content::BoxToWrite;
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::metadata::stored::{Chunk, Contents};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::Result;

/// A file format for checkpoints: how it is recognized and read, and optionally how it is written.
///
/// Implement it for a custom format and register it with [`Format::register`]; [`open`](crate::checkpoint::open) then recognizes it, and
/// saves, conversions and the `shardwise ckpt` commands find it by name. A format only maps files to metadata: the library
/// validates what [`open`](Self::open) returns (chunks cover their tensors, bytes are inside files), moves the elements, and
/// replaces old checkpoints atomically.
#[doc(alias = "StorageReader")]
pub trait CheckpointFormat: Any + Send + Sync {
    /// Name of the format, such as `native`: lowercase, unique among all formats.
    fn name(&self) -> &'static str;

    /// Further names that parse to this format, such as `hf` for `hugging-face`.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// One line of description, shown in `--help` and in errors.
    fn about(&self) -> &'static str;

    /// Whether these files are a checkpoint of this format. Formats are tried in order until one returns true, so this
    /// should look at file names and a few bytes only.
    fn detect(&self, files: &Files) -> bool;

    /// Reads the metadata of the tensors, and the values, from these files; no tensor elements.
    fn open(&self, files: &Files) -> Result<Contents>;

    /// Whether a save may delete a file of this name. Return true for files that this format writes and nothing else: a
    /// directory in which every file is owned by some format is removed when a new checkpoint replaces it.
    fn owns(&self, name: &str) -> bool;

    /// Whether a file without tensors is expected next to the checkpoint; [`verify`](crate::checkpoint::verify) reports all other files.
    fn belongs(&self, name: &str) -> bool {
        self.owns(name)
    }

    /// Checks what [`verify`](crate::checkpoint::verify) cannot see in the metadata, such as file headers.
    fn verify(&self, files: &Files) -> Result<()> {
        let _ = files;
        Ok(())
    }

    /// The writer; `None` for a format that can only be read.
    fn writer(&self) -> Option<&dyn FormatWriter> {
        None
    }
}

/// The writing half of a [`CheckpointFormat`].
///
/// Every rank writes its boxes with [`write_file`](Self::write_file), without communication. When all files are written, rank
/// 0 (or the converting process) writes the file that [`index`](Self::index) returns.
#[doc(alias = "StorageWriter")]
pub trait FormatWriter: Send + Sync {
    /// Where the format stores non-tensor values.
    fn values(&self) -> ValueStorage;

    /// Whether a file may hold at most one box of each tensor, because the format identifies a box by its tensor's name.
    fn one_box_per_file(&self) -> bool {
        false
    }

    /// Whether modules and optimizers are saved in the form of PyTorch's `state_dict()`, for readers that expect it.
    fn torch_state(&self) -> bool {
        false
    }

    /// The name of a file. Different roles must return different names.
    fn file_name(&self, file: FileRole) -> String;

    /// Writes one file from its beginning. Returns the chunks in it, and whatever [`index`](Self::index) needs to know.
    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile>;

    /// Returns name and bytes of the file that describes all other files, if the format has one. `contents` has the chunks of all
    /// files; those in `files` are empty.
    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>>;
}

/// Where a format stores non-tensor values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueStorage {
    /// The format holds tensors only: saving a value is an error, and conversions leave values out.
    Nowhere,
    /// In a file with tensors: the first file gets them in [`FileToWrite::values`].
    InFiles,
    /// In the file that [`FormatWriter::index`] returns.
    InIndex,
}

/// The role of a file in a checkpoint, from which [`FormatWriter::file_name`] derives its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRole {
    /// File `index` of `count` files with whole tensors, as conversions write.
    Whole {
        /// Number of this file, from 0.
        index: usize,
        /// Number of such files.
        count: usize,
    },
    /// File `index` of `count` files with the boxes of one rank, as saves write.
    OfRank {
        /// The rank whose boxes are in the file.
        rank: usize,
        /// Number of ranks that write.
        ranks: usize,
        /// Number of this file among those of the rank, from 0.
        index: usize,
        /// Number of files of the rank: 1 unless [`FormatWriter::one_box_per_file`].
        count: usize,
    },
}

/// The input of [`FormatWriter::write_file`]: what to write to one file.
pub struct FileToWrite<'a> {
    /// Name of the file, as [`FormatWriter::file_name`] returned it.
    pub name: &'a str,
    /// The boxes to write, in order.
    pub boxes: Vec<BoxToWrite>,
    /// The values to write; empty unless [`ValueStorage::InFiles`] and this is the first file.
    pub values: &'a BTreeMap<String, Value>,
    /// The path of each flat key in the nested state; a key that is absent here is a path of one name.
    pub paths: &'a BTreeMap<String, Vec<Key>>,
    /// Call it with the number of tensor bytes written since the last call.
    pub progress: &'a dyn Fn(u64),
}

/// The output of [`FormatWriter::write_file`]: what a file contains. Ranks send it to rank 0 as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WrittenFile {
    /// Name of the file.
    pub name: String,
    /// The chunks in it, each with the flat key of its tensor.
    pub chunks: Vec<(String, Chunk)>,
    /// Anything else that [`FormatWriter::index`] needs, in a form of the format's choice.
    pub note: Json,
}

/// A handle to a checkpoint format: built in, such as [`Format::Native`], or registered with [`Format::register`].
///
/// Formats compare by name; `Display`, `FromStr` and serde use the name too.
#[derive(Clone, Copy)]
pub struct Format(pub(in crate::checkpoint) &'static dyn CheckpointFormat);

impl Format {
    /// Name of the format, such as `native`.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// Further names that parse to this format.
    pub fn aliases(self) -> &'static [&'static str] {
        self.0.aliases()
    }

    /// One line of description.
    pub fn about(self) -> &'static str {
        self.0.about()
    }

    /// Whether checkpoints can be saved in this format.
    pub fn is_writable(self) -> bool {
        self.0.writer().is_some()
    }

    /// Whether modules and optimizers are saved in the form of PyTorch's `state_dict()`.
    pub fn is_torch_state(self) -> bool {
        self.0.writer().is_some_and(FormatWriter::torch_state)
    }

    /// Whether the format writes files of this name, which a save may therefore delete.
    pub fn owns(self, name: &str) -> bool {
        self.0.owns(name)
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Format {}

impl Hash for Format {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for Format {
    /// The name of the constant: `HuggingFace` for `hugging-face`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for word in self.name().split('-') {
            let (first, rest) = word.split_at(word.chars().next().map_or(0, char::len_utf8));
            write!(f, "{}{rest}", first.to_uppercase())?;
        }
        Ok(())
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Format {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
