//! A mesh bound to a world: the arithmetic of [`Mesh`] together with the groups to communicate in.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Group, World};
use crate::error::{ErrorKind, Result};
use crate::mesh::{Axes, Link, Links, Mesh, is_registered};
use crate::random::Generator;

/// A [`Mesh`] whose ranks are those of a running program, seen from one of them.
///
/// All arithmetic comes from [`Mesh`], which it dereferences to. Ranks outside the mesh can hold it, but have no
/// coordinate and no groups on it.
#[derive(Clone)]
pub struct DeviceMesh(Arc<Bound>);

#[derive(Clone)]
struct Bound {
    mesh: Mesh,
    world: World,
    /// Groups by the axes they span, made when first asked for.
    groups: Arc<Mutex<HashMap<Vec<usize>, Group>>>,
    links: Links,
    /// Whether the program gave the links, instead of the world's network.
    given_links: bool,
    generator: Generator,
    /// Set if some groups were given from outside.
    custom: Option<Arc<()>>,
}

/// What the groups and links of a mesh depend on beside the ranks, while the mesh lives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MeshIdentity {
    world: usize,
    custom: Option<usize>,
    links: Links,
}

impl World {
    /// A mesh over the first ranks of the world. Nothing is communicated: every rank makes it by itself.
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

    /// A mesh over any ranks of the world.
    pub fn device_mesh(&self, mesh: Mesh) -> Result<DeviceMesh> {
        DeviceMesh::new(self, mesh)
    }
}

impl DeviceMesh {
    /// Binds a mesh to a world, which must have all its ranks.
    ///
    /// Local: nothing is communicated. The links of the axes are those of the world's
    /// [network](World::network).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a rank is not one of the world, or if the mesh is on a type of device that computes nothing
    /// here and has no registered backend.
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
                "use on_device(\"cpu\"), register a backend for the type, or run the program dry",
            ));
        }
        let links = Links::new(&world.network().links(&mesh)?)?;
        let (world, generator, groups) = (world.clone(), Generator::new(0), Arc::default());
        let bound = Bound { mesh, world, groups, links, given_links: false, generator, custom: None };
        Ok(DeviceMesh(Arc::new(bound)))
    }

    /// A mesh of one axis over the ranks of a group, which serves as the group of that axis.
    pub fn from_group(world: &World, axis: &str, group: &Group) -> Result<Self> {
        let mesh = Self::new(world, Mesh::from_ranks([(axis, group.size())], group.ranks().to_vec())?)?;
        mesh.with_group(&[axis], group)
    }

    /// The mesh without its world.
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// The world.
    pub fn world(&self) -> &World {
        &self.0.world
    }

    /// Coordinate of this rank, `None` if it is outside the mesh.
    pub fn my_coordinate(&self) -> Option<Vec<usize>> {
        self.0.mesh.coordinate(self.0.world.rank())
    }

    /// The group through this rank along some axes (one is usual), in row-major order of the axes as listed. Made when first asked
    /// for, then kept.
    #[doc(alias = "get_group")]
    pub fn group(&self, axes: &[&str]) -> Result<Group> {
        self.group_of(&self.0.mesh.axis_positions(axes)?)
    }

    /// As [`group`](Self::group), with axes by position.
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
        let group = self.0.world.subgroup(&self.0.mesh.fibre(axes, self.0.world.rank()))?;
        self.0.groups.lock().insert(axes.to_vec(), group.clone());
        Ok(group)
    }

    /// The group of all ranks of the mesh, in row-major order.
    pub(crate) fn whole_group(&self) -> Result<Group> {
        self.group_of(&(0..self.0.mesh.ndim()).collect::<Vec<_>>())
    }

    /// The groups through this rank along every axis, outermost first.
    #[doc(alias = "get_all_groups")]
    pub fn all_groups(&self) -> Result<Vec<Group>> {
        (0..self.0.mesh.ndim()).map(|axis| self.group_of(&[axis])).collect()
    }

    /// The same mesh with another group for some axes, such as one from another engine. It must have the ranks of the
    /// group that it replaces.
    #[doc(alias = "from_group")]
    #[doc(alias = "backend_override")]
    pub fn with_group(&self, axes: &[&str], group: &Group) -> Result<Self> {
        let positions = self.0.mesh.axis_positions(axes)?;
        let ranks = self.0.mesh.fibre(&positions, self.0.world.rank());
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
        Ok(DeviceMesh(Arc::new(Bound { groups, custom: Some(Arc::default()), ..(*self.0).clone() })))
    }

    /// The same mesh with other links along its axes than the network of the world gives it: one per axis. Planners price
    /// collectives by them. Every rank must give the same ones.
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
        Ok(DeviceMesh(Arc::new(Bound { links: Links::new(links)?, given_links: true, groups, ..(*self.0).clone() })))
    }

    /// Equal for two meshes of the same ranks only if they communicate and plan alike, while either lives.
    pub(crate) fn identity(&self) -> MeshIdentity {
        let custom = self.0.custom.as_ref().map(|token| Arc::as_ptr(token) as usize);
        MeshIdentity { world: self.0.world.identity(), custom, links: self.0.links.clone() }
    }

    /// Whether the two communicate in the same groups and plan alike.
    pub(crate) fn is_same(&self, other: &DeviceMesh) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.mesh == other.0.mesh && self.identity() == other.identity()
    }

    /// A mesh made of this one: it begins with the same seed. Links that the program gave stay with the axes that both
    /// have; an axis that is made of others has the slowest of theirs.
    fn derived(&self, mesh: Mesh, parts: &dyn Fn(&str) -> Vec<usize>) -> Result<Self> {
        let slowest = |mesh: &Mesh| mesh.axes().iter().map(|axis| self.0.links.slowest(&parts(&axis.name))).collect();
        let given: Option<Vec<Link>> = self.0.given_links.then(|| slowest(&mesh));
        let generator = Generator::new(self.0.generator.state().seed);
        let new = Self::new(&self.0.world, mesh)?;
        let links = given.map_or_else(|| Ok(new.0.links.clone()), |links| Links::new(&links))?;
        let given_links = self.0.given_links;
        Ok(DeviceMesh(Arc::new(Bound { links, given_links, generator, ..(*new.0).clone() })))
    }

    /// The position of an axis that this mesh has, or of those that `others` names for a new one.
    fn made_of(&self, axis: &str, others: &[usize]) -> Vec<usize> {
        self.0.mesh.axis(axis).map_or_else(|_| others.to_vec(), |position| vec![position])
    }

    /// The same mesh with the same links in another world, which must have all its ranks.
    pub(crate) fn in_world(&self, world: &World) -> Result<Self> {
        let new = Self::new(world, self.0.mesh.clone())?;
        let generator = Generator::new(self.0.generator.state().seed);
        let (links, given_links) = (self.0.links.clone(), self.0.given_links);
        Ok(DeviceMesh(Arc::new(Bound { links, given_links, generator, ..(*new.0).clone() })))
    }

    /// The link along an axis, by which planners price collectives: that of the world's network, unless
    /// [`with_links`](Self::with_links) gave another.
    pub fn link(&self, axis: &str) -> Result<Link> {
        Ok(self.0.links.of_axis(self.0.mesh.axis(axis)?))
    }

    pub(crate) fn links(&self) -> &Links {
        &self.0.links
    }

    /// The generator that random tensors on this mesh draw from. Clones of the mesh share it; a mesh made of this one, by
    /// slicing for example, has its own, which begins with the same seed. Meshes made anew begin with seed 0.
    pub fn generator(&self) -> &Generator {
        &self.0.generator
    }

    /// Begins the generator of this mesh anew. Every rank must do the same, or the next draw is an error.
    pub fn manual_seed(&self, seed: u64) {
        self.0.generator.manual_seed(seed);
    }

    /// The submesh spanned by some axes, in any order, that passes through this rank. See [`Mesh::slice`].
    #[doc(alias = "__getitem__")]
    pub fn slice<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Self> {
        self.derived(self.0.mesh.slice(names, self.0.world.rank())?, &|axis| self.made_of(axis, &[]))
    }

    /// Merges axes into one. See [`Mesh::flatten`].
    #[doc(alias = "_flatten")]
    pub fn flatten<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>, name: &str) -> Result<Self> {
        let names: Vec<S> = names.into_iter().collect();
        let merged = self.0.mesh.axis_positions(&names)?;
        self.derived(self.0.mesh.flatten(&names, name)?, &|axis| match axis == name {
            true => merged.clone(),
            false => self.made_of(axis, &[]),
        })
    }

    /// Splits an axis into several. See [`Mesh::unflatten`].
    #[doc(alias = "_unflatten")]
    pub fn unflatten(&self, axis: &str, parts: impl Into<Axes>) -> Result<Self> {
        let split = [self.0.mesh.axis(axis)?];
        self.derived(self.0.mesh.unflatten(axis, parts)?, &|part| self.made_of(part, &split))
    }

    /// Joins submeshes of this mesh. See [`Mesh::concatenate`].
    #[doc(alias = "_concatenate")]
    pub fn concatenate(&self, parts: &[&DeviceMesh]) -> Result<Self> {
        let parts: Vec<&Mesh> = parts.iter().map(|p| p.mesh()).collect();
        self.derived(self.0.mesh.concatenate(&parts)?, &|axis| self.made_of(axis, &[]))
    }
}

impl Deref for DeviceMesh {
    type Target = Mesh;
    fn deref(&self) -> &Mesh {
        &self.0.mesh
    }
}

impl PartialEq for DeviceMesh {
    /// Equal meshes of one program; which rank looks at them makes no difference.
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
