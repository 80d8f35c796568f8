//! How the tensors of a checkpoint lie on a mesh, by name.

use clap::{Args, ValueEnum};
use shardwise::error::ErrorKind;
use shardwise::plan::ShardingPlan;
use shardwise::{Layout, Mesh, Placement, Result};

/// A mesh, and how tensors lie on it.
#[derive(Args)]
pub(super) struct Layouts {
    /// Axes of the mesh, such as dp=2,tp=4.
    #[arg(long)]
    mesh: Mesh,
    /// How tensors lie that no --place names.
    #[arg(long, value_enum, default_value = "fsdp")]
    plan: PlanName,
    /// PATTERN=PLACEMENTS, one placement per axis: 'layers.*.up.weight=R,S(0)'. * stands for one component, ** for any number.
    #[arg(long = "place", value_name = "RULE")]
    places: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PlanName {
    /// Every rank has everything.
    Replicate,
    /// Every tensor is cut along its first dimension that can be, over axis dp or the first axis.
    Fsdp,
    /// Weights of transformers are cut by columns and rows, by their names, over axis tp or the last axis.
    Tp,
    /// Both.
    #[value(name = "fsdp+tp")]
    FsdpTp,
}

/// Weights whose outputs are cut, and weights whose inputs are, by the component of the name before `weight` or `bias`.
const BY_COLUMNS: [&str; 15] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "embed_tokens",
    "lm_head",
    "query",
    "key",
    "value",
    "gate",
    "up",
    "tokens",
    "head",
    "wte",
];
const BY_ROWS: [&str; 4] = ["o_proj", "down_proj", "output", "down"];

/// Layouts by name and shape.
pub(super) struct Chosen {
    pub(super) mesh: Mesh,
    plan: PlanName,
    placed: ShardingPlan,
}

impl Layouts {
    pub(super) fn chosen(&self) -> Result<Chosen> {
        let mut placed = ShardingPlan::new();
        for rule in &self.places {
            let Some((pattern, placements)) = rule.split_once('=') else {
                let fix = "for example 'layers.*.up.weight=R,S(0)'";
                return Err(ErrorKind::Argument.error("--place", format!("{rule:?}"), "PATTERN=PLACEMENTS", fix));
            };
            placed = placed.param(pattern, Placement::parse_list(placements)?);
        }
        Ok(Chosen { mesh: self.mesh.clone(), plan: self.plan, placed })
    }
}

impl Chosen {
    pub(super) fn layout(&self, key: &str, shape: &[usize]) -> Result<Layout> {
        let whole = Layout::replicated(&self.mesh, shape)?;
        if self.placed.param_plan(key)?.is_some() {
            return self.placed.layout_of(key, &whole);
        }
        let axis = |name: &str, other: usize| self.mesh.axis(name).unwrap_or(other);
        let (dp, tp) = (axis("dp", 0), axis("tp", self.mesh.ndim() - 1));
        let mut plan = ShardingPlan::new();
        let mut left = shape.to_vec();
        if matches!(self.plan, PlanName::Tp | PlanName::FsdpTp)
            && let Some(dim) = tensor_parallel_dim(key, shape)
        {
            plan = plan.add_placements(
                key,
                &self.mesh,
                &[(self.mesh.axes()[tp].name.clone(), Placement::Shard(dim as isize))],
            )?;
            left[dim] = left[dim].div_ceil(self.mesh.shape()[tp]);
        }
        let is_used = self.plan == PlanName::FsdpTp && dp == tp;
        if matches!(self.plan, PlanName::Fsdp | PlanName::FsdpTp) && !is_used && !shape.is_empty() {
            let k = self.mesh.shape()[dp];
            let dim = (0..left.len()).find(|&d| left[d] >= k && left[d].is_multiple_of(k));
            let dim = dim.unwrap_or_else(|| (0..left.len()).max_by_key(|&d| (left[d], usize::MAX - d)).unwrap_or(0));
            plan = plan.add_placements(
                key,
                &self.mesh,
                &[(self.mesh.axes()[dp].name.clone(), Placement::Shard(dim as isize))],
            )?;
        }
        plan.layout_of(key, &whole)
    }
}

/// The dimension along which tensor parallelism cuts a weight of a transformer.
fn tensor_parallel_dim(key: &str, shape: &[usize]) -> Option<usize> {
    let mut components = key.rsplit('.');
    let kind = components.next()?;
    let module = components.next()?;
    match kind {
        "weight" if BY_COLUMNS.contains(&module) && !shape.is_empty() => Some(0),
        "bias" if BY_COLUMNS.contains(&module) && !shape.is_empty() => Some(0),
        "weight" if BY_ROWS.contains(&module) && shape.len() > 1 => Some(1),
        _ => None,
    }
}
