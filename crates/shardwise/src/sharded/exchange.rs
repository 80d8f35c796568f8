//! The exchange of shards between ranks that resharding, gathering and sharding a whole tensor share.

use candle_core::Tensor;

use super::device::RemoteDevice;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::TensorShard;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{OwnedBox, TensorMeta};
use crate::redistribute::{BoxExchange, block};
use shardwise_kernels::{Assembly, contiguous, placeholder};

/// A whole tensor to be sharded, as [`shard_tensor`](super::shard_tensor()) passes it to
/// [`ShardingSpec::shard`](super::ShardingSpec::shard).
#[derive(Debug, Clone, Copy)]
pub struct ShardTensorRequest<'a> {
    /// The whole tensor. With `src_rank`, only the elements on that rank count; the other ranks state shape and type with it.
    pub tensor: &'a Tensor,
    /// The shards to create, as [`build_metadata`](super::ShardingSpec::build_metadata) listed them for this tensor.
    pub metadata: &'a ShardedTensorMetadata,
    /// The mesh whose ranks hold the shards.
    pub mesh: &'a DeviceMesh,
    /// Position on the mesh of the rank that sends the elements. `None`: every rank slices its own copy.
    pub src_rank: Option<usize>,
    /// The line of the program that asked for it, for errors.
    pub site: Site,
}

/// Returns this rank's shards of a whole tensor, in the order of the metadata. The default of
/// [`ShardingSpec::shard`](super::ShardingSpec::shard).
///
/// Collective with `src_rank`: that rank sends every rank its shards in one exchange. With `None` local: every rank slices its
/// own copy.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if `src_rank` is not a position on the mesh.
pub fn distribute(request: &ShardTensorRequest<'_>) -> Result<Vec<Tensor>> {
    let &ShardTensorRequest { tensor, metadata, mesh, src_rank, site } = request;
    let me = mesh.world().rank();
    let Some(source) = src_rank else {
        let own = whole_shard(tensor, me)?;
        let part = |part: &ShardMetadata| match mesh.world().is_dry() {
            true => Ok(placeholder(&TensorMeta { shape: part.sizes.clone(), dtype: metadata.dtype })?),
            // Copied, so that the shard does not keep the whole tensor alive.
            false => Ok(contiguous(&box_view(std::slice::from_ref(&own), &part.offsets, &part.sizes)?.copy()?)?),
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

/// The whole tensor as the one shard of a rank.
fn whole_shard(tensor: &Tensor, rank: usize) -> Result<TensorShard> {
    TensorShard::from_tensor_and_offsets(tensor, vec![0; tensor.rank()], rank)
}

/// Checks that every shard is on the CPU of a rank of the mesh.
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

/// Moves the shards of a tensor from one metadata to another and returns those of this rank. Collective; all ranks of the mesh
/// must have agreed on both.
pub(super) fn moved(
    mesh: &DeviceMesh,
    from: &ShardedTensorMetadata,
    shards: &[TensorShard],
    to: &ShardedTensorMetadata,
    site: Site,
) -> Result<Vec<Tensor>> {
    let me = mesh.world().rank();
    if !mesh.contains(me) {
        return Ok(Vec::new());
    }
    let meta = |shard: &ShardMetadata| TensorMeta { shape: shard.sizes.clone(), dtype: to.dtype };
    // A shard inside one old shard of the same rank needs no exchange. Every rank computes this for all ranks, so all
    // agree on whether there is an exchange.
    let held = |rank: usize, part: &ShardMetadata| {
        part.volume() == 0 || from.shards_of(rank).any(|s| s.as_box().intersect(&part.as_box()) == Some(part.as_box()))
    };
    let lacking = |rank: usize| -> Vec<OwnedBox> {
        to.boxes_of(rank).into_iter().filter(|b| !held(rank, &unplaced(b))).collect()
    };
    let mut blocks = Vec::new();
    if mesh.ranks().iter().any(|&rank| !lacking(rank).is_empty()) {
        let exchange = BoxExchange::new(mesh.whole_group()?, to.dtype, |rank| from.boxes_of(rank), lacking);
        blocks = exchange.run_with(&|offsets, sizes| box_view(shards, offsets, sizes), site)?;
    }
    let build = |part: &ShardMetadata| -> Result<Tensor> {
        if mesh.world().is_dry() || part.volume() == 0 {
            return Ok(
                placeholder(&meta(part)).and_then(|t| if mesh.world().is_dry() { Ok(t) } else { contiguous(&t) })?
            );
        }
        if held(me, part) {
            let piece = box_view(shards, &part.offsets, &part.sizes)?;
            // A part of an old shard is copied, so that it does not keep the old shard alive.
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
    to.shards_of(me).map(build).collect()
}

/// The metadata of a box, without its rank.
fn unplaced(owned: &OwnedBox) -> ShardMetadata {
    ShardMetadata { offsets: owned.global.offsets.clone(), sizes: owned.global.sizes.clone(), placement: None }
}

/// A view of a box of the whole tensor inside one of the shards.
pub(super) fn box_view(shards: &[TensorShard], offsets: &[usize], sizes: &[usize]) -> Result<Tensor> {
    let within = |shard: &&TensorShard| {
        let ShardMetadata { offsets: starts, sizes: lengths, .. } = &shard.metadata;
        (0..offsets.len()).all(|d| offsets[d] >= starts[d] && offsets[d] + sizes[d] <= starts[d] + lengths[d])
    };
    let shard = shards.iter().find(within).expect("plans name boxes inside a shard of the rank");
    let local: Vec<usize> = offsets.iter().zip(&shard.metadata.offsets).map(|(o, s)| o - s).collect();
    block(&shard.tensor, &local, sizes)
}
