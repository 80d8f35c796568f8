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

use crate::ops::OpEntry;

pub use inverse::{LeastSquares, ToleranceOptions};
pub use norms::MatrixNorm;

pub(in crate::ops) const FACTOR_OPS: &[OpEntry] = factor::OPS;
pub(in crate::ops) const QR_OPS: &[OpEntry] = qr::OPS;
pub(in crate::ops) const SOLVE_OPS: &[OpEntry] = solve::OPS;
pub(in crate::ops) const SPECTRAL_OPS: &[OpEntry] = spectral::OPS;
pub(in crate::ops) const DETERMINANT_OPS: &[OpEntry] = determinant::OPS;
pub(in crate::ops) const INVERSE_OPS: &[OpEntry] = inverse::OPS;
pub(in crate::ops) const NORM_OPS: &[OpEntry] = norms::OPS;
pub(in crate::ops) const PRODUCT_OPS: &[OpEntry] = product::OPS;
