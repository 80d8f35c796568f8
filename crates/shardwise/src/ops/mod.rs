//! The operators of [`DTensor`](crate::DTensor), one family per file: methods, sharding rule, kernel, gradient. [`ops`] lists them all.

mod accumulate;
mod affine;
mod attention;
mod band;
mod binary;
mod channel_norm;
mod contraction;
mod convolution;
mod custom_elementwise;
mod derivative;
mod dropout;
mod dtype;
mod einsum;
mod equation;
mod fft;
mod flip;
mod fused_rows;
mod index;
mod indices;
mod join;
mod linalg;
mod lookup;
mod loss;
mod masked;
mod narrow;
mod normalization;
mod operators;
mod override_rule;
mod parametrized;
mod quantized;
mod reduce;
mod residual;
mod reshape;
mod scalar;
mod scan;
mod scan_gradient;
mod scatter;
mod sort;
mod special;
mod table;
mod ternary;
mod unary;
mod view;

pub use attention::AttentionOptions;
pub(crate) use attention::RotaryFrequencies;
pub use convolution::{ConvOptions, ConvTransposeOptions, PerDim};
pub use custom_elementwise::{ElementwiseDerivative, ElementwiseKernel, ElementwiseOp};
pub use fft::FftNorm;
pub use index::{Ellipsis, Index, Indices, NewAxis, strided};
pub use linalg::{LeastSquares, MatrixNorm, ToleranceOptions};
pub use lookup::EmbeddingBagMode;
pub use loss::{LossOptions, Reduction};
pub use override_rule::override_rule;
pub use table::{OpEntry, PlacementRule, SampleInput};

/// Iterates over all operators, with sample inputs: what tests and `shardwise ops` enumerate.
pub fn ops() -> impl Iterator<Item = &'static OpEntry> {
    OPS.iter().flat_map(|family| family.iter())
}

/// All operators by family. The order is that of `shardwise ops`.
static OPS: [&[OpEntry]; 38] = [
    unary::OPS,
    parametrized::OPS,
    binary::OPS,
    ternary::OPS,
    einsum::OPS,
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
    special::ORDER_OPS,
    special::BINARY_OPS,
    fft::OPS,
];
