//! Sorting and selection: `sort`, `topk`, `max_dim`, `argmax` and their kin. If the dimension is sharded, ranks exchange only
//! the best candidates of their shards, where that is less than the elements.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::reductions::order_statistics::counted_bytes;
use crate::ops::{OpEntry, SampleInput};
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, is_recording};
use shardwise_kernels::{IndexRange, SortOrder, gather, top_k};

/// The first `k` elements along a dimension in some order, and their indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TopK {
    name: &'static str,
    dim: usize,
    k: usize,
    order: SortOrder,
    stage: TopKStage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum TopKStage {
    /// Over a dimension that every rank holds whole.
    Whole,
    /// Over the shard of each rank.
    Candidates,
    /// Over the gathered candidates; the second input is their indices.
    Merge,
}

impl DTensor {
    /// Sorts along a dimension; returns the sorted elements and their indices (i64). Stable; NaN counts as the largest.
    ///
    /// If the dimension is sharded, another dimension is sharded instead (all-to-all) or the tensor is gathered, whichever is
    /// cheaper. A long line without a gradient stays sharded: ranks agree by counting on the elements that separate their shards of the
    /// result, and send each element once.
    #[track_caller]
    pub fn sort(&self, dim: isize, descending: bool) -> Result<(DTensor, DTensor)> {
        if let Some(sorted) = self.as_vector(dim, |x| flat_pair(x.sort(0, descending)?)) {
            return sorted;
        }
        let dim = self.resolve_dim("sort", dim)?;
        let order = if descending { SortOrder::Descending } else { SortOrder::Ascending };
        if let Some(sorted) = self.sorted_by_exchange(dim, order)? {
            return Ok(sorted);
        }
        let op = TopK { name: "sort", dim, k: self.shape()[dim], order, stage: TopKStage::Whole };
        self.with_gradient(dim, pair(dispatch(&op, &[self], Location::caller())?))
    }

    /// Returns the indices (i64) that sort the elements along a dimension.
    ///
    /// Communicates as [`sort`](Self::sort) does.
    #[track_caller]
    pub fn argsort(&self, dim: isize, descending: bool) -> Result<DTensor> {
        Ok(self.sort(dim, descending)?.1)
    }

    /// Returns the `k` largest (or smallest) elements along a dimension in order, and their indices (i64).
    ///
    /// If the dimension is sharded, ranks exchange their `k` best candidates only, unless `k` is so large that moving the elements
    /// is cheaper.
    ///
    /// # Errors
    /// If `k` exceeds the size of the dimension.
    #[track_caller]
    pub fn topk(&self, k: usize, dim: isize, largest: bool) -> Result<(DTensor, DTensor)> {
        if let Some(found) = self.as_vector(dim, |x| flat_pair(x.topk(k, 0, largest)?)) {
            return found;
        }
        self.top_k("topk", dim, k, if largest { SortOrder::Descending } else { SortOrder::Ascending })
    }

    /// Returns the `k`-th smallest element along a dimension (`k` counts from 1), and its index (i64).
    ///
    /// Communicates as [`topk`](Self::topk) does, unless counting is less: in a long sharded dimension ranks find the element by adding up
    /// counts, one all-reduce per byte of an element.
    #[track_caller]
    pub fn kthvalue(&self, k: usize, dim: isize, keepdim: bool) -> Result<(DTensor, DTensor)> {
        if let Some(found) = self.as_vector(dim, |x| x.kthvalue(k, 0, false)) {
            return found;
        }
        let at = self.resolve_dim("kthvalue", dim)? as isize;
        if k == 0 {
            return Err(self.bad_dims("kthvalue", &[0], "k of at least 1"));
        }
        if self.finds_by_counting(at as usize, k) {
            let mut shape = self.shape().to_vec();
            shape[at as usize] = 1;
            let places = self.constant(&Tensor::full(k as i64 - 1, shape, &Device::Cpu)?)?;
            let indices = self.at_places("kthvalue", at as usize, SortOrder::Ascending, &places)?.indices;
            let values = self.gather(at, &indices)?;
            let line = |t: DTensor| if keepdim { Ok(t) } else { t.squeeze(Some(at)) };
            return Ok((line(values)?, line(indices)?));
        }
        let (values, indices) = self.top_k("kthvalue", dim, k, SortOrder::Ascending)?;
        let last = |t: &DTensor| match keepdim {
            true => t.narrow(at, k - 1, 1),
            false => t.select(at, k as isize - 1),
        };
        Ok((last(&values)?, last(&indices)?))
    }

    /// Returns the maximum along a dimension and its first index (i64); NaN if there is one. PyTorch's `max(dim)`.
    ///
    /// If the dimension is sharded, one candidate per rank is exchanged.
    #[doc(alias = "max")]
    #[track_caller]
    pub fn max_dim(&self, dim: isize, keepdim: bool) -> Result<(DTensor, DTensor)> {
        self.extreme("max_dim", dim, keepdim, SortOrder::Descending)
    }

    /// Returns the minimum along a dimension and its first index (i64); NaN if there is one. PyTorch's `min(dim)`.
    ///
    /// If the dimension is sharded, one candidate per rank is exchanged.
    #[doc(alias = "min")]
    #[track_caller]
    pub fn min_dim(&self, dim: isize, keepdim: bool) -> Result<(DTensor, DTensor)> {
        self.extreme("min_dim", dim, keepdim, SortOrder::Smallest)
    }

    /// Returns the first index (i64) of the maximum along a dimension; `None` indexes the flattened tensor.
    ///
    /// If the dimension is sharded, one candidate per rank is exchanged.
    #[track_caller]
    pub fn argmax(&self, dim: Option<isize>, keepdim: bool) -> Result<DTensor> {
        self.arg("argmax", dim, keepdim, SortOrder::Descending)
    }

    /// Returns the first index (i64) of the minimum along a dimension; `None` indexes the flattened tensor.
    ///
    /// If the dimension is sharded, one candidate per rank is exchanged.
    #[track_caller]
    pub fn argmin(&self, dim: Option<isize>, keepdim: bool) -> Result<DTensor> {
        self.arg("argmin", dim, keepdim, SortOrder::Smallest)
    }

    /// Returns the minimum and the maximum along a dimension, or of all elements.
    ///
    /// If the dimension is sharded, the results are `Partial(Min)` and `Partial(Max)`.
    #[track_caller]
    pub fn aminmax(&self, dim: Option<isize>, keepdim: bool) -> Result<(DTensor, DTensor)> {
        let dims: Vec<isize> = dim.into_iter().collect();
        Ok((self.amin(&dims, keepdim)?, self.amax(&dims, keepdim)?))
    }

    #[track_caller]
    fn arg(&self, name: &'static str, dim: Option<isize>, keepdim: bool, order: SortOrder) -> Result<DTensor> {
        if let Some(dim) = dim {
            return Ok(self.extreme(name, dim, keepdim, order)?.1);
        }
        // From the last dimension to the first: among equal rows the first has the first of equal elements.
        let mut values = self.clone();
        let mut flat: Option<DTensor> = None;
        let mut below = 1;
        for at in (0..self.ndim()).rev() {
            let (best, index) = values.top_k(name, at as isize, 1, order)?;
            let inner = flat.map(|f| f.gather(at as isize, &index)).transpose()?;
            let outer = index.mul_scalar(below as f64)?;
            flat = Some(inner.map_or(Ok(outer.clone()), |inner| inner.add(&outer))?);
            below *= self.shape()[at];
            values = best;
        }
        match flat {
            Some(flat) if keepdim => Ok(flat),
            Some(flat) => flat.squeeze(None),
            None => self.zeros_like()?.to_dtype(DType::I64),
        }
    }

    #[track_caller]
    fn extreme(&self, name: &'static str, dim: isize, keepdim: bool, order: SortOrder) -> Result<(DTensor, DTensor)> {
        if let Some(found) = self.as_vector(dim, |x| x.extreme(name, 0, false, order)) {
            return found;
        }
        let at = self.resolve_dim(name, dim)? as isize;
        let (values, indices) = self.top_k(name, dim, 1, order)?;
        if keepdim {
            return Ok((values, indices));
        }
        Ok((values.squeeze(Some(at))?, indices.squeeze(Some(at))?))
    }

    /// Whether the `k`-th element of a sharded dimension is found by counting: if that is fewer bytes than both the elements and the best
    /// `k` candidates of every shard.
    fn finds_by_counting(&self, dim: usize, k: usize) -> bool {
        k <= self.shape()[dim]
            && k * (self.dtype().size_in_bytes() + 8) > counted_bytes(self.dtype(), 1)
            && self.counts_are_fewer(dim, 1)
    }

    #[track_caller]
    fn top_k(&self, name: &'static str, dim: isize, k: usize, order: SortOrder) -> Result<(DTensor, DTensor)> {
        let site = Location::caller();
        let dim = self.resolve_dim(name, dim)?;
        if k > self.shape()[dim] {
            let found = format!("{k} along dimension {dim} in {name} of {}", self.layout());
            return Err(ErrorKind::Argument.error(
                "number of elements",
                found,
                format!("at most {}, the size of the dimension", self.shape()[dim]),
                "use a smaller k, or another dimension",
            ));
        }
        let whole = TopK { name, dim, k, order, stage: TopKStage::Whole };
        // Candidates are exchanged together with their indices: worth it if that is fewer bytes than the elements.
        let parts: usize = self.layout().shard_order(dim).iter().map(|&a| self.layout().mesh().shape()[a]).product();
        let (own, index) = (self.dtype().size_in_bytes(), DType::I64.size_in_bytes());
        if parts == 1 || k * parts * (own + index) >= self.shape()[dim] * own {
            return self.with_gradient(dim, pair(dispatch(&whole, &[self], site)?));
        }
        let (values, indices) = pair(dispatch(&TopK { stage: TopKStage::Candidates, ..whole }, &[self], site)?);
        self.with_gradient(dim, pair(dispatch(&TopK { stage: TopKStage::Merge, ..whole }, &[&values, &indices], site)?))
    }

    /// Returns values and indices; if a gradient is recorded, the values are looked up again with `gather`, which has one.
    #[track_caller]
    fn with_gradient(&self, dim: usize, (values, indices): (DTensor, DTensor)) -> Result<(DTensor, DTensor)> {
        if !self.has_gradient() || !is_recording() {
            return Ok((values, indices));
        }
        Ok((self.gather(dim as isize, &indices)?, indices))
    }
}

/// Two vectors of at most one element as scalars.
#[track_caller]
fn flat_pair((values, indices): (DTensor, DTensor)) -> Result<(DTensor, DTensor)> {
    Ok((values.squeeze(Some(0))?, indices.squeeze(Some(0))?))
}

fn pair(mut outputs: Vec<DTensor>) -> (DTensor, DTensor) {
    let second = outputs.pop().expect("two outputs");
    (outputs.pop().expect("two outputs"), second)
}

impl DTensor {
    /// The elements of every shard of a dimension in order, with their indices.
    #[track_caller]
    pub(in crate::ops) fn sorted_shards(
        &self,
        name: &'static str,
        dim: usize,
        order: SortOrder,
    ) -> Result<(DTensor, DTensor)> {
        let op = TopK { name, dim, k: self.shape()[dim], order, stage: TopKStage::Candidates };
        Ok(pair(dispatch(&op, &[self], Location::caller())?))
    }
}

impl TopK {
    /// How many candidates a rank that holds `n` elements has.
    fn count(&self, n: usize) -> usize {
        self.k.min(n)
    }
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        self.name
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let dims: Vec<Option<usize>> = (0..x.shape.len()).map(Some).collect();
        let sharding = (0..x.shape.len()).map(|d| if d == self.dim { DimSharding::Never } else { DimSharding::Free });
        let signature = Signature::new(sharding, inputs.iter().map(|_| dims.clone()), [dims.clone(), dims.clone()]);
        let mut shape = x.shape.clone();
        shape[self.dim] = self.k;
        let outputs =
            vec![TensorMeta { shape: shape.clone(), dtype: x.dtype }, TensorMeta { shape, dtype: DType::I64 }];
        Ok(OpPlan { signature, outputs })
    }

    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        if self.stage != TopKStage::Candidates {
            let shape = plan.outputs[0].shape.as_slice();
            return plan.signature.decide(inputs, elem, &[shape, shape]);
        }
        let from = inputs[0].reduced().unstrided(&|dim| dim == self.dim)?;
        let axes = from.shard_order(self.dim).to_vec();
        let held = crate::layout::coordinates(from.mesh(), &axes).map(|c| self.count(from.owned(self.dim, &c).len()));
        let to = from.resized(self.dim, held.sum(), &|runs| self.count(runs.len()))?;
        Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: vec![to.clone(), to] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let x = &inputs[0];
        let k = self.count(x.dims()[self.dim]);
        // The candidates of a merge are numbered by their places in the gathered tensor, from 0.
        let first = match self.stage {
            TopKStage::Merge => 0,
            _ => context.input_runs(0, self.dim).first().unwrap_or(0),
        };
        let (values, indices) = top_k(x, self.dim, k, self.order, first as i64)?;
        if self.stage == TopKStage::Merge {
            let held = IndexRange::all(x.dims()[self.dim]);
            return Ok(vec![values, gather(&inputs[1], self.dim, &indices, &held)?]);
        }
        Ok(vec![values, indices])
    }

    /// Values that need a gradient are looked up by their indices, see `with_gradient`.
    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

macro_rules! entry {
    ($name:literal, $samples:ident, |$x:ident| $($call:expr),*) => {
        OpEntry { name: $name, samples: $samples, apply: |$x| {
            let mut all = Vec::new();
            $(let (a, b) = $call; all.extend([a, b]);)*
            Ok(all)
        } }
    };
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    entry!("sort", samples, |x| x[0].sort(0, false)?, x[0].sort(-1, true)?),
    OpEntry { name: "argsort", samples, apply: |x| Ok(vec![x[0].argsort(0, true)?]) },
    entry!("topk", samples, |x| x[0].topk(1, 0, true)?, x[0].topk(2, 1, false)?),
    entry!("kthvalue", samples, |x| x[0].kthvalue(2, 1, false)?),
    entry!("max_dim", samples, |x| x[0].max_dim(0, false)?, x[0].max_dim(1, true)?),
    entry!("min_dim", samples, |x| x[0].min_dim(0, true)?, x[0].min_dim(1, false)?),
    OpEntry { name: "argmax", samples, apply: |x| Ok(vec![x[0].argmax(Some(0), false)?, x[0].argmax(None, false)?]) },
    OpEntry { name: "argmin", samples, apply: |x| Ok(vec![x[0].argmin(Some(1), true)?, x[0].argmin(None, true)?]) },
    entry!("aminmax", samples, |x| x[0].aminmax(Some(0), false)?, x[0].aminmax(None, false)?),
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[7, 2], &[1, 8], &[3, 5, 2]];
    let mut all: Vec<Vec<SampleInput>> = shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect();
    // few different values: ties
    all.push(vec![SampleInput::index(&[9, 4], 2)]);
    all.push(vec![SampleInput::new(&[9, 2], DType::F64)]);
    all
}
