//! Views, reshapes and joins: elements move, and none is computed.

pub(in crate::ops) mod view;
pub(in crate::ops) mod reshape;
pub(in crate::ops) mod narrow;
pub(in crate::ops) mod join;
pub(in crate::ops) mod flip;
pub(in crate::ops) mod band;
pub(in crate::ops) mod slice_sums;
pub(in crate::ops) mod arrange;
