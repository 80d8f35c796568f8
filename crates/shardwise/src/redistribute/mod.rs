//! Redistribution: plans the collectives that bring a tensor from one layout to another, and executes them.
//!
//! Planning is pure and the same on every rank: candidate plans are priced with the links of the mesh and the cheapest is
//! taken. [`explain`] shows the plan and the rejected alternatives; [`DTensor::redistribute`](crate::DTensor::redistribute)
//! executes it.

mod boxes;
mod cost;
mod exchange;
mod execute;
mod plan;
mod planner;
mod step;
mod search;

pub use cost::Cost;
pub(crate) use cost::collective_us;
pub(crate) use exchange::{BoxExchange, block};
pub(crate) use execute::redistribute;
pub use plan::{RedistributePlan, RedistributeStep};
pub use step::RedistributeStepKind;

use std::fmt;

use candle_core::DType;

use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result};
use crate::layout::Layout;

/// The chosen plan of a redistribution and the rejected alternatives; prints as a list.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// The plan that `redistribute` executes.
    pub chosen: RedistributePlan,
    /// Other plans, cheapest first.
    pub rejected: Vec<RedistributePlan>,
}

/// Plans a redistribution by the links of `mesh`, and returns the plan with the rejected alternatives.
///
/// Local: nothing is communicated or allocated.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if the layouts are not of one shape on this mesh.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::redistribute::explain;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let layout = |placement| Layout::new(&mesh, (8, 8), [placement]);
///     let found = explain(&mesh, &layout(Partial(ReduceOp::Sum))?, &layout(Shard(0))?, DType::F32)?;
///     assert!(found.to_string().contains("reduce_scatter(sum) over tp along dim 0"), "{found}");
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub fn explain(mesh: &DeviceMesh, from: &Layout, to: &Layout, dtype: DType) -> Result<Explanation> {
    if from.mesh() != mesh.mesh() {
        let needed = format!("a layout on mesh {}", mesh.mesh());
        return Err(ErrorKind::Layout.error("layout", from, needed, "explain with the mesh of the tensor"));
    }
    let mut plans = planner::candidates(from, to, dtype.size_in_bytes(), mesh.links())?;
    let chosen = plans.remove(0);
    Ok(Explanation { chosen, rejected: plans })
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.chosen)?;
        for plan in &self.rejected {
            write!(f, "\nrejected, {:.1} us: ", plan.us())?;
            let steps: Vec<String> = plan.steps().iter().map(ToString::to_string).collect();
            f.write_str(&steps.join("; "))?;
        }
        Ok(())
    }
}
