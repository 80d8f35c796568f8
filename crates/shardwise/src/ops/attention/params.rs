//! Arguments of attention that are not tensors.

use std::hash::{Hash, Hasher};

use crate::ops::arguments::scalar::Scalar;
use crate::random::GeneratorState;
use shardwise_kernels::attention::BlockMask;

/// Arguments of one call of attention, in the form in which operators are compared.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct AttentionParams {
    pub(super) scale: Scalar,
    pub(super) causal: bool,
    pub(super) window: Option<usize>,
    pub(super) soft_cap: Option<Scalar>,
    pub(super) query_offset: isize,
    pub(super) blocks: Option<BlockMask>,
    pub(super) dropout: Option<DropoutDraw>,
    /// Whether the queries have a dimension of groups after that of the key heads.
    pub(super) grouped: bool,
}

impl AttentionParams {
    /// The part of some work that is left where blocks are skipped.
    pub(super) fn unmasked(&self, work: u64) -> u64 {
        self.blocks.as_ref().map_or(work, |blocks| (work as f64 * (1.0 - blocks.sparsity())) as u64)
    }
}

/// Dropout of probabilities with one draw of the generator.
///
/// Draws compare equal: no layout depends on the numbers, and decisions are cached by what is compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct DropoutDraw {
    pub(super) p: Scalar,
    pub(super) draw: GeneratorState,
}

impl PartialEq for DropoutDraw {
    fn eq(&self, other: &Self) -> bool {
        self.p == other.p
    }
}

impl Eq for DropoutDraw {}

impl Hash for DropoutDraw {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.p.hash(state);
    }
}
