//! What a tensor records for the backward pass, also through local code.

pub(in crate::tensor) mod tape;
pub(in crate::tensor) mod local_code;
