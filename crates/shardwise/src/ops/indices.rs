//! Index tensors: checking, negative indices, and the translation of global indices to local positions.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Runs, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::rule::Signature;
use crate::tensor::DTensor;
use shardwise_kernels::{NO_INDEX, to_i64_vec};

/// The error for an index tensor of floating-point type.
pub(super) fn not_integer(name: &str, dtype: DType) -> Error {
    ErrorKind::dtype(dtype).error(
        "index",
        format!("{} in {name}", dtype.as_str()),
        "integers",
        "convert it to i64 first",
    )
}

/// Translates global indices along a dimension of size `n` to positions in what a rank holds of it; `NOWHERE` for indices that
/// another rank holds. An index outside of the dimension is an error.
pub(super) fn local_positions(name: &str, index: &[i64], n: usize, held: &Runs) -> Result<Vec<usize>> {
    let mut starts = Vec::new();
    let mut local = 0;
    for run in held.iter() {
        starts.push((run.start, run.end, local));
        local += run.len();
    }
    let place = |&i: &i64| {
        let i = usize::try_from(i).ok().filter(|&i| i < n).ok_or_else(|| {
            let found = format!("{i} in {name} along a dimension of size {n}");
            ErrorKind::Index { index: i, size: n }.error::<Error>(
                "index",
                found,
                format!("numbers from 0 to {}", n.saturating_sub(1)),
                "check the indices",
            )
        })?;
        let run = starts.partition_point(|&(start, ..)| start <= i).checked_sub(1).map(|r| starts[r]);
        Ok(run.filter(|&(_, end, _)| i < end).map_or(NO_INDEX, |(start, _, local)| local + i - start))
    };
    index.iter().map(place).collect()
}

/// Wraps negative indices of a dimension of size `n`, as i64; indices outside of it are an error.
#[track_caller]
pub(super) fn wrapped(name: &'static str, index: &DTensor, n: usize) -> Result<DTensor> {
    Ok(dispatch(&WrapIndices { name, n, from_back: true }, &[index], Location::caller())?.swap_remove(0))
}

/// Checks indices of any shape and wraps negative ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct WrapIndices {
    pub(super) name: &'static str,
    pub(super) n: usize,
    /// Whether negative indices count from the end; else they are errors.
    pub(super) from_back: bool,
}

impl Op for WrapIndices {
    /// Its own name, not that of the operator that it serves, so that `override_rule` for that operator does not apply to it.
    fn name(&self) -> &'static str {
        "wrap_index"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let index = &inputs[0];
        if index.dtype.is_float() {
            return Err(not_integer(self.name, index.dtype));
        }
        let signature = Signature::pointwise(&[&index.shape], &index.shape);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: index.shape.clone(), dtype: DType::I64 }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let n = self.n as i64;
        let wrap = |i: i64| match i {
            _ if (0..n).contains(&i) => Ok(i),
            _ if self.from_back && (-n..0).contains(&i) => Ok(i + n),
            _ => {
                let found = format!("{i} in {} along a dimension of size {n}", self.name);
                let least = if self.from_back { -n } else { 0 };
                Err(ErrorKind::Index { index: i, size: self.n }.error(
                    "index",
                    found,
                    format!("numbers from {least} to {}", n - 1),
                    "check the indices",
                ))
            }
        };
        let values = to_i64_vec(&inputs[0])?.into_iter().map(wrap).collect::<Result<Vec<_>>>()?;
        Ok(vec![Tensor::from_vec(values, inputs[0].dims(), inputs[0].device())?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
