//! Sharding plans: layouts of parameters, inputs and outputs, and replacements of modules, by path.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::pattern::{check, is_exact, matches};
use super::sharder::Sharder;
use super::target_placements::TargetPlacements;
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, MergedShape};
use crate::mesh::Mesh;
use crate::nn::Builder;
use crate::placement::Placement;

/// What a plan does with a parameter, or with a module.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParamPlan {
    /// Redistributes a parameter or buffer.
    Placements(TargetPlacements),
    /// Replaces a module. Code cannot be stored: serializing such a plan is an error.
    #[serde(skip)]
    Sharder(Arc<dyn Sharder>),
}

impl ParamPlan {
    /// Whether nothing changes; the entries of [`ShardingPlan::remove`].
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, ParamPlan::Placements(places) if places.is_empty())
    }
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

/// How a model is sharded over a mesh, specified separately from the model.
///
/// A plan maps dotted paths, or patterns of them, to the placements of parameters ([`param`](Self::param)), of inputs and
/// outputs of modules ([`input`](Self::input), [`output`](Self::output)) and to replacements of modules
/// ([`sharder`](Self::sharder)). In patterns, `*` matches one component or a part of it, `**` any number of components, `?` one
/// character, `[qkv]` and `[0-3]` one character of a set, `{up,gate}` either text.
///
/// An exact path takes precedence over patterns, and an entry of [`replace`](Self::replace) over other patterns. What a plan
/// does not name does not change. An entry that matches nothing, or never takes effect, is an error where the plan is applied.
///
/// A plan is a value: it prints as a table, can be serialized, and is the same on every rank. [`build`](Self::build) builds a
/// model by it, [`shard_module`](super::shard_module) applies it to an existing one.
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
///     // no rank ever holds the full model
///     let mlp = plan.build(&mesh, |builder| Mlp::new(builder, 8, 16, Activation::Gelu))?;
///     assert_eq!(mlp.up.weight.get().local_shape(), [8, 8]);
///     let y = mlp.forward(&DTensor::ones((4, 8), DType::F32, &mesh, [Shard(0), Replicate])?)?;
///     assert_eq!(y.placements(), [Shard(0), Replicate]);
///     // an existing model is redistributed
///     let replicated = Mlp::new(&Builder::new(&mesh), 8, 16, Activation::Gelu)?;
///     shard_module(&replicated, &mesh, &plan)?;
///     assert_eq!(replicated.down.weight.layout(), mlp.down.weight.layout());
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ShardingPlan {
    pub(super) params: Vec<(String, ParamPlan)>,
    pub(super) inputs: Vec<(String, TargetPlacements)>,
    pub(super) outputs: Vec<(String, TargetPlacements)>,
    /// Modules that return the local shard of their output.
    pub(super) locals: Vec<String>,
    /// Patterns that take precedence over other patterns; of several the last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) replacing: Vec<(EntryKind, String)>,
    /// Patterns whose placements went into entries for single parameters, by [`add_placements`](Self::add_placements).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) absorbed: Vec<String>,
    /// Parameters that are stored with their leading dimensions merged, and how many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) merged: Vec<(String, usize)>,
    /// Inputs and outputs of modules that have several.
    #[serde(default, rename = "numbered", skip_serializing_if = "Vec::is_empty")]
    pub(super) positional: Vec<PositionalEntry>,
    /// Placements in which inputs of modules arrive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) expected: Vec<(String, TargetPlacements)>,
}

/// Placements of one of several inputs or outputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PositionalEntry {
    #[serde(rename = "aspect")]
    pub(super) kind: EntryKind,
    pub(super) index: usize,
    pub(super) pattern: String,
    #[serde(rename = "places")]
    pub(super) target: TargetPlacements,
}

/// What an entry of a plan places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum EntryKind {
    Param,
    Input,
    Output,
}

impl ShardingPlan {
    /// An empty plan, which changes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the placements of the parameters and buffers that match a pattern.
    #[doc(alias = "plan")]
    pub fn param(self, pattern: &str, target: impl Into<TargetPlacements>) -> Self {
        self.entry(pattern, ParamPlan::Placements(target.into()))
    }

    /// Replaces the modules that match a pattern.
    pub fn sharder(self, pattern: &str, sharder: impl Sharder + 'static) -> Self {
        self.entry(pattern, ParamPlan::Sharder(Arc::new(sharder)))
    }

    fn entry(mut self, pattern: &str, plan: ParamPlan) -> Self {
        self.params.retain(|(key, plan)| key != pattern || !plan.is_empty());
        // This entry must take effect itself; that an earlier one of the same pattern was absorbed does not count.
        self.absorbed.retain(|key| key != pattern);
        self.params.push((pattern.to_string(), plan));
        self
    }

    /// Redistributes the inputs of the modules that match a pattern.
    pub fn input(mut self, pattern: &str, target: impl Into<TargetPlacements>) -> Self {
        self.inputs.retain(|(key, places)| key != pattern || !places.is_empty());
        self.inputs.push((pattern.to_string(), target.into()));
        self
    }

    /// Requires that the inputs of the modules that match a pattern arrive in these placements: a forward pass with another is an
    /// error on every rank. They are compared before [`input`](Self::input) redistributes; several entries for one module all count.
    #[doc(alias = "input_layouts")]
    pub fn expect_input(mut self, pattern: &str, placements: impl Into<TargetPlacements>) -> Self {
        self.expected.push((pattern.to_string(), placements.into()));
        self
    }

    /// Redistributes input `index`, from 0, of modules with several inputs.
    ///
    /// Several such entries for one input are applied one after the other.
    pub fn input_at(self, pattern: &str, index: usize, target: impl Into<TargetPlacements>) -> Self {
        self.positional(EntryKind::Input, pattern, index, target.into())
    }

    /// As [`input_at`](Self::input_at), for output `index`.
    pub fn output_at(self, pattern: &str, index: usize, target: impl Into<TargetPlacements>) -> Self {
        self.positional(EntryKind::Output, pattern, index, target.into())
    }

    fn positional(mut self, kind: EntryKind, pattern: &str, index: usize, target: TargetPlacements) -> Self {
        self.positional.push(PositionalEntry { kind, index, pattern: pattern.to_string(), target });
        self
    }

    /// Redistributes the outputs of the modules that match a pattern.
    #[doc(alias = "output_plan")]
    pub fn output(mut self, pattern: &str, target: impl Into<TargetPlacements>) -> Self {
        self.outputs.retain(|(key, places)| key != pattern || !places.is_empty());
        self.outputs.push((pattern.to_string(), target.into()));
        self
    }

    /// Overrides the placements of the parameters and buffers that match a pattern: entries for exact paths that match are
    /// removed, and the new entry takes precedence over other patterns.
    ///
    /// ```
    /// use shardwise::nn::{Activation, Builder, Mlp};
    /// use shardwise::plan::{ShardingPlanner, TensorParallel, shard_module};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let mlp = Mlp::new(&Builder::new(&mesh), 8, 16, Activation::Gelu)?;
    ///     let plan = TensorParallel::new("tp").plan(&mlp, &mesh)?.replace("{up,down}.weight", [Replicate]);
    ///     shard_module(&mlp, &mesh, &plan)?;
    ///     assert_eq!(mlp.up.weight.get().placements(), [Replicate]);
    ///     assert_eq!(mlp.up.bias.as_ref().unwrap().get().placements(), [Shard(0)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn replace(mut self, pattern: &str, target: impl Into<TargetPlacements>) -> Self {
        displace(&mut self.params, pattern);
        self.takes_precedence(EntryKind::Param, pattern);
        self.entry(pattern, ParamPlan::Placements(target.into()))
    }

    /// As [`replace`](Self::replace), for inputs of modules.
    pub fn replace_input(mut self, pattern: &str, target: impl Into<TargetPlacements>) -> Self {
        displace(&mut self.inputs, pattern);
        self.takes_precedence(EntryKind::Input, pattern);
        self.input(pattern, target)
    }

    /// As [`replace`](Self::replace), for outputs of modules.
    pub fn replace_output(mut self, pattern: &str, target: impl Into<TargetPlacements>) -> Self {
        displace(&mut self.outputs, pattern);
        self.takes_precedence(EntryKind::Output, pattern);
        self.output(pattern, target)
    }

    /// Removes everything that the plan has for the parameters and modules that match a pattern, also from entries whose
    /// pattern matches more. Entries that are added later take effect.
    pub fn remove(mut self, pattern: &str) -> Self {
        displace(&mut self.params, pattern);
        displace(&mut self.inputs, pattern);
        displace(&mut self.outputs, pattern);
        self.locals.retain(|key| key != pattern && !matches(pattern, key));
        displace(&mut self.expected, pattern);
        let nothing = || TargetPlacements::Along(Vec::new());
        // An entry for parameters is added in any case, so that a pattern that matches nothing is an error.
        self.takes_precedence(EntryKind::Param, pattern);
        self = self.entry(pattern, ParamPlan::Placements(nothing()));
        if self.inputs.iter().any(|(key, _)| !is_exact(key)) {
            self.takes_precedence(EntryKind::Input, pattern);
            self.inputs.push((pattern.to_string(), nothing()));
        }
        if self.outputs.iter().any(|(key, _)| !is_exact(key)) {
            self.takes_precedence(EntryKind::Output, pattern);
            self.outputs.push((pattern.to_string(), nothing()));
        }
        self
    }

    fn takes_precedence(&mut self, kind: EntryKind, pattern: &str) {
        self.replacing.retain(|(own, key)| *own != kind || key != pattern);
        self.replacing.push((kind, pattern.to_string()));
    }

    /// Makes the modules that match a pattern return this rank's local shard of their output
    /// ([`collect_local_shard`](super::collect_local_shard)).
    #[doc(alias = "return_local_tensor")]
    pub fn return_local(mut self, pattern: &str) -> Self {
        self.locals.push(pattern.to_string());
        self
    }

    /// Stores the parameters that match a pattern with their first `dims` dimensions merged into one
    /// ([`Param::merge_dims`](crate::Param::merge_dims)). Placements of the plan are those of the merged parameter: `Shard(0)` shards
    /// all rows of `[experts, rows, columns]` evenly, across the borders of experts.
    pub fn merge_dims(mut self, pattern: &str, dims: usize) -> Self {
        self.merged.retain(|(key, _)| key != pattern);
        self.merged.push((pattern.to_string(), dims));
        self
    }

    /// The same plan without merged dimensions.
    pub(crate) fn without_merged(&self) -> Self {
        ShardingPlan { merged: Vec::new(), ..self.clone() }
    }

    /// How many leading dimensions of the parameter at a path are merged; the last pattern that matches counts.
    pub(super) fn merged_dims(&self, path: &str) -> Option<usize> {
        self.merged.iter().rev().find(|(pattern, _)| matches(pattern, path)).map(|(_, dims)| *dims)
    }

    /// Adds a placement over one axis to the entry for one input.
    pub(super) fn input_along(mut self, path: &str, axis: &str, placement: &Placement) -> Self {
        add_along(&mut self.inputs, path, axis, placement);
        self
    }

    /// Adds a placement over one axis to the entry for one output.
    pub(super) fn output_along(mut self, path: &str, axis: &str, placement: &Placement) -> Self {
        add_along(&mut self.outputs, path, axis, placement);
        self
    }

    /// Adds a placement over one axis to the entry for one parameter.
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

    /// Adds placements over more mesh axes to the placements that the plan has for one parameter. They shard after the ones that are
    /// there. For planners.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the mesh has no such axis, patterns contradict each other, or the parameter has a sharding spec.
    pub fn add_placements(mut self, path: &str, mesh: &Mesh, more: &[(String, Placement)]) -> Result<Self> {
        let so_far = match self.param_plan(path)? {
            Some(ParamPlan::Placements(places)) => places.clone(),
            _ => TargetPlacements::Along(Vec::new()),
        };
        let effective: Vec<&str> =
            self.effective_entries(EntryKind::Param, &self.params, path).into_iter().map(|(k, _)| k).collect();
        let patterns: Vec<String> = effective.into_iter().filter(|key| !is_exact(key)).map(String::from).collect();
        self.absorbed.extend(patterns);
        self.absorbed.sort_unstable();
        self.absorbed.dedup();
        let places = ParamPlan::Placements(so_far.and(mesh, more)?);
        self.params.retain(|(pattern, _)| pattern != path);
        self.params.push((path.to_string(), places));
        Ok(self)
    }

    /// Returns what the plan does with the parameter or module at a path.
    ///
    /// # Errors
    /// [`Error::Invalid`] if several patterns match and disagree.
    pub fn param_plan(&self, path: &str) -> Result<Option<&ParamPlan>> {
        self.entry_for(EntryKind::Param, &self.params, path)
    }

    /// The entries that take effect for a path: exact ones, else the last with precedence, else all patterns that match.
    pub(super) fn effective_entries<'a, T>(
        &self,
        kind: EntryKind,
        entries: &'a [(String, T)],
        path: &str,
    ) -> Vec<(&'a str, &'a T)> {
        let fitting = entries.iter().filter(|(pattern, _)| matches(pattern, path)).map(|(key, value)| (&**key, value));
        let (exact, patterns): (Vec<_>, Vec<_>) = fitting.partition(|(pattern, _)| is_exact(pattern));
        if !exact.is_empty() || self.replacing.is_empty() {
            return if exact.is_empty() { patterns } else { exact };
        }
        let place = |pattern: &str| self.replacing.iter().position(|(own, key)| *own == kind && key == pattern);
        let last = patterns.iter().filter(|(key, _)| place(key).is_some()).max_by_key(|(key, _)| place(key)).copied();
        last.map_or(patterns, |last| vec![last])
    }

    /// The entry for a path; an error if several take effect and disagree.
    pub(super) fn entry_for<'a, T: PartialEq + fmt::Display>(
        &self,
        kind: EntryKind,
        entries: &'a [(String, T)],
        path: &str,
    ) -> Result<Option<&'a T>> {
        let effective = self.effective_entries(kind, entries, path);
        let Some((first, value)) = effective.first() else { return Ok(None) };
        match effective.iter().find(|(_, other)| other != value) {
            None => Ok(Some(value)),
            Some((second, other)) => Err(ErrorKind::Plan.error(
                "sharding plan",
                format!("`{first}` ({value}) and `{second}` ({other}), which both fit `{path}`"),
                "one entry for every path",
                format!("make the patterns disjoint, or add an entry for `{path}` itself"),
            )),
        }
    }

    /// Checks that all patterns are well-formed.
    pub(super) fn check_patterns(&self) -> Result<()> {
        let keys = self.params.iter().map(|(key, _)| key);
        let hooked = self.inputs.iter().chain(&self.outputs).chain(&self.expected).map(|(key, _)| key);
        let positional = self.positional.iter().map(|entry| &entry.pattern);
        let merged = self.merged.iter().map(|(key, _)| key);
        keys.chain(hooked).chain(&self.locals).chain(positional).chain(merged).try_for_each(|key| check(key))
    }

    /// Checks that every entry that matches some of these paths takes effect for one of them.
    pub(super) fn check_effective<'a, T: fmt::Display + 'a>(
        &self,
        kind: EntryKind,
        entries: &[(String, T)],
        what: &str,
        paths: &[&String],
        own: impl Fn(&T) -> bool,
    ) -> Result<()> {
        for (pattern, value) in entries.iter().filter(|(_, value)| own(value)) {
            // A pattern that was absorbed into entries for single parameters took effect there.
            if is_exact(pattern) || kind == EntryKind::Param && self.absorbed.contains(pattern) {
                continue;
            }
            let fitting: Vec<&&String> = paths.iter().filter(|path| matches(pattern, path)).collect();
            let takes_effect =
                |path: &str| self.effective_entries(kind, entries, path).iter().any(|(key, _)| key == pattern);
            if !fitting.is_empty() && !fitting.iter().any(|path| takes_effect(path)) {
                let first = self.effective_entries(kind, entries, fitting[0])[0].0;
                let found = format!(
                    "`{pattern}` ({value}), which fits {} {what}(s) but counts for none of them: for `{}`, `{first}` counts \
                     before it",
                    fitting.len(),
                    fitting[0],
                );
                return Err(ErrorKind::Plan.error(
                    "sharding plan",
                    found,
                    "entries that apply to something",
                    format!("call replace(\"{pattern}\", ...) to override the plan, or leave it out"),
                ));
            }
        }
        Ok(())
    }

    /// Returns the layout that the plan gives a parameter whose layout is `now`; that of the merged parameter if the plan merges
    /// dimensions.
    pub fn layout_of(&self, path: &str, now: &Layout) -> Result<Layout> {
        let Some(dims) = self.merged_dims(path) else { return self.stored_layout_of(path, now) };
        let merged = MergedShape::new(now.shape(), dims).and_then(|merged| merged.stored_layout(now));
        self.stored_layout_of(path, &merged.map_err(|e| with_path(e, path))?)
    }

    /// The layout that the plan gives a parameter whose dimensions are merged already if the plan merges them.
    pub(super) fn stored_layout_of(&self, path: &str, now: &Layout) -> Result<Layout> {
        match self.param_plan(path)? {
            Some(ParamPlan::Placements(places)) => places.layout(now).map_err(|e| with_path(e, path)),
            _ => Ok(now.clone()),
        }
    }

    /// Returns a builder that creates parameters in the layouts of the plan, so that no rank ever holds the full model.
    ///
    /// Pass the finished model to [`shard_module`](super::shard_module) for the rest of the plan; [`build`](Self::build) does
    /// both.
    pub fn builder(&self, mesh: &DeviceMesh) -> Builder {
        let (plan, ranks) = (self.clone(), mesh.mesh().clone());
        Builder::new(mesh).laid_out(move |path, shape| plan.layout_of(path, &Layout::replicated(&ranks, shape)?))
    }
}

/// Removes the entries of a pattern, and those for exact paths that match it.
fn displace<T>(entries: &mut Vec<(String, T)>, pattern: &str) {
    entries.retain(|(key, _)| key != pattern && !(is_exact(key) && matches(pattern, key)));
}

/// Adds a placement over one axis to the entry for a path. Two that contradict each other become two entries, which
/// [`ShardingPlan::entry_for`] refuses.
fn add_along(entries: &mut Vec<(String, TargetPlacements)>, path: &str, axis: &str, placement: &Placement) {
    let entry = entries.iter_mut().find(|(own, _)| own == path);
    match entry {
        Some((_, TargetPlacements::Along(along))) if along.iter().all(|(other, _)| other != axis) => {
            along.push((axis.to_string(), placement.clone()));
        }
        Some((_, TargetPlacements::Along(along))) if along.iter().any(|(a, p)| a == axis && p == placement) => {}
        _ => entries.push((path.to_string(), TargetPlacements::one(axis, placement))),
    }
}

/// Adds the path that an error is about.
pub(super) fn with_path(error: Error, path: &str) -> Error {
    let Error::Invalid(mut invalid) = error else { return error };
    invalid.found = format!("{} (in the sharding plan for `{path}`)", invalid.found);
    Error::Invalid(invalid)
}

impl fmt::Display for ShardingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let params = self.params.iter().map(|(path, plan)| ("parameters", path, plan.to_string()));
        let inputs = self.inputs.iter().map(|(path, places)| ("input", path, places.to_string()));
        let outputs = self.outputs.iter().map(|(path, places)| ("output", path, places.to_string()));
        let locals = self.locals.iter().map(|path| ("output", path, "local shard".to_string()));
        let expected = self.expected.iter().map(|(path, places)| ("arrives", path, places.to_string()));
        for (what, path, text) in params.chain(expected).chain(inputs).chain(outputs).chain(locals) {
            let text = if text.is_empty() { "unchanged" } else { text.as_str() };
            writeln!(f, "{what:<10}  {:<28}  {text}", format!("`{path}`"))?;
        }
        for PositionalEntry { kind, index, pattern, target } in &self.positional {
            let what = format!("{kind:?} {index}").to_lowercase();
            writeln!(f, "{what:<10}  {:<28}  {target}", format!("`{pattern}`"))?;
        }
        for (pattern, dims) in &self.merged {
            writeln!(f, "{:<10}  {:<28}  first {dims} dimensions as one", "merged", format!("`{pattern}`"))?;
        }
        for (kind, pattern) in &self.replacing {
            let what = format!("{kind:?}").to_lowercase();
            writeln!(f, "{:<10}  {:<28}  over other patterns for {what}s", "precedence", format!("`{pattern}`"))?;
        }
        Ok(())
    }
}
