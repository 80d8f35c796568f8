//! Gradients of cumulative operations. If the dimension is sharded, ranks exchange one or two numbers per line and shard, as the
//! scans themselves do.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::scan::{Lines, Scan, ScanKind, scanned_before, totals};
use super::scatter::scatter_add_elements;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::ReduceOp;
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{Backward, DTensor, SavedTensors, is_recording};
use shardwise_kernels::{contiguous, from_f64_vec, from_i64_vec, to_f64_vec, to_i64_vec};

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
pub(super) fn product_gradient(scan: Scan, x: &DTensor, gradient: &DTensor) -> Result<DTensor> {
    let site = Location::caller();
    let parts = dispatch(&ProductParts(scan), &[x, gradient], site)?;
    Ok(dispatch(&ProductGradient(scan), &parts.iter().collect::<Vec<_>>(), site)?.swap_remove(0))
}

/// The gradient of a tensor in the layout `like`, given the indices and the gradient of its cumulative maxima or minima.
///
/// All elements of a shard whose maximum is in an earlier shard have the same one. Ranks exchange the sum of their gradients and
/// its index.
#[track_caller]
pub(super) fn extreme_gradient(scan: Scan, like: &Layout, index: &DTensor, gradient: &DTensor) -> Result<DTensor> {
    // A recorded backward pass uses the scatter, which is differentiable.
    if index.layout().shard_order(scan.dim).is_empty() || is_recording() {
        return scatter_add_elements(like, scan.dim, index, gradient);
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

impl ProductParts {
    /// Walks through a line from its end, starting with what the next shard passes: replaces the gradient by `s`, and returns
    /// what this shard passes on.
    fn walk(&self, lines: &Lines, line: usize, x: &[f64], g: &mut [f64], mut passed: f64) -> f64 {
        for j in (0..lines.n).rev() {
            let here = lines.at(line, j);
            let own = g[here];
            let s = if self.0.exclusive { passed } else { own + passed };
            passed = x[here] * s + if self.0.exclusive { own } else { 0.0 };
            g[here] = s;
        }
        passed
    }
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
        let (x, mut g) = (to_f64_vec(&inputs[0])?, to_f64_vec(&inputs[1])?);
        let lines = Lines::new(inputs[0].dims(), self.0.dim).reversed(self.0.reverse);
        let mut shape = inputs[0].dims().to_vec();
        shape[self.0.dim] = shape[self.0.dim].min(1);
        let count = shape.iter().product::<usize>();
        let a = (0..count).map(|line| self.walk(&lines, line, &x, &mut g, 0.0)).collect();
        let product = |line: usize| (0..lines.n).map(|j| x[lines.at(line, j)]).product();
        let b = (0..count).map(product).collect();
        let (a, b) =
            (from_f64_vec(a, &shape, context.output_dtype(2))?, from_f64_vec(b, &shape, context.output_dtype(3))?);
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
        let (x, mut g) = (to_f64_vec(&inputs[0])?, to_f64_vec(&inputs[1])?);
        let (a, b) = (to_f64_vec(&inputs[2])?, to_f64_vec(&inputs[3])?);
        let lines = Lines::new(inputs[0].dims(), dim).reversed(reverse);
        let heads = Lines::new(inputs[2].dims(), dim).reversed(reverse);
        let before = scanned_before(context, 0, dim, heads.n, reverse);
        for line in 0..x.len() / lines.n.max(1) {
            let passed = (before + 1..heads.n).rev().fold(0.0, |c, part| {
                let here = heads.at(line, part);
                a[here] + b[here] * c
            });
            ProductParts(self.0).walk(&lines, line, &x, &mut g, passed);
            let mut product: f64 = (0..before).map(|part| b[heads.at(line, part)]).product();
            for j in 0..lines.n {
                let here = lines.at(line, j);
                g[here] *= product;
                product *= x[here];
            }
        }
        Ok(vec![from_f64_vec(g, inputs[0].dims(), inputs[1].dtype())?])
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
        let (index, g) = (to_i64_vec(&contiguous(&inputs[0])?)?, to_f64_vec(&inputs[1])?);
        let first = context.input_runs(0, self.0.dim).first().unwrap_or(0) as i64;
        let lines = Lines::new(inputs[0].dims(), self.0.dim);
        let mut shape = inputs[0].dims().to_vec();
        shape[self.0.dim] = shape[self.0.dim].min(1);
        let count = shape.iter().product::<usize>();
        let mut own = vec![0.0; g.len()];
        let (mut sums, mut places) = (vec![0.0; count], vec![-1; count]);
        for line in 0..count {
            for j in 0..lines.n {
                let here = lines.at(line, j);
                match usize::try_from(index[here] - first) {
                    Ok(place) => own[lines.at(line, place)] += g[here],
                    Err(_) => (sums[line], places[line]) = (sums[line] + g[here], index[here]),
                }
            }
        }
        let own = from_f64_vec(own, inputs[1].dims(), inputs[1].dtype())?;
        Ok(vec![own, from_f64_vec(sums, &shape, context.output_dtype(1))?, from_i64_vec(places, &shape, DType::I64)?])
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
        let (mut own, sums) = (to_f64_vec(&inputs[0])?, to_f64_vec(&inputs[1])?);
        let places = to_i64_vec(&contiguous(&inputs[2])?)?;
        let first = context.input_runs(0, self.0.dim).first().unwrap_or(0) as i64;
        let (lines, heads) = (Lines::new(inputs[0].dims(), self.0.dim), Lines::new(inputs[1].dims(), self.0.dim));
        for line in 0..own.len() / lines.n.max(1) {
            for part in (0..heads.n).map(|part| heads.at(line, part)) {
                // -1 is before every shard.
                if let Some(place) = usize::try_from(places[part] - first).ok().filter(|&p| p < lines.n) {
                    own[lines.at(line, place)] += sums[part];
                }
            }
        }
        Ok(vec![from_f64_vec(own, inputs[0].dims(), inputs[0].dtype())?])
    }

    /// Runs in backward passes that are not recorded; recorded ones scatter.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
