//! Factorizations: Cholesky, LU, LDL, QR.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::rule::{Whole, check_info, check_pivots, check_real, matrices, meta, outputs, signature, square};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};
use shardwise_kernels::linalg;

const POSITIVE_DEFINITE: &str = "positive-definite matrices";
const NONZERO_PIVOTS: &str = "matrices whose pivots are not zero";

impl DTensor {
    /// Returns the Cholesky factor `L` of symmetric positive-definite matrices, `A = L L^T`; with `upper`, `U` with `A = U^T U`.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    ///
    /// # Errors
    /// If a matrix is not positive definite: on the ranks that hold it, and the other ranks get it with their next collective; on all ranks
    /// if matrices had to be gathered.
    #[doc(alias = "linalg.cholesky")]
    #[doc(alias = "cholesky")]
    #[track_caller]
    pub fn linalg_cholesky(&self, upper: bool) -> Result<DTensor> {
        let moved = self.moves_matrices();
        let op = Cholesky { name: "linalg_cholesky", upper, check: !moved };
        let [factor, info] = outputs(dispatch(&op, &[self], Location::caller())?);
        if moved {
            info.check_info_of_all("linalg_cholesky", POSITIVE_DEFINITE)?;
        }
        Ok(factor)
    }

    /// As [`linalg_cholesky`](Self::linalg_cholesky), and returns per matrix 0 (i32), or the order of the leading minor that is not
    /// positive definite.
    #[doc(alias = "linalg.cholesky_ex")]
    #[track_caller]
    pub fn linalg_cholesky_ex(&self, upper: bool) -> Result<(DTensor, DTensor)> {
        let op = Cholesky { name: "linalg_cholesky_ex", upper, check: false };
        let [factor, info] = outputs(dispatch(&op, &[self], Location::caller())?);
        Ok((factor, info))
    }

    /// Factorizes matrices as `A = P L U` in packed form: returns `L` and `U` in one tensor, and the pivots (i32, from 1).
    ///
    /// Batch dimensions may be sharded; matrices are gathered. Without `pivot`, rows are not exchanged, which PyTorch offers
    /// only on CUDA.
    ///
    /// # Errors
    /// If a pivot is exactly zero: on the ranks that hold the matrix, and the other ranks get it with their next collective; on all ranks if
    /// matrices had to be gathered.
    #[doc(alias = "linalg.lu_factor")]
    #[track_caller]
    pub fn linalg_lu_factor(&self, pivot: bool) -> Result<(DTensor, DTensor)> {
        let moved = self.moves_matrices();
        let op = LuFactor { name: "linalg_lu_factor", pivot, check: !moved };
        let [lu, pivots, info] = outputs(dispatch(&op, &[self], Location::caller())?);
        if moved {
            info.check_info_of_all("linalg_lu_factor", NONZERO_PIVOTS)?;
        }
        Ok((lu, pivots))
    }

    /// As [`linalg_lu_factor`](Self::linalg_lu_factor), and returns per matrix 0 (i32), or the step whose pivot is zero.
    #[doc(alias = "linalg.lu_factor_ex")]
    #[doc(alias = "lu")]
    #[track_caller]
    pub fn linalg_lu_factor_ex(&self, pivot: bool) -> Result<(DTensor, DTensor, DTensor)> {
        let op = LuFactor { name: "linalg_lu_factor_ex", pivot, check: false };
        let [lu, pivots, info] = outputs(dispatch(&op, &[self], Location::caller())?);
        Ok((lu, pivots, info))
    }

    /// Factorizes matrices as `A = P L U`. Without `pivot`, `P` is the identity.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.lu")]
    #[track_caller]
    pub fn linalg_lu(&self, pivot: bool) -> Result<(DTensor, DTensor, DTensor)> {
        let op = LuFactor { name: "linalg_lu", pivot, check: false };
        let [lu, pivots, _] = outputs(dispatch(&op, &[self], Location::caller())?);
        lu.lu_unpack(&pivots)
    }

    /// Returns `P`, `L` and `U` of factors in packed form, see [`linalg_lu_factor`](Self::linalg_lu_factor).
    ///
    /// Batch dimensions may be sharded; pivots are gathered.
    #[track_caller]
    pub fn lu_unpack(&self, pivots: &DTensor) -> Result<(DTensor, DTensor, DTensor)> {
        let site = Location::caller();
        if self.ndim() < 2 {
            return Err(self.bad_dims("lu_unpack", &[], "at least two dimensions"));
        }
        let (m, n) = (self.shape()[self.ndim() - 2], self.shape()[self.ndim() - 1]);
        let permutation = Permutation { rows: m, columns: n, dtype: self.dtype() };
        let p = dispatch(&permutation, &[pivots], site)?.swap_remove(0);
        let (lower, upper) = lower_and_upper(self)?;
        Ok((p, lower, upper))
    }

    /// Factorizes symmetric matrices as `A = L D L^T` with rows exchanged, in the form of LAPACK's `sytrf`: factors and pivots (i32).
    ///
    /// Reads the lower triangle. Not differentiable. Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.ldl_factor")]
    #[track_caller]
    pub fn linalg_ldl_factor(&self) -> Result<(DTensor, DTensor)> {
        let [ld, pivots, _] = outputs(dispatch(&LdlFactor, &[self], Location::caller())?);
        Ok((ld, pivots))
    }
}

/// `L` with ones on its diagonal, and `U`, of packed factors.
#[track_caller]
fn lower_and_upper(lu: &DTensor) -> Result<(DTensor, DTensor)> {
    let (m, n) = (lu.shape()[lu.ndim() - 2], lu.shape()[lu.ndim() - 1]);
    let k = m.min(n);
    let ones = lu.identity(m)?.narrow(-1, 0, k)?;
    let lower = lu.narrow(-1, 0, k)?.tril(-1)?.add(&ones)?;
    Ok((lower, lu.narrow(-2, 0, k)?.triu(0)?))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Cholesky {
    name: &'static str,
    upper: bool,
    /// Whether a matrix that is not positive definite is an error.
    check: bool,
}

impl Op for Cholesky {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name, &inputs[0])?;
        let signature =
            signature(a.batch, &[(a.batch, &[Whole, Whole])], &[(a.batch, &[Whole, Whole]), (a.batch, &[])]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), meta(a.batch, &[], DType::I32)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (factor, info) = linalg::cholesky(&inputs[0], self.upper)?;
        if self.check {
            check_info(self.name, &info, POSITIVE_DEFINITE)?;
        }
        Ok(vec![factor, info])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            let (l, g) = match op.upper {
                true => (saved.output(0).mt()?, g.mt()?),
                false => (saved.output(0), g.clone()),
            };
            // L^-T Phi(L^T G) L^-1, symmetrized, where Phi takes the lower triangle with half of the diagonal.
            let phi = l.mt()?.matmul(&g)?;
            let phi = phi.tril(0)?.add(&phi.tril(-1)?)?.mul_scalar(0.5)?;
            let half = l.mt()?.linalg_solve_triangular(&phi, true, true, false)?;
            let whole = l.linalg_solve_triangular(&half, false, false, false)?;
            Ok(vec![Some(whole.add(&whole.mt()?)?.mul_scalar(0.5)?)])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LuFactor {
    name: &'static str,
    pivot: bool,
    /// Whether a zero pivot is an error.
    check: bool,
}

impl Op for LuFactor {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name, &inputs[0])?;
        let signature = signature(
            a.batch,
            &[(a.batch, &[Whole, Whole])],
            &[(a.batch, &[Whole, Whole]), (a.batch, &[Whole]), (a.batch, &[])],
        );
        let pivots = meta(a.batch, &[a.rows.min(a.columns)], DType::I32);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), pivots, meta(a.batch, &[], DType::I32)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let factors = linalg::lu_factor(&inputs[0], self.pivot)?;
        if self.check {
            check_info(self.name, &factors.info, NONZERO_PIVOTS)?;
        }
        Ok(vec![factors.lu, factors.pivots, factors.info])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |_, saved, gradients| match &gradients[0] {
            Some(g) => lu_backward(saved, g).map(|gradient| vec![Some(gradient)]),
            None => Ok(vec![None]),
        })
    }
}

/// Gradient of packed factors, from that of both of them.
fn lu_backward(saved: &SavedTensors<'_>, g: &DTensor) -> Result<DTensor> {
    let (lu, pivots) = (saved.output(0), saved.output(1));
    let (p, l, u) = lu.lu_unpack(&pivots)?;
    let (m, n) = (lu.shape()[lu.ndim() - 2], lu.shape()[lu.ndim() - 1]);
    let k = m.min(n);
    let (gl, gu) = (g.narrow(-1, 0, k)?.tril(-1)?, g.narrow(-2, 0, k)?.triu(0)?);
    // The square blocks of both factors, and what is below L or right of U.
    let (l1, u1) = (l.narrow(-2, 0, k)?, u.narrow(-1, 0, k)?);
    let (gl1, gu1) = (gl.narrow(-2, 0, k)?, gu.narrow(-1, 0, k)?);
    let mut lower = l1.mt()?.matmul(&gl1)?;
    let mut upper = gu1.matmul(&u1.mt()?)?;
    if n > m {
        let (u2, gu2) = (u.narrow(-1, k, n - k)?, gu.narrow(-1, k, n - k)?);
        lower = lower.sub(&gu2.matmul(&u2.mt()?)?)?;
    }
    if m > n {
        let (l2, gl2) = (l.narrow(-2, k, m - k)?, gl.narrow(-2, k, m - k)?);
        upper = upper.sub(&l2.mt()?.matmul(&gl2)?)?;
    }
    let inner = lower.tril(-1)?.add(&upper.triu(0)?)?;
    let solved_left = l1.mt()?.linalg_solve_triangular(&inner, true, true, true)?;
    let block = u1.mt()?.linalg_solve_triangular(&solved_left, false, false, false)?;
    let whole = if n > m {
        let right = l1.mt()?.linalg_solve_triangular(&gu.narrow(-1, k, n - k)?, true, true, true)?;
        DTensor::cat(&[&block, &right], -1)?
    } else if m > n {
        let below = u1.mt()?.linalg_solve_triangular(&gl.narrow(-2, k, m - k)?, false, false, false)?;
        DTensor::cat(&[&block, &below], -2)?
    } else {
        block
    };
    p.matmul(&whole)
}

/// The permutation matrices of pivots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Permutation {
    rows: usize,
    columns: usize,
    dtype: DType,
}

impl Op for Permutation {
    fn name(&self) -> &'static str {
        "lu_unpack"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        check_real("lu_unpack", self.dtype)?;
        let pivots = &inputs[0];
        check_pivots("lu_unpack", pivots, self.rows.min(self.columns))?;
        let batch = &pivots.shape[..pivots.shape.len() - 1];
        let signature = signature(batch, &[(batch, &[Whole])], &[(batch, &[Whole, Whole])]);
        Ok(OpPlan { signature, outputs: vec![meta(batch, &[self.rows, self.rows], self.dtype)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::permutation(&inputs[0], self.rows, self.dtype)?])
    }

    /// Pivots are integers.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LdlFactor;

impl Op for LdlFactor {
    fn name(&self) -> &'static str {
        "linalg_ldl_factor"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name(), &inputs[0])?;
        let signature = signature(
            a.batch,
            &[(a.batch, &[Whole, Whole])],
            &[(a.batch, &[Whole, Whole]), (a.batch, &[Whole]), (a.batch, &[])],
        );
        let pivots = meta(a.batch, &[a.rows], DType::I32);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), pivots, meta(a.batch, &[], DType::I32)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (ld, pivots, info) = linalg::ldl_factor(&inputs[0])?;
        check_info(self.name(), &info, "matrices without a block of zeros on the way")?;
        Ok(vec![ld, pivots, info])
    }

    /// As in PyTorch.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "linalg_cholesky",
        samples: square_samples,
        apply: |x| {
            let a = positive(&x[0])?;
            Ok(vec![a.linalg_cholesky(false)?, a.linalg_cholesky(true)?])
        },
    },
    OpEntry {
        name: "linalg_cholesky_ex",
        samples: square_samples,
        apply: |x| {
            let (factor, info) = positive(&x[0])?.linalg_cholesky_ex(false)?;
            Ok(vec![factor, info])
        },
    },
    OpEntry {
        name: "linalg_lu_factor",
        samples: matrix_samples,
        apply: |x| {
            let (lu, pivots) = dominant(&x[0])?.linalg_lu_factor(true)?;
            Ok(vec![lu, pivots, dominant(&x[0])?.linalg_lu_factor(false)?.0])
        },
    },
    OpEntry {
        name: "linalg_lu_factor_ex",
        samples: matrix_samples,
        apply: |x| {
            let (lu, pivots, info) = dominant(&x[0])?.linalg_lu_factor_ex(true)?;
            Ok(vec![lu, pivots, info])
        },
    },
    OpEntry {
        name: "linalg_lu",
        samples: matrix_samples,
        apply: |x| {
            let (p, l, u) = dominant(&x[0])?.linalg_lu(true)?;
            Ok(vec![p, l, u])
        },
    },
    OpEntry {
        name: "lu_unpack",
        samples: matrix_samples,
        apply: |x| {
            let (_, pivots) = dominant(&x[0])?.detach().linalg_lu_factor(true)?;
            let (p, l, u) = x[0].lu_unpack(&pivots)?;
            Ok(vec![p, l, u])
        },
    },
    OpEntry {
        name: "linalg_ldl_factor",
        samples: square_samples,
        apply: |x| {
            let (ld, pivots) = positive(&x[0])?.linalg_ldl_factor()?;
            Ok(vec![ld, pivots])
        },
    },
];

/// Symmetric positive-definite matrices from square ones of elements up to 32: the diagonal is larger than the rest of a row. Only
/// elementwise operators, so that the elements do not depend on placements.
pub(super) fn positive(a: &DTensor) -> Result<DTensor> {
    let [.., rows, columns] = *a.shape() else { return a.linalg_cholesky(false) };
    if rows != columns {
        return a.linalg_cholesky(false);
    }
    let symmetric = a.add(&a.mt()?)?.mul_scalar(1.0 / 128.0)?;
    symmetric.add(&symmetric.identity(rows)?.mul_scalar(rows as f64)?)
}

/// Matrices without small pivots: with a large diagonal.
pub(super) fn dominant(a: &DTensor) -> Result<DTensor> {
    let [.., m, n] = *a.shape() else { return a.linalg_lu(true).map(|(p, ..)| p) };
    let large = a.identity(m.max(n))?.narrow(0, 0, m)?.narrow(1, 0, n)?.mul_scalar(4.0)?;
    a.mul_scalar(1.0 / 16.0)?.add(&large)
}

pub(super) fn square_samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 4] = [&[3, 2, 2], &[4, 4], &[1, 1], &[0, 3, 3]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}

pub(super) fn matrix_samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 4] = [&[3, 4, 2], &[3, 5], &[4, 4], &[2, 0, 3]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect()
}

pub(super) fn pair_samples() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 4] =
        [(&[3, 2, 2], &[3, 2, 4]), (&[4, 4], &[2, 4, 1]), (&[2, 3, 3], &[3, 2]), (&[3, 3], &[3, 0])];
    shapes.iter().map(|(a, b)| vec![SampleInput::new(a, DType::F64), SampleInput::new(b, DType::F64)]).collect()
}
