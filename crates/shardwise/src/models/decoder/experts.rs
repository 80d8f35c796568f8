//! Mixtures of experts: a router chooses a few gated MLPs for every token.

use std::hash::{Hash, Hasher};

use candle_core::{DType, Tensor};

use super::attention::linear;
use super::mlp::DecoderMlp;
use super::spec::{ExpertsSpec, MlpSpec};
use crate::autograd::first_derivative_only;
use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::nn::init::Init;
use crate::nn::{Activation, Builder, Forward, Hooks, Linear, Module};
use crate::op::{self, Gradient, KernelContext, Op, OpPlan};
use crate::ops::{BlockType, QuantizedTensor};
use crate::param::Param;
use crate::placement::ReduceOp;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::experts::{ExpertActivation, ExpertRows, expert_mlp, expert_mlp_backward};

/// A mixture of experts: the weighted sum of the gated MLPs that a router chooses for each token.
///
/// Every rank computes its part of the experts only on the tokens that chose them. Stacks may be sharded over
/// experts or over the features inside them.
#[derive(Module)]
pub struct MixtureOfExperts {
    /// Scores of the experts.
    pub router: Linear,
    /// The experts.
    pub experts: Experts,
    /// An expert that every token uses, if there is one.
    pub shared: Option<DecoderMlp>,
    /// Its gate: one number per token.
    pub shared_gate: Option<Linear>,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    spec: ExpertsSpec,
}

/// The stacked weights of the experts of a [`MixtureOfExperts`].
///
/// They may be quantized for inference, all three of them ([`Param::set_quantized`]).
#[derive(Module)]
pub struct Experts {
    /// Gates `[experts, hidden, width]`.
    pub gate: Param,
    /// Up-projections `[experts, hidden, width]`.
    pub up: Param,
    /// Down-projections `[experts, width, hidden]`.
    pub down: Param,
    /// Input and output hooks; see [`Hooks`].
    pub hooks: Hooks,
    #[module(skip)]
    activation: Activation,
}

impl MixtureOfExperts {
    pub(in crate::models) fn new(builder: &Builder, width: usize, spec: ExpertsSpec, mlp: MlpSpec) -> Result<Self> {
        let ExpertsSpec { count, hidden, shared_hidden, .. } = spec;
        let stacks = builder.child("experts");
        // As a linear layer of one expert would start.
        let stack = |name: &str, rows: usize, columns: usize| {
            let bound = 1.0 / (columns as f64).sqrt();
            stacks.param(name, &[count, rows, columns], Init::Uniform(-bound, bound))
        };
        let shared = |hidden: usize| DecoderMlp::new(&builder.child("shared"), width, MlpSpec { hidden, ..mlp });
        let shared_gate = shared_hidden.map(|_| linear(builder, "shared_gate", [width, 1], false));
        Ok(MixtureOfExperts {
            router: linear(builder, "router", [width, count], false)?,
            experts: Experts {
                gate: stack("gate", hidden, width)?,
                up: stack("up", hidden, width)?,
                down: stack("down", width, hidden)?,
                hooks: stacks.hooks(),
                activation: mlp.activation,
            },
            shared: shared_hidden.map(shared).transpose()?,
            shared_gate: shared_gate.transpose()?,
            hooks: builder.hooks(),
            spec,
        })
    }
}

impl Forward for MixtureOfExperts {
    fn forward(&self, x: &DTensor) -> Result<DTensor> {
        self.hooks.run(x, |x| {
            let scores = self.router.forward(x)?.to_dtype(DType::F32)?.softmax(-1)?;
            let (mut weights, chosen) = scores.topk(self.spec.per_token, -1, true)?;
            if self.spec.normalized {
                weights = weights.div(&weights.sum(&[-1], true)?)?;
            }
            let found = self.experts.mix(x, &chosen, &weights.to_dtype(x.dtype())?)?;
            match (&self.shared, &self.shared_gate) {
                (Some(shared), Some(gate)) => found.add(&shared.forward(x)?.mul(&gate.forward(x)?.sigmoid()?)?),
                _ => Ok(found),
            }
        })
    }
}

impl Experts {
    /// The weighted sum of the chosen experts of `[batch, length, width]`.
    #[track_caller]
    fn mix(&self, x: &DTensor, chosen: &DTensor, weights: &DTensor) -> Result<DTensor> {
        self.hooks.run_own("experts", x, |x| {
            let [batch, length, _] = *x.shape() else {
                let needed = "[batch, length, width]";
                return Err(ErrorKind::shape(x.shape()).error("input of experts", x.layout(), needed, "reshape it"));
            };
            let rows = |t: &DTensor| t.flatten(0, 1);
            let op = ExpertMlp { activation: self.activation, experts: self.gate.shape()[0] };
            let inputs = [rows(x)?, rows(chosen)?, rows(weights)?];
            let quantized = [self.gate.quantized(), self.up.quantized(), self.down.quantized()];
            let found = match &quantized {
                // The features inside an expert are sharded between the blocks of the last matrix.
                [Some(gate), Some(up), Some(down)] => {
                    let blocks = [gate, up, down].map(QuantizedTensor::block_type);
                    let grouped = |stack: &QuantizedTensor| {
                        stack.blocks().unflatten(1, &[-1, down.block_type().elements() as isize])
                    };
                    let (gate, up) = (grouped(gate)?, grouped(up)?);
                    let operands: Vec<&DTensor> = inputs.iter().chain([&gate, &up, down.blocks()]).collect();
                    op::apply(&QuantizedExpertMlp { op, blocks }, &operands)?
                }
                _ => {
                    let (gate, up) = (self.gate.forward_value()?, self.up.forward_value()?);
                    let down = self.down.forward_value()?;
                    op::apply(&op, &inputs.iter().chain([&gate, &up, &down]).collect::<Vec<_>>())?
                }
            };
            found[0].unflatten(0, &[batch as isize, length as isize])
        })
    }
}

/// The weighted sum of experts. Inputs: rows, chosen experts, weights, and the three stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ExpertMlp {
    activation: Activation,
    /// Experts of all ranks, for the estimate of operations.
    experts: usize,
}

/// As [`ExpertMlp`], with quantized stacks: gates and up-projections `[experts, groups, rows of a group, blocks, bytes]`, and
/// down-projections `[experts, width, groups, bytes]`. A group is a block of the down-projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct QuantizedExpertMlp {
    op: ExpertMlp,
    /// Of the three stacks.
    blocks: [BlockType; 3],
}

/// The gradients of [`ExpertMlp`]. Inputs: its inputs, and the gradient of its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ExpertMlpBackward(ExpertMlp);

impl Hash for ExpertMlp {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.activation as u8).hash(state);
    }
}

impl Hash for ExpertMlpBackward {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

const ROWS: Option<usize> = Some(0);
const WIDTH: Option<usize> = Some(1);
/// Chosen experts of a row.
const CHOSEN: Option<usize> = Some(2);
const EXPERTS: Option<usize> = Some(3);
/// Features inside an expert.
const HIDDEN: Option<usize> = Some(4);

/// Dimensions of the inputs.
fn operands() -> [Vec<Option<usize>>; 6] {
    let stack = vec![EXPERTS, HIDDEN, WIDTH];
    [vec![ROWS, WIDTH], vec![ROWS, CHOSEN], vec![ROWS, CHOSEN], stack.clone(), stack, vec![EXPERTS, WIDTH, HIDDEN]]
}

impl ExpertMlp {
    fn with_rows<R>(
        self,
        inputs: &[Tensor],
        blocks: Option<[BlockType; 3]>,
        context: &KernelContext<'_>,
        body: impl FnOnce(&ExpertRows<'_>) -> Result<R>,
    ) -> Result<R> {
        let experts = context.input_indices(3, 0);
        let [x, chosen, weights, gate, up, down, ..] = inputs else { unreachable!("six inputs") };
        let activation = scalar_functions(self.activation);
        body(&ExpertRows { x, chosen, weights, gate, up, down, blocks, experts: &experts, activation })
    }
}

impl Op for ExpertMlp {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let dims = [DimSharding::Free, DimSharding::Never, DimSharding::Never, summed, summed];
        let signature = Signature::new(dims, operands(), [vec![ROWS, WIDTH]]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        self.with_rows(inputs, None, context, |rows| Ok(vec![expert_mlp(rows, context.output_dtype(0))?]))
    }

    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        // On average an expert computes the same share of the chosen rows as any other one.
        let ([rows, width], [_, chosen], [own, hidden, _]) = (inputs[0], inputs[1], inputs[3]) else { return 0 };
        6 * (rows * chosen * hidden * width * own / self.experts.max(1)) as u64
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 6]) };
            first_derivative_only(op.name())?;
            let inputs: Vec<DTensor> = (0..6).map(|i| saved.input(i)).collect();
            let inputs: Vec<&DTensor> = inputs.iter().chain([g]).collect();
            let found = op::apply(&ExpertMlpBackward(*op), &inputs)?;
            let [x, weights, gate, up, down] = <[DTensor; 5]>::try_from(found).expect("five outputs");
            Ok(vec![Some(x), None, Some(weights), Some(gate), Some(up), Some(down)])
        })
    }
}

impl Op for QuantizedExpertMlp {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let dims = [DimSharding::Free, DimSharding::Never, DimSharding::Never, summed, summed];
        let [x, chosen, weights, ..] = operands();
        let stack = vec![EXPERTS, HIDDEN, None, None, None];
        let down = vec![EXPERTS, WIDTH, HIDDEN, None];
        let signature = Signature::new(dims, [x, chosen, weights, stack.clone(), stack, down], [vec![ROWS, WIDTH]]);
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let mut inputs = inputs.to_vec();
        for stack in &mut inputs[3..5] {
            *stack = stack.flatten(1, 2)?;
        }
        let blocks = Some(self.blocks);
        self.op.with_rows(&inputs, blocks, context, |rows| Ok(vec![expert_mlp(rows, context.output_dtype(0))?]))
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        let [experts, groups, rows, ..] = *inputs[3] else { return 0 };
        let stack = [experts, groups * rows, 0];
        let inputs: Vec<&[usize]> = inputs[..3].iter().copied().chain([stack.as_slice()]).collect();
        self.op.flops(&inputs, outputs)
    }

    /// The gradient of rows that are not rounded; the stacks are expanded and have none.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 6]) };
            first_derivative_only(op.name())?;
            let mut inputs: Vec<DTensor> = (0..6).map(|i| saved.input(i)).collect();
            for (i, (stack, block_type)) in inputs[3..].iter_mut().zip(op.blocks).enumerate() {
                *stack = QuantizedTensor::new(stack, block_type)?.dequantize()?;
                if i < 2 {
                    *stack = stack.flatten(1, 2)?;
                }
            }
            let inputs: Vec<&DTensor> = inputs.iter().chain([g]).collect();
            let mut found = op::apply(&ExpertMlpBackward(op.op), &inputs)?.into_iter();
            let (x, weights) = (found.next(), found.next());
            Ok(vec![x, None, weights, None, None, None])
        })
    }
}

impl Op for ExpertMlpBackward {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let dims = [summed, DimSharding::Never, DimSharding::Never, summed, summed];
        let [x, chosen, weights, gate, up, down] = operands();
        let outputs = [x.clone(), weights.clone(), gate.clone(), up.clone(), down.clone()];
        let g = x.clone();
        let signature = Signature::new(dims, [x, chosen, weights, gate, up, down, g], outputs)
            .allow_partial((0..7).map(|i| (i == 6).then_some(ReduceOp::Sum)), ReduceOp::Sum);
        Ok(OpPlan { signature, outputs: [0, 2, 3, 4, 5].map(|i| inputs[i].clone()).to_vec() })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let found = self.0.with_rows(inputs, None, context, |rows| Ok(expert_mlp_backward(rows, &inputs[6])?))?;
        Ok(vec![found.x, found.weights, found.gate, found.up, found.down])
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        3 * self.0.flops(inputs, outputs)
    }

    /// Runs in backward passes that are not recorded; the second derivative is refused.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// An activation of one number, and its derivative.
fn scalar_functions(activation: Activation) -> ExpertActivation {
    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }
    fn normal(x: f64) -> f64 {
        0.5 * (1.0 + candle_core::cpu::erf::erf_f64(x * std::f64::consts::FRAC_1_SQRT_2))
    }
    /// The argument of the hyperbolic tangent in the approximation of GELU, and its derivative.
    fn bent(x: f64) -> (f64, f64) {
        let scale = (2.0 / std::f64::consts::PI).sqrt();
        (scale * (x + 0.044715 * x * x * x), scale * (1.0 + 3.0 * 0.044715 * x * x))
    }
    const QUICK: f64 = 1.702;
    type Function = fn(f64) -> f64;
    let (value, slope): (Function, Function) = match activation {
        Activation::Relu => (|x| x.max(0.0), |x| f64::from(u8::from(x > 0.0))),
        Activation::ReluSquared => (|x| x.max(0.0) * x.max(0.0), |x| 2.0 * x.max(0.0)),
        Activation::Gelu => {
            (|x| x * normal(x), |x| normal(x) + x * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt())
        }
        Activation::GeluTanh => (
            |x| 0.5 * x * (1.0 + bent(x).0.tanh()),
            |x| {
                let (inside, slope) = bent(x);
                let t = inside.tanh();
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope
            },
        ),
        Activation::Silu => (|x| x * sigmoid(x), |x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
        Activation::QuickGelu => {
            (|x| x * sigmoid(QUICK * x), |x| sigmoid(QUICK * x) * (1.0 + QUICK * x * (1.0 - sigmoid(QUICK * x))))
        }
        Activation::Tanh => (f64::tanh, |x| 1.0 - x.tanh() * x.tanh()),
        Activation::Sigmoid => (sigmoid, |x| sigmoid(x) * (1.0 - sigmoid(x))),
    };
    ExpertActivation { value, slope }
}
