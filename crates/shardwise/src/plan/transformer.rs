//! Tensor parallelism for transformers, which are recognised by how they are made.

use super::apply::Found;
use super::pattern::parent;
use super::planner::ShardingPlanner;
use super::sharding_plan::ShardingPlan;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, nearest};
use crate::layout::{Layout, coordinates};
use crate::nn::{Module, join};
use crate::placement::Placement;

/// Which dimension of an embedding table is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableCut {
    /// Rows: every rank knows some words.
    Vocabulary,
    /// Columns: every rank knows some features of all words.
    Width,
}

/// Tensor parallelism along one axis (Megatron).
///
/// A module with linear layers that lead in (`query`, `key`, `value`, `up`, `gate` and their usual other names) and one that
/// leads out (`output`, `down` and theirs) is a block: the first are cut by outputs, the last by inputs, and the sum over
/// ranks runs behind it. In a module that says its [`Heads`](crate::nn::Heads), such as
/// [`MultiHeadAttention`](crate::nn::MultiHeadAttention), every rank gets whole key heads with their query heads, as even as
/// it goes: 3 and 2 of 5 on 2 ranks; where there are more ranks than key heads, some get none. Tables are cut by vocabulary or width, linear layers named like a head or as wide as
/// a table's vocabulary by outputs. Everything else is whole. With [`sequence`](Self::sequence), activations between
/// blocks are cut along their sequence: they are gathered before a block and scattered behind it.
#[doc(alias = "Megatron")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorParallel {
    axis: String,
    tables: TableCut,
    sequence: Option<isize>,
}

impl TensorParallel {
    /// Along an axis, tables cut by vocabulary.
    pub fn new(axis: &str) -> Self {
        TensorParallel { axis: axis.to_string(), tables: TableCut::Vocabulary, sequence: None }
    }

    /// The same with tables cut otherwise.
    pub fn tables(mut self, cut: TableCut) -> Self {
        self.tables = cut;
        self
    }

    /// The same with activations between blocks cut along this dimension, 1 for `[batch, length, width]`.
    pub fn sequence(mut self, dim: isize) -> Self {
        self.sequence = Some(dim);
        self
    }
}

impl ShardingPlanner for TensorParallel {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        mesh.axis(&self.axis)?;
        check_hints(module)?;
        let structure = Structure::of(module);
        let mut cuts = Cuts { plan, mesh, axis: &self.axis, sequence: self.sequence };
        for block in &structure.blocks {
            cuts.block(block)?;
        }
        for table in &structure.tables {
            cuts.table(table, self.tables)?;
        }
        for head in &structure.heads {
            cuts.head(head)?;
        }
        for path in &structure.rest {
            cuts.param(path, &Placement::Replicate)?;
        }
        Ok(cuts.plan)
    }
}

/// A plan in the making: cuts along one axis are added to it.
pub(super) struct Cuts<'a> {
    pub(super) plan: ShardingPlan,
    pub(super) mesh: &'a DeviceMesh,
    pub(super) axis: &'a str,
    pub(super) sequence: Option<isize>,
}

impl Cuts<'_> {
    pub(super) fn param(&mut self, path: &str, placement: &Placement) -> Result<()> {
        let plan = std::mem::take(&mut self.plan);
        self.plan = plan.along(path, self.mesh.mesh(), &[(self.axis.to_string(), placement.clone())])?;
        Ok(())
    }

    /// The weight of a linear layer, and its bias if it has one.
    fn linear(&mut self, linear: &Linear, weight: &Placement, bias: &Placement) -> Result<()> {
        self.param(&join(&linear.path, "weight"), weight)?;
        if linear.bias { self.param(&join(&linear.path, "bias"), bias) } else { Ok(()) }
    }

    fn between(&self) -> Placement {
        self.sequence.map_or(Placement::Replicate, Placement::Shard)
    }

    fn input(&mut self, path: &str) {
        self.plan = std::mem::take(&mut self.plan).input_along(path, self.axis, &Placement::Replicate);
    }

    fn output(&mut self, path: &str) {
        let between = self.between();
        self.plan = std::mem::take(&mut self.plan).output_along(path, self.axis, &between);
    }

    pub(super) fn block(&mut self, block: &Block) -> Result<()> {
        for column in &block.columns {
            let cut = self.cut(column, 0, block.units)?;
            self.linear(column, &cut, &cut)?;
            if self.sequence.is_some() && !block.hooks {
                self.input(&column.path);
            }
        }
        // Once for all that lead in.
        if self.sequence.is_some() && block.hooks {
            self.input(&block.path);
        }
        for row in &block.rows {
            let cut = self.cut(row, 1, block.units)?;
            self.linear(row, &cut, &Placement::Replicate)?;
            self.output(&row.path);
        }
        Ok(())
    }

    /// How the axis cuts a dimension of a layer's weight whose features come in so many units, after the axes that the
    /// plan has cut it by so far: never inside a unit.
    fn cut(&self, linear: &Linear, dim: usize, units: Option<usize>) -> Result<Placement> {
        let plain = Placement::Shard(dim as isize);
        let Some(size) = units.and_then(|units| divided(linear.shape[dim], units)) else { return Ok(plain) };
        let mesh = self.mesh.mesh();
        let axis = mesh.axis(self.axis)?;
        let whole = Layout::replicated(mesh, linear.shape.as_slice())?;
        let so_far = self.plan.layout_of(&join(&linear.path, "weight"), &whole)?.without_axes(&[axis])?;
        let mut sizes = Vec::new();
        for outer in coordinates(mesh, so_far.shard_order(dim)) {
            let Some(units) = divided(so_far.owned(dim, &outer).len(), size) else { return Ok(plain) };
            let ranks = mesh.shape()[axis];
            sizes.extend((0..ranks).map(|rank| (units / ranks + usize::from(rank < units % ranks)) * size));
        }
        let even = sizes.iter().all(|&n| n == sizes[0]);
        Ok(if even { plain } else { Placement::ragged(dim as isize, sizes) })
    }

    pub(super) fn table(&mut self, path: &str, cut: TableCut) -> Result<()> {
        let dim = if cut == TableCut::Vocabulary { 0 } else { 1 };
        self.param(&join(path, "weight"), &Placement::Shard(dim))?;
        self.output(path);
        Ok(())
    }

    pub(super) fn head(&mut self, head: &Linear) -> Result<()> {
        if self.sequence.is_some() {
            self.input(&head.path);
        }
        self.linear(head, &Placement::Shard(0), &Placement::Shard(0))
    }
}

/// An error for a hint that names no linear layer, or no module.
pub(crate) fn check_hints(module: &dyn Module) -> Result<()> {
    let found = Found::new(module);
    let paths =
        |linear: bool| found.modules.iter().filter(move |(_, kind)| !linear || *kind == "Linear").map(|(p, _)| p);
    for (module, hints) in &found.hints {
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

/// Paths of modules whose input has the batch as its first dimension, as hints say.
pub(crate) fn batch_inputs(module: &dyn Module) -> Vec<String> {
    let hints = Found::new(module).hints;
    hints.iter().flat_map(|(module, hints)| hints.batch_inputs.iter().map(|hint| join(module, hint))).collect()
}

/// How often `part` goes into `whole`, if nothing is left.
fn divided(whole: usize, part: usize) -> Option<usize> {
    (part > 0 && whole.is_multiple_of(part)).then(|| whole / part)
}

/// A linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Linear {
    pub(super) path: String,
    pub(super) shape: Vec<usize>,
    pub(super) bias: bool,
}

/// A module in which some linear layers lead in and others lead out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) path: String,
    pub(super) kind: &'static str,
    pub(super) columns: Vec<Linear>,
    pub(super) rows: Vec<Linear>,
    pub(super) hooks: bool,
    /// How many units features come in that are not to be cut: key heads.
    pub(super) units: Option<usize>,
}

/// What a model is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Structure {
    pub(super) blocks: Vec<Block>,
    /// Embeddings.
    pub(super) tables: Vec<String>,
    pub(super) heads: Vec<Linear>,
    /// All other parameters.
    pub(super) rest: Vec<String>,
}

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
const ROWS: &[&str] = &["output", "out", "o", "o_proj", "out_proj", "wo", "down", "down_proj", "fc2", "c_proj", "w2"];
const HEADS: &[&str] = &["head", "lm_head", "classifier", "unembedding"];

impl Structure {
    pub(super) fn of(module: &dyn Module) -> Self {
        let found = Found::new(module);
        let shape =
            |path: &str| found.tensors.iter().find(|(own, _)| own == path).map(|(_, s)| s.get().shape().to_vec());
        let linears = found.modules.iter().filter(|(_, kind)| *kind == "Linear").filter_map(|(path, _)| {
            let bias = shape(&join(path, "bias")).is_some();
            Some(Linear { path: path.clone(), shape: shape(&join(path, "weight"))?, bias })
        });
        let linears: Vec<Linear> = linears.collect();
        let tables = found.modules.iter().filter(|(_, kind)| matches!(*kind, "Embedding" | "EmbeddingBag"));
        let tables: Vec<String> = tables.map(|(path, _)| path.clone()).collect();
        let mut blocks = Vec::new();
        for (path, kind) in &found.modules {
            let named = |names: &[&str]| -> Vec<Linear> {
                let own = linears.iter().filter(|l| {
                    let (module, name) = parent(&l.path);
                    module == path && l.path != *path && names.contains(&name)
                });
                own.cloned().collect()
            };
            let hinted = |paths: &[String]| -> Vec<Linear> {
                let own = linears.iter().filter(|l| paths.iter().any(|hint| join(path, hint) == l.path));
                own.cloned().collect()
            };
            let (columns, rows) = match found.hints.get(path).filter(|hints| !hints.columns.is_empty()) {
                Some(hints) => (hinted(&hints.columns), hinted(&hints.rows)),
                None => (named(COLUMNS), named(ROWS)),
            };
            if !columns.is_empty() && !rows.is_empty() {
                let hooks = found.hooks.contains_key(path);
                let units = found.heads.get(path).map(|heads| heads.key);
                blocks.push(Block { path: path.clone(), kind, columns, rows, hooks, units });
            }
        }
        let in_block = |l: &Linear| blocks.iter().any(|b| b.columns.contains(l) || b.rows.contains(l));
        let words: Vec<usize> = tables.iter().filter_map(|t| Some(shape(&join(t, "weight"))?[0])).collect();
        let is_head = |l: &&Linear| HEADS.contains(&parent(&l.path).1) || words.contains(&l.shape[0]);
        let heads: Vec<Linear> = linears.iter().filter(|l| !in_block(l)).filter(is_head).cloned().collect();
        let owners = linears.iter().filter(|l| in_block(l) || heads.contains(l)).map(|l| &l.path).chain(&tables);
        let owners: Vec<&String> = owners.collect();
        let free = |path: &String| !owners.iter().any(|owner| parent(path).0 == owner.as_str());
        let rest = module.named_parameters().into_iter().map(|(path, _)| path).filter(free).collect();
        Structure { blocks, tables, heads, rest }
    }
}
