//! Softmax and norms, also together with what is before them, and distances.

pub(in crate::ops) mod normalization;
pub(in crate::ops) mod fused_rows;
pub(in crate::ops) mod log_sum;
pub(in crate::ops) mod residual;
pub(in crate::ops) mod channel_norm;
pub(in crate::ops) mod channels;
pub(in crate::ops) mod distance;
