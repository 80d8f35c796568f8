//! [`Division`]: how a placement that shards a dimension divides indices over the coordinates of a mesh axis.

use std::fmt;
use std::sync::Arc;

use super::runs::Runs;
use crate::error::Result;

/// How the indices of a dimension are divided over the coordinates of a mesh axis. One file per kind of shard implements
/// it; layouts, redistributions and operators ask [`Placement`](super::Placement), which asks the kind.
pub(super) trait Division {
    /// The indices of `whole` that coordinate `i` of `k` holds. Over all `i`, each index is held once. `outer` is the
    /// row-major number of the coordinates on the axes that divide the dimension before this one.
    fn part(&self, whole: &Runs, k: usize, i: usize, outer: usize) -> Runs;

    /// Whether every coordinate holds one range of positions of `whole`, in the order of coordinates.
    fn is_contiguous(&self) -> bool;

    /// Whether it can divide any number of indices.
    fn divides_any(&self) -> bool {
        true
    }

    /// The form in which a layout stores it, so that equal divisions are equal placements; an error if it cannot divide
    /// the indices of the context.
    fn canonical(&self, divided: &DivisionContext<'_>) -> Result<CanonicalForm>;

    /// Writes its text form on a dimension. The inverse is a function `parse` of the kind.
    fn write(&self, dim: isize, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// The indices that are divided, for [`Division::canonical`].
pub(crate) struct DivisionContext<'a> {
    /// Number of coordinates of the axis.
    pub(crate) k: usize,
    /// Number of combinations of coordinates on the axes that divide the dimension before this one.
    pub(crate) combinations: usize,
    /// Number of indices to divide at one of these combinations.
    pub(crate) len: &'a dyn Fn(usize) -> usize,
    /// The placement and its axis, as errors name them.
    pub(crate) name: &'a dyn Fn() -> String,
}

/// How a layout stores a division.
pub(super) enum CanonicalForm {
    /// As the program wrote it.
    AsWritten,
    /// As a plain shard, which owns the same indices.
    Chunks,
    /// As a ragged shard of these sizes.
    Sizes(Arc<[usize]>),
}
