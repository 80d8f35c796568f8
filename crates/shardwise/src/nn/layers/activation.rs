//! Activation functions as layers.

use crate::error::Result;
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{Forward, Hooks, TrainingMode};
use crate::param::Param;
use crate::tensor::DTensor;
use shardwise_derive::Module;

macro_rules! activations {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $T:ty),* }, |$x:ident| $apply:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Default, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            $($field: $T,)*
        }

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
    #[doc(alias = "ReLU")]
    Relu {}, |x| x.relu();
    /// GELU, `x * Phi(x)`, with the exact normal distribution.
    #[doc(alias = "GELU")]
    Gelu {}, |x| x.gelu();
    /// GELU with the tanh approximation, `approximate="tanh"` in PyTorch.
    GeluTanh {}, |x| x.gelu_tanh();
    /// SiLU, `x * sigmoid(x)`.
    #[doc(alias = "SiLU")]
    Silu {}, |x| x.silu();
    /// Hyperbolic tangent.
    Tanh {}, |x| x.tanh();
    /// `1 / (1 + exp(-x))`.
    Sigmoid {}, |x| x.sigmoid();
    /// `x` where it is positive, else `slope * x`.
    #[doc(alias = "LeakyReLU")]
    LeakyRelu { slope: f64 }, |x| x.leaky_relu(slope);
    /// `x` where it is positive, else `alpha * (exp(x) - 1)`.
    #[doc(alias = "ELU")]
    Elu { alpha: f64 }, |x| x.elu(alpha);
    /// `log(1 + exp(beta * x)) / beta`; `x` where `beta * x` is above the threshold, to avoid overflow.
    Softplus { beta: f64, threshold: f64 }, |x| x.softplus(beta, threshold);
    /// Softmax over dimension `dim`.
    Softmax { dim: isize }, |x| x.softmax(dim);
    /// Log-softmax over dimension `dim`.
    LogSoftmax { dim: isize }, |x| x.log_softmax(dim);
    /// Softmax of the negated elements over dimension `dim`.
    Softmin { dim: isize }, |x| x.softmin(dim);
    /// Softmax over the channels of `[n, channels, height, width]`.
    Softmax2d {}, |x| x.softmax(-3);
    /// `x` between 0 and 6, else the nearer bound.
    #[doc(alias = "ReLU6")]
    Relu6 {}, |x| x.relu6();
    /// `x` between two bounds, else the nearer bound.
    Hardtanh { min_val: f64, max_val: f64 }, |x| x.hardtanh(min_val, max_val);
    /// `x / 6 + 1 / 2` between 0 and 1.
    Hardsigmoid {}, |x| x.hardsigmoid();
    /// `x * hardsigmoid(x)`.
    Hardswish {}, |x| x.hardswish();
    /// Scaled ELU, with the constants that keep mean and variance.
    #[doc(alias = "SELU")]
    Selu {}, |x| x.selu();
    /// `x` where it is positive, else `alpha * (exp(x / alpha) - 1)`.
    #[doc(alias = "CELU")]
    Celu { alpha: f64 }, |x| x.celu(alpha);
    /// `x * tanh(softplus(x))`.
    Mish {}, |x| x.mish();
    /// `x - tanh(x)`.
    Tanhshrink {}, |x| x.tanhshrink();
    /// `x` outside of `-lambda..lambda`, else 0.
    Hardshrink { lambda: f64 }, |x| x.hardshrink(lambda);
    /// `x` moved towards 0 by `lambda`, and 0 inside of `-lambda..lambda`.
    Softshrink { lambda: f64 }, |x| x.softshrink(lambda);
    /// `x / (1 + |x|)`.
    Softsign {}, |x| x.softsign();
    /// `x` above the threshold, else `value`.
    Threshold { threshold: f64, value: f64 }, |x| x.threshold(threshold, value);
    /// The logarithm of the sigmoid.
    LogSigmoid {}, |x| x.logsigmoid();
    /// The first half of dimension `dim` times the sigmoid of the second.
    #[doc(alias = "GLU")]
    Glu { dim: isize }, |x| x.glu(dim);
}

/// `x` where it is positive, else `x` times a slope: drawn between two bounds in training, their mean in evaluation.
#[doc(alias = "RReLU")]
#[derive(Module)]
pub struct RandomizedRelu {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    lower: f64,
    upper: f64,
    training_mode: TrainingMode,
}

impl RandomizedRelu {
    /// Creates the layer; PyTorch's bounds are 1/8 and 1/3.
    pub fn new(lower: f64, upper: f64) -> Self {
        RandomizedRelu { hooks: Hooks::default(), lower, upper, training_mode: TrainingMode::default() }
    }
}

impl Forward for RandomizedRelu {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.rrelu(self.lower, self.upper, self.training_mode.is_training()))
    }
}

/// `x` where it is positive, else `x` times a slope that is trained: one for all channels, or one for each.
#[doc(alias = "PReLU")]
#[derive(Module)]
pub struct PRelu {
    /// The slopes, `[1]` or `[channels]`.
    pub weight: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

impl PRelu {
    /// Builds `num_parameters` slopes, each with the value `init`; PyTorch's defaults are 1 and 0.25.
    pub fn new(builder: &Builder, num_parameters: usize, init: f64) -> Result<Self> {
        let weight = builder.param("weight", &[num_parameters], Init::Constant(init))?;
        Ok(PRelu { weight, hooks: builder.hooks() })
    }
}

impl Forward for PRelu {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.prelu(&self.weight.forward_value()?))
    }
}
