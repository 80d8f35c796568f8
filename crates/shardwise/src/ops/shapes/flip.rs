//! Reversal of dimensions. If such a dimension is sharded, every rank fetches the mirror image of its shard.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::{Layout, TensorBox, TensorMeta};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::index_select;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Flip {
    dims: Vec<usize>,
}

impl DTensor {
    /// Reverses the order of elements along some dimensions.
    ///
    /// Keeps the layout. If a reversed dimension is sharded, ranks exchange shards in one step; else communicates nothing.
    #[track_caller]
    pub fn flip(&self, dims: &[isize]) -> Result<DTensor> {
        if dims.len() == 1 && self.is_scalar_with(dims[0]) {
            return Ok(self.clone());
        }
        let resolved = dims.iter().map(|&d| self.resolve_dim("flip", d)).collect::<Result<Vec<_>>>()?;
        if (1..resolved.len()).any(|i| resolved[..i].contains(&resolved[i])) {
            return Err(self.bad_dims("flip", dims, "every dimension at most once"));
        }
        Ok(dispatch(&Flip { dims: resolved }, &[self], Location::caller())?.swap_remove(0))
    }
}

impl Op for Flip {
    fn name(&self) -> &'static str {
        "flip"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let dims: Vec<Option<usize>> = (0..inputs[0].shape.len()).map(Some).collect();
        let signature =
            Signature::new(dims.iter().map(|_| DimSharding::Free), [dims.clone()], [dims.clone()]).allow_all_partial();
        Ok(OpPlan { signature, outputs: vec![inputs[0].clone()] })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        let axes: Vec<usize> = self.dims.iter().flat_map(|&d| inputs[0].shard_order(d).to_vec()).collect();
        if axes.is_empty() {
            return Ok(Decision {
                inputs: vec![RequiredInput::Layout(inputs[0].clone())],
                outputs: vec![inputs[0].clone()],
            });
        }
        let from = inputs[0].unstrided(&|_| true)?;
        let mirrored = |rank: usize| {
            let (mut offsets, sizes) = (from.global_offset(rank), from.local_shape(rank));
            for &dim in &self.dims {
                offsets[dim] = from.shape()[dim] - offsets[dim] - sizes[dim];
            }
            TensorBox { offsets, sizes }
        };
        let boxes = from.mesh().ranks().iter().map(|&rank| mirrored(rank)).collect();
        Ok(Decision { inputs: vec![RequiredInput::Boxes { from: from.clone(), axes, boxes }], outputs: vec![from] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let turn = |x: Tensor, &dim: &usize| {
            let backwards: Vec<usize> = (0..x.dims()[dim]).rev().collect();
            index_select(&x, dim, &backwards)
        };
        Ok(vec![self.dims.iter().try_fold(inputs[0].clone(), turn)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let dims: Vec<isize> = op.dims.iter().map(|&d| d as isize).collect();
            Ok(vec![Some(gradient.flip(&dims)?)])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] =
    &[OpEntry { name: "flip", samples, apply: |x| Ok(vec![x[0].flip(&[0])?, x[0].flip(&[-1, 0])?]) }];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[5, 3], &[8, 1], &[0, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect()
}
