//! Device meshes: n-dimensional arrays of ranks with named axes. Pure arithmetic, no communication.
//!
//! A [`Mesh`] is a value; [`DeviceMesh`](crate::DeviceMesh) is the same bound to a running world. [`Network`] and [`Link`]
//! describe latency and bandwidth for planners.

mod device;
mod links;
mod network;
mod text;

pub(crate) use device::{DEVICE_TYPES, is_registered, register_device_type};

pub use links::Link;
pub(crate) use links::Links;
pub use network::Network;

use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock};

use crate::error::{Error, ErrorKind, Result};
use crate::fnv::fnv1a;
use crate::intern::{Interned, Interner};

/// Named mesh axes with their sizes, the argument of [`Mesh::new`].
///
/// Converts from `[("dp", 2), ("tp", 4)]`, from plain sizes `[2, 4]` (the axes are then called `axis0`, `axis1`), and from
/// slices and vectors of either.
#[doc(alias = "mesh_dim_names")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axes(Vec<Axis>);

/// One axis of a mesh: PyTorch's mesh dimension.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Axis {
    /// Name of the axis, unique within the mesh.
    pub name: String,
    /// Number of ranks along the axis.
    pub size: usize,
}

/// An n-dimensional array of ranks with named axes, such as `dp=2,tp=4`.
///
/// A mesh is a value: it contains rank numbers and communicates with none of them; [`World::mesh`](crate::World::mesh)
/// creates one that does. Meshes are interned, so comparing, hashing and cloning cost a pointer.
///
/// The text form is `[device/]axes[@ranks]`; ranks are omitted if they are `0..n` in order.
///
/// ```
/// # use shardwise::Mesh;
/// let mesh = Mesh::new([("dp", 2), ("tp", 4)])?;
/// assert_eq!(mesh.to_string(), "dp=2,tp=4");
/// assert_eq!(mesh.coordinate(6), Some(vec![1, 2]));
/// assert_eq!(mesh.slice(["tp"], 6)?.ranks(), [4, 5, 6, 7]);
/// assert_eq!("dp=2,tp=4".parse::<Mesh>()?, mesh);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Mesh(Interned<MeshData>);

#[derive(Debug)]
struct MeshData {
    device: String,
    axes: Vec<Axis>,
    shape: Vec<usize>,
    ranks: Vec<usize>,
    position: OnceLock<HashMap<usize, usize>>,
}

impl PartialEq for MeshData {
    fn eq(&self, other: &Self) -> bool {
        self.device == other.device && self.axes == other.axes && self.ranks == other.ranks
    }
}

impl Eq for MeshData {}

impl std::hash::Hash for MeshData {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.device.hash(state);
        self.axes.hash(state);
        self.ranks.hash(state);
    }
}

static MESHES: LazyLock<Interner<MeshData>> = LazyLock::new(Interner::new);

/// The device type of a mesh unless another is set.
const DEFAULT_DEVICE: &str = "cpu";

impl Mesh {
    /// Creates a mesh over ranks `0..n` in row-major order: the last axis varies fastest.
    ///
    /// # Errors
    /// [`Error::Invalid`] for no axes, a size of 0, an invalid or repeated name, or more than 2^24 ranks.
    #[doc(alias = "init_device_mesh")]
    pub fn new(axes: impl Into<Axes>) -> Result<Self> {
        let axes = axes.into();
        let size = axes.checked_size()?;
        Self::build(DEFAULT_DEVICE.to_string(), axes, (0..size).collect())
    }

    /// Creates a mesh over explicit ranks, listed in row-major order.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if the number of ranks is not that of the coordinates or a rank is listed twice.
    ///
    /// ```
    /// # use shardwise::Mesh;
    /// let mesh = Mesh::from_ranks([("dp", 2), ("tp", 2)], vec![0, 2, 1, 3])?;
    /// assert_eq!(mesh.rank_at(&[0, 1]), Some(2));
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn from_ranks(axes: impl Into<Axes>, ranks: Vec<usize>) -> Result<Self> {
        Self::build(DEFAULT_DEVICE.to_string(), axes.into(), ranks)
    }

    /// Creates a two-axis mesh whose rows are the given groups of ranks, which must be disjoint and of one size.
    #[doc(alias = "from_group")]
    pub fn from_groups(outer: &str, inner: &str, groups: &[Vec<usize>]) -> Result<Self> {
        let width = groups.first().map_or(0, Vec::len);
        if groups.iter().any(|g| g.len() != width) {
            return Err(ErrorKind::Mesh.error(
                "mesh",
                format!("groups of sizes {:?}", groups.iter().map(Vec::len).collect::<Vec<_>>()),
                "groups of one size",
                "give every group the same number of ranks",
            ));
        }
        Self::from_ranks([(outer, groups.len()), (inner, width)], groups.concat())
    }

    /// Returns the same mesh on another device type, such as `cuda` or `xla`, without a device index.
    ///
    /// This only labels the mesh: the crate computes on the CPU, and a world accepts a mesh on another device type only in
    /// a dry run or if a backend was registered for the type ([`register_backend`](crate::tensor::register_backend)).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a device type that is neither known nor registered.
    pub fn on_device(&self, device: &str) -> Result<Self> {
        Self::build(device.to_string(), Axes(self.axes().to_vec()), self.ranks().to_vec())
    }

    fn build(device: String, axes: Axes, ranks: Vec<usize>) -> Result<Self> {
        let size = axes.checked_size()?;
        device::check_name(&device)?;
        device::check_known(&device)?;
        if ranks.len() != size {
            return Err(ErrorKind::Mesh.error(
                "mesh",
                format!("{} ranks for axes {}", ranks.len(), text::axes(&axes.0)),
                format!("{size} ranks"),
                "list one rank per coordinate, the last axis fastest",
            ));
        }
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        if let Some(twice) = sorted.windows(2).find(|w| w[0] == w[1]) {
            return Err(ErrorKind::Mesh.error(
                "mesh",
                format!("rank {} at two coordinates", twice[0]),
                "every rank at most once",
                "remove the repeated rank",
            ));
        }
        let shape = axes.0.iter().map(|a| a.size).collect();
        Ok(Mesh(MESHES.intern(MeshData { device, axes: axes.0, shape, ranks, position: OnceLock::new() })))
    }

    /// The device type of the local tensors: `cpu` unless [`on_device`](Self::on_device) set another.
    pub fn device_type(&self) -> &str {
        &self.0.device
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> &[Axis] {
        &self.0.axes
    }

    /// The sizes of the axes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Number of mesh axes.
    pub fn ndim(&self) -> usize {
        self.0.axes.len()
    }

    /// Number of ranks in the mesh.
    pub fn size(&self) -> usize {
        self.0.ranks.len()
    }

    /// All ranks in row-major order of their coordinates.
    pub fn ranks(&self) -> &[usize] {
        &self.0.ranks
    }

    /// The index of the axis called `name`.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownName`] if the mesh has no such axis.
    #[doc(alias = "get_mesh_dim_by_name")]
    pub fn axis(&self, name: &str) -> Result<usize> {
        self.axes().iter().position(|a| a.name == name).ok_or_else(|| {
            ErrorKind::unknown(name).error(
                "mesh axis",
                format!("`{name}`"),
                format!(
                    "one of {}",
                    self.axes().iter().map(|a| format!("`{}`", a.name)).collect::<Vec<_>>().join(", ")
                ),
                "use a name of this mesh",
            )
        })
    }

    /// Whether `rank` belongs to the mesh.
    pub fn contains(&self, rank: usize) -> bool {
        self.position(rank).is_some()
    }

    /// Row-major position of `rank` in [`ranks`](Self::ranks), `None` outside the mesh.
    pub fn position(&self, rank: usize) -> Option<usize> {
        if self.ranks().get(rank) == Some(&rank) {
            return Some(rank); // the usual case: ranks 0..n in order
        }
        let position = self.0.position.get_or_init(|| self.ranks().iter().enumerate().map(|(i, &r)| (r, i)).collect());
        position.get(&rank).copied()
    }

    /// Coordinate of `rank` on every axis, `None` outside the mesh.
    #[doc(alias = "get_coordinate")]
    pub fn coordinate(&self, rank: usize) -> Option<Vec<usize>> {
        self.position(rank).map(|p| self.coordinate_at(p))
    }

    /// Coordinate of the rank at a row-major position.
    pub(crate) fn coordinate_at(&self, mut position: usize) -> Vec<usize> {
        let mut coordinate = vec![0; self.ndim()];
        for (c, &size) in coordinate.iter_mut().zip(self.shape()).rev() {
            *c = position % size;
            position /= size;
        }
        coordinate
    }

    /// Coordinate of `rank` on one axis, `None` outside the mesh: its rank within the group along that axis.
    #[doc(alias = "get_local_rank")]
    pub fn local_rank(&self, rank: usize, axis: &str) -> Result<Option<usize>> {
        let axis = self.axis(axis)?;
        Ok(self.coordinate(rank).map(|c| c[axis]))
    }

    /// The rank at a coordinate, `None` if the coordinate is not on the mesh.
    pub fn rank_at(&self, coordinate: &[usize]) -> Option<usize> {
        let inside = coordinate.len() == self.ndim() && coordinate.iter().zip(self.shape()).all(|(c, n)| c < n);
        inside.then(|| self.ranks()[self.flat(coordinate)])
    }

    fn flat(&self, coordinate: &[usize]) -> usize {
        coordinate.iter().zip(self.shape()).fold(0, |flat, (c, n)| flat * n + c)
    }

    /// Returns the submesh of some axes, in the order given, that contains `rank`.
    ///
    /// The coordinates on the other axes are those of `rank`; for a rank outside the mesh they are zero, and the rank is
    /// outside the submesh too.
    ///
    /// ```
    /// # use shardwise::Mesh;
    /// let mesh = Mesh::new([("pp", 2), ("dp", 2), ("tp", 2)])?;
    /// let sub = mesh.slice(["tp", "pp"], 2)?; // any order
    /// assert_eq!(sub.to_string(), "tp=2,pp=2@2,6,3,7");
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn slice<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>, rank: usize) -> Result<Self> {
        let axes = self.axis_positions(names)?;
        let ranks = self.group_ranks(&axes, rank);
        Self::build(self.0.device.clone(), Axes(axes.iter().map(|&a| self.axes()[a].clone()).collect()), ranks)
    }

    /// Global ranks of the group of `rank` along some axes (by index), in row-major order of the axes as listed.
    pub(crate) fn group_ranks(&self, axes: &[usize], rank: usize) -> Vec<usize> {
        let mut coordinate = self.coordinate(rank).unwrap_or_else(|| vec![0; self.ndim()]);
        let count = axes.iter().map(|&a| self.shape()[a]).product();
        let mut ranks = Vec::with_capacity(count);
        for index in 0..count {
            let mut rest = index;
            for &axis in axes.iter().rev() {
                coordinate[axis] = rest % self.shape()[axis];
                rest /= self.shape()[axis];
            }
            ranks.push(self.ranks()[self.flat(&coordinate)]);
        }
        ranks
    }

    /// The ranks of all groups along one axis: every rank of the mesh is in exactly one of them.
    ///
    /// ```
    /// # use shardwise::Mesh;
    /// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
    /// assert_eq!(mesh.groups("dp")?, [[0, 2], [1, 3]]);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn groups(&self, axis: &str) -> Result<Vec<Vec<usize>>> {
        let axis = self.axis(axis)?;
        let first = (0..self.size()).filter(|&p| self.coordinate_at(p)[axis] == 0);
        Ok(first.map(|p| self.group_ranks(&[axis], self.ranks()[p])).collect())
    }

    /// Merges some axes, in the order given, into one called `name`, in the place of the first of them.
    ///
    /// ```
    /// # use shardwise::Mesh;
    /// let mesh = Mesh::new([("dp", 2), ("cp", 2), ("tp", 2)])?;
    /// assert_eq!(mesh.flatten(["dp", "cp"], "data")?.to_string(), "data=4,tp=2");
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn flatten<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>, name: &str) -> Result<Self> {
        let merged = self.axis_positions(names)?;
        let mut order = Vec::new();
        let mut axes = Vec::new();
        for axis in 0..self.ndim() {
            if axis == merged[0] {
                order.extend(&merged);
                axes.push(Axis { name: name.to_string(), size: merged.iter().map(|&a| self.shape()[a]).product() });
            } else if !merged.contains(&axis) {
                order.push(axis);
                axes.push(self.axes()[axis].clone());
            }
        }
        Self::build(self.0.device.clone(), Axes(axes), self.group_ranks(&order, self.ranks()[0]))
    }

    /// Splits one axis into several; the product of their sizes must be its size.
    ///
    /// ```
    /// # use shardwise::Mesh;
    /// let mesh = Mesh::new([("data", 4), ("tp", 2)])?;
    /// assert_eq!(mesh.unflatten("data", [("dp", 2), ("cp", 2)])?.to_string(), "dp=2,cp=2,tp=2");
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn unflatten(&self, axis: &str, parts: impl Into<Axes>) -> Result<Self> {
        let at = self.axis(axis)?;
        let parts = parts.into();
        let product = parts.checked_size()?;
        if product != self.shape()[at] {
            return Err(ErrorKind::Mesh.error(
                "mesh split",
                format!("{} with {product} coordinates", text::axes(&parts.0)),
                format!("sizes that multiply to {}, the size of axis `{axis}`", self.shape()[at]),
                "change the sizes",
            ));
        }
        let mut axes = self.axes().to_vec();
        axes.splice(at..=at, parts.0);
        Self::build(self.0.device.clone(), Axes(axes), self.ranks().to_vec())
    }

    /// Joins submeshes of this mesh that share a rank into the submesh of all their axes.
    ///
    /// ```
    /// # use shardwise::Mesh;
    /// let root = Mesh::new([("pp", 2), ("dp", 2), ("tp", 2)])?;
    /// let (dp, tp) = (root.slice(["dp"], 5)?, root.slice(["tp"], 5)?);
    /// assert_eq!(root.concatenate(&[&dp, &tp])?.to_string(), "dp=2,tp=2@4,5,6,7");
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn concatenate(&self, parts: &[&Mesh]) -> Result<Self> {
        let names: Vec<&str> = parts.iter().flat_map(|p| p.axes()).map(|a| a.name.as_str()).collect();
        let common = parts
            .first()
            .and_then(|p| p.ranks().iter().copied().find(|&r| self.contains(r) && parts.iter().all(|p| p.contains(r))));
        let Some(common) = common else {
            return Err(ErrorKind::Mesh.error(
                "mesh parts",
                format!("{} parts that share no rank of {self}", parts.len()),
                "parts that meet in one rank",
                "slice all parts from this mesh through the same rank",
            ));
        };
        for part in parts {
            let expected = self.slice(part.axes().iter().map(|a| &a.name), common)?;
            if expected != **part {
                return Err(ErrorKind::Mesh.error(
                    "mesh part",
                    part,
                    format!("{expected}, the slice of {self} through rank {common}"),
                    "slice all parts from this mesh",
                ));
            }
        }
        self.slice(names, common)
    }

    /// Indices of named axes; an error unless there is at least one and all are distinct.
    pub(crate) fn axis_positions<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Vec<usize>> {
        let axes = names.into_iter().map(|n| self.axis(n.as_ref())).collect::<Result<Vec<_>>>()?;
        let repeated = (1..axes.len()).find(|&i| axes[..i].contains(&axes[i]));
        if axes.is_empty() || repeated.is_some() {
            return Err(ErrorKind::Mesh.error(
                "axis list",
                repeated.map_or("no axis".to_string(), |i| format!("axis `{}` twice", self.axes()[axes[i]].name)),
                "one or more axes, each once",
                "name each axis once",
            ));
        }
        Ok(axes)
    }

    /// A hash that is the same in every process and build, for comparing meshes across ranks.
    pub fn stable_hash(&self) -> u64 {
        // The text form determines the mesh.
        fnv1a(self.to_string().as_bytes())
    }
}

impl Axes {
    /// Checks names and sizes, and returns the number of ranks.
    fn checked_size(&self) -> Result<usize> {
        if self.0.is_empty() {
            return Err(ErrorKind::Mesh.error(
                "mesh",
                "no axes",
                "at least one axis",
                "write for example [(\"dp\", 2)]",
            ));
        }
        let mut size: usize = 1;
        for (i, axis) in self.0.iter().enumerate() {
            text::check_name(&axis.name)?;
            if self.0[..i].iter().any(|a| a.name == axis.name) {
                return Err(ErrorKind::Mesh.error(
                    "mesh axes",
                    format!("two axes called `{}`", axis.name),
                    "distinct names",
                    "rename one of them",
                ));
            }
            if axis.size == 0 {
                return Err(ErrorKind::Mesh.error(
                    "mesh axis",
                    format!("axis `{}` of size 0", axis.name),
                    "a size of at least 1",
                    "leave the axis out or give it ranks",
                ));
            }
            size = size.checked_mul(axis.size).filter(|&s| s <= MAX_RANKS).ok_or_else(|| {
                ErrorKind::Mesh.error::<Error>(
                    "mesh",
                    text::axes(&self.0),
                    format!("at most {MAX_RANKS} ranks"),
                    "check the sizes of the axes",
                )
            })?;
        }
        Ok(size)
    }
}

/// A bound above the ranks of any machine: a larger product is a typing error, and the list of ranks would fill memory.
pub(crate) const MAX_RANKS: usize = 1 << 24;

impl From<Vec<Axis>> for Axes {
    fn from(axes: Vec<Axis>) -> Self {
        Axes(axes)
    }
}

impl<S: AsRef<str>> From<&[(S, usize)]> for Axes {
    fn from(axes: &[(S, usize)]) -> Self {
        Axes(axes.iter().map(|(name, size)| Axis { name: name.as_ref().to_string(), size: *size }).collect())
    }
}

impl<S: AsRef<str>> From<Vec<(S, usize)>> for Axes {
    fn from(axes: Vec<(S, usize)>) -> Self {
        axes.as_slice().into()
    }
}

impl<S: AsRef<str>, const N: usize> From<[(S, usize); N]> for Axes {
    fn from(axes: [(S, usize); N]) -> Self {
        axes.as_slice().into()
    }
}

impl From<&[usize]> for Axes {
    fn from(sizes: &[usize]) -> Self {
        Axes(sizes.iter().enumerate().map(|(i, &size)| Axis { name: format!("axis{i}"), size }).collect())
    }
}

impl From<Vec<usize>> for Axes {
    fn from(sizes: Vec<usize>) -> Self {
        sizes.as_slice().into()
    }
}

impl<const N: usize> From<[usize; N]> for Axes {
    fn from(sizes: [usize; N]) -> Self {
        sizes.as_slice().into()
    }
}

#[cfg(test)]
mod tests;
