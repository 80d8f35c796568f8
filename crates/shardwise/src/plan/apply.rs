//! Applying plans: everything is resolved and checked before anything changes.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use super::local::collect_local_shard;
use super::pattern::{is_beneath, is_exact, matches, parent};
use super::sharder::{ModuleView, Sharder};
use super::sharding_plan::{EntryKind, ParamPlan, PositionalEntry, ShardingPlan, with_path};
use super::target_placements::TargetPlacements;
use crate::comm::DeviceMesh;
use crate::error::{ErrorKind, Result, nearest};
use crate::layout::{Layout, MergedShape};
use crate::nn::{Buffer, Builder, Heads, Hooks, Layer, Module, ModuleItem, PlanHints};
use crate::param::Param;
use crate::tensor::DTensor;

impl ShardingPlan {
    /// Builds a module whose parameters have the layouts of the plan from the start, then applies the rest of the plan.
    ///
    /// Collective: all ranks of the mesh must call it with the same plan. `new` is the constructor of the module.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if something in the plan does not fit the module, or the module has no parameter at a path for which one was built
    /// ([`Builder::check`]).
    pub fn build<M: Module>(&self, mesh: &DeviceMesh, new: impl FnOnce(&Builder) -> Result<M>) -> Result<M> {
        let builder = self.builder(mesh);
        let module = new(&builder)?;
        builder.check(&module)?;
        shard_module(&module, mesh, self)?;
        Ok(module)
    }
}

/// Applies a plan to a module: redistributes parameters and buffers, replaces modules, and registers hooks that redistribute
/// inputs and outputs.
///
/// Collective: all ranks of the mesh must call it with the same plan, which is checked. Create optimizers afterwards, because
/// a replacement has other parameters.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if something in the plan does not fit the module or the mesh; nothing is changed
/// then. All ranks get an error if their plans differ.
#[track_caller]
pub fn shard_module(module: &dyn Module, mesh: &DeviceMesh, plan: &ShardingPlan) -> Result<()> {
    if mesh.contains(mesh.world().rank()) && mesh.size() > 1 {
        let mut hasher = DefaultHasher::new();
        plan.to_string().hash(&mut hasher);
        mesh.group_of(&(0..mesh.ndim()).collect::<Vec<_>>())?.agree("sharding plan", &[hasher.finish()])?;
    }
    let inventory = ModuleInventory::new(module);
    let redistributions = inventory.redistributions(plan, mesh)?;
    let planned_hooks = inventory.planned_hooks(plan, mesh)?;
    let (positional, expected) = (inventory.positional(plan, mesh)?, inventory.expected(plan, mesh)?);
    let mut layers: Vec<(&Hooks, Arc<dyn Layer>)> = Vec::new();
    for (path, sharder) in inventory.replaced(plan)? {
        let layer = sharder.shard(&inventory.view(&path, mesh)).map_err(|e| with_path(e, &path))?;
        layers.push((inventory.hooks_of(&path)?, layer));
    }
    for (tensor, layout) in redistributions {
        tensor.redistribute(&layout)?;
    }
    layers.into_iter().for_each(|(hooks, layer)| hooks.replace(layer));
    // First, so that they see inputs as they arrive.
    expected.into_iter().for_each(|(hooks, placements)| hooks.on_input(arrives_in(placements)));
    for PlannedHooks { hooks, input, output, local } in planned_hooks {
        input.into_iter().for_each(|target| hooks.on_input(redistribute_to(target)));
        output.into_iter().for_each(|target| hooks.on_output(redistribute_to(target)));
        if local {
            hooks.on_output(collect_local_shard);
        }
    }
    for (hooks, PositionalEntry { kind, index, target, .. }) in positional {
        let hook = redistribute_to(target.clone());
        match kind {
            EntryKind::Output => hooks.on_output_at(*index, hook),
            EntryKind::Input | EntryKind::Param => hooks.on_input_at(*index, hook),
        }
    }
    Ok(())
}

impl ShardingPlan {
    /// Merges the dimensions of parameters that the plan merges, and redistributes these parameters. Collective.
    pub(crate) fn merge_parameters(&self, module: &dyn Module) -> Result<()> {
        let inventory = ModuleInventory::new(module);
        let merged = inventory.tensors.iter().filter(|(path, _)| self.merged_dims(path).is_some());
        // Quantized blocks are computed with as they are.
        let mut merged = merged.filter(|(_, tensor)| tensor.get().dtype().is_float());
        merged.try_for_each(|(path, tensor)| tensor.redistribute(&tensor.layout_by(self, path)?))
    }
}

/// A hook that redistributes a tensor.
fn redistribute_to(target: TargetPlacements) -> impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static {
    move |x| x.to_layout(&target.layout(x.layout())?)
}

/// A hook that refuses a tensor in other placements.
fn arrives_in(expected: TargetPlacements) -> impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static {
    move |x| {
        let layout = expected.layout(x.layout())?;
        if layout.placements() == x.placements() {
            return Ok(x.clone());
        }
        let found = format!("an input in {}", x.layout());
        let needed = format!("{layout}, as `input` of the style or plan states");
        let fix = "redistribute the input, or state the placement in which it arrives";
        Err(ErrorKind::Plan.error("module input", found, needed, fix))
    }
}

/// Redistributes the parameters at a path or pattern. Collective: all ranks of the mesh must call it.
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
///     assert_eq!(layer.weight.get().local_shape(), [6, 2]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[track_caller]
pub fn shard_parameter(
    module: &dyn Module,
    mesh: &DeviceMesh,
    path: &str,
    target: impl Into<TargetPlacements>,
) -> Result<()> {
    shard_module(module, mesh, &ShardingPlan::new().param(path, target))
}

/// Registers a redistribution of the output of the modules at a path or pattern. Collective, as [`shard_module`].
#[doc(alias = "_reshard_output")]
#[doc(alias = "hook_func")]
#[track_caller]
pub fn reshard_output(
    module: &dyn Module,
    mesh: &DeviceMesh,
    path: &str,
    target: impl Into<TargetPlacements>,
) -> Result<()> {
    shard_module(module, mesh, &ShardingPlan::new().output(path, target))
}

/// A parameter or buffer.
#[derive(Clone)]
pub(super) enum ParamOrBuffer {
    Param(Param),
    Buffer(Buffer),
}

impl ParamOrBuffer {
    pub(super) fn get(&self) -> DTensor {
        match self {
            ParamOrBuffer::Param(param) => param.get().detach(),
            ParamOrBuffer::Buffer(buffer) => buffer.get(),
        }
    }

    /// The layout that a plan gives it.
    pub(super) fn layout_by(&self, plan: &ShardingPlan, path: &str) -> Result<Layout> {
        match self {
            ParamOrBuffer::Param(param) if param.merged().is_some() => plan.stored_layout_of(path, &param.layout()),
            _ => plan.layout_of(path, self.get().layout()),
        }
    }

    fn redistribute(&self, layout: &Layout) -> Result<()> {
        if let ParamOrBuffer::Param(param) = self
            && let Some(merged) = MergedShape::between(&param.shape(), layout.shape())
        {
            param.merge_dims(merged.dims())?;
        }
        let moved = self.get().to_layout(layout)?;
        match self {
            // A parameter that is in the layout already keeps its leaf, so that gradients of earlier passes still find it.
            ParamOrBuffer::Param(param) if param.layout() == *layout => Ok(()),
            ParamOrBuffer::Param(param) => param.set(&moved),
            ParamOrBuffer::Buffer(buffer) => {
                buffer.set(&moved);
                Ok(())
            }
        }
    }

    fn is_same(&self, other: &ParamOrBuffer) -> bool {
        matches!((self, other), (ParamOrBuffer::Param(a), ParamOrBuffer::Param(b)) if a.is_same(b))
    }
}

/// The tensors, modules, hooks and hints of a module, by path.
#[derive(Default)]
pub(super) struct ModuleInventory {
    /// A shared (tied) parameter is listed under each of its paths.
    pub(super) tensors: Vec<(String, ParamOrBuffer)>,
    pub(super) modules: Vec<(String, &'static str)>,
    /// By the path of the module that they belong to.
    pub(super) hooks: BTreeMap<String, Hooks>,
    /// By the path of the module that has them.
    pub(super) heads: BTreeMap<String, Heads>,
    /// By the path of the module that has them.
    pub(super) hints: BTreeMap<String, PlanHints>,
}

/// What a plan does with input and output of one module.
struct PlannedHooks<'a> {
    hooks: &'a Hooks,
    input: Option<TargetPlacements>,
    output: Option<TargetPlacements>,
    /// Whether the module returns its local shard.
    local: bool,
}

impl ModuleInventory {
    pub(super) fn new(module: &dyn Module) -> Self {
        let mut inventory = ModuleInventory::default();
        module.walk("", &mut |path, item| match item {
            ModuleItem::Module(kind) => inventory.modules.push((path.to_string(), kind)),
            ModuleItem::Param(param) => inventory.tensors.push((path.to_string(), ParamOrBuffer::Param(param.clone()))),
            ModuleItem::Buffer(buffer) => {
                inventory.tensors.push((path.to_string(), ParamOrBuffer::Buffer(buffer.clone())));
            }
            ModuleItem::Hooks(hooks) => drop(inventory.hooks.insert(parent(path).0.to_string(), hooks.clone())),
            ModuleItem::Heads(heads) => drop(inventory.heads.insert(parent(path).0.to_string(), heads)),
            ModuleItem::Hints(hints) => drop(inventory.hints.insert(parent(path).0.to_string(), hints.clone())),
            ModuleItem::TrainingMode(_) | ModuleItem::ExtraState(_) => {}
        });
        inventory
    }

    pub(super) fn kind(&self, path: &str) -> Option<&'static str> {
        self.modules.iter().find(|(own, _)| own == path).map(|(_, kind)| *kind)
    }

    /// The module at a path, for sharders and styles.
    pub(super) fn view(&self, path: &str, mesh: &DeviceMesh) -> ModuleView {
        let kind = self.kind(path).unwrap_or_default();
        let (path, mesh) = (path.to_string(), mesh.clone());
        let mut view = ModuleView { path, kind, params: Vec::new(), buffers: Vec::new(), mesh };
        for (own, tensor) in self.tensors.iter().filter(|(own, _)| is_beneath(own, &view.path)) {
            let name = own.strip_prefix(&view.path).expect("beneath").trim_start_matches('.').to_string();
            match tensor {
                ParamOrBuffer::Param(param) => view.params.push((name, param.clone())),
                ParamOrBuffer::Buffer(buffer) => view.buffers.push((name, buffer.clone())),
            }
        }
        view
    }

    /// Every parameter and buffer that the plan places, with its new layout.
    pub(super) fn redistributions(
        &self,
        plan: &ShardingPlan,
        mesh: &DeviceMesh,
    ) -> Result<Vec<(ParamOrBuffer, Layout)>> {
        plan.check_patterns()?;
        let mut moves: Vec<(&str, ParamOrBuffer, Layout)> = Vec::new();
        for (path, tensor) in &self.tensors {
            let merged = plan.merged_dims(path);
            let placed = matches!(plan.param_plan(path)?, Some(ParamPlan::Placements(_)));
            if !placed && merged.is_none() {
                continue;
            }
            if merged.is_some() && matches!(tensor, ParamOrBuffer::Buffer(_)) {
                let (found, fix) = (format!("buffer `{path}`"), "make the pattern narrower");
                return Err(ErrorKind::Plan.error("merged dimensions", found, "parameters only", fix));
            }
            let now = tensor.get();
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
            let layout = tensor.layout_by(plan, path)?;
            if let Some((other, _, before)) = moves.iter().find(|(_, s, l)| s.is_same(tensor) && *l != layout) {
                let found = format!("`{other}` as {before} and `{path}` as {layout}, which are one parameter");
                return Err(ErrorKind::Plan.error("sharding plan", found, "one layout for both", "give both the same"));
            }
            moves.push((path, tensor.clone(), layout));
        }
        let tensors: Vec<&String> = self.tensors.iter().map(|(path, _)| path).collect();
        let modules: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let all = [tensors.clone(), modules.clone()].concat();
        for (pattern, entry) in &plan.params {
            let (what, names) = match entry {
                entry if entry.is_empty() => ("parameter or module", &all),
                ParamPlan::Placements(_) => ("parameter", &tensors),
                ParamPlan::Sharder(_) => ("module", &modules),
            };
            check_match(pattern, what, names)?;
        }
        plan.merged.iter().try_for_each(|(pattern, _)| check_match(pattern, "parameter", &tensors))?;
        let placed = |entry: &ParamPlan| matches!(entry, ParamPlan::Placements(_)) && !entry.is_empty();
        plan.check_effective(EntryKind::Param, &plan.params, "parameter", &tensors, placed)?;
        let replaced = |entry: &ParamPlan| matches!(entry, ParamPlan::Sharder(_));
        plan.check_effective(EntryKind::Param, &plan.params, "module", &modules, replaced)?;
        Ok(moves.into_iter().map(|(_, tensor, layout)| (tensor, layout)).collect())
    }

    /// Modules that the plan replaces. An error if it places something inside one of them.
    fn replaced(&self, plan: &ShardingPlan) -> Result<Vec<(String, Arc<dyn Sharder>)>> {
        let mut replaced: Vec<(String, Arc<dyn Sharder>)> = Vec::new();
        for (path, _) in &self.modules {
            if let Some(ParamPlan::Sharder(sharder)) = plan.param_plan(path)? {
                self.hooks_of(path)?;
                replaced.push((path.clone(), Arc::clone(sharder)));
            }
        }
        let tensors = self.tensors.iter().map(|(path, _)| path);
        let modules = || self.modules.iter().map(|(path, _)| path);
        let mut named: Vec<(&String, &String)> = Vec::new();
        for (pattern, entry) in plan.params.iter().filter(|(_, entry)| !entry.is_empty()) {
            match entry {
                ParamPlan::Placements(_) => named.extend(tensors.clone().map(|path| (pattern, path))),
                ParamPlan::Sharder(_) => named.extend(modules().map(|path| (pattern, path))),
            }
        }
        let hooked = plan.inputs.iter().chain(&plan.outputs).chain(&plan.expected);
        let hooked = hooked.filter(|(_, places)| !places.is_empty());
        let hooked = hooked.map(|(pattern, _)| pattern).chain(&plan.locals);
        named.extend(hooked.flat_map(|pattern| modules().map(move |path| (pattern, path))));
        for (module, sharder) in &replaced {
            let inside = |(pattern, path): &&(&String, &String)| is_beneath(path, module) && matches(pattern, path);
            if let Some((pattern, path)) = named.iter().find(inside) {
                return Err(ErrorKind::Plan.error(
                    "sharding plan",
                    format!(
                        "`{pattern}`, which fits `{path}`, together with {sharder:?} for `{module}`, which replaces it"
                    ),
                    "nothing about what is inside a module that is replaced",
                    "take one of the two out of the plan, or make its pattern narrower",
                ));
            }
        }
        Ok(replaced)
    }

    /// Inputs and outputs that the plan redistributes, by module.
    fn planned_hooks(&self, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<PlannedHooks<'_>>> {
        let names: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let patterns = plan.inputs.iter().chain(&plan.outputs).filter(|(_, places)| !places.is_empty());
        for (pattern, places) in patterns {
            check_match(pattern, "module", &names)?;
            places.check(mesh.mesh()).map_err(|e| with_path(e, pattern))?;
        }
        plan.locals.iter().try_for_each(|pattern| check_match(pattern, "module", &names))?;
        let some = |places: &TargetPlacements| !places.is_empty();
        plan.check_effective(EntryKind::Input, &plan.inputs, "module", &names, some)?;
        plan.check_effective(EntryKind::Output, &plan.outputs, "module", &names, some)?;
        let mut all = Vec::new();
        for path in names {
            let input = plan.entry_for(EntryKind::Input, &plan.inputs, path)?.filter(|p| some(p)).cloned();
            let output = plan.entry_for(EntryKind::Output, &plan.outputs, path)?.filter(|p| some(p)).cloned();
            let removed = plan.param_plan(path)?.is_some_and(ParamPlan::is_empty);
            let own = |pattern: &&String| matches(pattern, path) && (is_exact(pattern) || !removed);
            let local = plan.locals.iter().any(|pattern| own(&pattern));
            if input.is_some() || output.is_some() || local {
                all.push(PlannedHooks { hooks: self.hooks_of(path)?, input, output, local });
            }
        }
        Ok(all)
    }

    /// Placements in which inputs arrive, with the hooks of their modules.
    fn expected(&self, plan: &ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<(&Hooks, TargetPlacements)>> {
        let names: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let mut all = Vec::new();
        for (pattern, placements) in &plan.expected {
            check_match(pattern, "module", &names)?;
            placements.check(mesh.mesh()).map_err(|e| with_path(e, pattern))?;
            for path in names.iter().filter(|path| matches(pattern, path)) {
                all.push((self.hooks_of(path)?, placements.clone()));
            }
        }
        Ok(all)
    }

    /// Entries for one of several inputs or outputs, with the hooks of their modules.
    fn positional<'p>(&self, plan: &'p ShardingPlan, mesh: &DeviceMesh) -> Result<Vec<(&Hooks, &'p PositionalEntry)>> {
        let names: Vec<&String> = self.modules.iter().map(|(path, _)| path).collect();
        let mut all = Vec::new();
        for entry in &plan.positional {
            check_match(&entry.pattern, "module", &names)?;
            entry.target.check(mesh.mesh()).map_err(|e| with_path(e, &entry.pattern))?;
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

/// Checks that a pattern matches one of these paths.
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

/// The layout that a plan gives every parameter and buffer of a module; prints as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanTable(pub Vec<PlanRow>);

/// One parameter or buffer of a [`PlanTable`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanRow {
    /// Path of the parameter or buffer.
    pub path: String,
    /// Layout under the plan.
    pub layout: Layout,
    /// Shape of the local shard of the first rank of the mesh.
    pub local: Vec<usize>,
}

impl ShardingPlan {
    /// Returns the layout of every parameter and buffer of a module under the plan. Local; nothing is changed.
    pub fn table(&self, module: &dyn Module) -> Result<PlanTable> {
        let inventory = ModuleInventory::new(module);
        if let Some((_, tensor)) = inventory.tensors.first() {
            inventory.redistributions(self, tensor.get().device_mesh())?;
        }
        let row = |(path, tensor): &(String, ParamOrBuffer)| {
            let layout = tensor.layout_by(self, path)?;
            let local = layout.local_shape(layout.mesh().ranks()[0]);
            Ok(PlanRow { path: path.clone(), layout, local })
        };
        inventory.tensors.iter().map(row).collect::<Result<_>>().map(PlanTable)
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
