//! The plan of a save: what each rank has, what the checkpoint gets, and which rank writes which box.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Tensor};

use crate::checkpoint::bytes::content::{BoxContent, BoxToWrite};
use crate::checkpoint::catalogs::format::{FormatWriter, ValueStorage};
use crate::checkpoint::metadata::assign::write_tasks;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::state::{State, StateLeaf};
use crate::checkpoint::metadata::stored::{Contents, StoredTensor};
use crate::checkpoint::metadata::value::{Key, Value};
use crate::checkpoint::save::plan_cache::{Assignment, CachedPlan, PlanChange};
use crate::checkpoint::save::planned::{Entries, MergedEntries, PlannedEntry, PlannedKind, merge};
use crate::comm::{World, all_ok, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::fnv::Fnv;
use crate::layout::{OwnedBox, TensorBox, TensorMeta};
use crate::param::MergedTensor;
use crate::redistribute::block;
use crate::sharded::ShardedTensor;
use crate::tensor::DTensor;
use shardwise_kernels::{bytes_of, contiguous, own_copy, placeholder};

/// The plan of a save: all metadata, and the boxes that this rank writes.
pub(in crate::checkpoint) struct SavePlan {
    /// All tensors, without chunks, and all values.
    pub(in crate::checkpoint) contents: Contents,
    /// The boxes that this rank writes.
    pub(in crate::checkpoint) boxes: Vec<BoxToWrite>,
}

/// What one rank has to save, and the elements that it holds.
pub(in crate::checkpoint) struct LocalPlan {
    entries: Arc<Entries>,
    /// Of all entries.
    hash: u64,
    sources: BTreeMap<String, TensorToSave>,
}

impl LocalPlan {
    /// Lists what this rank saves. Local, except that `Partial` tensors are reduced.
    pub(in crate::checkpoint) fn new(
        world: &World,
        state: &State,
        writer: &dyn FormatWriter,
        cache: &mut CachedPlan,
    ) -> Result<Self> {
        let (mut entries, mut sources, mut hash) = (Entries::new(), BTreeMap::new(), Fnv::default());
        for (key, (path, leaf)) in state.flatten()? {
            let (entry, entry_hash) = match &leaf {
                StateLeaf::Value(value) => {
                    check_value(&key, value, writer)?;
                    hashed(PlannedEntry { path, kind: PlannedKind::Value(value.clone()) })?
                }
                StateLeaf::Plain(tensor) => {
                    let source = TensorToSave::of_plain(tensor, world.rank())?;
                    let (element, shape) = (ElementType::of(source.dtype)?, tensor.dims().to_vec());
                    let crc32 = crc32fast::hash(&bytes_of(&source.tensors[0])?);
                    sources.insert(key.clone(), source);
                    hashed(PlannedEntry { path, kind: PlannedKind::Plain { element, shape, crc32 } })?
                }
                StateLeaf::Sharded(tensor) => {
                    sources.insert(key.clone(), TensorToSave::of_sharded(tensor, world.rank()));
                    let ranks = tensor.device_mesh().ranks();
                    let boxes = ranks.iter().flat_map(|&rank| tensor.metadata().boxes_of(rank));
                    hashed(tensor_entry(&key, &path, tensor.dtype(), tensor.shape(), boxes)?)?
                }
                StateLeaf::Merged(tensor) => {
                    let stored = tensor.stored().reduced(Location::caller())?;
                    let (tensor, shape) = (tensor.with_stored(stored), tensor.merged_shape());
                    sources.insert(key.clone(), TensorToSave::of_merged(&tensor, world.rank())?);
                    let layout = tensor.stored().layout();
                    let boxes = layout.boxes().flat_map(|owned| shape.split(&owned));
                    hashed(tensor_entry(&key, &path, tensor.stored().dtype(), tensor.shape(), boxes)?)?
                }
                StateLeaf::Tensor(tensor) => {
                    let tensor = tensor.reduced(Location::caller())?;
                    sources.insert(key.clone(), TensorToSave::of_tensor(&tensor, world.rank()));
                    let (layout, dtype) = (tensor.layout(), tensor.dtype());
                    let plan = || tensor_entry(&key, &path, dtype, layout.shape(), layout.boxes());
                    cache.tensor_entry(&key, &path, (layout, dtype), plan)?
                }
            };
            hash.add(key.as_bytes());
            hash.add(&entry_hash.to_le_bytes());
            entries.insert(key, entry);
        }
        cache.retain(&entries);
        Ok(LocalPlan { entries: Arc::new(entries), hash: hash.finish(), sources })
    }

    /// Merges the entries of all ranks, and assigns every box to a rank.
    ///
    /// Collective: an all-gather of one hash per rank. If they differ, also of the entries themselves, or of what changed in
    /// them if all ranks remember the same save.
    pub(in crate::checkpoint) fn merged(self, world: &World, cache: &mut CachedPlan, site: Site) -> Result<SavePlan> {
        let texts = gather_texts(world, &format!("{:016x} {}", self.hash, cache.identity()), site)?;
        let fields: Vec<(&str, &str)> = texts.iter().map(|text| text.split_once(' ').unwrap_or((text, ""))).collect();
        let hashes: Vec<String> = fields.iter().map(|(hash, _)| hash.to_string()).collect();
        let remember_same = fields.iter().all(|&(_, save)| save == fields[0].1) && !fields[0].1.is_empty();
        let unchanged = cache.merged().filter(|_| remember_same && cache.is_unchanged(&hashes));
        let all = match unchanged {
            Some(all) => all,
            None if hashes.iter().all(|hash| *hash == hashes[0]) => {
                let everywhere: Vec<usize> = (0..world.size()).collect();
                let entry = |(key, entry): (&String, &Arc<PlannedEntry>)| {
                    (key.clone(), (Arc::clone(entry), everywhere.clone()))
                };
                let all = self.entries.iter().map(entry).collect();
                cache.learn(hashes, vec![Arc::clone(&self.entries); world.size()]);
                Arc::new(all)
            }
            None => {
                let known = match remember_same {
                    true => self.exchange_changes(world, cache, site)?,
                    false => self.exchange_entries(world, site)?,
                };
                let all = merge(&known)?;
                cache.learn(hashes, known);
                Arc::new(all)
            }
        };
        // An element that cannot be read on one rank fails the save on all.
        all_ok(world, self.assigned(world.rank(), &all, &cache.assignment(&all)), site)
    }

    /// The entries of all ranks. Collective.
    fn exchange_entries(&self, world: &World, site: Site) -> Result<Vec<Arc<Entries>>> {
        let mine: BTreeMap<&String, &PlannedEntry> = self.entries.iter().map(|(key, entry)| (key, &**entry)).collect();
        let mine = serde_json::to_string(&mine).map_err(Error::other)?;
        let parse = |text: &String| -> Result<Arc<Entries>> {
            let entries: BTreeMap<String, PlannedEntry> = serde_json::from_str(text).map_err(Error::other)?;
            Ok(Arc::new(entries.into_iter().map(|(key, entry)| (key, Arc::new(entry))).collect()))
        };
        gather_texts(world, &mine, site)?.iter().map(parse).collect()
    }

    /// The entries of all ranks, from those of the last save. Collective.
    fn exchange_changes(&self, world: &World, cache: &CachedPlan, site: Site) -> Result<Vec<Arc<Entries>>> {
        let mine = PlanChange::between(&cache.known[world.rank()], &self.entries).to_text()?;
        let texts = gather_texts(world, &mine, site)?;
        texts.iter().zip(&cache.known).map(|(text, before)| PlanChange::apply(text, before)).collect()
    }

    fn assigned(&self, rank: usize, all: &MergedEntries, assignment: &Assignment) -> Result<SavePlan> {
        let mut contents = Contents::default();
        for (key, (entry, _)) in all {
            contents.paths.insert(key.clone(), entry.path.clone());
            match (entry.tensor(), &entry.kind) {
                (Some((element, shape)), _) => {
                    let stored = StoredTensor { element, shape: shape.to_vec(), chunks: Vec::new() };
                    contents.tensors.insert(key.clone(), stored);
                }
                (None, PlannedKind::Value(value)) => drop(contents.values.insert(key.clone(), value.clone())),
                (None, _) => {}
            }
        }
        let mut boxes = Vec::new();
        let Assignment { tasks, writers } = assignment;
        for (task, _) in tasks.iter().zip(writers).filter(|(_, writer)| **writer == rank) {
            let stored = &contents.tensors[&task.key];
            let tensor = self.sources[&task.key].elements(&task.part)?;
            boxes.push(BoxToWrite {
                key: task.key.clone(),
                part: task.part.clone(),
                is_whole: task.part.sizes == stored.shape,
                content: BoxContent::Memory { element: stored.element, tensor },
            });
        }
        Ok(SavePlan { contents, boxes })
    }
}

/// The entry of a tensor whose boxes ranks hold.
fn tensor_entry(
    key: &str,
    path: &[Key],
    dtype: DType,
    shape: &[usize],
    boxes: impl IntoIterator<Item = OwnedBox>,
) -> Result<PlannedEntry> {
    let element = ElementType::of(dtype)?;
    let tasks = write_tasks(key, element.size_in_bytes(), boxes);
    let boxes = tasks.into_iter().map(|task| (task.part, task.holders)).collect();
    Ok(PlannedEntry { path: path.to_vec(), kind: PlannedKind::Tensor { element, shape: shape.to_vec(), boxes } })
}

fn hashed(entry: PlannedEntry) -> Result<(Arc<PlannedEntry>, u64)> {
    let hash = entry.hash()?;
    Ok((Arc::new(entry), hash))
}

/// Refuses a value for a format that cannot store values.
fn check_value(key: &str, value: &Value, writer: &dyn FormatWriter) -> Result<()> {
    if writer.values() != ValueStorage::Nowhere {
        return Ok(());
    }
    let (found, needed) = (format!("value {key:?} = {value}"), "tensors only: the format stores no values");
    Err(ErrorKind::Unsupported.error("state", found, needed, "save it in another format, or leave it out"))
}

/// The elements of a tensor to save that this rank holds.
struct TensorToSave {
    dtype: DType,
    local_boxes: Vec<OwnedBox>,
    /// The elements of this rank's boxes: one tensor with all of them, or one tensor per box.
    tensors: Vec<Tensor>,
}

impl TensorToSave {
    fn of_tensor(tensor: &DTensor, rank: usize) -> Self {
        TensorToSave {
            dtype: tensor.dtype(),
            local_boxes: tensor.layout().boxes_of(rank),
            tensors: vec![tensor.local().clone()],
        }
    }

    fn of_sharded(tensor: &ShardedTensor, rank: usize) -> Self {
        let (mut local_boxes, mut tensors) = (Vec::new(), Vec::new());
        for shard in tensor.local_shards().iter().filter(|s| s.metadata().volume() > 0) {
            let local_offsets = vec![0; shard.metadata().offsets.len()];
            local_boxes.push(OwnedBox { rank, global: shard.metadata().as_box(), local_offsets });
            tensors.push(shard.storage().clone());
        }
        TensorToSave { dtype: tensor.dtype(), local_boxes, tensors }
    }

    fn of_merged(tensor: &MergedTensor, rank: usize) -> Result<Self> {
        let (stored, shape) = (tensor.stored(), tensor.merged_shape());
        let (mut local_boxes, mut tensors) = (Vec::new(), Vec::new());
        for OwnedBox { global, local_offsets, .. } in tensor.boxes_of(rank) {
            let rows = block(stored.local(), &local_offsets, &shape.stored_sizes(&global))?;
            tensors.push(contiguous(&rows)?.reshape(global.sizes.as_slice())?);
            local_boxes.push(OwnedBox { rank, local_offsets: vec![0; global.sizes.len()], global });
        }
        Ok(TensorToSave { dtype: stored.dtype(), local_boxes, tensors })
    }

    fn of_plain(tensor: &Tensor, rank: usize) -> Result<Self> {
        // A copy, because the program may write to it in place while an asynchronous save is running.
        let tensor = own_copy(tensor)?;
        let whole = TensorBox { offsets: vec![0; tensor.dims().len()], sizes: tensor.dims().to_vec() };
        let local_offsets = whole.offsets.clone();
        let local_boxes = vec![OwnedBox { rank, global: whole, local_offsets }];
        Ok(TensorToSave { dtype: tensor.dtype(), local_boxes, tensors: vec![tensor] })
    }

    /// The elements of one of this rank's boxes.
    fn elements(&self, part: &TensorBox) -> Result<Tensor> {
        if part.volume() == 0 {
            return Ok(contiguous(&placeholder(&TensorMeta { shape: part.sizes.clone(), dtype: self.dtype })?)?);
        }
        let at = self
            .local_boxes
            .iter()
            .position(|owned| owned.global == *part)
            .expect("a task is assigned to a rank that holds its box");
        let tensor = if self.tensors.len() == self.local_boxes.len() { &self.tensors[at] } else { &self.tensors[0] };
        Ok(contiguous(&block(tensor, &self.local_boxes[at].local_offsets, &part.sizes)?)?)
    }
}
