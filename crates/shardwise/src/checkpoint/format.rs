//! What a checkpoint format is: how it is recognized, read and written.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::BufWriter;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value as Json;

use super::content::BoxToWrite;
use super::files::Files;
use super::stored::{Chunk, Contents};
use super::value::Value;
use crate::error::Result;

/// A way in which checkpoints are stored: one file of code per format.
///
/// A program adds a format with [`Format::register`]; [`open`](super::open) then recognizes it, and saves, conversions and the
/// tools know it by name. A format only describes: what [`open`](Self::open) returns is checked as for every format (boxes
/// fill their tensors, bytes are inside files), and files are written to a new directory that replaces the old checkpoint as a
/// whole.
pub trait CheckpointFormat: Any + Send + Sync {
    /// Its name, such as `native`: lowercase, unique among all formats.
    fn name(&self) -> &'static str;

    /// Other names by which it is found.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// One line for people who choose a format.
    fn about(&self) -> &'static str;

    /// Whether these files are a checkpoint of this format. Called for all formats in order until one recognizes them, so it
    /// looks at names and a few bytes.
    fn detect(&self, files: &Files) -> bool;

    /// The tensors and values in these files. Reads descriptions, not elements.
    fn open(&self, files: &Files) -> Result<Contents>;

    /// Whether a save may replace a directory that has a file of this name. Name what this format writes and nothing else: a
    /// directory in which every file is owned by some format is removed when a new checkpoint takes its place.
    fn owns(&self, name: &str) -> bool;

    /// Whether a file that no tensor is in belongs to a checkpoint; [`verify`](super::verify) reports all others.
    fn belongs(&self, name: &str) -> bool {
        self.owns(name)
    }

    /// Checks what [`verify`](super::verify) does not see in the contents, such as headers of files.
    fn verify(&self, files: &Files) -> Result<()> {
        let _ = files;
        Ok(())
    }

    /// How it is written; `None` for a format that is only read.
    fn writer(&self) -> Option<&dyn FormatWriter> {
        None
    }
}

/// The part of a [`CheckpointFormat`] that writes.
///
/// Every rank writes its boxes to files with [`write_file`](Self::write_file); when all files are there, one rank writes what
/// [`index`](Self::index) returns.
pub trait FormatWriter: Send + Sync {
    /// Where values are stored.
    fn values(&self) -> ValueStorage;

    /// Whether a file holds one box of a tensor at most, because boxes are known by the name of their tensor alone.
    fn one_box_per_file(&self) -> bool {
        false
    }

    /// Whether modules and optimizers are saved in the form of PyTorch's `state_dict`.
    fn torch_state(&self) -> bool {
        false
    }

    /// The name of a file. Different files have different names.
    fn file_name(&self, file: FileRole) -> String;

    /// Writes a file from its beginning. Returns where its boxes are, and what [`index`](Self::index) needs to know of it.
    fn write_file(&self, out: &mut BufWriter<File>, file: FileToWrite<'_>) -> Result<WrittenFile>;

    /// Name and bytes of the file that describes all others, if there is one. The chunks of all files have been
    /// moved to `contents`.
    fn index(&self, contents: &Contents, files: &[WrittenFile]) -> Result<Option<(String, Vec<u8>)>>;
}

/// Where a format stores values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueStorage {
    /// Nowhere: it holds tensors only.
    Nowhere,
    /// In the files with tensors: those of the first file are in [`FileToWrite::values`].
    InFiles,
    /// In the index.
    InIndex,
}

/// Which file of a checkpoint one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileRole {
    /// Number `index` of `count` files with whole tensors.
    Whole {
        /// From 0 on.
        index: usize,
        /// All such files.
        count: usize,
    },
    /// Number `index` of `count` files with the boxes of one rank.
    OfRank {
        /// The rank.
        rank: usize,
        /// How many ranks write.
        ranks: usize,
        /// From 0 on.
        index: usize,
        /// All files of the rank: 1 unless [`FormatWriter::one_box_per_file`].
        count: usize,
    },
}

/// A file that a format is to write.
pub struct FileToWrite<'a> {
    /// Its name, as [`FormatWriter::file_name`] gave it.
    pub name: &'a str,
    /// The boxes, in the order in which they are written.
    pub boxes: Vec<BoxToWrite>,
    /// Values to be written to this file; empty unless [`ValueStorage::InFiles`].
    pub values: &'a BTreeMap<String, Value>,
    /// Is called with the number of bytes of elements that were written.
    pub progress: &'a dyn Fn(u64),
}

/// A file that was written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WrittenFile {
    /// Its name.
    pub name: String,
    /// The boxes in it, by key of their tensor.
    pub chunks: Vec<(String, Chunk)>,
    /// What else the format needs for its index.
    pub note: Json,
}

/// A format that is known: built in, as [`Format::Native`], or registered by the program.
///
/// Equal formats have the same name; as text and in serde it is the name.
#[derive(Clone, Copy)]
pub struct Format(pub(super) &'static dyn CheckpointFormat);

impl Format {
    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// Other names by which it is found.
    pub fn aliases(self) -> &'static [&'static str] {
        self.0.aliases()
    }

    /// One line about it.
    pub fn about(self) -> &'static str {
        self.0.about()
    }

    /// Whether checkpoints can be written in it.
    pub fn is_writable(self) -> bool {
        self.0.writer().is_some()
    }

    /// Whether modules and optimizers are saved in it in the form of PyTorch's `state_dict`.
    pub fn is_torch_state(self) -> bool {
        self.0.writer().is_some_and(FormatWriter::torch_state)
    }

    /// Whether a file of this name is one that it writes.
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
    /// The name as the constant has it: `HuggingFace` for `hugging-face`.
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
