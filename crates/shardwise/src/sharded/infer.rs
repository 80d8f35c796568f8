//! Specs found from shards and layouts, and their stored form.

use serde::{Deserialize, Deserializer, Serialize, Serializer, ser};

use super::chunk::ChunkShardingSpec;
use super::device::RemoteDevice;
use super::enumerable::EnumerableShardingSpec;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::spec::AnyShardingSpec;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, OwnedBox, chunk};

impl AnyShardingSpec {
    /// The spec that gives these shards: chunks if that is what they are, in whatever order, else one by one.
    #[doc(alias = "_infer_sharding_spec_from_shards_metadata")]
    pub fn infer(shards: &[ShardMetadata]) -> Result<Self> {
        let one_by_one = EnumerableShardingSpec::new(shards);
        // An empty chunk that begins past the end of the tensor, as some tools write it, is an empty chunk.
        match as_chunks(shards) {
            Some(chunks) => Ok(chunks.into()),
            None => one_by_one.map(Into::into),
        }
    }

    /// The shards of a layout on a mesh. Where ranks hold the same, one of them has the shard: the first.
    pub fn from_layout(layout: &Layout) -> Result<Self> {
        if layout.is_partial() {
            let needed = "a layout without pending reductions";
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

    /// A spec with a stored form that gives the same shards: a spec of the program is replaced by its shards.
    pub(super) fn storable(&self, metadata: &ShardedTensorMetadata) -> Result<Self> {
        match Stored::of(self) {
            Some(_) => Ok(self.clone()),
            None => AnyShardingSpec::infer(&metadata.shards),
        }
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

/// The specs that have a stored form.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Stored {
    Chunk(ChunkShardingSpec),
    Enumerable(EnumerableShardingSpec),
}

impl Stored {
    fn of(spec: &AnyShardingSpec) -> Option<Stored> {
        let chunk = spec.downcast_ref().cloned().map(Stored::Chunk);
        chunk.or_else(|| spec.downcast_ref().cloned().map(Stored::Enumerable))
    }
}

impl Serialize for AnyShardingSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let stored = Stored::of(self).ok_or_else(|| {
            ser::Error::custom(format!(
                "the spec {self} of this program has no stored form: store the shards that it gives"
            ))
        })?;
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for AnyShardingSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(match Stored::deserialize(deserializer)? {
            Stored::Chunk(spec) => spec.into(),
            Stored::Enumerable(spec) => spec.into(),
        })
    }
}
