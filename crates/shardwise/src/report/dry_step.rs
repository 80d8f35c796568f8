//! The report of a training step that is not executed.

use super::RunReport;
use crate::error::Result;
use crate::mesh::Mesh;
use crate::models::{DryTraining, ModelSpec, StepOptions, bind, dry_world};
use crate::plan::ShardingPlan;

/// Reports one training step of a model under a plan, from a dry run of the first rank: without data, without memory for it, and
/// without other ranks.
///
/// Local. Times are estimated by the network and the rate of `options`; its memory limit is not used.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if sizes, plan, network and mesh do not fit together.
///
/// ```
/// use shardwise::mesh::{Mesh, Network};
/// use shardwise::models::{DataParallelMode, GptConfig, ParallelismConfig, StepOptions};
///
/// let config = GptConfig { n_layers: 1, d_model: 32, d_ff: 64, ..GptConfig::default() };
/// let mesh = Mesh::new([("dp", 64)])?;
/// let parallelism =
///     ParallelismConfig { data_parallel: DataParallelMode::FullyShard, tensor_parallel: false, sequence_parallel: false };
/// let (plan, options) = (parallelism.plan(&config, &mesh)?, StepOptions::new(64, Network::THREADS));
/// let report = shardwise::report::dry_step("gpt on 64 ranks", &config, &plan, &mesh, &options)?;
/// assert!(report.is_dry && report.size == 64 && report.ranks[0].duration > 0);
/// # Ok::<(), shardwise::Error>(())
/// ```
pub fn dry_step(
    title: &str,
    config: &(impl ModelSpec + ?Sized),
    plan: &ShardingPlan,
    mesh: &Mesh,
    options: &StepOptions,
) -> Result<RunReport> {
    config.check()?;
    let ran = dry_world(mesh, options)?.run(|world| {
        let mesh = bind(mesh, &world, options)?;
        let mut training = DryTraining::new(config, plan, &mesh, options)?;
        // The first step allocates the optimizer state.
        training.step()?;
        let ((), profile) = world.profile(|| training.step())?;
        RunReport::with_flops_per_s(title, &mesh, &training.model, &profile, options.flops_per_s)
    })?;
    Ok(ran.value)
}
