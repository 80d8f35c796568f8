//! Planners: what makes a plan for a module and a mesh.

use super::apply::{Found, Slot};
use super::pattern::is_beneath;
use super::sharding_plan::{ParamPlan, ShardingPlan};
use crate::comm::DeviceMesh;
use crate::error::Result;
use crate::layout::Layout;
use crate::nn::Module;
use crate::placement::Placement;

/// Makes plans. A planner adds to a plan, so that several can be combined: each for the axes that it is about.
pub trait ShardingPlanner {
    /// A plan with what this planner adds to it for a module on a mesh.
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan>;

    /// The plan of this planner alone.
    #[doc(alias = "build_plan")]
    fn plan(&self, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        self.extend(ShardingPlan::new(), module, mesh)
    }

    /// This planner, and another one on top of it.
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
    ///     assert_eq!(mlp.up.weight.get().placements(), [Shard(0), Shard(0)]); // tp cuts first
    ///     assert_eq!(mlp.up.weight.layout().shard_order(0), [1, 0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    fn and<P: ShardingPlanner>(self, other: P) -> Combined<Self, P>
    where
        Self: Sized,
    {
        Combined(self, other)
    }
}

/// One planner on top of another. See [`ShardingPlanner::and`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Combined<A, B>(A, B);

impl<A: ShardingPlanner, B: ShardingPlanner> ShardingPlanner for Combined<A, B> {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        self.1.extend(self.0.extend(plan, module, mesh)?, module, mesh)
    }
}

/// Data parallelism: every rank along some axes has all parameters, and works on its part of the batch.
#[doc(alias = "DDP")]
#[doc(alias = "DistributedDataParallel")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataParallel {
    axes: Vec<String>,
}

impl DataParallel {
    /// Parameters whole along some axes.
    pub fn new<S: AsRef<str>>(axes: impl IntoIterator<Item = S>) -> Self {
        DataParallel { axes: names(axes) }
    }
}

impl ShardingPlanner for DataParallel {
    fn extend(&self, plan: ShardingPlan, module: &dyn Module, mesh: &DeviceMesh) -> Result<ShardingPlan> {
        let whole: Vec<(String, Placement)> = self.axes.iter().map(|a| (a.clone(), Placement::Replicate)).collect();
        each_param(plan, module, mesh, |_| Ok(whole.clone()))
    }
}

/// Data parallelism with parameters, gradients and optimizer state in pieces (FSDP): every parameter is cut along some
/// axes, after what other planners cut. An operator that needs it whole gathers it, if that is cheaper than to gather its
/// input; its gradient is scattered.
#[doc(alias = "fully_shard")]
#[doc(alias = "FSDP2")]
#[doc(alias = "FSDP")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullyShard {
    axes: Vec<String>,
    dim: Option<usize>,
}

impl FullyShard {
    /// Cut along some axes, at the longest dimension that divides evenly, or else at the longest.
    pub fn new<S: AsRef<str>>(axes: impl IntoIterator<Item = S>) -> Self {
        FullyShard { axes: names(axes), dim: None }
    }

    /// Cut at this dimension, where parameters have it, and at their last one where they have not.
    pub fn on_dim(mut self, dim: usize) -> Self {
        self.dim = Some(dim);
        self
    }

    /// What a parameter that lies so is to be cut along.
    pub(super) fn cut(&self, now: &Layout) -> Result<Vec<(String, Placement)>> {
        let mesh = now.mesh();
        let own = mesh.axis_positions(&self.axes)?;
        let ways: usize = own.iter().map(|&axis| mesh.shape()[axis]).product();
        let left = now.without_axes(&own)?.local_shape(mesh.ranks()[0]);
        let longest = |&d: &usize| (left[d].is_multiple_of(ways) && left[d] > 0, left[d], std::cmp::Reverse(d));
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
        each_param(plan, module, mesh, |layout| self.cut(layout))
    }
}

pub(super) fn names<S: AsRef<str>>(axes: impl IntoIterator<Item = S>) -> Vec<String> {
    axes.into_iter().map(|axis| axis.as_ref().to_string()).collect()
}

/// Adds placements along more axes to every parameter, chosen by the layout that the plan gives it so far. Modules that
/// the plan replaces are left alone.
fn each_param(
    mut plan: ShardingPlan,
    module: &dyn Module,
    mesh: &DeviceMesh,
    more: impl Fn(&Layout) -> Result<Vec<(String, Placement)>>,
) -> Result<ShardingPlan> {
    let found = Found::new(module);
    for (path, slot) in &found.tensors {
        if let Slot::Param(param) = slot
            && !is_replaced(&plan, &found, path)?
        {
            let more = more(&plan.layout_of(path, &param.layout())?)?;
            plan = plan.along(path, mesh.mesh(), &more)?;
        }
    }
    Ok(plan)
}

/// Whether a path lies inside a module that the plan replaces.
fn is_replaced(plan: &ShardingPlan, found: &Found, path: &str) -> Result<bool> {
    for (module, _) in found.modules.iter().filter(|(module, _)| is_beneath(path, module)) {
        if let Some(ParamPlan::Sharder(_)) = plan.of_param(module)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Cuts every parameter of a module along some axes, and moves it there: [`FullyShard`] in one call.
#[track_caller]
pub fn fully_shard(module: &dyn Module, mesh: &DeviceMesh, axes: &[&str]) -> Result<()> {
    super::shard_module(module, mesh, &FullyShard::new(axes).plan(module, mesh)?)
}

/// Makes every parameter of a module whole along some axes: [`DataParallel`] in one call.
#[track_caller]
pub fn replicate(module: &dyn Module, mesh: &DeviceMesh, axes: &[&str]) -> Result<()> {
    super::shard_module(module, mesh, &DataParallel::new(axes).plan(module, mesh)?)
}
