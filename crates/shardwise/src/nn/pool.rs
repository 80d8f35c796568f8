//! Pooling, padding and flattening as layers.

use super::linear::layer;
use super::module::{Forward, Hooks};
use crate::error::Result;
use crate::tensor::DTensor;

macro_rules! pools {
    ($($(#[doc = $doc:literal])* $name:ident, $method:ident;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            kernel_size: usize,
            stride: usize,
            padding: usize,
        }

        layer!($name { hooks });

        impl $name {
            /// Windows of `kernel_size` in every spatial dimension, side by side.
            pub fn new(kernel_size: usize) -> Self {
                $name { hooks: Hooks::default(), kernel_size, stride: kernel_size, padding: 0 }
            }

            /// Sets the distance between windows.
            pub fn stride(mut self, stride: usize) -> Self {
                self.stride = stride;
                self
            }

            /// Sets the padding on both sides.
            pub fn padding(mut self, padding: usize) -> Self {
                self.padding = padding;
                self
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.hooks.run(x, |x| x.$method(self.kernel_size, Some(self.stride), self.padding))
            }
        }
    )*};
}

pools! {
    /// Max pooling of `[n, channels, length]`.
    MaxPool1d, max_pool1d;
    /// Max pooling of `[n, channels, height, width]`.
    MaxPool2d, max_pool2d;
    /// Average pooling of `[n, channels, length]`; padding counts as zeros.
    AvgPool1d, avg_pool1d;
    /// Average pooling of `[n, channels, height, width]`; padding counts as zeros.
    AvgPool2d, avg_pool2d;
}

/// Padding with one value, in any number of dimensions.
#[doc(alias = "ConstantPad1d")]
#[doc(alias = "ConstantPad2d")]
#[doc(alias = "ZeroPad1d")]
#[doc(alias = "ZeroPad2d")]
#[derive(Clone)]
pub struct ConstantPad {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    padding: Vec<(usize, usize)>,
    value: f64,
}

layer!(ConstantPad { hooks });

impl ConstantPad {
    /// Pads with `value`: `(before, after)` per dimension, from the last dimension backwards.
    pub fn new(padding: &[(usize, usize)], value: f64) -> Self {
        ConstantPad { hooks: Hooks::default(), padding: padding.to_vec(), value }
    }
}

impl Forward for ConstantPad {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.pad(&self.padding, self.value))
    }
}

/// Flattens all dimensions but the first into one.
#[derive(Clone, Default)]
pub struct Flatten {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
}

layer!(Flatten { hooks });

impl Flatten {
    /// Creates the layer.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Forward for Flatten {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.flatten(1, -1))
    }
}
