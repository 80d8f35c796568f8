//! Products of f8 matrices with scales.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpKind, OpPlan, dispatch};
use crate::rule::Signature;
use crate::tensor::DTensor;
use shardwise_kernels::{batched_matmul_f32, convert};

impl DTensor {
    /// Multiplies matrices of f8 (`DType::F8E4M3`), `[m, k]` and `[k, n]`, and returns `(self @ other) * scale * other_scale` in `dtype`: f32,
    /// f16 or bf16.
    ///
    /// Scales are f32: one number for a matrix, or one for every row of this one, `[m, 1]`, and for every column of the other, `[1, n]`. Sums
    /// and scaling are in f32, and rounded once.
    ///
    /// Communicates as [`matmul`](Self::matmul) does: nothing if rows or columns are sharded, and nothing if the summed dimension is
    /// sharded in both, which gives `Partial(Sum)`. Not differentiable.
    ///
    /// ```
    /// use shardwise::prelude::*;
    ///
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("tp", 2)])?;
    ///     let f8 = |shape: (usize, usize), placement| DTensor::full(1.5, shape, DType::F8E4M3, &mesh, [placement]);
    ///     let half = DTensor::full(0.5, (), DType::F32, &mesh, [Replicate])?;
    ///     let y = f8((4, 8), Replicate)?.scaled_mm(&f8((8, 6), Shard(1))?, &half, &half, DType::BF16)?;
    ///     assert_eq!(y.placements(), [Shard(1)]);
    ///     assert_eq!(y.to_dtype(DType::F32)?.sum_all()?.item::<f32>()?, 24.0 * 8.0 * 2.25 * 0.25);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// If a type or a shape differs from these.
    #[doc(alias = "_scaled_mm")]
    #[track_caller]
    pub fn scaled_mm(&self, other: &DTensor, scale: &DTensor, other_scale: &DTensor, dtype: DType) -> Result<DTensor> {
        let op = ScaledMm { dtype: OutputType::of(dtype)? };
        Ok(dispatch(&op, &[self, other, scale, other_scale], Location::caller())?.swap_remove(0))
    }
}

/// Inputs: two matrices of f8 and their scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ScaledMm {
    dtype: OutputType,
}

/// The element type of a product; candle's type cannot be hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum OutputType {
    F32,
    F16,
    BF16,
}

impl OutputType {
    fn of(dtype: DType) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(OutputType::F32),
            DType::F16 => Ok(OutputType::F16),
            DType::BF16 => Ok(OutputType::BF16),
            _ => Err(ErrorKind::dtype(dtype).error(
                "element type of scaled_mm",
                dtype.as_str(),
                "f32, f16 or bf16",
                "convert the result with to_dtype",
            )),
        }
    }

    fn dtype(self) -> DType {
        match self {
            OutputType::F32 => DType::F32,
            OutputType::F16 => DType::F16,
            OutputType::BF16 => DType::BF16,
        }
    }
}

impl Op for ScaledMm {
    fn name(&self) -> &'static str {
        "scaled_mm"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let types: Vec<DType> = inputs.iter().map(|m| m.dtype).collect();
        let f8 = DType::F8E4M3;
        let (&[m, k], &[rows, n]) = (inputs[0].shape.as_slice(), inputs[1].shape.as_slice()) else {
            return Err(misfit(inputs));
        };
        if k != rows || types != [f8, f8, DType::F32, DType::F32] {
            return Err(misfit(inputs));
        }
        // Dimensions of the operator: rows, columns, and the summed one.
        let of_rows = scale_names(&inputs[2], &[m, 1], vec![Some(0), None]).ok_or_else(|| misfit(inputs))?;
        let of_columns = scale_names(&inputs[3], &[1, n], vec![None, Some(1)]).ok_or_else(|| misfit(inputs))?;
        let names = [vec![Some(0), Some(2)], vec![Some(2), Some(1)], of_rows, of_columns];
        let signature = Signature::product(names, vec![Some(0), Some(1)]).forbid_partial();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: vec![m, n], dtype: self.dtype.dtype() }] })
    }

    fn kind(&self) -> OpKind {
        OpKind::AnyType
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::InF32FromAnyType
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let product = batched_matmul_f32(&inputs[0], &inputs[1], 0, 1)?;
        let scaled = match product.elem_count() {
            0 => product,
            _ => product.broadcast_mul(&inputs[2])?.broadcast_mul(&inputs[3])?,
        };
        Ok(vec![convert(&scaled, context.output_dtype(0))?])
    }

    fn flops(&self, inputs: &[&[usize]], outputs: &[&[usize]]) -> u64 {
        2 * inputs[0][1] as u64 * outputs[0].iter().product::<usize>() as u64
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

/// The dimensions of a scale in the rule: none for one number, or those of a vector of the shape `per_line`.
fn scale_names(scale: &TensorMeta, per_line: &[usize], names: Vec<Option<usize>>) -> Option<Vec<Option<usize>>> {
    match scale.shape.as_slice() {
        shape if shape.len() <= 2 && shape.iter().all(|&n| n == 1) => Some(vec![None; shape.len()]),
        shape => (shape == per_line).then_some(names),
    }
}

fn misfit(inputs: &[TensorMeta]) -> Error {
    let found: Vec<String> = inputs.iter().map(|m| format!("{} {:?}", m.dtype.as_str(), m.shape)).collect();
    ErrorKind::shape(&inputs[0].shape).error(
        "operands",
        found.join(", "),
        "f8e4m3 [m, k] and [k, n], and f32 scales: one number, or [m, 1] and [1, n]",
        "convert or reshape the operands",
    )
}
