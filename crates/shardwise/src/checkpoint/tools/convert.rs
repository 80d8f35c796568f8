//! Converting a checkpoint to another format, element type, sharding or names, in bounded memory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use crate::checkpoint::bytes::content::{BoxContent, BoxToWrite};
use crate::checkpoint::catalogs::catalog::Catalog;
use crate::checkpoint::catalogs::directory::{Staging, check_no_scheme, check_overwrite, unwritable};
use crate::checkpoint::catalogs::format::{FileRole, Format, FormatWriter, ValueStorage, WrittenFile};
use crate::checkpoint::catalogs::open::open;
use crate::checkpoint::gguf::HfView;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Contents, StoredTensor};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::checkpoint::save::write::{boxes_by_file, finish_checkpoint, write_file};
use crate::error::{ErrorKind, Result};
use crate::layout::{OwnedBox, TensorBox};

/// Chooses how a tensor is sharded, from its flat key and global shape: boxes and the rank whose file each goes to.
///
/// No boxes means that the whole tensor goes to the file of rank 0.
pub type ReshardFn = Arc<dyn Fn(&str, &[usize]) -> Result<Vec<OwnedBox>> + Send + Sync>;

/// Chooses the number of the file, from 0, that a tensor is written to, from its new flat key.
pub type FileOfFn = Arc<dyn Fn(&str) -> usize + Send + Sync>;

/// Options of [`convert`].
#[derive(Clone)]
pub struct ConvertOptions {
    /// The format to write.
    pub format: Format,
    /// Element type to convert floating-point tensors to; `None` keeps theirs.
    pub element: Option<ElementType>,
    /// Whether to write a tensor or value, by its flat key in the source.
    pub select: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// The new flat key of a tensor or value.
    pub rename: Arc<dyn Fn(&str) -> String + Send + Sync>,
    /// How to shard the tensors, with one file per rank; `None` writes whole tensors to files of bounded size.
    pub reshard: Option<ReshardFn>,
    /// The file of a tensor, from 0, by its new flat key; `None` fills files up to [`max_file_bytes`](Self::max_file_bytes). Files
    /// are numbered without gaps, whatever numbers it returns.
    #[doc(alias = "fqn_to_index_mapping")]
    pub file_of: Option<FileOfFn>,
    /// Whether a checkpoint that exists at the target is replaced; true by default. If false, it is an error and stays.
    pub overwrite: bool,
    /// Whether tensors that are named and cannot be read are left out; false by default, which makes them an error. Python
    /// objects ([`Catalog::python_objects`]) are left out either way.
    pub skip_unreadable: bool,
    /// Largest size of a file of whole tensors, unless a single tensor is larger; 5 GB by default.
    pub max_file_bytes: usize,
}

impl ConvertOptions {
    /// Options that convert everything to `format` and change nothing else.
    pub fn to(format: Format) -> Self {
        let rename = Arc::new(|name: &str| name.to_string());
        let select = Arc::new(|_: &str| true);
        ConvertOptions {
            format,
            element: None,
            select,
            rename,
            reshard: None,
            file_of: None,
            overwrite: true,
            skip_unreadable: false,
            max_file_bytes: 5_000_000_000,
        }
    }
}

/// The result of [`convert`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Conversion {
    /// Number of tensors written.
    pub tensors: usize,
    /// Number of files with tensors or values.
    pub files: usize,
    /// Tensor bytes written.
    pub bytes: u64,
    /// Flat keys of values that were not written because the format holds tensors only.
    pub left_out: Vec<String>,
    /// Flat keys of entries of the source that cannot be read ([`Catalog::unreadable`]) and are therefore not written.
    pub unreadable: Vec<String>,
}

/// Converts the checkpoint at `from` and writes it to the directory `to`.
///
/// Local: runs in one process, with one thread per core and at most 16 MiB of elements in memory per thread. A checkpoint that
/// exists at `to` is replaced atomically at the end. `progress` is called with numbers of bytes.
///
/// A GGUF file that is converted to Hugging Face's format gets the names of Hugging Face, a `config.json` and the files of its
/// tokenizer ([`gguf`](crate::checkpoint::gguf)); `select` and `rename` then see these names.
///
/// # Errors
/// [`ErrorKind::Argument`] if `to` contains the source, two keys get the same name or nothing is selected;
/// [`ErrorKind::Unsupported`] for a read-only format or a type that cannot be converted; [`ErrorKind::Damaged`] if a checksum of the
/// source does not match, or a selected tensor cannot be read and [`ConvertOptions::skip_unreadable`] is false.
#[doc(alias = "dcp_to_torch_save")]
#[doc(alias = "torch_save_to_dcp")]
pub fn convert(
    from: impl AsRef<Path>,
    to: impl AsRef<Path>,
    options: &ConvertOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Conversion> {
    convert_beside(
        from.as_ref(),
        to.as_ref(),
        options,
        &FilesBeside { written: Vec::new(), replaced: &|_| false },
        progress,
    )
}

/// Files that are written together with a checkpoint, and replaced with it.
pub(crate) struct FilesBeside<'a> {
    /// Names and contents.
    pub(crate) written: Vec<(&'static str, Vec<u8>)>,
    /// Names of files at the target that may be replaced.
    pub(crate) replaced: &'a dyn Fn(&str) -> bool,
}

/// Converts as [`convert`] does, with other files that appear and disappear together with the checkpoint.
pub(crate) fn convert_beside(
    from: &Path,
    to: &Path,
    options: &ConvertOptions,
    others: &FilesBeside<'_>,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Conversion> {
    let (opened, writer) = (open(from)?, options.format.to_write()?);
    let (source, beside) = as_source(opened, options)?;
    check_no_scheme(to)?;
    if to.exists() && fs::canonicalize(&source.directory)?.starts_with(fs::canonicalize(to)?) {
        let found = format!("target {}, which contains the source", to.display());
        return Err(ErrorKind::Argument.error(
            "conversion",
            found,
            "a target outside the source",
            "write to another directory",
        ));
    }
    check_overwrite(to, options.overwrite)?;
    check_readable(&source, options)?;
    let unreadable = source.unreadable.keys().filter(|key| (options.select)(key)).cloned().collect();
    let (mut contents, left_out) = contents_to_write(&source, options, writer)?;
    let plan = plan_files(&source, &contents, options, writer)?;
    let staging = Staging::replacing(to, 0, others.replaced)?;
    let files = write_all(staging.path(), writer, plan, (&contents.values, &contents.paths), progress)?;
    let beside = beside.iter().map(|(name, text)| (name, text.as_bytes()));
    for (name, content) in beside.chain(others.written.iter().map(|(name, content)| (name, &content[..]))) {
        let path = staging.path().join(name);
        let directory = path.parent().map_or(Ok(()), fs::create_dir_all);
        directory.and_then(|()| fs::write(&path, content)).map_err(|error| unwritable(&path, &error))?;
    }
    let (tensors, bytes) = (contents.tensors.len(), contents.bytes() as u64);
    let done = Conversion { tensors, files: files.len(), bytes, left_out, unreadable };
    contents.save_id.clone_from(&source.save_id);
    finish_checkpoint(writer, staging.path(), contents, files)?;
    staging.commit()?;
    Ok(done)
}

/// Refuses a source with selected tensors that cannot be read, unless they may be left out.
fn check_readable(source: &Catalog, options: &ConvertOptions) -> Result<()> {
    let mut lost = source.unreadable_data().filter(|(key, _)| !options.skip_unreadable && (options.select)(key));
    let Some((key, reason)) = lost.next() else { return Ok(()) };
    let more = match lost.count() {
        0 => String::new(),
        count => format!(", and {count} more"),
    };
    let found = format!("{key:?}, which cannot be read ({reason}){more}");
    let needed = "every selected tensor";
    let fix = "copy the checkpoint again, or leave such entries out (`skip_unreadable`, --skip-unreadable)";
    Err(ErrorKind::Damaged.error("checkpoint to convert", found, needed, fix))
}

/// The checkpoint to convert, and the files to write next to its tensors. A GGUF file becomes a Hugging Face directory with the
/// names, the configuration and the tokenizer of one.
fn as_source(opened: Catalog, options: &ConvertOptions) -> Result<(Catalog, Vec<(&'static str, String)>)> {
    if opened.format != Format::Gguf || options.format != Format::HuggingFace {
        return Ok((opened, Vec::new()));
    }
    let mut view = HfView::of(opened)?;
    // Most elements are in the type of the largest tensor.
    let largest = view.catalog.tensors.values().max_by_key(|tensor| tensor.elem_count());
    if let Some(largest) = largest {
        view.config["torch_dtype"] = element_for(largest.element, options).torch_name().into();
    }
    let beside = view.files();
    Ok((view.catalog, beside))
}

/// The metadata to write, without chunks, and the keys of values that the format cannot hold.
fn contents_to_write(
    source: &Catalog,
    options: &ConvertOptions,
    writer: &dyn FormatWriter,
) -> Result<(Contents, Vec<String>)> {
    let mut contents = Contents::default();
    let mut left_out = Vec::new();
    let mut origin: BTreeMap<String, &String> = BTreeMap::new();
    for key in source.tensors.keys().chain(source.values.keys()).filter(|key| (options.select)(key)) {
        let name = (options.rename)(key);
        if let Some(other) = origin.insert(name.clone(), key) {
            let found = format!("{other:?} and {key:?}, which both become {name:?}");
            return Err(ErrorKind::Argument.error("rename rules", found, "different names", "change the rules"));
        }
        if let Some(stored) = source.tensors.get(key) {
            let element = element_for(stored.element, options);
            contents
                .tensors
                .insert(name.clone(), StoredTensor { element, shape: stored.shape.clone(), chunks: Vec::new() });
        } else if writer.values() == ValueStorage::Nowhere {
            left_out.push(key.clone());
            continue;
        } else {
            contents.values.insert(name.clone(), source.values[key].clone());
        }
        let path = match (&name == key).then(|| source.paths.get(key)).flatten() {
            Some(path) => path.clone(),
            None => vec![Key::Name(name.clone())],
        };
        contents.paths.insert(name, path);
    }
    if origin.is_empty() && !(source.tensors.is_empty() && source.values.is_empty()) {
        let found = format!("none of {} tensors and {} values selected", source.tensors.len(), source.values.len());
        return Err(ErrorKind::Argument.error("selection", found, "at least one", "include more, or exclude less"));
    }
    Ok((contents, left_out))
}

fn element_for(element: ElementType, options: &ConvertOptions) -> ElementType {
    let is_float = matches!(
        element,
        ElementType::F8E5M2
            | ElementType::F8E4M3
            | ElementType::F16
            | ElementType::BF16
            | ElementType::F32
            | ElementType::F64
    );
    options.element.filter(|_| is_float).unwrap_or(element)
}

/// The files to write: name and boxes of each.
fn plan_files(
    source: &Catalog,
    contents: &Contents,
    options: &ConvertOptions,
    writer: &dyn FormatWriter,
) -> Result<Vec<(String, Vec<BoxToWrite>)>> {
    let mut groups: BTreeMap<usize, Vec<BoxToWrite>> = BTreeMap::new();
    let mut filled = (0, 0);
    for (key, stored) in source.tensors.iter().filter(|(key, _)| (options.select)(key)) {
        let name = (options.rename)(key);
        let element = contents.tensors[&name].element;
        let whole = TensorBox { offsets: vec![0; stored.shape.len()], sizes: stored.shape.clone() };
        let boxes = match &options.reshard {
            Some(boxes_of) => boxes_of(key, &stored.shape)?,
            None => Vec::new(),
        };
        let mut boxes: Vec<(usize, TensorBox)> = boxes.into_iter().map(|b| (b.rank, b.global)).collect();
        if boxes.is_empty() {
            let bytes = stored.elem_count() * element.size_in_bytes();
            if options.reshard.is_none() && filled.1 > 0 && filled.1 + bytes > options.max_file_bytes {
                filled = (filled.0 + 1, 0);
            }
            filled.1 += bytes;
            let file = options.file_of.as_ref().map_or(filled.0, |file_of| file_of(&name));
            boxes.push((file, whole.clone()));
        }
        let stored = Arc::new(stored.clone());
        for (file, part) in boxes {
            let content = BoxContent::Stored {
                files: Arc::clone(&source.files),
                key: key.clone(),
                tensor: Arc::clone(&stored),
                part: part.clone(),
                element,
            };
            let is_whole = part == whole;
            groups.entry(file).or_default().push(BoxToWrite { key: name.clone(), part, is_whole, content });
        }
    }
    let groups_count = groups.len();
    let mut plan = Vec::new();
    for (position, (file, boxes)) in groups.into_iter().enumerate() {
        if options.reshard.is_none() {
            plan.push((writer.file_name(FileRole::Whole { index: position, count: groups_count }), boxes));
            continue;
        }
        let files = boxes_by_file(writer, boxes);
        let count = files.len();
        for (index, boxes) in files.into_iter().enumerate() {
            let role = FileRole::OfRank { rank: file, ranks: groups_count, index, count };
            plan.push((writer.file_name(role), boxes));
        }
    }
    Ok(plan)
}

/// Writes the files in parallel.
fn write_all(
    staged: &Path,
    writer: &dyn FormatWriter,
    mut plan: Vec<(String, Vec<BoxToWrite>)>,
    (values, paths): (&BTreeMap<String, Value>, &BTreeMap<String, Vec<Key>>),
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<WrittenFile>> {
    let in_files = writer.values() == ValueStorage::InFiles;
    if plan.is_empty() && in_files && !values.is_empty() {
        plan.push((writer.file_name(FileRole::Whole { index: 0, count: 1 }), Vec::new()));
    }
    let none = BTreeMap::new();
    let one = |(i, (name, boxes)): (usize, (String, Vec<BoxToWrite>))| {
        let values = if i == 0 && in_files { values } else { &none };
        write_file(writer, staged, &name, boxes, (values, paths), &|bytes| progress(bytes))
    };
    plan.into_par_iter().enumerate().map(one).collect()
}
