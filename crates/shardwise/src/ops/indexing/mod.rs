//! Elements by their index: slices, lookups, scatters, masks.

pub(in crate::ops) mod index_argument;
pub(in crate::ops) mod index;
pub(in crate::ops) mod assign;
pub(in crate::ops) mod lookup;
pub(in crate::ops) mod scatter;
pub(in crate::ops) mod scatter_reduce;
pub(in crate::ops) mod masked;
pub(in crate::ops) mod data_dependent;
