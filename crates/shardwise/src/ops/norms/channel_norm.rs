//! Fused batch normalization: statistics, normalization and gradients per channel, each in one pass over memory. If the batch or
//! a spatial dimension is sharded, ranks all-reduce the statistics.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::scalar::Scalar;
use crate::placement::ReduceOp;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors, is_recording};
use shardwise_kernels::channels::{
    ChannelStats, channel_gradient_sums, channel_input_gradient, channel_normalize, channel_sums,
};

/// A function of `[n, channels, ...]` and of vectors with one number per channel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ChannelOp {
    name: &'static str,
    function: ChannelFn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ChannelFn {
    /// The sum over every channel, divided by a number: `[x]`.
    Sum(Scalar),
    /// The sum of squared distances to a mean, divided by a number: `[x, mean]`.
    Squares(Scalar),
    /// Batch normalization with some `eps`: `[x, mean, variance]`, then a weight, then a bias.
    Normalize { eps: Scalar, weight: bool },
    /// The sums over every channel of the gradient, and of its products with the normalized input: `[x, mean, variance, g]`.
    GradientSums { eps: Scalar },
    /// The gradient of the input, through the statistics of `count` elements too: `[x, mean, variance, g]`, the two sums, and
    /// the weight.
    InputGradient { eps: Scalar, count: Scalar },
}

impl DTensor {
    /// Whether a fused kernel takes this tensor with a weight and a bias: one floating-point type, one number per channel.
    fn has_fused_channels(&self, vectors: &[Option<&DTensor>]) -> bool {
        let fits = |v: &&DTensor| v.dtype() == self.dtype() && v.ndim() == 1 && v.shape()[0] == self.shape()[1];
        self.ndim() >= 2
            && self.dtype().is_float()
            && self.elem_count() > 0
            && vectors.iter().flatten().all(|v| fits(v) && v.device_mesh() == self.device_mesh())
    }

    /// Batch normalization with the statistics of this batch; `None` if no fused kernel takes the operands.
    #[track_caller]
    pub(in crate::ops) fn fused_batch_norm(
        &self,
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<Option<DTensor>> {
        if !self.has_fused_channels(&[weight, bias]) {
            return Ok(None);
        }
        let x = self.without_partials("batch_norm", &[])?;
        let (mean, variance) = x.detach().fused_statistics("batch_norm", 0.0)?;
        let (mean, variance) = (mean.all_reduced("batch_norm")?, variance.all_reduced("batch_norm")?);
        x.normalize_channels([&mean, &variance], weight, bias, eps).map(Some)
    }

    /// Batch normalization with given statistics; `None` if no fused kernel takes the operands, or one needs a gradient.
    #[track_caller]
    pub(in crate::ops) fn fused_inference_norm(
        &self,
        statistics: [&DTensor; 2],
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<Option<DTensor>> {
        let mut all = [Some(self), Some(statistics[0]), Some(statistics[1]), weight, bias].into_iter().flatten();
        let trained = all.any(|t| t.has_gradient() && is_recording());
        let half = matches!(self.dtype(), DType::F16 | DType::BF16);
        if trained || half || !self.has_fused_channels(&[Some(statistics[0]), Some(statistics[1]), weight, bias]) {
            return Ok(None);
        }
        self.normalize_channels(statistics, weight, bias, eps).map(Some)
    }

    #[track_caller]
    fn normalize_channels(
        &self,
        [mean, variance]: [&DTensor; 2],
        weight: Option<&DTensor>,
        bias: Option<&DTensor>,
        eps: f64,
    ) -> Result<DTensor> {
        let function = ChannelFn::Normalize { eps: Scalar(eps), weight: weight.is_some() };
        let inputs: Vec<&DTensor> = [self, mean, variance].into_iter().chain(weight).chain(bias).collect();
        ChannelOp { name: "batch_norm", function }.run_on(&inputs).map(|mut found| found.swap_remove(0))
    }

    /// Mean and variance of every channel, without gradients; half precision gives f32. Both are `Partial(Sum)` if the batch is
    /// sharded.
    #[track_caller]
    pub(in crate::ops) fn fused_statistics(&self, name: &'static str, correction: f64) -> Result<(DTensor, DTensor)> {
        let count = self.elem_count() as f64 / self.shape()[1] as f64;
        let sum = ChannelOp { name, function: ChannelFn::Sum(Scalar(count)) };
        let mean = sum.run_on(&[self])?.swap_remove(0);
        let centre = mean.all_reduced(name)?;
        let squares = ChannelOp { name, function: ChannelFn::Squares(Scalar((count - correction).max(0.0))) };
        let variance = squares.run_on(&[self, &centre])?.swap_remove(0);
        Ok((mean, variance))
    }
}

impl ChannelOp {
    #[track_caller]
    fn run_on(&self, inputs: &[&DTensor]) -> Result<Vec<DTensor>> {
        dispatch(self, inputs, Location::caller())
    }

    fn returns_vectors(&self) -> usize {
        match self.function {
            ChannelFn::Sum(_) | ChannelFn::Squares(_) => 1,
            ChannelFn::GradientSums { .. } => 2,
            ChannelFn::Normalize { .. } | ChannelFn::InputGradient { .. } => 0,
        }
    }

    /// The backward pass of [`ChannelFn::Normalize`], where the statistics are those of the input.
    fn backward(
        &self,
        eps: Scalar,
        has_weight: bool,
        saved: &SavedTensors<'_>,
        g: &DTensor,
    ) -> Result<Vec<Option<DTensor>>> {
        if is_recording() {
            return recorded_backward(eps, has_weight, saved, g);
        }
        let [x, mean, variance] = [0, 1, 2].map(|i| saved.input(i));
        let run = |function: ChannelFn, inputs: &[&DTensor]| ChannelOp { name: self.name, function }.run_on(inputs);
        let sums = run(ChannelFn::GradientSums { eps }, &[&x, &mean, &variance, g])?;
        let sums = sums.iter().map(|s| s.all_reduced(self.name)).collect::<Result<Vec<_>>>()?;
        let count = Scalar(x.elem_count() as f64 / x.shape()[1] as f64);
        let weight = has_weight.then(|| saved.input(3));
        let mut inputs = vec![&x, &mean, &variance, g, &sums[0], &sums[1]];
        inputs.extend(&weight);
        let of_input = run(ChannelFn::InputGradient { eps, count }, &inputs)?.swap_remove(0);
        let mut found = vec![Some(of_input), None, None];
        let vector = |sum: &DTensor, i: usize| sum.to_dtype(saved.input(i).dtype());
        if has_weight {
            found.push(Some(vector(&sums[1], 3)?));
        }
        if saved.num_inputs() > found.len() {
            found.push(Some(vector(&sums[0], found.len())?));
        }
        Ok(found)
    }
}

/// The gradients in terms of differentiable operators (double backward).
#[track_caller]
fn recorded_backward(
    eps: Scalar,
    has_weight: bool,
    saved: &SavedTensors<'_>,
    g: &DTensor,
) -> Result<Vec<Option<DTensor>>> {
    let x = saved.input(0);
    let others: Vec<isize> = (0..x.ndim() as isize).filter(|&d| d != 1).collect();
    let mean = |t: &DTensor| t.mean(&others, true);
    let centred = x.sub(&mean(&x)?)?;
    let rstd = mean(&centred.square()?)?.add_scalar(eps.0)?.rsqrt()?;
    let normal = centred.mul(&rstd)?;
    let weighted = match has_weight {
        true => g.mul(&saved.input(3).reshape(&[vec![-1], vec![1; x.ndim() - 2]].concat())?)?,
        false => g.clone(),
    };
    let along = normal.mul(&mean(&weighted.mul(&normal)?)?)?;
    let of_input = weighted.sub(&mean(&weighted)?)?.sub(&along)?.mul(&rstd)?;
    let mut found = vec![Some(of_input), None, None];
    if has_weight {
        found.push(Some(g.mul(&normal)?.sum(&others, false)?));
    }
    if saved.num_inputs() > found.len() {
        found.push(Some(g.sum(&others, false)?));
    }
    Ok(found)
}

impl Op for ChannelOp {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Exact
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let vectors = self.returns_vectors();
        let sharding = (0..x.shape.len()).map(|d| match d == 1 || vectors == 0 {
            true => DimSharding::Free,
            false => DimSharding::Reduces(ReduceOp::Sum),
        });
        let named = |m: &TensorMeta| if m.shape.len() == 1 { vec![Some(1)] } else { dims.clone() };
        // Statistics of half precision are f32.
        let wide = if x.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let outputs = match vectors {
            0 => vec![x.clone()],
            _ => vec![TensorMeta { shape: vec![x.shape[1]], dtype: wide }; vectors],
        };
        let signature = Signature::new(sharding, inputs.iter().map(named), outputs.iter().map(named));
        Ok(OpPlan { signature, outputs })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let stats = |eps: Scalar| ChannelStats { mean: &inputs[1], variance: &inputs[2], eps: eps.0 };
        let vector = |sums: Vec<f64>, i: usize| {
            let count = sums.len();
            Ok::<_, Error>(Tensor::from_vec(sums, count, &Device::Cpu)?.to_dtype(context.output_dtype(i))?)
        };
        let over = |sums: Vec<f64>, count: Scalar| sums.into_iter().map(|s| s / count.0).collect::<Vec<f64>>();
        Ok(match self.function {
            ChannelFn::Sum(count) => vec![vector(over(channel_sums(x, None)?, count), 0)?],
            ChannelFn::Squares(count) => vec![vector(over(channel_sums(x, Some(&inputs[1]))?, count), 0)?],
            ChannelFn::Normalize { eps, weight } => {
                let (with, bias) = if weight { (inputs.get(3), inputs.get(4)) } else { (None, inputs.get(3)) };
                vec![channel_normalize(x, stats(eps), with, bias)?]
            }
            ChannelFn::GradientSums { eps } => {
                let [sums, products] = channel_gradient_sums(&inputs[3], x, stats(eps))?;
                vec![vector(sums, 0)?, vector(products, 1)?]
            }
            ChannelFn::InputGradient { eps, count } => {
                let sums = [&inputs[4], &inputs[5]];
                vec![channel_input_gradient(&inputs[3], x, stats(eps), sums, inputs.get(6), count.0)?]
            }
        })
    }

    fn gradient(&self) -> Gradient<Self> {
        match self.function {
            ChannelFn::Normalize { .. } => Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
                let Some(g) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
                let ChannelFn::Normalize { eps, weight } = op.function else {
                    unreachable!("the operator that was recorded")
                };
                op.backward(eps, weight, saved, g)
            }),
            // Computed from detached tensors, or in backward passes that are not recorded.
            _ => Gradient::NotDifferentiable,
        }
    }
}
