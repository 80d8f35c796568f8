//! One-sided reads of shards of other ranks.

use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::Arc;

use candle_core::Tensor;

use super::metadata::ShardMetadata;
use super::tensor::ShardedTensor;
use crate::comm::ExposedTensors;
use crate::error::Result;
use crate::layout::TensorMeta;
use shardwise_kernels::own_copy;

/// A handle to a shard of another rank, which [`fetch`](Self::fetch) reads without that rank's participation.
#[derive(Clone)]
pub struct RemoteShard {
    metadata: ShardMetadata,
    meta: TensorMeta,
    /// Position of the owner in the group.
    owner: usize,
    /// Position of the shard among those of the owner.
    index: usize,
    exposed: Arc<dyn ExposedTensors>,
    /// Whether a read returns the memory of the owner itself, which then has to be copied.
    shared: bool,
}

impl RemoteShard {
    /// Offsets and sizes in the whole tensor, and the rank that holds it.
    pub fn metadata(&self) -> &ShardMetadata {
        &self.metadata
    }

    /// Returns a copy of the elements as they were when [`ShardedTensor::remote_shards`] was called. One-sided: the owner need
    /// not call anything.
    #[track_caller]
    pub fn fetch(&self) -> Result<Tensor> {
        let read = self.exposed.read(self.owner, self.index, &self.meta, Location::caller())?;
        if self.shared { Ok(own_copy(&read)?) } else { Ok(read) }
    }
}

impl ShardedTensor {
    /// Returns handles to the shards of all other ranks, by global rank.
    ///
    /// Collective: every rank of the mesh must call it. Communicates no elements; [`RemoteShard::fetch`] reads them later,
    /// one-sided. PyTorch does the same with RPC.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("all", 3)])?;
    ///     let x = ShardedTensor::ones(ChunkShardingSpec::over_ranks(0, [0, 1, 2])?, 5, DType::F32, &mesh)?;
    ///     let remote = x.remote_shards()?;
    ///     if world.rank() == 0 {
    ///         assert_eq!(remote[&2][0].metadata().sizes, [1]);
    ///         assert_eq!(remote[&2][0].fetch()?.to_vec1::<f32>()?, [1.0]);
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    #[doc(alias = "_init_rpc")]
    #[doc(alias = "_register_remote_shards")]
    pub fn remote_shards(&self) -> Result<BTreeMap<usize, Vec<RemoteShard>>> {
        let group = self.process_group()?;
        let tensors: Vec<Tensor> = self.shards.iter().map(|s| s.tensor.clone()).collect();
        let exposed: Arc<dyn ExposedTensors> = group.expose_at(&tensors, Location::caller())?.into();
        let of_rank = |(owner, &rank): (usize, &usize)| {
            let handle = |(index, shard): (usize, &ShardMetadata)| RemoteShard {
                metadata: shard.clone(),
                meta: TensorMeta { shape: shard.sizes.clone(), dtype: self.dtype() },
                owner,
                index,
                exposed: Arc::clone(&exposed),
                shared: group.shares_memory() && !group.is_dry(),
            };
            (rank, self.metadata.shards_of(rank).enumerate().map(handle).collect())
        };
        let others = group.ranks().iter().enumerate().filter(|(position, _)| *position != group.rank());
        Ok(others.map(of_rank).collect())
    }
}
