//! What saves remember of each other, so that a state of the same structure is not planned again.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use candle_core::DType;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::checkpoint::metadata::assign::{WriteTask, assign_writers};
use crate::checkpoint::metadata::value::Key;
use crate::checkpoint::save::planned::{Entries, MergedEntries, PlannedEntry, same_entry};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::fnv::Fnv;
use crate::layout::Layout;

/// The plan of the last save, for the next one: [`SaveOptions::plan_cache`](crate::checkpoint::SaveOptions::plan_cache).
///
/// Tensors that kept their layout are not planned again, and ranks with entries of their own (experts, stages) send only what
/// changed since the last save, usually a few values. The checkpoint is the same as without it. Clones share the cache, also
/// between thread ranks, each of which has its own part of it; one per model avoids that saves displace each other's plans.
///
/// ```
/// use shardwise::checkpoint::{PlanCache, SaveOptions, Series, State};
/// use shardwise::prelude::*;
///
/// # let directory = std::env::temp_dir().join(format!("shardwise-plan-cache-{}", std::process::id()));
/// # let path = directory.clone();
/// launch(2, move |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let options = SaveOptions { plan_cache: Some(PlanCache::default()), ..SaveOptions::default() };
///     let series = Series::new(&path).options(options);
///     let weight = DTensor::zeros((4, 2), DType::F32, &mesh, [Shard(0)])?;
///     for step in [10, 20] {
///         series.save(&world, step, &State::map([("weight", weight.clone())]))?; // planned once
///     }
///     Ok(())
/// })?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "enable_plan_caching")]
#[derive(Clone, Default)]
pub struct PlanCache(Arc<Mutex<HashMap<RankInWorld, CachedPlan>>>);

/// Rank, and number of ranks: thread ranks may share a cache, and a program may have several worlds.
type RankInWorld = (usize, usize);

impl PlanCache {
    /// Takes out what this rank has. A save that fails does not put it back, so that the next one plans anew.
    pub(in crate::checkpoint) fn take(&self, world: &World) -> CachedPlan {
        self.0.lock().remove(&(world.rank(), world.size())).unwrap_or_default()
    }

    pub(in crate::checkpoint) fn put(&self, world: &World, plan: CachedPlan) {
        self.0.lock().insert((world.rank(), world.size()), plan);
    }
}

impl PartialEq for PlanCache {
    /// Caches are equal if they are clones of one.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for PlanCache {}

impl fmt::Debug for PlanCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlanCache")
    }
}

/// What one rank knows of the last save.
#[derive(Default)]
pub(in crate::checkpoint) struct CachedPlan {
    /// Tensors of this rank by flat key, as they were planned.
    tensors: BTreeMap<String, PlannedTensor>,
    /// A hash per rank of its entries.
    hashes: Vec<String>,
    /// The entries of every rank.
    pub(in crate::checkpoint) known: Vec<Arc<Entries>>,
    /// The entries of all ranks merged, and which rank writes which box of them.
    assigned: Option<(Arc<MergedEntries>, Arc<Assignment>)>,
}

/// A planned tensor, and what its plan depends on.
struct PlannedTensor {
    layout: Layout,
    dtype: DType,
    entry: Arc<PlannedEntry>,
    hash: u64,
}

/// The boxes of a save with the rank that writes each.
pub(in crate::checkpoint) struct Assignment {
    pub(in crate::checkpoint) tasks: Vec<WriteTask>,
    pub(in crate::checkpoint) writers: Vec<usize>,
}

impl CachedPlan {
    /// The entry of a tensor with its hash: the one of the last save if the tensor has the same path, layout and type, else the
    /// one that `plan` returns.
    pub(in crate::checkpoint) fn tensor_entry(
        &mut self,
        key: &str,
        path: &[Key],
        (layout, dtype): (&Layout, DType),
        plan: impl FnOnce() -> Result<PlannedEntry>,
    ) -> Result<(Arc<PlannedEntry>, u64)> {
        if let Some(known) = self.tensors.get(key)
            && known.layout == *layout
            && known.dtype == dtype
            && known.entry.path == path
        {
            return Ok((Arc::clone(&known.entry), known.hash));
        }
        let entry = Arc::new(plan()?);
        let hash = entry.hash()?;
        let layout = layout.clone();
        self.tensors.insert(key.to_string(), PlannedTensor { layout, dtype, entry: Arc::clone(&entry), hash });
        Ok((entry, hash))
    }

    /// Drops the tensors that a state no longer has.
    pub(in crate::checkpoint) fn retain(&mut self, entries: &Entries) {
        self.tensors.retain(|key, _| entries.contains_key(key));
    }

    /// What identifies the save that this rank remembers; empty if it remembers none.
    pub(in crate::checkpoint) fn identity(&self) -> String {
        if self.hashes.is_empty() {
            return String::new();
        }
        let mut hash = Fnv::default();
        self.hashes.iter().for_each(|one| hash.add(one.as_bytes()));
        format!("{:016x}", hash.finish())
    }

    /// Whether the entries of all ranks have the hashes of the last save.
    pub(in crate::checkpoint) fn is_unchanged(&self, hashes: &[String]) -> bool {
        self.hashes == hashes
    }

    /// Remembers the entries of all ranks.
    pub(in crate::checkpoint) fn learn(&mut self, hashes: Vec<String>, known: Vec<Arc<Entries>>) {
        (self.hashes, self.known) = (hashes, known);
    }

    /// The merged entries of the last save.
    pub(in crate::checkpoint) fn merged(&self) -> Option<Arc<MergedEntries>> {
        self.assigned.as_ref().map(|(all, _)| Arc::clone(all))
    }

    /// Which rank writes which box: as in the last save if no box differs from it.
    pub(in crate::checkpoint) fn assignment(&mut self, all: &Arc<MergedEntries>) -> Arc<Assignment> {
        let is_same = |before: &MergedEntries| {
            let mut pairs = before.iter().zip(all.iter());
            let same_boxes =
                |old: &Arc<PlannedEntry>, new: &Arc<PlannedEntry>| Arc::ptr_eq(old, new) || old.has_boxes_of(new);
            before.len() == all.len()
                && pairs.all(|((a, (old, of)), (b, (new, to)))| a == b && of == to && same_boxes(old, new))
        };
        let assignment = match &self.assigned {
            Some((before, assignment)) if is_same(before) => Arc::clone(assignment),
            _ => {
                let boxes = all.iter().flat_map(|(key, (entry, ranks))| entry.tasks(key, ranks));
                let tasks: Vec<WriteTask> = boxes.collect();
                let writers = assign_writers(&tasks);
                Arc::new(Assignment { tasks, writers })
            }
        };
        self.assigned = Some((Arc::clone(all), Arc::clone(&assignment)));
        assignment
    }
}

/// How the entries of a rank differ from those of the last save.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::checkpoint) struct PlanChange {
    changed: BTreeMap<String, PlannedEntry>,
    removed: Vec<String>,
}

impl PlanChange {
    pub(in crate::checkpoint) fn between(before: &Entries, now: &Entries) -> Self {
        let is_new = |(key, entry): &(&String, &Arc<PlannedEntry>)| {
            before.get(*key).is_none_or(|known| !same_entry(known, entry))
        };
        let changed = now.iter().filter(is_new).map(|(key, entry)| (key.clone(), PlannedEntry::clone(entry))).collect();
        let removed = before.keys().filter(|key| !now.contains_key(*key)).cloned().collect();
        PlanChange { changed, removed }
    }

    /// The change as ranks send it: nothing if nothing changed.
    pub(in crate::checkpoint) fn to_text(&self) -> Result<String> {
        match *self == PlanChange::default() {
            true => Ok(String::new()),
            false => serde_json::to_string(self).map_err(Error::other),
        }
    }

    pub(in crate::checkpoint) fn apply(text: &str, before: &Arc<Entries>) -> Result<Arc<Entries>> {
        if text.is_empty() {
            return Ok(Arc::clone(before));
        }
        let PlanChange { changed, removed } = serde_json::from_str(text).map_err(Error::other)?;
        let mut entries = Entries::clone(before);
        removed.iter().for_each(|key| drop(entries.remove(key)));
        entries.extend(changed.into_iter().map(|(key, entry)| (key, Arc::new(entry))));
        Ok(Arc::new(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::metadata::value::Value;
    use crate::checkpoint::save::planned::{PlannedKind, merge};

    fn entries(values: &[(&str, i64)]) -> Arc<Entries> {
        let entry = |&(key, n): &(&str, i64)| {
            let path = vec![Key::Name(key.to_string())];
            (key.to_string(), Arc::new(PlannedEntry { path, kind: PlannedKind::Value(Value::Int(n)) }))
        };
        Arc::new(values.iter().map(entry).collect())
    }

    #[test]
    fn changes_are_sent_alone_and_give_the_plan_that_all_entries_give() {
        let before = entries(&[("gone", 1), ("kept", 2), ("step", 3)]);
        assert_eq!(PlanChange::between(&before, &before).to_text().unwrap(), "");
        let now = entries(&[("kept", 2), ("new", 5), ("step", 4)]);
        let text = PlanChange::between(&before, &now).to_text().unwrap();
        assert!(!text.contains("kept"), "{text}");
        let applied = PlanChange::apply(&text, &before).unwrap();
        assert_eq!(applied, now);
        // An entry that did not change stays the one in memory.
        assert!(Arc::ptr_eq(&applied["kept"], &before["kept"]));
        let other = entries(&[("kept", 2), ("own", 7)]);
        assert_eq!(merge(&[applied, Arc::clone(&other)]).unwrap(), merge(&[now, other]).unwrap());
    }
}
