//! Plans: how a model is spread over a mesh, said apart from the model, found by planners, and carried out in one call.
//!
//! * [`ShardingPlan`] is the value: paths to placements, to modules that replace others, to layouts of inputs and outputs.
//!   [`shard_module`] carries it out, [`ShardingPlan::build`] builds a model by it.
//! * [`ShardingPlanner`]s make plans: [`DataParallel`], [`FullyShard`], [`TensorParallel`], combinations of them, and
//!   [`AutoPlanner`], which tries plans without data.
//! * [`parallelize_module`] makes a plan of styles per module, such as [`ColwiseParallel`].
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
//!     let held: usize = mlp.named_parameters().iter().map(|(_, p)| p.get().to_local().elem_count()).sum();
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
mod places;
mod planner;
mod sharder;
mod sharding_plan;
mod styles;
mod transformer;

pub use apply::{PlanRow, PlanTable, reshard_output, shard_module, shard_parameter};
pub use auto::{AutoPlanner, Search, Trial};
pub use estimate::Estimate;
pub use local::collect_local_shard;
pub use places::Places;
pub use planner::{Combined, DataParallel, FullyShard, ShardingPlanner, fully_shard, replicate};
pub use sharder::{LowRankAdapter, Part, Sharder, VocabularyParallel};
pub use sharding_plan::{ParamPlan, ShardingPlan};
pub use styles::{
    ColwiseParallel, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput, RowwiseParallel,
    SequenceParallel, parallelize_module,
};
pub use transformer::{TableCut, TensorParallel};
pub(crate) use transformer::{batch_inputs, check_hints};
