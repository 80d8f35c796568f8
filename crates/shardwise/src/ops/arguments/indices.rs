//! Index tensors: checking, and negative indices.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::rule::Signature;
use crate::tensor::DTensor;
use shardwise_kernels::{first_outside, wrapped_indices};

/// The error for an index tensor of floating-point type.
pub(in crate::ops) fn not_integer(name: &str, dtype: DType) -> Error {
    ErrorKind::dtype(dtype).error(
        "index",
        format!("{} in {name}", dtype.as_str()),
        "integers",
        "convert it to i64 first",
    )
}

/// Checks that all indices are those of a dimension of size `n`.
pub(in crate::ops) fn check_indices(name: &str, index: &Tensor, n: usize) -> Result<()> {
    let Some(outside) = first_outside(index, 0..n as i64, None)? else { return Ok(()) };
    let found = format!("{outside} in {name} along a dimension of size {n}");
    Err(ErrorKind::Index { index: outside, size: n }.error(
        "index",
        found,
        format!("numbers from 0 to {}", n.saturating_sub(1)),
        "check the indices",
    ))
}

/// Wraps negative indices of a dimension of size `n`, as i64; indices outside of it are an error.
#[track_caller]
pub(in crate::ops) fn wrapped(name: &'static str, index: &DTensor, n: usize) -> Result<DTensor> {
    Ok(dispatch(&WrapIndices { name, n, from_back: true }, &[index], Location::caller())?.swap_remove(0))
}

/// Checks indices of any shape and wraps negative ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::ops) struct WrapIndices {
    pub(in crate::ops) name: &'static str,
    pub(in crate::ops) n: usize,
    /// Whether negative indices count from the end; else they are errors.
    pub(in crate::ops) from_back: bool,
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
        let (index, n) = (&inputs[0], self.n as i64);
        let least = if self.from_back { -n } else { 0 };
        let Some(outside) = first_outside(index, least..n, None)? else {
            return Ok(vec![wrapped_indices(index, self.n)?]);
        };
        Err(ErrorKind::Index { index: outside, size: self.n }.error(
            "index",
            format!("{outside} in {} along a dimension of size {n}", self.name),
            format!("numbers from {least} to {}", n - 1),
            "check the indices",
        ))
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
