//! Triangles, bands and diagonals of matrices. Every rank knows which rows and columns it holds, so nothing moves.

use std::panic::Location;

use candle_core::{DType, Tensor, WithDType};

use super::scalar::Scalar;
use super::{OpEntry, Sample};
use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps};
use shardwise_kernels::{contiguous, with_type};

/// The elements of the last two dimensions with `lower <= column - row <= upper`, and a number elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Band {
    name: &'static str,
    lower: isize,
    upper: isize,
    elsewhere: Scalar,
}

/// Beyond any dimension, and no arithmetic on it overflows.
const FAR: isize = isize::MAX / 4;

impl DTensor {
    /// The lower triangle of the last two dimensions, up to a diagonal; zeros elsewhere.
    #[track_caller]
    pub fn tril(&self, diagonal: isize) -> Result<DTensor> {
        self.band("tril", -FAR, diagonal, 0.0)
    }

    /// The upper triangle of the last two dimensions, from a diagonal on; zeros elsewhere.
    #[track_caller]
    pub fn triu(&self, diagonal: isize) -> Result<DTensor> {
        self.band("triu", diagonal, FAR, 0.0)
    }

    /// The diagonal of the last two dimensions, `offset` columns to the right.
    #[track_caller]
    pub fn diagonal(&self, offset: isize) -> Result<DTensor> {
        let only = self.band("diagonal", offset, offset, 0.0)?;
        let [.., rows, columns] = *self.shape() else { unreachable!("checked by band") };
        // Row i holds the element of column i + offset alone.
        let first = offset.unsigned_abs() * usize::from(offset < 0);
        let (row, column) = (first.min(rows), (first as isize + offset).clamp(0, columns as isize) as usize);
        let len = (rows - row).min(columns - column);
        let summed = only.sum(&[-1], false)?.narrow(-1, row, len)?;
        summed.to_dtype(self.dtype())
    }

    /// The last two dimensions with a number wherever the column is beyond the row by more than `ahead`.
    #[track_caller]
    pub(super) fn causal(&self, ahead: isize, elsewhere: f64) -> Result<DTensor> {
        self.band("causal_mask", -FAR, ahead, elsewhere)
    }

    #[track_caller]
    fn band(&self, name: &'static str, lower: isize, upper: isize, elsewhere: f64) -> Result<DTensor> {
        if self.rank() < 2 {
            return Err(self.bad_dims(name, &[], "at least two dimensions"));
        }
        let (lower, upper) = (lower.clamp(-FAR, FAR), upper.clamp(-FAR, FAR));
        let op = Band { name, lower, upper, elsewhere: Scalar(elsewhere) };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }
}

impl Op for Band {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::OneTerm
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let signature = Signature::pointwise(&[&x.shape], &x.shape);
        // Zeros everywhere stay zeros under every reduction; another number only where the operands are picked from.
        let signature = match self.elsewhere.0 {
            0.0 => signature.passing_all(),
            _ => signature.passing([Some(ReduceOp::Max)], ReduceOp::Max).passing([Some(ReduceOp::Min)], ReduceOp::Min),
        };
        Ok(OpPlan { signature, outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let x = contiguous(&inputs[0])?;
        let ndim = x.rank();
        let index = |dim: usize| at.input(0, dim).iter().flatten().collect::<Vec<_>>();
        let (rows, columns) = (index(ndim - 2), index(ndim - 1));
        if x.elem_count() == 0 {
            return Ok(vec![x]);
        }
        with_type!(x.dtype(), T => {
            let mut values: Vec<T> = x.flatten_all()?.to_vec1()?;
            let outside = T::from_f64(self.elsewhere.0);
            for (i, line) in values.chunks_exact_mut(columns.len()).enumerate() {
                let row = rows[i % rows.len()] as isize;
                // Columns ascend: those inside are one range.
                let from = columns.partition_point(|&c| (c as isize) < row + self.lower);
                let to = columns.partition_point(|&c| (c as isize) <= row + self.upper).max(from);
                line[..from].fill(outside);
                line[to..].fill(outside);
            }
            Ok(vec![Tensor::from_vec(values, x.dims(), x.device())?])
        }, otherwise unreachable!("tensors of a mesh have served types"))
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
            Ok(vec![Some(gradient.band(op.name, op.lower, op.upper, 0.0)?)])
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "tril", samples, apply: |x| Ok(vec![x[0].tril(0)?, x[0].tril(-2)?]) },
    OpEntry { name: "triu", samples, apply: |x| Ok(vec![x[0].triu(0)?, x[0].triu(1)?]) },
    OpEntry {
        name: "diagonal",
        samples,
        apply: |x| Ok(vec![x[0].diagonal(0)?, x[0].diagonal(1)?, x[0].diagonal(-2)?, x[0].diagonal(9)?]),
    },
];

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 4] = [&[5, 3], &[2, 4, 4], &[1, 6], &[0, 3]];
    let mut all: Vec<Vec<Sample>> = shapes.iter().map(|shape| vec![Sample::new(shape, DType::I64)]).collect();
    all.push(vec![Sample::new(&[4, 5], DType::F64)]);
    all
}
