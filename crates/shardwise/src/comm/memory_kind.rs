//! What the bytes of a rank are for.

use serde::{Deserialize, Serialize};

/// What the bytes of a tensor are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Values of parameters.
    Parameters,
    /// Tensors that a backward pass created.
    Gradients,
    /// State of optimizers.
    OptimizerState,
    /// Tensors created outside of backward passes and updates: batches, activations, and whatever else a program computes.
    Activations,
    /// Buffers of modules, inputs that operators have redistributed, intermediate results of redistributions and of updates.
    Buffers,
}

impl MemoryKind {
    /// All kinds.
    pub const ALL: [MemoryKind; 5] = [
        MemoryKind::Parameters,
        MemoryKind::Gradients,
        MemoryKind::OptimizerState,
        MemoryKind::Activations,
        MemoryKind::Buffers,
    ];

    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::Parameters => "parameters",
            MemoryKind::Gradients => "gradients",
            MemoryKind::OptimizerState => "optimizer state",
            MemoryKind::Activations => "activations",
            MemoryKind::Buffers => "buffers",
        }
    }
}
