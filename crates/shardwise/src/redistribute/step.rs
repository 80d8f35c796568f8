//! [`RedistributeStepKind`]: the collectives and local operations of a redistribution.

use crate::placement::ReduceOp;

/// The operation of one step. Axes are indices of mesh axes; the group of a collective spans them in the order listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedistributeStepKind {
    /// Changes placements on axes of size 1, which changes no data. Local.
    Relabel,
    /// Every rank keeps a part of its local tensor: replicated axes become sharded. Local.
    Narrow,
    /// Partial axes become replicated.
    AllReduce {
        /// The axes that are reduced.
        axes: Vec<usize>,
        /// The reduction.
        op: ReduceOp,
    },
    /// Partial axes become sharded.
    ReduceScatter {
        /// The axes that are reduced.
        axes: Vec<usize>,
        /// The reduction.
        op: ReduceOp,
        /// The tensor dimension that becomes sharded.
        dim: usize,
    },
    /// Axes that shard one dimension become replicated.
    AllGather {
        /// The axes that are gathered.
        axes: Vec<usize>,
        /// The tensor dimension that was sharded.
        dim: usize,
    },
    /// Axes change the dimension that they shard, in one all-to-all.
    ExchangeDims {
        /// The axes over which the dimensions are sharded.
        axes: Vec<usize>,
        /// The tensor dimension that was sharded.
        from: usize,
        /// The tensor dimension that becomes sharded.
        to: usize,
    },
    /// Every rank receives the boxes that it lacks from ranks that have them, in one all-to-all: any change of shards.
    ExchangeBoxes {
        /// The axes over whose ranks boxes move.
        axes: Vec<usize>,
    },
    /// Replicated or sharded axes become partial, by filling with the neutral element of the reduction. Local.
    MakePartial,
}
