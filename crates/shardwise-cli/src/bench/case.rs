//! The collectives that are measured, and the tensors they are measured on.

/// A collective, as this library and MPI know it.
#[derive(Clone, Copy)]
pub(super) enum Collective {
    Barrier,
    Broadcast,
    AllGather,
    AllReduce,
    ReduceScatter,
    ExchangeDims,
}

/// Columns of the benchmark tensors; their rows are whatever the size asks for.
pub(super) const COLUMNS: usize = 8;

/// As even a cut as there is.
pub(super) fn even(total: usize, n: usize) -> Vec<usize> {
    (0..n).map(|r| total * (r + 1) / n - total * r / n).collect()
}
