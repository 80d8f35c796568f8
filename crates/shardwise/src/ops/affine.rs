//! Products with something added.

use std::panic::Location;

use candle_core::DType;

use super::{OpEntry, Sample};
use crate::error::{ErrorKind, Result};
use crate::op::name_call;
use crate::tensor::DTensor;

impl DTensor {
    /// `x` of shape `[..., in]` times the transpose of a weight of shape `[out, in]`, plus a bias.
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

    /// `beta * x + alpha * (a @ b)`, where this tensor is `x` and broadcasts to the product of the matrices.
    #[track_caller]
    pub fn addmm(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        scaled(&a.mm(b)?, alpha)?.add(&scaled(self, beta)?)
    }

    /// `beta * x + alpha * (a @ b)` for a batch of matrices.
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

fn sample(shapes: [&[usize]; 3]) -> Vec<Sample> {
    shapes.iter().map(|shape| Sample::new(shape, DType::I64)).collect()
}

fn linear_samples() -> Vec<Vec<Sample>> {
    vec![sample([&[2, 3, 5], &[4, 5], &[4]]), sample([&[3], &[2, 3], &[2]])]
}

fn addmm_samples() -> Vec<Vec<Sample>> {
    vec![sample([&[4], &[5, 3], &[3, 4]])]
}

fn baddbmm_samples() -> Vec<Vec<Sample>> {
    vec![sample([&[2, 3, 4], &[2, 3, 5], &[2, 5, 4]])]
}
