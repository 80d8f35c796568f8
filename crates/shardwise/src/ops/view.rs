//! Operators that name dimensions anew: nothing is computed, and shards stay shards.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use super::{OpEntry, Sample};
use crate::error::{Error, ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Accumulation, Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::Signature;
use crate::tensor::{DTensor, Keeps};
use shardwise_kernels::contiguous;

/// Every dimension of the result is one of the input, or new.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Rename {
    name: &'static str,
    /// Per dimension of the result the input's dimension, or the size of a new one.
    dims: Vec<From>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum From {
    Input(usize),
    /// A dimension of the input of size 1, stretched.
    Stretched(usize, usize),
    New(usize),
}

impl DTensor {
    /// The dimensions in another order.
    #[track_caller]
    pub fn permute(&self, dims: &[isize]) -> Result<DTensor> {
        let order = dims.iter().map(|&d| self.resolve_dim("permute", d)).collect::<Result<Vec<_>>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted != (0..self.rank()).collect::<Vec<_>>() {
            return Err(self.bad_dims("permute", dims, "every dimension once"));
        }
        self.renamed("permute", order.into_iter().map(From::Input).collect())
    }

    /// Two dimensions swapped.
    #[track_caller]
    pub fn transpose(&self, a: isize, b: isize) -> Result<DTensor> {
        let (a, b) = (self.resolve_dim("transpose", a)?, self.resolve_dim("transpose", b)?);
        let mut order: Vec<usize> = (0..self.rank()).collect();
        order.swap(a, b);
        self.renamed("transpose", order.into_iter().map(From::Input).collect())
    }

    /// The transposed matrix.
    #[track_caller]
    pub fn t(&self) -> Result<DTensor> {
        if self.rank() != 2 {
            return Err(self.bad_dims("t", &[], "a matrix"));
        }
        self.transpose(0, 1)
    }

    /// A dimension moved to another place.
    #[track_caller]
    pub fn movedim(&self, source: isize, destination: isize) -> Result<DTensor> {
        let (from, to) = (self.resolve_dim("movedim", source)?, self.resolve_dim("movedim", destination)?);
        let mut order: Vec<usize> = (0..self.rank()).filter(|&d| d != from).collect();
        order.insert(to, from);
        self.renamed("movedim", order.into_iter().map(From::Input).collect())
    }

    /// A new dimension of size 1.
    #[track_caller]
    pub fn unsqueeze(&self, dim: isize) -> Result<DTensor> {
        let ndim = self.rank() as isize;
        let at = if dim < 0 { dim + ndim + 1 } else { dim };
        if !(0..=ndim).contains(&at) {
            return Err(self.bad_dims("unsqueeze", &[dim], "a place among the dimensions"));
        }
        let mut dims: Vec<From> = (0..self.rank()).map(From::Input).collect();
        dims.insert(at as usize, From::New(1));
        self.renamed("unsqueeze", dims)
    }

    /// Without a dimension if its size is 1, or without all such dimensions.
    #[track_caller]
    pub fn squeeze(&self, dim: Option<isize>) -> Result<DTensor> {
        let only = dim.map(|d| self.resolve_dim("squeeze", d)).transpose()?;
        let gone = |d: &usize| self.shape()[*d] == 1 && only.is_none_or(|o| o == *d);
        self.renamed("squeeze", (0..self.rank()).filter(|d| !gone(d)).map(From::Input).collect())
    }

    /// Dimensions of size 1 stretched to others, and new ones in front; -1 keeps a size.
    #[track_caller]
    pub fn expand(&self, sizes: &[isize]) -> Result<DTensor> {
        let new =
            sizes.len().checked_sub(self.rank()).ok_or_else(|| self.bad_dims("expand", sizes, "no fewer sizes"))?;
        let mut dims = Vec::new();
        for (i, &size) in sizes.iter().enumerate() {
            let own = i.checked_sub(new).map(|d| (d, self.shape()[d]));
            dims.push(match (own, usize::try_from(size)) {
                (Some((d, _)), Err(_)) if size == -1 => From::Input(d),
                (Some((d, n)), Ok(size)) if n == size => From::Input(d),
                (Some((d, 1)), Ok(size)) => From::Stretched(d, size),
                (None, Ok(size)) => From::New(size),
                _ => return Err(self.bad_dims("expand", sizes, "sizes that are equal, or stretch a 1")),
            });
        }
        self.renamed("expand", dims)
    }

    #[track_caller]
    fn renamed(&self, name: &'static str, dims: Vec<From>) -> Result<DTensor> {
        Ok(dispatch(&Rename { name, dims }, &[self], Location::caller())?.swap_remove(0))
    }

    pub(super) fn resolve_dim(&self, name: &'static str, dim: isize) -> Result<usize> {
        let from_front = if dim < 0 { dim + self.rank() as isize } else { dim };
        let inside = usize::try_from(from_front).ok().filter(|&d| d < self.rank());
        inside.ok_or_else(|| self.bad_dims(name, &[dim], "dimensions of the tensor"))
    }

    pub(super) fn bad_dims(&self, name: &'static str, dims: &[isize], needed: &str) -> Error {
        let found = match dims {
            [] => format!("{} in {name}", self.layout()),
            dims => format!("{dims:?} in {name} of {}", self.layout()),
        };
        match *dims {
            [dim] => ErrorKind::Dimension { dim, ndim: self.rank() },
            _ => ErrorKind::Argument,
        }
        .error("dimensions", found, needed, "correct the dimensions")
    }
}

impl Op for Rename {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::OneTerm
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let size = |from: &From| match from {
            From::Input(d) => x.shape[*d],
            From::Stretched(_, n) | From::New(n) => *n,
        };
        let kept = |from: &From| match from {
            From::Input(d) => Some(*d),
            From::Stretched(..) | From::New(_) => None,
        };
        // A dimension that is dropped or stretched has one element, and sharing one element is of no use.
        let stays = |d: usize| self.dims.contains(&From::Input(d));
        let mut signature = Signature::renaming(x.shape.len(), &stays, self.dims.iter().map(kept).collect());
        for op in ReduceOp::ALL {
            signature = signature.passing([Some(op)], op);
        }
        let shape = self.dims.iter().map(size).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let used = |from: &From| match from {
            From::Input(d) | From::Stretched(d, _) => Some(*d),
            From::New(_) => None,
        };
        // Only views: dimensions that are dropped (from the last on, so that the others keep their numbers), turned,
        // inserted and stretched.
        let order: SmallVec<[usize; 6]> = self.dims.iter().filter_map(used).collect();
        let mut view = x.clone();
        for dim in (0..x.rank()).rev().filter(|d| !order.contains(d)) {
            view = view.squeeze(dim)?;
        }
        let place = |&d: &usize| order.iter().filter(|&&o| o < d).count();
        view = view.permute(order.iter().map(place).collect::<Vec<_>>())?;
        for at in (0..self.dims.len()).filter(|&i| matches!(self.dims[i], From::New(_))) {
            view = view.unsqueeze(at)?;
        }
        if view.dims() != at.local_shape(0) {
            view = view.broadcast_as(at.local_shape(0))?;
        }
        Ok(vec![if view.elem_count() == 0 { contiguous(&view)? } else { view }])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Nothing, |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
            // Dimensions that were stretched or new are summed over; the others go back to their places.
            let made = |from: &From| !matches!(from, From::Input(_));
            let summed: Vec<isize> = (0..op.dims.len()).filter(|&i| made(&op.dims[i])).map(|i| i as isize).collect();
            let left = if summed.is_empty() { gradient.clone() } else { gradient.sum(&summed, false)? };
            let kept: Vec<&From> = op.dims.iter().filter(|from| !made(from)).collect();
            let back =
                |d: usize| kept.iter().position(|from| **from == From::Input(d)).map_or(From::New(1), From::Input);
            Ok(vec![Some(left.renamed(op.name, (0..saved.shape(0).len()).map(back).collect())?)])
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "permute", samples, apply: |x| Ok(vec![x[0].permute(&[2, 0, 1])?]) },
    OpEntry { name: "transpose", samples, apply: |x| Ok(vec![x[0].transpose(0, -1)?]) },
    OpEntry { name: "movedim", samples, apply: |x| Ok(vec![x[0].movedim(0, -1)?]) },
    OpEntry { name: "unsqueeze", samples, apply: |x| Ok(vec![x[0].unsqueeze(1)?, x[0].unsqueeze(-1)?]) },
    OpEntry { name: "squeeze", samples, apply: |x| Ok(vec![x[0].squeeze(None)?, x[0].squeeze(Some(1))?]) },
    OpEntry { name: "expand", samples, apply: |x| Ok(vec![x[0].expand(&[2, -1, -1, -1])?]) },
    OpEntry { name: "t", samples: matrices, apply: |x| Ok(vec![x[0].t()?]) },
];

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 3] = [&[4, 1, 6], &[5, 3, 2], &[1, 1, 3]];
    shapes.iter().map(|shape| vec![Sample::new(shape, DType::I64)]).collect()
}

fn matrices() -> Vec<Vec<Sample>> {
    vec![vec![Sample::new(&[5, 3], DType::F64)], vec![Sample::new(&[0, 3], DType::I64)]]
}
