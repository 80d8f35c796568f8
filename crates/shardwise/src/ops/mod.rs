//! The operators of [`DTensor`](crate::DTensor), one family per file: methods, sharding rule, kernel, gradient. [`ops`] lists them all.

mod accumulate;
mod activation;
mod affine;
mod arrange;
mod assign;
mod attention;
mod band;
mod binary;
mod broadcast;
mod channel_norm;
mod channels;
mod class_loss;
mod complex;
mod complex_fft;
mod contraction;
mod convolution;
mod custom_elementwise;
mod data_dependent;
mod derivative;
mod distance;
mod dropout;
mod dtype;
mod einsum;
mod equation;
mod experts;
mod fft;
mod flip;
mod fold;
mod fused_rows;
mod grouped;
mod index;
mod index_argument;
mod indices;
mod join;
mod linalg;
mod linear_activation;
mod lookup;
mod local_product;
mod log_sum;
mod loss;
mod margin_loss;
mod masked;
mod masked_reduce;
mod multinomial;
mod narrow;
mod normalization;
mod operators;
mod order_statistics;
mod override_rule;
mod parametrized;
mod quantized;
mod reduce;
mod residual;
mod resample;
mod reshape;
mod scalar;
mod scaled_mm;
mod scan;
mod scan_gradient;
mod scatter;
mod scatter_reduce;
mod shard_statistics;
mod slice_sums;
mod sort;
mod sort_exchange;
mod special;
mod statistics;
mod table;
mod tensor_product;
mod ternary;
mod unary;
mod view;
mod windows;

pub(crate) use attention::RotaryFrequencies;
pub use attention::{AttentionOptions, BlockMask, MultiHeadOptions};
pub use broadcast::broadcast_shapes;
pub use complex::ComplexTensor;
pub use convolution::{ConvOptions, ConvTransposeOptions, PerDim};
pub use custom_elementwise::{ElementwiseDerivative, ElementwiseKernel, ElementwiseOp};
pub use data_dependent::Unique;
pub use fft::FftNorm;
pub use index_argument::{Ellipsis, Index, Indices, NewAxis, strided};
pub use linalg::{LeastSquares, MatrixNorm, ToleranceOptions};
pub use linear_activation::Activation;
pub use lookup::{EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions};
pub use loss::{LossOptions, Reduction};
pub use margin_loss::{CtcOptions, NllOptions, TripletOptions};
pub use override_rule::override_rule;
pub use quantized::{BlockType, QuantizedTensor};
pub use resample::{GridMode, GridPadding, InterpolateOptions, Interpolation, PadMode};
pub use scatter_reduce::ScatterReduce;
pub use statistics::{QuantileInterpolation, Spacing};
pub use table::{OpEntry, PlacementRule, SampleInput};
pub use windows::PoolOptions;

/// Iterates over all operators, with sample inputs: what tests and `shardwise ops` enumerate.
pub fn ops() -> impl Iterator<Item = &'static OpEntry> {
    OPS.iter().flat_map(|family| family.iter())
}

/// Iterates over the operators composed of other operators, with sample inputs: what they refuse and communicate is what their parts
/// do, so that tests of rules and bounds take [`ops`], and tests of values and gradients take both.
pub fn composed_ops() -> impl Iterator<Item = &'static OpEntry> {
    COMPOSED_OPS.iter().flat_map(|family| family.iter())
}

/// All operators by family. The order is that of `shardwise ops`.
static OPS: [&[OpEntry]; 37] = [
    unary::OPS,
    parametrized::OPS,
    binary::OPS,
    ternary::OPS,
    einsum::OPS,
    grouped::OPS,
    experts::OPS,
    affine::OPS,
    reduce::OPS,
    normalization::OPS,
    residual::OPS,
    loss::OPS,
    view::OPS,
    reshape::OPS,
    narrow::OPS,
    join::OPS,
    flip::OPS,
    band::OPS,
    lookup::OPS,
    scatter::OPS,
    masked::OPS,
    sort::OPS,
    scan::OPS,
    loss::CLASS_OPS,
    dropout::OPS,
    attention::OPS,
    convolution::OPS,
    convolution::POOLING_OPS,
    linalg::FACTOR_OPS,
    linalg::QR_OPS,
    linalg::SOLVE_OPS,
    linalg::SPECTRAL_OPS,
    linalg::DETERMINANT_OPS,
    linalg::INVERSE_OPS,
    linalg::NORM_OPS,
    linalg::PRODUCT_OPS,
    special::UNARY_OPS,
];

/// Composed operators by family.
static COMPOSED_OPS: [&[OpEntry]; 22] = [
    tensor_product::OPS,
    channels::OPS,
    masked_reduce::OPS,
    attention::COMPOSED_OPS,
    linear_activation::OPS,
    activation::OPS,
    arrange::OPS,
    scatter_reduce::OPS,
    lookup::COMPOSED_OPS,
    dropout::COMPOSED_OPS,
    multinomial::COMPOSED_OPS,
    windows::OPS,
    fold::OPS,
    resample::OPS,
    margin_loss::OPS,
    class_loss::OPS,
    distance::OPS,
    statistics::OPS,
    data_dependent::OPS,
    special::ORDER_OPS,
    special::BINARY_OPS,
    fft::OPS,
];
