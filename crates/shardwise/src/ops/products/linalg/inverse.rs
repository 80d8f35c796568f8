//! Pseudo-inverses, ranks and least squares.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::factor::{dominant, matrix_samples};
use super::rule::{
    Free, Whole, broadcast_batch, check_same_type, full_product, matrices, meta, misfit, outputs, signature, square,
};
use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::gradients::derivative::unbroadcast;
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::{DTensor, Operand, SaveForBackward};
use shardwise_kernels::linalg::{self, Tolerance};
use shardwise_kernels::to_f64_vec;

/// Below which singular values count as zero: `max(atol, rtol * largest)`, for all matrices or per matrix.
///
/// Without `rtol`, it is the rounding unit of the type times the larger of rows and columns, or 0 where an `atol` above 0 is given.
#[derive(Clone, Copy, Default)]
pub struct ToleranceOptions<'a> {
    /// The absolute tolerance, 0 by default: a number, or a tensor that broadcasts to the batch dimensions.
    pub atol: Option<Operand<'a>>,
    /// The relative tolerance: a number, or a tensor that broadcasts to the batch dimensions.
    pub rtol: Option<Operand<'a>>,
}

/// The result of [`DTensor::linalg_lstsq`].
#[derive(Debug, Clone)]
pub struct LeastSquares {
    /// `X`.
    pub solution: DTensor,
    /// The sums of the squares of `A X - B`, per right-hand side; empty unless there are more equations than unknowns.
    pub residuals: DTensor,
    /// The ranks (i64) of the matrices.
    pub rank: DTensor,
    /// The singular values of the matrices.
    pub singular_values: DTensor,
}

impl DTensor {
    /// Returns the pseudo-inverses of matrices; of symmetric ones, of which the lower triangle is read, if `hermitian`.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.pinv")]
    #[doc(alias = "pinverse")]
    #[track_caller]
    pub fn linalg_pinv(&self, tolerance: ToleranceOptions<'_>, hermitian: bool) -> Result<DTensor> {
        let [atol, rtol] = self.tolerances("linalg_pinv", tolerance)?;
        Ok(dispatch(&PseudoInverse { hermitian }, &[self, &atol, &rtol], Location::caller())?.swap_remove(0))
    }

    /// Returns the ranks (i64) of matrices; of symmetric ones, of which the lower triangle is read, if `hermitian`.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    ///
    /// # Errors
    /// If a matrix has elements that are not finite, on the ranks that hold it; the other ranks get it with their next collective.
    #[doc(alias = "linalg.matrix_rank")]
    #[track_caller]
    pub fn linalg_matrix_rank(&self, tolerance: ToleranceOptions<'_>, hermitian: bool) -> Result<DTensor> {
        let [atol, rtol] = self.tolerances("linalg_matrix_rank", tolerance)?;
        let inputs = [&self.detach(), &atol, &rtol];
        Ok(dispatch(&MatrixRank { hermitian }, &inputs, Location::caller())?.swap_remove(0))
    }

    /// Both tolerances as tensors in f64.
    #[track_caller]
    fn tolerances(&self, name: &'static str, given: ToleranceOptions<'_>) -> Result<[DTensor; 2]> {
        let [.., rows, columns] = *self.shape() else {
            return Err(self.bad_dims(name, &[], "at least two dimensions"));
        };
        let wide = |operand: Operand<'_>| operand.tensor_alone(self)?.detach().to_dtype(DType::F64);
        let number = |x: f64| wide(Operand::Number(x.into()));
        let unit = if self.dtype() == DType::F32 { f64::from(f32::EPSILON) } else { f64::EPSILON };
        let atol = given.atol.map_or_else(|| number(0.0), wide)?;
        let usual = unit * rows.max(columns) as f64;
        let rtol = match (given.rtol, given.atol) {
            (Some(rtol), _) => wide(rtol)?,
            (None, None) => number(usual)?,
            (None, Some(_)) => atol.gt(0.0)?.where_cond(&atol.zeros_like()?, &atol.full_like(usual)?)?,
        };
        Ok([atol, rtol])
    }

    /// Solves `min |A X - B|`, with the solution of smallest norm where there are several. `b` holds matrices, or vectors if it has one
    /// dimension less than `A`. Singular values below `rcond` times the largest count as zero.
    ///
    /// All results are always there: PyTorch's depend on the `driver`, of which this is `gelsd` (the default on its CPUs is `gelsy`), and it
    /// has no residuals for matrices without full rank. Batch dimensions broadcast and may be sharded; matrices are gathered.
    #[doc(alias = "linalg.lstsq")]
    #[track_caller]
    pub fn linalg_lstsq(&self, b: &DTensor, rcond: Option<f64>) -> Result<LeastSquares> {
        let site = Location::caller();
        let [.., rows, columns] = *self.shape() else {
            return Err(self.bad_dims("linalg_lstsq", &[], "at least two dimensions"));
        };
        let unit = if self.dtype() == DType::F32 { f64::from(f32::EPSILON) } else { f64::EPSILON };
        let rcond = rcond.unwrap_or(unit * rows.max(columns) as f64);
        let vectors = b.ndim() + 1 == self.ndim();
        let sides = if vectors { b.unsqueeze(-1)? } else { b.clone() };
        let [x, rank, singular_values] = outputs(dispatch(&Lstsq { rcond: rcond.to_bits() }, &[self, &sides], site)?);
        let residuals = match rows > columns {
            true => full_product(self, &x)?.sub(&sides)?.square()?.sum(&[-2], false)?.to_dtype(self.dtype())?,
            false => {
                let placements = vec![crate::placement::Placement::Replicate; self.placements().len()];
                DTensor::zeros(0, self.dtype(), self.device_mesh(), placements)?
            }
        };
        let solution = if vectors { x.squeeze(Some(-1))? } else { x };
        Ok(LeastSquares { solution, residuals, rank, singular_values })
    }
}

/// The plan of an operator on matrices and two tolerances.
fn plan_with_tolerances(name: &str, inputs: &[TensorMeta], hermitian: bool) -> Result<(Vec<usize>, [usize; 2])> {
    let a = if hermitian { square(name, &inputs[0])? } else { matrices(name, &inputs[0])? };
    let batches = [a.batch, inputs[1].shape.as_slice(), inputs[2].shape.as_slice()];
    Ok((broadcast_batch(name, &[&inputs[0], &inputs[1], &inputs[2]], &batches)?, [a.rows, a.columns]))
}

/// The batch dimensions of a tensor of matrices.
fn batch_of(meta: &TensorMeta) -> &[usize] {
    &meta.shape[..meta.shape.len() - 2]
}

fn tolerance_of(inputs: &[Tensor]) -> Tolerance {
    Tolerance { absolute: inputs[1].clone(), relative: inputs[2].clone() }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PseudoInverse {
    hermitian: bool,
}

impl Op for PseudoInverse {
    fn name(&self) -> &'static str {
        "linalg_pinv"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (batch, [rows, columns]) = plan_with_tolerances(self.name(), inputs, self.hermitian)?;
        let signature = signature(
            &batch,
            &[(batch_of(&inputs[0]), &[Whole, Whole]), (&inputs[1].shape, &[]), (&inputs[2].shape, &[])],
            &[(&batch, &[Whole, Whole])],
        );
        Ok(OpPlan { signature, outputs: vec![meta(&batch, &[columns, rows], inputs[0].dtype)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![linalg::pseudo_inverse(&inputs[0], &tolerance_of(inputs), self.hermitian)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Only { inputs: &[0], outputs: &[0] }, |_, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 3]) };
            let found = pinv_backward(g, &saved.output(0), &saved.input(0))?;
            Ok(vec![Some(unbroadcast(&found, saved, 0)?), None, None])
        })
    }
}

/// Gradient of the pseudo-inverse `p` of `a` (Golub and Pereyra 1973).
fn pinv_backward(g: &DTensor, p: &DTensor, a: &DTensor) -> Result<DTensor> {
    let (pt, gt) = (p.mt()?, g.mt()?);
    let first = pt.matmul(g)?.matmul(&pt)?.neg()?;
    // (I - A P) G^T P P^T and P^T P G^T (I - P A), without the projections as matrices.
    let left = gt.matmul(p)?.matmul(&pt)?;
    let left = left.sub(&a.matmul(&p.matmul(&left)?)?)?;
    let right = pt.matmul(&p.matmul(&gt)?)?;
    let right = right.sub(&right.matmul(p)?.matmul(a)?)?;
    first.add(&left)?.add(&right)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatrixRank {
    hermitian: bool,
}

impl Op for MatrixRank {
    fn name(&self) -> &'static str {
        "linalg_matrix_rank"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (batch, _) = plan_with_tolerances(self.name(), inputs, self.hermitian)?;
        let signature = signature(
            &batch,
            &[(batch_of(&inputs[0]), &[Whole, Whole]), (&inputs[1].shape, &[]), (&inputs[2].shape, &[])],
            &[(&batch, &[])],
        );
        Ok(OpPlan { signature, outputs: vec![meta(&batch, &[], DType::I64)] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let rank = linalg::matrix_rank(&inputs[0], &tolerance_of(inputs), self.hermitian)?;
        if to_f64_vec(&rank)?.iter().any(|&r| r < 0.0) {
            let found = format!("a matrix with NaN or infinite elements in {}", self.name());
            return Err(ErrorKind::Argument.error("matrices", found, "finite elements", "replace them first"));
        }
        Ok(vec![rank])
    }

    /// Ranks are integers.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// Least squares; the limit of singular values by its bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Lstsq {
    rcond: u64,
}

impl Op for Lstsq {
    fn name(&self) -> &'static str {
        "linalg_lstsq"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = matrices(self.name(), &inputs[0])?;
        check_same_type(self.name(), &[&inputs[0], &inputs[1]])?;
        let b = matrices(self.name(), &inputs[1])?;
        if b.rows != a.rows {
            let needed = format!("right-hand sides of {} rows", a.rows);
            return Err(misfit(self.name(), &[&inputs[0], &inputs[1]], &needed));
        }
        let batch = broadcast_batch(self.name(), &[&inputs[0], &inputs[1]], &[a.batch, b.batch])?;
        let signature = signature(
            &batch,
            &[(a.batch, &[Whole, Whole]), (b.batch, &[Whole, Free])],
            &[(&batch, &[Whole, Free]), (&batch, &[]), (&batch, &[Whole])],
        );
        let dtype = inputs[0].dtype;
        let outputs = vec![
            meta(&batch, &[a.columns, b.columns], dtype),
            meta(&batch, &[], DType::I64),
            meta(&batch, &[a.rows.min(a.columns)], dtype),
        ];
        Ok(OpPlan { signature, outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, rank, values) = linalg::least_squares(&inputs[0], &inputs[1], f64::from_bits(self.rcond))?;
        Ok(vec![x, rank, values])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let (a, b) = (saved.input(0), saved.input(1));
            let mut found = vec![None, None];
            if let Some(g) = &gradients[0] {
                // X = pinv(A) B.
                let rcond = f64::from_bits(op.rcond);
                let options = ToleranceOptions { atol: None, rtol: Some(rcond.into()) };
                let p = a.linalg_pinv(options, false)?;
                if saved.needs_input_grad(0) {
                    let of_p = g.matmul(&b.mt()?)?;
                    found[0] = Some(unbroadcast(&pinv_backward(&of_p, &p, &a)?, saved, 0)?);
                }
                if saved.needs_input_grad(1) {
                    found[1] = Some(unbroadcast(&p.mt()?.matmul(g)?, saved, 1)?);
                }
            }
            if let Some(g) = gradients[2].as_ref().filter(|_| saved.needs_input_grad(0)) {
                let (u, _, vh) = a.linalg_svd(false)?;
                let of_values = unbroadcast(&u.scale_columns(g)?.matmul(&vh)?, saved, 0)?;
                found[0] = super::rule::sum(found[0].take(), Some(of_values))?;
            }
            Ok(found)
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "linalg_pinv",
        samples: matrix_samples,
        apply: |x| {
            let a = dominant(&x[0])?;
            Ok(vec![
                a.linalg_pinv(ToleranceOptions::default(), false)?,
                a.linalg_pinv(ToleranceOptions { atol: None, rtol: Some(1e-3.into()) }, false)?,
            ])
        },
    },
    OpEntry {
        name: "linalg_matrix_rank",
        samples: matrix_samples,
        apply: |x| {
            let a = dominant(&x[0])?;
            Ok(vec![
                a.linalg_matrix_rank(ToleranceOptions::default(), false)?,
                a.linalg_matrix_rank(ToleranceOptions { atol: Some(1e9.into()), rtol: None }, false)?,
            ])
        },
    },
    OpEntry {
        name: "linalg_lstsq",
        samples: || {
            let shapes: [(&[usize], &[usize]); 3] =
                [(&[3, 4, 2], &[3, 4, 3]), (&[2, 4], &[2, 1]), (&[4, 4], &[2, 4, 2])];
            let input = |shape: &&[usize]| SampleInput::new(shape, DType::F64);
            shapes.iter().map(|(a, b)| vec![input(a), input(b)]).collect()
        },
        apply: |x| {
            let found = dominant(&x[0])?.linalg_lstsq(&x[1], None)?;
            Ok(vec![found.solution, found.residuals, found.rank, found.singular_values])
        },
    },
];
