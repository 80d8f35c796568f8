//! The trait of optimizers: hyperparameters, named state per parameter, and the update of one parameter.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::param_step::ParamStep;
use crate::error::Result;

/// An optimization algorithm; implement it for a custom one. The fields of the type are its hyperparameters.
///
/// [`step`](Self::step) updates one parameter, in one of two ways:
///
/// * element by element, on the local shard, in one pass over memory: [`ParamStep::elementwise`];
/// * with distributed operators: [`ParamStep::gradient`] and [`ParamStep::state`] are [`DTensor`](crate::DTensor)s of the full
///   shape, on which any operator works and may communicate; [`ParamStep::apply`] writes the result.
///
/// [`ShardedOptimizer`](super::ShardedOptimizer) provides the rest: parameter groups, schedules, `maximize`, master weights
/// of half-precision parameters, dry runs, and state that is saved by name and loaded in another layout or world size.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use shardwise::optim::{Optimizer, ParamStep, ShardedOptimizer, StateTensor};
/// use shardwise::prelude::*;
///
/// /// SignSGD with momentum.
/// #[derive(Debug, Serialize, Deserialize)]
/// struct SignSgd {
///     momentum: f64,
/// }
///
/// impl Optimizer for SignSgd {
///     const NAME: &'static str = "signsgd";
///
///     fn state(&self, shape: &[usize]) -> Vec<StateTensor> {
///         vec![StateTensor::zeros("momentum", shape)]
///     }
///
///     fn step(&self, step: &mut ParamStep<'_>) -> Result<()> {
///         let (lr, keep) = (step.lr(), self.momentum);
///         step.elementwise(["momentum"], move |p: f64, g: f64, [m]: [f64; 1]| {
///             let m = keep * m + g;
///             (p - lr * m.signum(), [m])
///         })
///     }
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let w = Param::new(&DTensor::full(3.0, 5, DType::F32, &mesh, [Shard(0)])?);
///     let mut optimizer = ShardedOptimizer::new([("w".to_string(), w.clone())], SignSgd { momentum: 0.9 })?;
///     optimizer.groups_mut()[0].lr = 0.5;
///     optimizer.step(w.get().square()?.sum_all()?.backward()?)?;
///     assert_eq!(w.get().full_tensor()?.to_vec1::<f32>()?, [2.5; 5]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait Optimizer: fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Name in checkpoints, in lower case. A state is loaded only into an optimizer of the same name.
    const NAME: &'static str;

    /// Learning rate of groups that do not set one.
    const DEFAULT_LR: f64 = 1e-3;

    /// State tensors of a parameter of a shape, such as moments. May depend on the hyperparameters.
    fn state(&self, shape: &[usize]) -> Vec<StateTensor>;

    /// State numbers of a parameter, with their initial values.
    ///
    /// By default the number of steps, `step`, which is counted automatically for every optimizer that lists it
    /// ([`ParamStep::count`]).
    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[("step", 0.0)]
    }

    /// Checks the hyperparameters. Called when a group is added or loaded and before every step.
    ///
    /// # Errors
    /// Should return [`Error::Invalid`](crate::Error::Invalid) that names the setting.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Checks that parameters of this shape are supported. Called when a parameter is added.
    ///
    /// # Errors
    /// Should return [`Error::Invalid`](crate::Error::Invalid) that names the shape.
    fn check_shape(&self, _shape: &[usize]) -> Result<()> {
        Ok(())
    }

    /// Updates one parameter. Called on all ranks, for parameters in the order in which they were added, so that it may
    /// communicate; without recording gradients.
    fn step(&self, step: &mut ParamStep<'_>) -> Result<()>;
}

/// A state tensor that an optimizer keeps for a parameter.
///
/// Its layout follows from that of the parameter: dimensions of the same size are sharded alike, other dimensions are not
/// sharded. With another number of dimensions than the parameter, the tensor is replicated.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Name in checkpoints, such as `exp_avg`.
    pub name: &'static str,
    /// Shape of the full tensor.
    pub shape: Vec<usize>,
    /// Initial value of all elements.
    pub initial: f64,
}

impl StateTensor {
    /// A tensor of zeros.
    pub fn zeros(name: &'static str, shape: impl Into<Vec<usize>>) -> Self {
        StateTensor::full(name, shape, 0.0)
    }

    /// A tensor filled with one initial value.
    pub fn full(name: &'static str, shape: impl Into<Vec<usize>>, initial: f64) -> Self {
        StateTensor { name, shape: shape.into(), initial }
    }
}
