//! Custom operators that compute every element of the result from the same element of one tensor.

use std::hash::{Hash, Hasher};
use std::panic::Location;
use std::ptr::fn_addr_eq;

use candle_core::Tensor;

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::rule::Signature;
use crate::tensor::{DTensor, SaveForBackward};

/// The kernel of an [`ElementwiseOp`]: the result for a local tensor, of its shape and type.
pub type ElementwiseKernel = fn(&Tensor) -> candle_core::Result<Tensor>;

/// The derivative of an [`ElementwiseOp`] at its input, by distributed operators.
pub type ElementwiseDerivative = fn(&DTensor) -> Result<DTensor>;

/// A custom elementwise operator: a name, a kernel on local tensors and a derivative.
///
/// The result has the layout, shape and type of the input; a partial input is reduced first. For any other rule, several
/// tensors or arguments implement [`Op`].
///
/// ```
/// use shardwise::ops::ElementwiseOp;
/// use shardwise::prelude::*;
///
/// const CUBE: ElementwiseOp = ElementwiseOp::new("cube", |x| x.powf(3.0), |x| x.square()? * 3.0);
///
/// launch(2, |world| {
///     let mesh = world.mesh([("dp", 2)])?;
///     let x = DTensor::arange(0..3, DType::F64, &mesh, [Shard(0)])?.requires_grad();
///     let y = CUBE.apply(&x)?;
///     assert_eq!(y.placements(), [Shard(0)]);
///     assert_eq!(y.sum_all()?.backward()?.get(&x)?.full_tensor()?.to_vec1::<f64>()?, [0.0, 3.0, 12.0]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "custom_op")]
#[derive(Debug, Clone, Copy)]
pub struct ElementwiseOp {
    name: &'static str,
    kernel: ElementwiseKernel,
    derivative: ElementwiseDerivative,
}

impl ElementwiseOp {
    /// Creates an operator. The name appears in errors and traces, and must differ from that of other custom operators.
    pub const fn new(name: &'static str, kernel: ElementwiseKernel, derivative: ElementwiseDerivative) -> Self {
        ElementwiseOp { name, kernel, derivative }
    }

    /// Applies the operator to every element of a tensor. Local, unless the input is partial.
    ///
    /// # Errors
    /// Those of the kernel, and if it returns a tensor of another shape or type.
    #[track_caller]
    pub fn apply(&self, input: &DTensor) -> Result<DTensor> {
        Ok(dispatch(self, &[input], Location::caller())?.swap_remove(0))
    }
}

impl PartialEq for ElementwiseOp {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
            && fn_addr_eq(self.kernel, other.kernel)
            && fn_addr_eq(self.derivative, other.derivative)
    }
}

impl Eq for ElementwiseOp {}

impl Hash for ElementwiseOp {
    /// By name: ranks compare hashes, and functions have other addresses in other processes.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl Op for ElementwiseOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.as_slice();
        Ok(OpPlan { signature: Signature::pointwise(&[shape], shape), outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![(self.kernel)(&inputs[0])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
            Ok(vec![Some(gradient.mul(&(op.derivative)(&saved.input(0))?)?)])
        })
    }
}
