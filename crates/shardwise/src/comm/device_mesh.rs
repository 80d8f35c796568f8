//! [`DeviceMesh`]: a [`Mesh`] bound to a world, with groups to communicate in, links and a random generator.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Group, World};
use crate::error::{ErrorKind, Result};
use crate::mesh::{Axes, Link, Links, Mesh, is_registered};
use crate::random::Generator;

/// A [`Mesh`] of ranks of a running world, as one rank sees it: PyTorch's `DeviceMesh`.
///
/// Dereferences to [`Mesh`] for sizes, coordinates and axes. Ranks outside the mesh may hold it, but have no coordinate and
/// no groups on it. Creating a mesh communicates nothing; clones share groups and generator.
#[derive(Clone)]
pub struct DeviceMesh(Arc<BoundMesh>);

#[derive(Clone)]
struct BoundMesh {
    mesh: Mesh,
    world: World,
    /// Groups by the axes they span, created on first use.
    groups: Arc<Mutex<HashMap<Vec<usize>, Group>>>,
    links: Links,
    /// Whether `links` came from `with_links` rather than from the world's network.
    given_links: bool,
    generator: Generator,
    /// Set by `with_group`: the identity of this set of groups.
    custom: Option<Arc<()>>,
}

/// What the groups and links of a mesh depend on besides its ranks; valid while the mesh is alive.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MeshIdentity {
    world: usize,
    custom: Option<usize>,
    links: Links,
}

impl World {
    /// Creates a mesh over the first ranks of the world, in row-major order: the last axis varies fastest.
    ///
    /// Local: nothing is communicated, but every rank must create the same mesh.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the world has fewer ranks than the mesh, or a name or size is invalid.
    ///
    /// ```
    /// # use shardwise::launch;
    /// launch(4, |world| {
    ///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
    ///     let tp = mesh.group(&["tp"])?;
    ///     assert_eq!(tp.ranks(), if world.rank() < 2 { [0, 1] } else { [2, 3] });
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    #[doc(alias = "init_device_mesh")]
    pub fn mesh(&self, axes: impl Into<Axes>) -> Result<DeviceMesh> {
        self.device_mesh(Mesh::new(axes)?)
    }

    /// Binds any [`Mesh`] to this world, as [`DeviceMesh::new`].
    pub fn device_mesh(&self, mesh: Mesh) -> Result<DeviceMesh> {
        DeviceMesh::new(self, mesh)
    }
}

impl DeviceMesh {
    /// Binds a mesh to a world, which must have all its ranks.
    ///
    /// Local: nothing is communicated. The links of the axes are those of the world's [network](World::network).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a rank of the mesh is not in the world, or if the mesh is on a device
    /// type other than `cpu` that has no registered backend (a dry run accepts any).
    pub fn new(world: &World, mesh: Mesh) -> Result<Self> {
        if let Some(rank) = mesh.ranks().iter().find(|&&r| r >= world.size()) {
            return Err(ErrorKind::Rank { rank: *rank, size: world.size() }.error(
                "mesh",
                format!("mesh {mesh} of {} ranks with rank {rank}", mesh.size()),
                format!("ranks below {}, the size of the world", world.size()),
                "launch more ranks or make the mesh smaller",
            ));
        }
        let device = mesh.device_type();
        if device != "cpu" && !world.is_dry() && !is_registered(device) {
            return Err(ErrorKind::Unsupported.error(
                "mesh",
                format!("mesh {mesh} on device type `{device}`, on which this library does not compute"),
                "a mesh on `cpu`, or on a type with a registered backend",
                "use on_device(\"cpu\"), register a backend for the type, or use a DryWorld",
            ));
        }
        let links = Links::new(&world.network().links(&mesh)?)?;
        let (world, generator, groups) = (world.clone(), Generator::new(0), Arc::default());
        let bound = BoundMesh { mesh, world, groups, links, given_links: false, generator, custom: None };
        Ok(DeviceMesh(Arc::new(bound)))
    }

    /// Creates a mesh with one axis over the ranks of a group, which becomes the group of that axis. Local.
    pub fn from_group(world: &World, axis: &str, group: &Group) -> Result<Self> {
        let mesh = Self::new(world, Mesh::from_ranks([(axis, group.size())], group.ranks().to_vec())?)?;
        mesh.with_group(&[axis], group)
    }

    /// The mesh without its world.
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// The world that the mesh is bound to.
    pub fn world(&self) -> &World {
        &self.0.world
    }

    /// Coordinate of this rank on every axis, `None` if it is outside the mesh.
    #[doc(alias = "get_coordinate")]
    pub fn my_coordinate(&self) -> Option<Vec<usize>> {
        self.0.mesh.coordinate(self.0.world.rank())
    }

    /// Returns the group of ranks along some axes that contains this rank, in row-major order of the axes as listed.
    ///
    /// Local: created on first use, then cached.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for an unknown axis, or on a rank outside the mesh.
    #[doc(alias = "get_group")]
    pub fn group(&self, axes: &[&str]) -> Result<Group> {
        self.group_of(&self.0.mesh.axis_positions(axes)?)
    }

    /// As [`group`](Self::group), with axes as indices.
    pub(crate) fn group_of(&self, axes: &[usize]) -> Result<Group> {
        if let Some(group) = self.0.groups.lock().get(axes) {
            return Ok(group.clone());
        }
        if !self.0.mesh.contains(self.0.world.rank()) {
            return Err(ErrorKind::Mesh.error(
                "mesh group",
                format!("rank {}, which is outside mesh {}", self.0.world.rank(), self.0.mesh),
                "a rank of the mesh",
                "test my_coordinate() before communicating",
            ));
        }
        let names: Vec<&str> = axes.iter().map(|&axis| self.0.mesh.axes()[axis].name.as_str()).collect();
        let group = self.0.world.subgroup(&self.0.mesh.group_ranks(axes, self.0.world.rank()))?.along(&names.join(","));
        self.0.groups.lock().insert(axes.to_vec(), group.clone());
        Ok(group)
    }

    /// The group of all ranks of the mesh, in row-major order.
    pub(crate) fn whole_group(&self) -> Result<Group> {
        self.group_of(&(0..self.0.mesh.ndim()).collect::<Vec<_>>())
    }

    /// The group of this rank along each axis, outermost axis first. Local.
    #[doc(alias = "get_all_groups")]
    pub fn all_groups(&self) -> Result<Vec<Group>> {
        (0..self.0.mesh.ndim()).map(|axis| self.group_of(&[axis])).collect()
    }

    /// Returns the same mesh with another group for some axes, such as one of another engine.
    ///
    /// Local. The group must have the same ranks in the same order as the one that it replaces.
    #[doc(alias = "from_group")]
    #[doc(alias = "backend_override")]
    pub fn with_group(&self, axes: &[&str], group: &Group) -> Result<Self> {
        let positions = self.0.mesh.axis_positions(axes)?;
        let ranks = self.0.mesh.group_ranks(&positions, self.0.world.rank());
        if group.ranks() != ranks {
            return Err(ErrorKind::Mesh.error(
                "mesh group",
                format!("ranks {:?}", group.ranks()),
                format!("ranks {ranks:?}, which axes {axes:?} have here"),
                "use a group of the same ranks in the same order",
            ));
        }
        let mut groups = self.0.groups.lock().clone();
        groups.insert(positions, group.clone());
        let groups = Arc::new(Mutex::new(groups));
        Ok(DeviceMesh(Arc::new(BoundMesh { groups, custom: Some(Arc::default()), ..(*self.0).clone() })))
    }

    /// Returns the same mesh with explicit links, one per axis, in place of those of the world's network.
    ///
    /// Planners estimate the time of collectives from them. Local, but every rank must pass the same links.
    pub fn with_links(&self, links: &[Link]) -> Result<Self> {
        if links.len() != self.0.mesh.ndim() {
            return Err(ErrorKind::Mesh.error(
                "links",
                format!("{} link(s) for mesh {}", links.len(), self.0.mesh),
                format!("{}, one per axis", self.0.mesh.ndim()),
                "list the axes outermost first",
            ));
        }
        let groups = Arc::new(Mutex::new(self.0.groups.lock().clone()));
        Ok(DeviceMesh(Arc::new(BoundMesh {
            links: Links::new(links)?,
            given_links: true,
            groups,
            ..(*self.0).clone()
        })))
    }

    /// Equal for two live meshes of the same ranks only if they use the same groups and links.
    pub(crate) fn identity(&self) -> MeshIdentity {
        let custom = self.0.custom.as_ref().map(|token| Arc::as_ptr(token) as usize);
        MeshIdentity { world: self.0.world.identity(), custom, links: self.0.links.clone() }
    }

    /// Whether the two have the same ranks, groups and links.
    pub(crate) fn is_same(&self, other: &DeviceMesh) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.mesh == other.0.mesh && self.identity() == other.identity()
    }

    /// A mesh derived from this one, with the same seed. Explicit links stay with the axes that both meshes have; an axis
    /// merged from several axes gets the slowest of their links.
    fn derived(&self, mesh: Mesh, parts: &dyn Fn(&str) -> Vec<usize>) -> Result<Self> {
        let slowest = |mesh: &Mesh| mesh.axes().iter().map(|axis| self.0.links.slowest(&parts(&axis.name))).collect();
        let given: Option<Vec<Link>> = self.0.given_links.then(|| slowest(&mesh));
        let generator = Generator::new(self.0.generator.state().seed);
        let new = Self::new(&self.0.world, mesh)?;
        let links = given.map_or_else(|| Ok(new.0.links.clone()), |links| Links::new(&links))?;
        let given_links = self.0.given_links;
        Ok(DeviceMesh(Arc::new(BoundMesh { links, given_links, generator, ..(*new.0).clone() })))
    }

    /// The indices of the axes that an axis of a derived mesh comes from: itself if this mesh has it, else `new_axis`.
    fn source_axes(&self, axis: &str, new_axis: &[usize]) -> Vec<usize> {
        self.0.mesh.axis(axis).map_or_else(|_| new_axis.to_vec(), |position| vec![position])
    }

    /// The same mesh with the same links bound to another world, which must have all its ranks.
    pub(crate) fn in_world(&self, world: &World) -> Result<Self> {
        let new = Self::new(world, self.0.mesh.clone())?;
        let generator = Generator::new(self.0.generator.state().seed);
        let (links, given_links) = (self.0.links.clone(), self.0.given_links);
        Ok(DeviceMesh(Arc::new(BoundMesh { links, given_links, generator, ..(*new.0).clone() })))
    }

    /// Latency and bandwidth along an axis, from which planners estimate times: those of the world's network, unless
    /// [`with_links`](Self::with_links) replaced them.
    pub fn link(&self, axis: &str) -> Result<Link> {
        Ok(self.0.links.of_axis(self.0.mesh.axis(axis)?))
    }

    pub(crate) fn links(&self) -> &Links {
        &self.0.links
    }

    /// The random generator of tensors on this mesh.
    ///
    /// Clones of the mesh share it. A mesh derived from this one, such as a slice, has its own generator with the same
    /// seed. A new mesh has seed 0.
    pub fn generator(&self) -> &Generator {
        &self.0.generator
    }

    /// Restarts the generator of this mesh with a seed.
    ///
    /// Local, but every rank must set the same seed: the next draw checks it and is an error otherwise.
    pub fn manual_seed(&self, seed: u64) {
        self.0.generator.manual_seed(seed);
    }

    /// Returns the submesh of some axes, in the order given, that contains this rank. Local; see [`Mesh::slice`].
    #[doc(alias = "__getitem__")]
    pub fn slice<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Self> {
        self.derived(self.0.mesh.slice(names, self.0.world.rank())?, &|axis| self.source_axes(axis, &[]))
    }

    /// Merges axes into one. Local; see [`Mesh::flatten`].
    #[doc(alias = "_flatten")]
    pub fn flatten<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>, name: &str) -> Result<Self> {
        let names: Vec<S> = names.into_iter().collect();
        let merged = self.0.mesh.axis_positions(&names)?;
        self.derived(self.0.mesh.flatten(&names, name)?, &|axis| match axis == name {
            true => merged.clone(),
            false => self.source_axes(axis, &[]),
        })
    }

    /// Splits an axis into several. Local; see [`Mesh::unflatten`].
    #[doc(alias = "_unflatten")]
    pub fn unflatten(&self, axis: &str, parts: impl Into<Axes>) -> Result<Self> {
        let split = [self.0.mesh.axis(axis)?];
        self.derived(self.0.mesh.unflatten(axis, parts)?, &|part| self.source_axes(part, &split))
    }

    /// Joins submeshes of this mesh. Local; see [`Mesh::concatenate`].
    #[doc(alias = "_concatenate")]
    pub fn concatenate(&self, parts: &[&DeviceMesh]) -> Result<Self> {
        let parts: Vec<&Mesh> = parts.iter().map(|p| p.mesh()).collect();
        self.derived(self.0.mesh.concatenate(&parts)?, &|axis| self.source_axes(axis, &[]))
    }
}

impl Deref for DeviceMesh {
    type Target = Mesh;
    fn deref(&self) -> &Mesh {
        &self.0.mesh
    }
}

impl PartialEq for DeviceMesh {
    /// Compares ranks, axes and device type; groups, links and generators do not count.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.mesh == other.0.mesh
    }
}

impl Eq for DeviceMesh {}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMesh({} at rank {})", self.0.mesh, self.0.world.rank())
    }
}
