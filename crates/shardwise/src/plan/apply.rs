//! Plans carried out: everything is worked out and checked first, then changed.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::local::collect_local_shard;
use super::pattern::{is_beneath, is_exact, matches, parent};
use super::places::Places;
use super::sharder::{Part, Sharder};
use super::sharding_plan::{Aspect, Numbered, ParamPlan, ShardingPlan, at};
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, nearest};
use crate::layout::Layout;
use crate::nn::{Buffer, Builder, Heads, Hooks, Item, Layer, Module, PlanHints};
use crate::param::Param;
use crate::tensor::DTensor;

impl ShardingPlan {
    /// A module built by the plan, with its hooks and replacements.
    ///
    /// # Errors
    /// If something in the plan does not fit the module, or the module has no parameter at a path for which one was built
    /// ([`Builder::check`]).
    pub fn build<M: Module>(&self, mesh: &DeviceMesh, make: impl FnOnce(&Builder) -> Result<M>) -> Result<M> {
        let builder = self.builder(mesh);
        let module = make(&builder)?;
        builder.check(&module)?;
        shard_module(&module, mesh, self)?;
        Ok(module)
    }
}

/// Spreads a module as a plan says: parameters and buffers are moved, modules replaced, inputs and outputs prepared.
///
/// If something in the plan does not fit the module or the mesh, nothing is changed. All ranks of the mesh must have the
/// same plan. Make optimizers afterwards: a replacement has parameters of its own.
#[track_caller]
pub fn shard_module(module: &dyn Module, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<()> {
    if mesh.contains(mesh.world().rank()) && mesh.size() > 1 {
        let mut hasher = DefaultHasher::new();
        plan.to_string().hash(&mut hasher);
        mesh.group_of(&(0..mesh.ndim()).collect::<Vec<_>>())?.agree("sharding plan", &[hasher.finish()])?;
    }
    let found = Found::new(module);
    let moves = found.moves(plan, mesh)?;
    let hooked = found.hooked(plan, mesh)?;
    let numbered = found.numbered(plan, mesh)?;
    let mut layers: Vec<(&Hooks, Arc<dyn Layer>)> = Vec::new();
    for (path, sharder) in found.replaced(plan)? {
        let layer = sharder.shard(&found.part(&path, mesh)).map_err(|e| at(e, &path))?;
        layers.push((found.hooks_of(&path)?, layer));
    }
    for (slot, layout) in moves {
        slot.move_to(&layout)?;
    }
    layers.into_iter().for_each(|(hooks, layer)| hooks.replace(layer));
    for Hooked { hooks, input, output, local } in hooked {
        let bring = |places: Places| move |x: &DTensor| x.to_layout(&places.layout(x.layout())?);
        input.into_iter().for_each(|places| hooks.on_input(bring(places)));
        output.into_iter().for_each(|places| hooks.on_output(bring(places)));
        if local {
            hooks.on_output(collect_local_shard);
        }
    }
    for (hooks, Numbered { aspect, index, places, .. }) in numbered {
        let places = places.clone();
        let bring = move |x: &DTensor| x.to_layout(&places.layout(x.layout())?);
        match aspect {
            Aspect::Output => hooks.on_output_at(*index, bring),
            Aspect::Input | Aspect::Param => hooks.on_input_at(*index, bring),
        }
    }
    Ok(())
}

/// Moves the parameters at a path.
///
/// ```
/// use shardwise::nn::{Builder, Linear};
/// use shardwise::plan::shard_parameter;
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let layer = Linear::new(&Builder::new(&mesh), 4, 6)?;
///     shard_parameter(&layer, &mesh, "weight", [Shard(1)])?;
///     assert_eq!(layer.weight.get().to_local().dims(), [6, 2]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn shard_parameter(module: &dyn Module, mesh: &DeviceMesh, path: &str, places: impl Into<Places>) -> Result<()> {
    shard_module(module, mesh, &ShardingPlan::new().param(path, places))
}

/// Brings the output of the modules at a path to other placements from now on.
#[doc(alias = "_reshard_output")]
#[doc(alias = "hook_func")]
#[track_caller]
pub fn reshard_output(module: &dyn Module, mesh: &DeviceMesh, path: &str, places: impl Into<Places>) -> Result<()> {
    shard_module(module, mesh, &ShardingPlan::new().output(path, places))
}

/// A parameter or buffer.
#[derive(Clone)]
pub(super) enum Slot {
    Param(Param),
    Buffer(Buffer),
}

impl Slot {
    pub(super) fn get(&self) -> DTensor {
        match self {
            Slot::Param(param) => param.get().detach(),
            Slot::Buffer(buffer) => buffer.get(),
        }
    }

    fn move_to(&self, layout: &Layout) -> Result<()> {
        let moved = self.get().to_layout(layout)?;
        match self {
            // A leaf that lies there already stays the leaf that it is.
            Slot::Param(param) if param.layout() == *layout => Ok(()),
            Slot::Param(param) => param.set(&moved),
            Slot::Buffer(buffer) => {
                buffer.set(&moved);
                Ok(())
            }
        }
    }

    fn is_same(&self, other: &Slot) -> bool {
        matches!((self, other), (Slot::Param(a), Slot::Param(b)) if a.is_same(b))
    }
}

/// What a module has, by path.
#[derive(Default)]
pub(super) struct Found {
    /// A parameter that two modules share is here twice.
    pub(super) tensors: Vec<(String, Slot)>,
    pub(super) modules: Vec<(String, &'static str)>,
    /// By the path of the module that they belong to.
    pub(super) hooks: BTreeMap<String, Hooks>,
    /// By the path of the module that has them.
    pub(super) heads: BTreeMap<String, Heads>,
    /// By the path of the module that has them.
    pub(super) hints: BTreeMap<String, PlanHints>,
}

/// What is done with inputs and outputs of one module.
struct Hooked<'a> {
    hooks: &'a Hooks,
    input: Option<Places>,
    output: Option<Places>,
    local: bool,
}

impl Found {
    pub(super) fn new(module: &dyn Module) -> Self {
        let mut found = Found::default();
        module.walk("", &mut |path, item| match item {
            Item::Module(kind) => found.modules.push((path.to_string(), kind)),
            Item::Param(param) => found.tensors.push((path.to_string(), Slot::Param(param.clone()))),
            Item::Buffer(buffer) => found.tensors.push((path.to_string(), Slot::Buffer(buffer.clone()))),
            Item::Hooks(hooks) => drop(found.hooks.insert(parent(path).0.to_string(), hooks.clone())),
            Item::Heads(heads) => drop(found.heads.insert(parent(path).0.to_string(), heads)),
            Item::Hints(hints) => drop(found.hints.insert(parent(path).0.to_string(), hints.clone())),
            Item::Mode(_) => {}
        });
        found
    }

    pub(super) fn kind(&self, path: &str) -> Option<&'static str> {
        self.modules.iter().find(|(own, _)| own == path).map(|(_, kind)| *kind)
    }

    /// The module at a path, for sharders and styles.
    pub(super) fn part(&self, path: &str, mesh: &DeviceMesh) -> Part {
        let kind = self.kind(path).unwrap_or_default();
        let (path, mesh) = (path.to_string(), mesh.clone());
        let mut part = Part { path, kind, params: Vec::new(), buffers: Vec::new(), mesh };
        for (own, slot) in self.tensors.iter().filter(|(own, _)| is_beneath(own, &part.path)) {
            let name = own.strip_prefix(&part.path).expect("beneath").trim_start_matches('.').to_string();
            match slot {
                Slot::Param(param) => part.params.push((name, param.clone())),
                Slot::Buffer(buffer) => part.buffers.push((name, buffer.clone())),
            }
        }
        part
    }

    /// Every parameter and buffer that the plan names, and where it goes.
    pub(super) fn moves(&self, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<(Slot, Layout)>> {
        plan.check_patterns()?;
        let mut moves: Vec<(&str, Slot, Layout)> = Vec::new();
        for (path, slot) in &self.tensors {
            let Some(ParamPlan::Placements(_)) = plan.of_param(path)? else { continue };
            let now = slot.get();
            if now.device_mesh() != mesh {
                let found = format!("`{path}` on mesh {}", now.device_mesh().mesh());
                let needed = format!("parameters on mesh {}", mesh.mesh());
                return Err(ErrorKind::Plan.error(
                    "sharding plan",
                    found,
                    needed,
                    "build the module on the mesh of the plan",
                ));
            }
            let layout = plan.layout_of(path, now.layout())?;
            if let Some((other, _, before)) = moves.iter().find(|(_, s, l)| s.is_same(slot) && *l != layout) {
                let found = format!("`{other}` as {before} and `{path}` as {layout}, which are one parameter");
                return Err(ErrorKind::Plan.error("sharding plan", found, "one layout for both", "give both the same"));
            }
            moves.push((path, slot.clone(), layout));
        }
        let tensors: Vec<&String> = self.tensors.iter().map(|(path, _)| path).collect();
        let modules: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let all = [tensors.clone(), modules.clone()].concat();
        for (pattern, entry) in &plan.params {
            let (what, names) = match entry {
                entry if entry.is_nothing() => ("parameter or module", &all),
                ParamPlan::Placements(_) => ("parameter", &tensors),
                ParamPlan::Sharder(_) => ("module", &modules),
            };
            check_match(pattern, what, names)?;
        }
        let placed = |entry: &ParamPlan| matches!(entry, ParamPlan::Placements(_)) && !entry.is_nothing();
        plan.check_counts(Aspect::Param, &plan.params, "parameter", &tensors, placed)?;
        let replaced = |entry: &ParamPlan| matches!(entry, ParamPlan::Sharder(_));
        plan.check_counts(Aspect::Param, &plan.params, "module", &modules, replaced)?;
        Ok(moves.into_iter().map(|(_, slot, layout)| (slot, layout)).collect())
    }

    /// Modules that are replaced; nothing else in the plan may be about what is inside them.
    fn replaced(&self, plan: &ShardingPlan) -> Result<Vec<(String, Arc<dyn Sharder>)>> {
        let mut replaced: Vec<(String, Arc<dyn Sharder>)> = Vec::new();
        for (path, _) in &self.modules {
            if let Some(ParamPlan::Sharder(sharder)) = plan.of_param(path)? {
                self.hooks_of(path)?;
                replaced.push((path.clone(), Arc::clone(sharder)));
            }
        }
        let tensors = self.tensors.iter().map(|(path, _)| path);
        let modules = || self.modules.iter().map(|(path, _)| path);
        let mut named: Vec<(&String, &String)> = Vec::new();
        for (pattern, entry) in plan.params.iter().filter(|(_, entry)| !entry.is_nothing()) {
            match entry {
                ParamPlan::Placements(_) => named.extend(tensors.clone().map(|path| (pattern, path))),
                ParamPlan::Sharder(_) => named.extend(modules().map(|path| (pattern, path))),
            }
        }
        let hooked = plan.inputs.iter().chain(&plan.outputs).filter(|(_, places)| !places.is_nothing());
        let hooked = hooked.map(|(pattern, _)| pattern).chain(&plan.locals);
        named.extend(hooked.flat_map(|pattern| modules().map(move |path| (pattern, path))));
        for (module, sharder) in &replaced {
            let inside = |(pattern, path): &&(&String, &String)| is_beneath(path, module) && matches(pattern, path);
            if let Some((pattern, path)) = named.iter().find(inside) {
                return Err(ErrorKind::Plan.error(
                    "sharding plan",
                    format!("`{pattern}`, which fits `{path}`, beside {sharder:?} for `{module}`, which replaces it"),
                    "nothing about what is inside a module that is replaced",
                    "take one of the two out of the plan, or make its pattern narrower",
                ));
            }
        }
        Ok(replaced)
    }

    fn hooked(&self, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<Hooked<'_>>> {
        let names: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let patterns = plan.inputs.iter().chain(&plan.outputs).filter(|(_, places)| !places.is_nothing());
        for (pattern, places) in patterns {
            check_match(pattern, "module", &names)?;
            places.check(mesh.mesh()).map_err(|e| at(e, pattern))?;
        }
        plan.locals.iter().try_for_each(|pattern| check_match(pattern, "module", &names))?;
        let some = |places: &Places| !places.is_nothing();
        plan.check_counts(Aspect::Input, &plan.inputs, "module", &names, some)?;
        plan.check_counts(Aspect::Output, &plan.outputs, "module", &names, some)?;
        let mut all = Vec::new();
        for path in names {
            let input = plan.one_of(Aspect::Input, &plan.inputs, path)?.filter(|p| some(p)).cloned();
            let output = plan.one_of(Aspect::Output, &plan.outputs, path)?.filter(|p| some(p)).cloned();
            let removed = plan.of_param(path)?.is_some_and(ParamPlan::is_nothing);
            let own = |pattern: &&String| matches(pattern, path) && (is_exact(pattern) || !removed);
            let local = plan.locals.iter().any(|pattern| own(&pattern));
            if input.is_some() || output.is_some() || local {
                all.push(Hooked { hooks: self.hooks_of(path)?, input, output, local });
            }
        }
        Ok(all)
    }

    /// The inputs and outputs that the plan says by number, with the hooks of their modules.
    fn numbered<'p>(&self, plan: &'p ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<(&Hooks, &'p Numbered)>> {
        let names: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let mut all = Vec::new();
        for entry in &plan.numbered {
            check_match(&entry.pattern, "module", &names)?;
            entry.places.check(mesh.mesh()).map_err(|e| at(e, &entry.pattern))?;
            for path in names.iter().filter(|path| matches(&entry.pattern, path)) {
                all.push((self.hooks_of(path)?, entry));
            }
        }
        Ok(all)
    }

    fn hooks_of(&self, path: &str) -> Result<&Hooks> {
        self.hooks.get(path).ok_or_else(|| {
            ErrorKind::Plan.error(
                "sharding plan",
                format!("`{path}`, a {} without hooks", self.kind(path).unwrap_or("module")),
                "a module that can be replaced, or whose input and output can be prepared",
                "give it a field of type Hooks and call Hooks::run in its forward",
            )
        })
    }
}

/// An error unless a pattern fits one of these paths.
pub(super) fn check_match(pattern: &str, what: &str, names: &[&String]) -> Result<()> {
    if names.iter().any(|name| matches(pattern, name)) {
        return Ok(());
    }
    let near = nearest(pattern, names.iter().map(|name| name.as_str()));
    Err(ErrorKind::Plan.error(
        "sharding plan",
        format!("{} `{pattern}`, which fits no {what}", if is_exact(pattern) { "path" } else { "pattern" }),
        format!("a path or pattern of the module's {} {what}s", names.len()),
        match near.is_empty() {
            true => "the module has none".to_string(),
            false => format!("did you mean {near}?"),
        },
    ))
}

/// Where a plan puts every parameter and buffer of a module; prints as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanTable(pub Vec<PlanRow>);

/// One parameter or buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRow {
    /// Its path.
    pub path: String,
    /// Where it goes.
    pub layout: Layout,
    /// The shape of what the first rank of the mesh holds.
    pub local: Vec<usize>,
}

impl ShardingPlan {
    /// Where the plan puts every parameter and buffer of a module. Nothing is changed.
    pub fn table(&self, module: &dyn Module) -> Result<PlanTable> {
        let found = Found::new(module);
        if let Some((_, slot)) = found.tensors.first() {
            found.moves(self, slot.get().device_mesh())?;
        }
        let row = |(path, slot): &(String, Slot)| {
            let layout = self.layout_of(path, slot.get().layout())?;
            let local = layout.local_shape(layout.mesh().ranks()[0]);
            Ok(PlanRow { path: path.clone(), layout, local })
        };
        found.tensors.iter().map(row).collect::<Result<_>>().map(PlanTable)
    }
}

impl fmt::Display for PlanTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.0.iter().map(|row| row.path.len()).max().unwrap_or(0).max("parameter".len());
        writeln!(f, "{:<width$}  {:<14}  {:<14}  placements", "parameter", "shape", "per rank")?;
        for PlanRow { path, layout, local } in &self.0 {
            let (shape, local) = (format!("{:?}", layout.shape()), format!("{local:?}"));
            let text = layout.to_string();
            let placements = text.split_once(": ").map_or(text.as_str(), |(_, placements)| placements);
            writeln!(f, "{path:<width$}  {shape:<14}  {local:<14}  {placements}")?;
        }
        Ok(())
    }
}
