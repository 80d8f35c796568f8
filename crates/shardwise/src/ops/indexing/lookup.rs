//! Lookups by index: `index_select`, `embedding`, `gather`. If the indexed dimension is sharded, every rank looks up the
//! indices that it holds and contributes neutral elements for the rest (-0.0, which leaves every zero its sign): the result is
//! `Partial(Sum)`.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::indices::{WrapIndices, check_indices, not_integer, wrapped};
use crate::ops::indexing::scatter::{scatter_add_elements, scatter_add_slices};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::ReduceOp;
use crate::rule::{Decision, DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{IndexRange, SumsFrom, bucketize, gather, index_select_by};

/// Selects slices of `x` along a dimension by an index of any shape, whose dimensions replace that one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct IndexSelect {
    name: &'static str,
    dim: usize,
}

/// Selects elements of `x` along a dimension: `out[i][j] = x[index[i][j]][j]` for dimension 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Gather {
    dim: usize,
}

/// How [`embedding_bag`](DTensor::embedding_bag) reduces the embeddings of a bag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum EmbeddingBagMode {
    /// The sum of the embeddings.
    Sum,
    /// The mean of the embeddings.
    Mean,
    /// The elementwise maximum of the embeddings.
    Max,
}

/// Options of [`embedding_with`](DTensor::embedding_with), with PyTorch's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingOptions {
    /// A row that has no gradient; negative ones count from the end.
    pub padding_idx: Option<i64>,
    /// Rows with a larger norm are scaled down to it.
    pub max_norm: Option<f64>,
    /// The order of that norm.
    pub norm_type: f64,
    /// Whether the gradient of a row is divided by how often it was looked up.
    pub scale_grad_by_freq: bool,
}

impl Default for EmbeddingOptions {
    fn default() -> Self {
        EmbeddingOptions { padding_idx: None, max_norm: None, norm_type: 2.0, scale_grad_by_freq: false }
    }
}

/// Options of [`embedding_bag_with`](DTensor::embedding_bag_with), with PyTorch's names and defaults.
#[derive(Clone, Copy)]
pub struct EmbeddingBagOptions<'a> {
    /// Where the bags of a vector of ids begin.
    pub offsets: Option<&'a DTensor>,
    /// How a bag is reduced.
    pub mode: EmbeddingBagMode,
    /// What every row is multiplied by before it is added.
    pub per_sample_weights: Option<&'a DTensor>,
    /// Whether the last offset is the number of ids, and no bag.
    pub include_last_offset: bool,
    /// An id that is left out; negative ones count from the end.
    pub padding_idx: Option<i64>,
    /// Rows with a larger norm are scaled down to it.
    pub max_norm: Option<f64>,
    /// The order of that norm.
    pub norm_type: f64,
    /// Whether the gradient of a row is divided by how often it was looked up.
    pub scale_grad_by_freq: bool,
}

impl Default for EmbeddingBagOptions<'_> {
    fn default() -> Self {
        EmbeddingBagOptions {
            offsets: None,
            mode: EmbeddingBagMode::Mean,
            per_sample_weights: None,
            include_last_offset: false,
            padding_idx: None,
            max_norm: None,
            norm_type: 2.0,
            scale_grad_by_freq: false,
        }
    }
}

impl EmbeddingBagOptions<'_> {
    /// The options of the lookup; padding is left out of the sums instead.
    fn embedding(&self) -> EmbeddingOptions {
        let EmbeddingBagOptions { max_norm, norm_type, scale_grad_by_freq, .. } = *self;
        EmbeddingOptions { padding_idx: None, max_norm, norm_type, scale_grad_by_freq }
    }
}

impl DTensor {
    /// Selects slices along a dimension by a vector of indices.
    ///
    /// If the dimension is sharded, the result is `Partial(Sum)`: every rank looks up the indices that it holds, and nothing
    /// moves until the result is reduced.
    ///
    /// # Errors
    /// An index outside of the dimension is an error on the ranks that hold it; the other ranks get it with their next collective.
    #[track_caller]
    pub fn index_select(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        if let Some(found) = self.as_vector(dim, |x| x.index_select(0, &index.atleast_1d()?)?.squeeze(Some(0))) {
            return found;
        }
        let at = self.resolve_dim("index_select", dim)?;
        let index = &index.atleast_1d()?;
        if index.ndim() != 1 {
            return Err(index.bad_dims("index_select", &[], "a vector of indices"));
        }
        lookup(IndexSelect { name: "index_select", dim: at }, self, index)
    }

    /// Selects slices along the first dimension by an index of any shape, as `x[index]` in PyTorch; negative indices count from
    /// the end.
    ///
    /// Communicates as [`index_select`](Self::index_select) does. See [`i`](Self::i) for ranges and several indices.
    #[track_caller]
    pub fn index(&self, index: &DTensor) -> Result<DTensor> {
        self.index_along(self.resolve_dim("index", 0)?, index)
    }

    /// Selects slices along dimension `dim` by an index of any shape, whose dimensions replace that one.
    #[track_caller]
    pub(in crate::ops) fn index_along(&self, dim: usize, index: &DTensor) -> Result<DTensor> {
        lookup(IndexSelect { name: "index", dim }, self, &wrapped("index", index, self.shape()[dim])?)
    }

    /// Looks up the rows of this weight `[vocabulary, features]` for ids of any shape.
    ///
    /// A weight sharded on the vocabulary gives a `Partial(Sum)` result, one sharded on the features a result sharded on its last
    /// dimension. Ids that are sharded too stay so where the weight is smaller than the result: the weight is gathered instead.
    ///
    /// # Errors
    /// An id that is not in the vocabulary is an error on the ranks that hold it; the other ranks get it with their next collective.
    #[track_caller]
    pub fn embedding(&self, ids: &DTensor) -> Result<DTensor> {
        if self.ndim() != 2 {
            return Err(self.bad_dims("embedding", &[], "a weight [vocabulary, features]"));
        }
        lookup(IndexSelect { name: "embedding", dim: 0 }, self, ids)
    }

    /// Looks up rows as [`embedding`](Self::embedding) does, with PyTorch's options.
    #[track_caller]
    pub fn embedding_with(&self, ids: &DTensor, options: EmbeddingOptions) -> Result<DTensor> {
        let mut rows = self.embedding(ids)?;
        if let Some(most) = options.max_norm {
            const EPS: f64 = 1e-7; // as in PyTorch
            // Rows are scaled before they are looked up, which does not change the gradient.
            let norms = rows.detach().norm(options.norm_type, &[-1], true)?;
            let factor = norms.add_scalar(EPS)?.reciprocal()?.mul_scalar(most)?;
            let scaled = rows.detach().mul(&norms.gt(most)?.where_cond(&factor, 1.0)?)?;
            rows = rows.straight_through(&scaled)?;
        }
        if let Some(padding) = options.padding_idx {
            let padding = if padding < 0 { padding + self.shape()[0] as i64 } else { padding };
            let counts = ids.ne(padding)?.unsqueeze(-1)?;
            rows = counts.where_cond(&rows, &rows.detach())?;
        }
        if options.scale_grad_by_freq {
            let flat = ids.reshape(&[ids.elem_count() as isize])?.to_dtype(DType::I64)?;
            let zeros = self.constant(&Tensor::zeros(self.shape()[0], DType::F64, &Device::Cpu)?)?;
            let ones = self.constant(&Tensor::ones(ids.elem_count(), DType::F64, &Device::Cpu)?)?;
            let share = zeros.index_add(0, &flat, &ones)?.reciprocal()?.to_dtype(self.dtype())?.index(ids)?;
            rows = rows.mul(&share.unsqueeze(-1)?)?.straight_through(&rows)?;
        }
        Ok(rows)
    }

    /// Looks up rows for bags of ids as [`embedding_bag`](Self::embedding_bag) does, with PyTorch's options.
    ///
    /// Offsets are gathered. Sums and means add rows to their bags, see [`index_add`](Self::index_add).
    ///
    /// # Errors
    /// If ids, offsets and weights do not fit.
    #[track_caller]
    pub fn embedding_bag_with(&self, ids: &DTensor, options: &EmbeddingBagOptions<'_>) -> Result<DTensor> {
        let EmbeddingBagOptions { offsets, mode, per_sample_weights, include_last_offset, padding_idx, .. } = *options;
        let wrong = |needed: &str| {
            let found =
                format!("ids {} and offsets {:?} in embedding_bag_with", ids.layout(), offsets.map(DTensor::shape));
            ErrorKind::shape(ids.shape()).error("bags", found, needed.to_string(), "correct the bags")
        };
        let count = ids.elem_count();
        let bags: Vec<usize> = match (ids.ndim(), offsets) {
            (2, None) => (0..ids.shape()[0]).flat_map(|bag| std::iter::repeat_n(bag, ids.shape()[1])).collect(),
            (1, Some(offsets)) => {
                let starts = match offsets.is_readable() {
                    false => vec![0; offsets.elem_count()],
                    true => offsets.full_tensor()?.to_dtype(DType::I64)?.to_vec1::<i64>()?,
                };
                let ends = starts.len() - usize::from(include_last_offset && !starts.is_empty());
                let bag = |i: usize| starts[..ends].iter().rposition(|&start| start as usize <= i);
                let bags: Option<Vec<usize>> = (0..count).map(bag).collect();
                bags.ok_or_else(|| wrong("offsets that begin at 0"))?
            }
            _ => return Err(wrong("a matrix of ids, or a vector with offsets")),
        };
        let number = match offsets {
            Some(offsets) => offsets.elem_count() - usize::from(include_last_offset && offsets.elem_count() > 0),
            None => ids.shape()[0],
        };
        let flat = ids.reshape(&[count as isize])?.to_dtype(DType::I64)?;
        let mut rows = self.embedding_with(&flat, options.embedding())?;
        if let Some(weights) = per_sample_weights {
            rows = rows.mul(&weights.reshape(&[count as isize, 1])?)?;
        }
        let padding = padding_idx.map(|p| if p < 0 { p + self.shape()[0] as i64 } else { p });
        let counts = padding.map(|p| flat.ne(p)).transpose()?;
        let index: Vec<i64> = bags.iter().map(|&bag| bag as i64).collect();
        let index = self.constant(&Tensor::from_vec(index, count, &Device::Cpu)?)?;
        let zeros = |width: usize| self.constant(&Tensor::zeros((number, width), self.dtype(), &Device::Cpu)?);
        let ones = self.constant(&Tensor::ones((count, 1), self.dtype(), &Device::Cpu)?)?;
        let ones = counts.as_ref().map_or(Ok(ones.clone()), |c| c.unsqueeze(-1)?.where_cond(&ones, 0.0))?;
        let width = self.shape()[1];
        if mode == EmbeddingBagMode::Max {
            let lowest = counts.map_or(Ok(rows.clone()), |c| c.unsqueeze(-1)?.where_cond(&rows, f64::NEG_INFINITY))?;
            let most = zeros(width)?.index_reduce(0, &index, &lowest, crate::ops::ScatterReduce::Amax, false)?;
            return most.eq(f64::NEG_INFINITY)?.where_cond(0.0, &most);
        }
        let sums = zeros(width)?.index_add(0, &index, &rows.mul(&ones)?)?;
        match mode {
            EmbeddingBagMode::Mean => sums.div(&zeros(1)?.index_add(0, &index, &ones)?.clamp_min(1.0)?),
            _ => Ok(sums),
        }
    }

    /// Looks up the rows of this weight for bags of ids, and reduces each bag to one row.
    ///
    /// `ids` is a matrix with one bag per row, or a vector with `offsets` at which bags begin. Communicates as
    /// [`embedding`](Self::embedding) and the reduction do.
    #[track_caller]
    pub fn embedding_bag(&self, ids: &DTensor, offsets: Option<&[usize]>, mode: EmbeddingBagMode) -> Result<DTensor> {
        let rows = self.embedding(ids)?;
        let Some(offsets) = offsets else {
            if ids.ndim() != 2 {
                return Err(ids.bad_dims("embedding_bag", &[], "a matrix of ids, or offsets"));
            }
            return mode.reduce(&rows, ids.shape()[1]);
        };
        let n = rows.shape()[0];
        let rising = offsets.is_sorted() && offsets.first() == Some(&0) && offsets.iter().all(|&o| o <= n);
        if ids.ndim() != 1 || !rising {
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

    /// Gathers elements along a dimension: `out[i][j] = self[index[i][j]][j]` for dimension 0 of a matrix.
    ///
    /// `index` has as many dimensions as this tensor, and is no longer in any but `dim`. If `dim` is sharded, the result is
    /// `Partial(Sum)`; this is an operator, not the collective `gather`.
    #[track_caller]
    pub fn gather(&self, dim: isize, index: &DTensor) -> Result<DTensor> {
        // An empty index may have any number of dimensions.
        if index.elem_count() == 0 && index.ndim() != self.ndim() {
            if !self.is_scalar_with(dim) {
                self.resolve_dim("gather", dim)?;
            }
            return self.constant(&Tensor::zeros(index.shape(), self.dtype(), &Device::Cpu)?);
        }
        if let Some(found) = self.as_vector(dim, |x| x.gather(0, &index.atleast_1d()?)) {
            return if index.ndim() == 0 { found?.squeeze(Some(0)) } else { found };
        }
        if index.ndim() == 0 && self.ndim() == 1 {
            return self.gather(dim, &index.unsqueeze(0)?)?.squeeze(Some(0));
        }
        let op = Gather { dim: self.resolve_dim("gather", dim)? };
        Ok(dispatch(&op, &[self, index], Location::caller())?.swap_remove(0))
    }

    /// Encodes class ids as one-hot vectors along a new last dimension of size `classes`, as i64.
    ///
    /// Local: keeps the layout of the ids.
    ///
    /// # Errors
    /// An id outside of `0..classes` is an error on the ranks that hold it; the other ranks get it with their next collective.
    #[track_caller]
    pub fn one_hot(&self, classes: usize) -> Result<DTensor> {
        if self.dtype().is_float() {
            return Err(not_integer(&format!("one_hot of {}", self.layout()), self.dtype()));
        }
        let replicated = vec![crate::placement::Placement::Replicate; self.placements().len()];
        let all = DTensor::arange(0.0..classes as f64, DType::I64, self.device_mesh(), replicated)?;
        let ids = WrapIndices { name: "one_hot", n: classes, from_back: false };
        let ids = dispatch(&ids, &[self], Location::caller())?.swap_remove(0);
        ids.unsqueeze(-1)?.eq(&all)?.to_dtype(DType::I64)
    }

    /// Returns for each element the index of the first boundary that is not below it, as i64; for NaN the number of boundaries.
    ///
    /// `boundaries` is an ascending vector and is gathered if it is sharded; this tensor keeps its layout.
    #[track_caller]
    pub fn bucketize(&self, boundaries: &DTensor) -> Result<DTensor> {
        if boundaries.ndim() != 1 {
            return Err(boundaries.bad_dims("bucketize", &[], "a vector of ascending boundaries"));
        }
        Ok(dispatch(&Bucketize, &[self, boundaries], Location::caller())?.swap_remove(0))
    }

    /// Returns for each of `values` the index at which it would be inserted into the ascending last dimension of this tensor, as i64:
    /// before equal elements, or after them if `right`. Other dimensions are those of the values, unless this tensor is a vector.
    ///
    /// A vector is gathered if it is sharded, and the values stay; see [`bucketize`](Self::bucketize). With more dimensions all pairs
    /// of elements and values are compared, and the counts of sharded elements are partial sums.
    ///
    /// # Errors
    /// If the dimensions before the last differ.
    #[track_caller]
    pub fn searchsorted(&self, values: &DTensor, right: bool) -> Result<DTensor> {
        let (own, other) = (self.ndim(), values.ndim());
        if own == 1 && !right {
            return values.bucketize(self);
        }
        let fits = own == 1 || own == other && self.shape()[..own - 1] == values.shape()[..own - 1];
        if own == 0 || !fits {
            let found = format!("values {} in searchsorted of {}", values.layout(), self.layout());
            let needed = "a vector, or equal dimensions before the last";
            return Err(ErrorKind::shape(values.shape()).error("values", found, needed, "reshape the operands"));
        }
        let sorted = if own == 1 { self.clone() } else { self.unsqueeze(-2)? };
        let values = values.unsqueeze(-1)?;
        // NaN comes after all numbers.
        let before = if right { sorted.gt(&values)? } else { sorted.ge(&values)? }.logical_not()?;
        before.sum(&[-1], false)
    }
}

impl EmbeddingBagMode {
    /// Reduces `[bags, size, features]` to one row per bag; empty bags give zeros.
    #[track_caller]
    fn reduce(self, rows: &DTensor, size: usize) -> Result<DTensor> {
        match self {
            _ if size == 0 => rows.sum(&[1], false),
            EmbeddingBagMode::Sum => rows.sum(&[1], false),
            EmbeddingBagMode::Mean => rows.mean(&[1], false),
            EmbeddingBagMode::Max => rows.amax(&[1], false),
        }
    }
}

#[track_caller]
fn lookup(op: IndexSelect, x: &DTensor, index: &DTensor) -> Result<DTensor> {
    Ok(dispatch(&op, &[x, index], Location::caller())?.swap_remove(0))
}

/// Adds that a `Partial` first input passes: the same elements are selected from every term.
fn passing_first(mut signature: Signature, others: usize) -> Signature {
    for op in ReduceOp::ALL {
        let inputs = std::iter::once(Some(op)).chain((0..others).map(|_| None));
        signature = signature.allow_partial(inputs, op);
    }
    signature
}

impl Op for IndexSelect {
    fn name(&self) -> &'static str {
        self.name
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, index) = (&inputs[0], &inputs[1]);
        if index.dtype.is_float() {
            return Err(not_integer(self.name, index.dtype));
        }
        let ndim = x.shape.len();
        let of_index: Vec<Option<usize>> = (0..index.shape.len()).map(|d| Some(ndim + d)).collect();
        let of_x: Vec<Option<usize>> = (0..ndim).map(Some).collect();
        let sharding = (0..ndim + index.shape.len())
            .map(|d| if d == self.dim { DimSharding::Reduces(ReduceOp::Sum) } else { DimSharding::Free });
        let output = [&of_x[..self.dim], &of_index, &of_x[self.dim + 1..]].concat();
        let shape = [&x.shape[..self.dim], &index.shape, &x.shape[self.dim + 1..]].concat();
        let signature = passing_first(Signature::new(sharding, [of_x, of_index], [output]), 1);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: x.dtype }] })
    }

    /// Ids are small, but the result is not. If both inputs are sharded along an axis, the default rule would move the ids and
    /// shard the result like the table; here the ids stay and the table is gathered, unless it is larger than the result.
    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let (table, ids) = (inputs[0], inputs[1]);
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        let sharded = |layout: &Layout, axis: usize| layout.placements()[axis].is_shard(None);
        let mut axes: Vec<usize> = (0..table.mesh().ndim()).filter(|&a| sharded(table, a) && sharded(ids, a)).collect();
        if count(table.shape()) > count(&plan.outputs[0].shape) {
            axes.clear();
        }
        plan.signature.decide(&[&table.without_axes(&axes)?, ids], elem, &[&plan.outputs[0].shape])
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, index) = (&inputs[0], &inputs[1]);
        check_indices(self.name, index, context.input_shape(0)[self.dim])?;
        let held = IndexRange::new(context.input_runs(0, self.dim).iter());
        Ok(vec![index_select_by(x, self.dim, index, &held)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let index = saved.input(1);
            let (dim, ndim) = (op.dim as isize, index.ndim() as isize);
            let rows = if ndim == 0 { gradient.unsqueeze(dim)? } else { gradient.flatten(dim, dim + ndim - 1)? };
            let positions = index.reshape(&[index.elem_count() as isize])?;
            Ok(vec![Some(scatter_add_slices(saved.layout(0), op.dim, &positions, &rows, SumsFrom::Zero)?), None])
        })
    }
}

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, index) = (&inputs[0], &inputs[1]);
        if index.dtype.is_float() {
            return Err(not_integer("gather", index.dtype));
        }
        let ndim = x.shape.len();
        let longer = |d: usize| d != self.dim && index.shape[d] > x.shape[d];
        if index.shape.len() != ndim || (0..ndim).any(longer) {
            return Err(ErrorKind::shape(&index.shape).error(
                "index",
                format!("shape {:?} in gather of shape {:?} along dimension {}", index.shape, x.shape, self.dim),
                "an index with as many dimensions, no longer than the tensor except along that dimension",
                "reshape or expand the index",
            ));
        }
        // A dimension of which the index uses only the beginning cannot be sharded: local shards would not line up.
        let aligned = |d: usize| (d != self.dim && index.shape[d] == x.shape[d]).then_some(d);
        let of_x = (0..ndim).map(|d| if d == self.dim { Some(d) } else { aligned(d) }).collect();
        let of_index: Vec<Option<usize>> =
            (0..ndim).map(|d| if d == self.dim { Some(ndim) } else { aligned(d) }).collect();
        let sharding =
            (0..=ndim).map(|d| if d == self.dim { DimSharding::Reduces(ReduceOp::Sum) } else { DimSharding::Free });
        let signature = passing_first(Signature::new(sharding, [of_x, of_index.clone()], [of_index]), 1);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: index.shape.clone(), dtype: x.dtype }] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, index) = (&inputs[0], &inputs[1]);
        check_indices("gather", index, context.input_shape(0)[self.dim])?;
        let held = IndexRange::new(context.input_runs(0, self.dim).iter());
        Ok(vec![gather(x, self.dim, index, &held)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let index = saved.input(1);
            Ok(vec![Some(scatter_add_elements(saved.layout(0), op.dim, &index, gradient, SumsFrom::Zero)?), None])
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
        let signature =
            Signature::new(dims.iter().map(|_| DimSharding::Free), [dims.clone(), vec![None]], [dims.clone()]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape: x.shape.clone(), dtype: DType::I64 }] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![bucketize(&inputs[0], &inputs[1])?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "index_select", samples: selects, apply: |x| Ok(vec![x[0].index_select(0, &x[1])?]) },
    OpEntry { name: "index", samples: selects, apply: |x| Ok(vec![x[0].index(&x[1])?]) },
    OpEntry { name: "embedding", samples: embeddings, apply: |x| Ok(vec![x[0].embedding(&x[1])?]) },
    OpEntry {
        name: "embedding_bag",
        samples: embeddings,
        apply: |x| {
            let vector = x[1].flatten(0, -1)?;
            let n = vector.elem_count();
            let bags = [EmbeddingBagMode::Sum, EmbeddingBagMode::Mean, EmbeddingBagMode::Max].into_iter();
            let mut all = bags.map(|m| x[0].embedding_bag(&x[1], None, m)).collect::<Result<Vec<_>>>()?;
            all.push(x[0].embedding_bag(&vector, Some(&[0, n / 2, n]), EmbeddingBagMode::Mean)?);
            Ok(all)
        },
    },
    OpEntry { name: "gather", samples: gathers, apply: |x| Ok(vec![x[0].gather(0, &x[1])?]) },
    OpEntry { name: "one_hot", samples: ids, apply: |x| Ok(vec![x[0].one_hot(4)?]) },
    OpEntry { name: "bucketize", samples: buckets, apply: |x| Ok(vec![x[0].bucketize(&x[1].mul_scalar(0.0)?)?]) },
];

pub(in crate::ops) const COMPOSED_OPS: &[OpEntry] = &[
    OpEntry {
        name: "embedding_with",
        samples: embeddings,
        apply: |x| {
            let options = EmbeddingOptions { padding_idx: Some(-1), max_norm: Some(0.5), ..Default::default() };
            let scaled = EmbeddingOptions { scale_grad_by_freq: true, ..Default::default() };
            Ok(vec![x[0].embedding_with(&x[1], options)?, x[0].embedding_with(&x[1], scaled)?])
        },
    },
    OpEntry {
        name: "embedding_bag_with",
        samples: embeddings,
        apply: |x| {
            let modes = [EmbeddingBagMode::Sum, EmbeddingBagMode::Mean, EmbeddingBagMode::Max].into_iter();
            let options = |mode| EmbeddingBagOptions { mode, padding_idx: Some(0), ..Default::default() };
            modes.map(|mode| x[0].embedding_bag_with(&x[1], &options(mode))).collect()
        },
    },
    OpEntry {
        name: "searchsorted",
        samples: buckets,
        apply: |x| {
            let sorted = x[1].mul_scalar(0.0)?;
            Ok(vec![sorted.searchsorted(&x[0], false)?, sorted.searchsorted(&x[0], true)?])
        },
    },
];

fn selects() -> Vec<Vec<SampleInput>> {
    vec![
        vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::index(&[4], 5)],
        vec![SampleInput::new(&[2, 2, 2], DType::I64), SampleInput::index(&[1], 2)],
        vec![SampleInput::new(&[3, 2], DType::I64), SampleInput::index(&[0], 3)],
    ]
}

fn embeddings() -> Vec<Vec<SampleInput>> {
    vec![
        vec![SampleInput::new(&[7, 4], DType::F64), SampleInput::index(&[3, 5], 7)],
        vec![SampleInput::new(&[2, 1], DType::F64), SampleInput::index(&[1, 2], 2)],
    ]
}

fn gathers() -> Vec<Vec<SampleInput>> {
    vec![
        vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::index(&[2, 3], 5)],
        vec![SampleInput::new(&[4, 4], DType::I64), SampleInput::index(&[6, 2], 4)],
    ]
}

fn ids() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::index(&[5], 4)], vec![SampleInput::index(&[2, 3], 4)]]
}

fn buckets() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::new(&[4], DType::F64)]]
}
