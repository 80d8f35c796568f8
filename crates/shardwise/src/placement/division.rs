//! What every placement that shards a dimension answers: how it divides a range of indices over the coordinates of a mesh
//! axis.

use std::fmt;
use std::sync::Arc;

use super::runs::Runs;
use crate::error::Result;

/// How a range of indices is divided over the coordinates of a mesh axis. One file per kind implements it; layouts,
/// redistributions and operators ask [`Placement`](super::Placement), which asks the kind.
pub(super) trait Division {
    /// What coordinate `i` of `k` keeps of `whole`. Over all `i` each index is kept once. `outer` numbers the coordinates
    /// of the axes that divide the dimension before this one, row-major.
    fn part(&self, whole: &Runs, k: usize, i: usize, outer: usize) -> Runs;

    /// Whether every coordinate keeps one range of the positions of what is divided, one coordinate after the other.
    fn is_contiguous(&self) -> bool;

    /// Whether it divides ranges of any length.
    fn divides_any(&self) -> bool {
        true
    }

    /// The form in which a layout stores it, so that equal divisions are equal placements; an error if it does not divide
    /// what it is to divide.
    fn canonical(&self, divided: &DivisionContext<'_>) -> Result<CanonicalForm>;

    /// Its text form on a dimension. Parsing it back is a function `parse` beside the kind.
    fn write(&self, dim: isize, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// What is divided, for [`Division::canonical`].
pub(crate) struct DivisionContext<'a> {
    /// Number of coordinates of the axis.
    pub(crate) k: usize,
    /// Number of combinations of coordinates of the axes that divide before.
    pub(crate) combinations: usize,
    /// How much is to be divided at one of these combinations.
    pub(crate) len: &'a dyn Fn(usize) -> usize,
    /// The placement and its axis, as errors name them.
    pub(crate) name: &'a dyn Fn() -> String,
}

/// How a layout stores a division.
pub(super) enum CanonicalForm {
    /// As the program wrote it.
    AsWritten,
    /// It is the same as plain chunks.
    Chunks,
    /// Ranges of these sizes.
    Sizes(Arc<[usize]>),
}
