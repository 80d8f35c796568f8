//! How tensors are compared, expected and shown.

pub(in crate::tensor) mod compare;
pub(in crate::tensor) mod expect;
pub(in crate::tensor) mod provenance;
pub(in crate::tensor) mod show;
pub(in crate::tensor) mod state;
