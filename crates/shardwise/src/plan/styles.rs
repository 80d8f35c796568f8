//! Parallel styles: what is done to one module, by the name of the mesh axis that it acts on.

use super::apply::{Found, check_match};
use super::pattern::matches;
use super::shard_module;
use super::sharder::Part;
use super::sharding_plan::ShardingPlan;
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::nn::{Module, join};
use crate::placement::Placement;

/// Says how one module is spread along one axis of a mesh; other axes stay as they are.
pub trait ParallelStyle {
    /// A plan with what the style says of a module.
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan>;
}

/// Applies styles to modules by path or pattern, on a mesh of any number of axes. Styles for one module add up, as long as
/// they do not contradict each other. A key that fits no module is an error, and nothing is changed.
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
    let found = Found::new(module);
    let modules: Vec<&String> = found.modules.iter().map(|(path, _)| path).collect();
    let mut plan = ShardingPlan::new();
    for (pattern, style) in styles {
        check_match(pattern, "module", &modules)?;
        for path in modules.iter().filter(|path| matches(pattern, path)) {
            plan = style.extend(plan, &found.part(path, mesh))?;
        }
    }
    shard_module(module, mesh, &plan)
}

/// A layer cut by its outputs: weights of [`Linear`](crate::nn::Linear) and convolutions at dimension 0, with their bias;
/// tables of [`Embedding`](crate::nn::Embedding) at dimension 1. The input is whole along the axis, the output cut at its
/// features, unless said otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColwiseParallel {
    axis: String,
    input: Placement,
    output: Option<Placement>,
}

impl ColwiseParallel {
    /// Along an axis.
    pub fn new(axis: &str) -> Self {
        ColwiseParallel { axis: axis.to_string(), input: Placement::Replicate, output: None }
    }

    /// The input lies so along the axis.
    pub fn input(mut self, placement: Placement) -> Self {
        self.input = placement;
        self
    }

    /// The output lies so along the axis.
    pub fn output(mut self, placement: Placement) -> Self {
        self.output = Some(placement);
        self
    }
}

impl ParallelStyle for ColwiseParallel {
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan> {
        let (weight, features) = match part.kind() {
            "Linear" => (0, -1),
            "Conv1d" | "Conv2d" => (0, 1),
            "Embedding" | "EmbeddingBag" => (1, -1),
            _ => return Err(unknown(part, "ColwiseParallel")),
        };
        let plan = param(plan, part, "weight", &self.axis, &Placement::Shard(weight));
        let plan = param(plan, part, "bias", &self.axis, &Placement::Shard(0));
        let output = self.output.clone().unwrap_or(Placement::Shard(features));
        Ok(plan.input_along(part.path(), &self.axis, &self.input).output_along(part.path(), &self.axis, &output))
    }
}

/// A layer cut by its inputs: weights of [`Linear`](crate::nn::Linear) and convolutions at dimension 1, their bias whole;
/// tables of [`Embedding`](crate::nn::Embedding) at dimension 0. The input is cut at its features (that of a table is
/// whole), and the output is summed over the ranks and whole, unless said otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowwiseParallel {
    axis: String,
    input: Option<Placement>,
    output: Placement,
}

impl RowwiseParallel {
    /// Along an axis.
    pub fn new(axis: &str) -> Self {
        RowwiseParallel { axis: axis.to_string(), input: None, output: Placement::Replicate }
    }

    /// The input lies so along the axis.
    pub fn input(mut self, placement: Placement) -> Self {
        self.input = Some(placement);
        self
    }

    /// The output lies so along the axis.
    pub fn output(mut self, placement: Placement) -> Self {
        self.output = placement;
        self
    }
}

impl ParallelStyle for RowwiseParallel {
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan> {
        let (weight, input) = match part.kind() {
            "Linear" => (1, Placement::Shard(-1)),
            "Conv1d" | "Conv2d" => (1, Placement::Shard(1)),
            "Embedding" | "EmbeddingBag" => (0, Placement::Replicate),
            _ => return Err(unknown(part, "RowwiseParallel")),
        };
        let plan = param(plan, part, "weight", &self.axis, &Placement::Shard(weight));
        let plan = param(plan, part, "bias", &self.axis, &Placement::Replicate);
        let input = self.input.clone().unwrap_or(input);
        Ok(plan.input_along(part.path(), &self.axis, &input).output_along(part.path(), &self.axis, &self.output))
    }
}

/// A module that works on every element of a sequence by itself, such as a norm or dropout: parameters whole, input and
/// output cut along the sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceParallel {
    axis: String,
    dim: isize,
}

impl SequenceParallel {
    /// Along an axis, for sequences at dimension 1: `[batch, length, width]`.
    pub fn new(axis: &str) -> Self {
        SequenceParallel { axis: axis.to_string(), dim: 1 }
    }

    /// For sequences at another dimension.
    pub fn on_dim(mut self, dim: isize) -> Self {
        self.dim = dim;
        self
    }
}

impl ParallelStyle for SequenceParallel {
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan> {
        let whole = |plan, (name, _): &(String, _)| param(plan, part, name, &self.axis, &Placement::Replicate);
        let plan = part.params().iter().fold(plan, whole);
        let cut = Placement::Shard(self.dim);
        Ok(plan.input_along(part.path(), &self.axis, &cut).output_along(part.path(), &self.axis, &cut))
    }
}

/// Brings the input of a module to a placement along an axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInput {
    /// The mesh axis.
    pub axis: String,
    /// How the input lies along it.
    pub to: Placement,
    /// Which input, from 0, of a module with several ([`ForwardAll`](crate::nn::ForwardAll)); `None` if it has one.
    pub number: Option<usize>,
}

impl PrepareModuleInput {
    /// To a placement along an axis.
    pub fn new(axis: &str, to: Placement) -> Self {
        PrepareModuleInput { axis: axis.to_string(), to, number: None }
    }

    /// The input with this number, from 0, of a module with several.
    pub fn number(mut self, number: usize) -> Self {
        self.number = Some(number);
        self
    }
}

impl ParallelStyle for PrepareModuleInput {
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan> {
        Ok(match self.number {
            Some(number) => plan.input_at(part.path(), number, [(self.axis.as_str(), self.to.clone())]),
            None => plan.input_along(part.path(), &self.axis, &self.to),
        })
    }
}

/// Brings the output of a module to a placement along an axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleOutput {
    /// The mesh axis.
    pub axis: String,
    /// How the output lies along it.
    pub to: Placement,
    /// Which output, from 0, of a module with several ([`ForwardAll`](crate::nn::ForwardAll)); `None` if it has one.
    pub number: Option<usize>,
}

impl PrepareModuleOutput {
    /// To a placement along an axis.
    pub fn new(axis: &str, to: Placement) -> Self {
        PrepareModuleOutput { axis: axis.to_string(), to, number: None }
    }

    /// The output with this number, from 0, of a module with several.
    pub fn number(mut self, number: usize) -> Self {
        self.number = Some(number);
        self
    }
}

impl ParallelStyle for PrepareModuleOutput {
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan> {
        Ok(match self.number {
            Some(number) => plan.output_at(part.path(), number, [(self.axis.as_str(), self.to.clone())]),
            None => plan.output_along(part.path(), &self.axis, &self.to),
        })
    }
}

/// Brings input and output of a module to placements along an axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareModuleInputOutput {
    /// What is done with the input.
    pub input: PrepareModuleInput,
    /// What is done with the output.
    pub output: PrepareModuleOutput,
}

impl PrepareModuleInputOutput {
    /// To placements along one axis.
    pub fn new(axis: &str, input: Placement, output: Placement) -> Self {
        let input = PrepareModuleInput::new(axis, input);
        PrepareModuleInputOutput { input, output: PrepareModuleOutput::new(axis, output) }
    }
}

impl ParallelStyle for PrepareModuleInputOutput {
    fn extend(&self, plan: ShardingPlan, part: &Part) -> Result<ShardingPlan> {
        self.output.extend(self.input.extend(plan, part)?, part)
    }
}

/// Adds a parameter of a module, if it has it.
fn param(plan: ShardingPlan, part: &Part, name: &str, axis: &str, placement: &Placement) -> ShardingPlan {
    match part.param(name) {
        Some(_) => plan.param_along(&join(part.path(), name), axis, placement),
        None => plan,
    }
}

fn unknown(part: &Part, style: &str) -> Error {
    ErrorKind::Plan.error(
        "parallel style",
        format!("{style} for `{}`, a {}", part.path(), part.kind()),
        "Linear, Conv1d, Conv2d, Embedding or EmbeddingBag",
        "apply the style to the layers inside it, or write a sharding plan",
    )
}
