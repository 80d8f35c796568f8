//! The world: all ranks of a program.

use std::ops::Deref;

use super::{DeviceMesh, Group};
use crate::error::Result;
use crate::mesh::{Axes, Mesh};

/// All ranks of a program, seen from one of them: a [`Group`] that can make meshes.
#[derive(Clone, Debug)]
pub struct World(Group);

impl World {
    /// Wraps the group of all ranks, as an engine provides it.
    pub fn new(all: Group) -> Self {
        World(all)
    }

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
    pub fn mesh(&self, axes: impl Into<Axes>) -> Result<DeviceMesh> {
        self.device_mesh(Mesh::new(axes)?)
    }

    /// A mesh over any ranks of the world.
    pub fn device_mesh(&self, mesh: Mesh) -> Result<DeviceMesh> {
        DeviceMesh::new(self, mesh)
    }
}

impl Deref for World {
    type Target = Group;
    fn deref(&self) -> &Group {
        &self.0
    }
}
