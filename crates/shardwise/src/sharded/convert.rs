//! Conversion between `ShardedTensor` and `DTensor`.

use std::panic::Location;

use super::exchange::box_view;
use super::metadata::ShardMetadata;
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::{DeviceMesh, agree};
use crate::error::{Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::redistribute::{BoxExchange, block};
use crate::tensor::{DTensor, check_partial};
use shardwise_kernels::{contiguous, placeholder};

impl ShardedTensor {
    /// Converts this tensor to a [`DTensor`].
    ///
    /// Local and without a copy if every rank holds one shard and the shards are chunks or a grid. The layout is on the mesh of
    /// this tensor if its axes fit, otherwise on a mesh of the same ranks in the order of the shards. Any other tensor is
    /// resharded first, to chunks of its longest dimension, which is collective. The result is a leaf if
    /// [`requires_grad`](Self::requires_grad) is set.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [0, 1])?, (3, 2), DType::F32, &mesh)?;
    ///     let y = x.to_dtensor()?;
    ///     assert_eq!((y.device_mesh() == &mesh, y.placements()), (true, [Shard(0)].as_slice()));
    ///     assert_eq!(world.trace().records().len(), 0);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn to_dtensor(&self) -> Result<DTensor> {
        let site = Location::caller();
        let layout = self.metadata.layout_on(self.mesh.mesh());
        let layout = match layout {
            None => self.spec.layout(self.shape())?.filter(|layout| self.has_layout(layout)),
            found => found,
        };
        let tensor = match layout {
            Some(layout) => self.with_layout(layout)?,
            None => {
                let mesh = self.flat_mesh()?;
                let longest = (0..self.shape().len()).max_by_key(|&dim| self.shape()[dim]);
                let placement = longest.map_or(Placement::Replicate, |dim| Placement::Shard(dim as isize));
                self.moved_to(&mesh, Layout::new(mesh.mesh(), self.shape(), [placement])?, site)?
            }
        };
        Ok(if self.requires_grad() { tensor.requires_grad() } else { tensor })
    }

    /// Converts this tensor to a [`DTensor`] with the given placements on a mesh.
    ///
    /// Collective: all ranks of both meshes must call it. Communicates in one exchange, or nothing if every rank already holds
    /// its part. The result is a leaf if [`requires_grad`](Self::requires_grad) is set.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the placements do not fit the shape or the type.
    #[track_caller]
    pub fn to_dtensor_on(&self, mesh: &DeviceMesh, placements: impl IntoIterator<Item = Placement>) -> Result<DTensor> {
        let site = Location::caller();
        let layout = Layout::new(mesh.mesh(), self.shape(), placements)?;
        check_partial(&layout, self.dtype())?;
        let reduced = layout.reduced();
        let tensor = match mesh == &self.mesh && self.has_layout(&reduced) {
            true => self.with_layout(reduced)?,
            false => self.moved_to(mesh, reduced, site)?,
        };
        let tensor = tensor.to_layout_at(&layout, site)?;
        Ok(if self.requires_grad() { tensor.requires_grad() } else { tensor })
    }

    /// Converts a [`DTensor`] to shards. Of ranks that hold replicas, the first holds the shard.
    ///
    /// Local, unless the tensor is partial: then it is reduced first, which is collective. The autograd graph ends here.
    #[track_caller]
    pub fn from_dtensor(tensor: &DTensor) -> Result<ShardedTensor> {
        let reduced = tensor.reduced(Location::caller())?;
        let layout = reduced.layout();
        let spec = AnyShardingSpec::from_layout(layout)?;
        let metadata = spec.build_metadata(tensor.shape(), tensor.dtype())?;
        let (mesh, me) = (reduced.device_mesh(), reduced.device_mesh().world().rank());
        let boxes = layout.boxes_of(me);
        let part = |shard: &ShardMetadata| {
            let local = reduced.local();
            let found = boxes.iter().find(|b| b.global == shard.as_box());
            match found {
                // Without data, any placeholder of the shape will do.
                _ if mesh.world().is_dry() => {
                    Ok(placeholder(&TensorMeta { shape: shard.sizes.clone(), dtype: local.dtype() })?)
                }
                Some(owned) if boxes.len() > 1 => {
                    Ok(contiguous(&block(local, &owned.local_offsets, &shard.sizes)?.copy()?)?)
                }
                Some(_) => Ok(local.clone()),
                None => {
                    Ok(contiguous(&placeholder(&TensorMeta { shape: shard.sizes.clone(), dtype: local.dtype() })?)?)
                }
            }
        };
        let tensors = metadata.shards_of(me).map(part).collect::<Result<Vec<_>>>()?;
        Ok(Self::from_parts(mesh, metadata, spec, tensors))
    }

    /// A mesh of the same ranks with one axis.
    pub(super) fn flat_mesh(&self) -> Result<DeviceMesh> {
        if self.mesh.ndim() == 1 {
            return Ok(self.mesh.clone());
        }
        let mesh = Mesh::from_ranks([("shard", self.mesh.size())], self.mesh.ranks().to_vec())?;
        DeviceMesh::new(self.mesh.world(), mesh)
    }

    /// Whether every rank holds exactly its local part of a layout.
    fn has_layout(&self, layout: &Layout) -> bool {
        self.metadata.layout_on(layout.mesh()).as_ref() == Some(layout)
            || self.spec.layout(self.shape()).is_ok_and(|own| own.is_some_and(|own| is_equivalent(&own, layout)))
    }

    /// Wraps the one shard of this rank as the local part of a layout that the tensor already has.
    fn with_layout(&self, layout: Layout) -> Result<DTensor> {
        let mesh = match layout.mesh() == self.mesh.mesh() {
            true => self.mesh.clone(),
            false => DeviceMesh::new(self.mesh.world(), layout.mesh().clone())?,
        };
        let shape = layout.local_shape(mesh.world().rank());
        let held = self.shards.iter().find(|shard| shard.metadata.sizes == shape);
        let local = match held {
            Some(shard) => shard.tensor.clone(),
            None => placeholder(&TensorMeta { shape, dtype: self.dtype() })?,
        };
        Ok(DTensor::from_parts(&mesh, layout, local))
    }

    /// Moves the tensor to a layout on any mesh of the world, in one exchange among the ranks of both meshes.
    fn moved_to(&self, mesh: &DeviceMesh, layout: Layout, site: Site) -> Result<DTensor> {
        let me = mesh.world().rank();
        let meta = TensorMeta { shape: layout.local_shape(me), dtype: self.dtype() };
        let mut ranks = [self.mesh.ranks(), mesh.ranks()].concat();
        ranks.sort_unstable();
        ranks.dedup();
        if !ranks.contains(&me) {
            return Ok(DTensor::from_parts(mesh, layout, placeholder(&meta)?));
        }
        let group = mesh.world().subgroup(&ranks)?;
        let things = [("sharded tensor", &*self.metadata.to_string()), ("layout", &*layout.to_string())];
        agree(&group, &things, site)?;
        let exchange = BoxExchange::new(group, self.dtype(), |r| self.metadata.boxes_of(r), |r| layout.boxes_of(r));
        let local = exchange.assemble_with(&|offsets, sizes| box_view(&self.shards, offsets, sizes), &meta, site)?;
        Ok(DTensor::from_parts(mesh, layout, local))
    }
}

/// Whether two layouts give the same ranks the same parts, whatever the names of the axes.
fn is_equivalent(a: &Layout, b: &Layout) -> bool {
    let mesh = |layout: &Layout| (layout.mesh().shape().to_vec(), layout.mesh().ranks().to_vec());
    a.placements() == b.placements() && a.shard_orders() == b.shard_orders() && mesh(a) == mesh(b)
}
