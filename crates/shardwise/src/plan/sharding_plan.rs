//! A plan: where parameters lie, what stands in for modules, and how inputs and outputs of modules are to lie.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::pattern::{is_exact, matches};
use super::places::Places;
use super::shard_module;
use super::sharder::Sharder;
use crate::comm::DeviceMesh;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::nn::{Builder, Module};
use crate::placement::Placement;

/// What becomes of a parameter, or of a module with all its parameters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParamPlan {
    /// A parameter or buffer lies so.
    Placements(Places),
    /// A module is replaced. Code cannot be stored: serializing it is an error.
    #[serde(skip)]
    Sharder(Arc<dyn Sharder>),
}

impl PartialEq for ParamPlan {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (ParamPlan::Placements(a), ParamPlan::Placements(b)) => a == b,
            (ParamPlan::Sharder(a), ParamPlan::Sharder(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl fmt::Display for ParamPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParamPlan::Placements(places) => places.fmt(f),
            ParamPlan::Sharder(sharder) => write!(f, "{sharder:?}"),
        }
    }
}

/// How a module is spread over a mesh, apart from the module. Keys are dotted paths, in which `*` stands for one component
/// or a part of it and `**` for any number of them. An exact path counts before patterns.
///
/// A plan is a value: it prints as a table, is stored as text, and is the same on every rank.
///
/// ```
/// use shardwise::nn::{Activation, Builder, Forward, Mlp, Module};
/// use shardwise::plan::{ShardingPlan, shard_module};
/// use shardwise::prelude::*;
///
/// launch(4, |world| {
///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
///     let plan = ShardingPlan::new()
///         .param("up.*", [("tp", Shard(0))])
///         .param("down.weight", [("tp", Shard(1))])
///         .output("", [("tp", Replicate)]);
///     // built in pieces from the start; a module that exists is spread by shard_module
///     let mlp = plan.build(&mesh, |at| Mlp::new(at, 8, 16, Activation::Gelu))?;
///     assert_eq!(mlp.up.weight.get().to_local().dims(), [8, 8]);
///     let y = mlp.forward(&DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?)?;
///     assert_eq!(y.placements(), [Shard(0), Replicate]);
///     let whole = Mlp::new(&Builder::new(&mesh), 8, 16, Activation::Gelu)?;
///     shard_module(&whole, &mesh, &plan)?;
///     assert_eq!(whole.down.weight.layout(), mlp.down.weight.layout());
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardingPlan {
    pub(super) params: Vec<(String, ParamPlan)>,
    pub(super) inputs: Vec<(String, Places)>,
    pub(super) outputs: Vec<(String, Places)>,
    pub(super) locals: Vec<String>,
}

impl ShardingPlan {
    /// A plan that changes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Parameters and buffers at these paths lie so.
    pub fn param(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        self.params.push((pattern.to_string(), ParamPlan::Placements(places.into())));
        self
    }

    /// Modules at these paths are replaced.
    pub fn sharder(mut self, pattern: &str, sharder: impl Sharder + 'static) -> Self {
        self.params.push((pattern.to_string(), ParamPlan::Sharder(Arc::new(sharder))));
        self
    }

    /// Inputs of modules at these paths are brought there.
    pub fn input(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        self.inputs.push((pattern.to_string(), places.into()));
        self
    }

    /// Outputs of modules at these paths are brought there.
    pub fn output(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        self.outputs.push((pattern.to_string(), places.into()));
        self
    }

    /// Modules at these paths return what this rank holds of their output. See
    /// [`collect_local_shard`](super::collect_local_shard).
    #[doc(alias = "return_local_tensor")]
    pub fn return_local(mut self, pattern: &str) -> Self {
        self.locals.push(pattern.to_string());
        self
    }

    /// Adds a placement along one axis to what the plan says of one input.
    pub(super) fn input_along(mut self, path: &str, axis: &str, placement: &Placement) -> Self {
        add_along(&mut self.inputs, path, axis, placement);
        self
    }

    /// Adds a placement along one axis to what the plan says of one output.
    pub(super) fn output_along(mut self, path: &str, axis: &str, placement: &Placement) -> Self {
        add_along(&mut self.outputs, path, axis, placement);
        self
    }

    /// Adds a placement along one axis to what the plan says of one parameter, in addition to and not in place of others.
    pub(super) fn param_along(mut self, path: &str, axis: &str, placement: &Placement) -> Self {
        let mut own = Vec::new();
        self.params.retain(|(pattern, plan)| match plan {
            ParamPlan::Placements(places) if pattern == path => {
                own.push((pattern.clone(), places.clone()));
                false
            }
            _ => true,
        });
        add_along(&mut own, path, axis, placement);
        self.params.extend(own.into_iter().map(|(path, places)| (path, ParamPlan::Placements(places))));
        self
    }

    /// Adds placements along more axes to what the plan says of one parameter. They cut after what is there.
    pub fn along(mut self, path: &str, mesh: &Mesh, more: &[(String, Placement)]) -> Result<Self> {
        let so_far = match self.of_param(path)? {
            Some(ParamPlan::Placements(places)) => places.clone(),
            _ => Places::Along(Vec::new()),
        };
        let places = ParamPlan::Placements(so_far.and(mesh, more)?);
        self.params.retain(|(pattern, _)| pattern != path);
        self.params.push((path.to_string(), places));
        Ok(self)
    }

    /// What the plan says of the parameter or module at a path.
    pub fn of_param(&self, path: &str) -> Result<Option<&ParamPlan>> {
        one_of(&self.params, path)
    }

    /// The layout that the plan gives a parameter which lies so now.
    pub fn layout_of(&self, path: &str, now: &Layout) -> Result<Layout> {
        match self.of_param(path)? {
            Some(ParamPlan::Placements(places)) => places.layout(now).map_err(|e| at(e, path)),
            _ => Ok(now.clone()),
        }
    }

    /// Makes parameters where the plan says, so that no rank ever holds more of them. Give the finished model to
    /// [`shard_module`] for the rest of the plan; [`build`](Self::build) does both.
    pub fn builder(&self, mesh: &DeviceMesh) -> Builder {
        let (plan, ranks) = (self.clone(), mesh.mesh().clone());
        Builder::new(mesh).laid_out(move |path, shape| plan.layout_of(path, &Layout::replicated(&ranks, shape)?))
    }

    /// A module built by the plan, with its hooks and replacements.
    pub fn build<M: Module>(&self, mesh: &DeviceMesh, make: impl FnOnce(&Builder) -> Result<M>) -> Result<M> {
        let module = make(&self.builder(mesh))?;
        shard_module(&module, mesh, self)?;
        Ok(module)
    }
}

/// The entry for a path: an exact one, or what all patterns that fit agree on.
pub(super) fn one_of<'a, T: PartialEq + fmt::Display>(entries: &'a [(String, T)], path: &str) -> Result<Option<&'a T>> {
    let fitting = entries.iter().filter(|(pattern, _)| matches(pattern, path));
    let (exact, patterns): (Vec<_>, Vec<_>) = fitting.partition(|(pattern, _)| is_exact(pattern));
    let counting = if exact.is_empty() { patterns } else { exact };
    let Some((first, value)) = counting.first() else { return Ok(None) };
    match counting.iter().find(|(_, other)| other != value) {
        None => Ok(Some(value)),
        Some((second, other)) => Err(Error::invalid(
            "sharding plan",
            format!("`{first}` ({value}) and `{second}` ({other}), which both fit `{path}`"),
            "one entry for every path",
            format!("make the patterns disjoint, or add an entry for `{path}` itself"),
        )),
    }
}

/// Adds a placement along one axis to what a plan says of a path. Two that contradict each other become two entries, which
/// [`one_of`] refuses.
fn add_along(entries: &mut Vec<(String, Places)>, path: &str, axis: &str, placement: &Placement) {
    let entry = entries.iter_mut().find(|(own, _)| own == path);
    match entry {
        Some((_, Places::Along(along))) if along.iter().all(|(other, _)| other != axis) => {
            along.push((axis.to_string(), placement.clone()));
        }
        Some((_, Places::Along(along))) if along.iter().any(|(a, p)| a == axis && p == placement) => {}
        _ => entries.push((path.to_string(), Places::one(axis, placement))),
    }
}

/// The same error, with the path that it is about.
pub(super) fn at(error: Error, path: &str) -> Error {
    let Error::Invalid(mut invalid) = error else { return error };
    invalid.found = format!("{} (in the sharding plan for `{path}`)", invalid.found);
    Error::Invalid(invalid)
}

impl fmt::Display for ShardingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let params = self.params.iter().map(|(path, plan)| ("parameters", path, plan.to_string()));
        let inputs = self.inputs.iter().map(|(path, places)| ("input", path, places.to_string()));
        let outputs = self.outputs.iter().map(|(path, places)| ("output", path, places.to_string()));
        let locals = self.locals.iter().map(|path| ("output", path, "local part".to_string()));
        for (what, path, text) in params.chain(inputs).chain(outputs).chain(locals) {
            writeln!(f, "{what:<10}  {:<28}  {text}", format!("`{path}`"))?;
        }
        Ok(())
    }
}
