//! What backward passes share: sums that are written in place, and derivatives.

pub(in crate::ops) mod accumulate;
pub(in crate::ops) mod derivative;
