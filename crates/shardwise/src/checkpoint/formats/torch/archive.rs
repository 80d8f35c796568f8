//! Reading a `torch.save` archive: the pickle and the locations of its tensors, but no elements.

use super::names::{CHECKSUMS, STORAGES};
use crate::checkpoint::bytes::files::Files;
use crate::checkpoint::formats::pickle::{MAX_DEPTH, Object, ObjectId, Pickle};
use crate::checkpoint::formats::zip::Archive;
use crate::checkpoint::metadata::blocks::BlockChecksums;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::stored::{Chunk, Contents, NOT_A_CHECKPOINT, StoredTensor, row_major};
use crate::checkpoint::metadata::value::{Key, Value, flat_key};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorBox;

/// Longest pickle that is read: a bound on what a hostile file can make a reader allocate.
const MAX_PICKLE: u64 = 1 << 30;
/// An expanded tensor (elements that share storage) larger than its storage is refused above this size: a small hostile file
/// must not fill the memory.
const MAX_EXPANDED: usize = 64 << 20;

/// An opened archive and its parsed pickle.
pub(in crate::checkpoint) struct TorchArchive<'a> {
    archive: Archive<'a>,
    /// The directory of all entries in the archive, such as `archive/`.
    prefix: String,
    pickle: Pickle,
}

/// A tensor of an archive, and where it is in the file.
#[derive(Debug)]
pub(in crate::checkpoint) struct LocatedTensor {
    /// Element type.
    pub(in crate::checkpoint) element: ElementType,
    /// Shape of the tensor.
    pub(in crate::checkpoint) sizes: Vec<usize>,
    /// Strides in elements; `None` if it is row-major.
    pub(in crate::checkpoint) strides: Option<Vec<usize>>,
    /// Byte offset of the first element in the file.
    pub(in crate::checkpoint) offset: u64,
    /// CRC-32 of the elements, known if they are the whole storage in row-major order.
    pub(in crate::checkpoint) crc32: Option<u32>,
    /// CRC-32 per block, if this library wrote the archive.
    pub(in crate::checkpoint) blocks: Option<BlockChecksums>,
}

/// A leaf of the pickled object.
pub(in crate::checkpoint) enum TorchLeaf {
    /// A tensor in a storage of the archive.
    Tensor(LocatedTensor),
    /// Any other object that is a plain value.
    Value(Value),
    /// A tensor or an archive that cannot be read, and why.
    Unreadable(String),
    /// An object of Python that no [`Value`] can hold, and what it is.
    Object(String),
}

impl TorchLeaf {
    /// Adds the leaf to the metadata of a checkpoint; `file` is the file it was found in.
    pub(in crate::checkpoint) fn add_to(self, contents: &mut Contents, file: &str, path: Vec<Key>) -> Result<()> {
        match self {
            TorchLeaf::Value(value) => contents.add_value(path, value),
            TorchLeaf::Unreadable(reason) => contents.add_unreadable(path, reason),
            TorchLeaf::Object(reason) => contents.add_python_object(path, reason),
            TorchLeaf::Tensor(located) => contents.add_tensor(path, located.whole(file)),
        }
    }
}

impl LocatedTensor {
    /// The metadata of a tensor that consists of this one chunk.
    fn whole(self, file: &str) -> StoredTensor {
        let (element, shape) = (self.element, self.sizes.clone());
        let part = TensorBox { offsets: vec![0; shape.len()], sizes: shape.clone() };
        StoredTensor { element, shape, chunks: vec![self.chunk(part, file)] }
    }

    /// The metadata of a chunk that is the box `part` of a larger tensor.
    pub(in crate::checkpoint) fn chunk(self, part: TensorBox, file: &str) -> Chunk {
        let LocatedTensor { offset, strides, crc32, blocks, .. } = self;
        Chunk { part, file: file.to_string(), offset, strides, crc32, blocks, encoding: None }
    }
}

fn bad(found: impl std::fmt::Display, needed: &str) -> Error {
    ErrorKind::Damaged.error("torch.save archive", found, needed, NOT_A_CHECKPOINT)
}

impl<'a> TorchArchive<'a> {
    /// Opens the archive in a byte range of a file.
    pub(in crate::checkpoint) fn open(files: &'a Files, file: &'a str, start: u64, length: u64) -> Result<Self> {
        let archive = Archive::open(files, file, start, length)?;
        let prefix = archive.names().find_map(|name| name.strip_suffix("data.pkl").filter(|p| p.ends_with('/')));
        let prefix = prefix.ok_or_else(|| bad("no entry data.pkl", "a torch.save file"))?.to_string();
        let order = format!("{prefix}byteorder");
        if archive.entry(&order).is_ok() && archive.read(&order, 16)? != b"little" {
            return Err(bad("big-endian elements", "little-endian ones"));
        }
        let pickle = Pickle::read_any(&archive.read(&format!("{prefix}data.pkl"), MAX_PICKLE)?)?;
        Ok(TorchArchive { archive, prefix, pickle })
    }

    /// Returns the tensor of a single-tensor archive.
    pub(in crate::checkpoint) fn single(&self) -> Result<LocatedTensor> {
        let root = self.pickle.root();
        self.tensor(root)?.ok_or_else(|| bad(self.pickle.describe(root), "a tensor"))
    }

    /// Returns all leaves with their paths. Dicts are flattened, and so are lists that contain dicts or tensors, and tuples that
    /// contain tensors, which a [`Value`] cannot hold.
    pub(in crate::checkpoint) fn flatten(&self, base: &[Key]) -> Result<Vec<(Vec<Key>, TorchLeaf)>> {
        let mut leaves = Vec::new();
        let mut path = base.to_vec();
        self.visit(self.pickle.root(), &mut path, MAX_DEPTH, &mut self.pickle.budget(), &mut leaves)?;
        Ok(leaves)
    }

    fn visit(
        &self,
        id: ObjectId,
        path: &mut Vec<Key>,
        depth: usize,
        budget: &mut usize,
        leaves: &mut Vec<(Vec<Key>, TorchLeaf)>,
    ) -> Result<()> {
        self.pickle.spend(id, depth, budget)?;
        let located = match self.tensor(id) {
            Ok(None) => None,
            Ok(Some(tensor)) => Some(TorchLeaf::Tensor(tensor)),
            Err(error) => Some(TorchLeaf::Unreadable(unreadable(error)?)),
        };
        if let Some(leaf) = located {
            *budget = budget.saturating_sub(length(path));
            leaves.push((path.clone(), leaf));
            return Ok(());
        }
        let entries = match self.pickle.get(id) {
            Object::Dict(pairs) if pairs.iter().all(|&(key, _)| self.pickle.key_text(key).is_some()) => {
                for &(key, value) in pairs {
                    self.pickle.spend(key, depth, budget)?;
                    let Some(name) = self.pickle.key_text(key) else { continue };
                    path.push(Key::Name(name));
                    self.visit(value, path, depth - 1, budget, leaves)?;
                    path.pop();
                }
                return Ok(());
            }
            Object::Dict(_) => {
                let reason = "a dict with keys that are not strings or numbers".to_string();
                leaves.push((path.clone(), TorchLeaf::Object(reason)));
                return Ok(());
            }
            Object::List(entries) if self.holds(&mut entries.iter().copied(), true, depth, budget)? => entries,
            Object::Tuple(entries) if self.holds(&mut entries.iter().copied(), false, depth, budget)? => &entries[..],
            _ => {
                *budget = budget.saturating_sub(length(path));
                let leaf = match self.pickle.value(id, depth, budget) {
                    Ok(value) => TorchLeaf::Value(value),
                    Err(error) => TorchLeaf::Object(unreadable(error).map_err(|error| at_key(error, &flat_key(path)))?),
                };
                leaves.push((path.clone(), leaf));
                return Ok(());
            }
        };
        for (i, &child) in entries.iter().enumerate() {
            path.push(Key::Index(i));
            self.visit(child, path, depth - 1, budget, leaves)?;
            path.pop();
        }
        Ok(())
    }

    /// Whether entries contain a tensor at any depth or, if `dicts` is set, a dict.
    fn holds(
        &self,
        entries: &mut dyn Iterator<Item = ObjectId>,
        dicts: bool,
        depth: usize,
        budget: &mut usize,
    ) -> Result<bool> {
        for id in entries {
            self.pickle.spend(id, depth, budget)?;
            let found = match self.pickle.get(id) {
                Object::Dict(_) if dicts => true,
                Object::Dict(pairs) => self.holds(&mut pairs.iter().map(|&(_, id)| id), dicts, depth - 1, budget)?,
                Object::List(inner) => self.holds(&mut inner.iter().copied(), dicts, depth - 1, budget)?,
                Object::Tuple(inner) => self.holds(&mut inner.iter().copied(), false, depth - 1, budget)?,
                _ => self.rebuilt(id).is_some(),
            };
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// If the object is a tensor: the function that rebuilds it and the arguments, without wrappers such as `Parameter`.
    fn rebuilt(&self, id: ObjectId) -> Option<(&str, &[ObjectId])> {
        let mut id = id;
        for _ in 0..4 {
            let (module, name, args, _) = self.pickle.constructed(id)?;
            let args = self.pickle.entries(args)?;
            match (module, name) {
                ("torch._utils", "_rebuild_parameter") => id = *args.first()?,
                ("torch._tensor", "_rebuild_from_type_v2") => {
                    let (_, name) = self.pickle.global(*args.first()?)?;
                    return name.starts_with("_rebuild_tensor").then_some((name, self.pickle.entries(*args.get(2)?)?));
                }
                ("torch._utils", _) => return Some((name, args)),
                _ => return None,
            }
        }
        None
    }

    /// Locates a tensor; `None` if the object is not a tensor.
    fn tensor(&self, id: ObjectId) -> Result<Option<LocatedTensor>> {
        let Some((_, args)) = self.rebuilt(id) else { return Ok(None) };
        let parts = || -> Option<_> {
            let [storage, offset, sizes, strides, ..] = args else { return None };
            let Object::PersistentId(name) = self.pickle.get(*storage) else { return None };
            let [kind, class, key, _, _] = self.pickle.entries(*name)? else { return None };
            let (_, class) = self.pickle.global(*class)?;
            let of_storage = STORAGES.iter().find(|(name, _)| *name == class).map(|(_, element)| *element);
            let dtype = args.get(6).and_then(|&dtype| self.pickle.global(dtype)).map(|(_, name)| name);
            let key = self.pickle.text(*key).filter(|_| self.pickle.text(*kind) == Some("storage"))?;
            let (sizes, strides) = (self.pickle.sizes(*sizes)?, self.pickle.sizes(*strides)?);
            (sizes.len() == strides.len()).then_some((
                key,
                of_storage,
                dtype,
                self.pickle.size(*offset)?,
                sizes,
                strides,
            ))
        };
        let (key, of_storage, dtype, first, sizes, strides) =
            parts().ok_or_else(|| bad("a tensor of an unknown form", "storage, offset, sizes and strides"))?;
        let element = match (of_storage, dtype) {
            (Some(element), _) => element,
            (None, Some(name)) => ElementType::from_name(name)?,
            (None, None) => {
                let found = "a tensor of a type that is not served";
                let fix = "store it with PyTorch as another type first";
                return Err(ErrorKind::Unsupported.error("torch.save archive", found, "a type with a dtype", fix));
            }
        };
        let size = element.size_in_bytes();
        let name = format!("{}data/{key}", self.prefix);
        let entry = self.archive.entry(&name)?;
        let volume = sizes.iter().try_fold(1usize, |volume, &n| volume.checked_mul(n));
        let volume = volume.filter(|volume| volume.checked_mul(size).is_some_and(|bytes| bytes <= isize::MAX as usize));
        let volume =
            volume.ok_or_else(|| bad(format!("a tensor of shape {sizes:?}"), "one that memory can address"))?;
        let span = match volume {
            0 => Some(0),
            _ => sizes.iter().zip(&strides).try_fold(1usize, |end, (n, s)| end.checked_add((n - 1).checked_mul(*s)?)),
        };
        let end = span.and_then(|span| span.checked_add(if volume == 0 { 0 } else { first })?.checked_mul(size));
        if end.is_none_or(|end| end as u64 > entry.bytes) {
            let found = format!("a tensor of shape {sizes:?} and strides {strides:?} from element {first} on");
            return Err(bad(format!("{found} in {} bytes", entry.bytes), "a tensor inside its storage"));
        }
        let bytes = volume * size;
        if bytes as u64 > entry.bytes && bytes > MAX_EXPANDED {
            let found = format!("a tensor of {bytes} bytes in a storage of {}", entry.bytes);
            return Err(ErrorKind::Unsupported.error(
                "torch.save archive",
                found,
                "a storage that holds every element",
                "save tensor.contiguous()",
            ));
        }
        let dense = row_major(&sizes);
        let ordered = volume == 0 || sizes.iter().zip(strides.iter().zip(&dense)).all(|(&n, (a, b))| n == 1 || a == b);
        let start = if volume == 0 { 0 } else { (first * size) as u64 };
        let is_whole = ordered && start == 0 && bytes as u64 == entry.bytes;
        let crc32 = entry.crc32.filter(|_| is_whole);
        let offset = self.archive.locate(&name)? + start;
        let blocks = match is_whole && key == "0" {
            true => self.checksums(entry.bytes)?,
            false => None,
        };
        Ok(Some(LocatedTensor { element, sizes, strides: (!ordered).then_some(strides), offset, crc32, blocks }))
    }

    /// Reads the block checksums of storage 0, which has `bytes` bytes, if the archive has them.
    fn checksums(&self, bytes: u64) -> Result<Option<BlockChecksums>> {
        let name = format!("{}{CHECKSUMS}", self.prefix);
        let Ok(entry) = self.archive.entry(&name) else { return Ok(None) };
        let wrong = || bad(format!("{} bytes as checksums of a storage of {bytes}", entry.bytes), "one per block");
        // Bounded by the storage: blocks are at least 64 KiB, so 4 bytes per block are less than an 8192th of it.
        let read = self.archive.read(&name, 16 + bytes / 8192).map_err(|_| wrong())?;
        let blocks = BlockChecksums::from_bytes(&read).filter(|blocks| blocks.fits(bytes));
        blocks.map(Some).ok_or_else(wrong)
    }
}

/// Approximate size of a path in memory: every leaf has a copy, which the budget accounts for.
fn length(path: &[Key]) -> usize {
    let step = |key: &Key| match key {
        Key::Name(name) => 8 + name.len(),
        Key::Index(_) => 8,
    };
    path.iter().map(step).sum()
}

/// Why an entry is unreadable, if the error is about its kind and not about a damaged file; else the error.
pub(in crate::checkpoint) fn unreadable(error: Error) -> Result<String> {
    match error {
        Error::Invalid(inner) if matches!(inner.kind, ErrorKind::Unsupported | ErrorKind::UnknownName { .. }) => {
            Ok(format!("{} {}", inner.what, inner.found))
        }
        other => Err(other),
    }
}

/// Adds the flat key of an entry to an error.
pub(in crate::checkpoint) fn at_key(error: Error, key: &str) -> Error {
    match error {
        Error::Invalid(inner) => {
            ErrorKind::Damaged.error(inner.what, format!("{} in entry {key:?}", inner.found), &inner.needed, &inner.fix)
        }
        other => other,
    }
}
