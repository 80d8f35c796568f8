//! Bytes of tensors, from files and to them.

pub(in crate::checkpoint) mod files;
pub(in crate::checkpoint) mod cast;
pub(in crate::checkpoint) mod content;
pub(in crate::checkpoint) mod read;
pub(in crate::checkpoint) mod read_encoded;
pub(in crate::checkpoint) mod read_tensor;
