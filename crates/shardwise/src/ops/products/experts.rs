//! The gated MLPs of a mixture of experts, each on the rows that chose it.

use std::hash::{Hash, Hasher};
use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::indices::{check_indices, not_integer};
use crate::ops::products::linear_activation::Activation;
use crate::ops::products::quantized::{BlockType, QuantizedTensor};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{DimSharding, Signature};
use crate::tensor::first_derivative_only;
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::experts::{ExpertActivation, ExpertRows, expert_mlp, expert_mlp_backward};

const NAME: &str = "expert_mlp";

impl DTensor {
    /// Computes for every row `[rows, width]` the weighted sum of the gated MLPs of the experts that were chosen for it:
    /// `down(activation(gate(x)) * up(x))`, as in Mixtral.
    ///
    /// `chosen` are the numbers of the experts `[rows, k]`, `weights` their shares `[rows, k]`; the stacks are gates and
    /// up-projections `[experts, hidden, width]` and down-projections `[experts, width, hidden]`.
    ///
    /// Communicates nothing if rows are sharded, experts, the features inside them, or the chosen ones; but for rows the result is
    /// `Partial(Sum)`. Every rank computes its experts only on the rows that chose them. Differentiable once.
    ///
    /// ```
    /// use shardwise::candle_core::{Device, Tensor};
    /// use shardwise::nn::Activation;
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("ep", 2)])?;
    ///     let x = DTensor::ones((2, 4), DType::F32, &mesh, [Replicate])?;
    ///     let chosen = DTensor::replicate(&Tensor::new(&[[0i64], [1]], &Device::Cpu)?, &mesh)?;
    ///     let weights = DTensor::ones((2, 1), DType::F32, &mesh, [Replicate])?;
    ///     let stack = DTensor::ones((2, 3, 4), DType::F32, &mesh, [Shard(0)])?; // one expert per rank
    ///     let down = DTensor::ones((2, 4, 3), DType::F32, &mesh, [Shard(0)])?;
    ///     let y = x.expert_mlp(&chosen, &weights, [&stack, &stack, &down], Activation::Relu)?;
    ///     assert_eq!(y.full_tensor()?.to_vec2::<f32>()?, [[48.0; 4]; 2]); // 3 * 4 * 4
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes or types do not fit, or an expert is chosen that there is not.
    #[doc(alias = "MixtralExperts")]
    #[track_caller]
    pub fn expert_mlp(
        &self,
        chosen: &DTensor,
        weights: &DTensor,
        stacks: [&DTensor; 3],
        activation: Activation,
    ) -> Result<DTensor> {
        let op = ExpertMlp { activation, experts: stacks[0].shape().first().copied().unwrap_or(0) };
        let chosen = if chosen.dtype().is_float() { chosen.clone() } else { chosen.to_dtype(DType::I64)? };
        let [gate, up, down] = stacks;
        Ok(dispatch(&op, &[self, &chosen, weights, gate, up, down], Location::caller())?.swap_remove(0))
    }

    /// As [`expert_mlp`](Self::expert_mlp), with quantized stacks.
    #[track_caller]
    pub(crate) fn quantized_expert_mlp(
        &self,
        chosen: &DTensor,
        weights: &DTensor,
        stacks: [&QuantizedTensor; 3],
        activation: Activation,
    ) -> Result<DTensor> {
        let [gate, up, down] = stacks;
        let blocks = stacks.map(QuantizedTensor::block_type);
        // The features inside an expert are sharded between the blocks of the last matrix.
        let grouped =
            |stack: &QuantizedTensor| stack.blocks().unflatten(1, &[-1, down.block_type().elements() as isize]);
        let (gate, up) = (grouped(gate)?, grouped(up)?);
        let op = QuantizedExpertMlp { op: ExpertMlp { activation, experts: gate.shape()[0] }, blocks };
        let inputs = [self, chosen, weights, &gate, &up, down.blocks()];
        Ok(dispatch(&op, &inputs, Location::caller())?.swap_remove(0))
    }
}

/// Inputs: rows, chosen experts, weights, and the three stacks.
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
    /// Checks sizes and types.
    fn check(self, inputs: &[TensorMeta]) -> Result<()> {
        let [x, chosen, weights, stacks @ ..] = inputs else { unreachable!("six inputs") };
        if chosen.dtype.is_float() {
            return Err(not_integer("the chosen experts", chosen.dtype));
        }
        if let Some(other) = [weights].into_iter().chain(&stacks[..3]).find(|other| other.dtype != x.dtype) {
            let found = format!("{} with rows of {}", other.dtype.as_str(), x.dtype.as_str());
            let needed = "weights and stacks in the type of the rows";
            return Err(ErrorKind::dtype(other.dtype).error(NAME, found, needed, "convert them with `to_dtype`"));
        }
        let fits = match (&*x.shape, &*chosen.shape, &*stacks[0].shape) {
            (&[rows, width], &[of_rows, _], &[experts, hidden, of_width]) => {
                rows == of_rows
                    && width == of_width
                    && weights.shape == chosen.shape
                    && stacks[1].shape == stacks[0].shape
                    && *stacks[2].shape == [experts, width, hidden]
            }
            _ => false,
        };
        if fits {
            return Ok(());
        }
        let shapes: Vec<String> = inputs[..6].iter().map(|t| format!("{:?}", t.shape)).collect();
        Err(ErrorKind::shape(&x.shape).error(
            NAME,
            format!("rows, chosen experts, weights and stacks of shapes {}", shapes.join(", ")),
            "[rows, width], twice [rows, k], twice [experts, hidden, width], and [experts, width, hidden]",
            "reshape the operands",
        ))
    }

    fn with_rows<R>(
        self,
        inputs: &[Tensor],
        blocks: Option<[BlockType; 3]>,
        context: &KernelContext<'_>,
        body: impl FnOnce(&ExpertRows<'_>) -> Result<R>,
    ) -> Result<R> {
        let experts = context.input_indices(3, 0);
        let [x, chosen, weights, gate, up, down, ..] = inputs else { unreachable!("six inputs") };
        check_indices(NAME, chosen, self.experts)?;
        let activation = scalar_functions(self.activation);
        body(&ExpertRows { x, chosen, weights, gate, up, down, blocks, experts: &experts, activation })
    }
}

impl Op for ExpertMlp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        self.check(inputs)?;
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let dims = [DimSharding::Free, DimSharding::Never, summed, summed, summed];
        let mut signature = Signature::new(dims, operands(), [vec![ROWS, WIDTH]]);
        // Linear in the weights, the up-projections and the down-projections.
        for (factor, op) in [2, 4, 5].into_iter().flat_map(|i| [ReduceOp::Sum, ReduceOp::Avg].map(|op| (i, op))) {
            signature = signature.allow_partial((0..6).map(|i| (i == factor).then_some(op)), op);
        }
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
            let found = dispatch(&ExpertMlpBackward(*op), &inputs, Location::caller())?;
            let [x, weights, gate, up, down] = <[DTensor; 5]>::try_from(found).expect("five outputs");
            Ok(vec![Some(x), None, Some(weights), Some(gate), Some(up), Some(down)])
        })
    }
}

impl Op for QuantizedExpertMlp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let dims = [DimSharding::Free, DimSharding::Never, summed, summed, summed];
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
            let mut found = dispatch(&ExpertMlpBackward(op.op), &inputs, Location::caller())?.into_iter();
            let (x, weights) = (found.next(), found.next());
            Ok(vec![x, None, weights, None, None, None])
        })
    }
}

impl Op for ExpertMlpBackward {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let summed = DimSharding::Reduces(ReduceOp::Sum);
        let dims = [summed, DimSharding::Never, summed, summed, summed];
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

pub(in crate::ops) const OPS: &[OpEntry] = &[OpEntry {
    name: NAME,
    samples: expert_samples,
    apply: |x| {
        // One stack in three roles, and experts by a rule: with six inputs there would be 75,000 combinations of placements.
        let (activation, down) = ([Activation::Silu, Activation::GeluTanh][x[0].shape()[0] % 2], x[2].transpose(1, 2)?);
        let (whole, experts) = (vec![Placement::Replicate; x[1].placements().len()], x[2].shape()[0]);
        let number = |at: &[usize]| ((at[0] * 3 + at[1] * 5) % experts) as f64;
        let chosen = DTensor::from_fn(x[1].shape(), DType::I64, x[1].device_mesh(), whole, number)?;
        Ok(vec![x[0].expert_mlp(&chosen, &x[1], [&x[2], &x[2].mul_scalar(0.5)?, &down], activation)?])
    },
}];

fn expert_samples() -> Vec<Vec<SampleInput>> {
    let sample = |rows: usize, chosen: usize, [experts, hidden, width]: [usize; 3]| {
        [&[rows, width][..], &[rows, chosen], &[experts, hidden, width]]
            .map(|shape| SampleInput::new(shape, DType::F32))
            .to_vec()
    };
    vec![sample(5, 2, [4, 3, 4]), sample(0, 2, [2, 2, 3])]
}
