//! What a step of a redistribution does, and which reductions may change places.

use crate::placement::ReduceOp;

/// What happens in a step. Axes are positions on the mesh; a group spans them in the order listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedistributeStepKind {
    /// Another name for the same data: axes of size 1.
    Relabel,
    /// Every rank keeps a part of what it has.
    Narrow,
    /// Partial values are reduced; every rank gets the result.
    AllReduce {
        /// The axes.
        axes: Vec<usize>,
        /// How operands combine.
        op: ReduceOp,
    },
    /// Partial values are reduced; every rank gets a shard of the result.
    ReduceScatter {
        /// The axes.
        axes: Vec<usize>,
        /// How operands combine.
        op: ReduceOp,
        /// The tensor dimension that is cut.
        dim: usize,
    },
    /// Shards along one dimension are joined.
    AllGather {
        /// The axes.
        axes: Vec<usize>,
        /// The tensor dimension.
        dim: usize,
    },
    /// Shards along one dimension become shards along another.
    ExchangeDims {
        /// The axes.
        axes: Vec<usize>,
        /// The dimension that was cut.
        from: usize,
        /// The dimension that is cut now.
        to: usize,
    },
    /// Every rank gets the boxes that it lacks from those that have them.
    ExchangeBoxes {
        /// The axes.
        axes: Vec<usize>,
    },
    /// The value becomes operands of a reduction.
    MakePartial,
}
