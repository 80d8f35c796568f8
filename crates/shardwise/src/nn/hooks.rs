//! Methods of `Hooks`: registering hooks, and running a module between them.

use std::panic::Location;
use std::sync::Arc;

use candle_core::DType;

use super::module::{Hook, Hooks, Layer, Module, ModuleItem, RegisteredHooks};
use crate::comm::{SpanKind, begin_span};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::module_scope::{current_path, in_module, user_site};
use crate::tensor::DTensor;

impl Hooks {
    /// Creates the hooks of the module at a path.
    pub(super) fn at(path: &str) -> Self {
        let hooks = Hooks::default();
        hooks.note_path(path);
        hooks
    }

    /// Records the path at which a walk meets the module. A walk that begins inside the model sees the end of the path only,
    /// which does not replace a longer one.
    pub(super) fn note_path(&self, path: &str) {
        let known = &mut self.0.lock().path;
        let shortened = |known: &str| {
            known.strip_suffix(path).is_some_and(|rest| path.is_empty() || rest.is_empty() || rest.ends_with('.'))
        };
        if !path.is_empty() && !known.as_deref().is_some_and(shortened) {
            *known = Some(path.into());
        }
    }

    /// Registers a hook for the input, or the first of several. Hooks run in the order in which they were registered.
    #[doc(alias = "register_forward_pre_hook")]
    pub fn on_input(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.on_input_at(0, hook);
    }

    /// Registers a hook for the output, or the first of several. Hooks run in the order in which they were registered.
    #[doc(alias = "register_forward_hook")]
    pub fn on_output(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.on_output_at(0, hook);
    }

    /// Registers a hook for input `index`, from 0, of a module with several; see [`run_all`](Self::run_all).
    pub fn on_input_at(&self, index: usize, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().input.push((index, Arc::new(hook)));
    }

    /// Registers a hook for output `index`, from 0, of a module with several; see [`run_all`](Self::run_all).
    pub fn on_output_at(&self, index: usize, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().output.push((index, Arc::new(hook)));
    }

    /// Replaces the module by a layer; its hooks stay and run around the layer.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use shardwise::nn::{Builder, Forward, Linear, Module};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let layer = Linear::new(&Builder::new(&mesh), 4, 6)?;
    ///     layer.hooks.replace(Arc::new(Linear::without_bias(&Builder::new(&mesh), 4, 3)?));
    ///     let y = layer.forward(&DTensor::ones((2, 4), DType::F32, &mesh, [Replicate])?)?;
    ///     assert_eq!(y.shape(), [2, 3]);
    ///     assert_eq!(layer.parameter_count(), 12);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn replace(&self, layer: Arc<dyn Layer>) {
        self.0.lock().replacement = Some(layer);
    }

    /// Ends the replacement of the module: it runs itself again. Its hooks stay.
    pub fn restore(&self) {
        self.0.lock().replacement = None;
    }

    /// Returns the layer that replaces the module, if there is one.
    pub fn replacement(&self) -> Option<Arc<dyn Layer>> {
        self.0.lock().replacement.clone()
    }

    /// Converts floating-point inputs of the module to `input`, and its floating-point outputs to `output`. `None` converts
    /// nothing. [`FsdpModule::set_mixed_precision`](super::FsdpModule::set_mixed_precision) sets both.
    pub fn convert(&self, input: Option<DType>, output: Option<DType>) {
        let mut registered = self.0.lock();
        (registered.input_dtype, registered.output_dtype) = (input, output);
    }

    /// Removes all hooks, conversions and the replacement.
    pub fn clear(&self) {
        let mut registered = self.0.lock();
        *registered = RegisteredHooks { path: registered.path.take(), ..RegisteredHooks::default() };
    }

    /// Runs input hooks, then the module's computation or its replacement, then output hooks.
    ///
    /// Errors name the path of the module and the line that called its `forward`: every
    /// [`Forward::forward`](super::Forward::forward) is `#[track_caller]`.
    #[track_caller]
    pub fn run(&self, x: &DTensor, compute: impl FnOnce(&DTensor) -> Result<DTensor>) -> Result<DTensor> {
        // Cloned, so that the lock is not held while hooks run: a hook may register another.
        let RegisteredHooks { input, output, replacement, input_dtype, output_dtype, path } = self.0.lock().clone();
        in_this_module(path, Location::caller(), || {
            let compute = |x: &DTensor| replacement.map_or_else(|| compute(x), |layer| layer.forward(x));
            if input.is_empty() && output.is_empty() && input_dtype.is_none() && output_dtype.is_none() {
                return compute(x);
            }
            let x = converted(x, input_dtype)?;
            let [x] = &run_hooks("input", &input, vec![x])?[..] else { unreachable!("one in, one out") };
            converted(&run_hooks("output", &output, vec![compute(x)?])?[0], output_dtype)
        })
    }

    /// As [`run`](Self::run), for a module with several inputs and outputs; hooks run on each by its position.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is a hook for an input or output that the module does not have, or the module was replaced
    /// by a layer with one input.
    #[track_caller]
    pub fn run_all(
        &self,
        inputs: &[&DTensor],
        compute: impl FnOnce(&[DTensor]) -> Result<Vec<DTensor>>,
    ) -> Result<Vec<DTensor>> {
        let RegisteredHooks { input, output, replacement, input_dtype, output_dtype, path } = self.0.lock().clone();
        in_this_module(path, Location::caller(), || {
            if replacement.is_some() {
                return Err(replaced_error("forward_all"));
            }
            let inputs = inputs.iter().map(|x| converted(x, input_dtype)).collect::<Result<_>>()?;
            let inputs = run_hooks("input", &input, inputs)?;
            let outputs = run_hooks("output", &output, compute(&inputs)?)?;
            outputs.iter().map(|y| converted(y, output_dtype)).collect()
        })
    }

    /// Runs a norm of `x + branch`: `fused`, which returns the sum and its norm, in the scope of the module; or, if hooks or a
    /// replacement have to see the sum, the addition and then `forward`.
    #[track_caller]
    pub(crate) fn run_residual(
        &self,
        x: &DTensor,
        branch: &DTensor,
        forward: &dyn Fn(&DTensor) -> Result<DTensor>,
        fused: impl FnOnce(&DTensor, &DTensor) -> Result<(DTensor, DTensor)>,
    ) -> Result<(DTensor, DTensor)> {
        let RegisteredHooks { input, output, replacement, input_dtype, output_dtype, path } = self.0.lock().clone();
        let is_plain = input.is_empty() && output.is_empty() && replacement.is_none() && output_dtype.is_none();
        if is_plain && input_dtype.is_none_or(|dtype| x.dtype() == dtype && branch.dtype() == dtype) {
            return in_this_module(path, Location::caller(), || fused(x, branch));
        }
        let sum = x.add(branch)?;
        let normal = forward(&sum)?;
        Ok((sum, normal))
    }

    /// Whether the output is that of a replacement, or goes through hooks: nothing can be computed together with what follows.
    pub(super) fn change_output(&self) -> bool {
        let registered = self.0.lock();
        registered.replacement.is_some() || !registered.output.is_empty() || registered.output_dtype.is_some()
    }

    /// As [`run`](Self::run), for a computation with more arguments than `x`, which a replacement does not have: an error if
    /// there is one.
    #[track_caller]
    pub(crate) fn run_own(
        &self,
        what: &str,
        x: &DTensor,
        compute: impl FnOnce(&DTensor) -> Result<DTensor>,
    ) -> Result<DTensor> {
        if self.replacement().is_some() {
            return Err(replaced_error(what));
        }
        self.run(x, compute)
    }

    /// Walks the replacement under the module's path and returns true, if there is one; for implementations of
    /// [`Module::walk`], where `name` is the name of this field. `#[derive(Module)]` generates the call.
    ///
    /// The hooks of the replacement itself are not visited, since those of the module are at the same path.
    pub fn walk_replacement(&self, path: &str, name: &str, visit: &mut dyn FnMut(&str, ModuleItem<'_>)) -> bool {
        let Some(layer) = self.replacement() else { return false };
        self.note_path(path);
        let inside = super::join(path, "");
        layer.walk(path, &mut |inner, item| match item {
            ModuleItem::Hooks(_) if inner.strip_prefix(&inside).is_some_and(|field| !field.contains('.')) => {}
            item => visit(inner, item),
        });
        visit(&super::join(path, name), ModuleItem::Hooks(self));
        true
    }
}

/// Runs `body` as the computation of the module at a path; errors get the path.
fn in_this_module<R>(path: Option<Arc<str>>, site: Site, body: impl FnOnce() -> Result<R>) -> Result<R> {
    in_module(path, site, || {
        let _span = begin_span(SpanKind::Module, "", Some(site));
        body().map_err(|error| match current_path() {
            Some(path) => error.in_module(path, user_site(site)),
            None => error,
        })
    })
}

/// Converts a tensor of a floating-point type; tensors of integers, such as token ids, stay as they are.
#[track_caller]
fn converted(tensor: &DTensor, dtype: Option<DType>) -> Result<DTensor> {
    dtype.filter(|_| tensor.dtype().is_float()).map_or_else(|| Ok(tensor.clone()), |dtype| tensor.to_dtype(dtype))
}

/// Applies hooks to the inputs or outputs at their positions.
fn run_hooks(what: &str, hooks: &[(usize, Hook)], mut tensors: Vec<DTensor>) -> Result<Vec<DTensor>> {
    for (index, hook) in hooks {
        let count = tensors.len();
        let tensor = tensors.get_mut(*index).ok_or_else(|| {
            let found = format!("a hook for {what} {index} of a module with {count}");
            ErrorKind::Argument.error::<Error>(
                "hook",
                found,
                format!("the number of an {what}, from 0"),
                "correct the number",
            )
        })?;
        *tensor = hook(tensor)?;
    }
    Ok(tensors)
}

fn replaced_error(what: &str) -> Error {
    let found = format!("{what} of a module that was replaced by a layer with one input");
    ErrorKind::Model.error("module", found, "a module as it was built", "call forward, or clear its hooks")
}
