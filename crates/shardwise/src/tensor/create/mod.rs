//! How tensors are created, by factories and from local parts, and whether there is memory for them.

pub(in crate::tensor) mod memory_check;
pub(in crate::tensor) mod device_registry;
pub(in crate::tensor) mod construct;
pub(in crate::tensor) mod factories;
pub(in crate::tensor) mod sequences;
pub(in crate::tensor) mod triangles;
pub(in crate::tensor) mod windows;
