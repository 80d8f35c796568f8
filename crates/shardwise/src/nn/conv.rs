//! Convolution layers.

use super::build::Builder;
use super::init::Init;
use super::linear::layer;
use super::module::{Forward, Hooks};
use crate::error::Result;
use crate::ops::ConvOptions;
use crate::param::Param;
use crate::tensor::DTensor;

macro_rules! convolutions {
    ($($(#[doc = $doc:literal])* $name:ident, $options:ident, $method:ident, $spatial:literal;)*) => {$(
        #[doc = concat!("Sizes and options of a [`", stringify!($name), "`], with PyTorch's names and defaults.")]
        ///
        /// `kernel_size`, `stride`, `padding` and `dilation` hold for every spatial dimension.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $options {
            /// Channels of the input, dimension 1.
            pub in_channels: usize,
            /// Channels of the output.
            pub out_channels: usize,
            /// Length of a window.
            pub kernel_size: usize,
            /// Distance between windows; 1 by default.
            pub stride: usize,
            /// Zeros added on both sides; 0 by default.
            pub padding: usize,
            /// Distance between the elements of a window; 1 by default.
            pub dilation: usize,
            /// Groups of channels that are convolved separately; 1 by default.
            pub groups: usize,
            /// Whether a bias is added; true by default.
            pub bias: bool,
        }

        impl $options {
            /// Default options for these sizes.
            pub fn new(in_channels: usize, out_channels: usize, kernel_size: usize) -> Self {
                let (stride, padding, dilation, groups, bias) = (1, 0, 1, 1, true);
                $options { in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias }
            }

            /// Sets `stride`.
            pub fn stride(self, stride: usize) -> Self {
                $options { stride, ..self }
            }

            /// Sets `padding`.
            pub fn padding(self, padding: usize) -> Self {
                $options { padding, ..self }
            }

            /// Sets `dilation`.
            pub fn dilation(self, dilation: usize) -> Self {
                $options { dilation, ..self }
            }

            /// Sets `groups`.
            pub fn groups(self, groups: usize) -> Self {
                $options { groups, ..self }
            }

            /// Sets `bias`.
            pub fn bias(self, bias: bool) -> Self {
                $options { bias, ..self }
            }
        }

        $(#[doc = $doc])*
        pub struct $name {
            /// Weight `[out_channels, in_channels / groups, kernel_size, ...]`.
            pub weight: Param,
            /// Bias `[out_channels]`.
            pub bias: Option<Param>,
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            options: ConvOptions,
        }

        layer!($name { weight, bias, hooks });

        impl $name {
            /// Builds the layer, with PyTorch's initializer: uniform within `1 / sqrt(fan_in)`.
            ///
            /// Sizes that do not fit each other, such as channels that are no multiple of the groups, are an error of the
            /// first forward pass.
            pub fn new(builder: &Builder, options: $options) -> Result<Self> {
                let $options { in_channels, out_channels, kernel_size, stride, padding, dilation, groups, .. } = options;
                let channels = in_channels / groups.max(1);
                let shape = [vec![out_channels, channels], vec![kernel_size; $spatial]].concat();
                let weight = builder.param("weight", &shape, Init::LINEAR)?;
                let bound = 1.0 / ((channels * kernel_size.pow($spatial)).max(1) as f64).sqrt();
                let bias = || builder.param("bias", &[out_channels], Init::Uniform(-bound, bound));
                let bias = options.bias.then(bias).transpose()?;
                let options = ConvOptions { stride, padding, dilation, groups };
                Ok($name { weight, bias, hooks: builder.hooks(), options })
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
    /// Options are built as for [`Conv1d`]: `Conv2d::new(&builder, Conv2dOptions::new(3, 8, 5).padding(2))`.
    Conv2d, Conv2dOptions, conv2d, 2;
}
