//! Shards moved between ranks: gathered, cut anew, brought from one rank to all.

use std::panic::Location;

use candle_core::Tensor;

use super::construct::check_ranks;
use super::device::RemoteDevice;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::{Shard, ShardedTensor, ShardingSpec};
use crate::comm::{DeviceMesh, agree};
use crate::error::{Error, Result, Site};
use crate::layout::{OwnedBox, TensorMeta};
use crate::local::{Assembly, dense, own_copy, placeholder, same_memory};
use crate::redistribute::{Exchange, block};

impl ShardedTensor {
    /// The same tensor cut in another way. What a rank already holds stays; the rest goes from rank to rank in one
    /// exchange, every element once.
    ///
    /// ```
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("all", 3)])?;
    ///     let x = ShardedTensor::rand(ChunkShardingSpec::over_ranks(0, [0, 1, 2])?, 7, DType::F64, &mesh)?;
    ///     let turned = x.reshard(ChunkShardingSpec::over_ranks(0, [1, 2, 0])?)?;
    ///     assert!(turned.equal(&x)?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    #[doc(alias = "reshard_local_shard")]
    #[doc(alias = "reshuffle_local_shard")]
    pub fn reshard(&self, spec: impl Into<ShardingSpec>) -> Result<ShardedTensor> {
        self.reshard_at(spec.into(), Location::caller())
    }

    pub(super) fn reshard_at(&self, spec: ShardingSpec, site: Site) -> Result<ShardedTensor> {
        if self.mesh.contains(self.mesh.world().rank()) {
            let (is, shall) = (self.metadata.to_string(), spec.to_string());
            agree(&self.process_group()?, &[("sharded tensor", &is), ("sharding spec", &shall)], site)?;
        }
        let mut to = spec.build_metadata(self.shape(), self.dtype())?;
        to.requires_grad = self.requires_grad();
        check_ranks(&to, &self.mesh)?;
        let tensors = moved(&self.mesh, &self.metadata, &self.shards, &to, site)?;
        Ok(Self::from_parts(&self.mesh, to, spec, tensors))
    }

    /// The whole tensor on one rank, a position on the mesh, in the tensor's own type; `None` elsewhere.
    #[track_caller]
    pub fn gather(&self, dst: usize) -> Result<Option<Tensor>> {
        let site = Location::caller();
        if self.mesh.contains(self.mesh.world().rank()) {
            let (is, shall) = (self.metadata.to_string(), dst.to_string());
            agree(&self.process_group()?, &[("sharded tensor", &is), ("destination of gather", &shall)], site)?;
        }
        let Some(&rank) = self.mesh.ranks().get(dst) else {
            let needed = format!("a position on the mesh, below {}", self.mesh.size());
            return Err(Error::invalid("destination of gather", dst, needed, "0 is the first rank of the mesh"));
        };
        let whole = self.whole_on(&[rank])?;
        moved(&self.mesh, &self.metadata, &self.shards, &whole, site)?.pop().map(|t| self.handed_out(t)).transpose()
    }

    /// The whole tensor on every rank of the mesh; without elements on a rank outside it.
    #[track_caller]
    pub fn full_tensor(&self) -> Result<Tensor> {
        let site = Location::caller();
        if !self.mesh.contains(self.mesh.world().rank()) {
            return Ok(placeholder(&TensorMeta::new(0, self.dtype()))?);
        }
        agree(&self.process_group()?, &[("sharded tensor", &self.metadata.to_string())], site)?;
        let whole = self.whole_on(self.mesh.ranks())?;
        self.handed_out(moved(&self.mesh, &self.metadata, &self.shards, &whole, site)?.swap_remove(0))
    }

    /// The whole tensor in memory that no shard and no other rank has, for a program that may write to it.
    fn handed_out(&self, whole: Tensor) -> Result<Tensor> {
        let world = self.mesh.world();
        let shared = world.shares_memory() || self.shards.iter().any(|s| same_memory(s.held(), &whole));
        if shared && !world.is_dry() { Ok(own_copy(&whole)?) } else { Ok(whole) }
    }

    /// The tensor as one shard on each of some ranks.
    fn whole_on(&self, ranks: &[usize]) -> Result<ShardedTensorMetadata> {
        let shard = |&rank: &usize| {
            ShardMetadata::new(vec![0; self.shape().len()], self.shape(), Some(RemoteDevice::cpu_of(rank)))
        };
        let shards = ranks.iter().map(shard).collect::<Result<Vec<_>>>()?;
        Ok(ShardedTensorMetadata { shards, ..(*self.metadata).clone() })
    }
}

/// The shards that this rank has after a move between two cuts of one tensor, on which all ranks of the mesh agree.
pub(super) fn moved(
    mesh: &DeviceMesh,
    from: &ShardedTensorMetadata,
    shards: &[Shard],
    to: &ShardedTensorMetadata,
    site: Site,
) -> Result<Vec<Tensor>> {
    let me = mesh.world().rank();
    if !mesh.contains(me) {
        return Ok(Vec::new());
    }
    let meta = |shard: &ShardMetadata| TensorMeta { shape: shard.sizes.clone(), dtype: to.dtype };
    // What a rank holds already in one piece needs no exchange; every rank finds the same.
    let held = |rank: usize, part: &ShardMetadata| {
        part.volume() == 0 || from.shards_of(rank).any(|s| s.as_box().intersect(&part.as_box()) == Some(part.as_box()))
    };
    let lacking = |rank: usize| -> Vec<OwnedBox> {
        to.boxes_of(rank).into_iter().filter(|b| !held(rank, &described(b))).collect()
    };
    let mut blocks = Vec::new();
    if mesh.ranks().iter().any(|&rank| !lacking(rank).is_empty()) {
        let exchange = Exchange::new(mesh.whole_group()?, to.dtype, |rank| from.boxes_of(rank), lacking);
        blocks = exchange.run_with(&|offsets, sizes| cut(shards, offsets, sizes), site)?;
    }
    let make = |part: &ShardMetadata| -> Result<Tensor> {
        if mesh.world().is_dry() || part.volume() == 0 {
            return Ok(placeholder(&meta(part)).and_then(|t| if mesh.world().is_dry() { Ok(t) } else { dense(&t) })?);
        }
        if held(me, part) {
            let piece = cut(shards, &part.offsets, &part.sizes)?;
            // A part of a shard has memory of its own, so that it does not keep the shard alive.
            let whole = shards.iter().any(|s| s.metadata.as_box() == part.as_box());
            return if whole { Ok(piece) } else { Ok(dense(&piece.copy()?)?) };
        }
        let whole = Assembly::new(meta(part))?;
        let target = part.as_box();
        let mut pasted = 0;
        for (offsets, block) in &blocks {
            let inside =
                offsets.iter().zip(&target.offsets).zip(&target.sizes).all(|((o, t), s)| o >= t && o < &(t + s));
            if inside {
                let place: Vec<usize> = offsets.iter().zip(&target.offsets).map(|(o, t)| o - t).collect();
                // SAFETY: one thread; the blocks are disjoint, each inside one target, and fill it.
                unsafe { whole.paste(block, &place) };
                pasted += block.elem_count();
            }
        }
        if pasted != part.volume() {
            let needed = format!("{}, all elements of shard {part}", part.volume());
            return Err(Error::invalid("sharded tensor", format!("{pasted} elements"), needed, "check its metadata"));
        }
        // SAFETY: as many elements as the shard has were pasted, each to another place.
        Ok(unsafe { whole.finish() })
    };
    to.shards_of(me).map(make).collect()
}

/// A box without its rank.
fn described(owned: &OwnedBox) -> ShardMetadata {
    ShardMetadata { offsets: owned.global.offsets.clone(), sizes: owned.global.sizes.clone(), placement: None }
}

/// A box of the tensor that lies inside one of the shards, as a view.
pub(super) fn cut(shards: &[Shard], offsets: &[usize], sizes: &[usize]) -> Result<Tensor> {
    let within = |shard: &&Shard| {
        let ShardMetadata { offsets: starts, sizes: lengths, .. } = &shard.metadata;
        (0..offsets.len()).all(|d| offsets[d] >= starts[d] && offsets[d] + sizes[d] <= starts[d] + lengths[d])
    };
    let shard = shards.iter().find(within).expect("plans name boxes inside a shard of the rank");
    let local: Vec<usize> = offsets.iter().zip(&shard.metadata.offsets).map(|(o, s)| o - s).collect();
    block(&shard.tensor, &local, sizes)
}
