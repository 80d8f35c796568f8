//! The collectives that are measured, and the tensors they are measured on.

/// A collective that this library and MPI both have.
#[derive(Clone, Copy)]
pub(super) enum Collective {
    Barrier,
    Broadcast,
    AllGather,
    AllReduce,
    ReduceScatter,
    ExchangeDims,
}

/// Columns of the benchmark tensors; the number of rows follows from the size. At least as many as ranks that are measured
/// by default, so that every rank gets a column.
pub(super) const COLUMNS: usize = 8;

/// Splits `total` into `n` sizes that differ by at most one.
pub(super) fn even(total: usize, n: usize) -> Vec<usize> {
    (0..n).map(|r| total * (r + 1) / n - total * r / n).collect()
}
