//! Serializable state of one rank's shards, which any number of ranks can load.

use std::panic::Location;

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::device::RemoteDevice;
use super::exchange::{check_ranks, moved};
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::TensorShard;
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::{DeviceMesh, gather_texts};
use crate::error::{Error, ErrorKind, Result};
use shardwise_kernels::{bytes_of, check_dtype};

/// Serializable state of a sharded tensor on one rank: the elements of its shards, and the metadata of all shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardedTensorState {
    /// All shards of the tensor.
    pub metadata: ShardedTensorMetadata,
    /// The spec of the tensor. A custom spec is stored as the list of its shards.
    pub spec: AnyShardingSpec,
    /// Per shard of this rank its position in `metadata.shards`, and its elements: row-major, little-endian.
    pub shards: Vec<(usize, Vec<u8>)>,
}

impl ShardedTensor {
    /// Returns the state of this rank, for [`load_with_process_group`](Self::load_with_process_group). Local; copies the shards.
    ///
    /// # Errors
    /// [`Error::Invalid`] in a dry run, which has no values.
    #[doc(alias = "__getstate__")]
    pub fn state(&self) -> Result<ShardedTensorState> {
        if self.mesh.world().is_dry() {
            let fix = "dry runs know shapes, not values";
            return Err(ErrorKind::NoData.error("sharded tensor", "state in a dry run", "a run with data", fix));
        }
        let rank = self.mesh.world().rank();
        let positions = (0..self.metadata.shards.len()).filter(|&i| self.metadata.shards[i].rank() == Some(rank));
        let shards = positions.zip(&self.shards).map(|(i, shard)| Ok((i, bytes_of(&shard.tensor)?)));
        Ok(ShardedTensorState {
            metadata: (*self.metadata).clone(),
            spec: self.spec.storable(&self.metadata)?,
            shards: shards.collect::<Result<Vec<_>>>()?,
        })
    }

    /// Loads a tensor from the states that the ranks of a mesh have: any number of states per rank, in any order, in a world of
    /// any size. Without `spec` the tensor gets the spec of the states, whose ranks must then be on this mesh.
    ///
    /// Collective: every rank of the mesh must call it. Communicates the metadata, and in one exchange the shards that a rank
    /// lacks. A shard that several ranks have is taken from the first of them.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// let states = shardwise::ThreadWorld::new(3)?.run(|world| {
    ///     let mesh = world.mesh([("all", 3)])?;
    ///     ShardedTensor::rand(ChunkShardingSpec::over_ranks(0, [0, 1, 2])?, (7, 2), DType::F32, &mesh)?.state()
    /// })?;
    /// launch(2, move |world| {
    ///     let mesh = world.mesh([("all", 2)])?;
    ///     let mine: Vec<_> = states.iter().skip(world.rank()).step_by(2).cloned().collect();
    ///     let columns = ChunkShardingSpec::over_ranks(1, [0, 1])?;
    ///     let x = ShardedTensor::load_with_process_group(&mesh, &mine, Some(columns.into()))?;
    ///     assert_eq!(x.local_tensor()?.dims(), [7, 1]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`], the same on every rank, if states are of different tensors or damaged, a shard is missing, or ranks
    /// pass different specs.
    #[track_caller]
    #[doc(alias = "__setstate__")]
    pub fn load_with_process_group(
        mesh: &DeviceMesh,
        states: &[ShardedTensorState],
        spec: Option<AnyShardingSpec>,
    ) -> Result<ShardedTensor> {
        let site = Location::caller();
        let group = mesh.whole_group()?;
        // An error of one rank is sent in place of its states, so that all ranks return it.
        let mine = StateSummary::new(states);
        let wanted = spec.as_ref().map(ToString::to_string);
        let text = match &mine {
            Ok(stored) => serde_json::to_string(&(stored, &wanted)).map_err(Error::other)?,
            Err(error) => format!("!{error}"),
        };
        let mut all: Vec<(usize, StateSummary)> = Vec::new();
        let mut first_spec = None;
        for (position, text) in gather_texts(&group, &text, site)?.iter().enumerate() {
            let rank = group.ranks()[position];
            if let Some(error) = text.strip_prefix('!') {
                let found = format!("states on rank {rank} that cannot be loaded ({error})");
                return Err(bad(found, "good states on every rank"));
            }
            let (stored, its_spec): (StateSummary, Option<String>) =
                serde_json::from_str(text).map_err(Error::other)?;
            let first = first_spec.get_or_insert_with(|| its_spec.clone());
            if its_spec != *first {
                let show = |spec: &Option<String>| spec.clone().unwrap_or_else(|| "no spec".to_string());
                let found =
                    format!("{} on rank {} and {} on rank {rank}", show(first), group.ranks()[0], show(&its_spec));
                return Err(ErrorKind::Disagreement.error(
                    "sharding spec",
                    found,
                    "the same on all ranks",
                    "pass the same everywhere",
                ));
            }
            all.push((rank, stored));
        }
        let (stored_spec, from) = merge_summaries(&all)?;
        let spec = spec.unwrap_or(stored_spec);
        let mut to = spec.build_metadata(&from.size, from.dtype)?;
        to.requires_grad = from.requires_grad;
        check_ranks(&to, mesh)?;
        let me = mesh.world().rank();
        let shards = from
            .shards_of(me)
            .map(|part| {
                let bytes = shard_bytes(states, part).expect("this rank sent that it has the shard");
                let tensor = Tensor::from_raw_buffer(bytes, from.dtype, &part.sizes, &Device::Cpu)?;
                TensorShard::new(&tensor, part.clone())
            })
            .collect::<Result<Vec<_>>>()?;
        let tensors = moved(mesh, &from, &shards, &to, site)?;
        Ok(Self::from_parts(mesh, to, spec, tensors))
    }
}

/// What a rank sends to all ranks about its states.
#[derive(Clone, Serialize, Deserialize)]
struct StateSummary {
    /// Metadata and spec of the states, and which shards they hold; `None` on a rank without states.
    tensor: Option<(ShardedTensorMetadata, AnyShardingSpec, Vec<usize>)>,
}

impl StateSummary {
    fn new(states: &[ShardedTensorState]) -> Result<StateSummary> {
        let Some(first) = states.first() else { return Ok(StateSummary { tensor: None }) };
        first.metadata.check_covering()?;
        check_dtype(first.metadata.dtype)?;
        let mut held = Vec::new();
        for state in states {
            if state.metadata != first.metadata {
                let found = format!("{} and {}", first.metadata, state.metadata);
                return Err(bad(found, "states of one tensor"));
            }
            for (i, bytes) in &state.shards {
                let Some(shard) = first.metadata.shards.get(*i) else {
                    return Err(bad(format!("shard {i} of {}", first.metadata.shards.len()), "a shard of the tensor"));
                };
                let expected = shard.volume() * first.metadata.dtype.size_in_bytes();
                if bytes.len() != expected {
                    let found = format!("{} bytes for shard {shard}", bytes.len());
                    return Err(bad(found, &format!("{expected} bytes")));
                }
                held.push(*i);
            }
        }
        Ok(StateSummary { tensor: Some((first.metadata.clone(), first.spec.clone(), held)) })
    }
}

/// The stored spec, and the metadata with every shard placed on the first rank that has its state.
fn merge_summaries(all: &[(usize, StateSummary)]) -> Result<(AnyShardingSpec, ShardedTensorMetadata)> {
    let mut known = all.iter().filter_map(|(rank, stored)| Some((*rank, stored.tensor.as_ref()?)));
    let Some((first_rank, (metadata, spec, _))) = known.next() else {
        return Err(bad("no states on any rank".to_string(), "the states of all shards"));
    };
    let mut owners: Vec<Option<usize>> = vec![None; metadata.shards.len()];
    for (rank, stored) in all {
        let Some((its, _, held)) = &stored.tensor else { continue };
        if its != metadata {
            let found = format!("{metadata} on rank {first_rank} and {its} on rank {rank}");
            return Err(bad(found, "states of one tensor on all ranks"));
        }
        for &i in held {
            owners[i].get_or_insert(*rank);
        }
    }
    if let Some(missing) = owners.iter().position(Option::is_none) {
        let found = format!("nothing for shard {}", metadata.shards[missing]);
        return Err(bad(found, "the states of all shards"));
    }
    let place = |(shard, owner): (&ShardMetadata, &Option<usize>)| ShardMetadata {
        placement: owner.map(RemoteDevice::cpu_of),
        ..shard.clone()
    };
    let shards = metadata.shards.iter().zip(&owners).map(place).collect();
    Ok((spec.clone(), ShardedTensorMetadata { shards, ..metadata.clone() }))
}

/// The bytes of a shard, from whichever state has it.
fn shard_bytes<'a>(states: &'a [ShardedTensorState], part: &ShardMetadata) -> Option<&'a [u8]> {
    let same = |state: &ShardedTensorState, i: usize| {
        let stored = &state.metadata.shards[i];
        stored.offsets == part.offsets && stored.sizes == part.sizes
    };
    states.iter().find_map(|state| {
        let found = state.shards.iter().find(|(i, _)| same(state, *i));
        found.map(|(_, bytes)| bytes.as_slice())
    })
}

fn bad(found: String, needed: &str) -> Error {
    ErrorKind::state().error("sharded tensor state", found, needed, "pass the states that the ranks stored")
}
