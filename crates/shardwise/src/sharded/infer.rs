//! Specs inferred from shards and layouts, and their serialized form.

use serde::{Deserialize, Deserializer, Serialize, Serializer, ser};

use super::chunk::ChunkShardingSpec;
use super::device::RemoteDevice;
use super::enumerable::EnumerableShardingSpec;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::spec::AnyShardingSpec;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, OwnedBox, chunk};

impl AnyShardingSpec {
    /// Infers the spec of some shards: a [`ChunkShardingSpec`] if they are chunks of one dimension, in any order, otherwise an
    /// [`EnumerableShardingSpec`]. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if there are no shards, or if two overlap.
    #[doc(alias = "_infer_sharding_spec_from_shards_metadata")]
    pub fn infer(shards: &[ShardMetadata]) -> Result<Self> {
        let enumerable = EnumerableShardingSpec::new(shards);
        // An empty chunk may start past the end of the tensor: PyTorch writes it so.
        match as_chunks(shards) {
            Some(chunks) => Ok(chunks.into()),
            None => enumerable.map(Into::into),
        }
    }

    /// Returns the spec of the shards of a layout. Of ranks that hold replicas, the first holds the shard. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the layout is partial.
    pub fn from_layout(layout: &Layout) -> Result<Self> {
        if layout.is_partial() {
            let needed = "a layout without partial axes";
            return Err(ErrorKind::Layout.error("layout", layout, needed, "redistribute the tensor first"));
        }
        if let ([axis], [placement]) = (layout.mesh().axes(), layout.placements())
            && let Some(dim) = placement.chunk_dim().filter(|_| axis.size > 1)
        {
            let ranks = layout.mesh().ranks().iter().copied();
            return ChunkShardingSpec::over_ranks(dim as isize, ranks).map(Into::into);
        }
        let shard = |owned: OwnedBox| ShardMetadata {
            offsets: owned.global.offsets,
            sizes: owned.global.sizes,
            placement: Some(RemoteDevice::cpu_of(owned.rank)),
        };
        let mut shards: Vec<ShardMetadata> = layout.primary_boxes().map(shard).collect();
        if shards.is_empty() {
            let placement = Some(RemoteDevice::cpu_of(layout.mesh().ranks()[0]));
            shards.push(ShardMetadata::new(vec![0; layout.shape().len()], layout.shape(), placement)?);
        }
        EnumerableShardingSpec::new(shards).map(Into::into)
    }

    /// A spec with the same shards that can be serialized: a custom spec is replaced by the list of its shards.
    pub(super) fn storable(&self, metadata: &ShardedTensorMetadata) -> Result<Self> {
        match StoredSpec::of(self) {
            Some(_) => Ok(self.clone()),
            None => AnyShardingSpec::infer(&metadata.shards),
        }
    }
}

/// The chunk spec that has these shards, if there is one.
fn as_chunks(shards: &[ShardMetadata]) -> Option<ChunkShardingSpec> {
    let ndim = shards.first()?.offsets.len();
    if shards.iter().any(|s| s.offsets.len() != ndim) {
        return None;
    }
    let is_sharded = |dim: &usize| shards.iter().any(|s| s.offsets[*dim] > 0);
    let mut sharded = (0..ndim).filter(is_sharded);
    let (dim, None) = (sharded.next()?, sharded.next()) else { return None };
    // The chunks of one rank must be listed in order: a chunk spec would list them so, and the order of local shards counts.
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
        let others = (0..ndim).all(|d| d == dim || shard.sizes[d] == sorted[0].sizes[d]);
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

/// The specs that can be serialized.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum StoredSpec {
    Chunk(ChunkShardingSpec),
    Enumerable(EnumerableShardingSpec),
}

impl StoredSpec {
    fn of(spec: &AnyShardingSpec) -> Option<StoredSpec> {
        let chunk = spec.downcast_ref().cloned().map(StoredSpec::Chunk);
        chunk.or_else(|| spec.downcast_ref().cloned().map(StoredSpec::Enumerable))
    }
}

impl Serialize for AnyShardingSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stored = StoredSpec::of(self).ok_or_else(|| {
            ser::Error::custom(format!("the custom spec {self} cannot be serialized: store the list of its shards"))
        })?;
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for AnyShardingSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match StoredSpec::deserialize(deserializer)? {
            StoredSpec::Chunk(spec) => spec.into(),
            StoredSpec::Enumerable(spec) => spec.into(),
        })
    }
}
