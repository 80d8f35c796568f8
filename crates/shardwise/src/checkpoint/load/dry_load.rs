//! Predicting a load only from metadata.

use std::collections::BTreeSet;

use crate::checkpoint::catalogs::catalog::Catalog;
use crate::error::Result;
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::placement::Placement;

/// What one rank would read and hold in a load.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RankLoad {
    /// The rank this is about.
    pub rank: usize,
    /// Bytes of its tensors after the load.
    pub tensor_bytes: usize,
    /// Tensor bytes that it needs from files; whole blocks are read, so the disk may deliver more.
    pub read_bytes: usize,
    /// Peak memory: its tensors, and the stored bytes of the largest tensor whose type is converted.
    pub peak_bytes: usize,
    /// Number of chunks that it reads from.
    pub chunks: usize,
    /// Number of files that it reads from.
    pub files: usize,
}

/// Predicts what each rank of `mesh` would read and hold if it loaded the checkpoint with the placements that `place` chooses
/// by flat key and global shape.
///
/// Local: needs metadata only, no world and no ranks. For checking a layout before a job starts.
///
/// # Errors
/// Whatever [`load_placed`](crate::checkpoint::load_placed) would refuse: placements that do not fit a shape, types without a dtype.
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
