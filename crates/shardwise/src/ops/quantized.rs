//! Products with quantized weights: blocks of GGUF files as u8 tensors `[rows, blocks, bytes of a block]`.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::ReduceOp;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::quantized::{self, BlockType};

impl DTensor {
    /// Applies a linear layer whose weight is quantized: this f32 tensor `[..., in]` times the transpose of `weight`, blocks
    /// `[out, blocks, bytes of a block]`, plus `bias`, `[out]`.
    ///
    /// Communicates as [`linear`](Self::linear) does: a weight sharded on dimension 0 gives a result that is sharded on its last
    /// dimension, one sharded on its blocks together with the features of the input a `Partial(Sum)` result. Blocks stay whole, so features that are
    /// not sharded between blocks are redistributed first. Differentiable with respect to the input and the bias; the gradient is
    /// that of an input that is not rounded ([`quantized_matmul`](quantized::quantized_matmul) rounds few rows to 16 bits).
    ///
    /// # Errors
    /// If the input is not f32, its features are not those of the weight, or the weight is not a tensor of blocks.
    #[doc(alias = "QLinear")]
    #[track_caller]
    pub fn quantized_linear(&self, weight: &DTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        let block = block_type(weight)?;
        let features = weight.shape()[1] * block.elements();
        if self.ndim() == 0 || self.shape()[self.ndim() - 1] != features || self.dtype() != DType::F32 {
            return Err(ErrorKind::shape(self.shape()).error(
                "operands",
                format!("{} {} in quantized_linear", self.dtype().as_str(), self.layout()),
                format!("an f32 input [..., {features}] for {block} blocks {:?}", weight.shape()),
                "change the input, or expand the weight with `dequantize`",
            ));
        }
        let grouped = self.unflatten(-1, &[-1, block.elements() as isize])?;
        let product = dispatch(&QuantizedLinear, &[&grouped, weight], Location::caller())?.swap_remove(0);
        match bias {
            Some(bias) => product.add(bias),
            None => Ok(product),
        }
    }

    /// Expands quantized blocks, `[..., blocks, bytes of a block]`, to f32 `[..., elements]`.
    ///
    /// Local: keeps the layout. Partial sums of bytes, as a lookup in a sharded table gives them, are reduced first.
    ///
    /// # Errors
    /// If it is not a tensor of blocks.
    #[track_caller]
    pub fn dequantize(&self) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Err(self.bad_dims("dequantize", &[], "blocks [..., blocks, bytes of a block]"));
        }
        dispatch(&Dequantize, &[self], Location::caller())?.swap_remove(0).flatten(-2, -1)
    }
}

/// The type of the blocks of a weight.
fn block_type(weight: &DTensor) -> Result<BlockType> {
    let block = weight.shape().last().and_then(|&bytes| BlockType::of_size(bytes));
    match block {
        Some(block) if weight.ndim() == 3 && weight.dtype() == DType::U8 => Ok(block),
        _ => Err(ErrorKind::shape(weight.shape()).error(
            "quantized weight",
            format!("{} {}", weight.dtype().as_str(), weight.layout()),
            "u8 [out, blocks, bytes of a block]",
            "load it from a GGUF file",
        )),
    }
}

/// `x w^T` for `[.., blocks, elements]` and `[out, blocks, bytes]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct QuantizedLinear;

impl Op for QuantizedLinear {
    fn name(&self) -> &'static str {
        "quantized_linear"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let [x, weight] = inputs else { unreachable!("two inputs") };
        let leading = x.shape.len() - 2;
        // Dimensions of the operator: the leading ones, then the features of the result, then the blocks.
        let (out, blocks) = (leading, leading + 1);
        let dims = (0..=leading).map(|_| DimSharding::Free).chain([DimSharding::Reduces(ReduceOp::Sum)]);
        let leading_and =
            |rest: &[Option<usize>]| (0..leading).map(Some).chain(rest.iter().copied()).collect::<Vec<_>>();
        let shape = x.shape[..leading].iter().chain(&weight.shape[..1]).copied().collect();
        let signature = Signature::new(
            dims,
            [leading_and(&[Some(blocks), None]), vec![Some(out), Some(blocks), None]],
            [leading_and(&[Some(out)])],
        );
        // Linear in the input.
        let signature = signature.allow_partial([Some(ReduceOp::Sum), None], ReduceOp::Sum);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![quantized::quantized_matmul(&inputs[0], &inputs[1])?])
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        let features = inputs[0].iter().rev().take(2).product::<usize>();
        2 * (features * outputs[0].iter().product::<usize>()) as u64
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |_, saved, gradients| {
            let Some(g) = gradients[0].as_ref().filter(|_| saved.needs_input_grad(0)) else {
                return Ok(vec![None, None]);
            };
            let (x, weight) = (saved.input(0), saved.input(1));
            let elements = x.shape()[x.ndim() - 1] as isize;
            let of_x = g.matmul(&weight.dequantize()?)?.unflatten(-1, &[-1, elements])?;
            Ok(vec![Some(of_x), None])
        })
    }
}

/// Blocks `[.., bytes]` as `[.., elements]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Dequantize;

impl Op for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (bytes, leading) = inputs[0].shape.split_last().expect("checked by the caller");
        let Some(block) = BlockType::of_size(*bytes).filter(|_| inputs[0].dtype == DType::U8) else {
            return Err(ErrorKind::shape(&inputs[0].shape).error(
                "operands",
                format!("{} {:?}", inputs[0].dtype.as_str(), inputs[0].shape),
                "u8 [..., bytes of a block]",
                "load it from a GGUF file",
            ));
        };
        let names = || (0..leading.len()).map(Some).chain([None]).collect::<Vec<_>>();
        let signature = Signature::new(leading.iter().map(|_| DimSharding::Free), [names()], [names()]);
        let shape = leading.iter().copied().chain([block.elements()]).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: DType::F32 }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![quantized::dequantize(&inputs[0])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
