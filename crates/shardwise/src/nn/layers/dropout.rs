//! Dropout of elements and of whole channels.

use crate::error::{ErrorKind, Result};
use crate::nn::module::{Forward, Hooks, TrainingMode};
use crate::tensor::DTensor;
use shardwise_derive::Module;

macro_rules! dropouts {
    ($($(#[$meta:meta])* $name:ident, |$x:ident, $p:ident, $training:ident| $apply:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            p: f64,
            training_mode: TrainingMode,
        }

        impl $name {
            /// Creates the layer.
            ///
            /// # Errors
            /// [`Error::Invalid`](crate::Error::Invalid) unless `p` is from 0 to 1.
            pub fn new(p: f64) -> Result<Self> {
                if !(0.0..=1.0).contains(&p) {
                    return Err(ErrorKind::Argument.error("dropout", format!("probability {p}"), "0 to 1", "correct it"));
                }
                Ok($name { hooks: Hooks::default(), p, training_mode: TrainingMode::default() })
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                let ($p, $training) = (self.p, self.training_mode.is_training());
                self.hooks.run(x, |$x| $apply)
            }
        }
    )*};
}

dropouts! {
    /// Dropout: zeroes elements with probability `p` in training and scales the rest by `1 / (1 - p)`; the identity in
    /// evaluation. The mask is the same for every layout.
    Dropout, |x, p, training| x.dropout(p, training);
    /// Dropout of whole channels of `[n, channels, length]`, or `[channels, length]`.
    Dropout1d, |x, p, training| x.feature_dropout(p, training, x.ndim() != 2);
    /// Dropout of whole channels of `[n, channels, height, width]`, or `[channels, height, width]`.
    Dropout2d, |x, p, training| x.feature_dropout(p, training, x.ndim() != 3);
    /// Dropout of whole channels of `[n, channels, depth, height, width]`, or `[channels, depth, height, width]`.
    Dropout3d, |x, p, training| x.feature_dropout(p, training, x.ndim() != 4);
    /// Dropout that keeps mean and variance of inputs as [`Selu`](crate::nn::Selu) gives them.
    AlphaDropout, |x, p, training| x.alpha_dropout(p, training);
    /// [`AlphaDropout`] of whole channels.
    FeatureAlphaDropout, |x, p, training| x.feature_alpha_dropout(p, training);
}
