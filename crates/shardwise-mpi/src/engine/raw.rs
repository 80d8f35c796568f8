//! MPI calls as a program would make them by itself, for comparison.
