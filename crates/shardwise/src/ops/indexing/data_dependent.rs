//! Results whose size depends on the elements: distinct elements, counts, histograms. Ranks exchange counts, and results are
//! sharded by what each rank found.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::shapes::arrange::signed;
use crate::ops::{OpEntry, SampleInput};
use crate::placement::Placement;
use crate::rule::Signature;
use crate::tensor::{DTensor, check_whole};
use shardwise_kernels::{SortOrder, concat};

/// Distinct elements or slices, as [`unique`](DTensor::unique) returns them.
#[derive(Clone)]
pub struct Unique {
    /// The distinct elements.
    pub values: DTensor,
    /// Per element of the tensor the place of its value among the distinct ones, i64.
    pub inverse: DTensor,
    /// How often each occurs, i64.
    pub counts: DTensor,
}

impl DTensor {
    /// Returns the distinct elements in ascending order, or the distinct slices of a dimension in the order of their elements, with
    /// the place of every element among them and how often each occurs.
    ///
    /// Collective: every rank of the mesh must call it. Of sharded elements every rank sends the distinct ones of its shard, not all of them,
    /// and counts are added up; the result is sharded like the elements. Slices, and elements among which are NaN, communicate as
    /// [`sort`](Self::sort) does.
    #[track_caller]
    pub fn unique(&self, dim: Option<isize>) -> Result<Unique> {
        let Some(dim) = dim else {
            let flat = self.detach().reshape(&[self.elem_count() as isize])?;
            if let Some(mut found) = flat.unique_of_shards()? {
                found.inverse = found.inverse.reshape(&signed(self.shape()))?;
                return Ok(found);
            }
            let (sorted, order) = flat.sort(0, false)?;
            let mut found = sorted.runs()?;
            found.inverse = order.zeros_like()?.scatter(0, &order, &found.inverse)?.reshape(&signed(self.shape()))?;
            return Ok(found);
        };
        let slices = self.slices("unique", dim)?;
        // Sorted by the last element first: sorting is stable.
        let mut order = slices.row_numbers()?;
        for column in (0..slices.shape()[1]).rev() {
            let (_, next) = slices.select(1, column as isize)?.index(&order)?.sort(0, false)?;
            order = order.index(&next)?;
        }
        let mut found = slices.index(&order)?.runs()?;
        found.inverse = order.zeros_like()?.scatter(0, &order, &found.inverse)?;
        self.in_own_shape(found, dim)
    }

    /// The distinct elements of a sharded vector, from those of every shard. `None` if it is not sharded, or has NaN, which differ from each
    /// other and are not found by value.
    #[track_caller]
    fn unique_of_shards(&self) -> Result<Option<Unique>> {
        let site = Location::caller();
        let settled = self.layout().reduced().unstrided(&|_| true)?;
        if settled.shard_order(0).is_empty() || self.elem_count() == 0 {
            return Ok(None);
        }
        let x = record_implicit_operator("unique", || self.to_layout_at(&settled, site))?;
        let searches_nan = x.dtype().is_float() && x.is_readable();
        if searches_nan && x.isnan()?.any(&[], false)?.item::<u8>()? != 0 {
            return Ok(None);
        }
        let (sorted, _) = x.sorted_shards("unique", 0, SortOrder::Ascending)?;
        let begins = dispatch(&RunsOfShards, &[&sorted], site)?.swap_remove(0);
        let distinct = sorted.masked_select(&begins)?;
        let everywhere = distinct.layout().without_axes(distinct.layout().shard_order(0))?;
        let distinct = record_implicit_operator("unique", || distinct.to_layout_at(&everywhere, site))?;
        let values = distinct.sort(0, false)?.0.runs()?.values;
        let inverse = x.bucketize(&values)?;
        let counts = inverse.bincount(None, values.elem_count())?;
        let plain = |axis: usize| match settled.shard_order(0).contains(&axis) {
            true => Placement::Shard(0),
            false => Placement::Replicate,
        };
        let placements: Vec<Placement> = (0..settled.placements().len()).map(plain).collect();
        let to = Layout::new(settled.mesh(), values.shape(), placements)?;
        let moved = |t: &DTensor| record_implicit_operator("unique", || t.to_layout_at(&to, site));
        Ok(Some(Unique { values: moved(&values)?, inverse, counts: moved(&counts)? }))
    }

    /// Returns the elements, or the slices of a dimension, that differ from the one before, with the run of every element and the
    /// length of every run.
    ///
    /// Collective: every rank of the mesh must call it. Ranks exchange the element before their shard and how many runs begin in it.
    #[track_caller]
    pub fn unique_consecutive(&self, dim: Option<isize>) -> Result<Unique> {
        let Some(dim) = dim else {
            let mut found = self.detach().reshape(&[self.elem_count() as isize])?.runs()?;
            found.inverse = found.inverse.reshape(&signed(self.shape()))?;
            return Ok(found);
        };
        let found = self.slices("unique_consecutive", dim)?.runs()?;
        self.in_own_shape(found, dim)
    }

    /// The slices of a dimension as rows of a matrix.
    #[track_caller]
    fn slices(&self, name: &'static str, dim: isize) -> Result<DTensor> {
        let at = self.resolve_dim(name, dim)?;
        let n = self.shape()[at];
        let width = self.elem_count() / n.max(1);
        self.detach().movedim(at as isize, 0)?.reshape(&[n as isize, width as isize])
    }

    /// Rows that were slices of a dimension of this tensor, in its shape.
    #[track_caller]
    fn in_own_shape(&self, found: Unique, dim: isize) -> Result<Unique> {
        let at = self.resolve_dim("unique", dim)?;
        let mut shape = vec![found.values.shape()[0]];
        shape.extend(self.shape().iter().enumerate().filter(|(d, _)| *d != at).map(|(_, &n)| n));
        let values = found.values.reshape(&signed(&shape))?.movedim(0, at as isize)?;
        Ok(Unique { values, ..found })
    }

    fn row_numbers(&self) -> Result<DTensor> {
        let n = self.shape()[0];
        self.constant(&Tensor::from_vec((0..n as i64).collect(), n, &Device::Cpu)?)
    }

    /// The runs of equal elements of a vector, or of equal rows of a matrix.
    #[track_caller]
    fn runs(&self) -> Result<Unique> {
        let n = self.shape()[0];
        if n == 0 {
            let none = self.row_numbers()?;
            return Ok(Unique { values: self.clone(), inverse: none.clone(), counts: none });
        }
        let (low, high) = (self.narrow(0, 0, n - 1)?, self.narrow(0, 1, n - 1)?);
        let differs = high.ne(&low)?;
        let differs = if self.ndim() > 1 { differs.any(&[1], false)? } else { differs };
        let begins = differs.pad(&[(1, 0)], 1)?;
        let inverse = begins.to_dtype(DType::I64)?.cumsum(0)?.add_scalar(-1)?;
        let starts = begins.nonzero()?.squeeze(Some(1))?;
        let values = self.index(&starts)?;
        let end = starts.full_scalar(n as i64)?.unsqueeze(0)?;
        let counts = starts.diff(1, 0, None, Some(&end))?;
        Ok(Unique { values, inverse, counts })
    }

    /// Returns the indices of nonzero elements as [`nonzero`](Self::nonzero) does, truncated or filled up with `fill` to `size` rows.
    #[track_caller]
    pub fn nonzero_static(&self, size: usize, fill: i64) -> Result<DTensor> {
        let found = self.nonzero()?;
        let kept = found.narrow(0, 0, size.min(found.shape()[0]))?;
        kept.pad(&[(0, 0), (0, size - kept.shape()[0])], fill)
    }

    /// Counts how often each number from 0 on occurs in a vector of integers, as i64, or adds up the weights of each, as f64 (f32 for
    /// weights of that type). The result has at least `min_length` elements.
    ///
    /// Collective: ranks agree on the largest number, and counts are partial sums.
    #[track_caller]
    pub fn bincount(&self, weights: Option<&DTensor>, min_length: usize) -> Result<DTensor> {
        if self.ndim() != 1 || self.dtype().is_float() || weights.is_some_and(|w| w.shape() != self.shape()) {
            let found = format!("{} {} in bincount", self.dtype().as_str(), self.layout());
            let needed = "a vector of integers, and as many weights";
            return Err(ErrorKind::shape(self.shape()).error("operands", found, needed, "correct the operands"));
        }
        let most = match self.elem_count() > 0 && self.is_readable() {
            false => 0,
            true => self.amax(&[], false)?.to_dtype(DType::I64)?.item::<i64>()?.max(0) as usize + 1,
        };
        let size = most.max(min_length);
        check_whole(&[size], DType::F64)?;
        let weights = match weights {
            None => self.ones_like()?.to_dtype(DType::I64)?,
            Some(w) if w.dtype() == DType::F32 => w.clone(),
            Some(w) => w.to_dtype(DType::F64)?,
        };
        let zeros = self.constant(&Tensor::zeros(size, weights.dtype(), &Device::Cpu)?)?;
        if size == 0 { Ok(zeros) } else { zeros.index_add(0, &self.to_dtype(DType::I64)?, &weights) }
    }

    /// Counts elements in `bins` intervals of equal length from `min` to `max`, or of the range of the elements if both are equal.
    /// Elements outside are not counted; the result has the type of the tensor.
    ///
    /// Collective: counts are partial sums. The range of sharded elements takes one all-reduce.
    #[track_caller]
    pub fn histc(&self, bins: usize, min: f64, max: f64) -> Result<DTensor> {
        let (low, high) = self.range_of("histc", bins, min, max, 1.0)?;
        let flat = self.detach().reshape(&[self.elem_count() as isize])?;
        let at = flat.sub(low)?.mul_scalar(bins as f64)?.div_scalar(high - low)?.floor()?;
        let at = flat.eq(high)?.where_cond(bins as f64 - 1.0, &at.clamp(None, Some(bins as f64 - 1.0))?)?;
        let inside = flat.ge(low)?.logical_and(&flat.le(high)?)?;
        flat.counted(&inside.where_cond(&at, 0.0)?, &inside.to_dtype(self.dtype())?, bins)
    }

    /// Adds up the weights of elements (1 each by default) in intervals between ascending `edges`; the last includes its end. With
    /// `density` the sums are divided by their total and by the lengths of the intervals.
    ///
    /// Edges are gathered, and counts are partial sums.
    #[track_caller]
    pub fn histogram(&self, edges: &DTensor, weight: Option<&DTensor>, density: bool) -> Result<DTensor> {
        let flat = self.detach().reshape(&[self.elem_count() as isize])?;
        let bins = edges.elem_count().saturating_sub(1);
        let (at, inside) = flat.bins_of(edges)?;
        let ones = inside.to_dtype(self.dtype())?;
        let counted = match weight {
            Some(weight) => inside.where_cond(&weight.reshape(&[self.elem_count() as isize])?, 0.0)?,
            None => ones,
        };
        let sums = flat.counted(&at, &counted, bins)?;
        if !density {
            return Ok(sums);
        }
        let lengths = edges.narrow(0, 1, bins)?.sub(&edges.narrow(0, 0, bins)?)?;
        sums.div(&sums.sum_all()?)?.div(&lengths)
    }

    /// Adds up the weights of rows `[.., d]` (1 each by default) in the boxes between ascending edges of `d` dimensions. With
    /// `density` the sums are divided by their total and by the volumes of the boxes.
    #[track_caller]
    pub fn histogramdd(&self, edges: &[&DTensor], weight: Option<&DTensor>, density: bool) -> Result<DTensor> {
        let width = edges.len();
        if width == 0 || self.shape().last() != Some(&width) {
            return Err(self.bad_dims(
                "histogramdd",
                &[],
                "rows with one number per list of edges, and at least one list",
            ));
        }
        let sizes: Vec<usize> = edges.iter().map(|e| e.elem_count().saturating_sub(1)).collect();
        check_whole(&sizes, DType::F64)?;
        let rows = self.elem_count() / width;
        let x = self.detach().reshape(&[rows as isize, width as isize])?;
        let (mut place, mut inside): (Option<DTensor>, Option<DTensor>) = (None, None);
        for (d, edges) in edges.iter().enumerate() {
            let (at, within) = x.select(1, d as isize)?.bins_of(edges)?;
            let bins = edges.elem_count().saturating_sub(1);
            place = Some(match place {
                Some(place) => place.mul_scalar(bins as f64)?.add(&at)?,
                None => at,
            });
            inside = Some(inside.map_or(Ok(within.clone()), |inside| inside.logical_and(&within))?);
        }
        let (place, inside) = (place.expect("a dimension"), inside.expect("a dimension"));
        let counted = match weight {
            Some(weight) => inside.where_cond(&weight.reshape(&[rows as isize])?, 0.0)?,
            None => inside.to_dtype(self.dtype())?,
        };
        let place = inside.where_cond(&place, 0.0)?;
        let sums = x.counted(&place, &counted, sizes.iter().product())?.reshape(&signed(&sizes))?;
        if !density {
            return Ok(sums);
        }
        let mut scaled = sums.div(&sums.sum_all()?)?;
        for (d, edges) in edges.iter().enumerate() {
            let lengths = edges.narrow(0, 1, sizes[d])?.sub(&edges.narrow(0, 0, sizes[d])?)?;
            scaled = scaled.div(&lengths.reshape(&[vec![-1], vec![1; width - 1 - d]].concat())?)?;
        }
        Ok(scaled)
    }

    /// The edges of `bins` intervals of equal length from `min` to `max`, or of the range of the elements if both are equal.
    #[track_caller]
    pub fn histogram_edges(&self, bins: usize, min: f64, max: f64) -> Result<DTensor> {
        let (low, high) = self.range_of("histogram_edges", bins, min, max, 0.5)?;
        let at = |i: usize| if i == bins { high } else { low + (high - low) / bins as f64 * i as f64 };
        let edges: Vec<f64> = (0..=bins).map(at).collect();
        self.constant(&Tensor::from_vec(edges, bins + 1, &Device::Cpu)?.to_dtype(self.dtype())?)
    }

    /// The range to divide into intervals: the given one, that of the elements, or one around a single value.
    #[track_caller]
    fn range_of(&self, name: &'static str, bins: usize, min: f64, max: f64, around: f64) -> Result<(f64, f64)> {
        check_whole(&[bins], DType::F64)?;
        let (mut low, mut high) = (min, max);
        if low == high && self.elem_count() > 0 && self.is_readable() {
            // The largest element is a minimum of negated ones, so that both ends are reduced in one call.
            let x = self.detach();
            let x = if x.dtype().is_float() { x } else { x.to_dtype(DType::F64)? };
            let ends = DTensor::stack(&[&x.amin(&[], false)?, &x.neg()?.amin(&[], false)?], 0)?;
            let ends = ends.all_reduced(name)?.to_dtype(DType::F64)?.to_local()?.to_vec1::<f64>()?;
            (low, high) = (ends[0], -ends[1]);
        }
        if low == high {
            (low, high) = (low - around, high + around);
        }
        if bins > 0 && low < high && low.is_finite() && high.is_finite() {
            return Ok((low, high));
        }
        let found = format!("{bins} bins from {low} to {high} in {name}");
        Err(ErrorKind::Argument.error("range", found, "at least one bin in a finite range", "correct the range"))
    }

    /// The interval of each element of a vector, as a floating-point number, and whether there is one (u8).
    #[track_caller]
    fn bins_of(&self, edges: &DTensor) -> Result<(DTensor, DTensor)> {
        let bins = edges.elem_count().saturating_sub(1);
        let after = edges.searchsorted(self, true)?.add_scalar(-1)?;
        let last = self.eq(&edges.select(0, -1)?)?;
        let at = last.where_cond(bins as i64 - 1, &after)?;
        let inside = at.ge(0)?.logical_and(&at.lt(bins as i64)?)?;
        Ok((inside.where_cond(&at, 0)?.to_dtype(DType::F64)?, inside))
    }

    /// Adds up numbers at places of a new vector.
    #[track_caller]
    fn counted(&self, places: &DTensor, numbers: &DTensor, size: usize) -> Result<DTensor> {
        let zeros = self.constant(&Tensor::zeros(size, self.dtype(), &Device::Cpu)?)?;
        zeros.index_add(0, &places.to_dtype(DType::I64)?, &numbers.to_dtype(self.dtype())?)
    }

    /// Returns 1 (u8) where an element is among `others`, or is not if `invert`.
    ///
    /// The elements to find are sorted and gathered; this tensor keeps its layout.
    #[track_caller]
    pub fn isin(&self, others: &DTensor, invert: bool) -> Result<DTensor> {
        let n = others.elem_count();
        let found = match n {
            0 => self.ne(self)?.logical_and(0)?,
            _ => {
                let (sorted, _) = others.detach().reshape(&[n as isize])?.sort(0, false)?;
                let sorted = sorted.without_partials("isin", &[0])?;
                let at = self.detach().bucketize(&sorted)?.clamp_max(n as i64 - 1)?;
                sorted.index(&at)?.eq(self)?
            }
        };
        if invert { found.logical_not() } else { Ok(found) }
    }

    /// Converts indices of a flattened tensor of `shape` to one tensor of indices per dimension.
    #[track_caller]
    pub fn unravel_index(&self, shape: &[usize]) -> Result<Vec<DTensor>> {
        if self.dtype().is_float() {
            let found = format!("{} in unravel_index", self.dtype().as_str());
            return Err(ErrorKind::dtype(self.dtype()).error("indices", found, "integers", "convert them first"));
        }
        let mut left = self.to_dtype(DType::I64)?;
        let mut found = Vec::new();
        for &n in shape.iter().rev() {
            found.push(left.remainder(n as i64)?);
            left = left.div_floor(n as i64)?;
        }
        found.reverse();
        Ok(found)
    }
}

/// Where a run of equal elements begins within a shard of a vector (u8): the first element of a shard always begins one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RunsOfShards;

impl Op for RunsOfShards {
    fn name(&self) -> &'static str {
        "unique"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.as_slice();
        let outputs = vec![TensorMeta::new(shape, DType::U8)];
        Ok(OpPlan { signature: Signature::pointwise(&[shape], shape), outputs })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, n) = (&inputs[0], inputs[0].elem_count());
        let first = Tensor::ones(n.min(1), DType::U8, x.device())?;
        if n < 2 {
            return Ok(vec![first]);
        }
        let differs = x.narrow(0, 1, n - 1)?.ne(&x.narrow(0, 0, n - 1)?)?;
        Ok(vec![concat(&[first, differs], 0)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::NotDifferentiable
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "unique", samples: ties, apply: |x| all(x[0].unique(None)?, x[0].unique(Some(0))?) },
    OpEntry {
        name: "unique_consecutive",
        samples: ties,
        apply: |x| all(x[0].unique_consecutive(None)?, x[0].unique_consecutive(Some(0))?),
    },
    OpEntry {
        name: "nonzero_static",
        samples: ties,
        apply: |x| Ok(vec![x[0].nonzero_static(2, -1)?, x[0].nonzero_static(40, -1)?]),
    },
    OpEntry {
        name: "bincount",
        samples: vectors,
        apply: |x| Ok(vec![x[0].bincount(None, 2)?, x[0].bincount(Some(&x[1]), 6)?]),
    },
    OpEntry { name: "histc", samples: reals, apply: |x| Ok(vec![x[0].histc(4, -1.0, 1.0)?]) },
    OpEntry {
        name: "histogram",
        samples: reals,
        apply: |x| Ok(vec![x[0].histogram(&x[0].histogram_edges(3, -1.0, 1.0)?, None, true)?]),
    },
    OpEntry { name: "histogram_edges", samples: reals, apply: |x| Ok(vec![x[0].histogram_edges(3, -1.0, 1.0)?]) },
    OpEntry {
        name: "histogramdd",
        samples: reals,
        apply: |x| {
            let edges = x[0].histogram_edges(3, -1.0, 1.0)?;
            Ok(vec![x[0].histogramdd(&[&edges, &edges, &edges], None, false)?])
        },
    },
    OpEntry { name: "isin", samples: vectors, apply: |x| Ok(vec![x[1].isin(&x[0], false)?, x[1].isin(&x[0], true)?]) },
    OpEntry { name: "unravel_index", samples: ties, apply: |x| x[0].unravel_index(&[2, 3]) },
];

fn all(a: Unique, b: Unique) -> Result<Vec<DTensor>> {
    Ok(vec![a.values, a.inverse, a.counts, b.values, b.inverse, b.counts])
}

fn ties() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::index(&[7, 3], 3)], vec![SampleInput::index(&[5], 4)]]
}

fn vectors() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::index(&[7], 5), SampleInput::new(&[7], DType::F64)]]
}

fn reals() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64)]]
}
