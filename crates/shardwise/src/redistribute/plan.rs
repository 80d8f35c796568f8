//! [`RedistributePlan`]: the steps of a redistribution on one mesh, with their bytes and estimated time.

use std::fmt;

use super::cost::Cost;
use super::step::RedistributeStepKind;
use crate::layout::Layout;

/// One step of a [`RedistributePlan`].
#[derive(Debug, Clone)]
pub struct RedistributeStep {
    /// The collective or local operation.
    pub kind: RedistributeStepKind,
    /// Layout before the step.
    pub before: Layout,
    /// Layout after the step.
    pub after: Layout,
    /// Bytes and estimated time.
    pub cost: Cost,
}

/// The steps that bring a tensor from one layout to another on one mesh; prints as a list.
///
/// ```
/// # use shardwise::{Layout, Mesh, Placement, redistribute::RedistributePlan};
/// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
/// let layout = |p: &str| Layout::new(&mesh, (8, 8), Placement::parse_list(p)?);
/// let plan = RedistributePlan::new(&layout("P(sum),P(sum)")?, &layout("S(0),S(0)")?, 4)?;
/// assert_eq!(plan.steps().len(), 1); // both axes in one reduce_scatter
/// assert!(plan.to_string().contains("reduce_scatter(sum) over dp,tp along dim 0"));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RedistributePlan {
    pub(super) from: Layout,
    pub(super) to: Layout,
    pub(super) steps: Vec<RedistributeStep>,
}

impl RedistributePlan {
    /// The layout before the redistribution.
    pub fn from(&self) -> &Layout {
        &self.from
    }

    /// The layout after the redistribution.
    pub fn to(&self) -> &Layout {
        &self.to
    }

    /// The steps in order of execution.
    pub fn steps(&self) -> &[RedistributeStep] {
        &self.steps
    }

    /// Bytes that the busiest rank sends, summed over the steps; see [`Cost::bytes`].
    pub fn bytes(&self) -> usize {
        self.steps.iter().map(|s| s.cost.bytes).sum()
    }

    /// Bytes that all ranks send together, summed over the steps; see [`Cost::total`].
    pub fn total_bytes(&self) -> usize {
        self.steps.iter().map(|s| s.cost.total).sum()
    }

    /// Estimated time in microseconds, summed over the steps.
    pub fn us(&self) -> f64 {
        self.steps.iter().map(|s| s.cost.us).sum()
    }
}

impl fmt::Display for RedistributeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |axes: &[usize]| {
            axes.iter().map(|&a| self.before.mesh().axes()[a].name.as_str()).collect::<Vec<_>>().join(",")
        };
        match &self.kind {
            RedistributeStepKind::Relabel => f.write_str("relabel")?,
            RedistributeStepKind::Narrow => f.write_str("narrow")?,
            RedistributeStepKind::MakePartial => f.write_str("make partial")?,
            RedistributeStepKind::AllReduce { axes, op } => write!(f, "all_reduce({op}) over {}", names(axes))?,
            RedistributeStepKind::ReduceScatter { axes, op, dim } => {
                write!(f, "reduce_scatter({op}) over {} along dim {dim}", names(axes))?;
            }
            RedistributeStepKind::AllGather { axes, dim } => {
                write!(f, "all_gather over {} along dim {dim}", names(axes))?;
            }
            RedistributeStepKind::ExchangeDims { axes, from, to } => {
                write!(f, "exchange_dims over {} from dim {from} to dim {to}", names(axes))?;
            }
            RedistributeStepKind::ExchangeBoxes { axes } => write!(f, "exchange of boxes over {}", names(axes))?,
        }
        let placements = self.after.placements().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        write!(f, " -> {placements}")?;
        if self.cost.us > 0.0 {
            write!(f, " ({} bytes, {:.1} us)", self.cost.bytes, self.cost.us)?;
        }
        Ok(())
    }
}

impl fmt::Display for RedistributePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}: {} bytes per rank, {:.1} us", self.from, self.to, self.bytes(), self.us())?;
        for (i, step) in self.steps.iter().enumerate() {
            write!(f, "\n  {}. {step}", i + 1)?;
        }
        Ok(())
    }
}
