//! What is done with checkpoints without a world: convert, compare, verify.

pub(in crate::checkpoint) mod convert;
pub(in crate::checkpoint) mod diff;
pub(in crate::checkpoint) mod verify;
