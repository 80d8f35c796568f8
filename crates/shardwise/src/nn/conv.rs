//! Convolution layers.

use super::build::Builder;
use super::init::Init;
use super::linear::layer;
use super::module::{Forward, Hooks, Item, Module, join};
use crate::error::Result;
use crate::ops::ConvOptions;
use crate::param::Param;
use crate::tensor::DTensor;

macro_rules! convolutions {
    ($($(#[doc = $doc:literal])* $name:ident, $method:ident, $spatial:literal;)*) => {$(
        $(#[doc = $doc])*
        pub struct $name {
            /// The weight, `[out, in / groups, ...]`.
            pub weight: Param,
            /// The bias, `[out]`.
            pub bias: Option<Param>,
            /// Hooks.
            pub hooks: Hooks,
            options: ConvOptions,
        }

        layer!($name { weight, bias, hooks });

        impl $name {
            /// With a bias; windows of `size` in every spatial dimension.
            pub fn new(at: &Builder, inputs: usize, outputs: usize, size: usize, options: ConvOptions) -> Result<Self> {
                let layer = Self::without_bias(at, inputs, outputs, size, options)?;
                let inside = inputs / options.groups.max(1);
                let bound = 1.0 / ((inside * size.pow($spatial)).max(1) as f64).sqrt();
                Ok($name { bias: Some(at.param("bias", &[outputs], Init::Uniform(-bound, bound))?), ..layer })
            }

            /// Without a bias; windows of `size` in every spatial dimension.
            pub fn without_bias(
                at: &Builder,
                inputs: usize,
                outputs: usize,
                size: usize,
                options: ConvOptions,
            ) -> Result<Self> {
                let inside = inputs / options.groups.max(1);
                let shape = [vec![outputs, inside], vec![size; $spatial]].concat();
                let weight = at.param("weight", &shape, Init::LINEAR)?;
                Ok($name { weight, bias: None, hooks: at.hooks(), options })
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                let bias = self.bias.as_ref().map(Param::get);
                self.hooks.run(x, |x| x.$method(&self.weight.get(), bias.as_ref(), self.options))
            }
        }
    )*};
}

convolutions! {
    /// Convolution of `[n, channels, length]`.
    Conv1d, conv1d, 1;
    /// Convolution of `[n, channels, height, width]`.
    Conv2d, conv2d, 2;
}
