//! Plans for models on two mesh axes: `dp`, over which the batch is sharded, and `tp`, over which heads and features are.

use candle_core::DType;

use super::model::{Model, ModelSpec};
use crate::comm::{DeviceMesh, DryWorld};
use crate::error::{ErrorKind, Result};
use crate::mesh::{Mesh, Network};
use crate::nn::{Builder, Module};
use crate::placement::Placement::{self, Replicate, Shard};
use crate::plan::{
    AutoPlanner, DEFAULT_FLOPS_PER_S, DataParallel, FullyShard, PlanSearch, ShardingPlan, ShardingPlanner,
    StepEstimate, TensorParallel, batch_inputs, check_hints, shard_module,
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
        in_dry_run(config, mesh, &Network::THREADS, |module, mesh| {
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
            return bad(found, "axis `dp` alone", "use a plan with tp, or rename the axis to dp");
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

/// The training step that [`search_plan`] and [`estimate_step`] run without data, and what they price it by.
///
/// ```
/// use shardwise::mesh::{Link, Network};
/// use shardwise::models::StepOptions;
///
/// let cable = Link { latency_us: 30.0, gb_per_s: 1.25 };
/// let two_hosts = Network::of_hosts([0, 0, 1, 1], Link::THREADS, cable)?;
/// let options = StepOptions::new(32, two_hosts).memory_limit(8 << 30);
/// assert_eq!(options.batch, 32);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct StepOptions {
    /// Samples of a batch, over all ranks.
    pub batch: usize,
    /// Links between the ranks, by which collectives are priced: [`World::network`](crate::World::network) of the world
    /// that the model will run in.
    pub network: Network,
    /// Most bytes that a rank may need; no limit by default.
    pub memory_limit: usize,
    /// Elementary operations that a rank does in a second; 20e9 by default, about one core.
    pub flops_per_s: f64,
}

impl StepOptions {
    /// A step on batches of `batch` samples, on a network.
    pub fn new(batch: usize, network: Network) -> Self {
        StepOptions { batch, network, memory_limit: usize::MAX, flops_per_s: DEFAULT_FLOPS_PER_S }
    }

    /// Sets `memory_limit`.
    pub fn memory_limit(self, bytes: usize) -> Self {
        StepOptions { memory_limit: bytes, ..self }
    }

    /// Sets `flops_per_s`.
    pub fn flops_per_s(self, rate: f64) -> Self {
        StepOptions { flops_per_s: rate, ..self }
    }
}

/// Searches for the plan under which a training step takes the least time, among plans that fit into the memory limit.
///
/// Local: the candidates run in dry runs, without data and without other ranks. The result depends on the arguments alone,
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
    let step = |plan: &ShardingPlan, mesh: &DeviceMesh| training_step(config, plan, mesh, options.batch);
    in_dry_run(config, mesh, &options.network, |module, mesh| {
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
    let step = |plan: &ShardingPlan, mesh: &DeviceMesh| training_step(config, plan, mesh, options.batch);
    in_dry_run(config, mesh, &options.network, |_, mesh| {
        AutoPlanner::new(step).flops_per_s(options.flops_per_s).estimate(plan, mesh)
    })
}

/// Plans that [`search_plan`] tries beyond the uniform ones. Fewer than the planner's default, because each one runs the
/// step of a full model once, and a command waits for it.
const TRIALS: usize = 24;

/// Forward and backward pass of a new model, with gradients in the layouts of the parameters; the optimizer is local.
fn training_step(
    config: &(impl ModelSpec + ?Sized),
    plan: &ShardingPlan,
    mesh: &DeviceMesh,
    batch: usize,
) -> Result<()> {
    let model = build(config, plan, mesh, DType::F32)?;
    let batch = config.example_batch(batch, mesh)?;
    model.batch_loss(&batch)?.backward()?.in_param_layout()?;
    Ok(())
}

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

/// Returns the placements of the tensors of a batch: sharded on dimension 0 over `dp`, replicated over other axes.
pub fn batch_placements(mesh: &Mesh) -> Vec<Placement> {
    mesh.axes().iter().map(|axis| if axis.name == "dp" { Shard(0) } else { Replicate }).collect()
}

/// Runs a planner on a model that is built in a dry run.
fn in_dry_run<T: Send>(
    config: &(impl ModelSpec + ?Sized),
    mesh: &Mesh,
    network: &Network,
    planner: impl Fn(&dyn Module, &DeviceMesh) -> Result<T> + Sync,
) -> Result<T> {
    let size = mesh.ranks().iter().max().map_or(1, |rank| rank + 1);
    let dry = DryWorld::new(size)?.network(network.clone())?.as_rank(mesh.ranks()[0])?;
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
    let needed = "axes `dp` (shards the batch) and `tp` (shards heads and features)";
    Err(ErrorKind::Mesh.error("mesh", found, needed, "rename the axis"))
}
