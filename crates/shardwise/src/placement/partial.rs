//! `Partial(op)`: algebraic properties of reductions that planners rely on.

use shardwise_kernels::ReduceOp;

/// Whether reducing copies of a value gives the value, so that a replicated value is partial without any change.
#[inline]
pub(crate) fn is_idempotent(op: ReduceOp) -> bool {
    match op {
        ReduceOp::Avg | ReduceOp::Max | ReduceOp::Min | ReduceOp::BitAnd | ReduceOp::BitOr => true,
        ReduceOp::Sum | ReduceOp::Product | ReduceOp::BitXor | ReduceOp::LogSumExp => false,
    }
}

/// Whether a linear function may be applied to the operands before the reduction instead of to its result.
#[inline]
pub(crate) fn is_linear(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::Sum | ReduceOp::Avg)
}

/// Whether reductions over two axes may run in either order.
#[inline]
pub(crate) fn commute(a: ReduceOp, b: ReduceOp) -> bool {
    a == b || is_linear(a) && is_linear(b)
}
