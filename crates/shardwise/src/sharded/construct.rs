//! Constructors of sharded tensors: from a spec, from the local shards of each rank, or from one whole tensor.

use std::panic::Location;

use candle_core::{DType, Shape, Tensor};

use super::exchange::{ShardTensorRequest, check_ranks};
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::TensorShard;
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::{DeviceMesh, agree, gather_texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use crate::tensor::check_metas;
use shardwise_kernels::{check_dtype, check_stored, filled, own_copy, placeholder};

/// Checks that every shard fits into memory. Each rank looks at the shards of all, so all get the same error.
fn check_shards(metadata: &ShardedTensorMetadata, dry: bool) -> Result<()> {
    let meta = |shard: &ShardMetadata| TensorMeta { shape: shard.sizes.clone(), dtype: metadata.dtype };
    metadata.shards.iter().try_for_each(|shard| check_metas(&[meta(shard)], 1, dry))
}

impl ShardedTensor {
    /// Creates a tensor filled with one value.
    ///
    /// Local: every rank fills its own shards.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the spec does not fit the shape, names a rank outside the mesh, or the type does not hold the value.
    pub fn full(
        spec: impl Into<AnyShardingSpec>,
        value: f64,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        let meta = TensorMeta::from((shape, dtype));
        Self::by_shard(spec.into(), &meta, mesh, |part| {
            Ok(filled(value, &TensorMeta { shape: part.sizes.clone(), dtype: meta.dtype })?)
        })
    }

    /// Creates a tensor of zeros. Local.
    pub fn zeros(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::full(spec, 0.0, shape, dtype, mesh)
    }

    /// Creates a tensor of ones. Local.
    pub fn ones(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::full(spec, 1.0, shape, dtype, mesh)
    }

    /// Creates a tensor to be filled later. Unlike PyTorch's its elements are zero: uninitialized memory cannot be read here.
    /// Local.
    #[doc(alias = "_create_tensor_from_params")]
    pub fn empty(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::zeros(spec, shape, dtype, mesh)
    }

    /// Lists the shards of a tensor, after checking that its type is supported, its ranks are on the mesh and its shards fit
    /// into memory.
    pub(super) fn checked(
        spec: &AnyShardingSpec,
        meta: &TensorMeta,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensorMetadata> {
        check_dtype(meta.dtype)?;
        let metadata = spec.build_metadata(&meta.shape, meta.dtype)?;
        check_ranks(&metadata, mesh)?;
        check_shards(&metadata, mesh.world().is_dry())?;
        Ok(metadata)
    }

    /// Creates a tensor whose shards `build` computes from their metadata. It is called for the shards of this rank.
    pub(super) fn by_shard(
        spec: AnyShardingSpec,
        meta: &TensorMeta,
        mesh: &DeviceMesh,
        mut build: impl FnMut(&ShardMetadata) -> Result<Tensor>,
    ) -> Result<ShardedTensor> {
        let metadata = Self::checked(&spec, meta, mesh)?;
        let one = |part: &ShardMetadata| match mesh.world().is_dry() {
            true => Ok(placeholder(&TensorMeta { shape: part.sizes.clone(), dtype: meta.dtype })?),
            false => build(part),
        };
        let tensors = metadata.shards_of(mesh.world().rank()).map(one).collect::<Result<Vec<_>>>()?;
        Ok(Self::from_parts(mesh, metadata, spec, tensors))
    }

    /// Creates a tensor from the local shards of each rank, any number of them.
    ///
    /// Collective: every rank of the mesh must call it. Communicates the metadata of the shards, not their elements. The spec is
    /// inferred from the shards.
    ///
    /// ```
    /// use shardwise::candle_core::{Device, Tensor};
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ShardedTensor, TensorShard};
    ///
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("all", 3)])?;
    ///     let rank = world.rank();
    ///     let row = Tensor::full(rank as f32, (1, 4), &Device::Cpu)?;
    ///     let mine = match rank {
    ///         1 => vec![], // nothing on this rank
    ///         _ => vec![TensorShard::from_tensor_and_offsets(&row, [rank / 2, 0], rank)?],
    ///     };
    ///     let x = ShardedTensor::init_from_local_shards(&mine, (2, 4), &mesh)?;
    ///     assert_eq!(x.full_tensor()?.to_vec2::<f32>()?[1], [2.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`], the same on every rank, unless the shards have one type and every element is in exactly one shard.
    #[doc(alias = "_init_from_local_shards")]
    #[track_caller]
    pub fn init_from_local_shards(
        shards: &[TensorShard],
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        let (site, size) = (Location::caller(), shape.into().into_dims());
        let ranks = gather_metadata(&local_metadata(shards, &size, mesh), mesh, site)?;
        let metadata = ShardedTensorMetadata::merge(&ranks)?;
        let spec = AnyShardingSpec::infer(&metadata.shards)?;
        Ok(Self::from_parts(mesh, metadata, spec, shards.iter().map(|s| s.tensor.clone()).collect()))
    }

    /// Creates a tensor from the local shards of each rank, stacked along dimension 0 in the order of ranks. Its size follows
    /// from theirs; the offsets of the shards are replaced.
    ///
    /// Collective: every rank of the mesh must call it. Communicates the metadata of the shards, not their elements.
    ///
    /// # Errors
    /// [`Error::Invalid`], the same on every rank, unless the shards have one type and the same sizes after dimension 0.
    #[doc(alias = "global_size=None")]
    #[track_caller]
    pub fn init_from_stacked_shards(shards: &[TensorShard], mesh: &DeviceMesh) -> Result<ShardedTensor> {
        let site = Location::caller();
        let mut ranks = gather_metadata(&local_metadata(shards, &[], mesh), mesh, site)?;
        let mut rows = 0;
        let mut inner: Option<Vec<usize>> = None;
        for shard in ranks.iter_mut().flatten().flat_map(|rank| rank.shards.iter_mut()) {
            let Some((first, rest)) = shard.sizes.split_first() else {
                return Err(ErrorKind::Argument.error("shards", "a shard of 0 dimensions", "rows", "add a dimension"));
            };
            let expected = inner.get_or_insert_with(|| rest.to_vec());
            if expected.as_slice() != rest {
                let found = format!("rows of {expected:?} and of {rest:?}");
                return Err(ErrorKind::Disagreement.error("shards", found, "rows of one shape", "pass equal rows"));
            }
            shard.offsets = std::iter::once(rows).chain(rest.iter().map(|_| 0)).collect();
            rows += first;
        }
        let size: Vec<usize> = std::iter::once(rows).chain(inner.unwrap_or_default()).collect();
        ranks.iter_mut().flatten().for_each(|rank| rank.size.clone_from(&size));
        let metadata = ShardedTensorMetadata::merge(&ranks)?;
        let spec = AnyShardingSpec::infer(&metadata.shards)?;
        Ok(Self::from_parts(mesh, metadata, spec, shards.iter().map(|s| s.tensor.clone()).collect()))
    }

    /// Creates a tensor from the local shards of each rank and the metadata of all shards.
    ///
    /// Local: unlike [`init_from_local_shards`](Self::init_from_local_shards) it communicates nothing. Every rank checks its own
    /// shards; that all ranks pass the same metadata is not checked.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the metadata does not cover the tensor, or this rank's shards differ from those it lists.
    #[doc(alias = "_init_from_local_shards_and_global_metadata")]
    pub fn init_from_local_shards_and_global_metadata(
        shards: &[TensorShard],
        metadata: ShardedTensorMetadata,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        metadata.check_covering()?;
        check_ranks(&metadata, mesh)?;
        let rank = mesh.world().rank();
        let expected: Vec<&ShardMetadata> = metadata.shards_of(rank).collect();
        let fits = |shard: &TensorShard| shard.tensor.dtype() == metadata.dtype;
        let same = shards.iter().map(|s| &s.metadata).eq(expected.iter().copied());
        if !same || !shards.iter().all(fits) {
            let list =
                |shards: &[&ShardMetadata]| shards.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let types: Vec<&str> = shards.iter().map(|s| s.tensor.dtype().as_str()).collect();
            let own: Vec<&ShardMetadata> = shards.iter().map(|s| &s.metadata).collect();
            return Err(ErrorKind::Argument.error(
                "local shards",
                format!("{} of types {types:?} on rank {rank}", list(&own)),
                format!("{} of type {}, as the metadata says", list(&expected), metadata.dtype.as_str()),
                "pass the shards of this rank in the order of the metadata",
            ));
        }
        let spec = AnyShardingSpec::infer(&metadata.shards)?;
        Ok(Self::from_parts(mesh, metadata, spec, shards.iter().map(|s| s.tensor.clone()).collect()))
    }

    /// Creates a tensor of a spec that gives each rank one shard, from the local tensor of each rank.
    ///
    /// Local: every rank checks its own shard; that all ranks pass the same spec and shape is not checked.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the spec gives this rank one shard of the shape of `tensor`.
    #[doc(alias = "_init_from_local_tensor")]
    pub fn init_from_local_tensor(
        tensor: &Tensor,
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        check_stored(tensor)?;
        let (spec, size) = (spec.into(), shape.into().into_dims());
        let metadata = spec.build_metadata(&size, tensor.dtype())?;
        check_ranks(&metadata, mesh)?;
        let rank = mesh.world().rank();
        let held: Vec<&ShardMetadata> = metadata.shards_of(rank).collect();
        let tensors = match held.as_slice() {
            [] if !mesh.contains(rank) => Vec::new(),
            [single] if single.sizes == tensor.dims() => vec![own_copy(tensor)?],
            _ => {
                let list = held.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                return Err(ErrorKind::shape(tensor.dims()).error(
                    "local tensor",
                    format!("shape {:?} on rank {rank}", tensor.dims()),
                    format!("one shard, what the spec gives this rank being [{list}]"),
                    "pass this rank's part, or use init_from_local_shards",
                ));
            }
        };
        Ok(Self::from_parts(mesh, metadata, spec, tensors))
    }

    /// Creates a tensor of a spec from the local tensors of each rank, one per shard in the order of the metadata. `whole` is the
    /// shape and type of the whole tensor.
    ///
    /// Local: every rank checks its own shards. An operator of a spec builds its result with it, because the result keeps the
    /// spec.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the tensors have the shapes and the type of this rank's shards.
    pub fn init_from_local_tensors(
        tensors: &[Tensor],
        spec: impl Into<AnyShardingSpec>,
        whole: &TensorMeta,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        let spec = spec.into();
        let metadata = Self::checked(&spec, whole, mesh)?;
        check_local(tensors, &metadata, mesh.world().rank())?;
        let copy = |tensor: &Tensor| Ok(check_stored(tensor).and_then(|()| own_copy(tensor))?);
        let tensors = tensors.iter().map(copy).collect::<Result<Vec<_>>>()?;
        Ok(Self::from_parts(mesh, metadata, spec, tensors))
    }
}

/// Shards a whole tensor as a spec says.
///
/// Collective with `src_rank`, a position on the mesh: that rank sends every rank its shards in one exchange, and the tensors of
/// the other ranks state shape and type only. Local with `None`: every rank slices its shards from its own copy, and nothing
/// is compared. All ranks must pass the same `src_rank`.
///
/// ```
/// use shardwise::candle_core::{Device, Tensor};
/// use shardwise::prelude::*;
/// use shardwise::sharded::{ChunkShardingSpec, shard_tensor};
///
/// launch(2, |world| {
///     let mesh = world.mesh([("all", 2)])?;
///     let table = Tensor::arange(0i64, 6, &Device::Cpu)?.reshape((2, 3))?;
///     let x = shard_tensor(&table, ChunkShardingSpec::over_ranks(1, [1, 0])?, &mesh, Some(0))?;
///     assert_eq!(x.local_tensor()?.to_vec2::<i64>()?[0], [[2].as_slice(), &[0, 1]][world.rank()]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Errors
/// [`Error::Mismatch`] on every rank unless all agree on spec, `src_rank`, shape and type; [`Error::Invalid`] if the spec does
/// not fit the tensor or the mesh.
#[track_caller]
#[doc(alias = "_shard_tensor")]
pub fn shard_tensor(
    tensor: &Tensor,
    spec: impl Into<AnyShardingSpec>,
    mesh: &DeviceMesh,
    src_rank: Option<usize>,
) -> Result<ShardedTensor> {
    shard_tensor_at(tensor, spec.into(), mesh, src_rank, Location::caller())
}

fn shard_tensor_at(
    tensor: &Tensor,
    spec: AnyShardingSpec,
    mesh: &DeviceMesh,
    src_rank: Option<usize>,
    site: Site,
) -> Result<ShardedTensor> {
    let is_member = mesh.contains(mesh.world().rank());
    if is_member && src_rank.is_some() {
        let meta = TensorMeta::new(tensor.dims(), tensor.dtype()).to_string();
        let (source, text) = (format!("{src_rank:?}"), spec.to_string());
        let things = [("tensor", meta.as_str()), ("source rank", &source), ("sharding spec", &text)];
        agree(&mesh.whole_group()?, &things, site)?;
    }
    check_stored(tensor)?;
    let metadata = spec.build_metadata(tensor.dims(), tensor.dtype())?;
    check_ranks(&metadata, mesh)?;
    let tensors = spec.0.shard(&ShardTensorRequest { tensor, metadata: &metadata, mesh, src_rank, site })?;
    if is_member {
        check_local(&tensors, &metadata, mesh.world().rank())?;
    }
    Ok(ShardedTensor::from_parts(mesh, metadata, spec, tensors))
}

/// Gathers the metadata of the shards of all ranks of a mesh; an error of one rank is that of all.
fn gather_metadata(
    mine: &Result<Option<ShardedTensorMetadata>>,
    mesh: &DeviceMesh,
    site: Site,
) -> Result<Vec<Option<ShardedTensorMetadata>>> {
    let group = mesh.whole_group()?;
    // An error of one rank is sent in place of its metadata, so that all ranks return it.
    let text = match mine {
        Ok(metadata) => serde_json::to_string(metadata).map_err(Error::other)?,
        Err(error) => format!("!{error}"),
    };
    let mut ranks = Vec::new();
    for (position, text) in gather_texts(&group, &text, site)?.iter().enumerate() {
        if let Some(error) = text.strip_prefix('!') {
            let rank = group.ranks()[position];
            let found = format!("invalid shards on rank {rank} ({error})");
            return Err(ErrorKind::Disagreement.error(
                "sharded tensor",
                found,
                "valid shards on every rank",
                "correct that rank",
            ));
        }
        ranks.push(serde_json::from_str::<Option<ShardedTensorMetadata>>(text).map_err(Error::other)?);
    }
    Ok(ranks)
}

/// Checks that these tensors have the sizes and the type of the shards of a rank.
fn check_local(tensors: &[Tensor], metadata: &ShardedTensorMetadata, rank: usize) -> Result<()> {
    let expected: Vec<&ShardMetadata> = metadata.shards_of(rank).collect();
    let sizes = expected.iter().map(|shard| shard.sizes.as_slice());
    if tensors.iter().map(Tensor::dims).eq(sizes) && tensors.iter().all(|t| t.dtype() == metadata.dtype) {
        return Ok(());
    }
    let given: Vec<String> = tensors.iter().map(|t| format!("{} {:?}", t.dtype().as_str(), t.dims())).collect();
    let list: Vec<String> = expected.iter().map(ToString::to_string).collect();
    Err(ErrorKind::Argument.error(
        "local tensors",
        format!("[{}] on rank {rank}", given.join(", ")),
        format!("{} tensors for what the spec gives this rank, [{}]", metadata.dtype.as_str(), list.join(", ")),
        "pass this rank's shards in the order of the metadata",
    ))
}

/// The metadata that a rank sends of its own shards; `None` if it has none. An error if they are placed on another rank or of
/// several types.
fn local_metadata(shards: &[TensorShard], size: &[usize], mesh: &DeviceMesh) -> Result<Option<ShardedTensorMetadata>> {
    let Some(first) = shards.first() else { return Ok(None) };
    let (rank, dtype) = (mesh.world().rank(), first.tensor.dtype());
    for shard in shards {
        if shard.metadata.rank() != Some(rank) {
            let needed = format!("a placement on rank {rank}, which brings it");
            return Err(ErrorKind::Argument.error("shard", &shard.metadata, needed, "name this rank in the placement"));
        }
        if shard.tensor.dtype() != dtype {
            let found = format!("types {} and {}", dtype.as_str(), shard.tensor.dtype().as_str());
            return Err(ErrorKind::Argument.error("shards", found, "one type", "convert them first"));
        }
    }
    let shards = shards.iter().map(|s| s.metadata.clone()).collect();
    Ok(Some(ShardedTensorMetadata { size: size.to_vec(), dtype, requires_grad: false, shards }))
}
