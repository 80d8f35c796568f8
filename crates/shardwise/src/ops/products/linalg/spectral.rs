//! Eigenvalues and singular values, and what follows from them.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::factor::{dominant, matrix_samples, positive, square_samples};
use super::rule::{Whole, matrices, meta, misfit, outputs, refuse_second, signature, square, sum};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::OpEntry;
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::linalg;

impl DTensor {
    /// Returns eigenvalues in ascending order and eigenvectors in columns, of symmetric matrices, of which the lower triangle is read;
    /// the upper one if `upper` (PyTorch's `UPLO="U"`).
    ///
    /// Eigenvectors are determined up to their signs, and their gradient exists only for distinct eigenvalues. Batch dimensions may be
    /// sharded; matrices are gathered.
    #[doc(alias = "linalg.eigh")]
    #[track_caller]
    pub fn linalg_eigh(&self, upper: bool) -> Result<(DTensor, DTensor)> {
        let op = Eigh { name: "linalg_eigh", upper };
        let [values, vectors] = outputs(dispatch(&op, &[self], Location::caller())?);
        Ok((values, vectors))
    }

    /// Returns the eigenvalues of symmetric matrices, see [`linalg_eigh`](Self::linalg_eigh).
    #[doc(alias = "linalg.eigvalsh")]
    #[track_caller]
    pub fn linalg_eigvalsh(&self, upper: bool) -> Result<DTensor> {
        let op = Eigh { name: "linalg_eigvalsh", upper };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }

    /// Returns `U`, the singular values in descending order, and `V^T`: `A = U S V^T`. With `full_matrices`, `U` and `V` are square.
    ///
    /// Singular vectors are determined up to their signs, and their gradient exists only for distinct singular values; columns beyond
    /// the singular values have none. Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.svd")]
    #[doc(alias = "svd")]
    #[track_caller]
    pub fn linalg_svd(&self, full_matrices: bool) -> Result<(DTensor, DTensor, DTensor)> {
        let op = Svd { name: "linalg_svd", full: full_matrices };
        let [u, s, vh] = outputs(dispatch(&op, &[self], Location::caller())?);
        Ok((u, s, vh))
    }

    /// Returns the singular values in descending order, see [`linalg_svd`](Self::linalg_svd).
    #[doc(alias = "linalg.svdvals")]
    #[track_caller]
    pub fn linalg_svdvals(&self) -> Result<DTensor> {
        let op = Svd { name: "linalg_svdvals", full: false };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(1))
    }

    /// Returns the principal square roots of symmetric positive-semidefinite matrices, of which the lower triangle is read.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.matrix_sqrth")]
    #[track_caller]
    pub fn linalg_matrix_sqrth(&self) -> Result<DTensor> {
        Ok(dispatch(&SymmetricRoot, &[self], Location::caller())?.swap_remove(0))
    }

    /// Factorizes matrices with at least as many rows as columns as `A = U H`, with orthonormal columns of `U` and a symmetric
    /// positive-semidefinite `H`.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.polar")]
    #[track_caller]
    pub fn linalg_polar(&self) -> Result<(DTensor, DTensor)> {
        let [u, h, _, _] = outputs(dispatch(&Polar, &[self], Location::caller())?);
        Ok((u, h))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Eigh {
    name: &'static str,
    upper: bool,
}

impl Op for Eigh {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name, &inputs[0])?;
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let signature = signature(a.batch, &[whole], &[(a.batch, &[Whole]), whole]);
        Ok(OpPlan { signature, outputs: vec![meta(a.batch, &[a.rows], inputs[0].dtype), inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (values, vectors) = linalg::eigh(&inputs[0], self.upper)?;
        Ok(vec![values, vectors])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |_, saved, gradients| {
            let (values, vectors) = (saved.output(0), saved.output(1));
            let of_values = gradients[0].as_ref().map(DTensor::diagonal_matrices).transpose()?;
            let of_vectors = match &gradients[1] {
                Some(g) => {
                    // Divided by the differences of eigenvalues; the diagonal, which does not move, is zero.
                    let n = values.shape()[values.ndim() - 1];
                    let between = values.unsqueeze(-2)?.sub(&values.unsqueeze(-1)?)?.add(&values.identity(n)?)?;
                    let inner = vectors.mt()?.matmul(g)?.div(&between)?;
                    Some(inner.sub(&inner.mul(&values.identity(n)?)?)?)
                }
                None => None,
            };
            let Some(inner) = sum(of_values, of_vectors)? else { return Ok(vec![None]) };
            Ok(vec![Some(vectors.matmul(&inner)?.matmul(&vectors.mt()?)?)])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Svd {
    name: &'static str,
    full: bool,
}

impl Op for Svd {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name, &inputs[0])?;
        let k = a.rows.min(a.columns);
        let (left, right) = if self.full { (a.rows, a.columns) } else { (k, k) };
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let signature = signature(a.batch, &[whole], &[whole, (a.batch, &[Whole]), whole]);
        let dtype = inputs[0].dtype;
        let outputs = vec![
            meta(a.batch, &[a.rows, left], dtype),
            meta(a.batch, &[k], dtype),
            meta(a.batch, &[right, a.columns], dtype),
        ];
        Ok(OpPlan { signature, outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (u, s, vh) = linalg::svd(&inputs[0], self.full)?;
        Ok(vec![u, s, vh])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |_, saved, gradients| {
            let s = saved.output(1);
            let k = s.shape()[s.ndim() - 1];
            // Columns beyond the singular values are not determined, and have no gradient.
            let (u, vh) = (saved.output(0).narrow(-1, 0, k)?, saved.output(2).narrow(-2, 0, k)?);
            let gu = gradients[0].as_ref().map(|g| g.narrow(-1, 0, k)).transpose()?;
            let gvh = gradients[2].as_ref().map(|g| g.narrow(-2, 0, k)).transpose()?;
            Ok(vec![svd_backward(&u, &s, &vh, gu, gradients[1].clone(), gvh)?])
        })
    }
}

fn svd_backward(
    u: &DTensor,
    s: &DTensor,
    vh: &DTensor,
    gu: Option<DTensor>,
    gs: Option<DTensor>,
    gvh: Option<DTensor>,
) -> Result<Option<DTensor>> {
    let (m, n) = (u.shape()[u.ndim() - 2], vh.shape()[vh.ndim() - 1]);
    let k = s.shape()[s.ndim() - 1];
    if gu.is_none() && gvh.is_none() {
        let Some(gs) = gs else { return Ok(None) };
        return u.scale_columns(&gs)?.matmul(vh).map(Some);
    }
    let skew = |x: DTensor| x.sub(&x.mt()?);
    // Differences of squares, as products, which do not overflow; ones on the diagonal, where the numerator is zero.
    let between = s.unsqueeze(-2)?.sub(&s.unsqueeze(-1)?)?.mul(&s.unsqueeze(-2)?.add(&s.unsqueeze(-1)?)?)?;
    let between = between.add(&s.identity(k)?)?;
    let of_u = match &gu {
        Some(g) => Some(skew(u.mt()?.matmul(g)?)?.div(&between)?.scale_columns(s)?),
        None => None,
    };
    let of_v = match &gvh {
        Some(g) => Some(skew(vh.matmul(&g.mt()?)?)?.div(&between)?.scale_rows(s)?),
        None => None,
    };
    let of_s = gs.as_ref().map(DTensor::diagonal_matrices).transpose()?;
    let Some(inner) = sum(sum(of_u, of_v)?, of_s)? else { return Ok(None) };
    let mut whole = u.matmul(&inner)?.matmul(vh)?;
    // What of the gradient is outside the space of the singular vectors.
    if let Some(g) = gu.filter(|_| m > k) {
        let scaled = g.div(&s.unsqueeze(-2)?)?;
        whole = whole.add(&scaled.sub(&u.matmul(&u.mt()?.matmul(&scaled)?)?)?.matmul(vh)?)?;
    }
    if let Some(g) = gvh.filter(|_| n > k) {
        let scaled = g.div(&s.unsqueeze(-1)?)?;
        whole = whole.add(&u.matmul(&scaled.sub(&scaled.matmul(&vh.mt()?)?.matmul(vh)?)?)?)?;
    }
    Ok(Some(whole))
}

/// Solves `X H + H X = M` for a symmetric `H` with these eigenvalues and eigenvectors.
fn sylvester(m: &DTensor, values: &DTensor, vectors: &DTensor) -> Result<DTensor> {
    let sums = values.unsqueeze(-2)?.add(&values.unsqueeze(-1)?)?;
    let inner = vectors.mt()?.matmul(m)?.matmul(vectors)?.div(&sums)?;
    vectors.matmul(&inner)?.matmul(&vectors.mt()?)
}

/// The square root of symmetric matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SymmetricRoot;

impl Op for SymmetricRoot {
    fn name(&self) -> &'static str {
        "linalg_matrix_sqrth"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.name(), &inputs[0])?;
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let signature = signature(a.batch, &[whole], &[whole, (a.batch, &[Whole]), whole]);
        let values = meta(a.batch, &[a.rows], inputs[0].dtype);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), values, inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (root, values, vectors) = linalg::symmetric_sqrt(&inputs[0])?;
        Ok(vec![root, values, vectors])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None]) };
            refuse_second(op.name())?;
            let symmetric = g.add(&g.mt()?)?.mul_scalar(0.5)?;
            Ok(vec![Some(sylvester(&symmetric, &saved.output(1), &saved.output(2))?)])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Polar;

impl Op for Polar {
    fn name(&self) -> &'static str {
        "linalg_polar"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name(), &inputs[0])?;
        if a.rows < a.columns {
            return Err(misfit(self.name(), &[&inputs[0]], "matrices with at least as many rows as columns"));
        }
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let signature = signature(a.batch, &[whole], &[whole, whole, (a.batch, &[Whole]), whole]);
        let square = meta(a.batch, &[a.columns, a.columns], inputs[0].dtype);
        let values = meta(a.batch, &[a.columns], inputs[0].dtype);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), square.clone(), values, square] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let factors = linalg::polar(&inputs[0])?;
        Ok(vec![factors.u, factors.h, factors.values, factors.vectors])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |op, saved, gradients| {
            refuse_second(op.name())?;
            let (u, h, values, vectors) = (saved.output(0), saved.output(1), saved.output(2), saved.output(3));
            let (gu, gh) = (&gradients[0], &gradients[1]);
            // With the skew part W of U^T dU, W H + H W = U^T dA - dA^T U, and dH = U^T dA - W H.
            let of_u = gu.as_ref().map(|g| u.mt()?.matmul(g)).transpose()?;
            let of_h = gh.as_ref().map(|g| g.matmul(&h)?.neg()).transpose()?;
            let Some(inner) = sum(of_u, of_h)? else { return Ok(vec![None]) };
            let turned = sylvester(&inner, &values, &vectors)?;
            let mut found = u.matmul(&turned.sub(&turned.mt()?)?)?;
            if let Some(g) = gh {
                found = found.add(&u.matmul(g)?)?;
            }
            if let Some(g) = gu {
                let outside = g.sub(&u.matmul(&u.mt()?.matmul(g)?)?)?;
                let divided = outside.matmul(&vectors)?.div(&values.unsqueeze(-2)?)?.matmul(&vectors.mt()?)?;
                found = found.add(&divided)?;
            }
            Ok(vec![Some(found)])
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "linalg_eigh",
        samples: square_samples,
        apply: |x| {
            let a = spread(&positive(&x[0])?)?;
            let (values, vectors) = a.linalg_eigh(false)?;
            // Squares, because signs are not determined.
            Ok(vec![values, vectors.square()?])
        },
    },
    OpEntry {
        name: "linalg_eigvalsh",
        samples: square_samples,
        apply: |x| Ok(vec![spread(&positive(&x[0])?)?.linalg_eigvalsh(true)?]),
    },
    OpEntry {
        name: "linalg_svd",
        samples: matrix_samples,
        apply: |x| {
            let (u, s, vh) = spread(&dominant(&x[0])?)?.linalg_svd(false)?;
            Ok(vec![u.square()?, s, vh.square()?])
        },
    },
    OpEntry {
        name: "linalg_svdvals",
        samples: matrix_samples,
        apply: |x| Ok(vec![spread(&dominant(&x[0])?)?.linalg_svdvals()?]),
    },
    OpEntry {
        name: "linalg_matrix_sqrth",
        samples: square_samples,
        apply: |x| Ok(vec![positive(&x[0])?.linalg_matrix_sqrth()?]),
    },
    OpEntry {
        name: "linalg_polar",
        samples: square_samples,
        apply: |x| {
            let (u, h) = dominant(&x[0])?.linalg_polar()?;
            Ok(vec![u, h])
        },
    },
];

/// Adds numbers of different sizes to the diagonal, so that eigenvalues are far from each other.
pub(super) fn spread(a: &DTensor) -> Result<DTensor> {
    let [.., m, n] = *a.shape() else { return Ok(a.clone()) };
    let placements = vec![crate::placement::Placement::Replicate; a.placements().len()];
    let steps = |at: &[usize]| if at[0] == at[1] { 3.0 * at[0] as f64 } else { 0.0 };
    a.add(&DTensor::from_fn((m, n), DType::F64, a.device_mesh(), placements, steps)?)
}
