//! Operators that rearrange dimensions: transpose, squeeze, expand. Nothing is computed or moved; shards stay shards.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpKind, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::contiguous;

/// An operator whose every output dimension is one of the input, or new.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RearrangeDims {
    name: &'static str,
    /// Per dimension of the result where it comes from.
    dims: Vec<DimSource>,
}

/// Where a dimension of the result comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum DimSource {
    /// A dimension of the input.
    Input(usize),
    /// A dimension of the input of size 1, and the size that it is expanded to.
    Expanded(usize, usize),
    /// A new dimension of this size.
    New(usize),
}

impl DTensor {
    /// Reorders the dimensions. Local: sharded dimensions stay sharded under their new number.
    #[track_caller]
    pub fn permute(&self, dims: &[isize]) -> Result<DTensor> {
        let order = dims.iter().map(|&d| self.resolve_dim("permute", d)).collect::<Result<Vec<_>>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted != (0..self.ndim()).collect::<Vec<_>>() {
            return Err(self.bad_dims("permute", dims, "every dimension once"));
        }
        self.rearranged("permute", order.into_iter().map(DimSource::Input).collect())
    }

    /// Swaps two dimensions. Local: sharded dimensions stay sharded under their new number.
    #[track_caller]
    pub fn transpose(&self, a: isize, b: isize) -> Result<DTensor> {
        if self.is_scalar_with(a) && self.is_scalar_with(b) {
            return Ok(self.clone());
        }
        let (a, b) = (self.resolve_dim("transpose", a)?, self.resolve_dim("transpose", b)?);
        let mut order: Vec<usize> = (0..self.ndim()).collect();
        order.swap(a, b);
        self.rearranged("transpose", order.into_iter().map(DimSource::Input).collect())
    }

    /// Transposes a matrix, see [`transpose`](Self::transpose). A vector or a scalar is returned unchanged.
    #[track_caller]
    pub fn t(&self) -> Result<DTensor> {
        if self.ndim() < 2 {
            return Ok(self.clone());
        }
        if self.ndim() > 2 {
            return Err(self.bad_dims("t", &[], "a matrix"));
        }
        self.transpose(0, 1)
    }

    /// Moves a dimension to another position. Local, as [`permute`](Self::permute).
    #[track_caller]
    pub fn movedim(&self, source: isize, destination: isize) -> Result<DTensor> {
        let (from, to) = (self.resolve_dim("movedim", source)?, self.resolve_dim("movedim", destination)?);
        let mut order: Vec<usize> = (0..self.ndim()).filter(|&d| d != from).collect();
        order.insert(to, from);
        self.rearranged("movedim", order.into_iter().map(DimSource::Input).collect())
    }

    /// Inserts a dimension of size 1 before `dim`; -1 appends it. Local.
    #[track_caller]
    pub fn unsqueeze(&self, dim: isize) -> Result<DTensor> {
        let ndim = self.ndim() as isize;
        let at = if dim < 0 { dim + ndim + 1 } else { dim };
        if !(0..=ndim).contains(&at) {
            return Err(self.bad_dims("unsqueeze", &[dim], &format!("a position from {} to {ndim}", -ndim - 1)));
        }
        let mut dims: Vec<DimSource> = (0..self.ndim()).map(DimSource::Input).collect();
        dims.insert(at as usize, DimSource::New(1));
        self.rearranged("unsqueeze", dims)
    }

    /// Removes dimension `dim` if its size is 1; `None` removes all dimensions of size 1.
    ///
    /// Local, unless a removed dimension is sharded: then the rank that holds it sends it to the other ranks.
    #[track_caller]
    pub fn squeeze(&self, dim: Option<isize>) -> Result<DTensor> {
        if dim.is_some_and(|d| self.is_scalar_with(d)) {
            return Ok(self.clone());
        }
        let only = dim.map(|d| self.resolve_dim("squeeze", d)).transpose()?;
        let gone = |d: &usize| self.shape()[*d] == 1 && only.is_none_or(|o| o == *d);
        self.rearranged("squeeze", (0..self.ndim()).filter(|d| !gone(d)).map(DimSource::Input).collect())
    }

    /// Expands dimensions of size 1 to `sizes`, with new dimensions in front; -1 keeps a size.
    ///
    /// Local. The expanded dimensions are not sharded, and share memory as in PyTorch.
    #[track_caller]
    pub fn expand(&self, sizes: &[isize]) -> Result<DTensor> {
        let new = sizes
            .len()
            .checked_sub(self.ndim())
            .ok_or_else(|| self.bad_dims("expand", sizes, "at least one size per dimension"))?;
        let mut dims = Vec::new();
        for (i, &size) in sizes.iter().enumerate() {
            let own = i.checked_sub(new).map(|d| (d, self.shape()[d]));
            dims.push(match (own, usize::try_from(size)) {
                (Some((d, _)), Err(_)) if size == -1 => DimSource::Input(d),
                (Some((d, n)), Ok(size)) if n == size => DimSource::Input(d),
                (Some((d, 1)), Ok(size)) => DimSource::Expanded(d, size),
                (None, Ok(size)) => DimSource::New(size),
                _ => {
                    return Err(self.bad_dims(
                        "expand",
                        sizes,
                        "equal sizes, except where a dimension of size 1 is expanded",
                    ));
                }
            });
        }
        self.rearranged("expand", dims)
    }

    #[track_caller]
    fn rearranged(&self, name: &'static str, dims: Vec<DimSource>) -> Result<DTensor> {
        Ok(dispatch(&RearrangeDims { name, dims }, &[self], Location::caller())?.swap_remove(0))
    }

    /// Whether this is a scalar, and `dim` a dimension that PyTorch gives it by name: 0 or -1.
    pub(in crate::ops) fn is_scalar_with(&self, dim: isize) -> bool {
        self.ndim() == 0 && matches!(dim, 0 | -1)
    }

    /// Runs an operator along a dimension of a scalar that has it only by name, as on a vector of one element. `None` for any other
    /// tensor.
    #[track_caller]
    pub(in crate::ops) fn as_vector<T>(
        &self,
        dim: isize,
        run: impl FnOnce(&DTensor) -> Result<T>,
    ) -> Option<Result<T>> {
        self.is_scalar_with(dim).then(|| run(&self.unsqueeze(0)?))
    }

    pub(in crate::ops) fn resolve_dim(&self, name: &'static str, dim: isize) -> Result<usize> {
        let from_front = if dim < 0 { dim + self.ndim() as isize } else { dim };
        let inside = usize::try_from(from_front).ok().filter(|&d| d < self.ndim());
        inside.ok_or_else(|| self.bad_dims(name, &[dim], "dimensions of the tensor"))
    }

    pub(in crate::ops) fn bad_dims(&self, name: &'static str, dims: &[isize], needed: &str) -> Error {
        let found = match dims {
            [] => format!("{} in {name}", self.layout()),
            dims => format!("{dims:?} in {name} of {}", self.layout()),
        };
        match *dims {
            [dim] => ErrorKind::Dimension { dim, ndim: self.ndim() },
            _ => ErrorKind::Argument,
        }
        .error("dimensions", found, needed, "correct the dimensions")
    }
}

impl Op for RearrangeDims {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let size = |from: &DimSource| match from {
            DimSource::Input(d) => x.shape[*d],
            DimSource::Expanded(_, n) | DimSource::New(n) => *n,
        };
        let kept = |from: &DimSource| match from {
            DimSource::Input(d) => Some(*d),
            DimSource::Expanded(..) | DimSource::New(_) => None,
        };
        // A dimension that is removed or expanded has one element, which cannot be sharded usefully.
        let stays = |d: usize| self.dims.contains(&DimSource::Input(d));
        let mut signature = Signature::rearrangement(x.shape.len(), &stays, self.dims.iter().map(kept).collect());
        for op in ReduceOp::ALL {
            signature = signature.allow_partial([Some(op)], op);
        }
        let shape = self.dims.iter().map(size).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn kind(&self) -> OpKind {
        OpKind::AnyType
    }

    fn stored_elements(&self, _: usize, local_shape: &[usize]) -> usize {
        let own = self.dims.iter().zip(local_shape).filter(|(from, _)| matches!(from, DimSource::Input(_)));
        own.map(|(_, size)| size).product()
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let used = |from: &DimSource| match from {
            DimSource::Input(d) | DimSource::Expanded(d, _) => Some(*d),
            DimSource::New(_) => None,
        };
        // Views only: remove dimensions (from the last on, so that the rest keep their numbers), permute, insert, expand.
        let order: SmallVec<[usize; 6]> = self.dims.iter().filter_map(used).collect();
        let mut view = x.clone();
        for dim in (0..x.rank()).rev().filter(|d| !order.contains(d)) {
            view = view.squeeze(dim)?;
        }
        let place = |&d: &usize| order.iter().filter(|&&o| o < d).count();
        view = view.permute(order.iter().map(place).collect::<Vec<_>>())?;
        for at in (0..self.dims.len()).filter(|&i| matches!(self.dims[i], DimSource::New(_))) {
            view = view.unsqueeze(at)?;
        }
        if view.dims() != context.local_shape(0) {
            view = view.broadcast_as(context.local_shape(0))?;
        }
        Ok(vec![if view.elem_count() == 0 { contiguous(&view)? } else { view }])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            // Sum over expanded and new dimensions, then permute back.
            let made = |from: &DimSource| !matches!(from, DimSource::Input(_));
            let summed: Vec<isize> = (0..op.dims.len()).filter(|&i| made(&op.dims[i])).map(|i| i as isize).collect();
            let left = if summed.is_empty() { gradient.clone() } else { gradient.sum(&summed, false)? };
            let kept: Vec<&DimSource> = op.dims.iter().filter(|from| !made(from)).collect();
            let back = |d: usize| {
                kept.iter().position(|from| **from == DimSource::Input(d)).map_or(DimSource::New(1), DimSource::Input)
            };
            Ok(vec![Some(left.rearranged(op.name, (0..saved.shape(0).len()).map(back).collect())?)])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "permute", samples, apply: |x| Ok(vec![x[0].permute(&[2, 0, 1])?]) },
    OpEntry { name: "transpose", samples, apply: |x| Ok(vec![x[0].transpose(0, -1)?]) },
    OpEntry { name: "movedim", samples, apply: |x| Ok(vec![x[0].movedim(0, -1)?]) },
    OpEntry { name: "unsqueeze", samples, apply: |x| Ok(vec![x[0].unsqueeze(1)?, x[0].unsqueeze(-1)?]) },
    OpEntry { name: "squeeze", samples, apply: |x| Ok(vec![x[0].squeeze(None)?, x[0].squeeze(Some(1))?]) },
    OpEntry { name: "expand", samples, apply: |x| Ok(vec![x[0].expand(&[2, -1, -1, -1])?]) },
    OpEntry { name: "t", samples: matrices, apply: |x| Ok(vec![x[0].t()?]) },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[4, 1, 6], &[5, 3, 2], &[1, 1, 3]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect()
}

fn matrices() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64)], vec![SampleInput::new(&[0, 3], DType::I64)]]
}
