//! `ChunkShardingSpec`: one dimension divided into chunks.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::device::RemoteDevice;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::spec::ShardingSpec;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, chunk};
use crate::mesh::Mesh;
use crate::placement::Placement;

/// Divides one dimension into chunks of `ceil(n / placements)` indices, one per placement.
///
/// Trailing chunks are smaller or empty; an empty one starts at the end of the dimension. Placements may be in any order, and
/// a rank may hold several chunks.
///
/// ```
/// # use shardwise::sharded::{ChunkShardingSpec, RemoteDevice};
/// # use shardwise::candle_core::DType;
/// let spec = ChunkShardingSpec::new(0, ["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"])?;
/// let metadata = spec.build_metadata(&[4, 2], DType::F32)?;
/// let lines: Vec<String> = metadata.shards.iter().map(ToString::to_string).collect();
/// assert_eq!(lines, ["[2, 2] at [0, 0] on rank:1/cpu", "[2, 2] at [2, 0] on rank:0/cpu", "[0, 2] at [4, 0] on rank:1/cpu"]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChunkShardingSpec {
    dim: isize,
    placements: Vec<RemoteDevice>,
}

impl ChunkShardingSpec {
    /// Creates a spec from placements such as `rank:0/cpu`. `dim` may be negative: -1 is the last dimension.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are no placements or one cannot be parsed.
    pub fn new<P: AsRef<str>>(dim: isize, placements: impl IntoIterator<Item = P>) -> Result<Self> {
        let placements = placements.into_iter().map(|p| p.as_ref().parse()).collect::<Result<Vec<_>>>()?;
        Self::on(dim, placements)
    }

    /// Creates a spec with one chunk on the CPU of each of these global ranks, in this order.
    pub fn over_ranks(dim: isize, ranks: impl IntoIterator<Item = usize>) -> Result<Self> {
        Self::on(dim, ranks.into_iter().map(RemoteDevice::cpu_of).collect())
    }

    /// Creates a spec with one chunk on each of these devices, in this order.
    pub fn on(dim: isize, placements: Vec<RemoteDevice>) -> Result<Self> {
        if placements.is_empty() {
            return Err(ErrorKind::Argument.error(
                "chunk spec",
                "no placements",
                "one per chunk",
                "list who holds the chunks",
            ));
        }
        Ok(ChunkShardingSpec { dim, placements })
    }

    /// The sharded dimension as it was passed in, possibly negative.
    pub fn dim(&self) -> isize {
        self.dim
    }

    /// The devices that hold the chunks, in the order of the chunks.
    pub fn placements(&self) -> &[RemoteDevice] {
        &self.placements
    }

    /// Lists the shards of a tensor of this size.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the tensor does not have the dimension.
    pub fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        if self.placements.is_empty() {
            return Err(ErrorKind::Argument.error(
                "chunk spec",
                "no placements",
                "one per chunk",
                "list who holds the chunks",
            ));
        }
        let dim = self.dim_of(size)?;
        let shard = |(i, placement): (usize, &RemoteDevice)| {
            let range = chunk(size[dim], self.placements.len(), i);
            let (mut offsets, mut sizes) = (vec![0; size.len()], size.to_vec());
            (offsets[dim], sizes[dim]) = (range.start, range.len());
            ShardMetadata { offsets, sizes, placement: Some(placement.clone()) }
        };
        let shards = self.placements.iter().enumerate().map(shard).collect();
        Ok(ShardedTensorMetadata { size: size.to_vec(), dtype, requires_grad: false, shards })
    }

    fn dim_of(&self, size: &[usize]) -> Result<usize> {
        let dim = if self.dim < 0 { self.dim + size.len() as isize } else { self.dim };
        if (0..size.len() as isize).contains(&dim) {
            return Ok(dim as usize);
        }
        let needed = format!("a dimension of a tensor of size {size:?}");
        Err(ErrorKind::Dimension { dim: self.dim, ndim: size.len() }.error(
            "chunk spec",
            format!("dimension {}", self.dim),
            needed,
            "shard a dimension that it has",
        ))
    }
}

impl ShardingSpec for ChunkShardingSpec {
    fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        ChunkShardingSpec::build_metadata(self, size, dtype)
    }

    /// The layout on a mesh of all ranks of the spec, some of which may hold nothing.
    fn layout(&self, size: &[usize]) -> Result<Option<Layout>> {
        self.dim_of(size)?;
        let ranks: Option<Vec<usize>> = self.placements.iter().map(RemoteDevice::rank).collect();
        // A mesh cannot list a rank twice.
        let mesh = ranks.and_then(|ranks| Mesh::from_ranks([("shard", ranks.len())], ranks).ok());
        mesh.map(|mesh| Layout::new(&mesh, size, [Placement::Shard(self.dim)])).transpose()
    }
}

impl fmt::Display for ChunkShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placements: Vec<String> = self.placements.iter().map(ToString::to_string).collect();
        write!(f, "chunks of dimension {} on {}", self.dim, placements.join(", "))
    }
}
