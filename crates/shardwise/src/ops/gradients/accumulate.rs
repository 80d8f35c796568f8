//! Sums of gradients, in the memory of one of them where nothing else uses it.

use std::panic::Location;

use candle_core::Tensor;

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch_onto};
use crate::placement::{ReduceOp, is_linear};
use crate::rule::Signature;
use crate::tensor::{DTensor, is_recording, no_grad};
use shardwise_kernels::{add_assign, own_copy};

/// The identity, in any layout: what is added to a sum. Runs in backward passes only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Addend;

impl Op for Addend {
    fn name(&self) -> &'static str {
        "add"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.as_slice();
        let mut signature = Signature::pointwise(&[shape], shape);
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            signature = signature.allow_partial([Some(op)], op);
        }
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(inputs.to_vec())
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

impl DTensor {
    /// The sum of two gradients, as [`add`](Self::add) computes it. Takes both, to write the sum over one of them that nothing else
    /// holds. Local if their layouts are equal.
    #[expect(clippy::needless_pass_by_value, reason = "its memory may be written over")]
    #[track_caller]
    pub(crate) fn plus(self, other: DTensor) -> Result<DTensor> {
        let is_differentiated = is_recording() && (self.has_gradient() || other.has_gradient());
        let is_linear = self.placements().iter().all(|p| p.reduction().is_none_or(is_linear));
        if is_differentiated || self.layout() != other.layout() || self.dtype() != other.dtype() || !is_linear {
            return self.add(&other);
        }
        let site = Location::caller();
        let (mut sum, takes_other) = (Some(self), other.is_exclusive());
        let kernel = |sum: &Tensor, is_exclusive: bool, inputs: &[Tensor], _: &KernelContext<'_>| {
            let [other] = inputs else { unreachable!("one addend") };
            let (target, addend) = match (is_exclusive && sum.is_contiguous(), takes_other && other.is_contiguous()) {
                (true, _) => (sum.clone(), other),
                (false, true) => (other.clone(), sum),
                (false, false) => (own_copy(sum)?, other),
            };
            add_assign(&target, addend)?;
            Ok(vec![target])
        };
        let added = no_grad(|| dispatch_onto(&Addend, &[&other], &mut sum, &kernel, true, site))?.swap_remove(0);
        match sum {
            None => Ok(added),
            Some(sum) => sum.add(&other),
        }
    }
}

/// Memory to add to: that of a sum if nothing else uses it, else a copy.
pub(in crate::ops) fn target(sum: &Tensor, is_exclusive: bool) -> Result<Tensor> {
    if is_exclusive && sum.is_contiguous() { Ok(sum.clone()) } else { Ok(own_copy(sum)?) }
}
