//! Plans for models on the axes `dp`, over which the batch is sharded, and `tp`, over which heads and features are.

use candle_core::DType;

use super::model::{Model, ModelSpec};
use crate::comm::{DeviceMesh, DryWorld};
use crate::error::{ErrorKind, Result};
use crate::mesh::Mesh;
use crate::nn::{Builder, Module};
use crate::placement::Placement::{self, Replicate, Shard};
use crate::plan::{
    AutoPlanner, DataParallel, Estimate, FullyShard, Search, ShardingPlan, ShardingPlanner, TensorParallel,
    batch_inputs, check_hints, shard_module,
};

/// What ranks that share the batch hold of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Weights {
    /// All: gradients are reduced.
    Replicated,
    /// A part: weights are gathered where they are used, gradients are scattered.
    Sharded,
}

/// How a model is spread over the axes `dp` and `tp` of a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spread {
    /// What ranks along `dp` hold of the weights.
    pub weights: Weights,
    /// Whether ranks along `tp` share heads, features inside MLPs, and the vocabulary.
    pub tensor_parallel: bool,
    /// Whether they share positions where they do not share features: between attention and MLP.
    pub sequence_parallel: bool,
}

impl Spread {
    /// The plan for a model on a mesh. Nothing runs: a mesh is enough.
    pub fn plan(&self, config: &(impl ModelSpec + ?Sized), mesh: &Mesh) -> Result<ShardingPlan> {
        self.check(config, mesh)?;
        planned(config, mesh, |module, mesh| {
            let mut plan = ShardingPlan::new();
            if self.tensor_parallel {
                let planner = TensorParallel::new("tp");
                let planner = if self.sequence_parallel { planner.sequence(1) } else { planner };
                plan = planner.extend(plan, module, mesh)?;
            }
            if mesh.axis("dp").is_err() {
                return Ok(plan);
            }
            if self.weights == Weights::Replicated {
                return DataParallel::new(["dp"]).extend(plan, module, mesh);
            }
            plan = FullyShard::new(["dp"]).extend(plan, module, mesh)?;
            // Vectors are not worth a collective each: their gradients are reduced together.
            for (path, param) in module.named_parameters() {
                if param.shape().len() == 1 {
                    plan = plan.along(&path, mesh.mesh(), &[("dp".to_string(), Replicate)])?;
                }
            }
            Ok(batch_inputs(module).iter().fold(plan, |plan, path| plan.input(path, [("dp", Shard(0))])))
        })
    }

    /// An error if a model cannot be spread so over a mesh.
    fn check(&self, config: &(impl ModelSpec + ?Sized), mesh: &Mesh) -> Result<()> {
        config.check()?;
        check_axes(mesh)?;
        let tp = mesh.axis("tp").map_or(1, |axis| mesh.shape()[axis]);
        let bad = |found: String, needed: &str, fix: &str| Err(ErrorKind::Mesh.error("mesh", found, needed, fix));
        if !self.tensor_parallel && tp > 1 {
            let found = format!("mesh {mesh} with a plan that leaves axis `tp` idle");
            return bad(found, "axis `dp` alone", "use a plan with tp, or make the axis dp");
        }
        if self.tensor_parallel && mesh.axis("tp").is_err() {
            let found = format!("mesh {mesh} with a plan for tensor parallelism");
            return bad(found, "an axis `tp`", "use a mesh such as tp=2 or dp=2,tp=2");
        }
        if self.weights == Weights::Sharded && mesh.axis("dp").is_err() {
            let found = format!("mesh {mesh} with a plan that shards weights over the batch axis");
            return bad(found, "an axis `dp`", "use a mesh such as dp=2 or dp=2,tp=2");
        }
        if self.sequence_parallel && !self.tensor_parallel {
            let found = "sequence parallelism in a plan without tensor parallelism".to_string();
            return bad(found, "both, or neither", "use a plan with tp");
        }
        Ok(())
    }
}

/// Searches for the plan under which a step on batches of so many samples takes the least time.
///
/// ```
/// use shardwise::Mesh;
/// use shardwise::models::{GptConfig, search_plan};
///
/// let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() };
/// let search = search_plan(&config, &Mesh::new([("dp", 2)])?, 8)?;
/// assert!(search.tried.len() >= 2, "{search}");
/// # Ok::<(), shardwise::Error>(())
/// ```
pub fn search_plan(config: &(impl ModelSpec + ?Sized), mesh: &Mesh, batch: usize) -> Result<Search> {
    config.check()?;
    check_axes(mesh)?;
    let step = |plan: &ShardingPlan, mesh: &DeviceMesh| step_of(config, plan, mesh, batch);
    planned(config, mesh, |module, mesh| AutoPlanner::new(step).trials(TRIALS).search(module, mesh))
}

/// Estimates what a step on batches of so many samples takes under a plan, by running it without data.
///
/// ```
/// use shardwise::Mesh;
/// use shardwise::models::{GptConfig, Spread, Weights, estimate_step};
///
/// let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() };
/// let mesh = Mesh::new([("dp", 4)])?;
/// let peak_bytes = |weights| -> shardwise::Result<usize> {
///     let spread = Spread { weights, tensor_parallel: false, sequence_parallel: false };
///     Ok(estimate_step(&config, &spread.plan(&config, &mesh)?, &mesh, 8)?.peak_bytes)
/// };
/// assert!(peak_bytes(Weights::Sharded)? < peak_bytes(Weights::Replicated)?);
/// # Ok::<(), shardwise::Error>(())
/// ```
pub fn estimate_step(
    config: &(impl ModelSpec + ?Sized),
    plan: &ShardingPlan,
    mesh: &Mesh,
    batch: usize,
) -> Result<Estimate> {
    config.check()?;
    let step = |plan: &ShardingPlan, mesh: &DeviceMesh| step_of(config, plan, mesh, batch);
    planned(config, mesh, |_, mesh| AutoPlanner::new(step).estimate(plan, mesh))
}

/// Plans that are tried beyond the uniform ones: each runs the whole model once, without data.
const TRIALS: usize = 24;

/// A step of a new model, but for its optimizer.
fn step_of(config: &(impl ModelSpec + ?Sized), plan: &ShardingPlan, mesh: &DeviceMesh, batch: usize) -> Result<()> {
    let model = build(config, plan, mesh, DType::F32)?;
    let batch = config.example_batch(batch, mesh)?;
    model.batch_loss(&batch)?.backward()?.in_param_layout()?;
    Ok(())
}

/// Builds a new model by a plan, which must be one for the model and the mesh.
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

/// Placements of the tensors of a batch: sharded on dimension 0 over `dp`, replicated over other axes.
pub fn batch_placements(mesh: &Mesh) -> Vec<Placement> {
    mesh.axes().iter().map(|axis| if axis.name == "dp" { Shard(0) } else { Replicate }).collect()
}

/// What a planner says of a model, which is built without data to be looked at.
fn planned<T: Send>(
    config: &(impl ModelSpec + ?Sized),
    mesh: &Mesh,
    planner: impl Fn(&dyn Module, &DeviceMesh) -> Result<T> + Sync,
) -> Result<T> {
    let dry = DryWorld::new(mesh.ranks().iter().max().map_or(1, |rank| rank + 1))?.as_rank(mesh.ranks()[0])?;
    let ran = dry.run(|world| {
        let mesh = world.device_mesh(mesh.clone())?;
        let model = config.build(&Builder::new(&mesh))?;
        check_hints(&model)?;
        planner(&model, &mesh)
    })?;
    Ok(ran.value)
}

fn check_axes(mesh: &Mesh) -> Result<()> {
    let Some(axis) = mesh.axes().iter().find(|axis| !["dp", "tp"].contains(&&*axis.name)) else { return Ok(()) };
    let found = format!("axis `{}` in mesh {mesh}", axis.name);
    let needed = "axes `dp` (ranks share the batch) and `tp` (ranks share heads and features)";
    Err(ErrorKind::Mesh.error("mesh", found, needed, "rename the axis"))
}
