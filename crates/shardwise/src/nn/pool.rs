//! Pooling, padding and flattening as layers.

use super::linear::layer;
use super::module::{Forward, Hooks, Item, Module, join};
use crate::error::Result;
use crate::tensor::DTensor;

macro_rules! pools {
    ($($(#[doc = $doc:literal])* $name:ident, $method:ident;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone)]
        pub struct $name {
            /// Hooks.
            pub hooks: Hooks,
            size: usize,
            stride: usize,
            padding: usize,
        }

        layer!($name { hooks });

        impl $name {
            /// Windows of `size` side by side, in every spatial dimension.
            pub fn new(size: usize) -> Self {
                $name { hooks: Hooks::default(), size, stride: size, padding: 0 }
            }

            /// With another distance of windows.
            pub fn stride(mut self, stride: usize) -> Self {
                self.stride = stride;
                self
            }

            /// With a border on both sides.
            pub fn padding(mut self, padding: usize) -> Self {
                self.padding = padding;
                self
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.hooks.run(x, |x| x.$method(self.size, Some(self.stride), self.padding))
            }
        }
    )*};
}

pools! {
    /// The largest element of each window of `[n, channels, length]`.
    MaxPool1d, max_pool1d;
    /// The largest element of each window of `[n, channels, height, width]`.
    MaxPool2d, max_pool2d;
    /// The mean of each window of `[n, channels, length]`; the border counts as zeros.
    AvgPool1d, avg_pool1d;
    /// The mean of each window of `[n, channels, height, width]`; the border counts as zeros.
    AvgPool2d, avg_pool2d;
}

/// A border of one number.
#[doc(alias = "ConstantPad1d")]
#[doc(alias = "ConstantPad2d")]
#[doc(alias = "ZeroPad1d")]
#[doc(alias = "ZeroPad2d")]
#[derive(Clone)]
pub struct ConstantPad {
    /// Hooks.
    pub hooks: Hooks,
    border: Vec<(usize, usize)>,
    value: f64,
}

layer!(ConstantPad { hooks });

impl ConstantPad {
    /// A border of `value`: `(before, after)` per dimension, from the last dimension backwards.
    pub fn new(border: &[(usize, usize)], value: f64) -> Self {
        ConstantPad { hooks: Hooks::default(), border: border.to_vec(), value }
    }
}

impl Forward for ConstantPad {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.pad(&self.border, self.value))
    }
}

/// All dimensions but the first as one.
#[derive(Clone, Default)]
pub struct Flatten {
    /// Hooks.
    pub hooks: Hooks,
}

layer!(Flatten { hooks });

impl Flatten {
    /// The layer; it has no parameters.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Forward for Flatten {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.flatten(1, -1))
    }
}
