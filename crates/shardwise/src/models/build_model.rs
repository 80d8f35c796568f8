//! Builds a model by a plan.

use candle_core::DType;

use super::model::ModelSpec;
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::plan::{ShardingPlan, shard_module};

/// Builds a model whose parameters are created in the layouts of a plan.
///
/// Collective: all ranks of the mesh must call it with the same plan. As [`ShardingPlan::build`], for a [`ModelSpec`].
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if sizes do not fit together, or the plan does not fit the model and the mesh.
pub fn build<C: ModelSpec + ?Sized>(
    config: &C,
    plan: &ShardingPlan,
    mesh: &DeviceMesh,
    dtype: DType,
) -> Result<C::Model> {
    config.check()?;
    let builder = plan.builder(mesh).dtype(dtype);
    let model = config.build(&builder)?;
    builder.check(&model)?;
    shard_module(&model, mesh, plan)?;
    Ok(model)
}
