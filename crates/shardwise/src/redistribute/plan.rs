//! A redistribution on one mesh as a value: steps with their bytes and cost.

use std::fmt;

use super::cost::Cost;
use super::step::StepKind;
use crate::layout::Layout;

/// One step of a [`Plan`].
#[derive(Debug, Clone)]
pub struct Step {
    /// What happens.
    pub kind: StepKind,
    /// Layout before the step.
    pub before: Layout,
    /// Layout after it.
    pub after: Layout,
    /// What it costs.
    pub cost: Cost,
}

/// How to get from one layout to another: steps with bytes and cost. Prints as a list.
///
/// ```
/// # use shardwise::{Layout, Mesh, Placement, redistribute::Plan};
/// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
/// let layout = |p: &str| Layout::new(&mesh, (8, 8), Placement::parse_list(p)?);
/// let plan = Plan::new(&layout("P(sum),P(sum)")?, &layout("S(0),S(0)")?, 4)?;
/// assert_eq!(plan.steps().len(), 1); // both axes in one reduce_scatter
/// assert!(plan.to_string().contains("reduce_scatter(sum) over dp,tp along dim 0"));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Plan {
    pub(super) from: Layout,
    pub(super) to: Layout,
    pub(super) steps: Vec<Step>,
}

impl Plan {
    /// Where the plan begins.
    pub fn from(&self) -> &Layout {
        &self.from
    }

    /// Where the plan ends.
    pub fn to(&self) -> &Layout {
        &self.to
    }

    /// The steps in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Bytes that the busiest rank sends at least, over all steps.
    pub fn bytes(&self) -> usize {
        self.steps.iter().map(|s| s.cost.bytes).sum()
    }

    /// Bytes that all ranks send together, over all steps.
    pub fn total_bytes(&self) -> usize {
        self.steps.iter().map(|s| s.cost.total).sum()
    }

    /// Estimated time in microseconds.
    pub fn us(&self) -> f64 {
        self.steps.iter().map(|s| s.cost.us).sum()
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |axes: &[usize]| {
            axes.iter().map(|&a| self.before.mesh().axes()[a].name.as_str()).collect::<Vec<_>>().join(",")
        };
        match &self.kind {
            StepKind::Relabel => f.write_str("relabel")?,
            StepKind::Narrow => f.write_str("narrow")?,
            StepKind::MakePartial => f.write_str("make partial")?,
            StepKind::AllReduce { axes, op } => write!(f, "all_reduce({op}) over {}", names(axes))?,
            StepKind::ReduceScatter { axes, op, dim } => {
                write!(f, "reduce_scatter({op}) over {} along dim {dim}", names(axes))?;
            }
            StepKind::AllGather { axes, dim } => write!(f, "all_gather over {} along dim {dim}", names(axes))?,
            StepKind::ExchangeDims { axes, from, to } => {
                write!(f, "exchange_dims over {} from dim {from} to dim {to}", names(axes))?;
            }
            StepKind::Exchange { axes } => write!(f, "exchange of boxes over {}", names(axes))?,
        }
        let placements = self.after.placements().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        write!(f, " -> {placements}")?;
        if self.cost.us > 0.0 {
            write!(f, " ({} bytes, {:.1} us)", self.cost.bytes, self.cost.us)?;
        }
        Ok(())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}: {} bytes per rank, {:.1} us", self.from, self.to, self.bytes(), self.us())?;
        for (i, step) in self.steps.iter().enumerate() {
            write!(f, "\n  {}. {step}", i + 1)?;
        }
        Ok(())
    }
}
