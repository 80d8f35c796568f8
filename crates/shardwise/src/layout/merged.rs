//! Tensors that are stored with their leading dimensions merged into one, so that shards may cross the borders of the first.
//! Pure arithmetic.

use super::{Layout, OwnedBox, TensorBox};
use crate::error::{ErrorKind, Result};
use crate::placement::Placement;

/// The shape of a tensor whose leading dimensions are stored as one, such as experts `[3, 5, 8]` as a matrix `[15, 8]`.
///
/// Sharded over the rows of the matrix, every rank holds as many rows as another one, give or take one chunk, and a shard may
/// begin and end inside an expert. PyTorch's `BlockShard`.
///
/// ```
/// use shardwise::layout::MergedShape;
/// use shardwise::{Layout, Mesh, Placement::Shard};
///
/// let experts = MergedShape::new(&[3, 4, 5], 2)?;
/// let layout = Layout::new(&Mesh::new([("dp", 2)])?, experts.stored(), [Shard(0)])?;
/// let boxes = experts.boxes_of(&layout, 0); // expert 0 and two rows of expert 1
/// assert_eq!(boxes[0].global.sizes, [1, 4, 5]);
/// assert_eq!((boxes[1].global.offsets.as_slice(), boxes[1].global.sizes.as_slice()), (&[1, 0, 0][..], &[1, 2, 5][..]));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "BlockShard")]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MergedShape {
    shape: Vec<usize>,
    dims: usize,
}

impl MergedShape {
    /// A tensor of this shape whose first `dims` dimensions are stored as one.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless `dims` is from 2 to the number of dimensions.
    pub fn new(shape: &[usize], dims: usize) -> Result<Self> {
        if (2..=shape.len()).contains(&dims) {
            return Ok(MergedShape { shape: shape.to_vec(), dims });
        }
        Err(ErrorKind::shape(shape).error(
            "merged dimensions",
            format!("the first {dims} of shape {shape:?}"),
            "at least two, and no more than there are",
            "merge the leading dimensions, as in 2 for [experts, rows, columns]",
        ))
    }

    /// The shape whose stored form is `stored`; `None` if that is not `shape` with leading dimensions merged.
    pub(crate) fn between(shape: &[usize], stored: &[usize]) -> Option<Self> {
        let dims = (shape.len() + 1).checked_sub(stored.len())?;
        MergedShape::new(shape, dims).ok().filter(|merged| merged.stored() == stored)
    }

    /// The shape of the tensor.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How many leading dimensions are stored as one.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// The shape in which the tensor is stored.
    pub fn stored(&self) -> Vec<usize> {
        let mut stored = vec![self.shape[..self.dims].iter().product()];
        stored.extend(&self.shape[self.dims..]);
        stored
    }

    /// The boxes of the tensor that `rank` holds, if it is stored in `layout`: several if its rows begin or end inside an index
    /// of the first dimension. Their local offsets are those in the stored tensor.
    pub fn boxes_of(&self, layout: &Layout, rank: usize) -> Vec<OwnedBox> {
        layout.boxes_of(rank).into_iter().flat_map(|owned| self.split(&owned)).collect()
    }

    /// A box of the stored tensor as boxes of the tensor.
    pub(crate) fn split(&self, stored: &OwnedBox) -> Vec<OwnedBox> {
        let TensorBox { offsets, sizes } = &stored.global;
        let mut rows = stored.local_offsets[0];
        let mut split = Vec::new();
        for mut part in range_boxes(&self.shape[..self.dims], offsets[0], offsets[0] + sizes[0]) {
            let mut local_offsets = stored.local_offsets.clone();
            local_offsets[0] = rows;
            rows += part.volume();
            part.offsets.extend(&offsets[1..]);
            part.sizes.extend(&sizes[1..]);
            split.push(OwnedBox { rank: stored.rank, global: part, local_offsets });
        }
        split
    }

    /// The sizes of a box of the tensor in the stored one.
    pub(crate) fn stored_sizes(&self, part: &TensorBox) -> Vec<usize> {
        let mut sizes = vec![part.sizes[..self.dims].iter().product()];
        sizes.extend(&part.sizes[self.dims..]);
        sizes
    }

    /// The layout of the stored tensor that is nearest to a layout of the tensor: axes that shard the first dimension shard the
    /// rows, axes that shard one that is not merged do so still, and axes that shard another merged one are replicated.
    pub(crate) fn stored_layout(&self, layout: &Layout) -> Result<Layout> {
        let dim_of = |dim: usize| match dim {
            0 => Some(0),
            merged if merged < self.dims => None,
            other => Some(other + 1 - self.dims),
        };
        let mut orders: Vec<Vec<usize>> = vec![Vec::new(); self.stored().len()];
        let mut placements = layout.placements().to_vec();
        for (dim, order) in layout.shard_orders().into_iter().enumerate() {
            for axis in order {
                match dim_of(dim).filter(|_| placements[axis].chunk_dim().is_some()) {
                    Some(to) => {
                        placements[axis] = placements[axis].with_dim(to);
                        orders[to].push(axis);
                    }
                    None => placements[axis] = Placement::Replicate,
                }
            }
        }
        Layout::from_shard_orders(layout.mesh(), &self.stored(), &placements, &orders)
    }

    /// A layout of the stored tensor without the axes whose shards begin or end inside an index of the first dimension: in it
    /// every rank holds whole ones.
    pub(crate) fn at_borders(&self, stored: &Layout) -> Result<Layout> {
        let mut shards = 1;
        let mut crossing = false;
        let mut axes = Vec::new();
        // Axes divide one after the other: after one that crosses borders, all do.
        for &axis in stored.shard_order(0) {
            shards *= stored.mesh().shape()[axis];
            crossing |= !self.shape[0].is_multiple_of(shards) || stored.placements()[axis].chunk_dim().is_none();
            axes.extend(crossing.then_some(axis));
        }
        stored.without_axes(&axes)
    }
}

/// The boxes that the row-major indices `start..end` of a tensor of these sizes make up, in order. At most two per dimension
/// but the last, and one.
fn range_boxes(sizes: &[usize], start: usize, end: usize) -> Vec<TensorBox> {
    if start >= end {
        return Vec::new();
    }
    let rest = &sizes[1..];
    if rest.is_empty() {
        return vec![TensorBox { offsets: vec![start], sizes: vec![end - start] }];
    }
    let inner = rest.iter().product::<usize>();
    // The part `from..to` of one index of the first dimension.
    let inside = |index: usize, from: usize, to: usize| {
        let mut boxes = range_boxes(rest, from, to);
        boxes.iter_mut().for_each(|part| {
            part.offsets.insert(0, index);
            part.sizes.insert(0, 1);
        });
        boxes
    };
    // The indices of the first dimension that are in the range completely.
    let (first, last) = (start.div_ceil(inner), end / inner);
    if first > last {
        return inside(last, start % inner, end % inner);
    }
    let mut boxes = if start.is_multiple_of(inner) { Vec::new() } else { inside(first - 1, start % inner, inner) };
    if first < last {
        let offsets = std::iter::once(first).chain(rest.iter().map(|_| 0)).collect();
        let sizes = std::iter::once(last - first).chain(rest.iter().copied()).collect();
        boxes.push(TensorBox { offsets, sizes });
    }
    boxes.extend(inside(last, 0, end % inner));
    boxes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;

    /// Every range of several shapes: the boxes list its elements in order, and are as few as promised.
    #[test]
    fn boxes_of_a_range_are_its_elements_in_order() {
        for sizes in [vec![3, 4], vec![2, 3, 2], vec![1, 5], vec![4, 1, 3]] {
            let count: usize = sizes.iter().product();
            for start in 0..=count {
                for end in start..=count {
                    let boxes = range_boxes(&sizes, start, end);
                    assert!(boxes.len() < 2 * sizes.len(), "{sizes:?} {start}..{end}: {boxes:?}");
                    let found: Vec<usize> = boxes.iter().flat_map(|part| elements(&sizes, part)).collect();
                    assert_eq!(found, (start..end).collect::<Vec<_>>(), "{sizes:?}: {boxes:?}");
                }
            }
        }
    }

    /// Row-major indices of the elements of a box.
    fn elements(sizes: &[usize], part: &TensorBox) -> Vec<usize> {
        let mut all = vec![0];
        for ((n, offset), size) in sizes.iter().zip(&part.offsets).zip(&part.sizes) {
            all = all.iter().flat_map(|index| (*offset..offset + size).map(move |i| index * n + i)).collect();
        }
        all
    }

    #[test]
    fn layouts_of_the_stored_tensor_keep_what_they_can() {
        let mesh = Mesh::new([("ep", 2), ("dp", 2)]).unwrap();
        let shape = MergedShape::new(&[4, 3, 8], 2).unwrap();
        let layout = |shape: &[usize], placements: [Placement; 2]| Layout::new(&mesh, shape, placements).unwrap();
        let (first, second, third) = (Placement::Shard(0), Placement::Shard(1), Placement::Shard(2));
        let stored = |placements| shape.stored_layout(&layout(&[4, 3, 8], placements)).unwrap();
        assert_eq!(stored([first.clone(), third]), layout(&[12, 8], [first.clone(), second.clone()]));
        assert_eq!(stored([first.clone(), second]), layout(&[12, 8], [first.clone(), Placement::Replicate]));
        let both = layout(&[12, 8], [first.clone(), first.clone()]);
        assert_eq!(shape.at_borders(&both).unwrap(), both, "4 experts over 4 ranks");
        let uneven = MergedShape::new(&[2, 6, 8], 2).unwrap();
        assert_eq!(uneven.at_borders(&both).unwrap(), layout(&[12, 8], [first, Placement::Replicate]));
    }
}
