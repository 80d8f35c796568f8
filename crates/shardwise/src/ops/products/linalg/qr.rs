//! QR factorization. Of tall matrices whose rows are sharded (TSQR), every rank factorizes its rows, the small triangular factors of all
//! ranks are gathered and factorized once more, and every rank multiplies its columns by its part of the second `Q`.

use std::panic::Location;

use candle_core::Tensor;

use super::factor::{dominant, matrix_samples};
use super::rule::{Whole, matrices, meta, outputs, signature, sum};
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, Runs, TensorMeta, coordinates};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::OpEntry;
use crate::rule::{Decision, RequiredInput};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{batched_matmul, linalg, own_copy};

impl DTensor {
    /// Factorizes matrices as `A = Q R` with orthonormal columns of `Q` and no negative number on the diagonal of `R`, which makes the
    /// factors of a matrix of full rank unique; PyTorch's may have other signs. With `complete`, `Q` is square, else both are as small as
    /// possible.
    ///
    /// Tall matrices whose rows are sharded are factorized by every rank, and only the small factors `R` of all ranks are gathered, as long
    /// as that is less than the matrix (TSQR). In other layouts, batch dimensions may be sharded and matrices are gathered.
    ///
    /// # Errors
    /// If the gradient of a complete factorization of tall matrices is asked for, which is not unique.
    #[doc(alias = "linalg.qr")]
    #[doc(alias = "qr")]
    #[track_caller]
    pub fn linalg_qr(&self, complete: bool) -> Result<(DTensor, DTensor)> {
        if let Some(stacked) = stacked_rows(self).filter(|_| !complete && self.dtype().is_float()) {
            return tall_qr(self, stacked);
        }
        let [q, r] = outputs(dispatch(&Qr { full: complete }, &[self], Location::caller())?);
        Ok((q, r))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Qr {
    full: bool,
}

impl Op for Qr {
    fn name(&self) -> &'static str {
        "linalg_qr"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name(), &inputs[0])?;
        let k = if self.full { a.rows } else { a.rows.min(a.columns) };
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let outputs =
            vec![meta(a.batch, &[a.rows, k], inputs[0].dtype), meta(a.batch, &[k, a.columns], inputs[0].dtype)];
        Ok(OpPlan { signature: signature(a.batch, &[whole], &[whole, whole]), outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (q, r) = linalg::qr(&inputs[0], self.full)?;
        Ok(vec![q, r])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |op, saved, gradients| {
            let (q, r) = (saved.output(0), saved.output(1));
            let (m, n) = (q.shape()[q.ndim() - 2], r.shape()[r.ndim() - 1]);
            if op.full && m > n {
                return Err(ErrorKind::Gradient.error(
                    "gradient",
                    "the gradient of linalg_qr with complete columns of tall matrices",
                    "a reduced factorization, whose columns are unique",
                    "call linalg_qr(false)",
                ));
            }
            Ok(vec![qr_backward(&q, &r, gradients, m, n)?])
        })
    }
}

/// Gradient of `A = Q R`: `(G_Q + Q sym-lower(M)) R^-T` with `M = R G_R^T - G_Q^T Q`. A wide matrix is `[X Y]` with a square `X = Q U`, and
/// `Y = Q V`, which does not restrict `Q`.
fn qr_backward(q: &DTensor, r: &DTensor, gradients: &[Option<DTensor>], m: usize, n: usize) -> Result<Option<DTensor>> {
    let (mut gq, mut gr) = (gradients[0].clone(), gradients[1].clone());
    let mut right = None;
    let mut u = r.clone();
    if m < n {
        u = r.narrow(-1, 0, m)?;
        if let Some(g) = &gr {
            let y = q.matmul(&r.narrow(-1, m, n - m)?)?;
            let of_v = g.narrow(-1, m, n - m)?;
            // V = Q^T Y.
            gq = sum(gq, Some(y.matmul(&of_v.mt()?)?))?;
            right = Some(q.matmul(&of_v)?);
            gr = Some(g.narrow(-1, 0, m)?);
        }
    }
    let of_r = gr.map(|g| u.matmul(&g.triu(0)?.mt()?)).transpose()?;
    let of_q = gq.as_ref().map(|g| g.mt()?.matmul(q)?.neg()).transpose()?;
    let Some(inner) = sum(of_r, of_q)? else { return Ok(None) };
    // The lower triangle, mirrored to the upper one.
    let lower = inner.tril(-1)?;
    let mirrored = inner.tril(0)?.add(&lower.mt()?)?;
    let whole = sum(gq, Some(q.matmul(&mirrored)?))?.expect("one of them is there");
    let left = u.mt()?.linalg_solve_triangular(&whole, false, false, false)?;
    match right {
        Some(right) => DTensor::cat(&[&left, &right], -1).map(Some),
        None => Ok(Some(left)),
    }
}

/// How many rows of the small factor a rank has that holds these rows of a matrix with `columns` columns.
fn kept(rows: &Runs, columns: usize) -> usize {
    rows.len().min(columns)
}

/// The number of rows of all small factors together, if gathering them is less than gathering the matrix: rows are sharded, and
/// nothing else of the matrix is.
fn stacked_rows(a: &DTensor) -> Option<usize> {
    let layout = a.layout();
    let rows = a.ndim().checked_sub(2)?;
    let axes = layout.shard_order(rows).to_vec();
    let partial = layout.placements().iter().any(|p| p.is_partial());
    if axes.is_empty() || partial || !layout.shard_order(rows + 1).is_empty() {
        return None;
    }
    let count = |c: Vec<usize>| kept(&layout.owned(rows, &c), a.shape()[rows + 1]);
    let total = coordinates(layout.mesh(), &axes).map(count).sum::<usize>();
    (total < a.shape()[rows]).then_some(total)
}

/// Factorizes; `stacked` is what [`stacked_rows`] found.
#[track_caller]
fn tall_qr(a: &DTensor, stacked: usize) -> Result<(DTensor, DTensor)> {
    let site = Location::caller();
    let [first, small] = outputs(dispatch(&LocalQr { stacked }, &[&a.detach()], site)?);
    let (second, r) = small.linalg_qr(false)?;
    let [q, r] = outputs(dispatch(&JoinQr { stacked }, &[a, &first, &second, &r], site)?);
    Ok((q, r))
}

/// The factors of every rank's rows: `Q`, filled with columns of zeros, and the stacked small factors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LocalQr {
    stacked: usize,
}

/// The layout of the stacked factors for that of the matrix.
fn stacked_layout(a: &Layout, stacked: usize) -> Result<Layout> {
    let rows = a.shape().len() - 2;
    let columns = a.shape()[rows + 1];
    a.resized(rows, stacked, &|runs| kept(runs, columns))
}

impl Op for LocalQr {
    fn name(&self) -> &'static str {
        "linalg_qr"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name(), &inputs[0])?;
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let stacked = meta(a.batch, &[self.stacked, a.columns], inputs[0].dtype);
        Ok(OpPlan {
            signature: signature(a.batch, &[whole], &[whole, whole]),
            outputs: vec![inputs[0].clone(), stacked],
        })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let small = stacked_layout(inputs[0], self.stacked)?;
        Ok(Decision::new([inputs[0].clone()], [inputs[0].clone(), small]))
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (q, r) = linalg::qr(&inputs[0], false)?;
        // The columns of a rank with fewer rows than columns.
        let missing = inputs[0].dims()[inputs[0].rank() - 1] - q.dims()[q.rank() - 1];
        let q = if missing > 0 { q.pad_with_zeros(q.rank() - 1, 0, missing)? } else { q };
        Ok(vec![q, r])
    }

    /// The gradient is that of the joined factors.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// Multiplies both orthogonal factors. The first input is the matrix itself, which the gradient belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct JoinQr {
    stacked: usize,
}

impl Op for JoinQr {
    fn name(&self) -> &'static str {
        "linalg_qr"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name(), &inputs[0])?;
        let whole: (&[usize], &[_]) = (a.batch, &[Whole, Whole]);
        let signature = signature(a.batch, &[whole; 4], &[whole; 2]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), inputs[3].clone()] })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let rows = inputs[0].shape().len() - 2;
        let small = stacked_layout(inputs[0], self.stacked)?;
        // The last factor is as the matrix, with rows on every rank.
        let held = inputs[0].without_axes(inputs[0].shard_order(rows))?;
        let whole = Layout::from_shard_orders(held.mesh(), inputs[3].shape(), held.placements(), &held.shard_orders())?;
        let layouts = [inputs[0].clone(), inputs[0].clone(), small, whole.clone()];
        let inputs = layouts.map(RequiredInput::Layout).to_vec();
        let RequiredInput::Layout(matrix) = inputs[0].clone() else { unreachable!("built so") };
        Ok(Decision { inputs, outputs: vec![matrix, whole] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (first, second) = (&inputs[1], &inputs[2]);
        let ndim = first.rank();
        let count = second.dims()[ndim - 2];
        let q = match first.elem_count() {
            0 => first.zeros_like()?,
            _ => batched_matmul(&first.narrow(ndim - 1, 0, count)?, second, ndim - 2, 1)?,
        };
        Ok(vec![q, own_copy(&inputs[3])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |_, saved, gradients| {
            let (q, r) = (saved.output(0), saved.output(1));
            let (m, n) = (q.shape()[q.ndim() - 2], r.shape()[r.ndim() - 1]);
            Ok(vec![qr_backward(&q, &r, gradients, m, n)?, None, None, None])
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[OpEntry {
    name: "linalg_qr",
    samples: matrix_samples,
    apply: |x| {
        let (q, r) = dominant(&x[0])?.linalg_qr(false)?;
        Ok(vec![q, r])
    },
}];
