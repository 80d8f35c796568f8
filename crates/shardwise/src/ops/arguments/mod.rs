//! How arguments of operators are read: numbers, types, shapes that broadcast, indices.

pub(in crate::ops) mod scalar;
pub(in crate::ops) mod dtype;
pub(in crate::ops) mod broadcast;
pub(in crate::ops) mod indices;
