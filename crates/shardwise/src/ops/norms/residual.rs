//! Residual addition together with the norm that follows it: one pass over memory instead of two, and in the backward pass, too.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch, dispatch_onto};
use crate::ops::arguments::scalar::Scalar;
use crate::ops::gradients::accumulate::target;
use crate::ops::norms::fused_rows::{RowOp, RowOpBackward};
use crate::ops::{OpEntry, SampleInput};
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::rows::{add_layer_norm_rows, add_rms_norm_rows};

/// Inputs: two tensors of rows, then optionally a weight, then optionally a bias. Outputs: their sum, and its norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct AddNorm(RowOp);

impl DTensor {
    /// Computes `self + branch` and the [`layer_norm`](Self::layer_norm) of the sum over its last dimension, in one pass over memory
    /// where both tensors have one layout in which that dimension is not sharded.
    ///
    /// Returns the sum and its norm. Communicates what [`add`](Self::add) and `layer_norm` do.
    #[track_caller]
    pub fn add_layer_norm(
        &self,
        branch: &DTensor,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<(DTensor, DTensor)> {
        if self.fits_residual_norm(branch, &[weight, bias]) && (weight.is_some() || bias.is_none()) {
            return self.add_norm(branch, RowOp::LayerNorm(Scalar(eps)), &[weight, bias], Location::caller());
        }
        let sum = self.add(branch)?;
        let normal = sum.layer_norm(1, weight, bias, eps)?;
        Ok((sum, normal))
    }

    /// Computes `self + branch` and the [`rms_norm`](Self::rms_norm) of the sum over its last dimension, as
    /// [`add_layer_norm`](Self::add_layer_norm) does for the layer norm.
    #[doc(alias = "fused_add_rms_norm")]
    #[track_caller]
    pub fn add_rms_norm(&self, branch: &DTensor, weight: Option<&DTensor>, eps: f64) -> Result<(DTensor, DTensor)> {
        if self.fits_residual_norm(branch, &[weight]) {
            return self.add_norm(branch, RowOp::RmsNorm(Scalar(eps)), &[weight], Location::caller());
        }
        let sum = self.add(branch)?;
        let normal = sum.rms_norm(1, weight, eps)?;
        Ok((sum, normal))
    }

    fn fits_residual_norm(&self, branch: &DTensor, vectors: &[Option<&DTensor>]) -> bool {
        let inputs: Vec<&DTensor> = std::iter::once(self).chain(vectors.iter().copied().flatten()).collect();
        self.ndim() > 0
            && self.elem_count() > 0
            && self.layout() == branch.layout()
            && self.dtype() == branch.dtype()
            && !self.layout().is_partial()
            && self.fits_fused_kernel(&inputs)
    }

    fn add_norm(
        &self,
        branch: &DTensor,
        norm: RowOp,
        vectors: &[Option<&DTensor>],
        site: crate::error::Site,
    ) -> Result<(DTensor, DTensor)> {
        let inputs: Vec<&DTensor> = [self, branch].into_iter().chain(vectors.iter().copied().flatten()).collect();
        let mut found = dispatch(&AddNorm(norm), &inputs, site)?;
        let normal = found.swap_remove(1);
        Ok((found.swap_remove(0), normal))
    }
}

impl Op for AddNorm {
    fn name(&self) -> &'static str {
        if matches!(self.0, RowOp::LayerNorm(_)) { "add_layer_norm" } else { "add_rms_norm" }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let ndim = inputs[0].shape.len();
        let all: Vec<Option<usize>> = (0..ndim).map(Some).collect();
        let sharding = (0..ndim).map(|d| if d + 1 == ndim { DimSharding::Never } else { DimSharding::Free });
        let vectors = inputs[2..].iter().map(|_| vec![None]);
        let named = [all.clone(), all.clone()].into_iter().chain(vectors);
        let signature = Signature::new(sharding, named, [all.clone(), all]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone(), inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, branch, weight, bias) = (&inputs[0], &inputs[1], inputs.get(2), inputs.get(3));
        let (sum, normal) = match self.0 {
            RowOp::LayerNorm(eps) => add_layer_norm_rows(x, branch, weight, bias, eps.0)?,
            RowOp::RmsNorm(eps) => add_rms_norm_rows(x, branch, weight, eps.0)?,
            other => unreachable!("{other:?} is not a norm"),
        };
        Ok(vec![sum, normal])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Only { inputs: &[2], outputs: &[0] }, |op, saved, gradients| {
            let [of_sum, of_normal] = gradients else { unreachable!("two outputs") };
            let vectors = saved.num_inputs() - 2;
            let Some(g) = of_normal else {
                let none = std::iter::repeat_n(None, vectors);
                return Ok([of_sum.clone(), of_sum.clone()].into_iter().chain(none).collect());
            };
            let mut found = op.norm_gradients(saved, of_sum.as_ref(), g)?;
            found.truncate(1 + vectors);
            let of_both = found[0].clone();
            Ok(std::iter::once(Some(of_both)).chain(found.into_iter().map(Some)).collect())
        })
    }
}

impl AddNorm {
    /// The gradients of the sum, by both of its uses, and of weight and bias.
    #[track_caller]
    fn norm_gradients(self, saved: &SavedTensors<'_>, of_sum: Option<&DTensor>, g: &DTensor) -> Result<Vec<DTensor>> {
        let sum = saved.output(0);
        let weight = (saved.num_inputs() > 2).then(|| saved.input(2));
        if is_recording() {
            let mut found = self.0.norm_formula(&sum, weight.as_ref(), g)?;
            if let Some(of_sum) = of_sum {
                found[0] = of_sum.add(&found[0])?;
            }
            return Ok(found);
        }
        let op = RowOpBackward(self.0);
        let inputs: Vec<&DTensor> = [Some(&sum), weight.as_ref(), Some(g)].into_iter().flatten().collect();
        // Only the backward pass holds this gradient, and drops it next: then its memory is that of the result.
        let is_last = of_sum.is_some_and(DTensor::is_exclusive);
        let mut so_far = of_sum.cloned();
        let kernel = |sum: &Tensor, _: bool, inputs: &[Tensor], _: &KernelContext<'_>| {
            op.run_onto(&target(sum, is_last)?, inputs)
        };
        let mut found = dispatch_onto(&op, &inputs, &mut so_far, &kernel, false, Location::caller())?;
        if let Some(so_far) = so_far {
            found[0] = so_far.add(&found[0])?;
        }
        Ok(found)
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "add_layer_norm",
        samples,
        apply: |x| {
            let (sum, normal) = x[0].add_layer_norm(&x[1], None, None, 1e-5)?;
            Ok(vec![sum, normal])
        },
    },
    OpEntry {
        name: "add_rms_norm",
        samples,
        apply: |x| {
            let (sum, normal) = x[0].add_rms_norm(&x[1], None, 1e-5)?;
            Ok(vec![sum, normal])
        },
    },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[2, 3, 4]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64), SampleInput::new(shape, DType::F64)]).collect()
}
