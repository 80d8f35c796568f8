//! Layouts as lists of boxes, the form that checkpoints, moves between meshes and `ShardedTensor` work on.

use super::Layout;

/// A rectangular part of a tensor: offset and size in every dimension.
#[doc(alias = "ChunkStorageMetadata")]
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct TensorBox {
    /// First index in every dimension.
    pub offsets: Vec<usize>,
    /// Number of indices in every dimension.
    pub sizes: Vec<usize>,
}

impl TensorBox {
    /// Number of elements, saturating.
    #[doc(alias = "numel")]
    pub fn volume(&self) -> usize {
        self.sizes.iter().fold(1, |volume, &n| volume.saturating_mul(n))
    }

    /// The box of elements that are in both boxes, `None` if there are none.
    ///
    /// ```
    /// # use shardwise::TensorBox;
    /// let a = TensorBox { offsets: vec![0, 0], sizes: vec![4, 4] };
    /// let b = TensorBox { offsets: vec![2, 3], sizes: vec![4, 4] };
    /// assert_eq!(a.intersect(&b), Some(TensorBox { offsets: vec![2, 3], sizes: vec![2, 1] }));
    /// ```
    pub fn intersect(&self, other: &TensorBox) -> Option<TensorBox> {
        let mut both = TensorBox { offsets: Vec::new(), sizes: Vec::new() };
        let ends =
            |b: &TensorBox| b.offsets.iter().zip(&b.sizes).map(|(o, s)| o.saturating_add(*s)).collect::<Vec<_>>();
        let (ends, other_ends) = (ends(self), ends(other));
        for dim in 0..ends.len().min(other_ends.len()) {
            let start = self.offsets[dim].max(other.offsets[dim]);
            let end = ends[dim].min(other_ends[dim]);
            if start >= end {
                return None;
            }
            both.offsets.push(start);
            both.sizes.push(end - start);
        }
        Some(both)
    }
}

/// A box of a tensor that a rank holds.
#[doc(alias = "ShardMetadata")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OwnedBox {
    /// Global rank of the owner.
    pub rank: usize,
    /// The box in the whole tensor.
    pub global: TensorBox,
    /// Offset of the box in the owner's local tensor.
    pub local_offsets: Vec<usize>,
}

impl Layout {
    /// The boxes that `rank` holds, ordered by their offsets in its local tensor.
    ///
    /// One box, or several if a dimension has a strided or block-cyclic shard; none if the rank holds no elements or is
    /// outside the mesh.
    pub fn boxes_of(&self, rank: usize) -> Vec<OwnedBox> {
        let Some(coordinate) = self.mesh().coordinate(rank) else { return Vec::new() };
        let empty = TensorBox { offsets: Vec::new(), sizes: Vec::new() };
        let mut boxes = vec![OwnedBox { rank, global: empty, local_offsets: Vec::new() }];
        for dim in 0..self.shape().len() {
            let runs = self.owned(dim, &coordinate);
            let mut longer = Vec::with_capacity(boxes.len());
            for so_far in &boxes {
                let mut local = 0;
                for run in runs.iter() {
                    let mut next = so_far.clone();
                    next.global.offsets.push(run.start);
                    next.global.sizes.push(run.len());
                    next.local_offsets.push(local);
                    local += run.len();
                    longer.push(next);
                }
            }
            boxes = longer;
        }
        boxes
    }

    /// The boxes of all ranks, replicas included, in row-major order of the mesh.
    ///
    /// ```
    /// # use shardwise::{Layout, Mesh, Placement::*};
    /// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
    /// let layout = Layout::new(&mesh, (4, 6), [Replicate, Shard(1)])?;
    /// let owners = |column| layout.boxes().filter(move |b| b.global.offsets[1] == column).map(|b| b.rank);
    /// assert_eq!(owners(3).collect::<Vec<_>>(), [1, 3]);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn boxes(&self) -> impl Iterator<Item = OwnedBox> + '_ {
        self.mesh().ranks().iter().flat_map(|&rank| self.boxes_of(rank))
    }

    /// The boxes of one rank per replica: of the ranks with coordinate 0 on every axis that shards nothing. They tile the
    /// tensor exactly.
    pub fn primary_boxes(&self) -> impl Iterator<Item = OwnedBox> + '_ {
        let mesh = self.mesh();
        let primary = move |position: &usize| {
            let coordinate = mesh.coordinate_at(*position);
            coordinate.iter().zip(self.placements()).all(|(&c, p)| c == 0 || p.is_shard(None))
        };
        (0..mesh.size()).filter(primary).flat_map(move |position| self.boxes_of(mesh.ranks()[position]))
    }
}
