//! `EnumerableShardingSpec`: shards listed one by one.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::metadata::{ShardMetadata, ShardedTensorMetadata, check_disjoint};
use super::spec::ShardingSpec;
use crate::error::{Error, ErrorKind, Result};

/// Lists the shards one by one: any boxes on any ranks, as long as every element is in exactly one of them.
///
/// It fits tensors of one size only.
///
/// ```
/// # use shardwise::sharded::{EnumerableShardingSpec, ShardMetadata};
/// # use shardwise::candle_core::DType;
/// let shard = |offset, size, rank: &str| ShardMetadata::new([offset], [size], Some(rank.parse()?));
/// let spec = EnumerableShardingSpec::new([shard(0, 5, "rank:1/cpu")?, shard(5, 1, "rank:0/cpu")?])?;
/// assert!(spec.build_metadata(&[6], DType::F32).is_ok());
/// assert!(spec.build_metadata(&[7], DType::F32).unwrap_err().to_string().contains("6 elements in 2 shard(s)"));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<ShardMetadata>", into = "Vec<ShardMetadata>")]
pub struct EnumerableShardingSpec {
    shards: Vec<ShardMetadata>,
}

impl EnumerableShardingSpec {
    /// Creates a spec from its shards.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are none, or if two overlap.
    pub fn new(shards: impl Into<Vec<ShardMetadata>>) -> Result<Self> {
        let shards = shards.into();
        if shards.is_empty() {
            return Err(ErrorKind::Argument.error(
                "enumerable spec",
                "no shards",
                "one at least",
                "list all shards of the tensor",
            ));
        }
        check_disjoint(&shards)?;
        Ok(EnumerableShardingSpec { shards })
    }

    /// The shards in the order in which they were listed.
    pub fn shards(&self) -> &[ShardMetadata] {
        &self.shards
    }

    /// Lists the shards of a tensor of this size.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the shards cover a tensor of this size.
    pub fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        let shards = self.shards.clone();
        let metadata = ShardedTensorMetadata { size: size.to_vec(), dtype, requires_grad: false, shards };
        metadata.check_covering()?;
        Ok(metadata)
    }
}

impl TryFrom<Vec<ShardMetadata>> for EnumerableShardingSpec {
    type Error = Error;

    fn try_from(shards: Vec<ShardMetadata>) -> Result<Self> {
        Self::new(shards)
    }
}

impl From<EnumerableShardingSpec> for Vec<ShardMetadata> {
    fn from(spec: EnumerableShardingSpec) -> Self {
        spec.shards
    }
}

impl ShardingSpec for EnumerableShardingSpec {
    fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        EnumerableShardingSpec::build_metadata(self, size, dtype)
    }
}

impl fmt::Display for EnumerableShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "shards {}", self.shards.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
    }
}
