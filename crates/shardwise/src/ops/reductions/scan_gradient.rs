//! Gradients of cumulative operations. If the dimension is sharded, ranks exchange one or two numbers per line and shard, as the
//! scans themselves do.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::indexing::scatter::scatter_add_elements;
use crate::ops::reductions::scan::{Scan, ScanKind, scanned_before, totals};
use crate::placement::ReduceOp;
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{Backward, DTensor, SavedTensors, is_recording};
use shardwise_kernels::{self as kernels, ProductScan, SumsFrom, add_to_places, extreme_sums, product_parts};

impl Backward for Scan {
    fn name(&self) -> &'static str {
        Op::name(self)
    }

    fn run(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
        Ok(vec![Some(match self.kind {
            // An element is part of every total from its own on: the gradient is the reverse cumulative sum.
            ScanKind::Sum => gradient.scanned(Scan { reverse: !self.reverse, ..*self })?.swap_remove(0),
            ScanKind::Prod if is_recording() => {
                let found = "a second derivative of cumprod";
                return Err(ErrorKind::Gradient.error(
                    "gradient",
                    found,
                    "a first derivative",
                    "leave create_graph off",
                ));
            }
            ScanKind::Prod => product_gradient(*self, &saved.input(0), gradient)?,
            ScanKind::Max | ScanKind::Min => extreme_gradient(*self, saved.layout(0), &saved.output(1), gradient)?,
        })])
    }
}

/// The gradient of the cumulative product of `x`, correct for any number of zeros.
///
/// In the order of the scan it is `p[k] * s[k]`: `p[k]` is the product of the elements before `k`, and `s[k]` is the sum of the
/// gradients of all totals that contain `x[k]`, each times its other factors from `k` on: `s[k] = g[k] + x[k + 1] * s[k + 1]`.
/// In an exclusive scan gradients are one place later: `s[k] = g[k + 1] + x[k + 1] * s[k + 1]`.
///
/// What a shard passes to the shard before it is linear in what it receives from the shard after it: `a + b * c`, with the
/// product of the shard as `b`. Ranks exchange `a` and `b`.
#[track_caller]
pub(in crate::ops) fn product_gradient(scan: Scan, x: &DTensor, gradient: &DTensor) -> Result<DTensor> {
    let site = Location::caller();
    let parts = dispatch(&ProductParts(scan), &[x, gradient], site)?;
    Ok(dispatch(&ProductGradient(scan), &parts.iter().collect::<Vec<_>>(), site)?.swap_remove(0))
}

/// The gradient of a tensor in the layout `like`, given the indices and the gradient of its cumulative maxima or minima.
///
/// All elements of a shard whose maximum is in an earlier shard have the same one. Ranks exchange the sum of their gradients and
/// its index.
#[track_caller]
pub(in crate::ops) fn extreme_gradient(
    scan: Scan,
    like: &Layout,
    index: &DTensor,
    gradient: &DTensor,
) -> Result<DTensor> {
    // A recorded backward pass uses the scatter, which is differentiable.
    if index.layout().shard_order(scan.dim).is_empty() || is_recording() {
        return scatter_add_elements(like, scan.dim, index, gradient, SumsFrom::Zero);
    }
    let site = Location::caller();
    let parts = dispatch(&ExtremeParts(scan), &[index, gradient], site)?;
    Ok(dispatch(&ExtremeGradient(scan), &parts.iter().collect::<Vec<_>>(), site)?.swap_remove(0))
}

/// First half of the gradient of `cumprod`. Inputs: `x` and the gradient of the result. Outputs: both in one layout, and per shard
/// `a` and `b` of [`product_gradient`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ProductParts(Scan);

/// Second half of the gradient of `cumprod`. Inputs: the outputs of [`ProductParts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ProductGradient(Scan);

/// First half of the gradient of `cummax` and `cummin`. Inputs: the indices and the gradient of the result. Outputs: the gradient
/// within each shard, and per shard the sum that belongs to an earlier shard with its index (-1: none).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ExtremeParts(Scan);

/// Second half of the gradient of `cummax` and `cummin`. Inputs: the outputs of [`ExtremeParts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ExtremeGradient(Scan);

/// Shape and type of an exchanged statistic: half precision is widened to f32, so that the result is rounded once.
fn statistic(of: &TensorMeta) -> TensorMeta {
    let dtype = if matches!(of.dtype, DType::F16 | DType::BF16) { DType::F32 } else { of.dtype };
    TensorMeta { shape: of.shape.clone(), dtype }
}

/// A plan in which all tensors have the same dimensions, and a partial second input (the gradient) passes.
fn alike(inputs: &[TensorMeta], outputs: Vec<TensorMeta>) -> OpPlan {
    let dims: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
    let sharding = dims.iter().map(|_| DimSharding::Free);
    let signature = Signature::new(sharding, inputs.iter().map(|_| dims.clone()), outputs.iter().map(|_| dims.clone()));
    let signature = match inputs.len() {
        2 => signature.allow_partial([None, Some(ReduceOp::Sum)], ReduceOp::Sum),
        _ => signature,
    };
    OpPlan { signature, outputs }
}

/// The layouts of two inputs that are sharded alike, each rank holding one range along `dim`.
fn aligned(plan: &OpPlan, dim: usize, inputs: &[&Layout], elem: &[usize]) -> Result<[Layout; 2]> {
    let shapes: Vec<&[usize]> = plan.outputs.iter().map(|m| m.shape.as_slice()).collect();
    let decision = plan.signature.decide(inputs, elem, &shapes)?;
    let layout = |need: &RequiredInput| match need {
        RequiredInput::Layout(layout) | RequiredInput::Boxes { from: layout, .. } => layout.unstrided(&|d| d == dim),
    };
    Ok([layout(&decision.inputs[0])?, layout(&decision.inputs[1])?])
}

/// A decision in which shards stay where they are, and the statistics of all shards along `dim` are gathered.
fn gathering(dim: usize, shards: &[&Layout], statistics: &[&Layout], output: &Layout) -> Result<Decision> {
    let axes = output.shard_order(dim);
    let whole = statistics.iter().map(|l| l.without_axes(axes)).collect::<Result<Vec<_>>>()?;
    let needs = shards.iter().map(|&l| l.clone()).chain(whole);
    Ok(Decision::new(needs, [output.clone()]))
}

/// The cumulative product that a scan is.
fn product_scan(scan: Scan) -> ProductScan {
    ProductScan { dim: scan.dim, reverse: scan.reverse, exclusive: scan.exclusive }
}

impl Op for ProductParts {
    fn name(&self) -> &'static str {
        "cumprod"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, g) = (&inputs[0], &inputs[1]);
        Ok(alike(inputs, vec![x.clone(), g.clone(), statistic(g), statistic(x)]))
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let [x, g] = aligned(plan, self.0.dim, inputs, elem)?;
        let (a, b) = (totals(&g, self.0.dim)?, totals(&x, self.0.dim)?);
        Ok(Decision::new([x.clone(), g.clone()], [x, g, a, b]))
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let dtypes = [context.output_dtype(2), context.output_dtype(3)];
        let [a, b] = product_parts(product_scan(self.0), &inputs[0], &inputs[1], dtypes)?;
        Ok(vec![inputs[0].clone(), inputs[1].clone(), a, b])
    }

    /// Part of a backward pass; the second derivative is refused in `Scan::run`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

impl Op for ProductGradient {
    fn name(&self) -> &'static str {
        "cumprod"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(alike(inputs, vec![inputs[1].clone()]))
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        gathering(self.0.dim, &inputs[..2], &inputs[2..], inputs[1])
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let Scan { dim, reverse, .. } = self.0;
        let [x, gradient, a, b] = inputs else { unreachable!("four inputs") };
        let before = scanned_before(context, 0, dim, a.dims()[dim], reverse);
        Ok(vec![kernels::product_gradient(product_scan(self.0), x, gradient, [a, b], before)?])
    }

    /// Part of a backward pass; the second derivative is refused in `Scan::run`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

impl Op for ExtremeParts {
    fn name(&self) -> &'static str {
        Op::name(&self.0)
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(alike(inputs, vec![inputs[1].clone(), statistic(&inputs[1]), inputs[0].clone()]))
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let [index, g] = aligned(plan, self.0.dim, inputs, elem)?;
        let (sums, places) = (totals(&g, self.0.dim)?, totals(&index, self.0.dim)?);
        Ok(Decision::new([index, g.clone()], [g, sums, places]))
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let first = context.input_runs(0, self.0.dim).first().unwrap_or(0) as i64;
        let sums = extreme_sums(self.0.dim, &inputs[0], &inputs[1], first, context.output_dtype(1))?;
        Ok(sums.to_vec())
    }

    /// Runs in backward passes that are not recorded; recorded ones scatter.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

impl Op for ExtremeGradient {
    fn name(&self) -> &'static str {
        Op::name(&self.0)
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(alike(inputs, vec![inputs[0].clone()]))
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        gathering(self.0.dim, &inputs[..1], &inputs[1..], inputs[0])
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [gradient, sums, places] = inputs else { unreachable!("three inputs") };
        let first = context.input_runs(0, self.0.dim).first().unwrap_or(0) as i64;
        Ok(vec![add_to_places(self.0.dim, gradient, sums, places, first)?])
    }

    /// Runs in backward passes that are not recorded; recorded ones scatter.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
