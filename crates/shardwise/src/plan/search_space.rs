//! The plans that `AutoPlanner` tries: what each class of layers does along each mesh axis.

use super::apply::ModuleInventory;
use super::planner::FullyShard;
use super::sharding_plan::ShardingPlan;
use super::transformer::{AxisSharding, EXPERT_STACKS, EmbeddingSharding, LinearLayer, TransformerBlock, TransformerStructure};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::nn::{Module, join};
use crate::placement::Placement;

/// What the layers of a class do along one mesh axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AxisStrategy {
    /// Parameters are replicated (data parallelism).
    Replicate,
    /// Parameters are sharded and gathered for use (FSDP).
    FullyShard,
    /// Tensor parallelism; embeddings are sharded over the vocabulary.
    TensorParallel,
    /// Embeddings are sharded over the embedding dimension.
    EmbeddingDim,
}

impl AxisStrategy {
    /// Short name, for the names of trials.
    fn name(self) -> &'static str {
        match self {
            AxisStrategy::Replicate => "replicate",
            AxisStrategy::FullyShard => "fsdp",
            AxisStrategy::TensorParallel => "tensor",
            AxisStrategy::EmbeddingDim => "embedding_dim",
        }
    }
}

/// One point of the search space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StrategyChoice {
    /// By class, then by mesh axis.
    strategies: Vec<Vec<AxisStrategy>>,
    /// Whether activations between blocks are sharded on the sequence, over the axes of tensor parallelism.
    sequence_parallel: bool,
}

/// Layers of equal shape and role. They all use the same strategies, which keeps the search small.
struct LayerClass {
    name: String,
    members: ClassMembers,
}

enum ClassMembers {
    Blocks(Vec<TransformerBlock>),
    /// Paths of stacks of experts.
    Experts(Vec<String>),
    Embeddings(Vec<String>),
    Heads(Vec<LinearLayer>),
    /// Parameters of all other layers.
    Rest(Vec<String>),
}

impl LayerClass {
    /// The strategies that exist for such layers.
    fn strategies(&self) -> &'static [AxisStrategy] {
        use AxisStrategy::{EmbeddingDim, FullyShard, Replicate, TensorParallel};
        match self.members {
            ClassMembers::Embeddings(_) => &[Replicate, FullyShard, TensorParallel, EmbeddingDim],
            ClassMembers::Rest(_) => &[Replicate, FullyShard],
            _ => &[Replicate, FullyShard, TensorParallel],
        }
    }

    /// Paths of the parameters of all members.
    fn params(&self) -> Vec<String> {
        let of_layer = |layer: &LinearLayer| {
            let bias = layer.bias.then(|| join(&layer.path, "bias"));
            std::iter::once(join(&layer.path, "weight")).chain(bias).collect::<Vec<_>>()
        };
        match &self.members {
            ClassMembers::Blocks(blocks) => {
                blocks.iter().flat_map(|b| b.columns.iter().chain(&b.rows)).flat_map(of_layer).collect()
            }
            ClassMembers::Experts(paths) => {
                paths.iter().flat_map(|path| EXPERT_STACKS.iter().map(move |(name, _)| join(path, name))).collect()
            }
            ClassMembers::Embeddings(paths) => paths.iter().map(|path| join(path, "weight")).collect(),
            ClassMembers::Heads(heads) => heads.iter().flat_map(of_layer).collect(),
            ClassMembers::Rest(paths) => paths.clone(),
        }
    }
}

/// All plans that can be tried for a module on a mesh.
pub(super) struct SearchSpace<'a> {
    /// What every plan contains.
    base: &'a ShardingPlan,
    module: &'a dyn Module,
    mesh: &'a DeviceMesh,
    classes: Vec<LayerClass>,
}

impl<'a> SearchSpace<'a> {
    pub(super) fn new(base: &'a ShardingPlan, module: &'a dyn Module, mesh: &'a DeviceMesh) -> Self {
        let TransformerStructure { blocks, experts, embeddings, heads, rest } = TransformerStructure::of(module);
        let mut classes: Vec<LayerClass> = Vec::new();
        for block in blocks {
            let shapes = |b: &TransformerBlock| {
                b.columns.iter().chain(&b.rows).map(|layer| layer.shape.clone()).collect::<Vec<_>>()
            };
            let is_alike = |other: &TransformerBlock| {
                other.kind == block.kind && other.key_heads == block.key_heads && shapes(other) == shapes(&block)
            };
            let class = classes.iter_mut().find_map(|class| match &mut class.members {
                ClassMembers::Blocks(blocks) if is_alike(&blocks[0]) => Some(blocks),
                _ => None,
            });
            match class {
                Some(blocks) => blocks.push(block),
                None => {
                    let name = block.kind.to_string();
                    classes.push(LayerClass { name, members: ClassMembers::Blocks(vec![block]) });
                }
            }
        }
        let others = [
            ("experts", experts.is_empty(), ClassMembers::Experts(experts)),
            ("embeddings", embeddings.is_empty(), ClassMembers::Embeddings(embeddings)),
            ("heads", heads.is_empty(), ClassMembers::Heads(heads)),
            ("rest", rest.is_empty(), ClassMembers::Rest(rest)),
        ];
        let others = others.into_iter().filter(|(_, is_empty, _)| !is_empty);
        classes.extend(others.map(|(name, _, members)| LayerClass { name: name.to_string(), members }));
        SearchSpace { base, module, mesh, classes }
    }

    /// Choices in which all classes use an axis in the same way. All combinations on up to three axes (27, and those with
    /// tensor parallelism twice); beyond that, where they would be too many to run, those in which at most one axis differs
    /// from the remaining ones.
    pub(super) fn uniform(&self) -> Vec<StrategyChoice> {
        let every = [AxisStrategy::Replicate, AxisStrategy::FullyShard, AxisStrategy::TensorParallel];
        let axes = self.mesh.ndim();
        let mut by_axis: Vec<Vec<AxisStrategy>> = vec![Vec::new()];
        if axes <= 3 {
            for _ in 0..axes {
                by_axis = by_axis.iter().flat_map(|so_far| every.map(|s| [so_far.as_slice(), &[s]].concat())).collect();
            }
        } else {
            by_axis = every.iter().map(|&strategy| vec![strategy; axes]).collect();
            for axis in 0..axes {
                for (one, others) in every.iter().flat_map(|&a| every.map(|b| (a, b))).filter(|(a, b)| a != b) {
                    let mut strategies = vec![others; axes];
                    strategies[axis] = one;
                    by_axis.push(strategies);
                }
            }
        }
        let mut choices = Vec::new();
        for strategies in by_axis {
            let of_class = |class: &LayerClass| {
                let possible = |&s: &AxisStrategy| {
                    if class.strategies().contains(&s) { s } else { AxisStrategy::Replicate }
                };
                strategies.iter().map(possible).collect()
            };
            let strategies_by_class = self.classes.iter().map(of_class).collect();
            let choice = StrategyChoice { strategies: strategies_by_class, sequence_parallel: false };
            if strategies.contains(&AxisStrategy::TensorParallel) {
                choices.push(StrategyChoice { sequence_parallel: true, ..choice.clone() });
            }
            choices.push(choice);
        }
        choices
    }

    /// Choices that differ in the strategy of one class along one axis, or in sequence parallelism.
    pub(super) fn neighbours(&self, choice: &StrategyChoice) -> Vec<StrategyChoice> {
        let mut all = vec![StrategyChoice { sequence_parallel: !choice.sequence_parallel, ..choice.clone() }];
        for (i, class) in self.classes.iter().enumerate() {
            for axis in 0..self.mesh.ndim() {
                for &strategy in class.strategies().iter().filter(|&&s| s != choice.strategies[i][axis]) {
                    let mut next = choice.clone();
                    next.strategies[i][axis] = strategy;
                    all.push(next);
                }
            }
        }
        all
    }

    /// The plan of a choice.
    pub(super) fn plan(&self, choice: &StrategyChoice) -> Result<ShardingPlan> {
        let mut plan = self.base.clone();
        let sequence_dim = choice.sequence_parallel.then_some(1);
        for (i, axis) in self.mesh.axes().iter().enumerate() {
            let mut sharding = AxisSharding { plan, mesh: self.mesh, axis: &axis.name, sequence_dim };
            for (class, strategies) in self.classes.iter().zip(&choice.strategies) {
                shard_class(&mut sharding, class, strategies[i])?;
            }
            plan = sharding.plan;
        }
        // FSDP comes last, so that tensor parallelism shards first and one gather gives back its shards.
        let tensors = ModuleInventory::new(self.module).tensors;
        for (class, strategies) in self.classes.iter().zip(&choice.strategies) {
            let axes = self.mesh.axes().iter().zip(strategies).filter(|(_, s)| **s == AxisStrategy::FullyShard);
            let axes: Vec<&str> = axes.map(|(axis, _)| axis.name.as_str()).collect();
            if axes.is_empty() {
                continue;
            }
            let fully_shard = FullyShard::new(axes);
            for path in class.params() {
                if let Some((_, tensor)) = tensors.iter().find(|(own, _)| *own == path) {
                    let more = fully_shard.placements_for(&plan.layout_of(&path, tensor.get().layout())?)?;
                    plan = plan.add_placements(&path, self.mesh.mesh(), &more)?;
                }
            }
        }
        Ok(plan)
    }

    /// Name of a choice, such as `Mlp dp:fsdp tp:tensor; embeddings tp:embedding_dim; sequence`.
    pub(super) fn name(&self, choice: &StrategyChoice) -> String {
        let of_class = |(class, strategies): (&LayerClass, &Vec<AxisStrategy>)| {
            let axes = self.mesh.axes().iter().zip(strategies).filter(|(_, s)| **s != AxisStrategy::Replicate);
            let axes = axes.map(|(axis, strategy)| format!(" {}:{}", axis.name, strategy.name())).collect::<String>();
            (!axes.is_empty()).then(|| class.name.clone() + &axes)
        };
        let mut names: Vec<String> = self.classes.iter().zip(&choice.strategies).filter_map(of_class).collect();
        if choice.sequence_parallel {
            names.push("sequence".to_string());
        }
        if names.is_empty() { "all replicated".to_string() } else { names.join("; ") }
    }
}

/// Adds what a class does along one axis to the plan. FSDP is added afterwards, over all its axes at once.
fn shard_class(sharding: &mut AxisSharding<'_>, class: &LayerClass, strategy: AxisStrategy) -> Result<()> {
    match (&class.members, strategy) {
        (_, AxisStrategy::FullyShard) => Ok(()),
        (ClassMembers::Blocks(blocks), AxisStrategy::TensorParallel) => {
            blocks.iter().try_for_each(|block| sharding.shard_block(block))
        }
        (ClassMembers::Embeddings(paths), AxisStrategy::TensorParallel) => {
            paths.iter().try_for_each(|path| sharding.shard_embedding(path, EmbeddingSharding::Vocabulary))
        }
        (ClassMembers::Embeddings(paths), AxisStrategy::EmbeddingDim) => {
            paths.iter().try_for_each(|path| sharding.shard_embedding(path, EmbeddingSharding::EmbeddingDim))
        }
        (ClassMembers::Experts(paths), AxisStrategy::TensorParallel) => {
            paths.iter().try_for_each(|path| sharding.shard_experts(path))
        }
        (ClassMembers::Heads(heads), AxisStrategy::TensorParallel) => {
            heads.iter().try_for_each(|head| sharding.shard_head(head))
        }
        _ => class.params().iter().try_for_each(|path| sharding.place_param(path, &Placement::Replicate)),
    }
}
