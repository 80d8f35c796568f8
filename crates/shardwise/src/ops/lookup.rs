//! Slices and elements picked by index. Where the dimension that is looked up is cut, a rank answers for the indices that
//! it holds and gives zeros for the others: the result is a pending sum.

use std::panic::Location;

use candle_core::{DType, Tensor};

use super::indices::{Wrap, not_whole, places, wrapped};
use super::scatter::{spread_elements, spread_slices};
use super::{OpEntry, Sample};
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Accumulation, Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::ReduceOp;
use crate::rule::{Decision, Shared, Signature};
use crate::tensor::{DTensor, Keeps};
use shardwise_kernels::{contiguous, gather, index_select, to_f64_vec, to_i64_vec};

/// The slices of `x` along a dimension at the places of an index of any shape, whose dimensions replace that one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Lookup {
    name: &'static str,
    dim: usize,
}

/// The element of `x` whose coordinate along a dimension is the index at that place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gather {
    dim: usize,
}

/// How a bag of embeddings becomes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bag {
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
    /// The largest of each component.
    Max,
}

impl DTensor {
    /// The slices along a dimension that a vector of indices names.
    #[track_caller]
    pub fn index_select(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        let at = self.resolve_dim("index_select", dim)?;
        if index.rank() != 1 {
            return Err(index.bad_dims("index_select", &[], "a vector of indices"));
        }
        lookup(Lookup { name: "index_select", dim: at }, self, index)
    }

    /// `x[index]`: the slices along the first dimension that an index of any shape names; negative ones count from the back.
    #[track_caller]
    pub fn index(&self, index: &DTensor) -> Result<DTensor> {
        self.index_along(self.resolve_dim("index", 0)?, index)
    }

    /// The slices along dimension `dim` that an index of any shape names, whose dimensions replace that one.
    #[track_caller]
    pub(super) fn index_along(&self, dim: usize, index: &DTensor) -> Result<DTensor> {
        lookup(Lookup { name: "index", dim }, self, &wrapped("index", index, self.shape()[dim])?)
    }

    /// The rows of a weight `[vocabulary, features]`, which this tensor is, for ids of any shape.
    #[track_caller]
    pub fn embedding(&self, ids: &DTensor) -> Result<DTensor> {
        if self.rank() != 2 {
            return Err(self.bad_dims("embedding", &[], "a weight [vocabulary, features]"));
        }
        lookup(Lookup { name: "embedding", dim: 0 }, self, ids)
    }

    /// The rows of a weight for bags of ids, each bag reduced to one row. `ids` is a matrix with a bag per row, or a vector
    /// in which a bag begins at every offset.
    #[track_caller]
    pub fn embedding_bag(&self, ids: &DTensor, offsets: Option<&[usize]>, mode: Bag) -> Result<DTensor> {
        let rows = self.embedding(ids)?;
        let Some(offsets) = offsets else {
            if ids.rank() != 2 {
                return Err(ids.bad_dims("embedding_bag", &[], "a matrix of ids, or offsets"));
            }
            return mode.reduce(&rows, ids.shape()[1]);
        };
        let n = rows.shape()[0];
        let rising = offsets.is_sorted() && offsets.first() == Some(&0) && offsets.iter().all(|&o| o <= n);
        if ids.rank() != 1 || !rising {
            let found = format!("offsets {offsets:?} for {} in embedding_bag", ids.layout());
            return Err(ErrorKind::Argument.error(
                "bags",
                found,
                "a vector of ids and rising offsets from 0",
                "correct the offsets",
            ));
        }
        let ends = offsets[1..].iter().copied().chain([n]);
        let bags = offsets.iter().zip(ends).map(|(&start, end)| {
            let bag = rows.narrow(0, start, end - start)?.unsqueeze(0)?;
            mode.reduce(&bag, end - start)
        });
        let bags = bags.collect::<Result<Vec<_>>>()?;
        DTensor::cat(&bags.iter().collect::<Vec<_>>(), 0)
    }

    /// The elements whose coordinate along a dimension is the index at their place. The index has as many dimensions as
    /// the tensor, and is nowhere longer but along that dimension.
    #[track_caller]
    pub fn gather(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        let op = Gather { dim: self.resolve_dim("gather", dim)? };
        Ok(dispatch(&op, &[self, index], Location::caller())?.swap_remove(0))
    }

    /// One where the class is the id at that place, along a new last dimension of classes; i64.
    ///
    /// # Errors
    /// An id that is not a class is an error on the ranks that hold it, and reaches the others with their next collective.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Result<DTensor> {
        if self.dtype().is_float() {
            return Err(not_whole(&format!("one_hot of {}", self.layout()), self.dtype()));
        }
        let whole = vec![crate::placement::Placement::Replicate; self.placements().len()];
        let all = DTensor::arange(0, classes as f64, 1, DType::I64, self.device_mesh(), whole)?;
        let ids = Wrap { name: "one_hot", n: classes, from_back: false };
        let ids = dispatch(&ids, &[self], Location::caller())?.swap_remove(0);
        ids.unsqueeze(-1)?.eq(&all)?.to_dtype(DType::I64)
    }

    /// The number of boundaries below each element: the index of the first boundary that is not below it.
    #[track_caller]
    pub fn bucketize(&self, boundaries: &DTensor) -> Result<DTensor> {
        if boundaries.rank() != 1 {
            return Err(boundaries.bad_dims("bucketize", &[], "a vector of ascending boundaries"));
        }
        Ok(dispatch(&Bucketize, &[self, boundaries], Location::caller())?.swap_remove(0))
    }
}

impl Bag {
    /// One row per bag of `[bags, size, features]`.
    #[track_caller]
    fn reduce(self, rows: &DTensor, size: usize) -> Result<DTensor> {
        match self {
            _ if size == 0 => rows.sum(&[1], false),
            Bag::Sum => rows.sum(&[1], false),
            Bag::Mean => rows.mean(&[1], false),
            Bag::Max => rows.amax(&[1], false),
        }
    }
}

#[track_caller]
fn lookup(op: Lookup, x: &DTensor, index: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&op, &[x, index], Location::caller())?.swap_remove(0))
}

/// Operands of a reduction of the first input pass, because all of them are picked alike.
fn passing_first(mut signature: Signature, others: usize) -> Signature {
    for op in ReduceOp::ALL {
        let inputs = std::iter::once(Some(op)).chain((0..others).map(|_| None));
        signature = signature.passing(inputs, op);
    }
    signature
}

impl Op for Lookup {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::OneTerm
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, index) = (&inputs[0], &inputs[1]);
        if index.dtype.is_float() {
            return Err(not_whole(self.name, index.dtype));
        }
        let ndim = x.shape.len();
        let of_index: Vec<Option<usize>> = (0..index.shape.len()).map(|d| Some(ndim + d)).collect();
        let of_x: Vec<Option<usize>> = (0..ndim).map(Some).collect();
        let shared = (0..ndim + index.shape.len())
            .map(|d| if d == self.dim { Shared::Reduces(ReduceOp::Sum) } else { Shared::Free });
        let output = [&of_x[..self.dim], &of_index, &of_x[self.dim + 1..]].concat();
        let shape = [&x.shape[..self.dim], &index.shape, &x.shape[self.dim + 1..]].concat();
        let signature = passing_first(Signature::new(shared, [of_x, of_index], [output]), 1);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    /// Ids are small, but what is made of them is not: where both inputs are cut along an axis, ids stay where they are
    /// unless the table is larger than the result.
    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let (table, ids) = (inputs[0], inputs[1]);
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        let cut = |layout: &Layout, axis: usize| layout.placements()[axis].is_shard(None);
        let mut axes: Vec<usize> = (0..table.mesh().ndim()).filter(|&a| cut(table, a) && cut(ids, a)).collect();
        if count(table.shape()) > count(&plan.outputs[0].shape) {
            axes.clear();
        }
        plan.signature.decide(&[&table.without_axes(&axes)?, ids], elem, &[&plan.outputs[0].shape])
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let (x, index) = (&inputs[0], &inputs[1]);
        let places = places(self.name, &to_i64_vec(index)?, at.input_shape(0)[self.dim], &at.input(0, self.dim))?;
        let taken = index_select(x, self.dim, &places)?;
        let shape = [&x.dims()[..self.dim], index.dims(), &x.dims()[self.dim + 1..]].concat();
        Ok(vec![contiguous(&taken.reshape(shape)?)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
            let index = saved.input(1);
            let (dim, ndim) = (op.dim as isize, index.rank() as isize);
            let rows = if ndim == 0 { gradient.unsqueeze(dim)? } else { gradient.flatten(dim, dim + ndim - 1)? };
            let places = index.reshape(&[index.elem_count() as isize])?;
            Ok(vec![Some(spread_slices(saved.layout(0), op.dim, &places, &rows)?), None])
        })
    }
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::OneTerm
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, index) = (&inputs[0], &inputs[1]);
        if index.dtype.is_float() {
            return Err(not_whole("gather", index.dtype));
        }
        let ndim = x.shape.len();
        let longer = |d: usize| d != self.dim && index.shape[d] > x.shape[d];
        if index.shape.len() != ndim || (0..ndim).any(longer) {
            return Err(ErrorKind::shape(&index.shape).error(
                "index",
                format!("shape {:?} in gather of shape {:?} along dimension {}", index.shape, x.shape, self.dim),
                "as many dimensions, nowhere longer but along that one",
                "reshape or expand the index",
            ));
        }
        // A dimension of which the index uses only the beginning cannot be shared.
        let aligned = |d: usize| (d != self.dim && index.shape[d] == x.shape[d]).then_some(d);
        let of_x = (0..ndim).map(|d| if d == self.dim { Some(d) } else { aligned(d) }).collect();
        let of_index: Vec<Option<usize>> =
            (0..ndim).map(|d| if d == self.dim { Some(ndim) } else { aligned(d) }).collect();
        let shared = (0..=ndim).map(|d| if d == self.dim { Shared::Reduces(ReduceOp::Sum) } else { Shared::Free });
        let signature = passing_first(Signature::new(shared, [of_x, of_index.clone()], [of_index]), 1);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: index.shape.clone(), dtype: x.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let (x, index) = (&inputs[0], &inputs[1]);
        let places = places("gather", &to_i64_vec(index)?, at.input_shape(0)[self.dim], &at.input(0, self.dim))?;
        Ok(vec![gather(x, self.dim, &places, index.dims())?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
            Ok(vec![Some(spread_elements(saved.layout(0), op.dim, &saved.input(1), gradient)?), None])
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Bucketize;

impl Op for Bucketize {
    fn name(&self) -> &'static str {
        "bucketize"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let signature = Signature::new(dims.iter().map(|_| Shared::Free), [dims.clone(), vec![None]], [dims.clone()]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype: DType::I64 }] })
    }

    fn run(&self, inputs: &[Tensor], _: &Place<'_>) -> Result<Vec<Tensor>> {
        let edges = to_f64_vec(&inputs[1])?;
        let found = to_f64_vec(&inputs[0])?.into_iter().map(|x| edges.partition_point(|&e| e < x) as i64);
        Ok(vec![Tensor::from_vec(found.collect::<Vec<_>>(), inputs[0].dims(), inputs[0].device())?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry { name: "index_select", samples: selects, apply: |x| Ok(vec![x[0].index_select(0, &x[1])?]) },
    OpEntry { name: "index", samples: selects, apply: |x| Ok(vec![x[0].index(&x[1])?]) },
    OpEntry { name: "embedding", samples: embeddings, apply: |x| Ok(vec![x[0].embedding(&x[1])?]) },
    OpEntry {
        name: "embedding_bag",
        samples: embeddings,
        apply: |x| {
            let vector = x[1].flatten(0, -1)?;
            let n = vector.elem_count();
            let bags = [Bag::Sum, Bag::Mean, Bag::Max].into_iter();
            let mut all = bags.map(|m| x[0].embedding_bag(&x[1], None, m)).collect::<Result<Vec<_>>>()?;
            all.push(x[0].embedding_bag(&vector, Some(&[0, n / 2, n]), Bag::Mean)?);
            Ok(all)
        },
    },
    OpEntry { name: "gather", samples: gathers, apply: |x| Ok(vec![x[0].gather(0, &x[1])?]) },
    OpEntry { name: "one_hot", samples: ids, apply: |x| Ok(vec![x[0].one_hot(4)?]) },
    OpEntry { name: "bucketize", samples: buckets, apply: |x| Ok(vec![x[0].bucketize(&x[1].mul_scalar(0.0)?)?]) },
];

fn selects() -> Vec<Vec<Sample>> {
    vec![
        vec![Sample::new(&[5, 3], DType::F64), Sample::index(&[4], 5)],
        vec![Sample::new(&[2, 2, 2], DType::I64), Sample::index(&[1], 2)],
        vec![Sample::new(&[3, 2], DType::I64), Sample::index(&[0], 3)],
    ]
}

fn embeddings() -> Vec<Vec<Sample>> {
    vec![
        vec![Sample::new(&[7, 4], DType::F64), Sample::index(&[3, 5], 7)],
        vec![Sample::new(&[2, 1], DType::F64), Sample::index(&[1, 2], 2)],
    ]
}

fn gathers() -> Vec<Vec<Sample>> {
    vec![
        vec![Sample::new(&[5, 3], DType::F64), Sample::index(&[2, 3], 5)],
        vec![Sample::new(&[4, 4], DType::I64), Sample::index(&[6, 2], 4)],
    ]
}

fn ids() -> Vec<Vec<Sample>> {
    vec![vec![Sample::index(&[5], 4)], vec![Sample::index(&[2, 3], 4)]]
}

fn buckets() -> Vec<Vec<Sample>> {
    vec![vec![Sample::new(&[5, 3], DType::F64), Sample::new(&[4], DType::F64)]]
}
