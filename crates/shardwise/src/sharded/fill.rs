//! Initial values and tensors like others: every element by its place in the whole, whatever the shards.

use std::panic::Location;

use candle_core::{DType, Shape, Tensor};

use super::metadata::ShardMetadata;
use super::shard::Shard;
use super::spec::AnyShardingSpec;
use super::tensor::ShardedTensor;
use crate::comm::DeviceMesh;
use crate::error::{Result, Site};
use crate::layout::TensorMeta;
use crate::nn::init::{Init, InitialValue};
use crate::random::Distribution;
use crate::tensor::{TensorId, agreed_draw, random_box};
use shardwise_kernels::{filled, placeholder};

impl ShardedTensor {
    /// Random elements, drawn from the generator of the mesh: the same bits as any other layout of the tensor has.
    #[track_caller]
    pub fn random(
        distribution: Distribution,
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        let size = shape.into().into_dims();
        random_at(distribution, spec.into(), &size, dtype, mesh, Location::caller())
    }

    /// Uniform random numbers in `0..1`.
    #[track_caller]
    pub fn rand(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::random(Distribution::Uniform { low: 0.0, high: 1.0 }, spec, shape, dtype, mesh)
    }

    /// Normal random numbers with mean 0 and standard deviation 1.
    #[track_caller]
    pub fn randn(
        spec: impl Into<AnyShardingSpec>,
        shape: impl Into<Shape>,
        dtype: DType,
        mesh: &DeviceMesh,
    ) -> Result<ShardedTensor> {
        Self::random(Distribution::Normal { mean: 0.0, std: 1.0 }, spec, shape, dtype, mesh)
    }

    /// One value with the shape, type and spec of this tensor.
    pub fn full_like(&self, value: f64) -> Result<ShardedTensor> {
        Self::full(self.spec.clone(), value, self.shape(), self.dtype(), &self.mesh)
    }

    /// Zeros like this tensor.
    pub fn zeros_like(&self) -> Result<ShardedTensor> {
        self.full_like(0.0)
    }

    /// Ones like this tensor.
    pub fn ones_like(&self) -> Result<ShardedTensor> {
        self.full_like(1.0)
    }

    /// A tensor to be filled later, like this one.
    pub fn empty_like(&self) -> Result<ShardedTensor> {
        self.zeros_like()
    }

    /// Random elements like this tensor.
    #[track_caller]
    pub fn random_like(&self, distribution: Distribution) -> Result<ShardedTensor> {
        random_at(distribution, self.spec.clone(), self.shape(), self.dtype(), &self.mesh, Location::caller())
    }

    /// Uniform random numbers in `0..1` like this tensor.
    #[track_caller]
    pub fn rand_like(&self) -> Result<ShardedTensor> {
        self.random_like(Distribution::Uniform { low: 0.0, high: 1.0 })
    }

    /// Normal random numbers like this tensor.
    #[track_caller]
    pub fn randn_like(&self) -> Result<ShardedTensor> {
        self.random_like(Distribution::Normal { mean: 0.0, std: 1.0 })
    }

    /// Begins the tensor anew. Fans are those of the whole tensor, whatever part of it a rank holds.
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
    ///     assert_eq!(weight.full_tensor()?.to_vec2::<f32>()?, whole.to_local().to_vec2::<f32>()?);
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
            InitialValue::Constant(value) => self.set_shards(&|part| Ok(filled(value, &described(part, dtype))?)),
            InitialValue::Random(distribution) => {
                let draw = agreed_draw(distribution, &size, dtype, &mesh, mesh.generator(), site)?;
                self.set_shards(&|part| random_box(distribution, draw, &size, &part.as_box(), dtype))
            }
        }
    }

    /// Sets every element to one value.
    #[doc(alias = "fill_")]
    pub fn fill(&mut self, value: f64) -> Result<()> {
        let dtype = self.dtype();
        self.set_shards(&|part| Ok(filled(value, &described(part, dtype))?))
    }

    /// Takes over the elements of a tensor of the same shape, which may be cut in another way and have another type.
    #[track_caller]
    #[doc(alias = "copy_")]
    pub fn copy_from(&mut self, other: &ShardedTensor) -> Result<()> {
        let moved = other.to_dtype(self.dtype())?.reshard_at(self.spec.clone(), Location::caller())?;
        self.shards = moved.shards;
        Ok(())
    }

    /// Makes the shards of this rank anew. Clones keep the old ones.
    pub(crate) fn set_shards(&mut self, make: &dyn Fn(&ShardMetadata) -> Result<Tensor>) -> Result<()> {
        let (dry, dtype) = (self.mesh.world().is_dry(), self.dtype());
        let one = |shard: &Shard| -> Result<Shard> {
            let part = &shard.metadata;
            let tensor = if dry { placeholder(&described(part, dtype))? } else { make(part)? };
            Ok(Shard { tensor, metadata: part.clone() })
        };
        self.shards = self.shards.iter().map(one).collect::<Result<Vec<_>>>()?;
        // A clone keeps its elements, so this is another tensor from here on.
        self.id = TensorId::next();
        Ok(())
    }
}

fn described(part: &ShardMetadata, dtype: DType) -> TensorMeta {
    TensorMeta { shape: part.sizes.clone(), dtype }
}

fn random_at(
    distribution: Distribution,
    spec: AnyShardingSpec,
    size: &[usize],
    dtype: DType,
    mesh: &DeviceMesh,
    site: Site,
) -> Result<ShardedTensor> {
    // What cannot be made is refused before the generator moves on.
    ShardedTensor::checked(&spec, size, dtype, mesh)?;
    let draw = agreed_draw(distribution, size, dtype, mesh, mesh.generator(), site)?;
    ShardedTensor::by_shard(spec, size, dtype, mesh, |part| random_box(distribution, draw, size, &part.as_box(), dtype))
}
