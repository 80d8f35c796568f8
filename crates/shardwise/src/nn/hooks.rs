//! Functions that a module applies to its input and output, and a module that stands in for it.

use std::panic::Location;
use std::sync::Arc;

use super::module::{Hook, Hooks, Item, Layer, Module, Registered};
use crate::error::{Error, ErrorKind, Result, Site};
use crate::module_scope::{current_path, in_module, user_site};
use crate::tensor::DTensor;

impl Hooks {
    /// Hooks of the module at a path.
    pub(super) fn at(path: &str) -> Self {
        let hooks = Hooks::default();
        hooks.name(path);
        hooks
    }

    /// Notes the path at which a walk meets the module. A walk that begins inside the model sees the end of the path only,
    /// which does not replace a longer one.
    pub(super) fn name(&self, path: &str) {
        let known = &mut self.0.lock().path;
        let shortened = |known: &str| {
            known.strip_suffix(path).is_some_and(|rest| path.is_empty() || rest.is_empty() || rest.ends_with('.'))
        };
        if !path.is_empty() && !known.as_deref().is_some_and(shortened) {
            *known = Some(path.into());
        }
    }

    /// Applies `hook` to the input, or the first of several, from now on, after those registered before.
    #[doc(alias = "register_forward_pre_hook")]
    pub fn on_input(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.on_input_at(0, hook);
    }

    /// Applies `hook` to the output, or the first of several, from now on, after those registered before.
    #[doc(alias = "register_forward_hook")]
    pub fn on_output(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.on_output_at(0, hook);
    }

    /// Applies `hook` to one of several inputs, counted from 0, from now on: see [`run_all`](Self::run_all).
    pub fn on_input_at(&self, index: usize, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().input.push((index, Arc::new(hook)));
    }

    /// Applies `hook` to one of several outputs, counted from 0, from now on: see [`run_all`](Self::run_all).
    pub fn on_output_at(&self, index: usize, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().output.push((index, Arc::new(hook)));
    }

    /// Puts a layer in the place of the module, between the hooks.
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

    /// The layer that stands in the place of the module.
    pub fn replacement(&self) -> Option<Arc<dyn Layer>> {
        self.0.lock().replacement.clone()
    }

    /// Forgets all hooks, and the replacement.
    pub fn clear(&self) {
        let mut registered = self.0.lock();
        *registered = Registered { path: registered.path.take(), ..Registered::default() };
    }

    /// Runs a module's computation, or its replacement, between its hooks. Errors name the path of the module and the line
    /// that called the function that calls this, if that is `#[track_caller]`, as every [`Forward::forward`](super::Forward::forward) is.
    #[track_caller]
    pub fn run(&self, x: &DTensor, compute: impl FnOnce(&DTensor) -> Result<DTensor>) -> Result<DTensor> {
        // Not held while they run: a hook may register another.
        let Registered { input, output, replacement, path } = self.0.lock().clone();
        in_this_module(path, Location::caller(), || {
            let compute = |x: &DTensor| replacement.map_or_else(|| compute(x), |layer| layer.forward(x));
            if input.is_empty() && output.is_empty() {
                return compute(x);
            }
            let [x] = &hooked("input", &input, vec![x.clone()])?[..] else { unreachable!("one in, one out") };
            Ok(hooked("output", &output, vec![compute(x)?])?.swap_remove(0))
        })
    }

    /// As [`run`](Self::run), for a module with several inputs and outputs: hooks prepare each of them.
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
        let Registered { input, output, replacement, path } = self.0.lock().clone();
        in_this_module(path, Location::caller(), || {
            if replacement.is_some() {
                return Err(replaced("forward_all"));
            }
            let inputs = hooked("input", &input, inputs.iter().map(|&x| x.clone()).collect())?;
            hooked("output", &output, compute(&inputs)?)
        })
    }

    /// As [`run`](Self::run), for a computation that a replacement cannot do, because it needs more than its input.
    #[track_caller]
    pub(super) fn run_own(
        &self,
        what: &str,
        x: &DTensor,
        compute: impl FnOnce(&DTensor) -> Result<DTensor>,
    ) -> Result<DTensor> {
        if self.replacement().is_some() {
            return Err(replaced(what));
        }
        self.run(x, compute)
    }

    /// Walks the replacement under the module's path, if there is one; for the `walk` of the module whose field `name`
    /// this is. Of the two hooks at one path those of the module count.
    pub fn walk_replacement(&self, path: &str, name: &str, visit: &mut dyn FnMut(&str, Item<'_>)) -> bool {
        let Some(layer) = self.replacement() else { return false };
        self.name(path);
        let at = super::join(path, "");
        layer.walk(path, &mut |inner, item| match item {
            Item::Hooks(_) if inner.strip_prefix(&at).is_some_and(|field| !field.contains('.')) => {}
            item => visit(inner, item),
        });
        visit(&super::join(path, name), Item::Hooks(self));
        true
    }
}

/// Runs `body` as the computation of the module at a path, which its errors name.
fn in_this_module<R>(path: Option<Arc<str>>, site: Site, body: impl FnOnce() -> Result<R>) -> Result<R> {
    in_module(path, site, || {
        body().map_err(|error| match current_path() {
            Some(path) => error.in_module(path, user_site(site)),
            None => error,
        })
    })
}

/// Tensors as hooks leave them.
fn hooked(what: &str, hooks: &[(usize, Hook)], mut tensors: Vec<DTensor>) -> Result<Vec<DTensor>> {
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

fn replaced(what: &str) -> Error {
    let found = format!("{what} of a module that was replaced by a layer with one input");
    ErrorKind::Model.error("module", found, "a module as it was built", "call forward, or clear its hooks")
}
