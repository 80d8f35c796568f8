//! The sharded tensor: metadata that every rank has, and the shards of this rank.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::TensorShard;
use super::spec::AnyShardingSpec;
use crate::comm::{DeviceMesh, Group, MemoryCharge, MemoryKind};
use crate::error::{ErrorKind, Result};
use crate::layout::{Runs, TensorMeta};
use crate::tensor::{ShownPart, TensorId, local_text, show_parts};
use shardwise_kernels::{check_cpu, check_dtype, convert, placeholder};

/// A tensor whose elements are divided into shards (boxes), any number of which each rank of a mesh holds.
///
/// Every rank knows the metadata of all shards and holds the elements of its own. Cloning is free: clones share their memory
/// until one of them is written to ([`init`](Self::init), [`fill`](Self::fill), [`copy_from`](Self::copy_from)). Collective
/// methods must be called by all ranks of the mesh, which is the tensor's process group; ranks outside it hold nothing and
/// skip them.
#[doc(alias = "_prepare_init")]
#[doc(alias = "_post_init")]
#[doc(alias = "__repr__")]
#[doc(alias = "__torch_dispatch__")]
#[derive(Clone)]
pub struct ShardedTensor {
    pub(super) id: TensorId,
    pub(super) mesh: DeviceMesh,
    pub(super) metadata: Arc<ShardedTensorMetadata>,
    pub(super) spec: AnyShardingSpec,
    /// The shards of this rank, in the order of the metadata.
    pub(super) shards: Vec<TensorShard>,
    /// Counts the bytes of the shards in the memory statistics of the world.
    pub(super) _charge: Arc<MemoryCharge>,
}

impl ShardedTensor {
    /// Combines metadata with the elements of this rank's shards, in the order of the metadata.
    pub(super) fn from_parts(
        mesh: &DeviceMesh,
        metadata: ShardedTensorMetadata,
        spec: AnyShardingSpec,
        tensors: Vec<Tensor>,
    ) -> ShardedTensor {
        let held = metadata.shards_of(mesh.world().rank()).cloned();
        let shards: Vec<TensorShard> =
            held.zip(tensors).map(|(metadata, tensor)| TensorShard { tensor, metadata }).collect();
        let elements: usize = shards.iter().map(|s| s.metadata.volume()).sum();
        let charge =
            mesh.world().memory().charge(elements * metadata.dtype.size_in_bytes(), MemoryKind::of_new_tensor());
        let (id, metadata) = (TensorId::next(), Arc::new(metadata));
        ShardedTensor { id, mesh: mesh.clone(), metadata, spec, shards, _charge: Arc::new(charge) }
    }

    /// Identity of this tensor on this rank, as a key for maps. Clones have the same id; [`init`](Self::init) and
    /// [`fill`](Self::fill) give the tensor a new one. Two tensors with equal elements have different ids. [`equal`](Self::equal) compares elements.
    ///
    /// ```
    /// use std::collections::HashMap;
    ///
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let zeros = || ShardedTensor::zeros(ChunkShardingSpec::over_ranks(0, [0, 1])?, 5, DType::F32, &mesh);
    ///     let (one, other) = (zeros()?, zeros()?);
    ///     let names = HashMap::from([(one.id(), "one"), (other.id(), "other")]);
    ///     assert_eq!(names[&one.clone().id()], "one");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "__hash__")]
    pub fn id(&self) -> TensorId {
        self.id
    }

    /// Shape, element type and shards of the whole tensor, the same on every rank.
    pub fn metadata(&self) -> &ShardedTensorMetadata {
        &self.metadata
    }

    /// The rule that assigns shards to ranks.
    pub fn sharding_spec(&self) -> &AnyShardingSpec {
        &self.spec
    }

    /// The mesh whose ranks hold the shards.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The group of all ranks of the mesh, for collectives other than those of this tensor.
    #[doc(alias = "_normalize_pg")]
    #[doc(alias = "_get_current_process_group")]
    pub fn process_group(&self) -> Result<Group> {
        self.mesh.whole_group()
    }

    /// Shape of the whole tensor.
    #[doc(alias = "size")]
    pub fn shape(&self) -> &[usize] {
        &self.metadata.size
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.metadata.dtype
    }

    /// Number of elements of the whole tensor.
    #[doc(alias = "numel")]
    pub fn elem_count(&self) -> usize {
        self.shape().iter().product()
    }

    /// The shards of this rank, in the order of the metadata; there may be none.
    pub fn local_shards(&self) -> &[TensorShard] {
        &self.shards
    }

    /// Returns a copy of the one shard of this rank. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if this rank holds no shard or several: see
    /// [`local_shards`](Self::local_shards).
    #[doc(alias = "collect_local_shard")]
    pub fn local_tensor(&self) -> Result<Tensor> {
        let [shard] = self.shards.as_slice() else {
            let found = format!("{} shards on rank {}", self.shards.len(), self.mesh.world().rank());
            return Err(ErrorKind::Argument.error("sharded tensor", found, "one shard", "use local_shards"));
        };
        shard.to_tensor()
    }

    /// Number of elements that a rank (by global number) holds.
    pub fn shard_size(&self, rank: usize) -> usize {
        self.metadata.shards_of(rank).map(ShardMetadata::volume).sum()
    }

    /// Whether [`to_dtensor`](Self::to_dtensor) returns a leaf, for which `backward` computes a gradient.
    pub fn requires_grad(&self) -> bool {
        self.metadata.requires_grad
    }

    /// Returns the same tensor with [`requires_grad`](Self::requires_grad) set or cleared. Local, no copy.
    #[must_use]
    pub fn with_requires_grad(&self, wanted: bool) -> ShardedTensor {
        let metadata = ShardedTensorMetadata { requires_grad: wanted, ..(*self.metadata).clone() };
        ShardedTensor { metadata: Arc::new(metadata), ..self.clone() }
    }

    /// Whether its memory is pinned for transfers to another device. Always `false`: candle does not pin memory.
    pub fn is_pinned(&self) -> bool {
        false
    }

    /// Returns the tensor on a device of every rank; only the CPU is supported. Local. The placements of the metadata name the
    /// device afterwards.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for any device but the CPU.
    #[doc(alias = "cuda")]
    #[doc(alias = "_get_preferred_device")]
    #[doc(alias = "_get_device_module")]
    pub fn to(&self, device: &Device) -> Result<ShardedTensor> {
        check_cpu(device)?;
        let placed = |shard: &ShardMetadata| ShardMetadata {
            placement: shard.placement.as_ref().map(|p| p.with_device(device)),
            ..shard.clone()
        };
        let shards: Vec<ShardMetadata> = self.metadata.shards.iter().map(placed).collect();
        if shards == self.metadata.shards {
            return Ok(self.clone());
        }
        let tensors = self.shards.iter().map(|s| Ok(s.tensor.to_device(device)?)).collect::<Result<Vec<_>>>()?;
        let spec = AnyShardingSpec::infer(&shards)?;
        let metadata = ShardedTensorMetadata { shards, ..(*self.metadata).clone() };
        Ok(Self::from_parts(&self.mesh, metadata, spec, tensors))
    }

    /// Returns the tensor on the CPU; see [`to`](Self::to).
    pub fn cpu(&self) -> Result<ShardedTensor> {
        self.to(&Device::Cpu)
    }

    /// Converts the elements to another type. Local.
    pub fn to_dtype(&self, dtype: DType) -> Result<ShardedTensor> {
        check_dtype(dtype)?;
        let one = |shard: &TensorShard| match self.mesh.world().is_dry() {
            true => Ok(placeholder(&TensorMeta::new(shard.tensor.dims(), dtype))?),
            false => Ok(convert(&shard.tensor, dtype)?),
        };
        let tensors = self.shards.iter().map(one).collect::<Result<Vec<_>>>()?;
        let metadata = ShardedTensorMetadata { dtype, ..(*self.metadata).clone() };
        Ok(Self::from_parts(&self.mesh, metadata, self.spec.clone(), tensors))
    }
}

impl fmt::Debug for ShardedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShardedTensor({})", self.metadata)
    }
}

impl fmt::Display for ShardedTensor {
    /// Writes type, shape, spec and the shards of this rank, abbreviated if they are large. Local;
    /// [`show`](ShardedTensor::show) returns the whole tensor.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}: {}", self.dtype().as_str(), self.shape(), self.spec)?;
        let rank = self.mesh.world().rank();
        if self.shards.is_empty() {
            return write!(f, "\nrank {rank} holds nothing");
        }
        for shard in &self.shards {
            let dry = self.mesh.world().is_dry();
            let text = if dry { "without data".to_string() } else { local_text(&shard.tensor) };
            write!(f, "\nrank {rank} holds {:?} at {:?}:\n{text}", shard.metadata.sizes, shard.metadata.offsets)?;
        }
        Ok(())
    }
}

impl ShardedTensor {
    /// Returns the whole tensor as text, abbreviated in the middle of large dimensions, and its spec: the same text on every
    /// rank.
    ///
    /// Collective: every rank of the mesh must call it. Communicates the elements that are shown.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) in a dry run, which has no values.
    #[track_caller]
    pub fn show(&self) -> Result<String> {
        if self.mesh.world().is_dry() {
            let fix = "dry runs know shapes, not values";
            return Err(ErrorKind::NoData.error("reader", "show in a dry run", "a run with data", fix));
        }
        let piece = |shard: &TensorShard| {
            let run = |(&start, &size): (&usize, &usize)| Runs::range(start..start + size);
            let indices = shard.metadata.offsets.iter().zip(&shard.metadata.sizes).map(run).collect();
            ShownPart { indices, tensor: shard.tensor.clone() }
        };
        let pieces: Vec<ShownPart> = self.shards.iter().map(piece).collect();
        let group = self.mesh.whole_group()?;
        let values = show_parts(&group, self.shape(), self.dtype(), &pieces, Location::caller())?;
        Ok(format!("{values}\n{} {:?}: {}", self.dtype().as_str(), self.shape(), self.spec))
    }
}
