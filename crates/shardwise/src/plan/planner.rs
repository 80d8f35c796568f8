//! The trait of planners, and planners for data parallelism and FSDP.

use super::apply::{ModuleInventory, ParamOrBuffer};
use super::pattern::is_beneath;
use super::sharding_plan::{ParamPlan, ShardingPlan};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::Layout;
use crate::nn::Module;
use crate::placement::Placement;

/// Creates a [`ShardingPlan`] for a module on a mesh.
///
/// A planner extends a plan, so that several can be combined with [`and`](Self::and), each for its own mesh axes. Planning
/// is local; [`shard_module`](super::shard_module) applies the plan.
pub trait ShardingPlanner {
    /// Adds what this planner decides for a module on a mesh to a plan.
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan>;

    /// Returns the plan of only this planner.
    #[doc(alias = "build_plan")]
    fn plan(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        self.extend(ShardingPlan::new(), module, mesh)
    }

    /// Combines this planner with another one, which shards after it.
    ///
    /// ```
    /// use shardwise::nn::{Activation, Builder, Mlp};
    /// use shardwise::plan::{FullyShard, ShardingPlanner, TensorParallel, shard_module};
    /// use shardwise::prelude::*;
    ///
    /// launch(4, |world| {
    ///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
    ///     let mlp = Mlp::new(&Builder::new(&mesh), 8, 16, Activation::Gelu)?;
    ///     let plan = TensorParallel::new("tp").and(FullyShard::new(["dp"])).plan(&mlp, &mesh)?;
    ///     shard_module(&mlp, &mesh, &plan)?;
    ///     assert_eq!(mlp.up.weight.get().placements(), [Shard(0), Shard(0)]); // tp shards first
    ///     assert_eq!(mlp.up.weight.layout().shard_order(0), [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    fn and<P: ShardingPlanner>(self, other: P) -> CombinedPlanner<Self, P>
    where
        Self: Sized,
    {
        CombinedPlanner(self, other)
    }
}

/// Two planners, one after the other; see [`ShardingPlanner::and`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CombinedPlanner<A, B>(A, B);

impl<A: ShardingPlanner, B: ShardingPlanner> ShardingPlanner for CombinedPlanner<A, B> {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        self.1.extend(self.0.extend(plan, module, mesh)?, module, mesh)
    }
}

/// Data parallelism (DDP): parameters are replicated over some mesh axes, and each rank works on its shard of the batch.
///
/// Gradients are reduced together, when an optimizer or `in_param_layout` needs them; there is no wrapper around the model.
#[doc(alias = "DDP")]
#[doc(alias = "DistributedDataParallel")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataParallel {
    axes: Vec<String>,
}

impl DataParallel {
    /// Replicates parameters over these mesh axes.
    pub fn new<S: AsRef<str>>(axes: impl IntoIterator<Item = S>) -> Self {
        DataParallel { axes: names(axes) }
    }
}

impl ShardingPlanner for DataParallel {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        let replicated: Vec<(String, Placement)> =
            self.axes.iter().map(|a| (a.clone(), Placement::Replicate)).collect();
        each_param(plan, module, mesh, |_, _| Ok(replicated.clone()))
    }
}

/// Fully sharded data parallelism (FSDP, ZeRO-3): parameters, gradients and optimizer state are sharded over some mesh axes.
///
/// Every parameter is sharded on one dimension, after the sharding of other planners. An operator that needs the full
/// parameter gathers it, unless gathering the input is cheaper; gradients are reduce-scattered. Unlike PyTorch's
/// `fully_shard`, there is no wrapper and no prefetching.
#[doc(alias = "fully_shard")]
#[doc(alias = "FSDP2")]
#[doc(alias = "FSDP")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullyShard {
    axes: Vec<String>,
    dim: Option<usize>,
    merged: Vec<(String, usize)>,
}

impl FullyShard {
    /// Shards parameters over these mesh axes: on the longest dimension that divides evenly, else on the longest.
    pub fn new<S: AsRef<str>>(axes: impl IntoIterator<Item = S>) -> Self {
        FullyShard { axes: names(axes), dim: None, merged: Vec::new() }
    }

    /// Shards on this dimension, or on the last one of parameters that have fewer dimensions.
    pub fn on_dim(mut self, dim: usize) -> Self {
        self.dim = Some(dim);
        self
    }

    /// Shards the parameters that match a pattern over their first `dims` dimensions together, such as the 15 rows of experts
    /// `[3, 5, 8]` as 4, 4, 4 and 3 rows on 4 ranks, where no dimension of theirs could be divided evenly.
    ///
    /// Modules see the parameter in its own shape, gathered where shards cross the borders of the first dimension, and so do
    /// checkpoints. See [`Param::merge_dims`](crate::Param::merge_dims).
    ///
    /// ```
    /// use shardwise::nn::init::Init;
    /// use shardwise::plan::{FullyShard, ShardingPlanner, shard_module};
    /// use shardwise::prelude::*;
    ///
    /// #[derive(Module)]
    /// struct Experts {
    ///     weight: Param,
    /// }
    ///
    /// launch(4, |world| {
    ///     let mesh = world.mesh([("dp", 4)])?;
    ///     let weight = Builder::new(&mesh).param("weight", &[3, 5, 8], Init::Normal(0.0, 1.0))?;
    ///     let experts = Experts { weight };
    ///     let plan = FullyShard::new(["dp"]).shard_merged("weight", 2).plan(&experts, &mesh)?;
    ///     shard_module(&experts, &mesh, &plan)?;
    ///     assert_eq!(experts.weight.get().local_shape()[0], [4, 4, 4, 3][world.rank()]);
    ///     assert_eq!(experts.weight.forward_value()?.shape(), [3, 5, 8]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "BlockShard")]
    #[doc(alias = "shard_placement_fn")]
    pub fn shard_merged(mut self, pattern: &str, dims: usize) -> Self {
        self.merged.push((pattern.to_string(), dims));
        self
    }

    /// Placements over the axes of the planner for a parameter whose layout without them is that of `now`.
    pub(super) fn placements_for(&self, now: &Layout) -> Result<Vec<(String, Placement)>> {
        let mesh = now.mesh();
        let own = mesh.axis_positions(&self.axes)?;
        let shards: usize = own.iter().map(|&axis| mesh.shape()[axis]).product();
        let left = now.without_axes(&own)?.local_shape(mesh.ranks()[0]);
        let longest = |&d: &usize| (left[d].is_multiple_of(shards) && left[d] > 0, left[d], std::cmp::Reverse(d));
        let dim = match (self.dim, left.len()) {
            (_, 0) => None,
            (Some(dim), n) => Some(dim.min(n - 1)),
            (None, n) => (0..n).max_by_key(longest),
        };
        let placement = dim.map_or(Placement::Replicate, |dim| Placement::Shard(dim as isize));
        Ok(self.axes.iter().map(|axis| (axis.clone(), placement.clone())).collect())
    }
}

impl ShardingPlanner for FullyShard {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        let plan = self.merged.iter().fold(plan, |plan, (pattern, dims)| plan.merge_dims(pattern, *dims));
        each_param(plan, module, mesh, |layout, is_merged| match is_merged {
            true => Ok(self.axes.iter().map(|axis| (axis.clone(), Placement::Shard(0))).collect()),
            false => self.placements_for(layout),
        })
    }
}

pub(super) fn names<S: AsRef<str>>(axes: impl IntoIterator<Item = S>) -> Vec<String> {
    axes.into_iter().map(|axis| axis.as_ref().to_string()).collect()
}

/// Adds placements to every parameter, chosen by the layout that the plan gives it so far and whether its dimensions are merged. Parameters of modules that the
/// plan replaces are skipped.
fn each_param(
    mut plan: ShardingPlan,
    module: &dyn Module,
    mesh: &DeviceMesh,
    more: impl Fn(&Layout, bool) -> Result<Vec<(String, Placement)>>,
) -> Result<ShardingPlan> {
    let inventory = ModuleInventory::new(module);
    for (path, tensor) in &inventory.tensors {
        if let ParamOrBuffer::Param(param) = tensor
            && !is_replaced(&plan, &inventory, path)?
        {
            let is_merged = plan.merged_dims(path).is_some() || param.merged().is_some();
            let more = more(&tensor.layout_by(&plan, path)?, is_merged)?;
            plan = plan.add_placements(path, mesh.mesh(), &more)?;
        }
    }
    Ok(plan)
}

/// Whether a path is inside a module that the plan replaces.
fn is_replaced(plan: &ShardingPlan, inventory: &ModuleInventory, path: &str) -> Result<bool> {
    for (module, _) in inventory.modules.iter().filter(|(module, _)| is_beneath(path, module)) {
        if let Some(ParamPlan::Sharder(_)) = plan.param_plan(module)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Shards all parameters of a module over some mesh axes: [`FullyShard`] in one call.
///
/// Collective: all ranks of the mesh must call it. Redistributes the parameters.
#[track_caller]
pub fn fully_shard(module: &dyn Module, mesh: &DeviceMesh, axes: &[&str]) -> Result<()> {
    super::shard_module(module, mesh, &FullyShard::new(axes).plan(module, mesh)?)
}

/// Replicates all parameters of a module over some mesh axes: [`DataParallel`] in one call.
///
/// Collective: all ranks of the mesh must call it. Redistributes the parameters.
#[track_caller]
pub fn replicate(module: &dyn Module, mesh: &DeviceMesh, axes: &[&str]) -> Result<()> {
    super::shard_module(module, mesh, &DataParallel::new(axes).plan(module, mesh)?)
}
