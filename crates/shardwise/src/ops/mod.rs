//! The operators of [`DTensor`](crate::DTensor), one family per file: methods, sharding rule, kernel, gradient. [`ops`] lists them all.

mod table;
mod arguments;
mod gradients;
mod elementwise;
mod shapes;
mod indexing;
mod products;
mod reductions;
mod norms;
mod losses;
mod spatial;
mod attention;
mod override_rule;

pub use arguments::broadcast::broadcast_shapes;
pub(crate) use attention::RotaryFrequencies;
pub use attention::{AttentionOptions, BlockMask, MultiHeadOptions};
pub use elementwise::complex::ComplexTensor;
pub use elementwise::custom_elementwise::{ElementwiseDerivative, ElementwiseKernel, ElementwiseOp};
pub use indexing::data_dependent::Unique;
pub use indexing::index_argument::{Ellipsis, Index, Indices, NewAxis, strided};
pub use indexing::lookup::{EmbeddingBagMode, EmbeddingBagOptions, EmbeddingOptions};
pub use indexing::scatter_reduce::ScatterReduce;
pub use losses::loss::{LossOptions, Reduction};
pub use losses::margin_loss::{CtcOptions, NllOptions, TripletOptions};
pub use override_rule::override_rule;
pub use products::fft::FftNorm;
pub use products::linalg::{LeastSquares, MatrixNorm, ToleranceOptions};
pub use products::linear_activation::Activation;
pub use products::quantized::{BlockType, QuantizedTensor};
pub use reductions::statistics::{QuantileInterpolation, Spacing};
pub use spatial::convolution::{ConvOptions, ConvTransposeOptions, PerDim};
pub use spatial::resample::{GridMode, GridPadding, InterpolateOptions, Interpolation, PadMode};
pub use spatial::windows::PoolOptions;
pub use table::{OpEntry, PlacementRule, SampleInput};

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
    elementwise::unary::OPS,
    elementwise::parametrized::OPS,
    elementwise::binary::OPS,
    elementwise::ternary::OPS,
    products::einsum::OPS,
    products::grouped::OPS,
    products::experts::OPS,
    products::affine::OPS,
    reductions::reduce::OPS,
    norms::normalization::OPS,
    norms::residual::OPS,
    losses::loss::OPS,
    shapes::view::OPS,
    shapes::reshape::OPS,
    shapes::narrow::OPS,
    shapes::join::OPS,
    shapes::flip::OPS,
    shapes::band::OPS,
    indexing::lookup::OPS,
    indexing::scatter::OPS,
    indexing::masked::OPS,
    reductions::sort::OPS,
    reductions::scan::OPS,
    losses::loss::CLASS_OPS,
    elementwise::dropout::OPS,
    attention::OPS,
    spatial::convolution::OPS,
    spatial::convolution::POOLING_OPS,
    products::linalg::FACTOR_OPS,
    products::linalg::QR_OPS,
    products::linalg::SOLVE_OPS,
    products::linalg::SPECTRAL_OPS,
    products::linalg::DETERMINANT_OPS,
    products::linalg::INVERSE_OPS,
    products::linalg::NORM_OPS,
    products::linalg::PRODUCT_OPS,
    elementwise::special::UNARY_OPS,
];

/// Composed operators by family.
static COMPOSED_OPS: [&[OpEntry]; 22] = [
    products::tensor_product::OPS,
    norms::channels::OPS,
    reductions::masked_reduce::OPS,
    attention::COMPOSED_OPS,
    products::linear_activation::OPS,
    elementwise::activation::OPS,
    shapes::arrange::OPS,
    indexing::scatter_reduce::OPS,
    indexing::lookup::COMPOSED_OPS,
    elementwise::dropout::COMPOSED_OPS,
    reductions::multinomial::COMPOSED_OPS,
    spatial::windows::OPS,
    spatial::fold::OPS,
    spatial::resample::OPS,
    losses::margin_loss::OPS,
    losses::class_loss::OPS,
    norms::distance::OPS,
    reductions::statistics::OPS,
    indexing::data_dependent::OPS,
    elementwise::special::ORDER_OPS,
    elementwise::special::BINARY_OPS,
    products::fft::OPS,
];
