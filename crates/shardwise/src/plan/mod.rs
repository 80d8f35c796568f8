//! Plans: how a model is spread over a mesh, said apart from the model, found by planners, and carried out in one call.

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
