//! Determinants.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::factor::{dominant, square_samples};
use super::rule::{BatchDims, Whole, meta, outputs, signature, square, sum};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::OpEntry;
use crate::tensor::{DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::linalg;

impl DTensor {
    /// Returns the determinants of square matrices.
    ///
    /// Batch dimensions may be sharded; matrices are gathered. The gradient at a matrix whose determinant is exactly 0 is 0, as in
    /// PyTorch.
    #[doc(alias = "linalg.det")]
    #[doc(alias = "det")]
    #[track_caller]
    pub fn linalg_det(&self) -> Result<DTensor> {
        let [value, ..] = outputs::<5>(dispatch(&Determinant("linalg_det"), &[self], Location::caller())?);
        Ok(value)
    }

    /// Returns the signs of the determinants of square matrices and the logarithms of their magnitudes.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[doc(alias = "linalg.slogdet")]
    #[doc(alias = "slogdet")]
    #[track_caller]
    pub fn linalg_slogdet(&self) -> Result<(DTensor, DTensor)> {
        let [_, sign, log_magnitude, ..] =
            outputs::<5>(dispatch(&Determinant("linalg_slogdet"), &[self], Location::caller())?);
        Ok((sign, log_magnitude))
    }

    /// Returns the logarithms of the determinants of square matrices; NaN for negative ones.
    ///
    /// Batch dimensions may be sharded; matrices are gathered.
    #[track_caller]
    pub fn logdet(&self) -> Result<DTensor> {
        let [_, sign, log_magnitude, ..] = outputs::<5>(dispatch(&Determinant("logdet"), &[self], Location::caller())?);
        sign.detach().lt(0.0)?.where_cond(f64::NAN, &log_magnitude)
    }
}

/// Determinant, sign, logarithm of the magnitude, and the factors, by the name of the method that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Determinant(&'static str);

impl Op for Determinant {
    fn name(&self) -> &'static str {
        self.0
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let a = square(self.0, &inputs[0])?;
        let (whole, number): (BatchDims<'_>, BatchDims<'_>) = ((a.batch, &[Whole, Whole]), (a.batch, &[]));
        let signature = signature(a.batch, &[whole], &[number, number, number, whole, (a.batch, &[Whole])]);
        let number = meta(a.batch, &[], inputs[0].dtype);
        let pivots = meta(a.batch, &[a.rows], DType::I32);
        Ok(OpPlan { signature, outputs: vec![number.clone(), number.clone(), number, inputs[0].clone(), pivots] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let found = linalg::determinant(&inputs[0])?;
        Ok(vec![found.value, found.sign, found.log_magnitude, found.factors.lu, found.factors.pivots])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::All, |_, saved, gradients| {
            let of_value = gradients[0].as_ref().map(|g| g.mul(&saved.output(0))).transpose()?;
            let Some(factor) = sum(of_value, gradients[2].clone())? else { return Ok(vec![None]) };
            Ok(vec![Some(times_inverse_transpose(saved, &factor)?)])
        })
    }
}

/// `factor A^-T`, per matrix.
fn times_inverse_transpose(saved: &SavedTensors<'_>, factor: &DTensor) -> Result<DTensor> {
    let a = saved.input(0);
    let n = a.shape()[a.ndim() - 1];
    let right = factor.unsqueeze(-1)?.unsqueeze(-1)?.mul(&a.identity(n)?)?;
    // The factors are saved, but have no derivative of their own: a recorded pass starts from the matrix.
    if is_recording() {
        return Ok(a.mt()?.linalg_solve_ex(&right, true)?.0);
    }
    // Zero pivots are replaced by the smallest that does not vanish compared with 1: the determinant, a factor of the gradient, is zero anyway.
    let lu = saved.output(3);
    let least = if lu.dtype() == DType::F32 { f64::from(f32::EPSILON) } else { f64::EPSILON };
    let vanishes = lu.eq(0.0)?.to_dtype(lu.dtype())?.mul(&lu.identity(n)?)?;
    lu.add(&vanishes.mul_scalar(least)?)?.linalg_lu_solve(&saved.output(4), &right, true, true)
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "linalg_det", samples: square_samples, apply: |x| Ok(vec![dominant(&x[0])?.linalg_det()?]) },
    OpEntry {
        name: "linalg_slogdet",
        samples: square_samples,
        apply: |x| {
            let (sign, log_magnitude) = dominant(&x[0])?.linalg_slogdet()?;
            Ok(vec![sign, log_magnitude])
        },
    },
    OpEntry { name: "logdet", samples: square_samples, apply: |x| Ok(vec![dominant(&x[0])?.logdet()?]) },
];
