//! Training steps without data: what planners price, and what [`report_step`] describes.

use super::build_model::build;
use super::model::{Model, ModelSpec};
use super::step_options::StepOptions;
use crate::comm::{DeviceMesh, DryWorld, MemoryByKind, Phase, World};
use crate::error::Result;
use crate::mesh::Mesh;
use crate::nn::Module;
use crate::optim::{AdamW, ShardedOptimizer};
use crate::param::Param;
use crate::plan::{PhaseEstimate, PlacedParameter, ShardingPlan, StepCall, StepPlace, StepReport, thinned, traffic_of};
use crate::tensor::DTensor;

/// A model with its optimizer and a batch, in a dry run.
pub(crate) struct DryTraining<M> {
    pub(crate) model: M,
    optimizer: Option<ShardedOptimizer>,
    batch: Vec<DTensor>,
}

impl<M: Model> DryTraining<M> {
    pub(crate) fn new<C: ModelSpec<Model = M> + ?Sized>(
        config: &C,
        plan: &ShardingPlan,
        mesh: &DeviceMesh,
        options: &StepOptions,
    ) -> Result<Self> {
        let model = build(config, plan, mesh, options.dtype)?;
        let optimizer = match &options.optimizer {
            None => None,
            Some(group) => {
                let fits = |(_, param): &(String, Param)| group.algorithm.check_shape(&param.shape()).is_ok();
                let (fitting, remaining): (Vec<_>, Vec<_>) = model.trainable_parameters().into_iter().partition(fits);
                let mut optimizer = ShardedOptimizer::new(fitting, group.clone())?;
                if !remaining.is_empty() {
                    optimizer.add_param_group(remaining, AdamW::default())?;
                }
                Some(optimizer)
            }
        };
        let batch = config.example_batch(options.batch, mesh)?;
        Ok(DryTraining { model, optimizer, batch })
    }

    /// Runs one step, as [`Trainer::step`](crate::train::Trainer::step) does.
    pub(crate) fn step(&mut self) -> Result<()> {
        let gradients = self.model.batch_loss(&self.batch)?.backward()?;
        match &mut self.optimizer {
            Some(optimizer) => optimizer.step(gradients),
            None => gradients.in_param_layout().map(drop),
        }
    }
}

/// The dry world of a mesh.
pub(crate) fn dry_world(mesh: &Mesh, options: &StepOptions) -> Result<DryWorld> {
    let size = mesh.ranks().iter().max().map_or(1, |rank| rank + 1);
    DryWorld::new(size)?.network(options.network.clone())?.as_rank(mesh.ranks()[0])
}

/// The mesh in a dry world, with the links of the options.
pub(crate) fn bind(mesh: &Mesh, world: &World, options: &StepOptions) -> Result<DeviceMesh> {
    let bound = world.device_mesh(mesh.clone())?;
    match &options.links {
        Some(links) => bound.with_links(links),
        None => Ok(bound),
    }
}

/// Describes a training step under a plan by running it without data: memory by kind, communication, estimated time.
///
/// Local: no other rank takes part. The step is that of [`Trainer`](crate::train::Trainer) without clipping, on the first rank
/// of the mesh; its loss is not read. Optimizer state exists: the step is not the first one. `name` is the name of the model and
/// `plan_name` that of the plan in the report.
///
/// ```
/// use shardwise::Mesh;
/// use shardwise::mesh::Network;
/// use shardwise::models::{GptConfig, ParallelismConfig, StepOptions, DataParallelMode, report_step};
/// use shardwise::optim::AdamW;
///
/// let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() };
/// let mesh = Mesh::new([("dp", 4)])?;
/// let data_parallel = DataParallelMode::FullyShard;
/// let plan = ParallelismConfig { data_parallel, tensor_parallel: false, sequence_parallel: false }.plan(&config, &mesh)?;
/// let options = StepOptions::new(8, Network::THREADS).optimizer(AdamW::default());
/// let report = report_step(("gpt", &config), ("fsdp", &plan), &mesh, &options)?;
/// assert_eq!(report.held.optimizer_state, 2 * report.held.parameters);
/// println!("{report}");
/// # Ok::<(), shardwise::Error>(())
/// ```
///
/// # Errors
/// Those of [`ModelSpec::check`], of the plan, and of the step.
pub fn report_step(
    (name, config): (&str, &(impl ModelSpec + ?Sized)),
    (plan_name, plan): (&str, &ShardingPlan),
    mesh: &Mesh,
    options: &StepOptions,
) -> Result<StepReport> {
    config.check()?;
    let ran = dry_world(mesh, options)?.run(|world| {
        let bound = bind(mesh, &world, options)?;
        let mut training = DryTraining::new(config, plan, &bound, options)?;
        if training.optimizer.is_some() {
            // The first step allocates the optimizer state.
            training.step()?;
        }
        let held = world.memory().by_kind();
        let flops_before = Phase::ALL.map(|phase| world.flops().in_phase(phase));
        world.trace().clear();
        world.memory().reset_peak();
        world.memory().start_recording();
        training.step()?;
        let samples = world.memory().stop_recording();
        let calls: Vec<StepCall> = world.trace().records().iter().map(|record| StepCall::new(record, &bound)).collect();
        let largest = samples.iter().fold(MemoryByKind::default(), |most, sample| most.max(&sample.bytes)).max(&held);
        let at_peak = samples.iter().find(|sample| sample.bytes.total() == world.memory().peak());
        let phases = Phase::ALL.into_iter().zip(flops_before).map(|(phase, before)| {
            let flops = world.flops().in_phase(phase) - before;
            let communication = calls.iter().filter(|call| call.phase == phase).map(|call| call.us);
            PhaseEstimate {
                phase,
                flops,
                compute_us: flops as f64 / options.flops_per_s * 1e6,
                // Not `sum`: that of nothing is -0.
                communication_us: communication.fold(0.0, |sum, us| sum + us),
            }
        });
        let rank = mesh.ranks()[0];
        let placed = |(path, param): (String, Param)| {
            let (layout, dtype) = (param.layout(), param.dtype());
            let bytes = layout.local_shape(rank).iter().product::<usize>() * dtype.size_in_bytes();
            PlacedParameter { path, dtype: dtype.as_str().to_string(), layout, bytes }
        };
        let described = |tensor: &DTensor| format!("{} {:?}", tensor.dtype().as_str(), tensor.shape());
        Ok(StepReport {
            model: name.to_string(),
            parameter_count: training.model.parameter_count(),
            mesh: mesh.clone(),
            links: (0..mesh.ndim()).map(|axis| bound.links().of_axis(axis)).collect(),
            rank,
            plan: plan_name.to_string(),
            batch: options.batch,
            inputs: training.batch.iter().map(described).collect(),
            dtype: options.dtype.as_str().to_string(),
            optimizer: options.optimizer.as_ref().map_or(String::new(), |group| group.algorithm.name().to_string()),
            held,
            largest,
            peak: world.memory().peak_by_kind(),
            peak_at: at_peak.map(|sample| StepPlace { phase: sample.phase, module: sample.module.clone() }),
            memory_limit: Some(options.memory_limit).filter(|&limit| limit < usize::MAX),
            timeline: thinned(samples),
            phases: phases.collect(),
            traffic: traffic_of(&calls),
            calls,
            parameters: training.model.named_parameters().into_iter().map(placed).collect(),
            advice: Vec::new(),
        })
    })?;
    Ok(ran.value)
}
