//! Reading `.metadata`, and enough of every archive to locate its elements.

use std::collections::BTreeMap;

use super::names::{CLASSES, FILESYSTEM, METADATA, OLD_PROPERTIES};
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::formats::pickle::{Object, ObjectId, Pickle};
use crate::checkpoint::formats::torch::{TorchArchive, TorchLeaf, at_key, unreadable};
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Contents, INCOMPLETE, NOT_A_CHECKPOINT, StoredTensor, check_file_name};
use crate::checkpoint::metadata::value::Key;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorBox;

/// Longest `.metadata` that is read: a bound on what a hostile file can make a reader allocate.
const MAX_METADATA: u64 = 1 << 30;

/// Where the archive of a chunk or value is: PyTorch's `_StorageInfo`.
struct StorageInfo {
    file: String,
    offset: u64,
    length: u64,
    /// Whether the bytes were transformed by an extension, such as compression.
    is_transformed: bool,
}

/// Archives by flat key and, for chunks of tensors, offsets: PyTorch's `storage_data`.
type StorageByKey = BTreeMap<(String, Option<Vec<usize>>), StorageInfo>;

fn bad(found: impl std::fmt::Display, needed: &str) -> Error {
    ErrorKind::Damaged.error("distributed checkpoint", found, needed, NOT_A_CHECKPOINT)
}

/// Reads the metadata of a DCP checkpoint.
pub(super) fn contents(files: &Files) -> Result<Contents> {
    let bytes = files.read_small(METADATA, MAX_METADATA)?;
    let pickle = Pickle::read(&bytes)?;
    drop(bytes);
    let state = object(&pickle, pickle.root(), CLASSES, "Metadata")?;
    let mut storage = storage(&pickle, field(&pickle, state, "storage_data")?)?;
    let paths = match pickle.field(state, "planner_data") {
        Some(id) if *pickle.get(id) != Object::None => paths(&pickle, id)?,
        _ => BTreeMap::new(),
    };
    let mut contents = Contents { version: text_of(&pickle, state, "version"), ..Contents::default() };
    if let Some((CLASSES, "StorageMeta", _, Some(meta))) =
        pickle.field(state, "storage_meta").and_then(|id| pickle.constructed(id))
    {
        contents.save_id = text_of(&pickle, meta, "save_id");
    }
    let items = field(&pickle, state, "state_dict_metadata")?;
    let items = pickle.dict(items).ok_or_else(|| bad(pickle.describe(items), "a dict of items"))?;
    let mut by_key: BTreeMap<&str, ObjectId> = BTreeMap::new();
    for &(key, item) in items {
        let key = pickle.text(key).ok_or_else(|| bad("a key that is not a string", "a string"))?;
        if by_key.insert(key, item).is_some() {
            return Err(twice(key));
        }
    }
    let mut budget = pickle.budget();
    for (key, item) in by_key {
        let path = paths.get(key).cloned().unwrap_or_else(|| vec![Key::Name(key.to_string())]);
        match pickle.constructed(item) {
            Some((CLASSES, "TensorStorageMetadata", ..)) => {
                let tensor = tensor(&pickle, item, key, &mut storage, files, &mut budget);
                match tensor {
                    Ok(tensor) => drop(contents.tensors.insert(key.to_string(), tensor)),
                    Err(error) => {
                        let reason = unreadable(error).map_err(|error| at_key(error, key))?;
                        contents.unreadable.insert(key.to_string(), reason);
                    }
                }
                if paths.contains_key(key) {
                    contents.paths.insert(key.to_string(), path);
                }
            }
            Some((CLASSES, "BytesStorageMetadata", ..)) => {
                let info = storage.remove(&(key.to_string(), None)).ok_or_else(|| missing(key))?;
                let leaves = open(files, &info).and_then(|archive| archive.flatten(&path));
                let leaves = match leaves {
                    Ok(leaves) => leaves,
                    Err(error) => {
                        let reason = unreadable(error).map_err(|error| at_key(error, key))?;
                        vec![(path, TorchLeaf::Unreadable(reason))]
                    }
                };
                for (path, leaf) in leaves {
                    leaf.add_to(&mut contents, &info.file, path)?;
                }
            }
            _ => return Err(bad(format!("{} as item {key:?}", pickle.describe(item)), "a tensor or bytes")),
        }
    }
    Ok(contents)
}

/// Opens the archive of a chunk or value.
fn open<'a>(files: &'a Files, info: &'a StorageInfo) -> Result<TorchArchive<'a>> {
    if info.is_transformed {
        let fix = "load it with PyTorch and save it without extensions";
        let found = "stored with a transformation, such as compression";
        return Err(ErrorKind::Unsupported.error("entry", found, "a plain torch.save archive", fix));
    }
    TorchArchive::open(files, &info.file, info.offset, info.length)
}

/// A field that is a string.
fn text_of(pickle: &Pickle, state: ObjectId, name: &str) -> Option<String> {
    pickle.field(state, name).and_then(|id| pickle.text(id)).map(ToString::to_string)
}

/// The `__dict__` of an object of a class.
fn object(pickle: &Pickle, id: ObjectId, module: &str, class: &str) -> Result<ObjectId> {
    match pickle.constructed(id) {
        Some((found, name, _, Some(state))) if (found, name) == (module, class) => Ok(state),
        _ => Err(bad(pickle.describe(id), &format!("an object of {module}.{class} with its state"))),
    }
}

fn field(pickle: &Pickle, state: ObjectId, name: &str) -> Result<ObjectId> {
    pickle.field(state, name).ok_or_else(|| bad(format!("an object without {name}"), name))
}

fn sizes(pickle: &Pickle, id: ObjectId) -> Result<Vec<usize>> {
    pickle.sizes(id).ok_or_else(|| bad(format!("{} for sizes", pickle.describe(id)), "integers"))
}

fn missing(key: &str) -> Error {
    let found = format!("no storage entry for a chunk of {key:?}");
    ErrorKind::Damaged.error("distributed checkpoint", found, "one for every chunk", INCOMPLETE)
}

/// The error for a key that occurs twice, which a Python dict cannot have.
fn twice(key: &str) -> Error {
    bad(format!("{key:?} twice in {METADATA}"), "each key once")
}

fn storage(pickle: &Pickle, id: ObjectId) -> Result<StorageByKey> {
    let pairs = pickle.dict(id).ok_or_else(|| bad(pickle.describe(id), "a dict of storage entries"))?;
    let mut storage = StorageByKey::new();
    let mut budget = pickle.budget();
    for &(index, info) in pairs {
        let index = object(pickle, index, CLASSES, "MetadataIndex")?;
        let info = object(pickle, info, FILESYSTEM, "_StorageInfo")?;
        let key = field(pickle, index, "fqn")?;
        pickle.spend(key, 1, &mut budget)?;
        let key = pickle.text(key).ok_or_else(|| bad("a key that is not a string", "a string"))?.to_string();
        let offsets = match pickle.field(index, "offset") {
            Some(id) if *pickle.get(id) != Object::None => Some(sizes(pickle, id)?),
            _ => None,
        };
        let file = field(pickle, info, "relative_path")?;
        pickle.spend(file, 1, &mut budget)?;
        let file = pickle.text(file).ok_or_else(|| bad("a file name that is not a string", "a string"))?.to_string();
        check_file_name(&file)?;
        let number = |name: &str| -> Result<u64> {
            let id = field(pickle, info, name)?;
            pickle.size(id).map(|n| n as u64).ok_or_else(|| bad(pickle.describe(id), "a byte offset or length"))
        };
        let (offset, length) = (number("offset")?, number("length")?);
        let is_transformed = pickle.field(info, "transform_descriptors").is_some_and(|steps| {
            *pickle.get(steps) != Object::None && !pickle.entries(steps).is_some_and(<[ObjectId]>::is_empty)
        });
        if storage.insert((key.clone(), offsets), StorageInfo { file, offset, length, is_transformed }).is_some() {
            return Err(twice(&key));
        }
    }
    Ok(storage)
}

/// The path of each flat key: PyTorch's `planner_data`.
fn paths(pickle: &Pickle, id: ObjectId) -> Result<BTreeMap<String, Vec<Key>>> {
    let pairs = pickle.dict(id).ok_or_else(|| bad(pickle.describe(id), "a dict of paths"))?;
    let mut budget = pickle.budget();
    let mut paths = BTreeMap::new();
    for &(key, path) in pairs {
        pickle.spend(key, 1, &mut budget)?;
        let name = pickle.text(key).ok_or_else(|| bad("a key that is not a string", "a string"))?;
        let steps = pickle.entries(path).ok_or_else(|| bad(pickle.describe(path), "a path"))?;
        let step = |&id: &ObjectId| {
            pickle.spend(id, 1, &mut budget)?;
            match (pickle.text(id), pickle.size(id)) {
                (Some(name), _) => Ok(Key::Name(name.to_string())),
                (None, Some(index)) => Ok(Key::Index(index)),
                _ => Err(bad(format!("{} in a path", pickle.describe(id)), "strings and integers")),
            }
        };
        let steps = steps.iter().map(step).collect::<Result<Vec<_>>>()?;
        if paths.insert(name.to_string(), steps).is_some() {
            return Err(twice(name));
        }
    }
    Ok(paths)
}

/// Reads the metadata of a tensor and locates its chunks.
fn tensor(
    pickle: &Pickle,
    item: ObjectId,
    key: &str,
    storage: &mut StorageByKey,
    files: &Files,
    budget: &mut usize,
) -> Result<StoredTensor> {
    let state = object(pickle, item, CLASSES, "TensorStorageMetadata")?;
    let properties = field(pickle, state, "properties")?;
    let module = pickle.constructed(properties).map_or(CLASSES, |(module, ..)| match module {
        OLD_PROPERTIES => OLD_PROPERTIES,
        _ => CLASSES,
    });
    let properties = object(pickle, properties, module, "TensorProperties")?;
    // `TensorProperties` has six entries since PyTorch stores strides, five before.
    let dtype = match pickle.entries(properties) {
        Some([dtype, _, _, _, _] | [dtype, _, _, _, _, _]) => pickle.global(*dtype),
        _ => None,
    };
    let element = match dtype {
        Some(("torch", name)) => ElementType::from_name(name)?,
        _ => return Err(bad("a tensor without a dtype", "a dtype")),
    };
    let shape = sizes(pickle, field(pickle, state, "size")?)?;
    let list = field(pickle, state, "chunks")?;
    let mut chunks = Vec::new();
    for &chunk in pickle.entries(list).ok_or_else(|| bad(pickle.describe(list), "a list of chunks"))? {
        pickle.spend(chunk, 1, budget)?;
        let chunk = object(pickle, chunk, CLASSES, "ChunkStorageMetadata")?;
        let offsets = sizes(pickle, field(pickle, chunk, "offsets")?)?;
        let part = TensorBox { offsets, sizes: sizes(pickle, field(pickle, chunk, "sizes")?)? };
        let Some(info) = storage.remove(&(key.to_string(), Some(part.offsets.clone()))) else {
            match part.volume() {
                0 => continue,
                _ => return Err(missing(key)),
            }
        };
        let located = open(files, &info)?.single()?;
        if located.element != element || located.sizes != part.sizes {
            let found = format!("a chunk of type {} and shape {:?}", located.element, located.sizes);
            return Err(bad(found, &format!("{element} and {:?}, as {METADATA} says", part.sizes)));
        }
        chunks.push(located.chunk(part, &info.file));
    }
    Ok(StoredTensor { element, shape, chunks })
}
