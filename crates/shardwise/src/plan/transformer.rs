//! Tensor parallelism for transformers, whose layers are recognized by name and shape.

use super::apply::ModuleInventory;
use super::pattern::parent;
use super::planner::ShardingPlanner;
use super::sharding_plan::ShardingPlan;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, nearest};
use crate::layout::{Layout, coordinates};
use crate::nn::{Module, join};
use crate::placement::Placement;

/// Which dimension of embedding tables [`TensorParallel`] shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EmbeddingSharding {
    /// Dimension 0, the vocabulary (`num_embeddings`): a lookup gives partial sums, which are reduced.
    Vocabulary,
    /// Dimension 1, the features (`embedding_dim`): a lookup gives sharded features.
    EmbeddingDim,
}

/// Tensor parallelism over one mesh axis, as in Megatron-LM.
///
/// A *block* is a module with linear layers that lead in (`query`, `key`, `value`, `up`, `gate` and other common names) and
/// one that leads out (`output`, `down`, ...). The first are sharded by columns, the last by rows, and one reduction follows
/// each block. Modules whose layers have other names list them in [`PlanHints`](crate::nn::PlanHints).
///
/// In a module with [`Heads`](crate::nn::Heads), such as [`MultiHeadAttention`](crate::nn::MultiHeadAttention), heads are
/// never split: every rank gets full key heads with their query heads, as evenly as possible (3 and 2 of 5 on 2 ranks). If
/// there are more ranks than key heads, some get none. In models of [`PretrainedConfig`](crate::models::PretrainedConfig),
/// query heads are divided by themselves where that leaves the busiest rank less to do, and every rank computes all key heads.
///
/// The stacked weights of a mixture of experts (a module of kind `Experts`) are sharded inside every expert.
///
/// Embeddings are sharded over vocabulary or features, language-model heads (by name, or as wide as the vocabulary) by
/// columns; all other parameters are replicated. With [`sequence_parallel`](Self::sequence_parallel), activations between
/// blocks are sharded on the sequence: all-gathered before a block and reduce-scattered after it.
#[doc(alias = "Megatron")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorParallel {
    axis: String,
    embeddings: EmbeddingSharding,
    sequence_dim: Option<isize>,
}

impl TensorParallel {
    /// Over a mesh axis, with embeddings sharded over the vocabulary.
    pub fn new(axis: &str) -> Self {
        TensorParallel { axis: axis.to_string(), embeddings: EmbeddingSharding::Vocabulary, sequence_dim: None }
    }

    /// Sets the dimension on which embeddings are sharded.
    pub fn embeddings(mut self, sharding: EmbeddingSharding) -> Self {
        self.embeddings = sharding;
        self
    }

    /// Turns on sequence parallelism; `dim` is the sequence dimension of activations, 1 for `[batch, length, width]`.
    pub fn sequence_parallel(mut self, dim: isize) -> Self {
        self.sequence_dim = Some(dim);
        self
    }
}

impl ShardingPlanner for TensorParallel {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        mesh.axis(&self.axis)?;
        check_hints(module)?;
        let structure = TransformerStructure::of(module);
        let mut sharding = AxisSharding { plan, mesh, axis: &self.axis, sequence_dim: self.sequence_dim };
        for block in &structure.blocks {
            sharding.shard_block(block)?;
        }
        for path in &structure.experts {
            sharding.shard_experts(path)?;
        }
        for path in &structure.embeddings {
            sharding.shard_embedding(path, self.embeddings)?;
        }
        for head in &structure.heads {
            sharding.shard_head(head)?;
        }
        for path in &structure.rest {
            sharding.place_param(path, &Placement::Replicate)?;
        }
        Ok(sharding.plan)
    }
}

/// Adds the sharding of layers over one mesh axis to a plan.
pub(super) struct AxisSharding<'a> {
    pub(super) plan: ShardingPlan,
    pub(super) mesh: &'a DeviceMesh,
    pub(super) axis: &'a str,
    /// Sequence dimension of activations, with sequence parallelism.
    pub(super) sequence_dim: Option<isize>,
}

impl AxisSharding<'_> {
    pub(super) fn place_param(&mut self, path: &str, placement: &Placement) -> Result<()> {
        let plan = std::mem::take(&mut self.plan);
        self.plan = plan.add_placements(path, self.mesh.mesh(), &[(self.axis.to_string(), placement.clone())])?;
        Ok(())
    }

    /// The weight of a linear layer, and its bias if it has one.
    fn place_linear(&mut self, linear: &LinearLayer, weight: &Placement, bias: &Placement) -> Result<()> {
        self.place_param(&join(&linear.path, "weight"), weight)?;
        if linear.bias { self.place_param(&join(&linear.path, "bias"), bias) } else { Ok(()) }
    }

    /// Placement of activations between blocks.
    fn between_blocks(&self) -> Placement {
        self.sequence_dim.map_or(Placement::Replicate, Placement::Shard)
    }

    /// Gathers the input of a module.
    fn gather_input(&mut self, path: &str) {
        self.plan = std::mem::take(&mut self.plan).input_along(path, self.axis, &Placement::Replicate);
    }

    /// Reduces the output of a module.
    fn reduce_output(&mut self, path: &str) {
        let between = self.between_blocks();
        self.plan = std::mem::take(&mut self.plan).output_along(path, self.axis, &between);
    }

    pub(super) fn shard_block(&mut self, block: &TransformerBlock) -> Result<()> {
        let groups_split = self.splits_groups(block)?;
        let heads = if groups_split { block.query_heads } else { block.key_heads };
        for column in &block.columns {
            let by_columns = match groups_split && !block.is_query(column) {
                true => Placement::Replicate,
                false => self.between_heads(column, 0, heads)?,
            };
            self.place_linear(column, &by_columns, &by_columns)?;
            if self.sequence_dim.is_some() && !block.hooks {
                self.gather_input(&column.path);
            }
        }
        // One gather for all layers that lead in, instead of one each.
        if self.sequence_dim.is_some() && block.hooks {
            self.gather_input(&block.path);
        }
        for row in &block.rows {
            let by_rows = self.between_heads(row, 1, heads)?;
            self.place_linear(row, &by_rows, &Placement::Replicate)?;
            self.reduce_output(&row.path);
        }
        Ok(())
    }

    /// Whether query heads are divided without regard to the key heads that they share, which every rank then computes.
    ///
    /// Otherwise a rank has whole groups: with few key heads some ranks have many more queries than the rest, or nothing. The
    /// cheaper way is the one in which the busiest rank has fewer rows of projections, which are its products and the weights
    /// that it reads.
    fn splits_groups(&self, block: &TransformerBlock) -> Result<bool> {
        let (Some(queries), Some(keys), true) = (block.query_heads, block.key_heads, block.repeats_key_heads) else {
            return Ok(false);
        };
        let ranks = self.mesh.mesh().shape()[self.mesh.axis(self.axis)?];
        if keys == 0 || queries <= keys || ranks == 1 {
            return Ok(false);
        }
        // Rows in heads: queries and outputs, keys and values.
        let by_groups = keys.div_ceil(ranks) * (2 * queries / keys + 2);
        let by_queries = 2 * queries.div_ceil(ranks) + 2 * keys;
        Ok(by_queries < by_groups)
    }

    /// Placement over the axis of a weight's dimension whose features come in so many heads, on top of the sharding that the
    /// plan has for it so far. Never splits a head: uneven shards where the heads do not divide evenly.
    fn between_heads(&self, linear: &LinearLayer, dim: usize, heads: Option<usize>) -> Result<Placement> {
        let plain = Placement::Shard(dim as isize);
        let Some(head_size) = heads.and_then(|heads| divided(linear.shape[dim], heads)) else { return Ok(plain) };
        let mesh = self.mesh.mesh();
        let axis = mesh.axis(self.axis)?;
        let replicated = Layout::replicated(mesh, linear.shape.as_slice())?;
        let so_far = self.plan.layout_of(&join(&linear.path, "weight"), &replicated)?.without_axes(&[axis])?;
        let mut sizes = Vec::new();
        for outer in coordinates(mesh, so_far.shard_order(dim)) {
            let Some(heads) = divided(so_far.owned(dim, &outer).len(), head_size) else { return Ok(plain) };
            let ranks = mesh.shape()[axis];
            sizes.extend((0..ranks).map(|rank| (heads / ranks + usize::from(rank < heads % ranks)) * head_size));
        }
        let even = sizes.iter().all(|&n| n == sizes[0]);
        Ok(if even { plain } else { Placement::ragged(dim as isize, sizes) })
    }

    /// Shards the features inside every expert, so that each rank has a part of all experts whatever their number is.
    pub(super) fn shard_experts(&mut self, path: &str) -> Result<()> {
        for (name, dim) in EXPERT_STACKS {
            self.place_param(&join(path, name), &Placement::Shard(*dim))?;
        }
        self.gather_and_reduce(path);
        Ok(())
    }

    /// Gathers the input of a module, with sequence parallelism, and reduces its output.
    fn gather_and_reduce(&mut self, path: &str) {
        if self.sequence_dim.is_some() {
            self.gather_input(path);
        }
        self.reduce_output(path);
    }

    pub(super) fn shard_embedding(&mut self, path: &str, sharding: EmbeddingSharding) -> Result<()> {
        let dim = if sharding == EmbeddingSharding::Vocabulary { 0 } else { 1 };
        self.place_param(&join(path, "weight"), &Placement::Shard(dim))?;
        self.reduce_output(path);
        Ok(())
    }

    pub(super) fn shard_head(&mut self, head: &LinearLayer) -> Result<()> {
        if self.sequence_dim.is_some() {
            self.gather_input(&head.path);
        }
        self.place_linear(head, &Placement::Shard(0), &Placement::Shard(0))
    }
}

/// Checks that hints name linear layers, or modules.
pub(crate) fn check_hints(module: &dyn Module) -> Result<()> {
    let inventory = ModuleInventory::new(module);
    let paths =
        |linear: bool| inventory.modules.iter().filter(move |(_, kind)| !linear || *kind == "Linear").map(|(p, _)| p);
    for (module, hints) in &inventory.hints {
        let roles =
            [("column", &hints.columns, true), ("row", &hints.rows, true), ("batch input", &hints.batch_inputs, false)];
        for (role, hint, linear) in
            roles.into_iter().flat_map(|(role, hints, linear)| hints.iter().map(move |h| (role, h, linear)))
        {
            let path = join(module, hint);
            if !paths(linear).any(|known| *known == path) {
                let found = format!("{role} `{hint}` in the hints of module `{module}`");
                let needed =
                    if linear { "the path of a linear layer below it" } else { "the path of a module below it" };
                let fix = format!("did you mean {}?", nearest(&path, paths(linear).cloned()));
                return Err(ErrorKind::Plan.error("plan hints", found, needed, fix));
            }
        }
    }
    Ok(())
}

/// Paths of modules whose input has the batch as its first dimension, from hints.
pub(crate) fn batch_inputs(module: &dyn Module) -> Vec<String> {
    let hints = ModuleInventory::new(module).hints;
    hints.iter().flat_map(|(module, hints)| hints.batch_inputs.iter().map(|hint| join(module, hint))).collect()
}

/// `whole / part`, if it divides evenly.
fn divided(whole: usize, part: usize) -> Option<usize> {
    (part > 0 && whole.is_multiple_of(part)).then(|| whole / part)
}

/// A linear layer of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LinearLayer {
    pub(super) path: String,
    pub(super) shape: Vec<usize>,
    pub(super) bias: bool,
}

/// A module in which some linear layers lead in (sharded by columns) and some lead out (sharded by rows).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TransformerBlock {
    pub(super) path: String,
    pub(super) kind: &'static str,
    pub(super) columns: Vec<LinearLayer>,
    pub(super) rows: Vec<LinearLayer>,
    pub(super) hooks: bool,
    /// Number of key heads, which are not to be split; none outside of attention.
    pub(super) key_heads: Option<usize>,
    /// Number of query heads; none outside of attention.
    pub(super) query_heads: Option<usize>,
    /// Whether the module repeats key heads for query heads that are sharded in another way.
    pub(super) repeats_key_heads: bool,
}

impl TransformerBlock {
    /// Whether a layer projects to queries, which are more than keys.
    fn is_query(&self, column: &LinearLayer) -> bool {
        self.columns.iter().all(|other| other.shape[0] <= column.shape[0])
    }
}

/// The layers of a model by role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TransformerStructure {
    pub(super) blocks: Vec<TransformerBlock>,
    /// Paths of stacks of experts.
    pub(super) experts: Vec<String>,
    /// Paths of embeddings.
    pub(super) embeddings: Vec<String>,
    pub(super) heads: Vec<LinearLayer>,
    /// Paths of all other parameters.
    pub(super) rest: Vec<String>,
}

/// Names of linear layers that lead into a block, in this crate and in common PyTorch models.
const COLUMNS: &[&str] = &[
    "query",
    "key",
    "value",
    "qkv",
    "q",
    "k",
    "v",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "wq",
    "wk",
    "wv",
    "up",
    "gate",
    "up_proj",
    "gate_proj",
    "fc1",
    "c_fc",
    "w1",
    "w3",
];
/// Names of linear layers that lead out of a block.
const ROWS: &[&str] = &["output", "out", "o", "o_proj", "out_proj", "wo", "down", "down_proj", "fc2", "c_proj", "w2"];
/// Parameters of a module of kind [`EXPERTS`], with the dimension of the features inside.
pub(super) const EXPERT_STACKS: &[(&str, isize)] = &[("gate", 1), ("up", 1), ("down", 2)];
/// Kind of the modules with the stacked weights of a mixture of experts.
const EXPERTS: &str = "Experts";
/// Names of language-model and classifier heads.
const HEADS: &[&str] = &["head", "lm_head", "classifier", "unembedding"];

impl TransformerStructure {
    pub(super) fn of(module: &dyn Module) -> Self {
        let inventory = ModuleInventory::new(module);
        let shape =
            |path: &str| inventory.tensors.iter().find(|(own, _)| own == path).map(|(_, s)| s.get().shape().to_vec());
        let linears = inventory.modules.iter().filter(|(_, kind)| *kind == "Linear").filter_map(|(path, _)| {
            let bias = shape(&join(path, "bias")).is_some();
            Some(LinearLayer { path: path.clone(), shape: shape(&join(path, "weight"))?, bias })
        });
        let linears: Vec<LinearLayer> = linears.collect();
        let embeddings = inventory.modules.iter().filter(|(_, kind)| matches!(*kind, "Embedding" | "EmbeddingBag"));
        let embeddings: Vec<String> = embeddings.map(|(path, _)| path.clone()).collect();
        let experts = inventory.modules.iter().filter(|(_, kind)| *kind == EXPERTS);
        let experts: Vec<String> = experts.map(|(path, _)| path.clone()).collect();
        let mut blocks = Vec::new();
        for (path, kind) in &inventory.modules {
            let named = |names: &[&str]| -> Vec<LinearLayer> {
                let own = linears.iter().filter(|l| {
                    let (module, name) = parent(&l.path);
                    module == path && l.path != *path && names.contains(&name)
                });
                own.cloned().collect()
            };
            let hinted = |paths: &[String]| -> Vec<LinearLayer> {
                let own = linears.iter().filter(|l| paths.iter().any(|hint| join(path, hint) == l.path));
                own.cloned().collect()
            };
            let (columns, rows) = match inventory.hints.get(path).filter(|hints| !hints.columns.is_empty()) {
                Some(hints) => (hinted(&hints.columns), hinted(&hints.rows)),
                None => (named(COLUMNS), named(ROWS)),
            };
            if !columns.is_empty() && !rows.is_empty() {
                let hooks = inventory.hooks.contains_key(path);
                let heads = inventory.heads.get(path);
                blocks.push(TransformerBlock {
                    path: path.clone(),
                    kind,
                    columns,
                    rows,
                    hooks,
                    key_heads: heads.map(|heads| heads.key),
                    query_heads: heads.map(|heads| heads.query),
                    repeats_key_heads: *kind == "DecoderAttention",
                });
            }
        }
        let in_block = |l: &LinearLayer| blocks.iter().any(|b| b.columns.contains(l) || b.rows.contains(l));
        let vocabularies: Vec<usize> = embeddings.iter().filter_map(|t| Some(shape(&join(t, "weight"))?[0])).collect();
        let is_head = |l: &&LinearLayer| HEADS.contains(&parent(&l.path).1) || vocabularies.contains(&l.shape[0]);
        let heads: Vec<LinearLayer> = linears.iter().filter(|l| !in_block(l)).filter(is_head).cloned().collect();
        let owners = linears.iter().filter(|l| in_block(l) || heads.contains(l)).map(|l| &l.path);
        let owners = owners.chain(&embeddings).chain(&experts);
        let owners: Vec<&String> = owners.collect();
        let free = |path: &String| !owners.iter().any(|owner| parent(path).0 == owner.as_str());
        let rest = module.named_parameters().into_iter().map(|(path, _)| path).filter(free).collect();
        TransformerStructure { blocks, experts, embeddings, heads, rest }
    }
}
