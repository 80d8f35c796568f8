//! Sharding plans: how a model is sharded over a mesh, specified separately from the model.
//!
//! * A [`ShardingPlan`] maps paths to placements of parameters, inputs and outputs, and to replacements of modules.
//!   [`shard_module`] applies it to a model, [`ShardingPlan::build`] builds a model by it.
//! * A [`ShardingPlanner`] creates plans: [`DataParallel`], [`FullyShard`], [`TensorParallel`], combinations of them, and
//!   [`AutoPlanner`], which searches by running plans without data.
//! * [`parallelize_module`] applies parallel styles such as [`ColwiseParallel`] to modules, as in PyTorch.
//!
//! ```
//! use shardwise::nn::{Activation, Builder, Forward, Mlp, Module};
//! use shardwise::plan::{FullyShard, ShardingPlanner, TensorParallel, shard_module};
//! use shardwise::prelude::*;
//!
//! launch(4, |world| {
//!     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
//!     let mlp = Mlp::new(&Builder::new(&mesh), 8, 16, Activation::Gelu)?;
//!     let plan = TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&mlp, &mesh)?;
//!     shard_module(&mlp, &mesh, &plan)?;
//!     let held: usize = mlp.named_parameters().iter().map(|(_, p)| p.get().local_elem_count()).sum();
//!     assert_eq!((mlp.parameter_count(), held), (280, 72));
//!     if world.rank() == 0 {
//!         println!("{}", plan.table(&mlp)?);
//!     }
//!     Ok(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod apply;
mod auto;
mod estimate;
mod local;
mod pattern;
mod planner;
mod search_space;
mod sharder;
mod sharding_plan;
mod step_report;
mod styles;
mod target_placements;
mod transformer;

pub use apply::{PlanRow, PlanTable, reshard_output, shard_module, shard_parameter};
pub(crate) use auto::DEFAULT_FLOPS_PER_S;
pub use auto::{AutoPlanner, PlanSearch, PlanTrial};
pub use estimate::StepEstimate;
pub use local::collect_local_shard;
pub use planner::{CombinedPlanner, DataParallel, FullyShard, ShardingPlanner, fully_shard, replicate};
pub use sharder::{ModuleView, Sharder, VocabularyParallel};
pub use sharding_plan::{ParamPlan, ShardingPlan};
pub use step_report::{AxisTraffic, MovedTensor, PhaseEstimate, PlacedParameter, StepCall, StepPlace, StepReport};
pub(crate) use step_report::{thinned, traffic_of};
pub use styles::{
    ColwiseParallel, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, RowwiseParallel,
    SequenceParallel, parallelize_module,
};
pub use target_placements::TargetPlacements;
pub use transformer::{EmbeddingSharding, TensorParallel};
pub(crate) use transformer::{batch_inputs, check_hints};
