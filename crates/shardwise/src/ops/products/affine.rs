//! Matrix products with an addend: `linear`, `addmm`, `baddbmm`.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{Error, ErrorKind, Result, Site};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpKind, OpPlan, dispatch, for_sum_with, name_call, product_dtype};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::Placement;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};
use shardwise_kernels::batched_matmul_bias;

impl DTensor {
    /// Applies a linear layer: this tensor `[..., in]` times the transpose of `weight`, `[out, in]`, plus `bias`, `[out]`. A weight `[in]` gives one
    /// feature without a dimension.
    ///
    /// Communicates as [`matmul`](Self::matmul) does. With a weight sharded on dimension 0 (column-parallel) the result is
    /// sharded on its last dimension; sharded on dimension 1 together with the features of the input (row-parallel), the
    /// result is `Partial(Sum)`.
    ///
    /// # Errors
    /// If the features of the input are not those of the weight.
    #[track_caller]
    pub fn linear(&self, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        if self.ndim() > 0 && weight.ndim() == 1 {
            // One feature of the result, without a dimension of its own.
            let product = self.matmul(weight)?;
            if let Some(bias) = bias.filter(|bias| bias.ndim() > 0) {
                let found = format!("shape {:?} in linear with a weight {:?}", bias.shape(), weight.shape());
                let kind = ErrorKind::shape(bias.shape());
                return Err(kind.error("bias", found, "one number, without dimensions", "reshape weight or bias"));
            }
            return bias.map_or(Ok(product.clone()), |bias| product.add(&for_sum_with(&product, bias)?));
        }
        if !self.fits_linear(weight) {
            return Err(self.linear_mismatch(weight, Location::caller()));
        }
        match bias {
            None => self.times_transposed(weight),
            Some(bias) if self.fits_fused_linear(weight, Some(bias)) => {
                Ok(dispatch(&LinearBias, &[self, weight, bias], Location::caller())?.swap_remove(0))
            }
            Some(bias) => {
                let product = self.times_transposed(weight)?;
                product.add(&for_sum_with(&product, bias)?)
            }
        }
    }

    /// Whether the shapes are `[..., in]` and `[out, in]`.
    pub(in crate::ops) fn fits_linear(&self, weight: &DTensor) -> bool {
        weight.ndim() == 2 && self.shape().last() == Some(&weight.shape()[1])
    }

    /// The error for a weight whose shape does not fit.
    fn linear_mismatch(&self, weight: &DTensor, site: Site) -> Error {
        if self.ndim() == 0 || weight.ndim() != 2 {
            return ErrorKind::shape(self.shape()).error(
                "operands",
                format!("{} and {} in linear", self.layout(), weight.layout()),
                "an input [..., in] and a weight [out, in]",
                "reshape or transpose the tensors",
            );
        }
        let (features, takes) = (self.shape()[self.ndim() - 1], weight.shape()[1]);
        let found = format!("input has {features} features, weight takes {takes}");
        let needed = format!("an input [..., {takes}] for a weight {:?}", weight.shape());
        let fix = "change the input, or the layer before this one";
        let error = ErrorKind::shape(self.shape()).error("operands", found, needed, fix);
        name_call(error, "linear", &[self, weight], site)
    }

    /// Whether product and sum can be computed in one pass: the features of the input are not sharded and nothing is partial,
    /// so that every rank has complete products to add the bias to.
    pub(in crate::ops) fn fits_fused_linear(&self, weight: &DTensor, bias: Option<&DTensor>) -> bool {
        let mut all = [Some(self), Some(weight), bias].into_iter().flatten();
        let dtype = product_dtype(self.dtype());
        dtype.is_float()
            && all.all(|t| product_dtype(t.dtype()) == dtype && !t.placements().iter().any(Placement::is_partial))
            && bias.is_none_or(|bias| bias.shape() == &weight.shape()[..1])
            && self.layout().shard_order(self.ndim() - 1).is_empty()
            && weight.layout().shard_order(1).is_empty()
    }

    /// Returns `beta * self + alpha * (a @ b)`; this tensor broadcasts to the product of the two matrices.
    ///
    /// Communicates as [`matmul`](Self::matmul) and [`add`](Self::add) do.
    #[track_caller]
    pub fn addmm(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        self.scaled_sum(&a.mm(b)?, beta, alpha)
    }

    /// Returns `beta * self + alpha * (a @ b)` for batches of matrices `[batch, m, k]` and `[batch, k, n]`.
    ///
    /// Communicates as [`bmm`](Self::bmm) and [`add`](Self::add) do.
    #[track_caller]
    pub fn baddbmm(&self, a: &DTensor, b: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        self.scaled_sum(&a.bmm(b)?, beta, alpha)
    }

    /// `beta * self + alpha * product`. With `beta` 0 this tensor does not count, not even where it is NaN, as in PyTorch.
    ///
    /// # Errors
    /// If this tensor does not broadcast to the shape of the product.
    #[track_caller]
    pub(in crate::ops) fn scaled_sum(&self, product: &DTensor, beta: f64, alpha: f64) -> Result<DTensor> {
        let mut dims = self.shape().iter().rev().zip(product.shape().iter().rev());
        if self.ndim() > product.ndim() || dims.any(|(&own, &wanted)| own != wanted && own != 1) {
            let found = format!("shape {:?} to add to a product of shape {:?}", self.shape(), product.shape());
            let needed = "a tensor that broadcasts to the product";
            let error = ErrorKind::shape(self.shape()).error("operands", found, needed, "reshape the tensor");
            return Err(name_call(error, "add", &[product, self], Location::caller()));
        }
        let this = &for_sum_with(product, self)?;
        // Integers take the integer part of the factors.
        let (beta, alpha) = match product.dtype().is_float() || this.dtype().is_float() {
            true => (beta, alpha),
            false => (beta.trunc(), alpha.trunc()),
        };
        if beta != 0.0 {
            return scaled(product, alpha)?.add(&scaled(this, beta)?);
        }
        // Shapes are checked as if it did.
        scaled(product, alpha)?.add(&this.detach().zeros_like()?)
    }
}

/// `x w^T + bias` in one pass over the result, where the features of `x` are not sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LinearBias;

impl Op for LinearBias {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(linear_plan(inputs, 1))
    }

    fn kind(&self) -> OpKind {
        OpKind::Product
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![batched_matmul_bias(&inputs[0], &inputs[1].t()?, 0, 1, Some(&inputs[2]))?])
    }

    fn flops(&self, inputs: &[&[usize]], _: &[&[usize]]) -> u64 {
        linear_flops(inputs)
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Only { inputs: &[0, 1], outputs: &[] }, |_, saved, gradients| {
            gradients[0].as_ref().map_or_else(|| Ok(vec![None; 3]), |g| linear_gradients(saved, g))
        })
    }
}

/// The rule of a linear layer with inputs `[..., in]`, `[out, in]` and optionally `[out]`, where the features of the input are
/// not sharded, with some outputs `[..., out]`.
pub(in crate::ops) fn linear_plan(inputs: &[TensorMeta], outputs: usize) -> OpPlan {
    let (x, weight) = (&inputs[0], &inputs[1]);
    let leading = x.shape.len() - 1;
    // Dimensions of the operator: the leading ones, then the features of the result, then those of the input.
    let (out, features) = (leading, leading + 1);
    let dims = (0..=leading).map(|_| DimSharding::Free).chain([DimSharding::Never]);
    let with = |last: usize| (0..leading).chain([last]).map(Some).collect::<Vec<_>>();
    let named = [with(features), vec![Some(out), Some(features)], vec![Some(out)]];
    let shape: Vec<usize> = x.shape[..leading].iter().chain(&weight.shape[..1]).copied().collect();
    OpPlan {
        signature: Signature::new(dims, named.into_iter().take(inputs.len()), vec![with(out); outputs]),
        outputs: vec![TensorMeta { shape, dtype: x.dtype }; outputs],
    }
}

/// A multiplication and an addition for every feature of the input, row and feature of the result.
pub(in crate::ops) fn linear_flops(inputs: &[&[usize]]) -> u64 {
    2 * inputs[0].iter().product::<usize>() as u64 * inputs[1][0] as u64
}

/// The gradients of the inputs of a linear layer, from that of its result.
#[track_caller]
pub(in crate::ops) fn linear_gradients(saved: &SavedTensors<'_>, g: &DTensor) -> Result<Vec<Option<DTensor>>> {
    let leading: Vec<isize> = (0..g.ndim() as isize - 1).collect();
    let needs = |i: usize, of: &dyn Fn() -> Result<DTensor>| saved.needs_input_grad(i).then(of).transpose();
    let mut found = vec![
        needs(0, &|| saved.with_sum(0, |sum| g.linear_input_gradient(&saved.input(1), sum)))?,
        needs(1, &|| g.linear_weight_gradient(&saved.input(0)))?,
    ];
    if saved.num_inputs() > 2 {
        found.push(needs(2, &|| if leading.is_empty() { Ok(g.clone()) } else { g.sum(&leading, false) })?);
    }
    Ok(found)
}

#[track_caller]
fn scaled(x: &DTensor, factor: f64) -> Result<DTensor> {
    if factor == 1.0 { Ok(x.clone()) } else { x.mul_scalar(factor) }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "linear", samples: linear_samples, apply: |x| Ok(vec![x[0].linear(&x[1], Some(&x[2]))?]) },
    OpEntry { name: "addmm", samples: addmm_samples, apply: |x| Ok(vec![x[0].addmm(&x[1], &x[2], 2.0, 1.0)?]) },
    OpEntry { name: "baddbmm", samples: baddbmm_samples, apply: |x| Ok(vec![x[0].baddbmm(&x[1], &x[2], 1.0, -1.0)?]) },
];

fn sample(shapes: [&[usize]; 3]) -> Vec<SampleInput> {
    shapes.iter().map(|shape| SampleInput::new(shape, DType::I64)).collect()
}

fn linear_samples() -> Vec<Vec<SampleInput>> {
    let floats = |shapes: [&[usize]; 3]| shapes.iter().map(|shape| SampleInput::new(shape, DType::F64)).collect();
    let fused = [floats([&[2, 3, 5], &[4, 5], &[4]]), floats([&[3], &[2, 3], &[2]])];
    [sample([&[2, 3, 5], &[4, 5], &[4]]), sample([&[3], &[2, 3], &[2]])].into_iter().chain(fused).collect()
}

fn addmm_samples() -> Vec<Vec<SampleInput>> {
    vec![sample([&[4], &[5, 3], &[3, 4]])]
}

fn baddbmm_samples() -> Vec<Vec<SampleInput>> {
    vec![sample([&[2, 3, 4], &[2, 3, 5], &[2, 5, 4]])]
}
