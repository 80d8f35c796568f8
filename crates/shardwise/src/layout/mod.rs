//! Layouts: a tensor's shape, its mesh and its placements, and so what every rank owns. Pure arithmetic, no communication.

mod boxes;
mod merged;
mod order;
mod resize;
mod text;

pub use boxes::{OwnedBox, TensorBox};
pub use merged::MergedShape;
pub(crate) use resize::{coordinates, ragged};

use std::sync::LazyLock;

use candle_core::Shape;
pub use shardwise_kernels::TensorMeta;

use crate::error::{ErrorKind, Result};
use crate::intern::{Interned, Interner};
use crate::mesh::Mesh;
use crate::placement::{DivisionContext, Placement};
pub(crate) use crate::placement::{Runs, chunk};

/// How a tensor is distributed over a mesh: its global shape, one placement per mesh axis and, where several axes shard
/// one tensor dimension, the order in which they do. PyTorch's `DTensorSpec`.
///
/// A layout is checked when it is created, so every `Layout` is valid. Layouts are interned: comparing, hashing and cloning
/// cost a pointer. Equivalent placements are stored in one form, so that they compare equal: negative dimensions are
/// resolved, a ragged placement with the sizes of a plain shard becomes `Shard`, as do a strided shard with factor 1 and a
/// block-cyclic one with one block per coordinate.
///
/// ```
/// # use shardwise::{Layout, Mesh, Placement::*};
/// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
/// let layout = Layout::new(&mesh, (5, 4), [Shard(0), Shard(-1)])?;
/// assert_eq!(layout.to_string(), "[5, 4] on dp=2,tp=2: S(0), S(1)");
/// assert_eq!(layout.local_shape(3), [2, 2]);
/// assert_eq!(layout.global_offset(3), [3, 2]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "DTensorSpec")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Layout(Interned<LayoutData>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct LayoutData {
    mesh: Mesh,
    shape: Vec<usize>,
    placements: Vec<Placement>,
    /// Per tensor dimension the mesh axes that shard it; each divides what the axes before it have left.
    orders: Vec<Vec<usize>>,
}

/// Size of the largest element type (`f64`, `i64`).
const MAX_ELEMENT_BYTES: usize = 8;

static LAYOUTS: LazyLock<Interner<LayoutData>> = LazyLock::new(Interner::new);

impl Layout {
    /// Creates a layout from one placement per mesh axis.
    ///
    /// Axes that shard the same dimension do so in mesh order: the outermost divides the dimension, the next each part.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there is not one placement per mesh axis, a placement does not fit the
    /// shape, or the shape overflows.
    pub fn new(mesh: &Mesh, shape: impl Into<Shape>, placements: impl IntoIterator<Item = Placement>) -> Result<Self> {
        Self::build(mesh, shape.into().into_dims(), &placements.into_iter().collect::<Vec<_>>(), &[])
    }

    /// Creates a layout with an explicit order of the axes that shard a dimension.
    ///
    /// `order` lists `(dimension, axes)`: the first axis divides the dimension, the next each part. Dimensions that are not
    /// listed keep the mesh order.
    ///
    /// ```
    /// # use shardwise::{Layout, Mesh, Placement::*};
    /// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
    /// let layout = Layout::with_shard_order(&mesh, 8, [Shard(0), Shard(0)], &[(0, &["tp", "dp"])])?;
    /// let offsets: Vec<_> = (0..4).map(|r| layout.global_offset(r)[0]).collect();
    /// assert_eq!(offsets, [0, 4, 2, 6]); // tp divides into halves, dp divides each half
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[doc(alias = "ShardOrder")]
    pub fn with_shard_order(
        mesh: &Mesh,
        shape: impl Into<Shape>,
        placements: impl IntoIterator<Item = Placement>,
        order: &[(usize, &[&str])],
    ) -> Result<Self> {
        let order = order
            .iter()
            .map(|(dim, names)| Ok((*dim, names.iter().map(|n| mesh.axis(n)).collect::<Result<Vec<_>>>()?)))
            .collect::<Result<Vec<_>>>()?;
        Self::build(mesh, shape.into().into_dims(), &placements.into_iter().collect::<Vec<_>>(), &order)
    }

    /// Creates a layout in which every rank of the mesh holds the whole tensor.
    pub fn replicated(mesh: &Mesh, shape: impl Into<Shape>) -> Result<Self> {
        Self::build(mesh, shape.into().into_dims(), &vec![Placement::Replicate; mesh.ndim()], &[])
    }

    /// A layout from placements and, per tensor dimension, the axes that shard it in order.
    pub(crate) fn from_shard_orders(
        mesh: &Mesh,
        shape: &[usize],
        placements: &[Placement],
        orders: &[Vec<usize>],
    ) -> Result<Self> {
        let order: Vec<(usize, Vec<usize>)> = orders.iter().cloned().enumerate().collect();
        Self::build(mesh, shape.to_vec(), placements, &order)
    }

    /// An error if memory cannot address a tensor of this shape. Sizes of empty tensors are bounded too, so that no
    /// arithmetic on them can overflow.
    pub(crate) fn check_shape(shape: &[usize]) -> Result<()> {
        let bounded = shape.iter().try_fold(1usize, |count, &n| count.checked_mul(n.max(1)));
        if bounded.is_none_or(|count| count > isize::MAX as usize / MAX_ELEMENT_BYTES) {
            return Err(ErrorKind::shape(shape).error(
                "shape",
                format!("{shape:?}"),
                "a tensor that memory can address",
                "check the sizes for overflow",
            ));
        }
        Ok(())
    }

    fn build(mesh: &Mesh, shape: Vec<usize>, placements: &[Placement], order: &[(usize, Vec<usize>)]) -> Result<Self> {
        if placements.len() != mesh.ndim() {
            return Err(ErrorKind::Layout.error(
                "placements",
                format!("{} placement(s) for mesh {mesh}", placements.len()),
                format!("{}, one per mesh axis", mesh.ndim()),
                "use R for axes on which the tensor is replicated",
            ));
        }
        Self::check_shape(&shape)?;
        let mut placements =
            placements.iter().map(|p| p.normalized(shape.len())).collect::<Result<Vec<Placement>>>()?;
        let mut orders = order::shard_orders(mesh, &placements, shape.len(), order)?;
        for (dim, axes) in orders.iter_mut().enumerate() {
            for (i, &axis) in axes.iter().enumerate() {
                placements[axis] = canonical(mesh, shape[dim], &placements, &axes[..i], axis)?;
            }
            *axes = order::canonical_order(mesh, axes);
        }
        Ok(Layout(LAYOUTS.intern(LayoutData { mesh: mesh.clone(), shape, placements, orders })))
    }

    /// The mesh over whose ranks the tensor is distributed.
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// Global shape: that of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// One placement per mesh axis, with non-negative dimensions and in stored form.
    pub fn placements(&self) -> &[Placement] {
        &self.0.placements
    }

    /// The indices of the mesh axes that shard a tensor dimension, in the order in which they divide it.
    ///
    /// # Panics
    /// If the tensor has no such dimension.
    pub fn shard_order(&self, dim: usize) -> &[usize] {
        &self.0.orders[dim]
    }

    /// Whether every axis is replicated, so that every rank of the mesh holds the whole value.
    pub fn is_replicated(&self) -> bool {
        self.placements().iter().all(Placement::is_replicate)
    }

    /// Whether some axis is partial, so that the value is the reduction of the ranks' local tensors.
    pub fn is_partial(&self) -> bool {
        self.placements().iter().any(Placement::is_partial)
    }

    /// Returns the layout of the reduced value: partial axes become replicated, the remaining ones stay.
    pub fn reduced(&self) -> Layout {
        if !self.is_partial() {
            return self.clone();
        }
        let settle = |p: &Placement| if p.is_partial() { Placement::Replicate } else { p.clone() };
        let placements: Vec<Placement> = self.placements().iter().map(settle).collect();
        Self::from_shard_orders(self.mesh(), self.shape(), &placements, &self.0.orders).expect("the same shard orders")
    }

    /// Shape of the local tensor of `rank`; `[0]` for a rank outside the mesh.
    pub fn local_shape(&self, rank: usize) -> Vec<usize> {
        match self.mesh().coordinate(rank) {
            Some(coordinate) => (0..self.shape().len()).map(|dim| self.owned(dim, &coordinate).len()).collect(),
            None => vec![0],
        }
    }

    /// Global index of the first element that `rank` holds in every dimension; empty for a rank outside the mesh.
    ///
    /// In a dimension of which the rank holds no index, the offset is the size of the dimension.
    #[doc(alias = "compute_local_shape_and_global_offset")]
    pub fn global_offset(&self, rank: usize) -> Vec<usize> {
        match self.mesh().coordinate(rank) {
            Some(coordinate) => (0..self.shape().len())
                .map(|dim| self.owned(dim, &coordinate).first().unwrap_or(self.shape()[dim]))
                .collect(),
            None => Vec::new(),
        }
    }

    /// The global indices along `dim` that `rank` holds, in local order; empty for a rank outside the mesh.
    ///
    /// # Panics
    /// If the tensor has no such dimension.
    pub fn global_indices(&self, rank: usize, dim: usize) -> Vec<usize> {
        self.mesh().coordinate(rank).map_or(Vec::new(), |c| self.owned(dim, &c).iter().flatten().collect())
    }

    /// The global indices along `dim` that a mesh coordinate holds.
    pub(crate) fn owned(&self, dim: usize, coordinate: &[usize]) -> Runs {
        owned(self.mesh(), self.shape()[dim], self.placements(), &self.0.orders[dim], coordinate)
    }
}

/// The indices of `0..n` that a mesh coordinate holds after `axes` have divided them in order.
fn owned(mesh: &Mesh, n: usize, placements: &[Placement], axes: &[usize], coordinate: &[usize]) -> Runs {
    let mut runs = Runs::all(n);
    let mut outer = 0;
    for &axis in axes {
        let (k, i) = (mesh.shape()[axis], coordinate[axis]);
        runs = placements[axis].part(&runs, k, i, outer);
        outer = outer * k + i;
    }
    runs
}

/// The stored form of the placement of `axis`, which shards a dimension of size `n` after the axes `before`; an error if
/// it does not fit.
fn canonical(mesh: &Mesh, n: usize, placements: &[Placement], before: &[usize], axis: usize) -> Result<Placement> {
    let divided = DivisionContext {
        k: mesh.shape()[axis],
        combinations: before.iter().map(|&a| mesh.shape()[a]).product(),
        len: &|outer| owned(mesh, n, placements, before, &coordinate_of(mesh, before, outer)).len(),
        name: &|| format!("{} on axis `{}`", placements[axis], mesh.axes()[axis].name),
    };
    placements[axis].canonical(&divided)
}

/// The mesh coordinate whose entries at `axes` are those of the row-major number `index`; other entries are zero.
fn coordinate_of(mesh: &Mesh, axes: &[usize], mut index: usize) -> Vec<usize> {
    let mut coordinate = vec![0; mesh.ndim()];
    for &axis in axes.iter().rev() {
        coordinate[axis] = index % mesh.shape()[axis];
        index /= mesh.shape()[axis];
    }
    coordinate
}

#[cfg(test)]
mod tests;
