//! Quantized weights: blocks of GGUF files, products with them, lookups and their expansion.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::ReduceOp;
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::quantized;

pub use shardwise_kernels::quantized::BlockType;

/// A tensor of quantized elements: blocks of GGUF files, and their type.
///
/// The blocks are a u8 tensor `[.., blocks, bytes of a block]` in any layout. The type is not in the bytes: those of `IQ4_NL` and
/// `Q4_0` blocks have the same shape and stand for different elements.
///
/// ```
/// use shardwise::candle_core::{Device, Tensor};
/// use shardwise::ops::{BlockType, QuantizedTensor};
/// use shardwise::prelude::*;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let bytes = Tensor::zeros((4, 2, BlockType::Q8_0.bytes()), DType::U8, &Device::Cpu)?;
///     let blocks = DTensor::distribute_tensor(&bytes, &mesh, [Shard(0)], None)?;
///     let weight = QuantizedTensor::new(&blocks, BlockType::Q8_0)?;
///     assert_eq!(weight.shape(), [4, 64]);
///     let x = DTensor::ones((3, 64), DType::F32, &mesh, [Replicate])?;
///     assert_eq!(x.quantized_linear(&weight, None)?.placements(), [Shard(1)]);
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "QTensor")]
#[derive(Debug, Clone)]
pub struct QuantizedTensor {
    blocks: DTensor,
    block_type: BlockType,
}

impl QuantizedTensor {
    /// Gives blocks their type. Local, no copy.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if this is not a u8 tensor `[.., blocks, bytes of a block]` of that type.
    pub fn new(blocks: &DTensor, block_type: BlockType) -> Result<Self> {
        if blocks.dtype() == DType::U8 && blocks.ndim() >= 2 && blocks.shape().last() == Some(&block_type.bytes()) {
            return Ok(QuantizedTensor { blocks: blocks.clone(), block_type });
        }
        Err(ErrorKind::shape(blocks.shape()).error(
            "quantized blocks",
            format!("{} {}", blocks.dtype().as_str(), blocks.layout()),
            format!("{block_type} blocks, u8 [.., blocks, {}]", block_type.bytes()),
            "state the type that the blocks have in their file",
        ))
    }

    /// The blocks, u8 `[.., blocks, bytes of a block]`.
    pub fn blocks(&self) -> &DTensor {
        &self.blocks
    }

    /// The type of the blocks.
    pub fn block_type(&self) -> BlockType {
        self.block_type
    }

    /// Shape in elements.
    pub fn shape(&self) -> Vec<usize> {
        let [leading @ .., blocks, _] = self.blocks.shape() else { unreachable!("checked in new") };
        [leading, &[blocks * self.block_type.elements()]].concat()
    }

    /// Expands the elements to f32.
    ///
    /// Local: keeps the layout. Partial sums of bytes, as a lookup in a sharded table gives them, are reduced first.
    #[track_caller]
    pub fn dequantize(&self) -> Result<DTensor> {
        dispatch(&Dequantize(self.block_type), &[&self.blocks], Location::caller())?.swap_remove(0).flatten(-2, -1)
    }

    /// Looks up rows of this table `[vocabulary, features]` by ids of any shape, in f32. Collective as
    /// [`DTensor::embedding`] of the blocks: only the rows that are looked up are expanded.
    ///
    /// # Errors
    /// [`ErrorKind::Shape`] if this is not a matrix.
    #[track_caller]
    pub fn embedding(&self, ids: &DTensor) -> Result<DTensor> {
        self.check_matrix("embedding")?;
        let [blocks, bytes] = [1, 2].map(|dim| self.blocks.shape()[dim] as isize);
        let rows = self.blocks.flatten(1, 2)?.embedding(ids)?.unflatten(-1, &[blocks, bytes])?;
        QuantizedTensor { blocks: rows, ..self.clone() }.dequantize()
    }

    fn check_matrix(&self, operator: &str) -> Result<()> {
        if self.blocks.ndim() == 3 {
            return Ok(());
        }
        let found = format!("{} blocks of a tensor {:?} in {operator}", self.block_type, self.shape());
        Err(ErrorKind::shape(self.blocks.shape()).error("quantized weight", found, "a matrix", "reshape the blocks"))
    }
}

impl DTensor {
    /// Applies a linear layer whose weight is quantized: this f32 tensor `[..., in]` times the transpose of `weight`,
    /// `[out, in]`, plus `bias`, `[out]`.
    ///
    /// Communicates as [`linear`](Self::linear) does: a weight sharded on dimension 0 gives a result that is sharded on its last
    /// dimension, one sharded on its blocks together with the features of the input a `Partial(Sum)` result. Blocks stay whole, so features that are
    /// not sharded between blocks are redistributed first. Differentiable with respect to the input and the bias; the gradient is
    /// that of an input that is not rounded ([`quantized_matmul`](quantized::quantized_matmul) rounds few rows to 16 bits).
    ///
    /// # Errors
    /// If the input is not f32, its features are not those of the weight, or the weight is not a matrix.
    #[doc(alias = "QLinear")]
    #[track_caller]
    pub fn quantized_linear(&self, weight: &QuantizedTensor, bias: Option<&DTensor>) -> Result<DTensor> {
        weight.check_matrix("quantized_linear")?;
        let (block, blocks) = (weight.block_type, &weight.blocks);
        let features = blocks.shape()[1] * block.elements();
        if self.ndim() == 0 || self.shape()[self.ndim() - 1] != features || self.dtype() != DType::F32 {
            return Err(ErrorKind::shape(self.shape()).error(
                "operands",
                format!("{} {} in quantized_linear", self.dtype().as_str(), self.layout()),
                format!("an f32 input [..., {features}] for {block} blocks {:?}", blocks.shape()),
                "change the input, or expand the weight with `dequantize`",
            ));
        }
        let grouped = self.unflatten(-1, &[-1, block.elements() as isize])?;
        let product = dispatch(&QuantizedLinear(block), &[&grouped, blocks], Location::caller())?.swap_remove(0);
        match bias {
            Some(bias) => product.add(bias),
            None => Ok(product),
        }
    }
}

/// `x w^T` for `[.., blocks, elements]` and `[out, blocks, bytes]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct QuantizedLinear(BlockType);

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
        Ok(vec![quantized::quantized_matmul(&inputs[0], &inputs[1], self.0)?])
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        let features = inputs[0].iter().rev().take(2).product::<usize>();
        2 * (features * outputs[0].iter().product::<usize>()) as u64
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Inputs, |op, saved, gradients| {
            let Some(g) = gradients[0].as_ref().filter(|_| saved.needs_input_grad(0)) else {
                return Ok(vec![None, None]);
            };
            let (x, weight) = (saved.input(0), QuantizedTensor::new(&saved.input(1), op.0)?);
            let elements = x.shape()[x.ndim() - 1] as isize;
            let of_x = g.matmul(&weight.dequantize()?)?.unflatten(-1, &[-1, elements])?;
            Ok(vec![Some(of_x), None])
        })
    }
}

/// Blocks `[.., bytes]` as `[.., elements]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Dequantize(BlockType);

impl Op for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (_, leading) = inputs[0].shape.split_last().expect("checked in QuantizedTensor::new");
        let names = || (0..leading.len()).map(Some).chain([None]).collect::<Vec<_>>();
        let signature = Signature::new(leading.iter().map(|_| DimSharding::Free), [names()], [names()]);
        let shape = leading.iter().copied().chain([self.0.elements()]).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: DType::F32 }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![quantized::dequantize(&inputs[0], self.0)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}
