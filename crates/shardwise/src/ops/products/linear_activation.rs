//! A linear layer together with the activation that follows it: one pass over the hidden features less.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch, product_dtype};
use crate::ops::elementwise::unary::Unary;
use crate::ops::gradients::derivative::Differentiable;
use crate::ops::products::affine::{linear_flops, linear_gradients, linear_plan};
use crate::ops::{OpEntry, SampleInput};
use crate::tensor::{DTensor, SaveForBackward, is_recording};
use shardwise_kernels::matmul_activation;

/// An activation function by its name, as configurations of models have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// GELU, `x * Phi(x)`.
    Gelu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// SiLU, `x * sigmoid(x)`.
    Silu,
    /// `x * sigmoid(1.702 x)`, an approximation of GELU.
    QuickGelu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
}

impl Activation {
    #[track_caller]
    pub(crate) fn apply(self, x: &DTensor) -> Result<DTensor> {
        match self {
            Activation::Relu => x.relu(),
            Activation::Gelu => x.gelu(),
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::Silu => x.silu(),
            Activation::QuickGelu => x.mul(&x.mul_scalar(1.702)?.sigmoid()?),
            Activation::ReluSquared => x.relu()?.square(),
            Activation::Tanh => x.tanh(),
            Activation::Sigmoid => x.sigmoid(),
        }
    }

    /// The elementwise operator that it is; `None` if it takes several operators.
    fn function(self) -> Option<Unary> {
        match self {
            Activation::Relu => Some(Unary::relu),
            Activation::Gelu => Some(Unary::gelu),
            Activation::GeluTanh => Some(Unary::gelu_tanh),
            Activation::Silu => Some(Unary::silu),
            Activation::Tanh => Some(Unary::tanh),
            Activation::Sigmoid => Some(Unary::sigmoid),
            Activation::QuickGelu | Activation::ReluSquared => None,
        }
    }
}

impl DTensor {
    /// Applies a linear layer and an activation function: `activation(self.linear(weight, bias))`, with the same bits.
    ///
    /// In f32, where the features of this tensor are not sharded and nothing is partial, the function is applied to parts of
    /// the product while they are in the cache; without gradients the product itself is not stored. Communicates as
    /// [`linear`](Self::linear) does.
    ///
    /// # Errors
    /// If the features of the input are not those of the weight.
    #[doc(alias = "linear_relu")]
    #[track_caller]
    pub fn linear_activation(
        &self,
        weight: &DTensor,
        bias: Option<&DTensor>,
        activation: Activation,
    ) -> Result<DTensor> {
        let inputs: Vec<&DTensor> = [Some(self), Some(weight), bias].into_iter().flatten().collect();
        let fits = product_dtype(self.dtype()) == DType::F32
            && self.fits_linear(weight)
            && self.fits_fused_linear(weight, bias);
        match activation.function().filter(|_| fits) {
            Some(function) => {
                let keeps_product = is_recording() && inputs.iter().any(|t| t.has_gradient());
                let op = LinearActivation { function, keeps_product };
                Ok(dispatch(&op, &inputs, Location::caller())?.swap_remove(0))
            }
            None => activation.apply(&self.linear(weight, bias)?),
        }
    }
}

/// Inputs: features, weight, and optionally a bias. Outputs: the activated product and, if it is kept for the backward pass, the
/// product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LinearActivation {
    function: Unary,
    keeps_product: bool,
}

impl Op for LinearActivation {
    fn name(&self) -> &'static str {
        "linear_activation"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(linear_plan(inputs, if self.keeps_product { 2 } else { 1 }))
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let function = self.function.in_f32();
        let (results, product) =
            matmul_activation(&inputs[0], &inputs[1].t()?, inputs.get(2), function, self.keeps_product)?;
        Ok(std::iter::once(results).chain(product).collect())
    }

    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        linear_flops(inputs)
    }

    fn gradient(&self) -> Gradient<Self> {
        if !self.keeps_product {
            return Gradient::NotDifferentiable;
        }
        Gradient::From(SaveForBackward::Only { inputs: &[0, 1], outputs: &[1] }, |op, saved, gradients| {
            let [of_result, of_product] = gradients else { unreachable!("two outputs") };
            let through = of_result.as_ref().map(|g| op.function.input_gradient(&saved.output(1), g)).transpose()?;
            // The product is used outside of this operator only by the gradient of a gradient.
            let of_product = match (through, of_product) {
                (Some(through), Some(direct)) => through.add(direct)?,
                (Some(g), None) => g,
                (None, Some(g)) => g.clone(),
                (None, None) => return Ok(vec![None; saved.num_inputs()]),
            };
            linear_gradients(saved, &of_product)
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[OpEntry {
    name: "linear_activation",
    samples,
    apply: |x| Ok(vec![x[0].linear_activation(&x[1], Some(&x[2]), Activation::Gelu)?]),
}];

fn samples() -> Vec<Vec<SampleInput>> {
    let sample = |shapes: [&[usize]; 3], dtype| shapes.iter().map(|shape| SampleInput::new(shape, dtype)).collect();
    vec![
        sample([&[2, 3, 5], &[4, 5], &[4]], DType::F32),
        sample([&[3], &[2, 3], &[2]], DType::F32),
        sample([&[4, 6], &[5, 6], &[5]], DType::F64),
    ]
}
