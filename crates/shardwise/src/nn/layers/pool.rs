//! Pooling layers.

use crate::error::Result;
use crate::nn::module::{Forward, Hooks};
use crate::ops::{PerDim, PoolOptions};
use crate::placement::Placement;
use crate::tensor::DTensor;
use shardwise_derive::Module;

/// A pool of windows without dilation or other options, which exchanges halos of sharded dimensions and stores no windows.
type HaloPool = fn(&DTensor, usize, Option<usize>, usize) -> Result<DTensor>;

/// Runs a pool: with halos if it has such a form and the options are those of it.
fn pooled(
    x: &DTensor,
    options: &PoolOptions,
    halo: Option<HaloPool>,
    all_options: impl FnOnce(&DTensor) -> Result<DTensor>,
) -> Result<DTensor> {
    let one = |list: &[usize], default: usize| match *list {
        [] => Some(default),
        [one] => Some(one),
        _ => None,
    };
    let plain = !options.ceil_mode
        && options.count_include_pad
        && options.divisor_override.is_none()
        && one(&options.dilation, 1) == Some(1);
    let size = one(&options.kernel_size, 1);
    let window = size.and_then(|size| Some((size, one(&options.stride, size)?, one(&options.padding, 0)?)));
    match (halo, window) {
        (Some(halo), Some((size, stride, padding))) if plain => halo(x, size, Some(stride), padding),
        _ => all_options(x),
    }
}

/// The struct of a pool, and the options that all pools have.
macro_rules! pool_layer {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            #[module(skip)]
            options: PoolOptions,
        }

        impl $name {
            /// Windows of `kernel_size`, one number or one per spatial dimension, side by side.
            pub fn new(kernel_size: impl Into<PerDim>) -> Self {
                $name { hooks: Hooks::default(), options: PoolOptions::new(kernel_size.into().given()) }
            }

            /// Sets the distance between windows.
            pub fn stride(mut self, stride: impl Into<PerDim>) -> Self {
                self.options.stride = stride.into().given().to_vec();
                self
            }

            /// Sets the padding on both sides.
            pub fn padding(mut self, padding: impl Into<PerDim>) -> Self {
                self.options.padding = padding.into().given().to_vec();
                self
            }

            /// Sets whether the last window may end outside of the padded dimension.
            pub fn ceil_mode(mut self, ceil_mode: bool) -> Self {
                self.options.ceil_mode = ceil_mode;
                self
            }
        }
    };
}

macro_rules! max_pools {
    ($($(#[$meta:meta])* $name:ident, $spatial:literal, $halo:expr;)*) => {$(
        pool_layer! { $(#[$meta])* $name }

        impl $name {
            /// Sets the distance between the elements of a window.
            pub fn dilation(mut self, dilation: impl Into<PerDim>) -> Self {
                self.options.dilation = dilation.into().given().to_vec();
                self
            }

            /// Computes the maxima and their indices in the flattened spatial dimensions (i64), PyTorch's `return_indices=True`: what
            /// the `MaxUnpool` layers take.
            #[doc(alias = "return_indices")]
            #[track_caller]
            pub fn forward_indices(&self, x: &DTensor) -> Result<(DTensor, DTensor)> {
                let mut found = self.hooks.run_all(&[x], |x| {
                    let (values, indices) = x[0].max_pool($spatial, &self.options)?;
                    Ok(vec![values, indices])
                })?;
                let indices = found.remove(1);
                Ok((found.remove(0), indices))
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                let all = |x: &DTensor| Ok(x.max_pool($spatial, &self.options)?.0);
                self.hooks.run(x, |x| pooled(x, &self.options, $halo, all))
            }
        }
    )*};
}

macro_rules! avg_pools {
    ($($(#[$meta:meta])* $name:ident, $spatial:literal, $halo:expr;)*) => {$(
        pool_layer! { $(#[$meta])* $name }

        impl $name {
            /// Sets whether a mean divides by the padding too; true by default.
            pub fn count_include_pad(mut self, count_include_pad: bool) -> Self {
                self.options.count_include_pad = count_include_pad;
                self
            }

            /// Sets what a mean divides by in place of the size of its window.
            pub fn divisor_override(mut self, divisor: i64) -> Self {
                self.options.divisor_override = Some(divisor);
                self
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                let all = |x: &DTensor| x.avg_pool($spatial, &self.options);
                self.hooks.run(x, |x| pooled(x, &self.options, $halo, all))
            }
        }
    )*};
}

max_pools! {
    /// Max pooling of `[n, channels, length]`.
    MaxPool1d, 1, Some(DTensor::max_pool1d);
    /// Max pooling of `[n, channels, height, width]`.
    MaxPool2d, 2, Some(DTensor::max_pool2d);
    /// Max pooling of `[n, channels, depth, height, width]`.
    MaxPool3d, 3, None;
}

avg_pools! {
    /// Average pooling of `[n, channels, length]`; padding counts as zeros.
    AvgPool1d, 1, Some(DTensor::avg_pool1d);
    /// Average pooling of `[n, channels, height, width]`; padding counts as zeros.
    AvgPool2d, 2, Some(DTensor::avg_pool2d);
    /// Average pooling of `[n, channels, depth, height, width]`; padding counts as zeros.
    AvgPool3d, 3, None;
}

macro_rules! lp_pools {
    ($($(#[$meta:meta])* $name:ident, $spatial:literal;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            norm_type: f64,
            #[module(skip)]
            options: PoolOptions,
        }

        impl $name {
            /// Norms of order `norm_type` of windows of `kernel_size`, side by side.
            pub fn new(norm_type: f64, kernel_size: impl Into<PerDim>) -> Self {
                let options = PoolOptions::new(kernel_size.into().given());
                $name { hooks: Hooks::default(), norm_type, options }
            }

            /// Sets the distance between windows.
            pub fn stride(mut self, stride: impl Into<PerDim>) -> Self {
                self.options.stride = stride.into().given().to_vec();
                self
            }

            /// Sets whether the last window may end outside of the dimension.
            pub fn ceil_mode(mut self, ceil_mode: bool) -> Self {
                self.options.ceil_mode = ceil_mode;
                self
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.hooks.run(x, |x| x.lp_pool(self.norm_type, $spatial, &self.options))
            }
        }
    )*};
}

lp_pools! {
    /// Power-average pooling of `[n, channels, length]`.
    #[doc(alias = "LPPool1d")]
    LpPool1d, 1;
    /// Power-average pooling of `[n, channels, height, width]`.
    #[doc(alias = "LPPool2d")]
    LpPool2d, 2;
    /// Power-average pooling of `[n, channels, depth, height, width]`.
    #[doc(alias = "LPPool3d")]
    LpPool3d, 3;
}

macro_rules! adaptive_pools {
    ($($(#[$meta:meta])* $name:ident, $spatial:literal, |$x:ident, $sizes:ident| $pool:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            #[module(skip)]
            sizes: Vec<Option<usize>>,
        }

        impl $name {
            /// Pools to `output_size`, one number or one per spatial dimension.
            pub fn new(output_size: impl Into<PerDim>) -> Self {
                let given = output_size.into();
                let sizes = given.of($spatial).unwrap_or(given.given()).iter().map(|&n| Some(n)).collect();
                $name { hooks: Hooks::default(), sizes }
            }

            /// Pools to one size per spatial dimension; `None` keeps the size that the input has.
            pub fn with_sizes(sizes: &[Option<usize>; $spatial]) -> Self {
                $name { hooks: Hooks::default(), sizes: sizes.to_vec() }
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                let $sizes = &self.sizes;
                self.hooks.run(x, |$x| $pool)
            }
        }
    )*};
}

adaptive_pools! {
    /// Average pooling of `[n, channels, length]` to a given size.
    AdaptiveAvgPool1d, 1, |x, sizes| x.adaptive_avg_pool(sizes);
    /// Average pooling of `[n, channels, height, width]` to a given size.
    AdaptiveAvgPool2d, 2, |x, sizes| x.adaptive_avg_pool(sizes);
    /// Average pooling of `[n, channels, depth, height, width]` to a given size.
    AdaptiveAvgPool3d, 3, |x, sizes| x.adaptive_avg_pool(sizes);
    /// Max pooling of `[n, channels, length]` to a given size.
    AdaptiveMaxPool1d, 1, |x, sizes| Ok(x.adaptive_max_pool(sizes)?.0);
    /// Max pooling of `[n, channels, height, width]` to a given size.
    AdaptiveMaxPool2d, 2, |x, sizes| Ok(x.adaptive_max_pool(sizes)?.0);
    /// Max pooling of `[n, channels, depth, height, width]` to a given size.
    AdaptiveMaxPool3d, 3, |x, sizes| Ok(x.adaptive_max_pool(sizes)?.0);
}

/// The size of the result of a fractional pool.
#[derive(Clone)]
enum FractionalOutput {
    Sizes(Vec<usize>),
    Ratios(Vec<f64>),
}

macro_rules! fractional_pools {
    ($($(#[$meta:meta])* $name:ident, $spatial:literal;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Module)]
        pub struct $name {
            /// Input and output hooks; see [`Hooks`].
            pub hooks: Hooks,
            #[module(skip)]
            kernel_size: PerDim,
            #[module(skip)]
            output: FractionalOutput,
        }

        impl $name {
            /// Windows of `kernel_size`, as many as `output_size` says.
            pub fn new(kernel_size: impl Into<PerDim>, output_size: [usize; $spatial]) -> Self {
                let output = FractionalOutput::Sizes(output_size.to_vec());
                $name { hooks: Hooks::default(), kernel_size: kernel_size.into(), output }
            }

            /// Windows of `kernel_size`, as many as these fractions of the sizes of the input.
            #[doc(alias = "output_ratio")]
            pub fn with_ratio(kernel_size: impl Into<PerDim>, output_ratio: [f64; $spatial]) -> Self {
                let output = FractionalOutput::Ratios(output_ratio.to_vec());
                $name { hooks: Hooks::default(), kernel_size: kernel_size.into(), output }
            }
        }

        impl Forward for $name {
            fn forward(&self, x: &DTensor) -> Result<DTensor> {
                self.hooks.run(x, |x| fractional(x, self.kernel_size, &self.output, $spatial))
            }
        }
    )*};
}

fractional_pools! {
    /// Max pooling of `[n, channels, height, width]` with windows at random distances, drawn from the generator of the mesh.
    FractionalMaxPool2d, 2;
    /// Max pooling of `[n, channels, depth, height, width]` with windows at random distances, drawn from the generator of the mesh.
    FractionalMaxPool3d, 3;
}

fn fractional(x: &DTensor, kernel_size: PerDim, output: &FractionalOutput, spatial: usize) -> Result<DTensor> {
    let (lead, own) = x.shape().split_at(x.ndim().saturating_sub(spatial));
    let sizes = match output {
        FractionalOutput::Sizes(sizes) => sizes.clone(),
        FractionalOutput::Ratios(ratios) => own.iter().zip(ratios).map(|(&n, r)| (n as f64 * r) as usize).collect(),
    };
    let replicated = vec![Placement::Replicate; x.placements().len()];
    let samples = DTensor::rand([lead, &[spatial]].concat(), x.device_mesh(), replicated)?;
    Ok(x.fractional_max_pool(kernel_size.given(), &sizes, &samples)?.0)
}

macro_rules! unpools {
    ($($(#[$meta:meta])* $name:ident, $spatial:literal;)*) => {$(
        pool_layer! { $(#[$meta])* $name }

        impl $name {
            /// Writes elements to the places that `indices` names, and zeros to the rest. The sizes of the result are `output_size`, or
            /// the smallest that the windows come from.
            #[track_caller]
            pub fn forward_indices(
                &self,
                x: &DTensor,
                indices: &DTensor,
                output_size: Option<[usize; $spatial]>,
            ) -> Result<DTensor> {
                let mut found = self.hooks.run_all(&[x, indices], |x| {
                    let own = &x[0].shape()[x[0].ndim().saturating_sub($spatial)..];
                    let sizes = output_size.map_or_else(|| self.options.unpooled_sizes(own), |sizes| sizes.to_vec());
                    Ok(vec![x[0].max_unpool(&x[1], &sizes)?])
                })?;
                Ok(found.swap_remove(0))
            }
        }
    )*};
}

unpools! {
    /// The inverse of [`MaxPool1d`], with the indices of the maxima.
    MaxUnpool1d, 1;
    /// The inverse of [`MaxPool2d`], with the indices of the maxima.
    MaxUnpool2d, 2;
    /// The inverse of [`MaxPool3d`], with the indices of the maxima.
    MaxUnpool3d, 3;
}
