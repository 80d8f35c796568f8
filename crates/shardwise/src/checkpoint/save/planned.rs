//! What ranks have to save, without elements: the entries that they compare and merge. Pure values.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::checkpoint::metadata::assign::WriteTask;
use crate::checkpoint::metadata::element::ElementType;
use crate::checkpoint::metadata::value::{Key, Value};
use crate::error::{Error, ErrorKind, Result};
use crate::fnv::Fnv;
use crate::layout::TensorBox;

/// The entries of one rank by flat key.
pub(in crate::checkpoint) type Entries = BTreeMap<String, Arc<PlannedEntry>>;

/// The entries of all ranks by flat key, each with the ranks that have it.
pub(in crate::checkpoint) type MergedEntries = BTreeMap<String, (Arc<PlannedEntry>, Vec<usize>)>;

/// An entry of the state of one rank, without elements: what ranks compare.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::checkpoint) struct PlannedEntry {
    pub(in crate::checkpoint) path: Vec<Key>,
    pub(in crate::checkpoint) kind: PlannedKind,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::checkpoint) enum PlannedKind {
    Value(Value),
    /// A plain tensor: any rank that has it holds all of it. The checksum shows whether ranks have the same.
    Plain {
        element: ElementType,
        shape: Vec<usize>,
        crc32: u32,
    },
    /// A distributed tensor: the boxes of all ranks, each with the ranks that hold it.
    Tensor {
        element: ElementType,
        shape: Vec<usize>,
        boxes: Vec<(TensorBox, Vec<usize>)>,
    },
}

impl PlannedEntry {
    /// A hash that is the same in every process.
    pub(in crate::checkpoint) fn hash(&self) -> Result<u64> {
        let mut hash = Fnv::default();
        serde_json::to_writer(&mut hash, self).map_err(Error::other)?;
        Ok(hash.finish())
    }

    /// Element type and shape of a tensor; `None` for a value.
    pub(in crate::checkpoint) fn tensor(&self) -> Option<(ElementType, &[usize])> {
        match &self.kind {
            PlannedKind::Value(_) => None,
            PlannedKind::Plain { element, shape, .. } | PlannedKind::Tensor { element, shape, .. } => {
                Some((*element, shape))
            }
        }
    }

    /// Whether the same boxes are written for both, whatever their elements and values.
    pub(in crate::checkpoint) fn has_boxes_of(&self, other: &PlannedEntry) -> bool {
        match (&self.kind, &other.kind) {
            (PlannedKind::Tensor { .. }, PlannedKind::Tensor { .. }) => self.kind == other.kind,
            (PlannedKind::Tensor { .. }, _) | (_, PlannedKind::Tensor { .. }) => false,
            _ => self.tensor() == other.tensor(),
        }
    }

    /// The boxes to write for the entry, which `ranks` have.
    pub(in crate::checkpoint) fn tasks(&self, key: &str, ranks: &[usize]) -> Vec<WriteTask> {
        let Some((element, shape)) = self.tensor() else { return Vec::new() };
        let whole = || TensorBox { offsets: vec![0; shape.len()], sizes: shape.to_vec() };
        let mut boxes = match &self.kind {
            PlannedKind::Tensor { boxes, .. } => boxes.clone(),
            _ => vec![(whole(), ranks.to_vec())],
        };
        if boxes.is_empty() {
            // A tensor without elements is stored too, by the first rank that has it.
            boxes.push((whole(), ranks[..1].to_vec()));
        }
        let task = |(part, holders): (TensorBox, Vec<usize>)| {
            let bytes = part.volume() * element.size_in_bytes();
            WriteTask { key: key.to_string(), part, bytes, holders }
        };
        boxes.into_iter().map(task).collect()
    }
}

/// Whether two entries are equal; one that is shared in memory need not be compared.
pub(in crate::checkpoint) fn same_entry(a: &Arc<PlannedEntry>, b: &Arc<PlannedEntry>) -> bool {
    Arc::ptr_eq(a, b) || a == b
}

impl PlannedKind {
    /// What the entry is, for messages.
    fn describe(&self, key: &str) -> String {
        match self {
            PlannedKind::Value(value) => format!("{key} = {value}"),
            PlannedKind::Plain { element, shape, crc32 } => {
                format!("{key}: plain {element} {shape:?} with checksum {crc32:08x}")
            }
            PlannedKind::Tensor { element, shape, boxes } => {
                let ranks = holders(boxes);
                format!("{key}: {element} {shape:?} in {} boxes on ranks {ranks:?}", boxes.len())
            }
        }
    }
}

/// The ranks that hold a part of a tensor.
fn holders(boxes: &[(TensorBox, Vec<usize>)]) -> Vec<usize> {
    let mut ranks: Vec<usize> = boxes.iter().flat_map(|(_, ranks)| ranks.iter().copied()).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// All entries of all ranks, each with the ranks that have it. An entry that ranks have in different forms, and a tensor that a
/// rank of its mesh lacks, is an error. Pure.
pub(in crate::checkpoint) fn merge(ranks: &[Arc<Entries>]) -> Result<MergedEntries> {
    let mut all = MergedEntries::new();
    let refuse = |found: String, needed: &str, fix: &str| {
        Err(ErrorKind::Disagreement.error("state to save", found, needed, fix))
    };
    for (rank, entries) in ranks.iter().enumerate() {
        for (key, entry) in entries.iter() {
            let Some((known, having)) = all.get_mut(key) else {
                all.insert(key.clone(), (entry.clone(), vec![rank]));
                continue;
            };
            if !same_entry(known, entry) {
                let (first, second) = (known.kind.describe(key), entry.kind.describe(key));
                let found = format!("{first} on rank {}, {second} on rank {rank}", having[0]);
                let fix = "save the same, or under a name per rank or group";
                return refuse(found, "the same on all ranks that have the entry", fix);
            }
            having.push(rank);
        }
    }
    for (key, (entry, having)) in &all {
        let PlannedKind::Tensor { boxes, .. } = &entry.kind else { continue };
        if let Some(rank) = holders(boxes).into_iter().find(|rank| !having.contains(rank)) {
            let found = format!("no entry {key:?} on rank {rank}, which holds a part of that tensor");
            let fix = "add it to the state of that rank";
            return refuse(found, "the entry on all ranks of the tensor's mesh", fix);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(key: &str, n: i64) -> (String, Arc<PlannedEntry>) {
        let path = vec![Key::Name(key.to_string())];
        (key.to_string(), Arc::new(PlannedEntry { path, kind: PlannedKind::Value(Value::Int(n)) }))
    }

    fn tensor(key: &str, ranks: &[usize]) -> (String, Arc<PlannedEntry>) {
        let path = vec![Key::Name(key.to_string())];
        let part = TensorBox { offsets: vec![0], sizes: vec![4] };
        let kind =
            PlannedKind::Tensor { element: ElementType::F32, shape: vec![4], boxes: vec![(part, ranks.to_vec())] };
        (key.to_string(), Arc::new(PlannedEntry { path, kind }))
    }

    #[test]
    fn entries_of_some_ranks_are_merged_and_contradictions_refused() {
        let first = Arc::new(Entries::from([value("step", 3), tensor("expert0", &[0])]));
        let second = Arc::new(Entries::from([value("step", 3), value("only", 1), tensor("expert1", &[1])]));
        let all = merge(&[Arc::clone(&first), second]).unwrap();
        let ranks: Vec<(&str, &[usize])> = all.iter().map(|(key, (_, ranks))| (key.as_str(), &ranks[..])).collect();
        assert_eq!(ranks, [("expert0", &[0][..]), ("expert1", &[1]), ("only", &[1]), ("step", &[0, 1])]);
        let other = merge(&[first, Arc::new(Entries::from([value("step", 4)]))]).unwrap_err().to_string();
        assert!(other.contains("step = 3 on rank 0, step = 4 on rank 1"), "{other}");
        let shared = Arc::new(Entries::from([tensor("weight", &[0, 1])]));
        let lacking = merge(&[shared, Arc::default()]).unwrap_err().to_string();
        assert!(lacking.contains("no entry \"weight\" on rank 1"), "{lacking}");
    }
}
