//! Sums of products: einsum, matrix products, experts, transforms, linear algebra.

pub(in crate::ops) mod equation;
pub(in crate::ops) mod contraction;
pub(in crate::ops) mod local_product;
pub(in crate::ops) mod einsum;
pub(in crate::ops) mod affine;
pub(in crate::ops) mod linear_activation;
pub(in crate::ops) mod tensor_product;
pub(in crate::ops) mod grouped;
pub(in crate::ops) mod scaled_mm;
pub(in crate::ops) mod quantized;
pub(in crate::ops) mod experts;
pub(in crate::ops) mod fft;
pub(in crate::ops) mod complex_fft;
pub(in crate::ops) mod linalg;
