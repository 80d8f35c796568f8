//! Time and memory of a step under a plan, found by a dry run.

use super::sharding_plan::ShardingPlan;
use super::step_report::time_of;
use crate::comm::{DeviceMesh, DryWorld};
use crate::error::Result;

/// Estimated time and memory of one training step on the busiest rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepEstimate {
    /// Time of computation in microseconds.
    pub compute_us: f64,
    /// Time of communication in microseconds.
    pub communication_us: f64,
    /// Peak memory: the most bytes that local tensors take at one time.
    pub peak_bytes: usize,
    /// Number of collectives.
    pub collectives: usize,
}

impl StepEstimate {
    /// Time of the step in microseconds, without overlap of computation and communication.
    pub fn us(&self) -> f64 {
        self.compute_us + self.communication_us
    }
}

/// Runs a step in a dry run as the first rank of the mesh. Uneven shards are largest on the first ranks, so it is among the
/// busiest.
pub(super) fn estimate<F>(step: &F, plan: &ShardingPlan, mesh: &DeviceMesh, flops_per_s: f64) -> Result<StepEstimate>
where
    F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync,
{
    let world = mesh.world();
    let dry = DryWorld::new(world.size())?.network(world.network().clone())?.as_rank(mesh.ranks()[0])?;
    let ran = dry.run(|world| step(plan, &mesh.in_world(&world)?))?;
    let communication = ran.records.iter().map(|record| time_of(record, mesh));
    Ok(StepEstimate {
        compute_us: ran.flops as f64 / flops_per_s * 1e6,
        communication_us: communication.sum(),
        peak_bytes: ran.peak_bytes,
        collectives: ran.records.len(),
    })
}
