//! Functions of the elements at one position, and dropout.

pub(in crate::ops) mod unary;
pub(in crate::ops) mod binary;
pub(in crate::ops) mod ternary;
pub(in crate::ops) mod parametrized;
pub(in crate::ops) mod activation;
pub(in crate::ops) mod custom_elementwise;
pub(in crate::ops) mod operators;
pub(in crate::ops) mod dropout;
pub(in crate::ops) mod complex;
pub(in crate::ops) mod special;
