//! What an optimizer is: settings, named state per parameter, and what a step does to one parameter.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::param_step::ParamStep;
use crate::error::Result;

/// An optimizer. The fields of the type are its hyperparameters, which every parameter group has of its own.
///
/// [`step`](Self::step) updates one parameter, in one of two ways:
///
/// * element by element, on what each rank holds, in one pass over memory: [`ParamStep::elementwise`];
/// * with the whole tensor in view: [`ParamStep::gradient`] and [`ParamStep::state`] are [`DTensor`](crate::DTensor)s, on
///   which any operator works and may communicate; [`ParamStep::apply`] writes the result.
///
/// Everything else comes along: parameter groups, schedules, `maximize`, f32 copies of half-precision parameters, dry runs,
/// and state that is saved by name and continues in another layout or world size.
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
///     fn step(&self, at: &mut ParamStep<'_>) -> Result<()> {
///         let (lr, keep) = (at.lr(), self.momentum);
///         at.elementwise(["momentum"], move |p: f64, g: f64, [m]: [f64; 1]| {
///             let m = keep * m + g;
///             (p - lr * m.signum(), [m])
///         })
///     }
/// }
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let w = Param::new(&DTensor::full(3.0, (5, DType::F32), &mesh, [Shard(0)])?);
///     let mut optimizer = ShardedOptimizer::new([("w".to_string(), w.clone())], SignSgd { momentum: 0.9 })?;
///     optimizer.groups_mut()[0].lr = 0.5;
///     optimizer.step(w.get().square()?.sum_all()?.backward()?)?;
///     assert_eq!(w.get().full_tensor()?.to_vec1::<f32>()?, [2.5; 5]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait Optimizer: fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Name under which settings are stored, in lower case: a state is loaded only into an optimizer of the same name.
    const NAME: &'static str;

    /// Learning rate of a group that does not set one.
    const DEFAULT_LR: f64 = 1e-3;

    /// Tensors that are kept for a parameter of a shape, such as moments. May depend on the settings.
    fn state(&self, shape: &[usize]) -> Vec<StateTensor>;

    /// Numbers that are kept per parameter, with their values before the first step.
    ///
    /// By default the number of steps, `step`, which is counted for every optimizer that lists it; see
    /// [`ParamStep::count`].
    fn numbers(&self) -> &'static [(&'static str, f64)] {
        &[("step", 0.0)]
    }

    /// Checks the settings. Called when a group is added or loaded and before every step.
    ///
    /// # Errors
    /// Should return [`Error::Invalid`](crate::Error::Invalid) that names the setting.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Checks that a parameter of this shape can be optimized. Called when the parameter is added.
    ///
    /// # Errors
    /// Should return [`Error::Invalid`](crate::Error::Invalid) that names the shape.
    fn check_shape(&self, _shape: &[usize]) -> Result<()> {
        Ok(())
    }

    /// Updates one parameter. Runs on all ranks, for the parameters in the order in which they were added; records no
    /// gradients.
    fn step(&self, at: &mut ParamStep<'_>) -> Result<()>;
}

/// A tensor that an optimizer keeps for a parameter.
///
/// Its layout follows from that of the parameter: a dimension that has the size of the same dimension of the parameter is
/// sharded like it, all others are replicated; with another number of dimensions, the whole tensor is replicated.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Name in checkpoints, such as `exp_avg`.
    pub name: &'static str,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Value of all elements before the first step.
    pub initial: f64,
}

impl StateTensor {
    /// A tensor that starts with zeros.
    pub fn zeros(name: &'static str, shape: impl Into<Vec<usize>>) -> Self {
        StateTensor::full(name, shape, 0.0)
    }

    /// A tensor that starts with one value everywhere.
    pub fn full(name: &'static str, shape: impl Into<Vec<usize>>, initial: f64) -> Self {
        StateTensor { name, shape: shape.into(), initial }
    }
}
