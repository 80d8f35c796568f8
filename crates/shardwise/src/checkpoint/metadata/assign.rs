//! Which rank writes or reads which box: each once, by one of the ranks that hold or need it, with the bytes balanced. Pure
//! arithmetic.

use std::collections::{BTreeMap, HashMap};

use crate::layout::{OwnedBox, TensorBox};

/// A box that one of its holders has to write.
pub(in crate::checkpoint) struct WriteTask {
    /// Flat key of the tensor.
    pub(in crate::checkpoint) key: String,
    /// Offsets and sizes in the tensor.
    pub(in crate::checkpoint) part: TensorBox,
    /// Size of the box in bytes.
    pub(in crate::checkpoint) bytes: usize,
    /// The ranks that hold a replica of the box.
    pub(in crate::checkpoint) holders: Vec<usize>,
}

/// The distinct boxes of a tensor, each with all ranks that hold it.
pub(in crate::checkpoint) fn write_tasks(
    key: &str,
    element_bytes: usize,
    boxes: impl IntoIterator<Item = OwnedBox>,
) -> Vec<WriteTask> {
    let mut index_of: HashMap<TensorBox, usize> = HashMap::new();
    let mut tasks: Vec<WriteTask> = Vec::new();
    for OwnedBox { rank, global, .. } in boxes {
        let at = *index_of.entry(global.clone()).or_insert_with(|| {
            let bytes = global.volume() * element_bytes;
            tasks.push(WriteTask { key: key.to_string(), part: global, bytes, holders: Vec::new() });
            tasks.len() - 1
        });
        tasks[at].holders.push(rank);
    }
    tasks
}

/// The rank that writes each task.
pub(in crate::checkpoint) fn assign_writers(tasks: &[WriteTask]) -> Vec<usize> {
    assign_balanced(tasks.iter().map(|task| (task.bytes, task.holders.as_slice())))
}

/// Gives each task, of a number of bytes, to one of the ranks that can do it: largest task first, each to the rank with the fewest
/// bytes so far. Deterministic, so every rank computes the same assignment without communication.
pub(in crate::checkpoint) fn assign_balanced<'a>(tasks: impl Iterator<Item = (usize, &'a [usize])>) -> Vec<usize> {
    let tasks: Vec<(usize, &[usize])> = tasks.collect();
    let mut order: Vec<usize> = (0..tasks.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(tasks[i].0), i));
    let mut load: BTreeMap<usize, usize> = BTreeMap::new();
    let mut assigned = vec![0; tasks.len()];
    for i in order {
        let (bytes, ranks) = tasks[i];
        let least = ranks.iter().min_by_key(|&&rank| (load.get(&rank).copied().unwrap_or(0), rank));
        assigned[i] = *least.expect("every task has a rank that can do it");
        *load.entry(assigned[i]).or_default() += bytes;
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::mesh::Mesh;
    use crate::placement::Placement::{Replicate, Shard};

    #[test]
    fn replicas_are_written_once_and_the_bytes_are_spread() {
        let mesh = Mesh::new([2, 2]).unwrap();
        let mut all = Vec::new();
        for i in 0..8 {
            let layout = Layout::new(&mesh, (16, 4), [Replicate, Replicate]).unwrap();
            all.extend(write_tasks(&format!("r{i}"), 4, layout.boxes()));
        }
        let layout = Layout::new(&mesh, (16, 4), [Replicate, Shard(0)]).unwrap();
        all.extend(write_tasks("s", 4, layout.boxes()));
        assert_eq!(all.len(), 8 + 2);
        let writers = assign_writers(&all);
        let mut load = [0; 4];
        all.iter().zip(&writers).for_each(|(task, &rank)| {
            assert!(task.holders.contains(&rank));
            load[rank] += task.bytes;
        });
        assert_eq!(load.iter().sum::<usize>(), 9 * 256);
        assert!(load.iter().max().unwrap() - load.iter().min().unwrap() <= 128, "{load:?}");
    }
}
