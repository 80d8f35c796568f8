//! Softmax, its logarithm and cross entropy from the logarithm of the sum of exponentials per line, for lines that are sharded and
//! for dimensions that have no fused kernel.
//!
//! Every rank sums the exponentials of its shard, and the logarithms combine in one all-reduce ([`ReduceOp::LogSumExp`]). Of f32 they
//! are f64, so that no digit of the difference to an element is lost; of f64 ranks reduce a maximum and a sum, which keep more
//! digits than their logarithm.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::indices::check_indices;
use crate::ops::indexing::scatter::scatter_add_elements;
use crate::placement::ReduceOp;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};
use shardwise_kernels::rows::{logsumexp_rows_compressed, logsumexp_rows_in_terms, terms_of_compressed};
use shardwise_kernels::{
    ComputeType, IndexRange, PointwiseFn, SumsFrom, ViaF64, contiguous, filled, gather, index_select_by, math,
    pointwise,
};

/// The logarithm of the sum of exponentials along some dimensions, kept with size 1: two terms in the type of the tensor that are
/// added one after the other; of an infinite sum the second one is NaN. Not partial, and without gradient.
pub(in crate::ops) struct LogSums([DTensor; 2]);

impl DTensor {
    /// The logarithms of the sums of exponentials along some dimensions of a tensor that is not partial.
    #[track_caller]
    pub(in crate::ops) fn log_sums(&self, name: &'static str, dims: &[usize]) -> Result<LogSums> {
        let (site, x, dims) = (Location::caller(), self.detach(), dims.to_vec());
        if dims.iter().all(|&dim| x.layout().shard_order(dim).is_empty()) {
            let terms = dispatch(&LocalLogSum { dims, in_terms: true }, &[&x], site)?;
            return Ok(LogSums(terms.try_into().expect("two outputs")));
        }
        if x.dtype() == DType::F64 {
            let over: Vec<isize> = dims.iter().map(|&dim| dim as isize).collect();
            // Of an infinite maximum the second term becomes NaN, as it is to be.
            let shift = x.amax(&over, true)?.all_reduced(name)?;
            let sum = x.sub(&shift)?.exp()?.sum_of_positive(&over)?.all_reduced(name)?;
            return Ok(LogSums([shift, sum.log()?]));
        }
        let wide = dispatch(&LocalLogSum { dims, in_terms: false }, &[&x], site)?.swap_remove(0).all_reduced(name)?;
        let terms = dispatch(&TermsOfLogSum { dtype: x.dtype() }, &[&wide], site)?;
        Ok(LogSums(terms.try_into().expect("two outputs")))
    }

    /// The softmax along dimensions with these sums, or its logarithm.
    #[track_caller]
    pub(in crate::ops) fn softmax_with(&self, sums: &LogSums, dims: &[usize], is_log: bool) -> Result<DTensor> {
        let op = SoftmaxFromSums { dims: dims.to_vec(), is_log };
        let LogSums([high, low]) = sums;
        Ok(dispatch(&op, &[self, high, low], Location::caller())?.swap_remove(0))
    }

    /// The logarithms of the sums, minus a tensor of their shape if there is one, as a function of this tensor.
    #[track_caller]
    pub(in crate::ops) fn log_sum_minus(
        &self,
        sums: &LogSums,
        dims: &[usize],
        minus: Option<&DTensor>,
    ) -> Result<DTensor> {
        let LogSums([high, low]) = sums;
        let inputs: Vec<&DTensor> = [self, high, low].into_iter().chain(minus).collect();
        Ok(dispatch(&LogSumMinus { dims: dims.to_vec() }, &inputs, Location::caller())?.swap_remove(0))
    }

    /// The logarithm of the sum along a dimension minus the element at the index, which is a class of every line. `Partial(Sum)` if the
    /// dimension is sharded: the rank that holds the element has the difference.
    #[track_caller]
    pub(in crate::ops) fn class_losses(&self, sums: &LogSums, dim: usize, classes: &DTensor) -> Result<DTensor> {
        let LogSums([high, low]) = sums;
        Ok(dispatch(&ClassLoss { dim }, &[self, high, low, classes], Location::caller())?.swap_remove(0))
    }
}

/// The logarithm of the sum of exponentials of what a rank holds, with the dimensions kept as size 1: in f64, or in two terms.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct LocalLogSum {
    /// In ascending order.
    dims: Vec<usize>,
    in_terms: bool,
}

impl Op for LocalLogSum {
    fn name(&self) -> &'static str {
        "logsumexp"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let sharding = if self.in_terms { DimSharding::Never } else { DimSharding::Reduces(ReduceOp::LogSumExp) };
        let ndim = x.shape.len();
        let dims = (0..ndim).map(|dim| if self.dims.contains(&dim) { sharding } else { DimSharding::Free });
        let sums: Vec<Option<usize>> = (0..ndim).map(|dim| (!self.dims.contains(&dim)).then_some(dim)).collect();
        let (dtype, count) = if self.in_terms { (x.dtype, 2) } else { (DType::F64, 1) };
        let signature = Signature::new(dims, [(0..ndim).map(Some).collect()], vec![sums; count]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: kept(&x.shape, &self.dims), dtype }; count] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let shape = kept(x.dims(), &self.dims);
        // The dimensions last, as one.
        let others = (0..x.rank()).filter(|dim| !self.dims.contains(dim));
        let order: Vec<usize> = others.chain(self.dims.iter().copied()).collect();
        let width: usize = self.dims.iter().map(|&dim| x.dims()[dim]).product();
        let count: usize = shape.iter().product();
        let rows = contiguous(&x.permute(order)?)?.reshape((count, width))?;
        let found = match self.in_terms {
            true => logsumexp_rows_in_terms(&rows)?.to_vec(),
            false => vec![logsumexp_rows_compressed(&rows)?],
        };
        Ok(found.into_iter().map(|t| t.reshape(shape.as_slice())).collect::<candle_core::Result<_>>()?)
    }

    /// Called with tensors that have none.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// The two terms of logarithms of sums, which are f64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TermsOfLogSum {
    dtype: DType,
}

impl Op for TermsOfLogSum {
    fn name(&self) -> &'static str {
        "logsumexp"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.clone();
        let dims: Vec<Option<usize>> = (0..shape.len()).map(Some).collect();
        let signature = Signature::new(dims.iter().map(|_| DimSharding::Free), [dims.clone()], vec![dims.clone(); 2]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: self.dtype }; 2] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let term = |i: usize| {
            let term = ViaF64(move |[sum]: [f64; 1]| f64::from(terms_of_compressed(sum)[i]), |[x]: [i64; 1]| x);
            pointwise(term, [&inputs[0]], inputs[0].dims(), ComputeType::F64, self.dtype)
        };
        Ok(vec![term(0)?, term(1)?])
    }

    /// Called with tensors that have none.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// A shape with some dimensions of size 1.
fn kept(shape: &[usize], dims: &[usize]) -> Vec<usize> {
    shape.iter().enumerate().map(|(dim, &n)| if dims.contains(&dim) { 1 } else { n }).collect()
}

fn signed(dims: &[usize]) -> Vec<isize> {
    dims.iter().map(|&dim| dim as isize).collect()
}

/// Softmax or its logarithm. Inputs: the tensor, and the two terms of the logarithms of its sums, through which no gradient goes: that
/// of the tensor is the whole one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SoftmaxFromSums {
    dims: Vec<usize>,
    is_log: bool,
}

impl Op for SoftmaxFromSums {
    fn name(&self) -> &'static str {
        if self.is_log { "log_softmax" } else { "softmax" }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shapes: Vec<&[usize]> = inputs.iter().map(|meta| meta.shape.as_slice()).collect();
        Ok(OpPlan { signature: Signature::pointwise(&shapes, shapes[0]), outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [x, high, low] = inputs else { unreachable!("three inputs") };
        let (shape, dtype) = (x.dims(), context.output_dtype(0));
        let compute = ComputeType::float_for([x.dtype()]);
        Ok(vec![match self.is_log {
            true => pointwise(LessSum, [x, high, low], shape, compute, dtype)?,
            false => pointwise(ShareOfSum, [x, high, low], shape, compute, dtype)?,
        }])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Outputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; 3]) };
            let (y, dims) = (saved.output(0), signed(&op.dims));
            let over = |t: &DTensor| t.sum(&dims, true)?.all_reduced(op.name());
            // A partial gradient is used twice.
            let g = g.without_partials(op.name(), &dims)?;
            let dx = match op.is_log {
                true => g.sub(&y.exp()?.mul(&over(&g)?)?)?,
                false => y.mul(&g.sub(&over(&g.mul(&y)?)?)?)?,
            };
            Ok(vec![Some(dx), None, None])
        })
    }
}

/// The logarithms of sums, minus another tensor of their shape. Inputs: the tensor, the two terms, and what is subtracted, if anything
/// is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct LogSumMinus {
    dims: Vec<usize>,
}

impl Op for LogSumMinus {
    fn name(&self) -> &'static str {
        "logsumexp"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let ndim = inputs[0].shape.len();
        let dims: Vec<Option<usize>> = (0..ndim).map(|dim| (!self.dims.contains(&dim)).then_some(dim)).collect();
        // The tensor itself is not read forward: it stays where it is, whatever its layout.
        let named = std::iter::once((0..ndim).map(Some).collect()).chain(inputs[1..].iter().map(|_| dims.clone()));
        let sharding = (0..ndim).map(|_| DimSharding::Free);
        let signature = Signature::new(sharding, named.collect::<Vec<_>>(), [dims.clone()]);
        Ok(OpPlan { signature, outputs: vec![inputs[1].clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (high, low) = (&inputs[1], &inputs[2]);
        let zero;
        let minus = match inputs.get(3) {
            Some(minus) => minus,
            None => {
                zero = filled(0.0, &TensorMeta { shape: Vec::new(), dtype: high.dtype() })?;
                &zero
            }
        };
        let compute = ComputeType::float_for([high.dtype()]);
        Ok(vec![pointwise(SumLess, [high, low, minus], high.dims(), compute, context.output_dtype(0))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let mut found = vec![Some(shares(saved, &op.dims)?.mul(g)?), None, None];
            if saved.num_inputs() > 3 {
                found.push(Some(g.neg()?));
            }
            Ok(found)
        })
    }
}

/// The softmax of the first input, whose sums are the next two.
#[track_caller]
fn shares(saved: &SavedTensors<'_>, dims: &[usize]) -> Result<DTensor> {
    saved.input(0).softmax_with(&LogSums([saved.input(1), saved.input(2)]), dims, false)
}

/// The logarithm of a sum minus the element of a class. Inputs: the tensor, the two terms, and a class per line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ClassLoss {
    dim: usize,
}

impl Op for ClassLoss {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let ndim = inputs[0].shape.len();
        let all: Vec<Option<usize>> = (0..ndim).map(Some).collect();
        let sums: Vec<Option<usize>> = (0..ndim).map(|dim| (dim != self.dim).then_some(dim)).collect();
        let lines: Vec<Option<usize>> = (0..ndim).filter(|&dim| dim != self.dim).map(Some).collect();
        let sharding =
            (0..ndim).map(|dim| if dim == self.dim { DimSharding::Reduces(ReduceOp::Sum) } else { DimSharding::Free });
        let signature = Signature::new(sharding, [all, sums.clone(), sums, lines.clone()], [lines]);
        let losses = TensorMeta { shape: inputs[3].shape.clone(), dtype: inputs[0].dtype };
        Ok(OpPlan { signature, outputs: vec![losses] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [x, high, low, classes] = inputs else { unreachable!("four inputs") };
        check_indices("cross_entropy", classes, context.input_shape(0)[self.dim])?;
        let held = IndexRange::new(context.input_runs(0, self.dim).iter());
        let chosen = gather(x, self.dim, &classes.unsqueeze(self.dim)?, &held)?;
        // 1 where this rank holds the element, else -0.0.
        let ones = filled(1.0, &TensorMeta { shape: vec![x.dims()[self.dim]], dtype: x.dtype() })?;
        let is_local = index_select_by(&ones, 0, classes, &held)?.unsqueeze(self.dim)?;
        let compute = ComputeType::float_for([x.dtype()]);
        let losses =
            pointwise(LocalLoss, [high, low, &chosen, &is_local], high.dims(), compute, context.output_dtype(0))?;
        Ok(vec![losses.reshape(context.local_shape(0))?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let dim = op.dim as isize;
            let (g, classes) = (g.all_reduced(op.name())?.unsqueeze(dim)?, saved.input(3).unsqueeze(dim)?);
            let chosen = scatter_add_elements(saved.layout(0), op.dim, &classes, &g, SumsFrom::Zero)?;
            let dx = shares(saved, &[op.dim])?.mul(&g)?.sub(&chosen)?;
            Ok(vec![Some(dx), None, None, None])
        })
    }
}

/// Defines elementwise functions with the same formula in f32 and f64, in which `$exp` is the exponential function.
macro_rules! row_functions {
    ($($(#[$doc:meta])* $name:ident: |$x:pat_param, $exp:ident| -> $N:literal $value:block)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        struct $name;

        impl PointwiseFn<$N> for $name {
            #[inline(always)]
            fn f32<const FMA: bool>(self, $x: [f32; $N]) -> f32 {
                #[allow(unused_variables)]
                let $exp = |x: f32| math::exp::<FMA>(x);
                $value
            }

            #[inline(always)]
            fn f64(self, $x: [f64; $N]) -> f64 {
                #[allow(unused_variables)]
                let $exp = f64::exp;
                $value
            }

            #[inline(always)]
            fn i64(self, _: [i64; $N]) -> i64 {
                unreachable!("only of floating-point numbers")
            }
        }
    )*};
}

row_functions! {
    /// `x - (high + low)`.
    LessSum: |[x, high, low], exp| -> 3 { (x - high) - low }
    /// `exp(x - (high + low))`, with what the differences lose to rounding: a share of 1 in 50,000 has the logarithm -11, whose rounding
    /// changes it by up to 4 units in the last place.
    ShareOfSum: |[x, high, low], exp| -> 3 {
        let rough = x - high;
        let subtracted = rough - x;
        let lost = (x - (rough - subtracted)) - (high + subtracted);
        let log = rough - low;
        let subtracted = log - rough;
        let lost = lost + ((rough - (log - subtracted)) - (low + subtracted));
        let share = exp(log);
        // Of minus infinity what is lost is NaN; zero is not a share, unless the sum is NaN.
        if share == 0.0 { (low * 0.0).abs() } else { share + share * lost }
    }
    /// `(high + low) - minus`. An infinite sum is only its first term.
    SumLess: |[high, low, minus], exp| -> 3 {
        if high.is_infinite() { high - minus } else { (high - minus) + low }
    }
    /// `(high + low) - x` where the rank holds the element `x`, else the neutral number of sums.
    LocalLoss: |[high, low, x, is_local], exp| -> 4 { if is_local == 1.0 { (high - x) + low } else { -0.0 } }
}
