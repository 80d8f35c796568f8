//! Sharding specs: rules that say which shards a tensor of any size is cut into, and who holds them. Pure arithmetic.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::device::RemoteDevice;
use super::metadata::{ShardMetadata, ShardedTensorMetadata, check_disjoint};
use crate::error::{Error, Result};
use crate::layout::{Layout, chunk};
use crate::mesh::Mesh;
use crate::placement::Placement;

/// One dimension cut into chunks of `ceil(n / placements)`, one per placement; trailing chunks are smaller or empty, and
/// an empty one begins at the end of the dimension. Placements may be in any order, and a rank may occur more than once.
///
/// ```
/// # use shardwise::sharded::{ChunkShardingSpec, RemoteDevice};
/// # use candle_core::DType;
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
    /// Chunks of a dimension, which may count from the last one (-1), on devices such as `rank:0/cpu`.
    pub fn new<P: AsRef<str>>(dim: isize, placements: impl IntoIterator<Item = P>) -> Result<Self> {
        let placements = placements.into_iter().map(|p| p.as_ref().parse()).collect::<Result<Vec<_>>>()?;
        Self::on(dim, placements)
    }

    /// Chunks of a dimension on the CPUs of some ranks.
    pub fn over_ranks(dim: isize, ranks: impl IntoIterator<Item = usize>) -> Result<Self> {
        Self::on(dim, ranks.into_iter().map(RemoteDevice::cpu_of).collect())
    }

    /// Chunks of a dimension on some devices.
    pub fn on(dim: isize, placements: Vec<RemoteDevice>) -> Result<Self> {
        if placements.is_empty() {
            return Err(Error::invalid("chunk spec", "no placements", "one per chunk", "list who holds the chunks"));
        }
        Ok(ChunkShardingSpec { dim, placements })
    }

    /// The dimension, as it was given.
    pub fn dim(&self) -> isize {
        self.dim
    }

    /// Who holds the chunks, in order of the chunks.
    pub fn placements(&self) -> &[RemoteDevice] {
        &self.placements
    }

    /// The shards of a tensor of this size.
    pub fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        if self.placements.is_empty() {
            return Err(Error::invalid("chunk spec", "no placements", "one per chunk", "list who holds the chunks"));
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
        Err(Error::invalid("chunk spec", format!("dimension {}", self.dim), needed, "cut a dimension that it has"))
    }
}

/// The shards one by one: any boxes on any ranks, as long as they fill the tensor and do not overlap.
///
/// ```
/// # use shardwise::sharded::{EnumerableShardingSpec, ShardMetadata};
/// # use candle_core::DType;
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
    /// These shards.
    pub fn new(shards: impl Into<Vec<ShardMetadata>>) -> Result<Self> {
        let shards = shards.into();
        if shards.is_empty() {
            return Err(Error::invalid(
                "enumerable spec",
                "no shards",
                "one at least",
                "list all shards of the tensor",
            ));
        }
        check_disjoint(&shards)?;
        Ok(EnumerableShardingSpec { shards })
    }

    /// The shards.
    pub fn shards(&self) -> &[ShardMetadata] {
        &self.shards
    }

    /// The shards of a tensor of this size; an error unless they fill it.
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

/// How a tensor is cut into shards, and who holds them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShardingSpec {
    /// Chunks of one dimension.
    Chunk(ChunkShardingSpec),
    /// Shards one by one.
    Enumerable(EnumerableShardingSpec),
}

impl ShardingSpec {
    /// The shards of a tensor of this size.
    pub fn build_metadata(&self, size: &[usize], dtype: DType) -> Result<ShardedTensorMetadata> {
        match self {
            ShardingSpec::Chunk(spec) => spec.build_metadata(size, dtype),
            ShardingSpec::Enumerable(spec) => spec.build_metadata(size, dtype),
        }
    }

    /// The spec that gives these shards: chunks if that is what they are, in whatever order, else one by one.
    pub fn infer(shards: &[ShardMetadata]) -> Result<Self> {
        let one_by_one = EnumerableShardingSpec::new(shards);
        // An empty chunk that begins past the end of the tensor, as some tools write it, is an empty chunk.
        match as_chunks(shards) {
            Some(chunks) => Ok(ShardingSpec::Chunk(chunks)),
            None => one_by_one.map(ShardingSpec::Enumerable),
        }
    }

    /// The shards of a layout on a mesh. Where ranks hold the same, one of them has the shard: the first.
    pub fn from_layout(layout: &Layout) -> Result<Self> {
        if layout.is_partial() {
            let needed = "a layout without pending reductions";
            return Err(Error::invalid("layout", layout, needed, "redistribute the tensor first"));
        }
        if let ([axis], [Placement::Shard(dim)]) = (layout.mesh().axes(), layout.placements())
            && axis.size > 1
        {
            return ChunkShardingSpec::over_ranks(*dim, layout.mesh().ranks().iter().copied()).map(ShardingSpec::Chunk);
        }
        let shard = |owned: crate::layout::OwnedBox| ShardMetadata {
            offsets: owned.global.offsets,
            sizes: owned.global.sizes,
            placement: Some(RemoteDevice::cpu_of(owned.rank)),
        };
        let mut shards: Vec<ShardMetadata> = layout.primary_boxes().map(shard).collect();
        if shards.is_empty() {
            let placement = Some(RemoteDevice::cpu_of(layout.mesh().ranks()[0]));
            shards.push(ShardMetadata::new(vec![0; layout.shape().len()], layout.shape(), placement)?);
        }
        EnumerableShardingSpec::new(shards).map(ShardingSpec::Enumerable)
    }

    /// The layout of a tensor of this size, on a mesh of the ranks that the spec names, if every rank holds one shard
    /// and the shards are chunks or a grid.
    pub fn layout(&self, size: &[usize]) -> Result<Option<Layout>> {
        let metadata = self.build_metadata(size, DType::F32)?;
        if let ShardingSpec::Chunk(spec) = self {
            let ranks: Option<Vec<usize>> = spec.placements.iter().map(RemoteDevice::rank).collect();
            // A rank that occurs twice makes no mesh.
            let mesh = ranks.and_then(|ranks| Mesh::from_ranks([("shard", ranks.len())], ranks).ok());
            return mesh.map(|mesh| Layout::new(&mesh, size, [Placement::Shard(spec.dim)])).transpose();
        }
        Ok(metadata.layout())
    }
}

/// The chunk spec that gives these shards, if there is one.
fn as_chunks(shards: &[ShardMetadata]) -> Option<ChunkShardingSpec> {
    let dims = shards.first()?.offsets.len();
    if shards.iter().any(|s| s.offsets.len() != dims) {
        return None;
    }
    let moved = |dim: usize| shards.iter().any(|s| s.offsets[dim] > 0);
    let mut moving = (0..dims).filter(|&dim| moved(dim));
    let (dim, None) = (moving.next()?, moving.next()) else { return None };
    // The chunks of a rank come in order, as a chunk spec lists them; else a spec would not give back the same list.
    let in_order = |i: usize| {
        let mut before = shards[..i].iter().filter(|s| s.placement == shards[i].placement);
        before.all(|s| s.offsets[dim] <= shards[i].offsets[dim])
    };
    if !(0..shards.len()).all(in_order) {
        return None;
    }
    let mut sorted: Vec<&ShardMetadata> = shards.iter().collect();
    sorted.sort_by_key(|s| s.offsets[dim]);
    let size = sorted.iter().try_fold(0usize, |sum, s| sum.checked_add(s.sizes[dim]))?;
    let length = size.div_ceil(sorted.len());
    let fits = |(i, shard): (usize, &&ShardMetadata)| {
        let expected = chunk(size, sorted.len(), i);
        let others = (0..dims).all(|d| d == dim || shard.sizes[d] == sorted[0].sizes[d]);
        let begins = shard.offsets[dim] == expected.start
            || expected.is_empty() && shard.offsets[dim] == length.saturating_mul(i);
        others && begins && shard.sizes[dim] == expected.len()
    };
    if !sorted.iter().enumerate().all(fits) {
        return None;
    }
    let placements: Option<Vec<RemoteDevice>> = sorted.iter().map(|s| s.placement.clone()).collect();
    ChunkShardingSpec::on(dim as isize, placements?).ok()
}

impl From<ChunkShardingSpec> for ShardingSpec {
    fn from(spec: ChunkShardingSpec) -> Self {
        ShardingSpec::Chunk(spec)
    }
}

impl From<EnumerableShardingSpec> for ShardingSpec {
    fn from(spec: EnumerableShardingSpec) -> Self {
        ShardingSpec::Enumerable(spec)
    }
}

impl fmt::Display for ShardingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |parts: Vec<String>| parts.join(", ");
        match self {
            ShardingSpec::Chunk(spec) => {
                let placements = spec.placements.iter().map(ToString::to_string).collect();
                write!(f, "chunks of dimension {} on {}", spec.dim, list(placements))
            }
            ShardingSpec::Enumerable(spec) => {
                write!(f, "shards {}", list(spec.shards.iter().map(ToString::to_string).collect()))
            }
        }
    }
}
