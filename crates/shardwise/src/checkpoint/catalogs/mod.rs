//! Descriptions of checkpoints in any format.

pub(in crate::checkpoint) mod format;
pub(in crate::checkpoint) mod catalog;
pub(in crate::checkpoint) mod open;
pub(in crate::checkpoint) mod directory;
