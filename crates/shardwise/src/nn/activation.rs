//! Activation functions as layers.

use super::linear::layer;
use super::module::{Forward, Hooks};
use crate::error::Result;
use crate::tensor::DTensor;

macro_rules! activations {
    ($($(#[doc = $doc:literal])* $name:ident { $($field:ident: $T:ty),* }, |$x:ident| $apply:expr;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Default)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            $($field: $T,)*
        }

        layer!($name { hooks });

        impl $name {
            /// Creates the layer; it has no parameters.
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
    /// `max(x, 0)`.
    Relu {}, |x| x.relu();
    /// GELU, `x * Phi(x)`, with the exact normal distribution.
    Gelu {}, |x| x.gelu();
    /// GELU with the tanh approximation, `approximate="tanh"` in PyTorch.
    GeluTanh {}, |x| x.gelu_tanh();
    /// SiLU, `x * sigmoid(x)`.
    Silu {}, |x| x.silu();
    /// Hyperbolic tangent.
    Tanh {}, |x| x.tanh();
    /// `1 / (1 + exp(-x))`.
    Sigmoid {}, |x| x.sigmoid();
    /// `x` where it is positive, else `slope * x`.
    LeakyRelu { slope: f64 }, |x| x.leaky_relu(slope);
    /// `x` where it is positive, else `alpha * (exp(x) - 1)`.
    Elu { alpha: f64 }, |x| x.elu(alpha);
    /// `log(1 + exp(beta * x)) / beta`; `x` where `beta * x` is above the threshold, to avoid overflow.
    Softplus { beta: f64, threshold: f64 }, |x| x.softplus(beta, threshold);
    /// Softmax over dimension `dim`.
    Softmax { dim: isize }, |x| x.softmax(dim);
    /// Log-softmax over dimension `dim`.
    LogSoftmax { dim: isize }, |x| x.log_softmax(dim);
}
