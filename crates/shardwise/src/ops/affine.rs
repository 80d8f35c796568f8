//! Matrix products with an addend: `linear`, `addmm`, `baddbmm`.

use std::panic::Location;

use candle_core::DType;

use super::{OpEntry, SampleInput};
use crate::error::{ErrorKind, Result};
use crate::op::name_call;
use crate::tensor::DTensor;

impl DTensor {
    /// Applies a linear layer: this tensor `[..., in]` times the transpose of `weight`, `[out, in]`, plus `bias`, `[out]`.
    ///
    /// Communicates as [`matmul`](Self::matmul) does. With a weight sharded on dimension 0 (column-parallel) the result is
    /// sharded on its last dimension; sharded on dimension 1 together with the features of the input (row-parallel), the
    /// result is `Partial(Sum)`.
    ///
    /// # Errors
    /// If the features of the input are not those of the weight.
    #[track_caller]
    pub fn linear(&self, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        if self.ndim() == 0 || weight.ndim() != 2 {
            return Err(ErrorKind::shape(self.shape()).error(
                "operands",
                format!("{} and {} in linear", self.layout(), weight.layout()),
                "an input [..., in] and a weight [out, in]",
                "reshape or transpose the tensors",
            ));
        }
        let (features, takes) = (self.shape()[self.ndim() - 1], weight.shape()[1]);
        if features != takes {
            let found = format!("input has {features} features, weight takes {takes}");
            let needed = format!("an input [..., {takes}] for a weight {:?}", weight.shape());
            let error = ErrorKind::shape(self.shape()).error(
                "operands",
                found,
                needed,
                "change the input, or the layer before this one",
            );
            return Err(name_call(error, "linear", &[self, weight], Location::caller()));
        }
        let product = self.times_transposed(weight)?;
        bias.map_or(Ok(product.clone()), |bias| product.add(bias))
    }

    /// Returns `beta * self + alpha * (a @ b)`; this tensor broadcasts to the product of the two matrices.
    ///
    /// Communicates as [`matmul`](Self::matmul) and [`add`](Self::add) do.
    #[track_caller]
    pub fn addmm(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        scaled(&a.mm(b)?, alpha)?.add(&scaled(self, beta)?)
    }

    /// Returns `beta * self + alpha * (a @ b)` for batches of matrices `[batch, m, k]` and `[batch, k, n]`.
    ///
    /// Communicates as [`bmm`](Self::bmm) and [`add`](Self::add) do.
    #[track_caller]
    pub fn baddbmm(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        scaled(&a.bmm(b)?, alpha)?.add(&scaled(self, beta)?)
    }
}

#[track_caller]
fn scaled(x: &DTensor, factor: f64) -> Result<DTensor> {
    if factor == 1.0 { Ok(x.clone()) } else { x.mul_scalar(factor) }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "linear", samples: linear_samples, apply: |x| Ok(vec![x[0].linear(&x[1], Some(&x[2]))?]) },
    OpEntry { name: "addmm", samples: addmm_samples, apply: |x| Ok(vec![x[0].addmm(&x[1], &x[2], 2.0, 1.0)?]) },
    OpEntry { name: "baddbmm", samples: baddbmm_samples, apply: |x| Ok(vec![x[0].baddbmm(&x[1], &x[2], 1.0, -1.0)?]) },
];

fn sample(shapes: [&[usize]; 3]) -> Vec<SampleInput> {
    shapes.iter().map(|shape| SampleInput::new(shape, DType::I64)).collect()
}

fn linear_samples() -> Vec<Vec<SampleInput>> {
    vec![sample([&[2, 3, 5], &[4, 5], &[4]]), sample([&[3], &[2, 3], &[2]])]
}

fn addmm_samples() -> Vec<Vec<SampleInput>> {
    vec![sample([&[4], &[5, 3], &[3, 4]])]
}

fn baddbmm_samples() -> Vec<Vec<SampleInput>> {
    vec![sample([&[2, 3, 4], &[2, 3, 5], &[2, 5, 4]])]
}
