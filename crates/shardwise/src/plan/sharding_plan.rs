//! A plan: where parameters lie, what stands in for modules, and how inputs and outputs of modules are to lie.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::pattern::{check, is_exact, matches};
use super::places::Places;
use super::sharder::Sharder;
use crate::comm::DeviceMesh;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::nn::Builder;
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

impl ParamPlan {
    /// Whether everything stays as it is, as [`ShardingPlan::remove`] wants it.
    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, ParamPlan::Placements(places) if places.is_nothing())
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

/// How a module is spread over a mesh, apart from the module. Keys are dotted paths or patterns of them: `*` stands for one
/// component or a part of it, `**` for any number of components, `?` for one letter, `[qkv]` and `[0-3]` for one letter of
/// a set, `{up,gate}` for either text. An exact path counts before patterns, and an entry of [`replace`](Self::replace)
/// before other patterns. An entry that fits nothing, or that never counts, is an error where the plan is used.
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
    /// Patterns whose entries count before other patterns; of several the last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) replacing: Vec<(Aspect, String)>,
    /// Patterns whose placements went into entries for single parameters, by [`along`](Self::along).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) absorbed: Vec<String>,
    /// Inputs and outputs by number, of modules that have several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) numbered: Vec<Numbered>,
}

/// An input or output by number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Numbered {
    pub(super) aspect: Aspect,
    pub(super) index: usize,
    pub(super) pattern: String,
    pub(super) places: Places,
}

/// What an entry of a plan is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Aspect {
    Param,
    Input,
    Output,
}

impl ShardingPlan {
    /// A plan that changes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Parameters and buffers at these paths lie so.
    #[doc(alias = "plan")]
    pub fn param(self, pattern: &str, places: impl Into<Places>) -> Self {
        self.entry(pattern, ParamPlan::Placements(places.into()))
    }

    /// Modules at these paths are replaced.
    pub fn sharder(self, pattern: &str, sharder: impl Sharder + 'static) -> Self {
        self.entry(pattern, ParamPlan::Sharder(Arc::new(sharder)))
    }

    fn entry(mut self, pattern: &str, plan: ParamPlan) -> Self {
        self.params.retain(|(key, plan)| key != pattern || !plan.is_nothing());
        // What an earlier entry of this pattern gave to others does not make this one count.
        self.absorbed.retain(|key| key != pattern);
        self.params.push((pattern.to_string(), plan));
        self
    }

    /// Inputs of modules at these paths are brought there.
    pub fn input(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        self.inputs.retain(|(key, places)| key != pattern || !places.is_nothing());
        self.inputs.push((pattern.to_string(), places.into()));
        self
    }

    /// Input number `index`, from 0, of modules with several inputs at these paths is brought there. Such entries add up, in the
    /// order in which they were added.
    pub fn input_at(self, pattern: &str, index: usize, places: impl Into<Places>) -> Self {
        self.number(Aspect::Input, pattern, index, places.into())
    }

    /// As [`input_at`](Self::input_at), for output number `index`.
    pub fn output_at(self, pattern: &str, index: usize, places: impl Into<Places>) -> Self {
        self.number(Aspect::Output, pattern, index, places.into())
    }

    fn number(mut self, aspect: Aspect, pattern: &str, index: usize, places: Places) -> Self {
        self.numbered.push(Numbered { aspect, index, pattern: pattern.to_string(), places });
        self
    }

    /// Outputs of modules at these paths are brought there.
    #[doc(alias = "output_plan")]
    pub fn output(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        self.outputs.retain(|(key, places)| key != pattern || !places.is_nothing());
        self.outputs.push((pattern.to_string(), places.into()));
        self
    }

    /// Places parameters and buffers at these paths so, whatever the plan said of them before: entries for single paths that
    /// fit are taken out, and the new one counts before patterns.
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
    pub fn replace(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        displace(&mut self.params, pattern);
        self.counts_first(Aspect::Param, pattern);
        self.entry(pattern, ParamPlan::Placements(places.into()))
    }

    /// As [`replace`](Self::replace), for inputs of modules.
    pub fn replace_input(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        displace(&mut self.inputs, pattern);
        self.counts_first(Aspect::Input, pattern);
        self.input(pattern, places)
    }

    /// As [`replace`](Self::replace), for outputs of modules.
    pub fn replace_output(mut self, pattern: &str, places: impl Into<Places>) -> Self {
        displace(&mut self.outputs, pattern);
        self.counts_first(Aspect::Output, pattern);
        self.output(pattern, places)
    }

    /// Takes out everything that the plan says of parameters and modules at these paths: they stay as they are, also
    /// where a pattern for more paths fits them. What is added later counts.
    pub fn remove(mut self, pattern: &str) -> Self {
        displace(&mut self.params, pattern);
        displace(&mut self.inputs, pattern);
        displace(&mut self.outputs, pattern);
        self.locals.retain(|key| key != pattern && !matches(pattern, key));
        let nothing = || Places::Along(Vec::new());
        // Parameters always, so that a pattern that fits nothing is noticed.
        self.counts_first(Aspect::Param, pattern);
        self = self.entry(pattern, ParamPlan::Placements(nothing()));
        if self.inputs.iter().any(|(key, _)| !is_exact(key)) {
            self.counts_first(Aspect::Input, pattern);
            self.inputs.push((pattern.to_string(), nothing()));
        }
        if self.outputs.iter().any(|(key, _)| !is_exact(key)) {
            self.counts_first(Aspect::Output, pattern);
            self.outputs.push((pattern.to_string(), nothing()));
        }
        self
    }

    fn counts_first(&mut self, aspect: Aspect, pattern: &str) {
        self.replacing.retain(|(own, key)| *own != aspect || key != pattern);
        self.replacing.push((aspect, pattern.to_string()));
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
        let counting: Vec<&str> =
            self.counting(Aspect::Param, &self.params, path).into_iter().map(|(k, _)| k).collect();
        let patterns: Vec<String> = counting.into_iter().filter(|key| !is_exact(key)).map(String::from).collect();
        self.absorbed.extend(patterns);
        self.absorbed.sort_unstable();
        self.absorbed.dedup();
        let places = ParamPlan::Placements(so_far.and(mesh, more)?);
        self.params.retain(|(pattern, _)| pattern != path);
        self.params.push((path.to_string(), places));
        Ok(self)
    }

    /// What the plan says of the parameter or module at a path.
    pub fn of_param(&self, path: &str) -> Result<Option<&ParamPlan>> {
        self.one_of(Aspect::Param, &self.params, path)
    }

    /// The entries that count for a path: exact ones, else the last that replaces others, else all patterns that fit.
    pub(super) fn counting<'a, T>(
        &self,
        aspect: Aspect,
        entries: &'a [(String, T)],
        path: &str,
    ) -> Vec<(&'a str, &'a T)> {
        let fitting = entries.iter().filter(|(pattern, _)| matches(pattern, path)).map(|(key, value)| (&**key, value));
        let (exact, patterns): (Vec<_>, Vec<_>) = fitting.partition(|(pattern, _)| is_exact(pattern));
        if !exact.is_empty() || self.replacing.is_empty() {
            return if exact.is_empty() { patterns } else { exact };
        }
        let place = |pattern: &str| self.replacing.iter().position(|(own, key)| *own == aspect && key == pattern);
        let last = patterns.iter().filter(|(key, _)| place(key).is_some()).max_by_key(|(key, _)| place(key)).copied();
        last.map_or(patterns, |last| vec![last])
    }

    /// The entry for a path, on which all that count agree.
    pub(super) fn one_of<'a, T: PartialEq + fmt::Display>(
        &self,
        aspect: Aspect,
        entries: &'a [(String, T)],
        path: &str,
    ) -> Result<Option<&'a T>> {
        let counting = self.counting(aspect, entries, path);
        let Some((first, value)) = counting.first() else { return Ok(None) };
        match counting.iter().find(|(_, other)| other != value) {
            None => Ok(Some(value)),
            Some((second, other)) => Err(ErrorKind::Plan.error(
                "sharding plan",
                format!("`{first}` ({value}) and `{second}` ({other}), which both fit `{path}`"),
                "one entry for every path",
                format!("make the patterns disjoint, or add an entry for `{path}` itself"),
            )),
        }
    }

    /// An error for a pattern that cannot be read.
    pub(super) fn check_patterns(&self) -> Result<()> {
        let keys = self.params.iter().map(|(key, _)| key);
        let hooked = self.inputs.iter().chain(&self.outputs).map(|(key, _)| key);
        let numbered = self.numbered.iter().map(|entry| &entry.pattern);
        keys.chain(hooked).chain(&self.locals).chain(numbered).try_for_each(|key| check(key))
    }

    /// An error for an entry that fits some of these paths but counts for none of them.
    pub(super) fn check_counts<'a, T: fmt::Display + 'a>(
        &self,
        aspect: Aspect,
        entries: &[(String, T)],
        what: &str,
        paths: &[&String],
        own: impl Fn(&T) -> bool,
    ) -> Result<()> {
        for (pattern, value) in entries.iter().filter(|(_, value)| own(value)) {
            // One that went into entries for single parameters has counted.
            if is_exact(pattern) || aspect == Aspect::Param && self.absorbed.contains(pattern) {
                continue;
            }
            let fitting: Vec<&&String> = paths.iter().filter(|path| matches(pattern, path)).collect();
            let counts = |path: &str| self.counting(aspect, entries, path).iter().any(|(key, _)| key == pattern);
            if !fitting.is_empty() && !fitting.iter().any(|path| counts(path)) {
                let first = self.counting(aspect, entries, fitting[0])[0].0;
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
                    format!("call replace(\"{pattern}\", ...) to override what the plan says, or leave it out"),
                ));
            }
        }
        Ok(())
    }

    /// The layout that the plan gives a parameter which lies so now.
    pub fn layout_of(&self, path: &str, now: &Layout) -> Result<Layout> {
        match self.of_param(path)? {
            Some(ParamPlan::Placements(places)) => places.layout(now).map_err(|e| at(e, path)),
            _ => Ok(now.clone()),
        }
    }

    /// Makes parameters where the plan says, so that no rank ever holds more of them. Give the finished model to
    /// [`shard_module`](super::shard_module) for the rest of the plan; [`build`](Self::build) does both.
    pub fn builder(&self, mesh: &DeviceMesh) -> Builder {
        let (plan, ranks) = (self.clone(), mesh.mesh().clone());
        Builder::new(mesh).laid_out(move |path, shape| plan.layout_of(path, &Layout::replicated(&ranks, shape)?))
    }
}

/// Takes out the entries of a pattern, and those for single paths that fit it.
fn displace<T>(entries: &mut Vec<(String, T)>, pattern: &str) {
    entries.retain(|(key, _)| key != pattern && !(is_exact(key) && matches(pattern, key)));
}

/// Adds a placement along one axis to what a plan says of a path. Two that contradict each other become two entries, which
/// [`ShardingPlan::one_of`] refuses.
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
            let text = if text.is_empty() { "stays as it is" } else { text.as_str() };
            writeln!(f, "{what:<10}  {:<28}  {text}", format!("`{path}`"))?;
        }
        for Numbered { aspect, index, pattern, places } in &self.numbered {
            let what = format!("{aspect:?} {index}").to_lowercase();
            writeln!(f, "{what:<10}  {:<28}  {places}", format!("`{pattern}`"))?;
        }
        for (aspect, pattern) in &self.replacing {
            let what = format!("{aspect:?}").to_lowercase();
            writeln!(f, "{:<10}  {:<28}  before other patterns for {what}s", "counts", format!("`{pattern}`"))?;
        }
        Ok(())
    }
}
