//! Random factories, `*_like` factories and initializers. An element depends on its index in the whole tensor, not on the shards.

use std::panic::Location;

use candle_core::{DType, Shape, Tensor};

use super::metadata::ShardMetadata;
use super::shard::TensorShard;
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::DeviceMesh;
use crate::error::{Result, Site};
use crate::layout::TensorMeta;
use crate::nn::init::{Init, InitialValue};
use crate::random::Distribution;
use crate::tensor::{TensorId, agreed_draw, random_box};
use shardwise_kernels::{convert, filled, placeholder};

impl ShardedTensor {
    /// Creates a tensor of random elements, drawn from the generator of the mesh: the same bits for every spec and for
    /// [`DTensor::random`](crate::DTensor::random).
    ///
    /// Collective: ranks compare the states of their generators, one small exchange.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) on every rank if the generators differ.
    #[track_caller]
    pub fn random(
        distribution: Distribution,
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        random_at(distribution, spec.into(), &TensorMeta::from((shape, dtype)), mesh, Location::caller())
    }

    /// Creates a tensor of uniform random numbers in `0..1`. Collective, as [`random`](Self::random) is.
    #[track_caller]
    pub fn rand(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::random(Distribution::Uniform { low: 0.0, high: 1.0 }, spec, shape, dtype, mesh)
    }

    /// Creates a tensor of normal random numbers with mean 0 and standard deviation 1. Collective, as [`random`](Self::random)
    /// is.
    #[track_caller]
    pub fn randn(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::random(Distribution::Normal { mean: 0.0, std: 1.0 }, spec, shape, dtype, mesh)
    }

    /// Creates a tensor of one value with the shape, type and spec of this tensor. Local.
    pub fn full_like(&self, value: f64) -> Result<ShardedTensor> {
        Self::full(self.spec.clone(), value, self.shape(), self.dtype(), &self.mesh)
    }

    /// Creates zeros with the shape, type and spec of this tensor. Local.
    pub fn zeros_like(&self) -> Result<ShardedTensor> {
        self.full_like(0.0)
    }

    /// Creates ones with the shape, type and spec of this tensor. Local.
    pub fn ones_like(&self) -> Result<ShardedTensor> {
        self.full_like(1.0)
    }

    /// Creates a tensor to be filled later with the shape, type and spec of this one. Its elements are zero. Local.
    pub fn empty_like(&self) -> Result<ShardedTensor> {
        self.zeros_like()
    }

    /// Creates random elements with the shape, type and spec of this tensor. Collective, as [`random`](Self::random) is.
    #[track_caller]
    pub fn random_like(&self, distribution: Distribution) -> Result<ShardedTensor> {
        let meta = TensorMeta::new(self.shape(), self.dtype());
        random_at(distribution, self.spec.clone(), &meta, &self.mesh, Location::caller())
    }

    /// Creates uniform random numbers in `0..1`; see [`random_like`](Self::random_like).
    #[track_caller]
    pub fn rand_like(&self) -> Result<ShardedTensor> {
        self.random_like(Distribution::Uniform { low: 0.0, high: 1.0 })
    }

    /// Creates normal random numbers with mean 0 and standard deviation 1; see [`random_like`](Self::random_like).
    #[track_caller]
    pub fn randn_like(&self) -> Result<ShardedTensor> {
        self.random_like(Distribution::Normal { mean: 0.0, std: 1.0 })
    }

    /// Overwrites all elements with those of an initializer. Fan-in and fan-out are those of the whole tensor, not of a shard.
    ///
    /// Local for a constant; collective for random initializers, as [`random`](Self::random) is. Clones keep their elements.
    ///
    /// ```
    /// use shardwise::nn::init::Init;
    /// use shardwise::prelude::*;
    /// use shardwise::sharded::{ChunkShardingSpec, ShardedTensor};
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("all", 2)])?;
    ///     let columns = ChunkShardingSpec::over_ranks(1, [0, 1])?;
    ///     let mut weight = ShardedTensor::zeros(columns, (3, 8), DType::F32, &mesh)?;
    ///     weight.init(Init::KaimingUniform(1.0))?;
    ///     mesh.manual_seed(0);
    ///     let whole = Init::KaimingUniform(1.0).create(&[3, 8], DType::F32, &mesh, [Replicate])?;
    ///     assert_eq!(weight.full_tensor()?.to_vec2::<f32>()?, whole.to_local()?.to_vec2::<f32>()?);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    #[doc(alias = "kaiming_uniform_")]
    #[doc(alias = "uniform_")]
    #[doc(alias = "normal_")]
    #[doc(alias = "constant_")]
    pub fn init(&mut self, init: Init) -> Result<()> {
        let (site, dtype, mesh) = (Location::caller(), self.dtype(), self.mesh.clone());
        let size = self.shape().to_vec();
        match init.initial_value(&size)? {
            InitialValue::Constant(value) => self.set_shards(&|part| Ok(filled(value, &shard_meta(part, dtype))?)),
            InitialValue::Random(distribution) => {
                let drawn = drawn_dtype(dtype);
                let draw = agreed_draw(distribution, &size, drawn, &mesh, mesh.generator(), site)?;
                self.set_shards(&|part| {
                    Ok(convert(&random_box(distribution, draw, &size, &part.as_box(), drawn)?, dtype)?)
                })
            }
        }
    }

    /// Sets every element to one value. Local. Clones keep their elements.
    #[doc(alias = "fill_")]
    pub fn fill(&mut self, value: f64) -> Result<()> {
        let dtype = self.dtype();
        self.set_shards(&|part| Ok(filled(value, &shard_meta(part, dtype))?))
    }

    /// Copies the elements of a tensor of the same shape, which may have another spec and another type. Collective, as
    /// [`reshard`](Self::reshard) is. Clones keep their elements.
    #[track_caller]
    #[doc(alias = "copy_")]
    pub fn copy_from(&mut self, other: &ShardedTensor) -> Result<()> {
        let moved = other.to_dtype(self.dtype())?.reshard_at(self.spec.clone(), Location::caller())?;
        self.shards = moved.shards;
        Ok(())
    }

    /// Replaces the shards of this rank by the ones that `build` returns. Clones keep the old ones.
    pub(crate) fn set_shards(&mut self, build: &dyn Fn(&ShardMetadata) -> Result<Tensor>) -> Result<()> {
        let (dry, dtype) = (self.mesh.world().is_dry(), self.dtype());
        let one = |shard: &TensorShard| -> Result<TensorShard> {
            let part = &shard.metadata;
            let tensor = if dry { placeholder(&shard_meta(part, dtype))? } else { build(part)? };
            Ok(TensorShard { tensor, metadata: part.clone() })
        };
        self.shards = self.shards.iter().map(one).collect::<Result<Vec<_>>>()?;
        // Clones keep the old elements, so this is now a different tensor.
        self.id = TensorId::next();
        Ok(())
    }
}

fn shard_meta(part: &ShardMetadata, dtype: DType) -> TensorMeta {
    TensorMeta { shape: part.sizes.clone(), dtype }
}

/// The type in which elements are drawn: `f8` is rounded from `f32`, as in distributed tensors.
fn drawn_dtype(dtype: DType) -> DType {
    if dtype == DType::F8E4M3 { DType::F32 } else { dtype }
}

fn random_at(
    distribution: Distribution,
    spec: AnyShardingSpec,
    meta: &TensorMeta,
    mesh: &DeviceMesh,
    site: Site,
) -> Result<ShardedTensor> {
    // A tensor that cannot be built is refused before the generator advances.
    ShardedTensor::checked(&spec, meta, mesh)?;
    let (size, drawn) = (&meta.shape, drawn_dtype(meta.dtype));
    let draw = agreed_draw(distribution, size, drawn, mesh, mesh.generator(), site)?;
    ShardedTensor::by_shard(spec, meta, mesh, |part| {
        Ok(convert(&random_box(distribution, draw, size, &part.as_box(), drawn)?, meta.dtype)?)
    })
}
