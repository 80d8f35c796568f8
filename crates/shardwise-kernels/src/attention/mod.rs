//! Scaled dot-product attention in blocks that never stores its scores, and its backward pass.
//!
//! | file | content |
//! |---|---|
//! | `block_mask` | masks by blocks of queries and keys |
//! | `float` | the types in which attention computes |
//! | `tile` | products of small blocks in registers |
//! | `problem` | options, operands and which keys a query sees |
//! | `scores` | masks, soft cap, and dropout of one block of scores |
//! | `forward`, `backward` | the two passes |
//! | `merge` | combination of results over parts of the keys |
//! | `rotary` | rotary position embedding |
//!
//! A block of scores is transposed: a row belongs to a key, and its adjacent elements to queries. So the maximum, the
//! exponentials and the sums of a softmax are computed for a vector of queries at a time without horizontal operations, and
//! the products read keys and values in the order in which they are in memory, without packing them.

mod backward;
mod block_mask;
mod float;
mod forward;
mod merge;
mod problem;
mod rotary;
mod scores;
#[cfg(test)]
mod tests;
mod tile;

pub use backward::{AttentionGradients, attention_backward};
pub use block_mask::BlockMask;
pub use forward::{attention_forward, attention_part};
pub use merge::{merge_attention_parts, row_dots};
pub use problem::{AttentionArgs, AttentionBlocks, AttentionDropout};
pub use rotary::{RotaryTable, rotate_pairs};
