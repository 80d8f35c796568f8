//! Resharding and gathering: methods that move shards between ranks.

use std::panic::Location;

use candle_core::Tensor;

use super::device::RemoteDevice;
use super::exchange::{check_ranks, moved};
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::agree;
use crate::error::{ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use shardwise_kernels::{own_copy, placeholder, same_memory};

impl ShardedTensor {
    /// Reshards this tensor to another spec on the same mesh.
    ///
    /// Collective: every rank of the mesh must call it. Communicates in one exchange only what a rank lacks; shards that a rank
    /// already holds share their memory with this tensor.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("all", 3)])?;
    ///     let x = ShardedTensor::rand(ChunkShardingSpec::over_ranks(0, [0, 1, 2])?, 7, DType::F64, &mesh)?;
    ///     let turned = x.reshard(ChunkShardingSpec::over_ranks(0, [1, 2, 0])?)?;
    ///     assert!(turned.equal(&x)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) on every rank if ranks pass different specs;
    /// [`Error::Invalid`](crate::Error::Invalid) if the spec does not fit the shape or the mesh.
    #[track_caller]
    #[doc(alias = "reshard_local_shard")]
    #[doc(alias = "reshuffle_local_shard")]
    pub fn reshard(&self, spec: impl Into<AnyShardingSpec>) -> Result<ShardedTensor> {
        self.reshard_at(spec.into(), Location::caller())
    }

    pub(super) fn reshard_at(&self, spec: AnyShardingSpec, site: Site) -> Result<ShardedTensor> {
        if self.mesh.contains(self.mesh.world().rank()) {
            let (from, to) = (self.metadata.to_string(), spec.to_string());
            agree(&self.process_group()?, &[("sharded tensor", &from), ("sharding spec", &to)], site)?;
        }
        let mut to = spec.build_metadata(self.shape(), self.dtype())?;
        to.requires_grad = self.requires_grad();
        check_ranks(&to, &self.mesh)?;
        let tensors = moved(&self.mesh, &self.metadata, &self.shards, &to, site)?;
        Ok(Self::from_parts(&self.mesh, to, spec, tensors))
    }

    /// Gathers the whole tensor on the rank at position `dst` of the mesh; all other ranks get `None`.
    ///
    /// Collective: every rank of the mesh must call it. Every shard is sent once, to that rank. Unlike in PyTorch no output is
    /// passed in: the result has the type of this tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) on every rank if `dst` is not a position on the mesh.
    #[track_caller]
    pub fn gather(&self, dst: usize) -> Result<Option<Tensor>> {
        let site = Location::caller();
        if self.mesh.contains(self.mesh.world().rank()) {
            let (from, to) = (self.metadata.to_string(), dst.to_string());
            agree(&self.process_group()?, &[("sharded tensor", &from), ("destination of gather", &to)], site)?;
        }
        let Some(&rank) = self.mesh.ranks().get(dst) else {
            let needed = format!("a position on the mesh, below {}", self.mesh.size());
            return Err(ErrorKind::Rank { rank: dst, size: self.mesh.size() }.error(
                "destination of gather",
                dst,
                needed,
                "0 is the first rank of the mesh",
            ));
        };
        let whole = self.replicated_on(&[rank])?;
        moved(&self.mesh, &self.metadata, &self.shards, &whole, site)?.pop().map(|t| self.unshared(t)).transpose()
    }

    /// Gathers the whole tensor on every rank of the mesh; a rank outside it gets a tensor without elements.
    ///
    /// Collective: every rank of the mesh must call it. Allocates the whole tensor on every rank.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        let site = Location::caller();
        if !self.mesh.contains(self.mesh.world().rank()) {
            return Ok(placeholder(&TensorMeta::new(0, self.dtype()))?);
        }
        agree(&self.process_group()?, &[("sharded tensor", &self.metadata.to_string())], site)?;
        let whole = self.replicated_on(self.mesh.ranks())?;
        self.unshared(moved(&self.mesh, &self.metadata, &self.shards, &whole, site)?.swap_remove(0))
    }

    /// Copies the whole tensor if it shares memory with a shard or another rank, because the program may write to it.
    fn unshared(&self, whole: Tensor) -> Result<Tensor> {
        let world = self.mesh.world();
        let shared = world.shares_memory() || self.shards.iter().any(|s| same_memory(s.storage(), &whole));
        if shared && !world.is_dry() { Ok(own_copy(&whole)?) } else { Ok(whole) }
    }

    /// Metadata with the whole tensor as one shard on each of some ranks.
    fn replicated_on(&self, ranks: &[usize]) -> Result<ShardedTensorMetadata> {
        let shard = |&rank: &usize| {
            ShardMetadata::new(vec![0; self.shape().len()], self.shape(), Some(RemoteDevice::cpu_of(rank)))
        };
        let shards = ranks.iter().map(shard).collect::<Result<Vec<_>>>()?;
        Ok(ShardedTensorMetadata { shards, ..(*self.metadata).clone() })
    }
}
