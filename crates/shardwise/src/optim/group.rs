//! Parameter groups.

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
}

impl ParamGroup {
    /// A group with the default learning rate of the optimizer.
    pub fn new(algorithm: impl Into<Algorithm>) -> Self {
        let algorithm = algorithm.into();
        let lr = algorithm.default_lr();
        ParamGroup { algorithm, lr, maximize: false, master: false }
    }

    /// Sets the learning rate.
    pub fn with_lr(self, lr: f64) -> Self {
        ParamGroup { lr, ..self }
    }

    /// Keeps master weights: f32 copies of half-precision parameters.
    pub fn with_master(self) -> Self {
        ParamGroup { master: true, ..self }
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
        self.algorithm.check()
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
