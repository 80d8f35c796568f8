//! `AdamW::default().over(&model)`: an optimizer over all trainable parameters of a module.

use super::ShardedOptimizer;
use super::group::ParamGroup;
use crate::error::{ErrorKind, Result};
use crate::nn::Module;

/// Creates a [`ShardedOptimizer`] over all trainable parameters of a module.
///
/// Implemented for everything that converts into a [`ParamGroup`]: any [`Optimizer`](super::Optimizer), an
/// [`Algorithm`](super::Algorithm), or a [`ParamGroup`] with more settings.
///
/// ```
/// use shardwise::nn::Linear;
/// use shardwise::optim::{ParamGroup, Schedule};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let model = Linear::new(&Builder::new(&mesh), 4, 6)?;
///     let schedule = Schedule::Cosine { warmup: 100, total: 1000, end: 0.1 };
///     let optimizer = AdamW { weight_decay: 0.1, ..AdamW::default() }.over(&model)?.with_schedule(schedule);
///     assert_eq!(optimizer.params().count(), 2);
///     let optimizer = ParamGroup::new(Sgd::default()).with_lr(0.1).over(&model)?;
///     assert_eq!(optimizer.groups()[0].lr, 0.1);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait OptimizeModule: Into<ParamGroup> + Sized {
    /// Creates an optimizer over all parameters of a module that are not frozen, named by their paths. Shared (tied) weights are
    /// one parameter.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if all parameters are frozen, and those of [`ShardedOptimizer::new`].
    fn over(self, module: &(impl Module + ?Sized)) -> Result<ShardedOptimizer> {
        let trainable = module.trainable_parameters();
        let frozen = module.named_parameters().len();
        if trainable.is_empty() && frozen > 0 {
            let found = format!("{frozen} parameters, all of them frozen");
            let fix = "call `set_requires_grad(true)` on what is to be trained";
            return Err(ErrorKind::Optimizer.error("parameters", found, "a trainable parameter", fix));
        }
        ShardedOptimizer::new(trainable, self)
    }
}

impl<G: Into<ParamGroup>> OptimizeModule for G {}
