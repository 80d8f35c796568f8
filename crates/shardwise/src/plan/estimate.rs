//! What a step costs under a plan, found by running it without data.

use super::sharding_plan::ShardingPlan;
use crate::comm::{CommRecord, DeviceMesh, DryWorld};
use crate::error::Result;
use crate::redistribute::collective_us;

/// What one step would take on the busiest rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Time of its computation in microseconds.
    pub compute_us: f64,
    /// Time of its communication in microseconds.
    pub communication_us: f64,
    /// The most bytes that its local tensors take at one time.
    pub peak_bytes: usize,
    /// Number of collectives.
    pub collectives: usize,
}

impl Estimate {
    /// Time of the step in microseconds: computation and communication do not overlap.
    pub fn us(&self) -> f64 {
        self.compute_us + self.communication_us
    }
}

/// Runs a step in a dry world as the first rank of the mesh, which is among those that hold the most: time of collectives
/// by the links of the mesh, time of operators by a rate of elementary operations.
pub(super) fn estimate<F>(step: &F, plan: &ShardingPlan, mesh: &DeviceMesh, flops_per_s: f64) -> Result<Estimate>
where
    F: Fn(&ShardingPlan, &DeviceMesh) -> Result<()> + Sync,
{
    let world = mesh.world();
    let dry = DryWorld::new(world.size())?.network(world.network().clone())?.as_rank(mesh.ranks()[0])?;
    let ran = dry.run(|world| step(plan, &mesh.in_world(&world)?))?;
    let communication = ran.records.iter().map(|record| time_of(record, mesh));
    Ok(Estimate {
        compute_us: ran.flops as f64 / flops_per_s * 1e6,
        communication_us: communication.sum(),
        peak_bytes: ran.peak_bytes,
        collectives: ran.records.len(),
    })
}

/// The time of one collective, by the slowest link that its group goes along.
fn time_of(record: &CommRecord, mesh: &DeviceMesh) -> f64 {
    let coordinates: Vec<Vec<usize>> = record.group.iter().filter_map(|&rank| mesh.coordinate(rank)).collect();
    let differ = |&axis: &usize| coordinates.windows(2).any(|pair| pair[0][axis] != pair[1][axis]);
    let axes: Vec<usize> = (0..mesh.ndim()).filter(differ).collect();
    let phases = if record.call == "all_reduce" { 2 } else { 1 };
    collective_us(phases, record.group.len(), record.bytes, mesh.links().slowest(&axes))
}
