//! Bringing a tensor from one layout to another: a plan, then its execution.

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

/// A plan and what was considered instead.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// The plan that is taken.
    pub chosen: RedistributePlan,
    /// Plans that would do the same at a higher cost, cheapest first.
    pub rejected: Vec<RedistributePlan>,
}

/// The plan for a redistribution on a mesh with its links, and the alternatives that were rejected.
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
