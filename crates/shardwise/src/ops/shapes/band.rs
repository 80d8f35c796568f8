//! Triangles, bands and diagonals of matrices. Every rank knows which rows and columns it holds, so masking communicates nothing.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::scalar::Scalar;
use crate::ops::{OpEntry, SampleInput};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::band;

/// Keeps the elements of the last two dimensions with `lower <= column - row <= upper` and writes `outside` to the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Band {
    name: &'static str,
    lower: isize,
    upper: isize,
    outside: Scalar,
}

/// An unlimited bound: larger than any dimension, and small enough that adding an index does not overflow.
const FAR: isize = isize::MAX / 4;

impl DTensor {
    /// Returns the lower triangle of the last two dimensions, up to and including `diagonal`, with zeros above it.
    ///
    /// Local, whatever the sharding.
    #[track_caller]
    pub fn tril(&self, diagonal: isize) -> Result<DTensor> {
        self.band("tril", -FAR, diagonal, 0.0)
    }

    /// Returns the upper triangle of the last two dimensions, from `diagonal` on, with zeros below it.
    ///
    /// Local, whatever the sharding.
    #[track_caller]
    pub fn triu(&self, diagonal: isize) -> Result<DTensor> {
        self.band("triu", diagonal, FAR, 0.0)
    }

    /// Returns the diagonal of the last two dimensions, `offset` columns to the right of the main one.
    ///
    /// If columns are sharded, the result is `Partial(Sum)`; nothing is communicated until it is reduced.
    #[track_caller]
    pub fn diagonal(&self, offset: isize) -> Result<DTensor> {
        // Beyond the matrix all offsets are alike, and sums with the largest integers would overflow.
        let offset = offset.clamp(-FAR, FAR);
        let [.., rows, columns] = *self.shape() else {
            return Err(self.bad_dims("diagonal", &[], "matrices in the last two dimensions"));
        };
        let first = offset.unsigned_abs() * usize::from(offset < 0);
        let (row, column) = (first.min(rows), (first as isize + offset).clamp(0, columns as isize) as usize);
        let len = (rows - row).min(columns - column);
        // Chosen, not summed: a sum with zeros would lose the sign of zero.
        let own = self.constant(&Tensor::arange(column as i64, (column + len) as i64, &Device::Cpu)?)?.unsqueeze(-1)?;
        let mut shape: Vec<isize> = self.shape().iter().map(|&n| n as isize).collect();
        let ndim = shape.len();
        (shape[ndim - 2], shape[ndim - 1]) = (len as isize, 1);
        self.narrow(-2, row, len)?.gather(-1, &own.expand(&shape)?)?.squeeze(Some(-1))
    }

    /// Writes -inf where `column - row` is below `lower` or above `upper`; `None` is not a bound.
    #[track_caller]
    pub(in crate::ops) fn attention_band(&self, lower: Option<isize>, upper: Option<isize>) -> Result<DTensor> {
        self.band("attention_mask", lower.unwrap_or(-FAR), upper.unwrap_or(FAR), f64::NEG_INFINITY)
    }

    #[track_caller]
    fn band(&self, name: &'static str, lower: isize, upper: isize, outside: f64) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Err(self.bad_dims(name, &[], "at least two dimensions"));
        }
        let (lower, upper) = (lower.clamp(-FAR, FAR), upper.clamp(-FAR, FAR));
        let op = Band { name, lower, upper, outside: Scalar(outside) };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }
}

impl Op for Band {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let signature = Signature::pointwise(&[&x.shape], &x.shape);
        // Zeros of all ranks reduce to zero. Any other number survives only the reductions that pick one of their operands.
        let signature = match self.outside.0 {
            0.0 => signature.allow_all_partial(),
            _ => signature
                .allow_partial([Some(ReduceOp::Max)], ReduceOp::Max)
                .allow_partial([Some(ReduceOp::Min)], ReduceOp::Min),
        };
        Ok(OpPlan { signature, outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let ndim = inputs[0].rank();
        let index = |dim: usize| context.input_runs(0, dim).iter().flatten().collect::<Vec<_>>();
        let (rows, columns) = (index(ndim - 2), index(ndim - 1));
        Ok(vec![band(&inputs[0], &rows, &columns, [self.lower, self.upper], self.outside.0)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            Ok(vec![Some(gradient.band(op.name, op.lower, op.upper, 0.0)?)])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "tril", samples, apply: |x| Ok(vec![x[0].tril(0)?, x[0].tril(-2)?]) },
    OpEntry { name: "triu", samples, apply: |x| Ok(vec![x[0].triu(0)?, x[0].triu(1)?]) },
    OpEntry {
        name: "diagonal",
        samples,
        apply: |x| Ok(vec![x[0].diagonal(0)?, x[0].diagonal(1)?, x[0].diagonal(-2)?, x[0].diagonal(9)?]),
    },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 4] = [&[5, 3], &[2, 4, 4], &[1, 6], &[0, 3]];
    let mut all: Vec<Vec<SampleInput>> = shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect();
    all.push(vec![SampleInput::new(&[4, 5], DType::F64)]);
    all
}
