//! The algorithms and their settings, with the defaults of PyTorch.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Declares the settings of an algorithm with their defaults.
macro_rules! settings {
    ($(#[$about:meta])* $Name:ident { $($(#[$what:meta])* $field:ident: $T:ty = $default:expr,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
        pub struct $Name {
            $($(#[$what])* pub $field: $T,)*
        }

        impl Default for $Name {
            fn default() -> Self {
                $Name { $($field: $default,)* }
            }
        }

        impl From<$Name> for Algorithm {
            fn from(settings: $Name) -> Self {
                Algorithm::$Name(settings)
            }
        }
    };
}

settings! {
    /// Stochastic gradient descent.
    Sgd {
        /// How much of the last change is kept; 0 for no momentum.
        momentum: f64 = 0.0,
        /// How much less of the gradient goes into the momentum.
        dampening: f64 = 0.0,
        /// Whether the momentum is applied one step ahead.
        nesterov: bool = false,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

settings! {
    /// Adagrad: divides by the root of the sum of all squared gradients.
    Adagrad {
        /// How fast the learning rate falls.
        lr_decay: f64 = 0.0,
        /// Added to the divisor.
        eps: f64 = 1e-10,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// What the sums begin with.
        initial_accumulator_value: f64 = 0.0,
    }
}

settings! {
    /// Adam: means of gradients and of their squares.
    Adam {
        /// How much of the means is kept: of the gradients, of the squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// Whether the largest mean so far counts.
        amsgrad: bool = false,
    }
}

settings! {
    /// Adam with weight decay apart from the gradient.
    AdamW {
        /// How much of the means is kept: of the gradients, of the squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// The parameter shrinks by this much times the learning rate.
        weight_decay: f64 = 1e-2,
        /// Whether the largest mean so far counts.
        amsgrad: bool = false,
    }
}

settings! {
    /// RMSprop: divides by the root of the mean of squared gradients.
    RmsProp {
        /// How much of the means is kept.
        alpha: f64 = 0.99,
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// How much of the last change is kept; 0 for no momentum.
        momentum: f64 = 0.0,
        /// Whether the mean gradient is taken out of the mean of the squares.
        centered: bool = false,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

settings! {
    /// Adadelta: changes as large as those before.
    Adadelta {
        /// How much of the means is kept.
        rho: f64 = 0.9,
        /// Added to both means.
        eps: f64 = 1e-6,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

settings! {
    /// Adamax: Adam with the largest gradient instead of the mean of the squares.
    Adamax {
        /// How much is kept: of the mean of the gradients, of the largest one.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the size of the gradient.
        eps: f64 = 1e-8,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
    }
}

settings! {
    /// Adam with momentum applied one step ahead.
    NAdam {
        /// How much of the means is kept: of the gradients, of the squares.
        betas: (f64, f64) = (0.9, 0.999),
        /// Added to the divisor.
        eps: f64 = 1e-8,
        /// This much of the parameter is added to its gradient.
        weight_decay: f64 = 0.0,
        /// How fast the momentum grows to its final value.
        momentum_decay: f64 = 4e-3,
    }
}

/// How parameters follow their gradients. Every variant has the settings of PyTorch's optimizer of that name.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // each is a type with a description of its own
pub enum Algorithm {
    Sgd(Sgd),
    Adagrad(Adagrad),
    Adam(Adam),
    AdamW(AdamW),
    RmsProp(RmsProp),
    Adadelta(Adadelta),
    Adamax(Adamax),
    NAdam(NAdam),
}

impl Algorithm {
    /// Name as PyTorch's modules have it.
    pub fn name(&self) -> &'static str {
        match self {
            Algorithm::Sgd(_) => "sgd",
            Algorithm::Adagrad(_) => "adagrad",
            Algorithm::Adam(_) => "adam",
            Algorithm::AdamW(_) => "adamw",
            Algorithm::RmsProp(_) => "rmsprop",
            Algorithm::Adadelta(_) => "adadelta",
            Algorithm::Adamax(_) => "adamax",
            Algorithm::NAdam(_) => "nadam",
        }
    }

    /// The learning rate that is usual.
    pub fn default_lr(&self) -> f64 {
        match self {
            Algorithm::Adagrad(_) | Algorithm::RmsProp(_) => 1e-2,
            Algorithm::Adadelta(_) => 1.0,
            Algorithm::Adamax(_) | Algorithm::NAdam(_) => 2e-3,
            _ => 1e-3,
        }
    }

    /// Names of the tensors that are kept per parameter, PyTorch's names.
    pub fn tensors(&self) -> &'static [&'static str] {
        match self {
            Algorithm::Sgd(Sgd { momentum: 0.0, .. }) => &[],
            Algorithm::Sgd(_) => &["momentum_buffer"],
            Algorithm::Adagrad(_) => &["sum"],
            Algorithm::Adam(Adam { amsgrad: true, .. }) | Algorithm::AdamW(AdamW { amsgrad: true, .. }) => {
                &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
            }
            Algorithm::Adam(_) | Algorithm::AdamW(_) | Algorithm::NAdam(_) => &["exp_avg", "exp_avg_sq"],
            Algorithm::RmsProp(RmsProp { momentum, centered, .. }) => match (*momentum != 0.0, centered) {
                (false, false) => &["square_avg"],
                (true, false) => &["square_avg", "momentum_buffer"],
                (false, true) => &["square_avg", "grad_avg"],
                (true, true) => &["square_avg", "grad_avg", "momentum_buffer"],
            },
            Algorithm::Adadelta(_) => &["square_avg", "acc_delta"],
            Algorithm::Adamax(_) => &["exp_avg", "exp_inf"],
        }
    }

    /// What the tensors begin with.
    pub(super) fn initial(&self) -> f64 {
        match self {
            Algorithm::Adagrad(settings) => settings.initial_accumulator_value,
            _ => 0.0,
        }
    }

    /// An error if a setting makes no sense.
    fn check(&self) -> Result<()> {
        let wrong = |setting: &'static str, found: f64, needed: &str| {
            let fix = format!("correct `{setting}` of {}", self.name());
            Err(Error::invalid(setting, found, needed, fix))
        };
        let at_least_zero = |setting: &'static str, x: f64| match x >= 0.0 && x.is_finite() {
            true => Ok(()),
            false => wrong(setting, x, "a number that is at least 0"),
        };
        let below_one = |setting: &'static str, x: f64| match (0.0..1.0).contains(&x) {
            true => Ok(()),
            false => wrong(setting, x, "a number from 0 to below 1"),
        };
        let betas = |(first, second)| below_one("betas", first).and(below_one("betas", second));
        let (eps, weight_decay) = match *self {
            Algorithm::Sgd(s) => {
                at_least_zero("momentum", s.momentum)?;
                if s.nesterov && (s.momentum == 0.0 || s.dampening != 0.0) {
                    let found = format!("momentum {} and dampening {} with nesterov", s.momentum, s.dampening);
                    let needed = "a momentum and no dampening";
                    return Err(Error::invalid("momentum", found, needed, "set a momentum, or switch nesterov off"));
                }
                (0.0, s.weight_decay)
            }
            Algorithm::Adagrad(s) => {
                at_least_zero("lr_decay", s.lr_decay)?;
                at_least_zero("initial_accumulator_value", s.initial_accumulator_value)?;
                (s.eps, s.weight_decay)
            }
            Algorithm::Adam(s) => betas(s.betas).map(|()| (s.eps, s.weight_decay))?,
            Algorithm::AdamW(s) => betas(s.betas).map(|()| (s.eps, s.weight_decay))?,
            Algorithm::RmsProp(s) => {
                at_least_zero("momentum", s.momentum)?;
                at_least_zero("alpha", s.alpha)?;
                (s.eps, s.weight_decay)
            }
            Algorithm::Adadelta(s) => {
                if !(0.0..=1.0).contains(&s.rho) {
                    return wrong("rho", s.rho, "a number from 0 to 1");
                }
                (s.eps, s.weight_decay)
            }
            Algorithm::Adamax(s) => betas(s.betas).map(|()| (s.eps, s.weight_decay))?,
            Algorithm::NAdam(s) => {
                at_least_zero("momentum_decay", s.momentum_decay)?;
                betas(s.betas).map(|()| (s.eps, s.weight_decay))?
            }
        };
        at_least_zero("eps", eps)?;
        at_least_zero("weight_decay", weight_decay)
    }
}

/// How some parameters are treated.
///
/// ```
/// use shardwise::optim::{AdamW, ParamGroup};
///
/// let group = ParamGroup::new(AdamW { weight_decay: 0.1, ..AdamW::default() }).with_lr(3e-4);
/// assert_eq!((group.lr, group.maximize), (3e-4, false));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ParamGroup {
    /// The algorithm with its settings.
    pub algorithm: Algorithm,
    /// The learning rate, on which a [`Schedule`](super::Schedule) builds.
    pub lr: f64,
    /// Whether parameters follow their gradients instead of going against them.
    pub maximize: bool,
    /// Whether an f32 copy is kept of parameters of a half-precision type, in which small changes add up.
    pub master: bool,
}

impl ParamGroup {
    /// An algorithm with its usual learning rate.
    pub fn new(algorithm: impl Into<Algorithm>) -> Self {
        let algorithm = algorithm.into();
        ParamGroup { algorithm, lr: algorithm.default_lr(), maximize: false, master: false }
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
            return Err(Error::invalid("learning rate", self.lr, "a number that is at least 0", "correct `lr`"));
        }
        self.algorithm.check()
    }
}
