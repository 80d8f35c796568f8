//! One shard of this rank: its elements, and its offsets in the whole tensor.

use candle_core::Tensor;

use super::device::RemoteDevice;
use super::metadata::ShardMetadata;
use crate::error::{ErrorKind, Result};
use shardwise_kernels::{check_stored, own_copy, same_memory};

/// A shard that this rank holds: a box of the whole tensor, with its elements.
///
/// PyTorch calls it `Shard`, which is a [placement](crate::Placement) here.
#[doc(alias = "Shard")]
#[derive(Debug, Clone)]
pub struct TensorShard {
    pub(super) tensor: Tensor,
    pub(super) metadata: ShardMetadata,
}

impl TensorShard {
    /// Creates a shard from its elements, which are copied, and its position in the whole tensor. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) unless the tensor has the sizes and the device of the metadata.
    pub fn new(tensor: &Tensor, metadata: ShardMetadata) -> Result<Self> {
        check_stored(tensor)?;
        if tensor.dims() != metadata.sizes {
            let found = format!("a tensor of shape {:?}", tensor.dims());
            return Err(ErrorKind::Argument.error(
                "shard",
                found,
                format!("sizes {:?}", metadata.sizes),
                "describe the tensor",
            ));
        }
        if let Some(placement) = &metadata.placement {
            placement.check_holds(tensor.device())?;
        }
        Ok(TensorShard { tensor: own_copy(tensor)?, metadata })
    }

    /// Creates a shard of `rank` whose first element has the index `offsets` in the whole tensor. Local; copies the elements.
    pub fn from_tensor_and_offsets(tensor: &Tensor, offsets: impl Into<Vec<usize>>, rank: usize) -> Result<Self> {
        let placement = RemoteDevice::cpu_of(rank).with_device(tensor.device());
        Self::new(tensor, ShardMetadata::new(offsets, tensor.dims(), Some(placement))?)
    }

    /// Returns a copy of the elements. Writing to it does not change the sharded tensor.
    ///
    /// # Panics
    /// If the copy cannot be allocated.
    pub fn tensor(&self) -> Tensor {
        self.to_tensor().unwrap_or_else(|error| panic!("shard: {error}"))
    }

    /// The elements without a copy, for reading only.
    pub(crate) fn storage(&self) -> &Tensor {
        &self.tensor
    }

    /// Whether two shards share their memory, as those of clones do.
    pub fn shares_memory(&self, other: &TensorShard) -> bool {
        same_memory(&self.tensor, &other.tensor)
    }

    /// The elements as a tensor that the program may write to: a copy, except for the placeholder of a dry run (one element
    /// with stride 0), which is returned as it is because copying would allocate its whole size.
    pub(super) fn to_tensor(&self) -> Result<Tensor> {
        let placeholder = self.tensor.elem_count() > 1 && self.tensor.stride().iter().all(|&stride| stride == 0);
        if placeholder { Ok(self.tensor.clone()) } else { Ok(own_copy(&self.tensor)?) }
    }

    /// Offsets and sizes in the whole tensor, and the rank that holds it.
    pub fn metadata(&self) -> &ShardMetadata {
        &self.metadata
    }
}
