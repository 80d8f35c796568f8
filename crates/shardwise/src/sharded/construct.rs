//! Sharded tensors from a spec, from shards that ranks already have, or from one whole tensor.

use std::panic::Location;

use candle_core::{DType, Shape, Tensor};

use super::exchange::check_ranks;
use super::metadata::{ShardMetadata, ShardedTensorMetadata};
use super::shard::Shard;
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::{DeviceMesh, agree, texts};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use crate::tensor::check_metas;
use shardwise_kernels::{check_dtype, check_supported, filled, own_copy, placeholder};

/// An error, the same on all ranks, if a shard is larger than memory.
fn check_shards(metadata: &ShardedTensorMetadata, dry: bool) -> Result<()> {
    let meta = |shard: &ShardMetadata| TensorMeta { shape: shard.sizes.clone(), dtype: metadata.dtype };
    metadata.shards.iter().try_for_each(|shard| check_metas(&[meta(shard)], 1, dry))
}

impl ShardedTensor {
    /// A tensor filled with one value.
    pub fn full(
        spec: impl Into<AnyShardingSpec>,
        value: f64,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::by_shard(spec.into(), &shape.into().into_dims(), dtype, mesh, |part| {
            Ok(filled(value, &TensorMeta { shape: part.sizes.clone(), dtype })?)
        })
    }

    /// A tensor of zeros.
    pub fn zeros(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::full(spec, 0.0, shape, dtype, mesh)
    }

    /// A tensor of ones.
    pub fn ones(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::full(spec, 1.0, shape, dtype, mesh)
    }

    /// A tensor to be filled later. Its elements are zero: memory without a value does not exist here.
    #[doc(alias = "_create_tensor_from_params")]
    pub fn empty(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::zeros(spec, shape, dtype, mesh)
    }

    /// The shards of a tensor that can be made: of a type that is served, on ranks of the mesh, in memory that exists.
    pub(super) fn checked(
        spec: &AnyShardingSpec,
        shape: &[usize],
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensorMetadata> {
        check_dtype(dtype)?;
        let metadata = spec.build_metadata(shape, dtype)?;
        check_ranks(&metadata, mesh)?;
        check_shards(&metadata, mesh.world().is_dry())?;
        Ok(metadata)
    }

    /// A tensor of shards that a function makes from their descriptions; only those of this rank are asked for.
    pub(super) fn by_shard(
        spec: AnyShardingSpec,
        shape: &[usize],
        dtype: DType,
        mesh: &DeviceMesh,
        mut make: impl FnMut(&ShardMetadata) -> Result<Tensor>,
    ) -> Result<ShardedTensor> {
        let metadata = Self::checked(&spec, shape, dtype, mesh)?;
        let one = |part: &ShardMetadata| match mesh.world().is_dry() {
            true => Ok(placeholder(&TensorMeta { shape: part.sizes.clone(), dtype })?),
            false => make(part),
        };
        let tensors = metadata.shards_of(mesh.world().rank()).map(one).collect::<Result<Vec<_>>>()?;
        Ok(Self::from_parts(mesh, metadata, spec, tensors))
    }

    /// The tensor of which every rank of the mesh brings its shards, any number of them.
    ///
    /// Ranks tell each other what they have: all get the same error unless the shards are of one type and fill the tensor,
    /// each element once. The spec is found from the shards.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{Shard, ShardedTensor};
    ///
    /// launch(3, |world| {
    ///     let mesh = world.mesh([("all", 3)])?;
    ///     let rank = world.rank();
    ///     let row = Tensor::full(rank as f32, (1, 4), &Device::Cpu)?;
    ///     let mine = match rank {
    ///         1 => vec![], // nothing on this rank
    ///         _ => vec![Shard::from_tensor_and_offsets(&row, [rank / 2, 0], rank)?],
    ///     };
    ///     let x = ShardedTensor::init_from_local_shards(&mine, (2, 4), &mesh)?;
    ///     assert_eq!(x.full_tensor()?.to_vec2::<f32>()?[1], [2.0; 4]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "_init_from_local_shards")]
    #[track_caller]
    pub fn init_from_local_shards(
        shards: &[Shard],
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        let (site, size) = (Location::caller(), shape.into().into_dims());
        let group = mesh.whole_group()?;
        // What is wrong on one rank alone travels with what it has, so that all ranks refuse together.
        let mine = described(shards, &size, mesh);
        let said = match &mine {
            Ok(metadata) => serde_json::to_string(metadata).map_err(Error::other)?,
            Err(error) => format!("!{error}"),
        };
        let mut ranks = Vec::new();
        for (position, text) in texts(&group, &said, site)?.iter().enumerate() {
            if let Some(error) = text.strip_prefix('!') {
                let rank = group.ranks()[position];
                let found = format!("shards of rank {rank} that it cannot have ({error})");
                return Err(ErrorKind::Disagreement.error(
                    "sharded tensor",
                    found,
                    "good shards on every rank",
                    "correct that rank",
                ));
            }
            ranks.push(serde_json::from_str::<Option<ShardedTensorMetadata>>(text).map_err(Error::other)?);
        }
        let metadata = ShardedTensorMetadata::merge(&ranks)?;
        let spec = AnyShardingSpec::infer(&metadata.shards)?;
        Ok(Self::from_parts(mesh, metadata, spec, shards.iter().map(|s| s.tensor.clone()).collect()))
    }

    /// As [`init_from_local_shards`](Self::init_from_local_shards) with the shards of all ranks described: nothing is
    /// communicated, and every rank checks its own.
    #[doc(alias = "_init_from_local_shards_and_global_metadata")]
    pub fn init_from_local_shards_and_global_metadata(
        shards: &[Shard],
        metadata: ShardedTensorMetadata,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        metadata.check_covering()?;
        check_ranks(&metadata, mesh)?;
        let rank = mesh.world().rank();
        let expected: Vec<&ShardMetadata> = metadata.shards_of(rank).collect();
        let fits = |shard: &Shard| shard.tensor.dtype() == metadata.dtype;
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

    /// The tensor of which every rank of the spec brings its one shard. Nothing is communicated, and every rank checks its
    /// own.
    #[doc(alias = "_init_from_local_tensor")]
    pub fn init_from_local_tensor(
        tensor: &Tensor,
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        check_supported(tensor)?;
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

    /// The tensor of which every rank of the mesh brings its shards in the order of the spec's metadata. Nothing is
    /// communicated, and every rank checks its own. For operators of a spec: the result keeps the spec. `whole` is the shape
    /// and type of the whole tensor.
    pub fn init_from_local_tensors(
        tensors: &[Tensor],
        spec: impl Into<AnyShardingSpec>,
        whole: &TensorMeta,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        let spec = spec.into();
        let metadata = Self::checked(&spec, &whole.shape, whole.dtype, mesh)?;
        check_local(tensors, &metadata, mesh.world().rank())?;
        let copy = |tensor: &Tensor| Ok(check_supported(tensor).and_then(|()| own_copy(tensor))?);
        let tensors = tensors.iter().map(copy).collect::<Result<Vec<_>>>()?;
        Ok(Self::from_parts(mesh, metadata, spec, tensors))
    }
}

/// Cuts a tensor as a spec says and brings every rank of the mesh its shards.
///
/// With `src_rank`, a position on the mesh, the data of that rank counts and the others only say shape and type. With
/// `None` every rank cuts its shards out of its own copy, without communication and unchecked; all ranks pass `None` then.
/// With a source all ranks get the same error unless they agree on spec, source, shape and type.
///
/// ```
/// use candle_core::{Device, Tensor};
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
    check_supported(tensor)?;
    let metadata = spec.build_metadata(tensor.dims(), tensor.dtype())?;
    check_ranks(&metadata, mesh)?;
    let tensors = spec.0.shard(tensor, &metadata, mesh, src_rank, site)?;
    if is_member {
        check_local(&tensors, &metadata, mesh.world().rank())?;
    }
    Ok(ShardedTensor::from_parts(mesh, metadata, spec, tensors))
}

/// An error unless these tensors have the sizes and the type of the shards of a rank.
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

/// What a rank says of its own shards; `None` if it has none. An error if they cannot be its shards.
fn described(shards: &[Shard], size: &[usize], mesh: &DeviceMesh) -> Result<Option<ShardedTensorMetadata>> {
    let Some(first) = shards.first() else { return Ok(None) };
    let (rank, dtype) = (mesh.world().rank(), first.tensor.dtype());
    for shard in shards {
        if shard.metadata.rank() != Some(rank) {
            let needed = format!("a placement on rank {rank}, which brings it");
            return Err(ErrorKind::Argument.error("shard", &shard.metadata, needed, "name the own rank"));
        }
        if shard.tensor.dtype() != dtype {
            let found = format!("types {} and {}", dtype.as_str(), shard.tensor.dtype().as_str());
            return Err(ErrorKind::Argument.error("shards", found, "one type", "convert them first"));
        }
    }
    let shards = shards.iter().map(|s| s.metadata.clone()).collect();
    Ok(Some(ShardedTensorMetadata { size: size.to_vec(), dtype, requires_grad: false, shards }))
}
