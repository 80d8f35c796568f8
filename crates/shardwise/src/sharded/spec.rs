//! Sharding specs: rules that divide a tensor of any size into shards and assign them to ranks.

use std::any::Any;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::exchange::{ShardTensorRequest, distribute};
use super::metadata::ShardedTensorMetadata;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;

/// A rule that divides a tensor of any size into shards and assigns them to ranks: chunks of a dimension
/// ([`ChunkShardingSpec`](super::ChunkShardingSpec)), listed boxes
/// ([`EnumerableShardingSpec`](super::EnumerableShardingSpec)), or a custom spec.
///
/// Every function that takes a spec accepts any type with this trait. Ranks compare specs by their `Display` text, so it must
/// state everything that matters. [`register_spec_op`](super::register_spec_op) adds operators for the tensors of a spec.
///
/// ```
/// use std::fmt;
///
/// use shardwise::prelude::*;
/// use shardwise::sharded::{RemoteDevice, ShardMetadata, ShardedTensor, ShardedTensorMetadata, ShardingSpec};
///
/// /// The first `rows` rows on rank 0, the remaining rows on rank 1.
/// #[derive(Debug)]
/// struct SplitAt {
///     rows: usize,
/// }
///
/// impl fmt::Display for SplitAt {
///     fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
///         write!(f, "{} rows on rank 0, the remaining rows on rank 1", self.rows)
///     }
/// }
///
/// impl ShardingSpec for SplitAt {
///     fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
///         let first = self.rows.min(size[0]);
///         let shard = |rank: usize, start: usize, rows: usize| {
///             let offsets = [vec![start], vec![0; size.len() - 1]].concat();
///             ShardMetadata::new(offsets, [&[rows], &size[1..]].concat(), Some(RemoteDevice::cpu_of(rank)))
///         };
///         let shards = vec![shard(0, 0, first)?, shard(1, first, size[0] - first)?];
///         Ok(ShardedTensorMetadata { size: size.to_vec(), dtype, requires_grad: false, shards })
///     }
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("all", 2)])?;
///     let x = ShardedTensor::ones(SplitAt { rows: 3 }, (4, 2), DType::F32, &mesh)?;
///     assert_eq!(x.local_tensor()?.dims(), [[3, 2], [1, 2]][world.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait ShardingSpec: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// Lists the shards of a tensor of this size. Every element must be in exactly one shard. Local.
    fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata>;

    /// Returns the layout of a tensor of this size on a mesh of the spec's ranks, if every rank holds one shard and the shards
    /// are chunks or a grid. With it, conversion to a `DTensor` needs no copy. Local.
    fn layout(&self, size: &[usize]) -> Result<Option<Layout>> {
        Ok(self.build_metadata(size, DType::F32)?.layout())
    }

    /// Returns this rank's shards of a whole tensor, in the order of the metadata. [`shard_tensor`](super::shard_tensor()) calls
    /// it on every rank of the mesh, after ranks have compared their specs. The default is [`distribute`].
    fn shard(&self, request: &ShardTensorRequest<'_>) -> Result<Vec<Tensor>> {
        distribute(request)
    }
}

/// A [`ShardingSpec`] of any type, as a [`ShardedTensor`](super::ShardedTensor) stores it. Two are equal if type and `Display`
/// text are.
#[derive(Clone)]
pub struct AnyShardingSpec(pub(super) Arc<dyn ShardingSpec>);

impl AnyShardingSpec {
    /// Returns the spec if it is of type `S`.
    pub fn downcast_ref<S: ShardingSpec>(&self) -> Option<&S> {
        let spec: &dyn Any = &*self.0;
        spec.downcast_ref()
    }

    /// Lists the shards of a tensor of this size, and checks them. Local.
    ///
    /// # Errors
    /// The error of the spec, or [`Error::Invalid`](crate::Error::Invalid) if its metadata has another size or type, or if
    /// an element is in no shard or in two.
    pub fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        let metadata = self.0.build_metadata(size, dtype)?;
        if metadata.size != size || metadata.dtype != dtype {
            let found = format!("{} {:?} from the spec {self}", metadata.dtype.as_str(), metadata.size);
            let needed = format!("{} {size:?}, as was asked for", dtype.as_str());
            return Err(ErrorKind::Argument.error("sharding spec", found, needed, "correct its build_metadata"));
        }
        metadata.check_covering()?;
        Ok(metadata)
    }

    /// Returns the layout of a tensor of this size, if there is one; see [`ShardingSpec::layout`].
    pub fn layout(&self, size: &[usize]) -> Result<Option<Layout>> {
        self.0.layout(size)
    }
}

impl<S: ShardingSpec> From<S> for AnyShardingSpec {
    fn from(spec: S) -> Self {
        AnyShardingSpec(Arc::new(spec))
    }
}

impl PartialEq for AnyShardingSpec {
    fn eq(&self, other: &Self) -> bool {
        let (mine, theirs): (&dyn Any, &dyn Any) = (&*self.0, &*other.0);
        mine.type_id() == theirs.type_id() && self.to_string() == other.to_string()
    }
}

impl Eq for AnyShardingSpec {}

impl Hash for AnyShardingSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.to_string().hash(state);
    }
}

impl fmt::Debug for AnyShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for AnyShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&*self.0, f)
    }
}
