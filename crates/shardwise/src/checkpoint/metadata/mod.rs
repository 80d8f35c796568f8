//! What a checkpoint holds, as values: states, types of elements, boxes and blocks.

pub(in crate::checkpoint) mod value;
pub(in crate::checkpoint) mod state;
pub(in crate::checkpoint) mod element;
pub(in crate::checkpoint) mod encoding;
pub(in crate::checkpoint) mod blocks;
pub(in crate::checkpoint) mod stored;
pub(in crate::checkpoint) mod assign;
