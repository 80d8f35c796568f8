//! Parameter groups.

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::algorithm::Algorithm;
use super::optimizer::Optimizer;
use crate::error::{ErrorKind, Result};

/// Settings of a group of parameters: the optimizer, the learning rate, and more.
///
/// An optimizer such as [`AdamW`](super::AdamW) converts into a group with its default learning rate.
#[doc(alias = "param_groups")]
///
/// ```
/// use shardwise::optim::{AdamW, ParamGroup};
///
/// let group = ParamGroup::new(AdamW { weight_decay: 0.1, ..AdamW::default() }).with_lr(3e-4);
/// assert_eq!((group.lr, group.maximize), (3e-4, false));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// The optimizer with its hyperparameters.
    pub algorithm: Algorithm,
    /// Learning rate; the base rate of a [`Schedule`](super::Schedule).
    pub lr: f64,
    /// Whether the objective is maximized instead of minimized.
    pub maximize: bool,
    /// Whether master weights are kept: f32 copies of half-precision parameters, in which small updates add up.
    #[doc(alias = "master_weights")]
    pub master: bool,
    /// Element type of the state and in which steps are computed: f32 or f64. `None`: f32, and f64 for parameters of f64.
    ///
    /// A choice of the program, like the type of a parameter: it is not stored, and a loaded state is converted to it.
    #[serde(skip)]
    pub state_dtype: Option<DType>,
}

impl ParamGroup {
    /// A group with the default learning rate of the optimizer.
    pub fn new(algorithm: impl Into<Algorithm>) -> Self {
        let algorithm = algorithm.into();
        let lr = algorithm.default_lr();
        ParamGroup { algorithm, lr, maximize: false, master: false, state_dtype: None }
    }

    /// Sets the learning rate.
    pub fn with_lr(self, lr: f64) -> Self {
        ParamGroup { lr, ..self }
    }

    /// Keeps master weights: f32 copies of half-precision parameters.
    pub fn with_master(self) -> Self {
        ParamGroup { master: true, ..self }
    }

    /// Keeps the state, such as moments, in f64 (or f32) whatever the type of the parameters, and computes steps in that type.
    ///
    /// ```
    /// use shardwise::optim::ParamGroup;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let w = Param::new(&DTensor::ones(4, DType::F32, &mesh, [Shard(0)])?);
    ///     let group = ParamGroup::new(AdamW::default()).with_state_dtype(DType::F64);
    ///     let optimizer = ShardedOptimizer::new([("w".to_string(), w)], group)?;
    ///     assert_eq!(optimizer.state_dict()?.params["w"].tensors["exp_avg"].dtype(), DType::F64);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn with_state_dtype(self, dtype: DType) -> Self {
        ParamGroup { state_dtype: Some(dtype), ..self }
    }

    /// Maximizes the objective instead of minimizing it.
    pub fn maximizing(self) -> Self {
        ParamGroup { maximize: true, ..self }
    }

    /// Checks learning rate and hyperparameters.
    pub(super) fn check(&self) -> Result<()> {
        if !(self.lr >= 0.0 && self.lr.is_finite()) {
            return Err(ErrorKind::Optimizer.error(
                "learning rate",
                self.lr,
                "a number that is at least 0",
                "correct `lr`",
            ));
        }
        if let Some(dtype) = self.state_dtype.filter(|dtype| !matches!(dtype, DType::F32 | DType::F64)) {
            return Err(ErrorKind::dtype(dtype).error(
                "element type of optimizer state",
                dtype.as_str(),
                "f32 or f64",
                "correct `state_dtype`",
            ));
        }
        self.algorithm.check()
    }

    /// Element type of the state of a parameter of type `param`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the state is to be f32 and the parameter is f64: a step is computed in the type
    /// of the state, and would round the parameter.
    pub(super) fn state_dtype_of(&self, param: DType) -> Result<DType> {
        match (self.state_dtype, param) {
            (Some(DType::F32), DType::F64) => Err(ErrorKind::dtype(DType::F32).error(
                "element type of optimizer state",
                "f32 for a parameter of f64, which every step would round",
                "f64",
                "leave `state_dtype` out, or convert the parameter to f32",
            )),
            (Some(dtype), _) => Ok(dtype),
            (None, DType::F64) => Ok(DType::F64),
            (None, _) => Ok(DType::F32),
        }
    }
}

impl<O: Optimizer> From<O> for ParamGroup {
    fn from(optimizer: O) -> Self {
        ParamGroup::new(optimizer)
    }
}

impl From<Algorithm> for ParamGroup {
    fn from(algorithm: Algorithm) -> Self {
        ParamGroup::new(algorithm)
    }
}
