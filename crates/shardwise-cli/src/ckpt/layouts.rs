//! Layouts of the tensors of a checkpoint on a mesh, chosen by name.

use clap::{Args, ValueEnum};
use shardwise::error::ErrorKind;
use shardwise::plan::ShardingPlan;
use shardwise::{Layout, Mesh, Placement, Result};

/// The options for a mesh and the layouts on it.
#[derive(Args)]
pub(super) struct LayoutOptions {
    /// Axes of the mesh, for example dp=2,tp=4
    #[arg(long)]
    mesh: Mesh,
    /// Sharding plan for tensors without a --place rule
    #[arg(long, value_enum, default_value = "fsdp")]
    plan: PlanName,
    /// Placements of the tensors whose names match a pattern, one placement per mesh axis: PATTERN=PLACEMENTS, for example
    /// 'layers.*.up.weight=R,S(0)'. In a pattern * matches one component of a name and ** any number of them.
    /// May be repeated
    #[arg(long = "place", value_name = "RULE")]
    places: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PlanName {
    /// Every rank holds every tensor
    Replicate,
    /// Each tensor is sharded on its first evenly divisible dimension, over axis dp (or the first axis)
    Fsdp,
    /// Transformer weights are sharded by column or by row, chosen by name, over axis tp (or the last axis)
    Tp,
    /// fsdp and tp combined
    #[value(name = "fsdp+tp")]
    FsdpTp,
}

/// Weights that tensor parallelism shards on their output features (column-wise), by the component of the name before `weight`
/// or `bias`: names of Hugging Face, then of this library, of GPT-2, GPT-NeoX, Phi-3 and Mixtral's experts.
const BY_COLUMNS: [&str; 25] = [
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
    "c_attn",
    "c_fc",
    "query_key_value",
    "dense_h_to_4h",
    "embed_in",
    "embed_out",
    "qkv_proj",
    "gate_up_proj",
    "w1",
    "w3",
];
/// Weights that tensor parallelism shards on their input features (row-wise).
const BY_ROWS: [&str; 7] = ["o_proj", "down_proj", "output", "down", "c_proj", "dense_4h_to_h", "w2"];
/// Weights of GPT-2, which its files may store transposed: `[in, out]`.
const MAY_BE_TRANSPOSED: [&str; 3] = ["c_attn", "c_fc", "c_proj"];
/// Stacked weights of experts, `[experts, out, in]`, with the dimension of the features inside an expert.
const EXPERT_STACKS: [(&str, usize); 5] = [("gate", 1), ("up", 1), ("down", 2), ("gate_up_proj", 1), ("down_proj", 2)];

/// The layout of each tensor, by name and shape.
pub(super) struct CheckpointLayouts {
    pub(super) mesh: Mesh,
    plan: PlanName,
    overrides: ShardingPlan,
}

impl LayoutOptions {
    pub(super) fn resolve(&self) -> Result<CheckpointLayouts> {
        let mut overrides = ShardingPlan::new();
        for rule in &self.places {
            let Some((pattern, placements)) = rule.split_once('=') else {
                let fix = "for example 'layers.*.up.weight=R,S(0)'";
                return Err(ErrorKind::Argument.error("--place", format!("{rule:?}"), "PATTERN=PLACEMENTS", fix));
            };
            overrides = overrides.param(pattern, Placement::parse_list(placements)?);
        }
        Ok(CheckpointLayouts { mesh: self.mesh.clone(), plan: self.plan, overrides })
    }
}

impl CheckpointLayouts {
    pub(super) fn layout(&self, key: &str, shape: &[usize]) -> Result<Layout> {
        let whole = Layout::replicated(&self.mesh, shape)?;
        if self.overrides.param_plan(key)?.is_some() {
            return self.overrides.layout_of(key, &whole);
        }
        let axis = |name: &str, other: usize| self.mesh.axis(name).unwrap_or(other);
        let (dp, tp) = (axis("dp", 0), axis("tp", self.mesh.ndim() - 1));
        let mut plan = ShardingPlan::new();
        let mut local_shape = shape.to_vec();
        if matches!(self.plan, PlanName::Tp | PlanName::FsdpTp)
            && let Some(dim) = tensor_parallel_dim(key, shape)
        {
            plan = plan.add_placements(
                key,
                &self.mesh,
                &[(self.mesh.axes()[tp].name.clone(), Placement::Shard(dim as isize))],
            )?;
            local_shape[dim] = local_shape[dim].div_ceil(self.mesh.shape()[tp]);
        }
        let is_used = self.plan == PlanName::FsdpTp && dp == tp;
        if matches!(self.plan, PlanName::Fsdp | PlanName::FsdpTp) && !is_used && !shape.is_empty() {
            let k = self.mesh.shape()[dp];
            let dim = (0..local_shape.len()).find(|&d| local_shape[d] >= k && local_shape[d].is_multiple_of(k));
            let dim = dim.unwrap_or_else(|| {
                (0..local_shape.len()).max_by_key(|&d| (local_shape[d], usize::MAX - d)).unwrap_or(0)
            });
            plan = plan.add_placements(
                key,
                &self.mesh,
                &[(self.mesh.axes()[dp].name.clone(), Placement::Shard(dim as isize))],
            )?;
        }
        plan.layout_of(key, &whole)
    }
}

/// The dimension on which tensor parallelism shards a weight of a transformer, or the state that an optimizer has for each of its
/// elements, such as `up.weight.exp_avg`: a run keeps that in the layout of the weight.
fn tensor_parallel_dim(key: &str, shape: &[usize]) -> Option<usize> {
    let components: Vec<&str> = key.split('.').collect();
    if let [.., "experts", stack] | [.., "experts", stack, _] = components[..]
        && let Some((_, dim)) = EXPERT_STACKS.iter().find(|(name, _)| *name == stack)
    {
        // The weight of a single expert has two dimensions, Adafactor's sums have other ones.
        return Some(*dim).filter(|_| shape.len() == 3 && !key.ends_with("_var"));
    }
    let (module, kind) = match components[..] {
        // Adafactor's sums over rows and columns have other shapes than the weight.
        [.., "weight" | "bias", "row_var" | "col_var"] => return None,
        [.., module, kind @ ("weight" | "bias"), _] | [.., module, kind] => (module, kind),
        _ => return None,
    };
    // The larger dimension of a transposed weight is the other one. Of equal ones it may be either: the bytes are the same.
    let is_transposed =
        |by_rows: bool| MAY_BE_TRANSPOSED.contains(&module) && shape.len() == 2 && (shape[0] > shape[1]) == by_rows;
    match kind {
        "weight" if BY_COLUMNS.contains(&module) && is_transposed(false) => Some(1),
        "weight" if BY_ROWS.contains(&module) && is_transposed(true) => Some(0),
        "weight" if components.ends_with(&["attention", "dense", kind]) => Some(1),
        "weight" | "bias" if BY_COLUMNS.contains(&module) && !shape.is_empty() => Some(0),
        "weight" if BY_ROWS.contains(&module) && shape.len() > 1 => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::tensor_parallel_dim;

    #[test]
    fn weights_and_their_optimizer_state_are_sharded_by_name() {
        let cases: [(&str, &[usize], Option<usize>); 24] = [
            ("blocks.0.mlp.up.weight", &[8, 4], Some(0)),
            ("optimizer.blocks.0.mlp.up.weight.exp_avg", &[8, 4], Some(0)),
            ("optimizer.blocks.0.mlp.up.bias.exp_avg_sq", &[8], Some(0)),
            ("optimizer.blocks.0.mlp.down.weight.momentum_buffer", &[4, 8], Some(1)),
            ("optimizer.blocks.0.mlp.down.bias.exp_avg", &[4], None),
            ("optimizer.blocks.0.mlp.up.weight.step", &[], None),
            ("optimizer.blocks.0.mlp.up.weight.col_var", &[1, 4], None),
            ("weight", &[8, 4], None),
            ("h.0.attn.c_attn.weight", &[4, 12], Some(1)),
            ("h.0.attn.c_attn.weight", &[12, 4], Some(0)),
            ("h.0.attn.c_attn.bias", &[12], Some(0)),
            ("h.0.mlp.c_fc.weight", &[4, 16], Some(1)),
            ("h.0.mlp.c_fc.weight.exp_avg", &[16, 4], Some(0)),
            ("h.0.mlp.c_proj.weight", &[16, 4], Some(0)),
            ("h.0.mlp.c_proj.weight", &[4, 16], Some(1)),
            ("h.0.mlp.c_proj.bias", &[4], None),
            ("gpt_neox.layers.0.attention.query_key_value.weight", &[12, 4], Some(0)),
            ("gpt_neox.layers.0.attention.dense.weight", &[4, 4], Some(1)),
            ("gpt_neox.layers.0.mlp.dense_4h_to_h.weight", &[4, 16], Some(1)),
            ("model.layers.0.block_sparse_moe.experts.3.w1.weight", &[8, 4], Some(0)),
            ("model.layers.0.block_sparse_moe.experts.3.w2.weight", &[4, 8], Some(1)),
            ("blocks.0.experts.experts.up.exp_avg", &[3, 8, 4], Some(1)),
            ("blocks.0.experts.experts.down", &[3, 4, 8], Some(2)),
            ("blocks.0.experts.experts.down.col_var", &[3, 1, 8], None),
        ];
        for (key, shape, dim) in cases {
            assert_eq!(tensor_parallel_dim(key, shape), dim, "{key}");
        }
    }
}
