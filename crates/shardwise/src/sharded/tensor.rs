//! The sharded tensor: what every rank knows of it, and the shards of this one.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::Shard;
use super::spec::AnyShardingSpec;
use crate::comm::{DeviceMesh, Group, MemoryCharge};
use crate::error::{ErrorKind, Result};
use crate::layout::Runs;
use crate::tensor::{Piece, TensorId, local_text, show_pieces};
use shardwise_kernels::check_cpu;

/// A tensor cut into boxes that the ranks of a mesh hold, any number of them each, seen from one rank.
///
/// It is a value, as tensors are: cloning is free, and nothing but its own initialisers change it. Calls that communicate
/// are made by all ranks of the mesh, which is its process group; ranks outside hold nothing and skip them.
#[doc(alias = "ShardedTensorBase")]
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
    pub(super) shards: Vec<Shard>,
    /// Counts their memory.
    pub(super) _charge: Arc<MemoryCharge>,
}

impl ShardedTensor {
    /// Puts the parts together; the shards are those that the metadata gives this rank.
    pub(super) fn from_parts(
        mesh: &DeviceMesh,
        metadata: ShardedTensorMetadata,
        spec: AnyShardingSpec,
        tensors: Vec<Tensor>,
    ) -> ShardedTensor {
        let held = metadata.shards_of(mesh.world().rank()).cloned();
        let shards: Vec<Shard> = held.zip(tensors).map(|(metadata, tensor)| Shard { tensor, metadata }).collect();
        let elements: usize = shards.iter().map(|s| s.metadata.volume()).sum();
        let charge = mesh.world().memory().charge(elements * metadata.dtype.size_in_bytes());
        let (id, metadata) = (TensorId::next(), Arc::new(metadata));
        ShardedTensor { id, mesh: mesh.clone(), metadata, spec, shards, _charge: Arc::new(charge) }
    }

    /// Which tensor this is, on this rank: clones have one id; tensors that were computed apart, and a clone that was
    /// initialized anew, have different ones, equal elements or not. For maps by tensor; `equal` compares elements.
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

    /// What every rank knows of all shards.
    pub fn metadata(&self) -> &ShardedTensorMetadata {
        &self.metadata
    }

    /// How it is cut.
    pub fn sharding_spec(&self) -> &AnyShardingSpec {
        &self.spec
    }

    /// The mesh whose ranks hold it.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The group of these ranks.
    #[doc(alias = "_normalize_pg")]
    #[doc(alias = "_get_current_process_group")]
    pub fn process_group(&self) -> Result<Group> {
        self.mesh.whole_group()
    }

    /// Shape of the whole.
    #[doc(alias = "size")]
    pub fn shape(&self) -> &[usize] {
        &self.metadata.size
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.metadata.dtype
    }

    /// Number of elements of the whole.
    pub fn elem_count(&self) -> usize {
        self.shape().iter().product()
    }

    /// The shards of this rank; there may be none.
    pub fn local_shards(&self) -> &[Shard] {
        &self.shards
    }

    /// A copy of the one shard of this rank. Local: nothing is communicated.
    #[doc(alias = "collect_local_shard")]
    pub fn local_tensor(&self) -> Result<Tensor> {
        let [shard] = self.shards.as_slice() else {
            let found = format!("{} shards on rank {}", self.shards.len(), self.mesh.world().rank());
            return Err(ErrorKind::Argument.error("sharded tensor", found, "one shard", "use local_shards"));
        };
        shard.handed_out()
    }

    /// Number of elements that a rank holds.
    pub fn shard_size(&self, rank: usize) -> usize {
        self.metadata.shards_of(rank).map(ShardMetadata::volume).sum()
    }

    /// Whether gradients are wanted of it: a [`to_dtensor`](Self::to_dtensor) is then a leaf.
    pub fn requires_grad(&self) -> bool {
        self.metadata.requires_grad
    }

    /// The same tensor, of which gradients are wanted or not.
    #[must_use]
    pub fn with_requires_grad(&self, wanted: bool) -> ShardedTensor {
        let metadata = ShardedTensorMetadata { requires_grad: wanted, ..(*self.metadata).clone() };
        ShardedTensor { metadata: Arc::new(metadata), ..self.clone() }
    }

    /// Whether its memory is pinned for transfers to another device. Memory of candle's tensors never is.
    pub fn is_pinned(&self) -> bool {
        false
    }

    /// The same elements on a device of every rank, of which there is one: the CPU. Placements name it afterwards.
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

    /// The same elements on the CPU.
    pub fn cpu(&self) -> Result<ShardedTensor> {
        self.to(&Device::Cpu)
    }

    /// The same elements in another type.
    pub fn to_dtype(&self, dtype: DType) -> Result<ShardedTensor> {
        shardwise_kernels::check_dtype(dtype)?;
        let tensors = self.shards.iter().map(|s| Ok(s.tensor.to_dtype(dtype)?)).collect::<Result<Vec<_>>>()?;
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
    /// Type, shape and spec, and the shards of this rank, abbreviated if they are large. Local: nothing is communicated;
    /// [`show`](ShardedTensor::show) gives the whole.
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
    /// The whole tensor as text, elided in the middle of large dimensions, and its spec: the same text on every rank.
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
        let piece = |shard: &Shard| {
            let run = |(&start, &size): (&usize, &usize)| Runs::range(start..start + size);
            let held = shard.metadata.offsets.iter().zip(&shard.metadata.sizes).map(run).collect();
            Piece { held, tensor: shard.tensor.clone() }
        };
        let pieces: Vec<Piece> = self.shards.iter().map(piece).collect();
        let group = self.mesh.whole_group()?;
        let values = show_pieces(&group, self.shape(), self.dtype(), &pieces, Location::caller())?;
        Ok(format!("{values}\n{} {:?}: {}", self.dtype().as_str(), self.shape(), self.spec))
    }
}
