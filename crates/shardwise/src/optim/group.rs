//! Groups of parameters that are optimized alike.

use serde::{Deserialize, Serialize};

use super::algorithm::Algorithm;
use super::optimizer::Optimizer;
use crate::error::{ErrorKind, Result};

/// How some parameters are optimized. An optimizer converts into a group with its usual learning rate.
///
/// ```
/// use shardwise::optim::{AdamW, ParamGroup};
///
/// let group = ParamGroup::new(AdamW { weight_decay: 0.1, ..AdamW::default() }).with_lr(3e-4);
/// assert_eq!((group.lr, group.maximize), (3e-4, false));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// The optimizer with its settings.
    pub algorithm: Algorithm,
    /// The learning rate, on which a [`Schedule`](super::Schedule) builds.
    pub lr: f64,
    /// Whether parameters follow their gradients instead of going against them.
    pub maximize: bool,
    /// Whether an f32 copy is kept of parameters of a half-precision type, in which small changes add up.
    pub master: bool,
}

impl ParamGroup {
    /// An optimizer with its usual learning rate.
    pub fn new(algorithm: impl Into<Algorithm>) -> Self {
        let algorithm = algorithm.into();
        let lr = algorithm.default_lr();
        ParamGroup { algorithm, lr, maximize: false, master: false }
    }

    /// The same with another learning rate.
    pub fn with_lr(self, lr: f64) -> Self {
        ParamGroup { lr, ..self }
    }

    /// The same with an f32 copy of parameters of a half-precision type.
    pub fn with_master(self) -> Self {
        ParamGroup { master: true, ..self }
    }

    /// The same, following gradients upwards.
    pub fn maximizing(self) -> Self {
        ParamGroup { maximize: true, ..self }
    }

    /// An error if a setting makes no sense.
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
