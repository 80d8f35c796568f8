//! Reshaping. Works for every sharding, and stays local whenever what each rank holds can be expressed as a sharding of the new
//! shape.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::layout::{Layout, Runs, TensorMeta, chunk, coordinates, ragged};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpKind, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::Placement;
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::contiguous;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reshape {
    shape: Vec<usize>,
}

impl DTensor {
    /// Returns the same elements in another shape; one size may be -1 and is inferred.
    ///
    /// Local whenever each rank's elements form a shard of the new shape: splitting or merging a sharded dimension keeps the
    /// elements where they are, as a ragged or strided shard if need be. Else elements move to the nearest such sharding, and
    /// only if there is none is the dimension gathered. Never fails because of the sharding, unlike PyTorch's `view`.
    ///
    /// # Errors
    /// If the number of elements differs.
    #[track_caller]
    pub fn reshape(&self, shape: &[isize]) -> Result<DTensor> {
        let shape = self.resolve_shape(shape)?;
        if shape == self.shape() {
            return Ok(self.clone());
        }
        Ok(dispatch(&Reshape { shape }, &[self], Location::caller())?.swap_remove(0))
    }

    /// The same as [`reshape`](Self::reshape). Tensors are immutable, so a copy is indistinguishable from a view.
    #[track_caller]
    pub fn view(&self, shape: &[isize]) -> Result<DTensor> {
        self.reshape(shape)
    }

    /// Merges dimensions `start..=end` into one.
    ///
    /// Communicates as [`reshape`](Self::reshape) does.
    #[track_caller]
    pub fn flatten(&self, start: isize, end: isize) -> Result<DTensor> {
        if self.ndim() == 0 {
            return self.reshape(&[1]);
        }
        let (first, last) = (self.resolve_dim("flatten", start)?, self.resolve_dim("flatten", end)?);
        if first > last {
            return Err(self.bad_dims("flatten", &[start, end], "a first dimension before the last"));
        }
        let mut shape: Vec<isize> = self.shape().iter().map(|&n| n as isize).collect();
        let merged: isize = shape[first..=last].iter().product();
        shape.splice(first..=last, [merged]);
        self.reshape(&shape)
    }

    /// Splits a dimension into several; one size may be -1 and is inferred.
    ///
    /// Communicates as [`reshape`](Self::reshape) does.
    #[track_caller]
    pub fn unflatten(&self, dim: isize, sizes: &[isize]) -> Result<DTensor> {
        let at = self.resolve_dim("unflatten", dim)?;
        let product = |sizes: &[isize]| sizes.iter().try_fold(1isize, |p, &n| p.checked_mul(n));
        let given: Vec<isize> = sizes.iter().copied().filter(|&n| n != -1).collect();
        let known = product(&given).unwrap_or(0);
        let n = self.shape()[at] as isize;
        let sizes: Vec<isize> = sizes.iter().map(|&s| if s == -1 && known > 0 { n / known } else { s }).collect();
        if sizes.iter().any(|&s| s < 0) || product(&sizes) != Some(n) {
            return Err(self.bad_dims("unflatten", &sizes, &format!("sizes whose product is {n}")));
        }
        let mut shape: Vec<isize> = self.shape().iter().map(|&n| n as isize).collect();
        shape.splice(at..=at, sizes);
        self.reshape(&shape)
    }

    fn resolve_shape(&self, shape: &[isize]) -> Result<Vec<usize>> {
        let bad = || self.bad_dims("reshape", shape, &format!("sizes whose product is {}", self.elem_count()));
        let given = shape.iter().filter(|&&n| n != -1);
        let known = given.clone().try_fold(1usize, |product, &n| product.checked_mul(usize::try_from(n).ok()?));
        let known = known.ok_or_else(bad)?;
        let open = shape.len() - given.count();
        let fits = match open {
            0 => known == self.elem_count(),
            1 => known > 0 && self.elem_count().is_multiple_of(known),
            _ => false,
        };
        if !fits {
            return Err(bad());
        }
        Ok(shape.iter().map(|&n| if n == -1 { self.elem_count() / known } else { n as usize }).collect())
    }
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        let signature = Signature::new(
            x.shape.iter().map(|_| DimSharding::Free),
            [(0..x.shape.len()).map(Some).collect()],
            [vec![None; self.shape.len()]],
        );
        Ok(OpPlan {
            signature: signature.allow_all_partial(),
            outputs: vec![TensorMeta { shape: self.shape.clone(), dtype: x.dtype }],
        })
    }

    fn decide(&self, _: &OpPlan, inputs: &[&Layout], _: &[usize]) -> Result<Decision> {
        // Axes that shard a dimension in another order than that of the mesh are easier to follow than strided shards of the same
        // elements; to name them so moves nothing.
        let ordered =
            inputs[0].placements().iter().any(|p| p.split_factor().is_some()).then(|| inputs[0].to_shard_order());
        let mut from = ordered.and_then(Result::ok).unwrap_or_else(|| inputs[0].clone());
        if from.shape().contains(&0) {
            let whole = from.without_axes(&axes_sharding(&from, &(0..from.shape().len()).collect::<Vec<_>>()))?;
            let to = Layout::new(whole.mesh(), self.shape.as_slice(), whole.placements().to_vec())?;
            return Ok(Decision { inputs: vec![RequiredInput::Layout(whole)], outputs: vec![to] });
        }
        // A shard of a dimension of size 1 stays if the new shape has such a dimension at the same place.
        let ones = matching_ones(from.shape(), &self.shape);
        let single = |d: &usize| from.shape()[*d] == 1 && !ones.iter().any(|(old, _)| old == d);
        let single: Vec<usize> = (0..from.shape().len()).filter(single).collect();
        from = from.without_axes(&axes_sharding(&from, &single))?;
        let groups = groups(from.shape(), &self.shape);
        let mut sharding = NewSharding::of(&from);
        for (old, new) in ones {
            let moved = |&axis: &usize| (axis, from.placements()[axis].with_dim(new));
            sharding.add(vec![(new, from.shard_order(old).iter().map(moved).collect())]);
        }
        for group in &groups {
            // In the current layout; else resharded in units that both shapes can be sharded in; else gathered.
            let found = group.preserved(&from, &self.shape).or_else(|| {
                let (moved, preserved) = group.in_units(&from, &self.shape)?;
                from = moved;
                Some(preserved)
            });
            match found {
                Some(preserved) => sharding.add(preserved),
                None => {
                    let axes = axes_sharding(&from, &group.inputs);
                    from = from.without_axes(&axes)?;
                }
            }
        }
        let to = sharding.layout(&from, &self.shape)?;
        Ok(Decision { inputs: vec![RequiredInput::Layout(from)], outputs: vec![to] })
    }

    fn kind(&self) -> OpKind {
        OpKind::AnyType
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (shape, x) = (context.local_shape(0), contiguous(&inputs[0])?);
        Ok(vec![if x.elem_count() == 0 { Tensor::zeros(shape, x.dtype(), x.device())? } else { x.reshape(shape)? }])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |_, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let shape: Vec<isize> = saved.shape(0).iter().map(|&n| n as isize).collect();
            Ok(vec![Some(gradient.reshape(&shape)?)])
        })
    }
}

/// The mesh axes that shard any of some dimensions.
fn axes_sharding(layout: &Layout, dims: &[usize]) -> Vec<usize> {
    dims.iter().flat_map(|&d| layout.shard_order(d).to_vec()).collect()
}

/// Consecutive dimensions of the old and of the new shape with the same elements.
struct DimGroup {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
}

/// The smallest such groups, in order. Dimensions of size 1 belong to none.
fn groups(old: &[usize], new: &[usize]) -> Vec<DimGroup> {
    let mut parts = Vec::new();
    let (mut i, mut o) = (0, 0);
    while i < old.len() || o < new.len() {
        if i < old.len() && old[i] == 1 {
            i += 1;
            continue;
        }
        if o < new.len() && new[o] == 1 {
            o += 1;
            continue;
        }
        let (first_in, first_out) = (i, o);
        let (mut inside, mut outside) = (old[i], new[o]);
        (i, o) = (i + 1, o + 1);
        while inside != outside {
            if inside < outside {
                inside *= old[i];
                i += 1;
            } else {
                outside *= new[o];
                o += 1;
            }
        }
        let several = |range: std::ops::Range<usize>, shape: &[usize]| range.filter(|&d| shape[d] > 1).collect();
        parts.push(DimGroup { inputs: several(first_in..i, old), outputs: several(first_out..o, new) });
    }
    parts
}

/// Dimensions of size 1 of the old and of the new shape with the same number of elements before them, in order.
fn matching_ones(old: &[usize], new: &[usize]) -> Vec<(usize, usize)> {
    let ones = |shape: &[usize]| {
        let mut before = 1;
        let place = |(dim, &n): (usize, &usize)| {
            before *= n;
            (n == 1).then_some((before, dim))
        };
        shape.iter().enumerate().filter_map(place).collect::<Vec<_>>()
    };
    let (old, new) = (ones(old), ones(new));
    let nth = |list: &[(usize, usize)], i: usize| list[..i].iter().filter(|(before, _)| *before == list[i].0).count();
    let partner = |i: usize| {
        let same = new.iter().filter(|(before, _)| *before == old[i].0).nth(nth(&old, i))?;
        Some((old[i].1, same.1))
    };
    (0..old.len()).filter_map(partner).collect()
}

/// Per sharded dimension of a group in the new shape its axes in order, with their placements.
type GroupSharding = Vec<(usize, Vec<(usize, Placement)>)>;

/// The sharding of the new shape, collected group by group.
struct NewSharding {
    placements: Vec<Placement>,
    order: Vec<(usize, Vec<usize>)>,
}

impl NewSharding {
    fn of(from: &Layout) -> Self {
        let partial = |p: &Placement| if p.is_partial() { p.clone() } else { Placement::Replicate };
        NewSharding { placements: from.placements().iter().map(partial).collect(), order: Vec::new() }
    }

    fn add(&mut self, preserved: GroupSharding) {
        for (dim, axes) in preserved {
            self.order.push((dim, axes.iter().map(|(axis, _)| *axis).collect()));
            for (axis, placement) in axes {
                self.placements[axis] = placement;
            }
        }
    }

    fn layout(&self, from: &Layout, shape: &[usize]) -> Result<Layout> {
        let of = |dim: usize| self.order.iter().find(|(d, _)| *d == dim).map_or(Vec::new(), |(_, axes)| axes.clone());
        let orders: Vec<Vec<usize>> = (0..shape.len()).map(of).collect();
        Layout::from_shard_orders(from.mesh(), shape, &self.placements, &orders)
    }
}

/// A factor of a group's size that is sharded along axes: how much of it each coordinate holds, row-major over the axes.
struct ShardedFactor {
    factor: usize,
    axes: Vec<usize>,
    counts: Vec<usize>,
}

impl DimGroup {
    /// The sharding of the new dimensions with which every rank holds exactly what it holds now, if there is one.
    fn preserved(&self, from: &Layout, new: &[usize]) -> Option<GroupSharding> {
        let axes = axes_sharding(from, &self.inputs);
        if axes.is_empty() {
            return Some(Vec::new());
        }
        let preserved = self.leading(from, new).or_else(|| self.by_factors(from, new))?;
        let mut sharding = NewSharding::of(from);
        sharding.add(preserved.clone());
        let to = sharding.layout(from, new).ok()?;
        let held = |layout: &Layout, dims: &[usize], c: &[usize]| flat_runs(layout, dims, c);
        let same = |c: Vec<usize>| {
            let now = held(from, &self.inputs, &c);
            now.is_some() && now == held(&to, &self.outputs, &c)
        };
        coordinates(from.mesh(), &axes).all(same).then_some(preserved)
    }

    /// The case that only the first dimension is sharded, in ranges: the first new one is too, if the ranges fit.
    fn leading(&self, from: &Layout, new: &[usize]) -> Option<GroupSharding> {
        let first = self.inputs[0];
        let axes = from.shard_order(first);
        let strided = axes.iter().any(|&a| !from.placements()[a].is_contiguous());
        if strided || self.inputs[1..].iter().any(|&d| !from.shard_order(d).is_empty()) {
            return None;
        }
        let (inside, outside) = (inner(from.shape(), &self.inputs), inner(new, &self.outputs));
        let held = |c: Vec<usize>| {
            let elements = from.owned(first, &c).len() * inside;
            elements.is_multiple_of(outside).then_some(elements / outside)
        };
        let sizes = coordinates(from.mesh(), axes).map(held).collect::<Option<Vec<_>>>()?;
        Some(vec![(self.outputs[0], ragged(from.mesh(), self.outputs[0], axes, &sizes))])
    }

    /// The case that each old and each new dimension is a product of common factors, and axes shard single factors.
    fn by_factors(&self, from: &Layout, new: &[usize]) -> Option<GroupSharding> {
        let factors = common_factors(from.shape(), &self.inputs, new, &self.outputs)?;
        let mut sharded_factors = Vec::new();
        let mut next = 0;
        for &dim in &self.inputs {
            let own = factors_of(&factors, next, from.shape()[dim]);
            match from.shard_order(dim).len() {
                0 => {}
                1 => sharded_factors.push(sharded_factor(from, dim, &factors, own.clone())?),
                _ => match sharded_factor(from, dim, &factors, own.clone()) {
                    Some(one) => sharded_factors.push(one),
                    None => sharded_factors.extend(evenly_sharded_factors(from, dim, &factors, own.clone())?),
                },
            }
            next = own.end;
        }
        let mut preserved = Vec::new();
        let mut next = 0;
        for &dim in &self.outputs {
            let own = factors_of(&factors, next, new[dim]);
            next = own.end;
            let mut placed = Vec::new();
            // The split factor of a strided shard: what one rank holds of the factors before the sharded one.
            let mut before = 1;
            for factor in own.clone() {
                let after: usize = factors[factor + 1..own.end].iter().product();
                let Some(sharded) = sharded_factors.iter().find(|c| c.factor == factor) else {
                    before *= factors[factor];
                    continue;
                };
                if before == 1 {
                    let sizes: Vec<usize> = sharded.counts.iter().map(|n| n * after).collect();
                    placed.extend(ragged(from.mesh(), dim, &sharded.axes, &sizes));
                } else {
                    let [axis] = sharded.axes[..] else { return None };
                    placed.push((axis, Placement::strided(dim as isize, before)));
                }
                before *= sharded.counts[0];
            }
            if !placed.is_empty() {
                preserved.push((dim, placed));
            }
        }
        Some(preserved)
    }

    /// A layout in which the axes that shard this group shard it in units that divide both shapes, and the new sharding.
    fn in_units(&self, from: &Layout, new: &[usize]) -> Option<(Layout, GroupSharding)> {
        let (inside, outside) = (inner(from.shape(), &self.inputs), inner(new, &self.outputs));
        let unit = least_common_multiple(inside, outside);
        let units = from.shape()[self.inputs[0]] * inside / unit;
        if units < 2 {
            return None;
        }
        let axes = axes_sharding(from, &self.inputs);
        let mut shares = vec![units];
        for &axis in &axes {
            let k = from.mesh().shape()[axis];
            shares = shares.iter().flat_map(|&n| (0..k).map(move |i| chunk(n, k, i).len())).collect();
        }
        let sizes: Vec<usize> = shares.iter().map(|n| n * unit / inside).collect();
        let bare = from.without_axes(&axes).ok()?;
        let (mut placements, mut orders) = (bare.placements().to_vec(), bare.shard_orders());
        for (axis, placement) in ragged(from.mesh(), self.inputs[0], &axes, &sizes) {
            placements[axis] = placement;
        }
        orders[self.inputs[0]].clone_from(&axes);
        let moved = Layout::from_shard_orders(from.mesh(), from.shape(), &placements, &orders).ok()?;
        let preserved = self.preserved(&moved, new)?;
        Some((moved, preserved))
    }
}

/// The number of elements per index of the first of some dimensions.
fn inner(shape: &[usize], dims: &[usize]) -> usize {
    dims[1..].iter().map(|&d| shape[d]).product()
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Factors of which all sizes on either side are products of consecutive ones; `None` if there are none.
fn common_factors(old: &[usize], inputs: &[usize], new: &[usize], outputs: &[usize]) -> Option<Vec<usize>> {
    let products = |shape: &[usize], dims: &[usize]| {
        let mut product = 1;
        dims.iter()
            .map(|&d| {
                product *= shape[d];
                product
            })
            .collect::<Vec<usize>>()
    };
    let mut edges = [products(old, inputs), products(new, outputs)].concat();
    edges.sort_unstable();
    edges.dedup();
    let mut before = 1;
    let factor = |&edge: &usize| {
        let factor = edge.is_multiple_of(before).then_some(edge / before)?;
        before = edge;
        Some(factor)
    };
    edges.iter().map(factor).collect()
}

/// The factors from `start` on whose product is `size`.
fn factors_of(factors: &[usize], start: usize, size: usize) -> std::ops::Range<usize> {
    let mut end = start;
    let mut product = 1;
    while product < size {
        product *= factors[end];
        end += 1;
    }
    start..end
}

/// The sharding of a dimension as the sharding of one of its factors.
fn sharded_factor(from: &Layout, dim: usize, factors: &[usize], own: std::ops::Range<usize>) -> Option<ShardedFactor> {
    let axes = from.shard_order(dim).to_vec();
    let strided = axes.iter().any(|&a| !from.placements()[a].is_contiguous());
    let (factor, groups) = match (&axes[..], strided) {
        (_, false) => (own.start, 1),
        ([axis], true) => {
            let split_factor = from.placements()[*axis].split_factor()?;
            let groups = |&f: &usize| factors[own.start..f].iter().product::<usize>() == split_factor;
            (own.clone().find(groups)?, split_factor)
        }
        _ => return None,
    };
    let after: usize = factors[factor + 1..own.end].iter().product::<usize>() * groups;
    let held = |c: Vec<usize>| {
        let n = from.owned(dim, &c).len();
        n.is_multiple_of(after).then_some(n / after)
    };
    let counts = coordinates(from.mesh(), &axes).map(held).collect::<Option<Vec<_>>>()?;
    Some(ShardedFactor { factor, axes, counts })
}

/// The sharding of a dimension by several axes as the sharding of one factor by each axis, in equal parts.
fn evenly_sharded_factors(
    from: &Layout,
    dim: usize,
    factors: &[usize],
    own: std::ops::Range<usize>,
) -> Option<Vec<ShardedFactor>> {
    // How much a rank holds of each factor after the axes so far: a strided shard counts groups of what is left.
    let mut held = factors[own.clone()].to_vec();
    let mut sharded = Vec::new();
    for &axis in from.shard_order(dim) {
        let placement = &from.placements()[axis];
        let groups = if placement.is_contiguous() { 1 } else { placement.split_factor()? };
        let k = from.mesh().shape()[axis];
        let fits = |&f: &usize| held[..f].iter().product::<usize>() == groups && held[f].is_multiple_of(k);
        let factor = (0..held.len()).find(fits)?;
        held[factor] /= k;
        sharded.push(ShardedFactor { factor: own.start + factor, axes: vec![axis], counts: vec![held[factor]; k] });
    }
    Some(sharded)
}

/// Ranges that are compared before a reshape is taken for one that moves data. A layout can need as many as its dimensions have
/// indices, and a plan is built for sizes that a file merely claims.
const MOST_RUNS: usize = 1 << 22;

/// The flat indices within some consecutive dimensions that a coordinate holds, as ranges; `None` if there are too many.
fn flat_runs(layout: &Layout, dims: &[usize], coordinate: &[usize]) -> Option<Runs> {
    // From the innermost dimension on: what is held whole continues the ranges of the dimension before it, however long that is.
    let (mut inner, mut flat) = (1, Runs::all(1));
    for &dim in dims.iter().rev() {
        let held = layout.owned(dim, coordinate);
        let mut runs = Runs::default();
        if flat.len() == inner {
            held.iter().for_each(|run| runs.push(run.start * inner..run.end * inner));
        } else {
            let count = held.len().checked_mul(flat.iter().count())?;
            if count > MOST_RUNS {
                return None;
            }
            for at in held.iter().flatten() {
                flat.iter().for_each(|run| runs.push(at * inner + run.start..at * inner + run.end));
            }
        }
        (inner, flat) = (inner * layout.shape()[dim], runs);
    }
    Some(flat)
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "reshape",
        samples,
        apply: |x| {
            let n = x[0].elem_count() as isize;
            let half = if n % 2 == 0 && n > 0 { [2, n / 2] } else { [1, n] };
            let third = if n % 3 == 0 && n > 0 { [n / 3, 3] } else { [n, 1] };
            Ok(vec![x[0].reshape(&[n])?, x[0].reshape(&half)?, x[0].reshape(&third)?, x[0].reshape(&[n, 1])?])
        },
    },
    OpEntry { name: "view", samples, apply: |x| Ok(vec![x[0].view(&[1, x[0].elem_count() as isize])?]) },
    OpEntry { name: "flatten", samples, apply: |x| Ok(vec![x[0].flatten(0, 1)?, x[0].flatten(0, -1)?]) },
    OpEntry {
        name: "unflatten",
        samples,
        apply: |x| {
            let n = x[0].shape()[0] as isize;
            let sizes =
                if n % 2 == 0 && n > 0 { vec![vec![2, -1], vec![n / 2, 2]] } else { vec![vec![n, 1], vec![1, n]] };
            sizes.iter().map(|sizes| x[0].unflatten(0, sizes)).collect()
        },
    },
];

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 6] = [&[4, 6], &[5, 3], &[2, 3, 4], &[12, 1], &[0, 2], &[6, 2, 2]];
    shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::I64)]).collect()
}
