//! Sharded tensors: any number of boxes per rank, anywhere in the tensor.
//!
//! A [`ShardedTensor`] knows its shards one by one, where a [`DTensor`](crate::tensor::DTensor) follows a rule. The two
//! share their machinery and convert into each other, without a copy where the shards are regular.
//!
//! ```
//! use shardwise::prelude::*;
//! use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
//!
//! launch(2, |world| {
//!     let mesh = world.mesh([("all", 2)])?;
//!     // rank 1 has the first and the third chunk of the rows
//!     let rows = ChunkShardingSpec::new(0, ["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])?;
//!     let x = ShardedTensor::randn(rows, (5, 4), DType::F32, &mesh)?;
//!     assert_eq!(x.local_shards().len(), [1, 2][world.rank()]);
//!     let columns = ChunkShardingSpec::over_ranks(1, [0, 1])?;
//!     let y = x.reshard(columns)?;
//!     assert_eq!(y.local_tensor()?.dims(), [5, 2]);
//!     assert!(x.equal(&y)?);
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod construct;
mod convert;
mod device;
mod fill;
mod metadata;
mod movement;
mod operators;
mod remote;
mod spec;
mod state;

pub use construct::shard_tensor;
pub use device::RemoteDevice;
pub use metadata::{ShardMetadata, ShardedTensorMetadata};
pub use operators::{call_sharded_op, with_sharded_op};
pub use remote::RemoteShard;
pub use spec::{ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec};
pub use state::ShardedTensorState;

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use crate::comm::{Charge, DeviceMesh, Group};
use crate::error::{Error, Result};
use crate::local::{check_served, dense, immutable};

/// A box of a tensor that this rank holds.
#[derive(Debug, Clone)]
pub struct Shard {
    tensor: Tensor,
    metadata: ShardMetadata,
}

impl Shard {
    /// A tensor, and where it lies in the whole; an error unless size and device are as described.
    pub fn new(tensor: &Tensor, metadata: ShardMetadata) -> Result<Self> {
        check_served(tensor)?;
        if tensor.dims() != metadata.sizes {
            let found = format!("a tensor of shape {:?}", tensor.dims());
            return Err(Error::invalid("shard", found, format!("sizes {:?}", metadata.sizes), "describe the tensor"));
        }
        if let Some(placement) = &metadata.placement {
            placement.check_holds(tensor.device())?;
        }
        Ok(Shard { tensor: dense(&immutable(tensor)?)?, metadata })
    }

    /// A tensor of a rank that begins at some place of the whole.
    pub fn from_tensor_and_offsets(tensor: &Tensor, offsets: impl Into<Vec<usize>>, rank: usize) -> Result<Self> {
        let placement = RemoteDevice::cpu_of(rank).with_device(tensor.device());
        Self::new(tensor, ShardMetadata::new(offsets, tensor.dims(), Some(placement))?)
    }

    /// The elements.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Where it lies.
    pub fn metadata(&self) -> &ShardMetadata {
        &self.metadata
    }
}

/// A tensor cut into boxes that the ranks of a mesh hold, any number of them each, seen from one rank.
///
/// It is a value, as tensors are: cloning is free, and nothing but its own initialisers change it. Calls that communicate
/// are made by all ranks of the mesh, which is its process group; ranks outside hold nothing and skip them.
#[derive(Clone)]
pub struct ShardedTensor {
    mesh: DeviceMesh,
    metadata: Arc<ShardedTensorMetadata>,
    spec: ShardingSpec,
    /// The shards of this rank, in the order of the metadata.
    shards: Vec<Shard>,
    /// Counts their memory.
    _charge: Arc<Charge>,
}

impl ShardedTensor {
    /// Puts the parts together; the shards are those that the metadata gives this rank.
    fn from_parts(
        mesh: &DeviceMesh,
        metadata: ShardedTensorMetadata,
        spec: ShardingSpec,
        tensors: Vec<Tensor>,
    ) -> ShardedTensor {
        let held = metadata.shards_of(mesh.world().rank()).cloned();
        let shards: Vec<Shard> = held.zip(tensors).map(|(metadata, tensor)| Shard { tensor, metadata }).collect();
        let elements: usize = shards.iter().map(|s| s.metadata.volume()).sum();
        let charge = mesh.world().memory().charge(elements * metadata.dtype.size_in_bytes());
        ShardedTensor { mesh: mesh.clone(), metadata: Arc::new(metadata), spec, shards, _charge: Arc::new(charge) }
    }

    /// What every rank knows of all shards.
    pub fn metadata(&self) -> &ShardedTensorMetadata {
        &self.metadata
    }

    /// How it is cut.
    pub fn sharding_spec(&self) -> &ShardingSpec {
        &self.spec
    }

    /// The mesh whose ranks hold it.
    pub fn device_mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The group of these ranks.
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

    /// The tensor of the one shard of this rank.
    pub fn local_tensor(&self) -> Result<&Tensor> {
        let [shard] = self.shards.as_slice() else {
            let found = format!("{} shards on rank {}", self.shards.len(), self.mesh.world().rank());
            return Err(Error::invalid("sharded tensor", found, "one shard", "use local_shards"));
        };
        Ok(&shard.tensor)
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

    /// The same elements on a device of every rank. Placements name the new device.
    pub fn to(&self, device: &Device) -> Result<ShardedTensor> {
        let placed = |shard: &ShardMetadata| ShardMetadata {
            placement: shard.placement.as_ref().map(|p| p.with_device(device)),
            ..shard.clone()
        };
        let shards: Vec<ShardMetadata> = self.metadata.shards.iter().map(placed).collect();
        if shards == self.metadata.shards {
            return Ok(self.clone());
        }
        let tensors = self.shards.iter().map(|s| Ok(s.tensor.to_device(device)?)).collect::<Result<Vec<_>>>()?;
        let spec = match &self.spec {
            ShardingSpec::Chunk(spec) => {
                let placements = spec.placements().iter().map(|p| p.with_device(device)).collect();
                ChunkShardingSpec::on(spec.dim(), placements)?.into()
            }
            ShardingSpec::Enumerable(_) => EnumerableShardingSpec::new(shards.clone())?.into(),
        };
        let metadata = ShardedTensorMetadata { shards, ..(*self.metadata).clone() };
        Ok(Self::from_parts(&self.mesh, metadata, spec, tensors))
    }

    /// The same elements on the CPU.
    pub fn cpu(&self) -> Result<ShardedTensor> {
        self.to(&Device::Cpu)
    }

    /// The same elements in another type.
    pub fn to_dtype(&self, dtype: DType) -> Result<ShardedTensor> {
        crate::local::check_dtype(dtype)?;
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
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}: {}", self.dtype().as_str(), self.shape(), self.spec)
    }
}
