//! One shard of this rank: a tensor, and where it is in the whole.

use candle_core::Tensor;

use super::device::RemoteDevice;
use super::metadata::ShardMetadata;
use crate::error::{ErrorKind, Result};
use shardwise_kernels::{check_supported, own_copy, same_memory};

/// A box of a tensor that this rank holds.
#[derive(Debug, Clone)]
pub struct Shard {
    pub(super) tensor: Tensor,
    pub(super) metadata: ShardMetadata,
}

impl Shard {
    /// A tensor, and its place in the whole; an error unless size and device are as described.
    pub fn new(tensor: &Tensor, metadata: ShardMetadata) -> Result<Self> {
        check_supported(tensor)?;
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
        Ok(Shard { tensor: own_copy(tensor)?, metadata })
    }

    /// A tensor of a rank that begins at some place of the whole.
    pub fn from_tensor_and_offsets(tensor: &Tensor, offsets: impl Into<Vec<usize>>, rank: usize) -> Result<Self> {
        let placement = RemoteDevice::cpu_of(rank).with_device(tensor.device());
        Self::new(tensor, ShardMetadata::new(offsets, tensor.dims(), Some(placement))?)
    }

    /// A copy of the elements, in memory of its own: writing to it changes no sharded tensor.
    ///
    /// # Panics
    /// If there is no memory for the copy.
    pub fn tensor(&self) -> Tensor {
        self.handed_out().unwrap_or_else(|error| panic!("shard: {error}"))
    }

    /// The elements where they are, for reading only.
    pub(crate) fn held(&self) -> &Tensor {
        &self.tensor
    }

    /// Whether two shards are one and the same memory, as those of clones are.
    pub fn shares_memory(&self, other: &Shard) -> bool {
        same_memory(&self.tensor, &other.tensor)
    }

    /// The elements for a program. A placeholder of a dry run is one element wide and stays what it is.
    pub(super) fn handed_out(&self) -> Result<Tensor> {
        let placeholder = self.tensor.elem_count() > 1 && self.tensor.stride().iter().all(|&stride| stride == 0);
        if placeholder { Ok(self.tensor.clone()) } else { Ok(own_copy(&self.tensor)?) }
    }

    /// Its place in the whole, and who holds it.
    pub fn metadata(&self) -> &ShardMetadata {
        &self.metadata
    }
}
