//! Linear algebra: factorizations, solvers, eigenvalues, norms. Names are those of ATen: PyTorch's `torch.linalg.inv` is `linalg_inv`.
//!
//! Batch dimensions are sharded freely and without communication. A matrix is held whole by one rank: dimensions of matrices that
//! are sharded are gathered, or moved to a batch dimension where that is cheaper. Gradients are formulas of distributed operators.

mod rule;
mod factor;
mod qr;
mod solve;
mod spectral;
mod determinant;
mod inverse;
mod norms;
mod product;

use super::OpEntry;

pub use inverse::{LeastSquares, ToleranceOptions};
pub use norms::MatrixNorm;

pub(super) const FACTOR_OPS: &[OpEntry] = factor::OPS;
pub(super) const QR_OPS: &[OpEntry] = qr::OPS;
pub(super) const SOLVE_OPS: &[OpEntry] = solve::OPS;
pub(super) const SPECTRAL_OPS: &[OpEntry] = spectral::OPS;
pub(super) const DETERMINANT_OPS: &[OpEntry] = determinant::OPS;
pub(super) const INVERSE_OPS: &[OpEntry] = inverse::OPS;
pub(super) const NORM_OPS: &[OpEntry] = norms::OPS;
pub(super) const PRODUCT_OPS: &[OpEntry] = product::OPS;
