//! A product of two matrices in memory, and the blocks in which it is summed.

use super::pack::{MatmulElement, Source};

/// Products per block of the contracted dimension. A panel of the left factor (8 rows of 512 f32, 16 KiB) stays in the first
/// cache while panels of the right one are read from the second.
pub(super) const DEPTH: usize = 512;

/// A product of two matrices in memory.
#[derive(Clone, Copy)]
pub(super) struct MatrixProduct<S: MatmulElement> {
    /// Rows, columns and the contracted dimension.
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) left: Source<S>,
    pub(super) right: Source<S>,
    /// A row that is added to every row of the result.
    pub(super) bias: Option<*const S::Wide>,
    /// Whether the product is added to what the result holds. Without a bias.
    pub(super) accumulates: bool,
}
