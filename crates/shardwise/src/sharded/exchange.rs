//! Shards moved between ranks, by their metadata alone.

use candle_core::Tensor;

use super::device::RemoteDevice;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::Shard;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{OwnedBox, TensorMeta};
use crate::redistribute::{Exchange, block};
use shardwise_kernels::{Assembly, contiguous, placeholder};

/// Brings every rank of a mesh its shards of a whole tensor; what [`ShardingSpec::shard`](super::ShardingSpec::shard) does
/// unless a spec has its own way.
///
/// Collective with `src_rank`, a position on the mesh whose data counts; with `None` every rank takes its shards from its own
/// copy, without communication.
pub fn distribute(
    tensor: &Tensor,
    metadata: &ShardedTensorMetadata,
    mesh: &DeviceMesh,
    src_rank: Option<usize>,
    site: Site,
) -> Result<Vec<Tensor>> {
    let me = mesh.world().rank();
    let Some(source) = src_rank else {
        let own = whole_shard(tensor, me)?;
        let part = |part: &ShardMetadata| match mesh.world().is_dry() {
            true => Ok(placeholder(&TensorMeta { shape: part.sizes.clone(), dtype: metadata.dtype })?),
            // A shard has memory of its own, so that it does not keep the whole alive.
            false => Ok(contiguous(&cut(std::slice::from_ref(&own), &part.offsets, &part.sizes)?.copy()?)?),
        };
        return metadata.shards_of(me).map(part).collect();
    };
    let Some(&source) = mesh.ranks().get(source) else {
        let needed = format!("a position on the mesh, below {}", mesh.size());
        return Err(ErrorKind::Rank { rank: source, size: mesh.size() }.error(
            "source rank",
            source,
            needed,
            "0 is the first rank of the mesh",
        ));
    };
    let own = whole_shard(tensor, source)?;
    let from = ShardedTensorMetadata { shards: vec![own.metadata.clone()], ..metadata.clone() };
    moved(mesh, &from, &[own], metadata, site)
}

/// A tensor as the one shard of a rank.
fn whole_shard(tensor: &Tensor, rank: usize) -> Result<Shard> {
    Shard::from_tensor_and_offsets(tensor, vec![0; tensor.rank()], rank)
}

/// An error unless every shard is on a rank of the mesh.
pub(super) fn check_ranks(metadata: &ShardedTensorMetadata, mesh: &DeviceMesh) -> Result<()> {
    for shard in &metadata.shards {
        if shard.rank().is_none_or(|rank| !mesh.contains(rank)) {
            return Err(ErrorKind::Layout.error(
                "placement",
                format!("shard {shard}"),
                format!("a rank of the mesh {}, such as {}", mesh.mesh(), RemoteDevice::cpu_of(mesh.ranks()[0])),
                "name ranks of the mesh, or use a mesh that has the rank",
            ));
        }
        if shard.placement.as_ref().is_some_and(|p| p.device() != "cpu") {
            let needed = "the CPU, which is where ranks of threads keep their tensors";
            return Err(ErrorKind::Layout.error("placement", format!("shard {shard}"), needed, "use rank:<rank>/cpu"));
        }
    }
    Ok(())
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
            return Ok(
                placeholder(&meta(part)).and_then(|t| if mesh.world().is_dry() { Ok(t) } else { contiguous(&t) })?
            );
        }
        if held(me, part) {
            let piece = cut(shards, &part.offsets, &part.sizes)?;
            // A part of a shard has memory of its own, so that it does not keep the shard alive.
            let whole = shards.iter().any(|s| s.metadata.as_box() == part.as_box());
            return if whole { Ok(piece) } else { Ok(contiguous(&piece.copy()?)?) };
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
            return Err(ErrorKind::Layout.error(
                "sharded tensor",
                format!("{pasted} elements"),
                needed,
                "check its metadata",
            ));
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

/// A box of the tensor inside one of the shards, as a view.
pub(super) fn cut(shards: &[Shard], offsets: &[usize], sizes: &[usize]) -> Result<Tensor> {
    let within = |shard: &&Shard| {
        let ShardMetadata { offsets: starts, sizes: lengths, .. } = &shard.metadata;
        (0..offsets.len()).all(|d| offsets[d] >= starts[d] && offsets[d] + sizes[d] <= starts[d] + lengths[d])
    };
    let shard = shards.iter().find(within).expect("plans name boxes inside a shard of the rank");
    let local: Vec<usize> = offsets.iter().zip(&shard.metadata.offsets).map(|(o, s)| o - s).collect();
    block(&shard.tensor, &local, sizes)
}
