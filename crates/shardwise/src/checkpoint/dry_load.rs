//! What a load would do, from descriptions alone.

use std::collections::BTreeSet;

use super::catalog::Catalog;
use crate::error::Result;
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::placement::Placement;

/// What one rank would do to load a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RankLoad {
    /// The rank.
    pub rank: usize,
    /// Bytes of its tensors afterwards.
    pub tensor_bytes: usize,
    /// Bytes that it needs from files.
    pub read_bytes: usize,
    /// Memory at most: its tensors, and what is read for one of another type at a time.
    pub peak_bytes: usize,
    /// Number of parts of tensors that it reads from.
    pub chunks: usize,
    /// Number of files that it reads from.
    pub files: usize,
}

/// What every rank of a mesh would do to load a checkpoint with these placements, by key and shape. An error if a tensor cannot
/// lie so: whatever [`load_placed`](super::load_placed) would refuse.
pub fn dry_load(
    catalog: &Catalog,
    mesh: &Mesh,
    place: impl Fn(&str, &[usize]) -> Result<Vec<Placement>>,
) -> Result<Vec<RankLoad>> {
    let mut layouts = Vec::new();
    for (key, stored) in &catalog.tensors {
        let layout = Layout::new(mesh, stored.shape.as_slice(), place(key, &stored.shape)?)?.reduced();
        layouts.push((stored, layout, stored.element.widened()?));
    }
    let of_rank = |&rank: &usize| {
        let mut load = RankLoad { rank, tensor_bytes: 0, read_bytes: 0, peak_bytes: 0, chunks: 0, files: 0 };
        let mut files = BTreeSet::new();
        let mut extra = 0;
        for (stored, layout, dtype) in &layouts {
            let mut elements = 0;
            for owned in layout.boxes_of(rank) {
                for chunk in &stored.chunks {
                    if let Some(both) = chunk.part.intersect(&owned.global) {
                        elements += both.volume();
                        load.chunks += 1;
                        files.insert(chunk.file.as_str());
                    }
                }
            }
            let read = elements * stored.element.size_in_bytes();
            load.read_bytes += read;
            load.tensor_bytes += elements * dtype.size_in_bytes();
            if stored.element.dtype() != Some(*dtype) {
                extra = extra.max(read);
            }
        }
        load.files = files.len();
        load.peak_bytes = load.tensor_bytes + extra;
        load
    };
    Ok(mesh.ranks().iter().map(of_rank).collect())
}
