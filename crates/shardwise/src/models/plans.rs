//! Plans for models on two mesh axes: `dp`, over which the batch is sharded, and `tp`, over which heads and features are.

use super::dry_training::{DryTraining, bind, dry_world};
use super::model::ModelSpec;
use super::step_options::StepOptions;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::mesh::{Mesh, Network};
use crate::nn::{Builder, Module};
use crate::placement::Placement::{self, Replicate, Shard};
use crate::plan::{
    AutoPlanner, DataParallel, FullyShard, PlanSearch, ShardingPlan, ShardingPlanner, StepEstimate, TensorParallel,
    batch_inputs, check_hints,
};

/// What ranks along the `dp` axis, which shard the batch, hold of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DataParallelMode {
    /// Full parameters: gradients are all-reduced (DDP).
    #[doc(alias = "DDP")]
    Replicate,
    /// Shards of parameters: they are all-gathered for use, gradients are reduce-scattered (FSDP).
    #[doc(alias = "FSDP")]
    FullyShard,
}

/// Which kinds of parallelism a model uses on the mesh axes `dp` and `tp`.
///
/// ```
/// use shardwise::Mesh;
/// use shardwise::models::{DataParallelMode, GptConfig, ParallelismConfig};
///
/// let parallelism = ParallelismConfig {
///     data_parallel: DataParallelMode::FullyShard,
///     tensor_parallel: true,
///     sequence_parallel: false,
/// };
/// let plan = parallelism.plan(&GptConfig::default(), &Mesh::new([("dp", 2), ("tp", 2)])?)?;
/// println!("{plan}");
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParallelismConfig {
    /// Data parallelism over `dp`; without meaning if the mesh has no such axis.
    pub data_parallel: DataParallelMode,
    /// Whether heads, features inside MLPs and the vocabulary are sharded over `tp`.
    pub tensor_parallel: bool,
    /// Whether activations between blocks are sharded over `tp` on the sequence; needs tensor parallelism.
    pub sequence_parallel: bool,
}

impl ParallelismConfig {
    /// Returns the plan for a model on a mesh. Local: the model is built in a dry run, so that a plain [`Mesh`] is enough.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the mesh lacks an axis that is needed, has axes other than `dp` and `tp`, or
    /// leaves one idle.
    pub fn plan(&self, config: &(impl ModelSpec + ?Sized), mesh: &Mesh) -> Result<ShardingPlan> {
        self.check(config, mesh)?;
        // No collective is priced here, so any network does.
        in_dry_run(config, mesh, &StepOptions::new(1, Network::THREADS), |module, mesh| {
            let mut plan = ShardingPlan::new();
            if self.tensor_parallel {
                let planner = TensorParallel::new("tp");
                let planner = if self.sequence_parallel { planner.sequence_parallel(1) } else { planner };
                plan = planner.extend(plan, module, mesh)?;
            }
            if mesh.axis("dp").is_err() {
                return Ok(plan);
            }
            if self.data_parallel == DataParallelMode::Replicate {
                return DataParallel::new(["dp"]).extend(plan, module, mesh);
            }
            plan = FullyShard::new(["dp"]).extend(plan, module, mesh)?;
            // Biases and norms are not worth an all-gather each; their gradients are reduced together in one bucket.
            for (path, param) in module.named_parameters() {
                if param.shape().len() == 1 {
                    plan = plan.add_placements(&path, mesh.mesh(), &[("dp".to_string(), Replicate)])?;
                }
            }
            Ok(batch_inputs(module).iter().fold(plan, |plan, path| plan.input(path, [("dp", Shard(0))])))
        })
    }

    /// Checks that the mesh has the axes that are needed, and no idle ones.
    fn check(&self, config: &(impl ModelSpec + ?Sized), mesh: &Mesh) -> Result<()> {
        config.check()?;
        check_axes(mesh)?;
        let tp = mesh.axis("tp").map_or(1, |axis| mesh.shape()[axis]);
        let bad = |found: String, needed: &str, fix: &str| Err(ErrorKind::Mesh.error("mesh", found, needed, fix));
        if !self.tensor_parallel && tp > 1 {
            let found = format!("mesh {mesh} with a plan that leaves axis `tp` idle");
            return bad(found, "only axis `dp`", "use a plan with tp, or rename the axis to dp");
        }
        if self.tensor_parallel && mesh.axis("tp").is_err() {
            let found = format!("mesh {mesh} with a plan for tensor parallelism");
            return bad(found, "an axis `tp`", "use a mesh such as tp=2 or dp=2,tp=2");
        }
        if self.data_parallel == DataParallelMode::FullyShard && mesh.axis("dp").is_err() {
            let found = format!("mesh {mesh} with a plan that shards parameters over the batch axis");
            return bad(found, "an axis `dp`", "use a mesh such as dp=2 or dp=2,tp=2");
        }
        if self.sequence_parallel && !self.tensor_parallel {
            let found = "sequence parallelism in a plan without tensor parallelism".to_string();
            return bad(found, "both, or neither", "use a plan with tp");
        }
        Ok(())
    }
}

/// Searches for the plan under which a training step takes the least time, among plans that fit into the memory limit.
///
/// Local: the candidates run in dry runs, without data and without other ranks. The result depends only on the arguments,
/// so that ranks that pass the same ones get the same plan.
///
/// ```
/// use shardwise::Mesh;
/// use shardwise::mesh::Network;
/// use shardwise::models::{GptConfig, StepOptions, search_plan};
///
/// let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() };
/// let search = search_plan(&config, &Mesh::new([("dp", 2)])?, &StepOptions::new(8, Network::THREADS))?;
/// assert!(search.trials.len() >= 2, "{search}");
/// # Ok::<(), shardwise::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if sizes or axes do not fit, the network lacks ranks of the mesh, or no plan
/// fits into the memory limit.
pub fn search_plan(config: &(impl ModelSpec + ?Sized), mesh: &Mesh, options: &StepOptions) -> Result<PlanSearch> {
    config.check()?;
    check_axes(mesh)?;
    let step = |plan: &ShardingPlan, mesh: &DeviceMesh| training_step(config, plan, mesh, options);
    in_dry_run(config, mesh, options, |module, mesh| {
        let planner = AutoPlanner::new(step).memory_limit(options.memory_limit).flops_per_s(options.flops_per_s);
        planner.trials(TRIALS).search(module, mesh)
    })
}

/// Estimates time and memory of a training step under a plan, by running it without data.
///
/// Local: no other rank takes part.
///
/// ```
/// use shardwise::Mesh;
/// use shardwise::mesh::Network;
/// use shardwise::models::{GptConfig, ParallelismConfig, StepOptions, DataParallelMode, estimate_step};
///
/// let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() };
/// let (mesh, options) = (Mesh::new([("dp", 4)])?, StepOptions::new(8, Network::THREADS));
/// let peak_bytes = |data_parallel| -> shardwise::Result<usize> {
///     let parallelism = ParallelismConfig { data_parallel, tensor_parallel: false, sequence_parallel: false };
///     Ok(estimate_step(&config, &parallelism.plan(&config, &mesh)?, &mesh, &options)?.peak_bytes)
/// };
/// assert!(peak_bytes(DataParallelMode::FullyShard)? < peak_bytes(DataParallelMode::Replicate)?);
/// # Ok::<(), shardwise::Error>(())
/// ```
pub fn estimate_step(
    config: &(impl ModelSpec + ?Sized),
    plan: &ShardingPlan,
    mesh: &Mesh,
    options: &StepOptions,
) -> Result<StepEstimate> {
    config.check()?;
    let step = |plan: &ShardingPlan, mesh: &DeviceMesh| training_step(config, plan, mesh, options);
    in_dry_run(config, mesh, options, |_, mesh| {
        AutoPlanner::new(step).flops_per_s(options.flops_per_s).estimate(plan, mesh)
    })
}

/// Plans that [`search_plan`] tries beyond the uniform ones. Fewer than the planner's default, because each one runs the
/// step of a full model once, and a command waits for it.
const TRIALS: usize = 24;

/// Forward and backward pass of a new model, with gradients in the layouts of the parameters, and the update, if any.
fn training_step(
    config: &(impl ModelSpec + ?Sized),
    plan: &ShardingPlan,
    mesh: &DeviceMesh,
    options: &StepOptions,
) -> Result<()> {
    let mut run = DryTraining::new(config, plan, mesh, options)?;
    run.step()
}

/// Returns the placements of the tensors of a batch: sharded on dimension 0 over `dp`, replicated over other axes.
pub fn batch_placements(mesh: &Mesh) -> Vec<Placement> {
    mesh.axes().iter().map(|axis| if axis.name == "dp" { Shard(0) } else { Replicate }).collect()
}

/// Runs a planner on a model that is built in a dry run.
fn in_dry_run<T: Send>(
    config: &(impl ModelSpec + ?Sized),
    mesh: &Mesh,
    options: &StepOptions,
    planner: impl Fn(&dyn Module, &DeviceMesh) -> Result<T> + Sync,
) -> Result<T> {
    let ran = dry_world(mesh, options)?.run(|world| {
        let mesh = bind(mesh, &world, options)?;
        let model = config.build(&Builder::new(&mesh))?;
        check_hints(&model)?;
        planner(&model, &mesh)
    })?;
    Ok(ran.value)
}

fn check_axes(mesh: &Mesh) -> Result<()> {
    let Some(axis) = mesh.axes().iter().find(|axis| !["dp", "tp"].contains(&&*axis.name)) else { return Ok(()) };
    let found = format!("axis `{}` in mesh {mesh}", axis.name);
    let needed = "axes `dp` (shards the batch) and `tp` (shards heads and features)";
    Err(ErrorKind::Mesh.error("mesh", found, needed, "write for example `dp=2,tp=4`"))
}
