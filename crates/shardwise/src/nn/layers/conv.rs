//! Convolution layers.

use crate::error::{ErrorKind, Result};
use crate::nn::build::Builder;
use crate::nn::init::Init;
use crate::nn::module::{Forward, Hooks};
use crate::ops::{ConvOptions, ConvTransposeOptions, PerDim};
use crate::param::Param;
use crate::tensor::DTensor;
use shardwise_derive::Module;

macro_rules! conv_options {
    ($layer:ident, $options:ident $(, $(#[doc = $doc:literal])* $more:ident)*) => {
        #[doc = concat!("Sizes and options of a [`", stringify!($layer), "`], with PyTorch's names and defaults.")]
        ///
        /// `kernel_size`, `stride`, `padding` and `dilation` are one number for every spatial dimension, or an array with one
        /// number for each.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $options {
            /// Channels of the input, dimension 1.
            pub in_channels: usize,
            /// Channels of the output.
            pub out_channels: usize,
            /// Length of a window.
            pub kernel_size: PerDim,
            /// Distance between windows; 1 by default.
            pub stride: PerDim,
            /// Zeros added on both sides, or elements removed from both sides of a transposed convolution; 0 by default.
            pub padding: PerDim,
            /// Distance between the elements of a window; 1 by default.
            pub dilation: PerDim,
            /// Groups of channels that are convolved separately; 1 by default.
            pub groups: usize,
            /// Whether a bias is added; true by default.
            pub bias: bool,
            $($(#[doc = $doc])* pub $more: PerDim,)*
        }

        impl $options {
            /// Default options for these sizes.
            pub fn new(in_channels: usize, out_channels: usize, kernel_size: impl Into<PerDim>) -> Self {
                $options {
                    in_channels,
                    out_channels,
                    kernel_size: kernel_size.into(),
                    stride: 1.into(),
                    padding: 0.into(),
                    dilation: 1.into(),
                    groups: 1,
                    bias: true,
                    $($more: 0.into(),)*
                }
            }

            /// Sets `stride`.
            pub fn stride(self, stride: impl Into<PerDim>) -> Self {
                $options { stride: stride.into(), ..self }
            }

            /// Sets `padding`.
            pub fn padding(self, padding: impl Into<PerDim>) -> Self {
                $options { padding: padding.into(), ..self }
            }

            /// Sets `dilation`.
            pub fn dilation(self, dilation: impl Into<PerDim>) -> Self {
                $options { dilation: dilation.into(), ..self }
            }

            /// Sets `groups`.
            pub fn groups(self, groups: usize) -> Self {
                $options { groups, ..self }
            }

            /// Sets `bias`.
            pub fn bias(self, bias: bool) -> Self {
                $options { bias, ..self }
            }

            $(
                #[doc = concat!("Sets `", stringify!($more), "`.")]
                pub fn $more(self, $more: impl Into<PerDim>) -> Self {
                    $options { $more: $more.into(), ..self }
                }
            )*
        }
    };
}

macro_rules! conv_layer {
    ($(#[doc = $doc:literal])* $name:ident, $options:ident, $method:ident, $spatial:literal, $weight:literal,
        $channels:expr, $of:ident { $($field:ident),* }) => {
        $(#[doc = $doc])*
        #[derive(Module)]
        pub struct $name {
            #[doc = $weight]
            pub weight: Param,
            /// Bias `[out_channels]`.
            pub bias: Option<Param>,
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            #[module(skip)]
            options: $of<PerDim>,
        }

        impl $name {
            /// Builds the layer, with PyTorch's initializer: uniform within `1 / sqrt(fan_in)`.
            ///
            /// Sizes that do not fit each other, such as channels that are not a multiple of the groups, are an error of the
            /// first forward pass.
            ///
            /// # Errors
            /// If the kernel size is given for another number of dimensions.
            pub fn new(builder: &Builder, options: $options) -> Result<Self> {
                let channels: [usize; 2] = $channels(&options);
                let shape = [channels.to_vec(), window(stringify!($name), &options.kernel_size, $spatial)?].concat();
                let weight = builder.param("weight", &shape, Init::LINEAR)?;
                let bound = 1.0 / (shape[1..].iter().product::<usize>().max(1) as f64).sqrt();
                let bias = || builder.param("bias", &[options.out_channels], Init::Uniform(-bound, bound));
                let bias = options.bias.then(bias).transpose()?;
                let options = $of { $($field: options.$field),* };
                Ok($name { weight, bias, hooks: builder.hooks(), options })
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.hooks.run(x, |x| {
                    let bias = self.bias.as_ref().map(Param::forward_value).transpose()?;
                    x.$method(&self.weight.forward_value()?, bias.as_ref(), self.options)
                })
            }
        }
    };
}

/// The sizes of a window in every spatial dimension.
fn window(layer: &str, sizes: &PerDim, spatial: usize) -> Result<Vec<usize>> {
    sizes.of(spatial).map(<[usize]>::to_vec).ok_or_else(|| {
        let found = format!("{sizes:?} as kernel size of {layer}");
        let needed = format!("one number, or {spatial}");
        ErrorKind::Argument.error("kernel size", found, needed, "pass one number per spatial dimension")
    })
}

macro_rules! convolutions {
    ($($(#[doc = $doc:literal])* $name:ident, $options:ident, $method:ident, $spatial:literal;)*) => {$(
        conv_options!($name, $options);
        conv_layer! {
            $(#[doc = $doc])*
            $name, $options, $method, $spatial,
            "Weight `[out_channels, in_channels / groups, kernel_size, ...]`.",
            |o: &$options| [o.out_channels, o.in_channels / o.groups.max(1)],
            ConvOptions { stride, padding, dilation, groups }
        }
    )*};
}

macro_rules! transposed_convolutions {
    ($($(#[doc = $doc:literal])* $name:ident, $options:ident, $method:ident, $spatial:literal;)*) => {$(
        conv_options!(
            $name,
            $options,
            /// Elements added at the end; less than the stride or the dilation, 0 by default.
            output_padding
        );
        conv_layer! {
            $(#[doc = $doc])*
            $name, $options, $method, $spatial,
            "Weight `[in_channels, out_channels / groups, kernel_size, ...]`.",
            |o: &$options| [o.in_channels, o.out_channels / o.groups.max(1)],
            ConvTransposeOptions { stride, padding, output_padding, dilation, groups }
        }
    )*};
}

convolutions! {
    /// Convolution of `[n, channels, length]`.
    ///
    /// ```
    /// use shardwise::nn::{Conv1d, Conv1dOptions};
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let conv = Conv1d::new(&Builder::new(&mesh), Conv1dOptions::new(3, 8, 5).padding(2).bias(false))?;
    ///     let y = conv.forward(&DTensor::randn((4, 3, 16), &mesh, [Shard(0)])?)?;
    ///     assert_eq!(y.shape(), [4, 8, 16]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    Conv1d, Conv1dOptions, conv1d, 1;
    /// Convolution of `[n, channels, height, width]`.
    ///
    /// Options are built as for [`Conv1d`]: `Conv2d::new(&builder, Conv2dOptions::new(3, 8, [5, 3]).padding([2, 1]))`.
    Conv2d, Conv2dOptions, conv2d, 2;
    /// Convolution of `[n, channels, depth, height, width]`.
    ///
    /// Options are built as for [`Conv1d`].
    Conv3d, Conv3dOptions, conv3d, 3;
}

transposed_convolutions! {
    /// Transposed convolution of `[n, channels, length]`: the gradient of a convolution with respect to its input.
    ///
    /// Options are built as for [`Conv1d`].
    ConvTranspose1d, ConvTranspose1dOptions, conv_transpose1d, 1;
    /// Transposed convolution of `[n, channels, height, width]`: the gradient of a convolution with respect to its input.
    ///
    /// Options are built as for [`Conv1d`]: `ConvTranspose2dOptions::new(8, 3, 4).stride(2).padding(1)` doubles height and width.
    ConvTranspose2d, ConvTranspose2dOptions, conv_transpose2d, 2;
    /// Transposed convolution of `[n, channels, depth, height, width]`: the gradient of a convolution with respect to its input.
    ///
    /// Options are built as for [`Conv1d`].
    ConvTranspose3d, ConvTranspose3dOptions, conv_transpose3d, 3;
}
