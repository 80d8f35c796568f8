//! What a module is: something whose parameters, buffers and parts can be walked by path.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use candle_core::{DType, Device};
use parking_lot::Mutex;

use super::hints::{Heads, PlanHints};
use super::state_dict::{Loaded, StateDictOptions};
use crate::error::{ErrorKind, Result};
use crate::param::Param;
use crate::placement::Placement;
use crate::tensor::DTensor;

/// What a walk over a module meets.
pub enum Item<'a> {
    /// A module of a kind; what is inside follows.
    Module(&'static str),
    /// A parameter.
    Param(&'a Param),
    /// A tensor that belongs to the state but is not trained.
    Buffer(&'a Buffer),
    /// Whether the module is being trained.
    Mode(&'a Mode),
    /// Functions to be applied to its input and output.
    Hooks(&'a Hooks),
    /// How many heads the linear layers of the module are made of.
    Heads(Heads),
    /// What planners cannot see in the parameters of the module.
    Hints(&'a PlanHints),
}

/// A struct of parameters, buffers and other modules. Derive it.
pub trait Module {
    /// Calls `visit` with every item, each with its dotted path, in order of declaration.
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>));

    /// All parameters with their dotted paths. One that two modules share is listed once, under its first path.
    fn named_parameters(&self) -> Vec<(String, Param)> {
        let mut all: Vec<(String, Param)> = Vec::new();
        self.walk("", &mut |path, item| {
            if let Item::Param(param) = item
                && !all.iter().any(|(_, p)| p.is_same(param))
            {
                all.push((path.to_string(), param.clone()));
            }
        });
        all
    }

    /// All buffers with their dotted paths.
    fn named_buffers(&self) -> Vec<(String, Buffer)> {
        let mut all = Vec::new();
        self.walk("", &mut |path, item| {
            if let Item::Buffer(buffer) = item {
                all.push((path.to_string(), buffer.clone()));
            }
        });
        all
    }

    /// All modules inside, itself first, with their dotted paths and kinds.
    fn named_modules(&self) -> Vec<(String, &'static str)> {
        let mut all = Vec::new();
        self.walk("", &mut |path, item| {
            if let Item::Module(kind) = item {
                all.push((path.to_string(), kind));
            }
        });
        all
    }

    /// The number of elements of all parameters.
    fn parameter_count(&self) -> usize {
        self.named_parameters().iter().map(|(_, p)| p.shape().iter().product::<usize>()).sum()
    }

    /// Modules inside behave as in training: dropout drops, batch norm takes its statistics from the batch.
    fn train(&self) {
        self.set_mode(true);
    }

    /// Modules inside behave as in use.
    fn eval(&self) {
        self.set_mode(false);
    }

    /// Training or not.
    fn set_mode(&self, training: bool) {
        self.walk("", &mut |_, item| {
            if let Item::Mode(mode) = item {
                mode.0.store(training, Relaxed);
            }
        });
    }

    /// Converts all floating-point parameters and buffers.
    fn to_dtype(&self, dtype: DType) -> Result<()> {
        self.change(&|tensor| if tensor.dtype().is_float() { tensor.to_dtype(dtype) } else { Ok(tensor.clone()) })
    }

    /// Moves all parameters and buffers to a device.
    fn to_device(&self, device: &Device) -> Result<()> {
        self.change(&|tensor| tensor.to_device(device))
    }

    /// Replaces the value of every parameter and buffer by a function of it.
    fn change(&self, f: &dyn Fn(&DTensor) -> Result<DTensor>) -> Result<()> {
        for (_, param) in self.named_parameters() {
            param.set(&f(&param.get().detach())?)?;
        }
        for (_, buffer) in self.named_buffers() {
            buffer.set(&f(&buffer.get())?);
        }
        Ok(())
    }

    /// The values of all parameters and buffers by path.
    fn state_dict(&self) -> BTreeMap<String, DTensor> {
        let parameters = self.named_parameters().into_iter().map(|(path, p)| (path, p.get().detach()));
        parameters.chain(self.named_buffers().into_iter().map(|(path, b)| (path, b.get()))).collect()
    }

    /// As [`state_dict`](Self::state_dict), with the prefix of the options before every path.
    fn state_dict_with(&self, options: &StateDictOptions) -> BTreeMap<String, DTensor> {
        self.state_dict().into_iter().map(|(path, tensor)| (options.prefix.clone() + &path, tensor)).collect()
    }

    /// Sets all parameters and buffers, each brought to the layout and type that it has here.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with all names and shapes that do not fit; nothing changes then.
    fn load_state_dict(&self, state: &BTreeMap<String, DTensor>) -> Result<()> {
        self.load_state_dict_with(state, &StateDictOptions::default()).map(drop)
    }

    /// As [`load_state_dict`](Self::load_state_dict), with names matched as the options say. Returns those that did not match.
    fn load_state_dict_with(&self, state: &BTreeMap<String, DTensor>, options: &StateDictOptions) -> Result<Loaded> {
        let own = self.state_dict();
        let given = |name: &str| state.get(&(options.prefix.clone() + name));
        let reshaped: Vec<&String> =
            own.iter().filter(|(n, t)| given(n).is_some_and(|s| s.shape() != t.shape())).map(|(n, _)| n).collect();
        let loaded = options.compare(&own.keys().collect::<Vec<_>>(), state.keys().map(String::as_str));
        if !reshaped.is_empty() {
            let names = loaded.map_or_else(|error| format!("; {error}"), |_| String::new());
            let found = format!("other shapes of {reshaped:?}{names}");
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
                param.set(&fitted(value, &param.get())?)?;
            }
        }
        for (name, buffer) in self.named_buffers() {
            if let Some(value) = given(&name) {
                buffer.set(&fitted(value, &buffer.get())?);
            }
        }
        Ok(loaded)
    }
}

/// A value in the type and layout of another.
fn fitted(value: &DTensor, like: &DTensor) -> Result<DTensor> {
    let value = value.to_dtype(like.dtype())?;
    if value.device_mesh() == like.device_mesh() {
        return value.to_layout(like.layout());
    }
    let whole = vec![Placement::Replicate; like.placements().len()];
    value.to_mesh(like.device_mesh(), whole)?.to_layout(like.layout())
}

/// A module with one input and one output.
pub trait Forward {
    /// The output for an input.
    ///
    /// `#[track_caller]` holds for every implementation, so that errors inside a layer name the line that called it.
    #[track_caller]
    fn forward(&self, x: &DTensor) -> Result<DTensor>;
}

/// A module with several inputs and outputs.
///
/// Its hooks prepare each of them by number, as plans and parallel styles ask for
/// ([`ShardingPlan::input_at`](crate::plan::ShardingPlan::input_at)).
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
///     let at = Builder::new(&mesh);
///     let model = Gate { gate: Linear::new(&at.at("gate"), 4, 4)?, hooks: at.hooks() };
///     parallelize_module(&model, &mesh, &[("", &PrepareModuleInput::new("tp", Shard(0)).number(1))])?;
///     let x = DTensor::ones((2, 4), DType::F32, &mesh, [Replicate])?;
///     let outputs = model.forward_all(&[&x, &x])?;
///     assert_eq!(outputs[1].placements(), [Shard(0)]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait ForwardAll {
    /// The outputs for some inputs.
    ///
    /// `#[track_caller]` holds for every implementation, as for [`Forward::forward`].
    #[track_caller]
    fn forward_all(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>>;
}

/// A path and a name behind it.
pub fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}

/// A tensor that belongs to a module's state but is not trained. Clones share it.
#[doc(alias = "register_buffer")]
#[derive(Clone)]
pub struct Buffer(Arc<Mutex<DTensor>>);

impl Buffer {
    /// A buffer with a first value.
    pub fn new(value: &DTensor) -> Self {
        Buffer(Arc::new(Mutex::new(value.detach())))
    }

    /// The current value.
    pub fn get(&self) -> DTensor {
        self.0.lock().clone()
    }

    /// Replaces the value.
    pub fn set(&self, value: &DTensor) {
        *self.0.lock() = value.detach();
    }
}

/// Whether a module is being trained; it is until [`Module::eval`]. Clones share it.
#[doc(alias = "train")]
#[derive(Clone)]
pub struct Mode(Arc<AtomicBool>);

impl Default for Mode {
    fn default() -> Self {
        Mode(Arc::new(AtomicBool::new(true)))
    }
}

impl Mode {
    /// Whether the module is being trained.
    pub fn is_training(&self) -> bool {
        self.0.load(Relaxed)
    }
}

macro_rules! items {
    ($($T:ty => $item:ident;)*) => {$(
        impl Module for $T {
            fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
                visit(path, Item::$item(self));
            }
        }
    )*};
}
items! {
    Param => Param;
    Buffer => Buffer;
    Mode => Mode;
}

/// A function of a tensor.
pub(super) type Hook = Arc<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;

/// A module that can stand in for another one: it has one input and one output.
pub trait Layer: Module + Forward + Send + Sync {}

impl<M: Module + Forward + Send + Sync> Layer for M {}

/// The hooks of one module; a field of it. Clones share them.
///
/// A module whose hooks hold a replacement is that replacement: [`run`](Self::run) runs it, and a walk over the module
/// finds its parameters and not those of the module.
///
/// Hooks know the path of their module, for errors: from [`Builder::hooks`](super::Builder::hooks), or else from the last
/// walk over the model.
#[derive(Clone, Default)]
pub struct Hooks(pub(super) Arc<Mutex<Registered>>);

/// What is registered for one module.
#[derive(Clone, Default)]
pub(super) struct Registered {
    /// By number of the input.
    pub(super) input: Vec<(usize, Hook)>,
    /// By number of the output.
    pub(super) output: Vec<(usize, Hook)>,
    pub(super) replacement: Option<Arc<dyn Layer>>,
    /// The path of the module, unless it is unknown or the root.
    pub(super) path: Option<Arc<str>>,
}

impl Module for Heads {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        visit(path, Item::Heads(*self));
    }
}

impl Module for PlanHints {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        visit(path, Item::Hints(self));
    }
}

impl Module for Hooks {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        self.name(path.rsplit_once('.').map_or("", |(module, _)| module));
        visit(path, Item::Hooks(self));
    }
}

/// Fields that hold nothing to walk.
macro_rules! plain {
    ($($T:ty),*) => {$(
        impl Module for $T {
            fn walk(&self, _: &str, _: &mut dyn FnMut(&str, Item<'_>)) {}
        }
    )*};
}
plain!(usize, isize, i32, i64, u32, u64, f32, f64, bool, String, &'static str, ());

impl<M: Module> Module for Vec<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        for (i, module) in self.iter().enumerate() {
            module.walk(&join(path, &i.to_string()), visit);
        }
    }
}

impl<M: Module> Module for Option<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        if let Some(module) = self {
            module.walk(path, visit);
        }
    }
}

impl<M: Module + ?Sized> Module for Box<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        (**self).walk(path, visit);
    }
}

impl<M: Module + ?Sized> Module for Arc<M> {
    fn walk(&self, path: &str, visit: &mut dyn FnMut(&str, Item<'_>)) {
        (**self).walk(path, visit);
    }
}
