//! Convolutions and pooling. If a spatial dimension is sharded, ranks exchange halos: the rows that their windows reach beyond
//! their own shard.
//!
//! | file | what it holds |
//! |---|---|
//! | `options` | options of convolutions, for all spatial dimensions or for each |
//! | `window` | the sliding window along one dimension |
//! | `halo` | which indices of one tensor a shard of another reads or writes |
//! | `operator` | the convolution and its gradients, which are one trilinear form |
//! | `convolve` | the methods of convolutions and transposed convolutions |
//! | `pooling` | maxima and means over windows |

mod options;
mod window;
mod halo;
mod operator;
mod convolve;
mod pooling;

pub use options::{ConvOptions, ConvTransposeOptions, PerDim};

pub(in crate::ops) use convolve::OPS;
pub(in crate::ops) use pooling::OPS as POOLING_OPS;
