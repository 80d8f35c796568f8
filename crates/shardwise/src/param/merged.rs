//! Tensors that are stored with their leading dimensions merged into one.

use candle_core::Tensor;

use crate::error::{ErrorKind, Result};
use crate::layout::{MergedShape, OwnedBox};
use crate::tensor::DTensor;

/// A tensor whose leading dimensions are stored as one, such as experts `[experts, rows, columns]` as a matrix of all rows.
///
/// The stored tensor is a [`DTensor`] in any layout. Sharded over its rows it is divided evenly, however few experts there are,
/// and shards cross the borders of experts. Elementwise operators, norms, optimizers and random draws take the stored tensor;
/// checkpoints save and load this one in its own shape, as several boxes per rank.
///
/// ```
/// use shardwise::param::MergedTensor;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let rows = DTensor::randn((12, 5), &mesh, [Shard(0)])?;
///     let experts = MergedTensor::new(&rows, &[3, 4, 5])?;
///     assert_eq!(experts.boxes_of(0).len(), 2); // expert 0, and two rows of expert 1
///     assert_eq!(experts.full_tensor()?.dims(), [3, 4, 5]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct MergedTensor {
    stored: DTensor,
    shape: MergedShape,
}

impl MergedTensor {
    /// A tensor of `shape` that is stored as `stored`. Local, no copy.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless `stored` has this shape with leading dimensions merged.
    pub fn new(stored: &DTensor, shape: &[usize]) -> Result<Self> {
        match MergedShape::between(shape, stored.shape()) {
            Some(shape) => Ok(MergedTensor { stored: stored.clone(), shape }),
            None => Err(ErrorKind::shape(shape).error(
                "merged tensor",
                format!("shape {shape:?}, stored as {:?}", stored.shape()),
                "a stored shape with the leading dimensions as one, as in [15, 8] for [3, 5, 8]",
                "reshape the stored tensor",
            )),
        }
    }

    /// The tensor as it is stored.
    pub fn stored(&self) -> &DTensor {
        &self.stored
    }

    /// The shape of the tensor, and which dimensions are merged.
    pub fn merged_shape(&self) -> &MergedShape {
        &self.shape
    }

    /// The shape of the tensor.
    pub fn shape(&self) -> &[usize] {
        self.shape.shape()
    }

    /// The boxes of the tensor that `rank` holds; see [`MergedShape::boxes_of`]. Local.
    pub fn boxes_of(&self, rank: usize) -> Vec<OwnedBox> {
        self.shape.boxes_of(&self.stored.layout().reduced(), rank)
    }

    /// The same tensor with other elements, in the same or another layout.
    pub(crate) fn with_stored(&self, stored: DTensor) -> Self {
        MergedTensor { stored, shape: self.shape.clone() }
    }

    /// Gathers the whole tensor on every rank of the mesh. Collective.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        Ok(self.stored.full_tensor()?.reshape(self.shape())?)
    }

    /// Returns the tensor in its own shape. Collective unless shards end at borders of the first dimension: axes whose shards
    /// cross them are gathered. Differentiable.
    #[track_caller]
    pub fn separate(&self) -> Result<DTensor> {
        let stored = self.stored.to_layout(&self.shape.at_borders(self.stored.layout())?)?;
        stored.reshape(&self.shape().iter().map(|&n| n as isize).collect::<Vec<_>>())
    }
}
