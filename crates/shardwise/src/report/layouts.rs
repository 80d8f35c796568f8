//! Layouts with the boxes of ranks, and redistributions with what was rejected.

use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::{Layout, TensorBox};
use crate::mesh::Mesh;
use crate::redistribute::explain;

/// A layout as data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutReport {
    /// Shape of the full tensor.
    pub shape: Vec<usize>,
    /// Placements along the mesh axes.
    pub placements: Vec<String>,
    /// The boxes of the first ranks.
    pub ranks: Vec<RankBoxes>,
}

/// What a rank holds of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankBoxes {
    /// The rank.
    pub rank: usize,
    /// Shape of its local tensor.
    pub local_shape: Vec<usize>,
    /// Its boxes, at most 64; none if it holds nothing.
    pub boxes: Vec<TensorBox>,
}

/// The plan of a redistribution and the rejected ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RedistributionReport {
    /// The steps with their bytes and estimated time.
    pub steps: Vec<String>,
    /// Estimated time in microseconds.
    pub us: f64,
    /// Estimated times and steps of rejected plans.
    pub rejected: Vec<(f64, String)>,
}

/// The most ranks whose boxes are listed: a page with more takes long to load and shows nothing more.
const RANKS: usize = 32;

/// The most boxes of a rank that are listed.
const BOXES: usize = 64;

/// The text of a layout; the mesh is left out if it is `mesh`.
pub(super) fn layout_text(layout: &Layout, mesh: &Mesh) -> String {
    layout.to_string().replacen(&format!(" on {mesh}:"), "", 1)
}

pub(super) fn layout_report(layout: &Layout) -> LayoutReport {
    let of_rank = |&rank: &usize| {
        let boxes = layout.boxes_of(rank).into_iter().take(BOXES).map(|owned| owned.global).collect();
        RankBoxes { rank, local_shape: layout.local_shape(rank), boxes }
    };
    LayoutReport {
        shape: layout.shape().to_vec(),
        placements: layout.placements().iter().map(ToString::to_string).collect(),
        ranks: layout.mesh().ranks().iter().take(RANKS).map(of_rank).collect(),
    }
}

pub(super) fn redistribution_report(
    mesh: &DeviceMesh,
    from: &Layout,
    to: &Layout,
    dtype: DType,
) -> Result<RedistributionReport> {
    let found = explain(mesh, from, to, dtype)?;
    let steps = |plan: &crate::redistribute::RedistributePlan| plan.steps().iter().map(ToString::to_string).collect();
    let rejected = found.rejected.iter().map(|plan| {
        let steps: Vec<String> = steps(plan);
        (plan.us(), steps.join("; "))
    });
    Ok(RedistributionReport {
        steps: steps(&found.chosen),
        us: found.chosen.us(),
        rejected: rejected.take(4).collect(),
    })
}
