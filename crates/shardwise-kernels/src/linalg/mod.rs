//! Factorizations and solvers of dense matrices, batched over leading dimensions.
//!
//! | file | algorithm |
//! |---|---|
//! | `cholesky` | Cholesky, row by row |
//! | `lu` | LU with partial pivoting, solutions, inverses |
//! | `triangular` | substitution |
//! | `ldl` | Bunch-Kaufman factors of symmetric matrices, and solutions with them |
//! | `householder` | QR, products of reflections and their gradient |
//! | `symmetric` | eigenvalues of symmetric matrices: tridiagonalization and implicit QL |
//! | `svd` | singular values: QR, then one-sided Jacobi rotations |
//! | `least_squares` | pseudo-inverses, ranks and least squares from singular values |
//! | `exponential` | the matrix exponential: scaling, Padé approximation, squaring |
//!
//! Kernels take f32 and f64 and compute in the type of their elements. Matrices of a batch are independent of each other and are
//! divided over the threads of the pool. A matrix with NaN or infinite elements gives NaN where the algorithm would not end.

mod batch;
mod cholesky;
mod exponential;
mod householder;
mod ldl;
mod least_squares;
mod lu;
mod real;
mod row_operations;
mod svd;
mod symmetric;
#[cfg(test)]
mod tests;
mod triangular;

pub use cholesky::cholesky;
pub use exponential::matrix_exp;
pub use householder::{householder_product, householder_product_backward, qr};
pub use ldl::{ldl_factor, ldl_solve};
pub use least_squares::{Tolerance, least_squares, matrix_rank, pseudo_inverse};
pub use lu::{Determinants, Factors, determinant, inverse, lu_factor, lu_solve, permutation, solve};
pub use svd::{PolarFactors, polar, svd};
pub use symmetric::{eigh, symmetric_sqrt};
pub use triangular::{Triangle, solve_triangular};
