//! Functions that a module applies to its input and output.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::Result;
use crate::tensor::DTensor;

/// A function of a tensor.
type Hook = Arc<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;

/// The hooks of one module; a field of it. Clones share them.
#[derive(Clone, Default)]
pub struct Hooks(Arc<Mutex<Registered>>);

#[derive(Clone, Default)]
struct Registered {
    input: Vec<Hook>,
    output: Vec<Hook>,
}

impl Hooks {
    /// Applies `hook` to every input from now on, after those registered before.
    pub fn on_input(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().input.push(Arc::new(hook));
    }

    /// Applies `hook` to every output from now on, after those registered before.
    pub fn on_output(&self, hook: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static) {
        self.0.lock().output.push(Arc::new(hook));
    }

    /// Forgets all hooks.
    pub fn clear(&self) {
        *self.0.lock() = Registered::default();
    }

    /// Runs a module's computation between its hooks.
    pub fn run(&self, x: &DTensor, compute: impl FnOnce(&DTensor) -> Result<DTensor>) -> Result<DTensor> {
        // Not held while they run: a hook may register another.
        let Registered { input, output } = self.0.lock().clone();
        if input.is_empty() && output.is_empty() {
            return compute(x);
        }
        let x = input.iter().try_fold(x.clone(), |x, hook| hook(&x))?;
        output.iter().try_fold(compute(&x)?, |y, hook| hook(&y))
    }
}
