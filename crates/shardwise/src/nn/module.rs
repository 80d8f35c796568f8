//! The traits of modules, and the things that a walk over a module finds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use candle_core::{DType, Device};
use parking_lot::Mutex;

use super::hints::{Heads, PlanHints};
use super::state_dict::{IncompatibleKeys, StateDictOptions};
use crate::comm::MemoryKind;
use crate::error::{ErrorKind, Result, listed};
use crate::ops::{PerDim, Reduction};
use crate::param::{MergedTensor, Param};
use crate::placement::Placement;
use crate::tensor::DTensor;

/// What [`Module::walk`] visits.
pub enum ModuleItem<'a> {
    /// The module itself, with the name of its type; its fields follow.
    Module(&'static str),
    /// A parameter.
    Param(&'a Param),
    /// A buffer.
    Buffer(&'a Buffer),
    /// A text of the module's state.
    ExtraState(&'a ExtraState),
    /// The switch between training and evaluation of a module.
    TrainingMode(&'a TrainingMode),
    /// The hooks of a module.
    Hooks(&'a Hooks),
    /// The numbers of heads of an attention module.
    Heads(Heads),
    /// Roles of layers that planners do not recognize by name.
    Hints(&'a PlanHints),
}

/// A struct of parameters, buffers and other modules, as `torch.nn.Module`. Derive it with `#[derive(Module)]`.
///
/// All methods but [`walk`](Self::walk) are provided. Methods take `&self`: parameters are cells that modules and optimizers
/// share.
#[doc(alias = "torch.nn.Module")]
pub trait Module {
    /// Calls `visit` for the module and everything inside, in order of declaration, with dotted paths below `path`.
    ///
    /// A module that was replaced ([`Hooks::replace`]) is walked as its replacement.
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>));

    /// Returns all parameters with their dotted paths. A shared (tied) parameter is listed once, under its first path.
    #[doc(alias = "parameters")]
    fn named_parameters(&self) -> Vec<(String, Param)> {
        let mut all: Vec<(String, Param)> = Vec::new();
        self.walk("", &mut |path, item| {
            if let ModuleItem::Param(param) = item
                && !all.iter().any(|(_, p)| p.is_same(param))
            {
                all.push((path.to_string(), param.clone()));
            }
        });
        all
    }

    /// Returns the parameters that are not frozen, with their dotted paths; see [`Param::set_requires_grad`].
    fn trainable_parameters(&self) -> Vec<(String, Param)> {
        self.named_parameters().into_iter().filter(|(_, param)| param.requires_grad()).collect()
    }

    /// Freezes all parameters (`false`) or makes them trainable; see [`Param::set_requires_grad`]. Local.
    #[doc(alias = "requires_grad_")]
    #[doc(alias = "freeze")]
    fn set_requires_grad(&self, trainable: bool) {
        self.named_parameters().iter().for_each(|(_, param)| param.set_requires_grad(trainable));
    }

    /// Returns all buffers with their dotted paths.
    fn named_buffers(&self) -> Vec<(String, Buffer)> {
        let mut all = Vec::new();
        self.walk("", &mut |path, item| {
            if let ModuleItem::Buffer(buffer) = item {
                all.push((path.to_string(), buffer.clone()));
            }
        });
        all
    }

    /// Returns the texts of the module's state that are not tensors, with their dotted paths.
    #[doc(alias = "get_extra_state")]
    fn named_extra_states(&self) -> Vec<(String, ExtraState)> {
        let mut all = Vec::new();
        self.walk("", &mut |path, item| {
            if let ModuleItem::ExtraState(extra) = item {
                all.push((path.to_string(), extra.clone()));
            }
        });
        all
    }

    /// Returns this module (path `""`) and all modules inside, with their dotted paths and the names of their types.
    fn named_modules(&self) -> Vec<(String, &'static str)> {
        let mut all = Vec::new();
        self.walk("", &mut |path, item| {
            if let ModuleItem::Module(kind) = item {
                all.push((path.to_string(), kind));
            }
        });
        all
    }

    /// Counts the elements of all parameters, of full tensors and not of local shards.
    fn parameter_count(&self) -> usize {
        self.named_parameters().iter().map(|(_, p)| p.shape().iter().product::<usize>()).sum()
    }

    /// Switches all modules inside to training: dropout drops, batch norm uses statistics of the batch.
    fn train(&self) {
        self.set_training(true);
    }

    /// Switches all modules inside to evaluation.
    fn eval(&self) {
        self.set_training(false);
    }

    /// Switches all modules inside to training or evaluation.
    fn set_training(&self, training: bool) {
        self.walk("", &mut |_, item| {
            if let ModuleItem::TrainingMode(mode) = item {
                mode.0.training.store(training, Relaxed);
            }
        });
    }

    /// Converts all floating-point parameters and buffers to another type. Local.
    fn to_dtype(&self, dtype: DType) -> Result<()> {
        self.map_tensors(&|tensor| if tensor.dtype().is_float() { tensor.to_dtype(dtype) } else { Ok(tensor.clone()) })
    }

    /// Moves all parameters and buffers to a device. Local.
    fn to_device(&self, device: &Device) -> Result<()> {
        self.map_tensors(&|tensor| tensor.to_device(device))
    }

    /// Replaces the value of every parameter and buffer by `f` of it.
    ///
    /// Communicates what `f` communicates; a shared parameter is passed once.
    #[doc(alias = "_apply")]
    fn map_tensors(&self, f: &dyn Fn(&DTensor) -> Result<DTensor>) -> Result<()> {
        for (_, param) in self.named_parameters() {
            param.set(&f(&param.get().detach())?)?;
        }
        for (_, buffer) in self.named_buffers() {
            buffer.set(&f(&buffer.get())?);
        }
        Ok(())
    }

    /// Returns the values of all parameters and persistent buffers by path, detached, in their current layouts.
    ///
    /// Local, and copies nothing: tensors are immutable values. A parameter with merged dimensions ([`Param::merge_dims`]) has
    /// them merged here too; see [`unmerged_state_dict`](Self::unmerged_state_dict). For files see
    /// [`checkpoint::save`](crate::checkpoint::save).
    fn state_dict(&self) -> BTreeMap<String, DTensor> {
        let parameters = self.named_parameters().into_iter().map(|(path, p)| (path, p.get().detach()));
        let buffers = self.named_buffers().into_iter().filter(|(_, buffer)| buffer.is_persistent());
        parameters.chain(buffers.map(|(path, buffer)| (path, buffer.get()))).collect()
    }

    /// As [`state_dict`](Self::state_dict), with parameters that have merged dimensions in the shapes that the module declared, as
    /// a module without merged dimensions has and loads them.
    ///
    /// Collective: every rank of the mesh must call it. Shards that cross the borders of merged dimensions are gathered.
    #[track_caller]
    fn unmerged_state_dict(&self) -> Result<BTreeMap<String, DTensor>> {
        let mut state = self.state_dict();
        for (path, param) in self.named_parameters() {
            if param.merged().is_some() {
                state.insert(path, param.separate()?);
            }
        }
        Ok(state)
    }

    /// As [`state_dict`](Self::state_dict), with the prefix of the options before every path.
    fn state_dict_with(&self, options: &StateDictOptions) -> BTreeMap<String, DTensor> {
        self.state_dict().into_iter().map(|(path, tensor)| (options.prefix.clone() + &path, tensor)).collect()
    }

    /// Sets all parameters and buffers, each redistributed and converted to the layout and type that it has here. A parameter with
    /// merged dimensions takes a tensor of either shape.
    ///
    /// Collective if a layout differs: all ranks must call it.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with all names and shapes that do not fit; nothing changes then.
    fn load_state_dict(&self, state: &BTreeMap<String, DTensor>) -> Result<()> {
        self.load_state_dict_with(state, &StateDictOptions::default()).map(drop)
    }

    /// As [`load_state_dict`](Self::load_state_dict), with names matched by the options. Returns the names that did not match.
    fn load_state_dict_with(
        &self,
        state: &BTreeMap<String, DTensor>,
        options: &StateDictOptions,
    ) -> Result<IncompatibleKeys> {
        let own = self.state_dict();
        let given = |name: &str| state.get(&(options.prefix.clone() + name));
        let merged: BTreeMap<String, MergedTensor> =
            self.named_parameters().into_iter().filter_map(|(name, param)| Some((name, param.merged()?))).collect();
        let fits = |name: &str, own: &DTensor, value: &DTensor| {
            value.shape() == own.shape() || merged.get(name).is_some_and(|merged| merged.shape() == value.shape())
        };
        let reshaped: Vec<&String> =
            own.iter().filter(|(n, t)| given(n).is_some_and(|s| !fits(n, t, s))).map(|(n, _)| n).collect();
        let loaded = options.compare(&own.keys().collect::<Vec<_>>(), state.keys().map(String::as_str));
        if !reshaped.is_empty() {
            let names = loaded.map_or_else(|error| format!("; {}", error.found()), |_| String::new());
            let reshaped = listed(reshaped.iter().map(|name| format!("{name:?}")));
            let found = format!("other shapes of [{reshaped}]{names}");
            return Err(ErrorKind::state().error(
                "state",
                found,
                "the module's names and shapes",
                "rename or reshape the entries",
            ));
        }
        let loaded = loaded?;
        for (name, param) in self.named_parameters() {
            if let Some(value) = given(&name) {
                param.set(&fitted(&param.to_stored(value)?, &param.get())?)?;
            }
        }
        for (name, buffer) in self.named_buffers().into_iter().filter(|(_, buffer)| buffer.is_persistent()) {
            if let Some(value) = given(&name) {
                buffer.set(&fitted(value, &buffer.get())?);
            }
        }
        Ok(loaded)
    }
}

/// Converts and redistributes `value` to the type, mesh and layout of `like`.
fn fitted(value: &DTensor, like: &DTensor) -> Result<DTensor> {
    let value = value.to_dtype(like.dtype())?;
    if value.device_mesh() == like.device_mesh() {
        return value.to_layout(like.layout());
    }
    let replicated = vec![Placement::Replicate; like.placements().len()];
    value.to_mesh(like.device_mesh(), replicated)?.to_layout(like.layout())
}

/// A module with one input and one output.
///
/// Collective: all ranks of the mesh of `x` must call `forward`, since operators inside may communicate.
pub trait Forward {
    /// Computes the output for `x`.
    ///
    /// `#[track_caller]` holds for every implementation, so that errors inside a layer name the line that called it.
    #[track_caller]
    fn forward(&self, x: &DTensor) -> Result<DTensor>;
}

/// A module with several inputs and outputs.
///
/// Plans and parallel styles redistribute each of them by its position
/// ([`ShardingPlan::input_at`](crate::plan::ShardingPlan::input_at)), through [`Hooks::run_all`].
///
/// ```
/// use shardwise::nn::{ForwardAll, Hooks, Linear};
/// use shardwise::plan::{PrepareModuleInput, parallelize_module};
/// use shardwise::prelude::*;
///
/// /// A gate for a sequence, from a second one; returns both.
/// #[derive(Module)]
/// struct Gate {
///     gate: Linear,
///     hooks: Hooks,
/// }
///
/// impl ForwardAll for Gate {
///     fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
///         self.hooks.run_all(inputs, |x| {
///             let gate = self.gate.forward(&x[1])?.sigmoid()?;
///             Ok(vec![(&x[0] * &gate)?, gate])
///         })
///     }
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let builder = Builder::new(&mesh);
///     let model = Gate { gate: Linear::new(&builder.child("gate"), 4, 4)?, hooks: builder.hooks() };
///     parallelize_module(&model, &mesh, &[("", &PrepareModuleInput::new("tp", Shard(0)).number(1))])?;
///     let x = DTensor::ones((2, 4), DType::F32, &mesh, [Replicate])?;
///     let outputs = model.forward_all(&[&x, &x])?;
///     assert_eq!(outputs[1].placements(), [Shard(0)]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait ForwardAll {
    /// Computes the outputs for the inputs.
    ///
    /// `#[track_caller]` holds for every implementation, as for [`Forward::forward`].
    #[track_caller]
    fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>>;
}

/// Joins a dotted path and a name; the path of the root is empty.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}

/// A tensor of a module's state that is not trained, such as running averages. Clones share one value.
#[doc(alias = "register_buffer")]
#[derive(Clone)]
pub struct Buffer {
    value: Arc<Mutex<DTensor>>,
    persistent: bool,
}

impl Buffer {
    /// Creates a buffer with an initial value.
    pub fn new(value: &DTensor) -> Self {
        value.count_as(MemoryKind::Buffers);
        Buffer { value: Arc::new(Mutex::new(value.detach())), persistent: true }
    }

    /// Leaves the buffer out of state dicts and checkpoints, as `register_buffer(persistent=False)` does: for tables that the
    /// module computes from its settings.
    #[doc(alias = "persistent")]
    #[must_use]
    pub fn not_persistent(self) -> Self {
        Buffer { persistent: false, ..self }
    }

    /// Whether the buffer is part of state dicts and checkpoints.
    pub fn is_persistent(&self) -> bool {
        self.persistent
    }

    /// Returns the current value.
    pub fn get(&self) -> DTensor {
        self.value.lock().clone()
    }

    /// Replaces the value.
    pub fn set(&self, value: &DTensor) {
        value.count_as(MemoryKind::Buffers);
        *self.value.lock() = value.detach();
    }
}

/// A text of a module's state that is not a tensor, such as a counter or JSON; a field of the module. Clones share one value.
///
/// PyTorch's `get_extra_state` and `set_extra_state`. Checkpoints of the module save and restore it under the path of the
/// field; all ranks must set the same text.
#[doc(alias = "set_extra_state")]
#[derive(Clone, Default)]
pub struct ExtraState(Arc<Mutex<String>>);

impl ExtraState {
    /// Creates a state with this text.
    pub fn new(text: impl Into<String>) -> Self {
        ExtraState(Arc::new(Mutex::new(text.into())))
    }

    /// Returns the current text.
    pub fn get(&self) -> String {
        self.0.lock().clone()
    }

    /// Replaces the text.
    pub fn set(&self, text: impl Into<String>) {
        *self.0.lock() = text.into();
    }
}

/// The switch between training and evaluation, as a field of a module; training until [`Module::eval`]. Clones share it.
#[doc(alias = "training")]
#[derive(Clone)]
pub struct TrainingMode(pub(super) Arc<ModeState>);

/// What a [`TrainingMode`] consists of.
pub(super) struct ModeState {
    training: AtomicBool,
    /// How many evaluations and generations run in the module: they may overlap and end in any order.
    pub(super) evaluations: AtomicUsize,
}

impl Default for TrainingMode {
    fn default() -> Self {
        TrainingMode(Arc::new(ModeState { training: AtomicBool::new(true), evaluations: AtomicUsize::new(0) }))
    }
}

impl TrainingMode {
    /// Whether the module computes as in training: not after [`Module::eval`], nor during an evaluation or a generation.
    pub fn is_training(&self) -> bool {
        self.0.training.load(Relaxed) && self.0.evaluations.load(Relaxed) == 0
    }
}

macro_rules! items {
    ($($T:ty => $item:ident;)*) => {$(
        impl Module for $T {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
                visit(path, ModuleItem::$item(self));
            }
        }
    )*};
}
items! {
    Param => Param;
    Buffer => Buffer;
    ExtraState => ExtraState;
    TrainingMode => TrainingMode;
}

/// A hook: what it returns takes the place of the input or output.
pub(super) type Hook = Arc<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;

/// A module with one input and one output that can be shared: what [`Sequential`](super::Sequential) holds and what
/// [`Hooks::replace`] takes. Implemented for all such types.
pub trait Layer: Module + Forward + Send + Sync {}

impl<M: Module + Forward + Send + Sync> Layer for M {}

/// Input and output hooks of a module, and possibly a replacement for it; a field of the module. Clones share them.
///
/// A module that calls [`run`](Self::run) in its `forward` can be sharded by plans and styles: they register hooks that
/// redistribute inputs and outputs. If the hooks hold a replacement, `run` runs that instead, and a walk over the module
/// finds the parameters of the replacement.
///
/// Hooks know the path of their module, for error messages: from [`Builder::hooks`](super::Builder::hooks), or else from
/// the last walk over the model.
#[derive(Clone, Default)]
pub struct Hooks(pub(super) Arc<Mutex<RegisteredHooks>>);

/// What is registered for one module.
#[derive(Clone, Default)]
pub(super) struct RegisteredHooks {
    /// By position of the input.
    pub(super) input: Vec<(usize, Hook)>,
    /// By position of the output.
    pub(super) output: Vec<(usize, Hook)>,
    pub(super) replacement: Option<Arc<dyn Layer>>,
    /// The type to which floating-point inputs are converted before the hooks.
    pub(super) input_dtype: Option<DType>,
    /// The type to which floating-point outputs are converted after the hooks.
    pub(super) output_dtype: Option<DType>,
    /// The path of the module, unless it is unknown or the root.
    pub(super) path: Option<Arc<str>>,
}

impl Module for Heads {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        visit(path, ModuleItem::Heads(*self));
    }
}

impl Module for PlanHints {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        visit(path, ModuleItem::Hints(self));
    }
}

impl Module for Hooks {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        self.note_path(path.rsplit_once('.').map_or("", |(module, _)| module));
        visit(path, ModuleItem::Hooks(self));
    }
}

/// Types of fields that hold no tensors.
macro_rules! without_tensors {
    ($($T:ty),*) => {$(
        impl Module for $T {
            fn walk(&self, _: &str, _: &mut dyn FnMut(&str, ModuleItem<'_>)) {}
        }
    )*};
}
without_tensors!(usize, isize, i32, i64, u32, u64, f32, f64, bool, String, &'static str, ());
// Arguments of layers.
without_tensors!((isize, isize), (usize, usize), PerDim, Reduction);

impl<M: Module> Module for Vec<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        for (i, module) in self.iter().enumerate() {
            module.walk(&join(path, &i.to_string()), visit);
        }
    }
}

impl<M: Module> Module for Option<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        if let Some(module) = self {
            module.walk(path, visit);
        }
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        (**self).walk(path, visit);
    }
}

impl<M: Module + ?Sized> Module for Arc<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) {
        (**self).walk(path, visit);
    }
}
