//! `Partial(op)`: what planners need to know of a reduction that is still to be made.

use shardwise_kernels::ReduceOp;

/// Whether a value is its own operand on every rank: reducing copies of it changes nothing.
#[inline]
pub(crate) fn is_idempotent(op: ReduceOp) -> bool {
    match op {
        ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min | ReduceOp::BitAnd | ReduceOp::BitOr => true,
        ReduceOp::Sum | ReduceOp::Product | ReduceOp::BitXor => false,
    }
}

/// Whether operands of linear functions reduce to the function of the reduction.
#[inline]
pub(crate) fn is_linear(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Sum | ReduceOp::Avg)
}

/// Whether two reductions along different axes may run in either order.
#[inline]
pub(crate) fn commute(a: ReduceOp, b: ReduceOp) -> bool {
    a == b || is_linear(a) && is_linear(b)
}
