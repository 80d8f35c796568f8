//! Parallel styles: how one module is sharded over one mesh axis.

use super::apply::{ModuleInventory, check_match};
use super::pattern::matches;
use super::shard_module;
use super::sharder::ModuleView;
use super::sharding_plan::ShardingPlan;
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::nn::{Module, join};
use crate::placement::Placement;

/// How one module is sharded over one mesh axis; its placements over other axes do not change.
pub trait ParallelStyle {
    /// Adds what the style does to a module to a plan.
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan>;
}

/// Applies parallel styles to modules by path or pattern, on a mesh of any number of axes.
///
/// Unlike PyTorch's function, it takes the whole mesh: every style names its mesh axis. Styles for one module add up as long
/// as they do not contradict each other. Patterns are those of [`ShardingPlan`].
///
/// Collective: all ranks of the mesh must call it. Redistributes the parameters.
///
/// # Errors
/// [`Error::Invalid`] if a pattern matches no module, styles contradict each other, or a style does not support the type of
/// a module. Nothing is changed then.
///
/// ```
/// use shardwise::nn::{Activation, Builder, Forward, Mlp};
/// use shardwise::plan::{ColwiseParallel, RowwiseParallel, parallelize_module};
/// use shardwise::prelude::*;
///
/// launch(4, |world| {
///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
///     let mlp = Mlp::new(&Builder::new(&mesh), 8, 16, Activation::Gelu)?;
///     parallelize_module(&mlp, &mesh, &[("up", &ColwiseParallel::new("tp")), ("down", &RowwiseParallel::new("tp"))])?;
///     let y = mlp.forward(&DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?)?;
///     assert_eq!(y.placements(), [Shard(0), Replicate]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn parallelize_module(module: &dyn Module, mesh: &DeviceMesh, styles: &[(&str, &dyn ParallelStyle)]) -> Result<()> {
    let inventory = ModuleInventory::new(module);
    let modules: Vec<&String> = inventory.modules.iter().map(|(path, _)| path).collect();
    let mut plan = ShardingPlan::new();
    for (pattern, style) in styles {
        check_match(pattern, "module", &modules)?;
        for path in modules.iter().filter(|path| matches(pattern, path)) {
            plan = style.extend(plan, &inventory.view(path, mesh))?;
        }
    }
    shard_module(module, mesh, &plan)
}

/// Shards a layer by columns, its output features: dimension 0 of the weight and the bias of
/// [`Linear`](crate::nn::Linear) and convolutions, dimension 1 of the table of [`Embedding`](crate::nn::Embedding).
///
/// The input is replicated over the axis, from whatever layout it has: an input that is sharded on the batch or the sequence takes
/// one all-gather, and its gradient one reduce-scatter. By default the output is sharded on its features.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColwiseParallel {
    axis: String,
    input: Option<Placement>,
    output: Option<Placement>,
}

impl ColwiseParallel {
    /// Over a mesh axis.
    pub fn new(axis: &str) -> Self {
        ColwiseParallel { axis: axis.to_string(), input: None, output: None }
    }

    /// States the placement over the axis in which the input arrives, from where it is redistributed. A forward pass with an
    /// input in another placement over the axis is an error on every rank.
    ///
    /// PyTorch's `input_layouts` declares the layout of a plain tensor; a distributed tensor knows its own, and is compared.
    ///
    /// ```
    /// use shardwise::nn::{Builder, Forward, Linear};
    /// use shardwise::plan::{ColwiseParallel, parallelize_module};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let up = Linear::new(&Builder::new(&mesh), 4, 8)?;
    ///     parallelize_module(&up, &mesh, &[("", &ColwiseParallel::new("tp").input(Shard(0)))])?;
    ///     let x = DTensor::ones((6, 4), DType::F32, &mesh, [Shard(0)])?;
    ///     assert_eq!(up.forward(&x)?.placements(), [Shard(1)]);
    ///     assert!(up.forward(&x.redistribute([Replicate])?).is_err());
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "input_layouts")]
    pub fn input(mut self, placement: Placement) -> Self {
        self.input = Some(placement);
        self
    }

    /// Sets the placement over the axis to which the output is redistributed.
    #[doc(alias = "output_layouts")]
    pub fn output(mut self, placement: Placement) -> Self {
        self.output = Some(placement);
        self
    }
}

impl ParallelStyle for ColwiseParallel {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        let (weight, features) = match module.kind() {
            "Linear" => (0, -1),
            "Conv1d" | "Conv2d" => (0, 1),
            "Embedding" | "EmbeddingBag" => (1, -1),
            _ => return Err(unsupported(module, "ColwiseParallel")),
        };
        let plan = param(plan, module, "weight", &self.axis, &Placement::Shard(weight));
        let plan = param(plan, module, "bias", &self.axis, &Placement::Shard(0));
        let output = self.output.clone().unwrap_or(Placement::Shard(features));
        let plan = expected(plan, module, &self.axis, self.input.as_ref());
        let plan = plan.input_along(module.path(), &self.axis, &Placement::Replicate);
        Ok(plan.output_along(module.path(), &self.axis, &output))
    }
}

/// Shards a layer by rows, its input features: dimension 1 of the weight of [`Linear`](crate::nn::Linear) and convolutions,
/// with a replicated bias; dimension 0, the vocabulary, of the table of [`Embedding`](crate::nn::Embedding).
///
/// The input is sharded on its features (ids of an embedding are replicated), from whatever layout it has. By default the output is
/// reduced and replicated over the axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowwiseParallel {
    axis: String,
    input: Option<Placement>,
    output: Placement,
}

impl RowwiseParallel {
    /// Over a mesh axis.
    pub fn new(axis: &str) -> Self {
        RowwiseParallel { axis: axis.to_string(), input: None, output: Placement::Replicate }
    }

    /// States the placement over the axis in which the input arrives; see [`ColwiseParallel::input`].
    #[doc(alias = "input_layouts")]
    pub fn input(mut self, placement: Placement) -> Self {
        self.input = Some(placement);
        self
    }

    /// Sets the placement over the axis to which the output is redistributed.
    #[doc(alias = "output_layouts")]
    pub fn output(mut self, placement: Placement) -> Self {
        self.output = placement;
        self
    }
}

impl ParallelStyle for RowwiseParallel {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        let (weight, input) = match module.kind() {
            "Linear" => (1, Placement::Shard(-1)),
            "Conv1d" | "Conv2d" => (1, Placement::Shard(1)),
            "Embedding" | "EmbeddingBag" => (0, Placement::Replicate),
            _ => return Err(unsupported(module, "RowwiseParallel")),
        };
        let plan = param(plan, module, "weight", &self.axis, &Placement::Shard(weight));
        let plan = param(plan, module, "bias", &self.axis, &Placement::Replicate);
        let plan = expected(plan, module, &self.axis, self.input.as_ref());
        Ok(plan.input_along(module.path(), &self.axis, &input).output_along(module.path(), &self.axis, &self.output))
    }
}

/// Runs a module on sequence shards: parameters are replicated, input and output are sharded on the sequence.
///
/// For modules that treat all positions alike, such as norms and dropout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceParallel {
    axis: String,
    dim: isize,
}

impl SequenceParallel {
    /// Over a mesh axis, with sequences on dimension 1: `[batch, length, width]`.
    pub fn new(axis: &str) -> Self {
        SequenceParallel { axis: axis.to_string(), dim: 1 }
    }

    /// Sets the sequence dimension.
    #[doc(alias = "sequence_dim")]
    pub fn on_dim(mut self, dim: isize) -> Self {
        self.dim = dim;
        self
    }
}

impl ParallelStyle for SequenceParallel {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        let replicated = |plan, (name, _): &(String, _)| param(plan, module, name, &self.axis, &Placement::Replicate);
        let plan = module.params().iter().fold(plan, replicated);
        let sharded = Placement::Shard(self.dim);
        Ok(plan.input_along(module.path(), &self.axis, &sharded).output_along(module.path(), &self.axis, &sharded))
    }
}

/// Redistributes the input of a module over one mesh axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInput {
    /// Name of the mesh axis.
    pub axis: String,
    /// Placement over the axis.
    #[doc(alias = "desired_input_layouts")]
    pub to: Placement,
    /// Position of the input, from 0, of a module with several ([`ForwardAll`](crate::nn::ForwardAll)); `None` if it has
    /// one.
    pub number: Option<usize>,
}

impl PrepareModuleInput {
    /// To a placement over a mesh axis.
    pub fn new(axis: &str, to: Placement) -> Self {
        PrepareModuleInput { axis: axis.to_string(), to, number: None }
    }

    /// Selects one of several inputs by its position, from 0.
    pub fn number(mut self, number: usize) -> Self {
        self.number = Some(number);
        self
    }
}

impl ParallelStyle for PrepareModuleInput {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        Ok(match self.number {
            Some(number) => plan.input_at(module.path(), number, [(self.axis.as_str(), self.to.clone())]),
            None => plan.input_along(module.path(), &self.axis, &self.to),
        })
    }
}

/// Redistributes the output of a module over one mesh axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleOutput {
    /// Name of the mesh axis.
    pub axis: String,
    /// Placement over the axis.
    #[doc(alias = "desired_output_layouts")]
    pub to: Placement,
    /// Position of the output, from 0, of a module with several ([`ForwardAll`](crate::nn::ForwardAll)); `None` if it has
    /// one.
    pub number: Option<usize>,
}

impl PrepareModuleOutput {
    /// To a placement over a mesh axis.
    pub fn new(axis: &str, to: Placement) -> Self {
        PrepareModuleOutput { axis: axis.to_string(), to, number: None }
    }

    /// Selects one of several outputs by its position, from 0.
    pub fn number(mut self, number: usize) -> Self {
        self.number = Some(number);
        self
    }
}

impl ParallelStyle for PrepareModuleOutput {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        Ok(match self.number {
            Some(number) => plan.output_at(module.path(), number, [(self.axis.as_str(), self.to.clone())]),
            None => plan.output_along(module.path(), &self.axis, &self.to),
        })
    }
}

/// Redistributes input and output of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInputOutput {
    /// Redistribution of the input.
    pub input: PrepareModuleInput,
    /// Redistribution of the output.
    pub output: PrepareModuleOutput,
}

impl PrepareModuleInputOutput {
    /// To placements over one mesh axis.
    pub fn new(axis: &str, input: Placement, output: Placement) -> Self {
        let input = PrepareModuleInput::new(axis, input);
        PrepareModuleInputOutput { input, output: PrepareModuleOutput::new(axis, output) }
    }
}

impl ParallelStyle for PrepareModuleInputOutput {
    fn extend(&self, plan: ShardingPlan, module: &ModuleView) -> Result<ShardingPlan> {
        self.output.extend(self.input.extend(plan, module)?, module)
    }
}

/// Adds the placement of a parameter, if the module has it.
fn param(plan: ShardingPlan, module: &ModuleView, name: &str, axis: &str, placement: &Placement) -> ShardingPlan {
    match module.param(name) {
        Some(_) => plan.param_along(&join(module.path(), name), axis, placement),
        None => plan,
    }
}

/// Adds the placement in which the input arrives, if the style states one.
fn expected(plan: ShardingPlan, module: &ModuleView, axis: &str, placement: Option<&Placement>) -> ShardingPlan {
    match placement {
        Some(placement) => plan.expect_input(module.path(), [(axis, placement.clone())]),
        None => plan,
    }
}

fn unsupported(module: &ModuleView, style: &str) -> Error {
    ErrorKind::Plan.error(
        "parallel style",
        format!("{style} for `{}`, a {}", module.path(), module.kind()),
        "Linear, Conv1d, Conv2d, Embedding or EmbeddingBag",
        "apply the style to the layers inside it, or write a sharding plan",
    )
}
