//! Layers that change the shape: padding, flattening, windows as columns, pixels and channels, resampling.

use crate::error::Result;
use crate::nn::module::{Forward, Hooks};
use crate::ops::{InterpolateOptions, Interpolation, PadMode, PerDim};
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// Layers without parameters: their arguments, and the operator.
macro_rules! shape_layers {
    ($($(#[$meta:meta])* $name:ident { $($field:ident: $T:ty),* }, |$x:ident| $apply:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            $($field: $T,)*
        }

        impl $name {
            /// Creates the layer; it has no parameters.
            #[allow(clippy::new_without_default)]
            pub fn new($($field: impl Into<$T>),*) -> Self {
                $name { hooks: Hooks::default(), $($field: $field.into()),* }
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                $(let $field = &self.$field;)*
                self.hooks.run(x, |$x| $apply)
            }
        }
    )*};
}

shape_layers! {
    /// Takes a dimension apart into several; one size may be -1.
    Unflatten { dim: isize, sizes: Vec<isize> }, |x| x.unflatten(*dim, sizes);
    /// Returns its input.
    Identity {}, |x| Ok(x.clone());
    /// Moves channels to pixels, `[.., channels * r * r, height, width]` to `[.., channels, height * r, width * r]`.
    PixelShuffle { upscale_factor: usize }, |x| x.pixel_shuffle(*upscale_factor);
    /// Moves pixels to channels, the inverse of [`PixelShuffle`].
    PixelUnshuffle { downscale_factor: usize }, |x| x.pixel_unshuffle(*downscale_factor);
    /// Reorders channels: those at one place of each group come together.
    ChannelShuffle { groups: usize }, |x| x.channel_shuffle(*groups);
    /// Pads with zeros: `(before, after)` per dimension, from the last dimension backwards.
    #[doc(alias = "ZeroPad1d")]
    #[doc(alias = "ZeroPad2d")]
    #[doc(alias = "ZeroPad3d")]
    ZeroPad { padding: Vec<(isize, isize)> }, |x| x.pad_with(padding, PadMode::Constant(0.into()));
    /// Pads with the mirror image: `(before, after)` per dimension, from the last dimension backwards.
    #[doc(alias = "ReflectionPad1d")]
    #[doc(alias = "ReflectionPad2d")]
    #[doc(alias = "ReflectionPad3d")]
    ReflectionPad { padding: Vec<(isize, isize)> }, |x| x.pad_with(padding, PadMode::Reflect);
    /// Pads with the border element: `(before, after)` per dimension, from the last dimension backwards.
    #[doc(alias = "ReplicationPad1d")]
    #[doc(alias = "ReplicationPad2d")]
    #[doc(alias = "ReplicationPad3d")]
    ReplicationPad { padding: Vec<(isize, isize)> }, |x| x.pad_with(padding, PadMode::Replicate);
    /// Pads with the elements of the other end: `(before, after)` per dimension, from the last dimension backwards.
    #[doc(alias = "CircularPad1d")]
    #[doc(alias = "CircularPad2d")]
    #[doc(alias = "CircularPad3d")]
    CircularPad { padding: Vec<(isize, isize)> }, |x| x.pad_with(padding, PadMode::Circular);
}

/// Padding with one value, in any number of dimensions.
#[doc(alias = "ConstantPad1d")]
#[doc(alias = "ConstantPad2d")]
#[doc(alias = "ConstantPad3d")]
#[derive(Clone, Module)]
pub struct ConstantPad {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    padding: Vec<(usize, usize)>,
    value: f64,
}

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

/// Flattens all dimensions but the first into one, or those from [`dims`](Self::dims).
#[derive(Clone, Module)]
pub struct Flatten {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    start_dim: isize,
    end_dim: isize,
}

impl Default for Flatten {
    fn default() -> Self {
        Flatten { hooks: Hooks::default(), start_dim: 1, end_dim: -1 }
    }
}

impl Flatten {
    /// Creates the layer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the first and the last dimension that become one.
    #[doc(alias = "start_dim")]
    pub fn dims(self, start_dim: isize, end_dim: isize) -> Self {
        Flatten { start_dim, end_dim, ..self }
    }
}

impl Forward for Flatten {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| x.flatten(self.start_dim, self.end_dim))
    }
}

/// How large the result of an [`Upsample`] is.
#[derive(Debug, Clone, PartialEq)]
enum UpsampleTo {
    Size(Vec<usize>),
    Factors(Vec<f64>),
}

/// Resampling of the spatial dimensions of `[n, channels, ..]`.
#[doc(alias = "UpsamplingNearest2d")]
#[doc(alias = "UpsamplingBilinear2d")]
#[derive(Clone, Module)]
pub struct Upsample {
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    to: UpsampleTo,
    #[module(skip)]
    options: InterpolateOptions,
}

impl Upsample {
    /// Resamples to `size`, one number per spatial dimension, by the nearest element.
    pub fn new(size: &[usize]) -> Self {
        let options = InterpolateOptions::default();
        Upsample { hooks: Hooks::default(), to: UpsampleTo::Size(size.to_vec()), options }
    }

    /// Multiplies the sizes by factors, one for all spatial dimensions or one for each.
    pub fn by(scale_factor: &[f64]) -> Self {
        let options = InterpolateOptions::default();
        Upsample { hooks: Hooks::default(), to: UpsampleTo::Factors(scale_factor.to_vec()), options }
    }

    /// Sets how new elements are computed; linear interpolation is bilinear in two dimensions and trilinear in three.
    pub fn mode(mut self, mode: Interpolation) -> Self {
        self.options.mode = mode;
        self
    }

    /// Sets whether the first and last elements keep their places.
    pub fn align_corners(mut self, align_corners: bool) -> Self {
        self.options.align_corners = align_corners;
        self
    }
}

impl Forward for Upsample {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| match &self.to {
            UpsampleTo::Size(size) => x.interpolate(size, &self.options),
            UpsampleTo::Factors(factors) => match factors[..] {
                [one] => x.interpolate_by(&vec![one; x.ndim().saturating_sub(2)], &self.options),
                _ => x.interpolate_by(factors, &self.options),
            },
        })
    }
}

/// The options of windows that [`Unfold`] and [`Fold`] share.
#[derive(Clone)]
struct ColumnOptions {
    kernel_size: PerDim,
    dilation: PerDim,
    padding: PerDim,
    stride: PerDim,
}

macro_rules! column_layers {
    ($($(#[$meta:meta])* $name:ident { $($first:ident),* }, |$x:ident, $o:ident| $apply:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            $($first: PerDim,)*
            #[module(skip)]
            options: ColumnOptions,
        }

        impl $name {
            /// Windows of `kernel_size` in steps of 1, without padding.
            pub fn new($($first: impl Into<PerDim>,)* kernel_size: impl Into<PerDim>) -> Self {
                let (one, none) = (PerDim::from(1), PerDim::from(0));
                let options = ColumnOptions { kernel_size: kernel_size.into(), dilation: one, padding: none, stride: one };
                $name { hooks: Hooks::default(), $($first: $first.into(),)* options }
            }

            /// Sets the distance between the elements of a window.
            pub fn dilation(mut self, dilation: impl Into<PerDim>) -> Self {
                self.options.dilation = dilation.into();
                self
            }

            /// Sets the padding on both sides.
            pub fn padding(mut self, padding: impl Into<PerDim>) -> Self {
                self.options.padding = padding.into();
                self
            }

            /// Sets the distance between windows.
            pub fn stride(mut self, stride: impl Into<PerDim>) -> Self {
                self.options.stride = stride.into();
                self
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                $(let $first = self.$first;)*
                let $o = &self.options;
                self.hooks.run(x, |$x| $apply)
            }
        }
    )*};
}

column_layers! {
    /// Windows of `[n, channels, height, width]` as columns, `[n, channels * window, windows]`.
    Unfold {}, |x, o| x.im2col(o.kernel_size.given(), o.dilation.given(), o.padding.given(), o.stride.given());
    /// Sums of columns at the places of their windows, the transpose of [`Unfold`].
    Fold { output_size }, |x, o| x.col2im(
        output_size.given(), o.kernel_size.given(), o.dilation.given(), o.padding.given(), o.stride.given());
}
