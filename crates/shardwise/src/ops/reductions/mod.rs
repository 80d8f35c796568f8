//! Sums, statistics, scans and orders along dimensions.

pub(in crate::ops) mod reduce;
pub(in crate::ops) mod shard_statistics;
pub(in crate::ops) mod statistics;
pub(in crate::ops) mod masked_reduce;
pub(in crate::ops) mod scan;
pub(in crate::ops) mod scan_gradient;
pub(in crate::ops) mod order_statistics;
pub(in crate::ops) mod sort;
pub(in crate::ops) mod sort_exchange;
pub(in crate::ops) mod multinomial;
