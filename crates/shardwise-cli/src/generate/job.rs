//! What ranks have to do.

use shardwise::generate::Sampling;
use shardwise::plan::ShardingPlan;
use shardwise::prelude::*;

use super::prompts::Request;
use super::source::GenerationSource;

/// The checked inputs of a run.
pub(super) struct GenerateJob {
    pub(super) source: GenerationSource,
    pub(super) mesh: Mesh,
    pub(super) plan: ShardingPlan,
    pub(super) sampling: Sampling,
    pub(super) request: Request,
    /// Prompts that are computed together.
    pub(super) batch_size: usize,
    pub(super) json: bool,
}

/// An error that every rank found by itself becomes one error of all ranks, which is printed once.
pub(super) fn on_all_ranks<T>(world: &World, mine: Result<T>) -> Result<T> {
    match mine {
        Err(error @ Error::Invalid(_)) => world.all_ok(Err(error)),
        other => other,
    }
}
