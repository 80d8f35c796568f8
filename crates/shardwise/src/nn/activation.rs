//! Activation functions as layers.

use super::linear::layer;
use super::module::{Forward, Hooks, Item, Module, join};
use crate::error::Result;
use crate::tensor::DTensor;

macro_rules! activations {
    ($($(#[doc = $doc:literal])* $name:ident { $($field:ident: $T:ty),* }, |$x:ident| $apply:expr;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Default)]
        pub struct $name {
            /// Hooks.
            pub hooks: Hooks,
            $($field: $T,)*
        }

        layer!($name { hooks });

        impl $name {
            /// The layer; it has no parameters.
            pub fn new($($field: $T),*) -> Self {
                $name { hooks: Hooks::default(), $($field),* }
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                $(let $field = self.$field;)*
                self.hooks.run(x, |$x| $apply)
            }
        }
    )*};
}

activations! {
    /// The positive part.
    Relu {}, |x| x.relu();
    /// `x * Phi(x)`.
    Gelu {}, |x| x.gelu();
    /// The tanh approximation of gelu.
    GeluTanh {}, |x| x.gelu_tanh();
    /// `x * sigmoid(x)`.
    Silu {}, |x| x.silu();
    /// Hyperbolic tangent.
    Tanh {}, |x| x.tanh();
    /// `1 / (1 + exp(-x))`.
    Sigmoid {}, |x| x.sigmoid();
    /// `x`, times a slope where it is negative.
    LeakyRelu { slope: f64 }, |x| x.leaky_relu(slope);
    /// `x`, or `alpha * (exp(x) - 1)` where it is negative.
    Elu { alpha: f64 }, |x| x.elu(alpha);
    /// `log(1 + exp(beta * x)) / beta`; `x` where `beta * x` is above a threshold.
    Softplus { beta: f64, threshold: f64 }, |x| x.softplus(beta, threshold);
    /// Softmax along a dimension.
    Softmax { dim: isize }, |x| x.softmax(dim);
    /// Log-softmax along a dimension.
    LogSoftmax { dim: isize }, |x| x.log_softmax(dim);
}
