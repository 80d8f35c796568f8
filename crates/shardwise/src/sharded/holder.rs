//! Shards without a mesh.

use candle_core::Tensor;

use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::TensorShard;
use super::tensor::ShardedTensor;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use shardwise_kernels::Assembly;

/// Some shards of a tensor and the metadata of all of them, without ranks to communicate with: what a tool that reads or writes
/// the shards of several ranks holds.
///
/// ```
/// use shardwise::candle_core::{DType, Device, Tensor};
/// use shardwise::sharded::{ShardHolder, ShardMetadata, ShardedTensorMetadata, TensorShard};
///
/// let rows = |at: usize| ShardMetadata::new([at, 0], [1, 2], Some(format!("rank:{at}/cpu").parse()?));
/// let metadata =
///     ShardedTensorMetadata { size: vec![2, 2], dtype: DType::F32, requires_grad: false, shards: vec![rows(0)?, rows(1)?] };
/// let shard = |at: usize| TensorShard::new(&Tensor::full(at as f32, (1, 2), &Device::Cpu)?, rows(at)?);
/// let holder = ShardHolder::new(vec![shard(1)?, shard(0)?], metadata)?;
/// assert_eq!(holder.full_tensor()?.to_vec2::<f32>()?, [[0.0, 0.0], [1.0, 1.0]]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[doc(alias = "ShardedTensorBase")]
#[derive(Debug, Clone)]
pub struct ShardHolder {
    metadata: ShardedTensorMetadata,
    shards: Vec<TensorShard>,
}

impl ShardHolder {
    /// Holds shards of a tensor that its metadata describes. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless the metadata covers the tensor and lists every shard once, in its type.
    pub fn new(shards: Vec<TensorShard>, metadata: ShardedTensorMetadata) -> Result<Self> {
        metadata.check_covering()?;
        for (i, shard) in shards.iter().enumerate() {
            let is_listed = metadata.shards.contains(shard.metadata());
            let is_double = shards[..i].iter().any(|other| other.metadata() == shard.metadata());
            if !is_listed || is_double || shard.storage().dtype() != metadata.dtype {
                let found = format!("shard {} of type {}", shard.metadata(), shard.storage().dtype().as_str());
                let needed = format!("shards of type {} that the metadata lists, each once", metadata.dtype.as_str());
                return Err(ErrorKind::Argument.error("shards", found, needed, "pass shards of this tensor"));
            }
        }
        Ok(ShardHolder { metadata, shards })
    }

    /// The metadata of all shards, held or not.
    pub fn metadata(&self) -> &ShardedTensorMetadata {
        &self.metadata
    }

    /// The shards that are held.
    pub fn local_shards(&self) -> &[TensorShard] {
        &self.shards
    }

    /// Puts the whole tensor together. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if a shard with elements is not held.
    pub fn full_tensor(&self) -> Result<Tensor> {
        let held = |part: &ShardMetadata| self.shards.iter().any(|shard| shard.metadata() == part);
        if let Some(part) = self.metadata.shards.iter().find(|part| part.volume() > 0 && !held(part)) {
            let fix = "add the shard, or gather a `ShardedTensor`";
            return Err(ErrorKind::Argument.error("shards", format!("no shard {part}"), "all shards", fix));
        }
        let whole = Assembly::kept(TensorMeta { shape: self.metadata.size.clone(), dtype: self.metadata.dtype })?;
        for shard in self.shards.iter().filter(|shard| shard.metadata().volume() > 0) {
            // SAFETY: one thread; shards are disjoint.
            unsafe { whole.paste(shard.storage(), &shard.metadata().offsets) };
        }
        // SAFETY: the shards cover the tensor.
        Ok(unsafe { whole.finish() })
    }

    /// The sharded tensor of these shards on a mesh. Local: of every rank, the shards of that rank must be held there.
    ///
    /// # Errors
    /// As [`ShardedTensor::init_from_local_shards_and_global_metadata`].
    pub fn on_mesh(&self, mesh: &DeviceMesh) -> Result<ShardedTensor> {
        let rank = mesh.world().rank();
        let of_rank = |shard: &&TensorShard| shard.metadata().rank() == Some(rank);
        let mine: Vec<TensorShard> = self.shards.iter().filter(of_rank).cloned().collect();
        ShardedTensor::init_from_local_shards_and_global_metadata(&mine, self.metadata.clone(), mesh)
    }
}
