//! Elements and slices written to places that an index names. A rank writes what falls into its part; where the sources
//! are cut instead, the parts are a pending sum.

use std::num::Wrapping;
use std::ops::AddAssign;
use std::panic::Location;

use candle_core::{DType, Tensor, WithDType};

use super::indices::{places, wrapped};
use super::{OpEntry, Sample};
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, Op, OpPlan, Place, dispatch, name_call};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, Shared, Signature};
use crate::tensor::{DTensor, Keeps};
use shardwise_kernels::{GatherOffsets, NO_INDEX, contiguous, to_i64_vec, with_type};

/// A copy of `x` with elements of `source` at the places that `index` names along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Scatter {
    dim: usize,
}

/// Zeros, with elements of a source added at the places that an index names along a dimension of a given size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Spread {
    dim: usize,
    size: usize,
    /// The index is a vector, and names slices.
    slices: bool,
    /// How the dimension shall be cut along axes that leave it free.
    like: Layout,
}

impl DTensor {
    /// A copy with elements of `source` at the places that `index` names along a dimension; places are distinct.
    #[track_caller]
    pub fn scatter(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        let op = Scatter { dim: self.resolve_dim("scatter", dim)? };
        let source = source.to_dtype(self.dtype())?;
        Ok(dispatch(&op, &[self, index, &source], Location::caller())?.swap_remove(0))
    }

    /// A copy with elements of `source` added at the places that `index` names along a dimension.
    #[track_caller]
    pub fn scatter_add(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        let at = self.resolve_dim("scatter_add", dim)?;
        let site = Location::caller();
        check_sizes("scatter_add", at, self.shape(), index.shape(), source.shape())
            .map_err(|e| name_call(e, "scatter_add", &[self, index, source], site))?;
        self.add(&spread_elements(self.layout(), at, index, &source.to_dtype(self.dtype())?)?)
    }

    /// A copy with slices of `source` added at the places that a vector of indices names along a dimension.
    #[track_caller]
    pub fn index_add(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        let at = self.resolve_dim("index_add", dim)?;
        self.add(&spread_slices(self.layout(), at, index, &source.to_dtype(self.dtype())?)?)
    }

    /// A copy in which the elements that indices of the first dimensions name are those of `values`, or have them added.
    /// The indices broadcast; `values` has their shape, followed by the dimensions that no index names.
    #[track_caller]
    pub fn index_put(&self, indices: &[&DTensor], values: &DTensor, accumulate: bool) -> Result<DTensor> {
        if indices.is_empty() || indices.len() > self.rank() {
            return Err(self.bad_dims("index_put", &[], "one index per leading dimension"));
        }
        let (named, rest) = self.shape().split_at(indices.len());
        let signed = |dims: &[usize]| dims.iter().map(|&n| n as isize).collect::<Vec<_>>();
        let mut place = wrapped("index_put", indices[0], named[0])?;
        for (index, &n) in indices[1..].iter().zip(&named[1..]) {
            place = place.mul_scalar(n as f64)?.add(&wrapped("index_put", index, n)?)?;
        }
        let flat = self.reshape(&[signed(&[named.iter().product()]), signed(rest)].concat())?;
        let count = place.elem_count();
        let place = place.reshape(&[count as isize])?;
        let wanted = [signed(&[count]), signed(rest)].concat();
        if values.elem_count() != count * rest.iter().product::<usize>() {
            let found =
                format!("values of shape {:?} for {count} places in index_put of {}", values.shape(), self.layout());
            return Err(ErrorKind::shape(values.shape()).error(
                "values",
                found,
                format!("shape {wanted:?}"),
                "expand the values",
            ));
        }
        let values = values.reshape(&wanted)?;
        let put = if accumulate {
            flat.index_add(0, &place, &values)?
        } else {
            let column = [vec![count as isize], vec![1; rest.len()]].concat();
            flat.scatter(0, &place.reshape(&column)?.expand(&wanted)?, &values)?
        };
        put.reshape(&signed(self.shape()))
    }
}

/// Zeros that lie as wished, with slices of `source` added at the places that a vector of indices names along `dim`.
#[track_caller]
pub(super) fn spread_slices(like: &Layout, dim: usize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
    check_mesh("index_add", like, index)?;
    let op = Spread { dim, size: like.shape()[dim], slices: true, like: like.settled() };
    Ok(dispatch(&op, &[index, source], Location::caller())?.swap_remove(0))
}

/// Zeros that lie as wished, with elements of `source` added at the places that `index` names along `dim`.
#[track_caller]
pub(super) fn spread_elements(like: &Layout, dim: usize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
    check_mesh("scatter_add", like, index)?;
    let op = Spread { dim, size: like.shape()[dim], slices: false, like: like.settled() };
    padded(&dispatch(&op, &[index, source], Location::caller())?.swap_remove(0), like.shape())
}

fn check_mesh(name: &str, like: &Layout, index: &DTensor) -> Result<()> {
    if like.mesh() == index.layout().mesh() {
        return Ok(());
    }
    let found = format!("{} and an index {} in {name}", like, index.layout());
    Err(ErrorKind::Operands.error("operands", found, "tensors on one mesh", "move the tensors first"))
}

/// With zeros behind every dimension, up to a shape.
#[track_caller]
fn padded(x: &DTensor, shape: &[usize]) -> Result<DTensor> {
    let missing = |d: usize| (0, shape[d] - x.shape()[d]);
    x.pad(&(0..x.rank()).rev().map(missing).collect::<Vec<_>>(), 0.0)
}

/// The beginning of every dimension but one, as long as in a shape.
#[track_caller]
fn narrowed(x: &DTensor, dim: usize, shape: &[usize]) -> Result<DTensor> {
    let mut others = (0..x.rank()).filter(|&d| d != dim);
    others.try_fold(x.clone(), |x, d| x.narrow(d as isize, 0, shape[d]))
}

fn whole(like: &DTensor) -> Vec<Placement> {
    vec![Placement::Replicate; like.placements().len()]
}

/// An error unless `source` has an element for every place of `index`, which lies inside `x` but along `dim`.
fn check_sizes(name: &str, dim: usize, x: &[usize], index: &[usize], source: &[usize]) -> Result<()> {
    let inside = |d: usize| index[d] <= source[d] && (d == dim || index[d] <= x[d]);
    if index.len() == x.len() && source.len() == x.len() && (0..x.len()).all(inside) {
        return Ok(());
    }
    Err(ErrorKind::shape(index).error(
        "operands",
        format!("index {index:?} and source {source:?} in {name} of shape {x:?} along dimension {dim}"),
        "as many dimensions, an index no longer than the source, nor than the tensor but along that dimension",
        "reshape or slice the operands",
    ))
}

fn check_index(name: &str, dtype: DType) -> Result<()> {
    match dtype.is_float() {
        true => {
            let found = format!("{} in {name}", dtype.as_str());
            Err(ErrorKind::dtype(dtype).error("index", found, "integers", "convert it to i64 first"))
        }
        false => Ok(()),
    }
}

impl Op for Scatter {
    fn name(&self) -> &'static str {
        "scatter"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let [x, index, source] = inputs else { unreachable!("three inputs") };
        check_index("scatter", index.dtype)?;
        check_sizes("scatter", self.dim, &x.shape, &index.shape, &source.shape)?;
        let aligned = |d: usize| {
            let same = index.shape[d] == x.shape[d] && source.shape[d] == x.shape[d];
            (d != self.dim && same).then_some(d)
        };
        let ndim = x.shape.len();
        let of_x: Vec<Option<usize>> = (0..ndim).map(|d| if d == self.dim { Some(d) } else { aligned(d) }).collect();
        let of_index: Vec<Option<usize>> = (0..ndim).map(aligned).collect();
        let shared = (0..ndim).map(|_| Shared::Free);
        let mut signature = Signature::new(shared, [of_x.clone(), of_index.clone(), of_index], [of_x]);
        for op in ReduceOp::ALL {
            signature = signature.passing([Some(op), None, Some(op)], op);
        }
        Ok(OpPlan { signature, outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let [x, index, source] = inputs else { unreachable!("three inputs") };
        let places = places("scatter", &to_i64_vec(index)?, at.input_shape(0)[self.dim], &at.input(0, self.dim))?;
        let x = contiguous(x)?;
        let (targets, sources) = (GatherOffsets::new(x.dims(), self.dim, index.dims()), used(source, index.dims())?);
        if x.elem_count() == 0 || sources.elem_count() == 0 {
            return Ok(vec![x]);
        }
        with_type!(x.dtype(), T => {
            let mut values: Vec<T> = x.flatten_all()?.to_vec1()?;
            let sources: Vec<T> = sources.flatten_all()?.to_vec1()?;
            for (i, &place) in places.iter().enumerate().filter(|(_, place)| **place != NO_INDEX) {
                values[targets.offset(i, place)] = sources[i];
            }
            Ok(vec![Tensor::from_vec(values, x.dims(), x.device())?])
        }, otherwise unreachable!("tensors of a mesh have served types"))
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
            let (dim, index) = (op.dim as isize, saved.input(1));
            let covered = || {
                let zeros = DTensor::zeros(index.shape(), gradient.dtype(), gradient.device_mesh(), whole(gradient))?;
                gradient.scatter(dim, &index, &zeros)
            };
            let source = || padded(&narrowed(gradient, op.dim, index.shape())?.gather(dim, &index)?, saved.shape(2));
            Ok(vec![saved.wants(0).then(covered).transpose()?, None, saved.wants(2).then(source).transpose()?])
        })
    }
}

/// Where the elements of a source are added.
struct Spreading<'a> {
    places: &'a [usize],
    offsets: &'a GatherOffsets,
    /// Places are those of slices, of which there are `n` side by side with `inner` elements each.
    slices: bool,
    n: usize,
    inner: usize,
    /// How many places the rank holds.
    held: usize,
}

impl Spreading<'_> {
    fn add<T: Copy + AddAssign>(&self, mut values: Vec<T>, sources: &[T]) -> Vec<T> {
        if self.slices {
            for (i, slice) in sources.chunks_exact(self.inner).enumerate() {
                let place = self.places[i % self.n];
                if place != NO_INDEX {
                    let start = (i / self.n * self.held + place) * self.inner;
                    values[start..start + self.inner].iter_mut().zip(slice).for_each(|(v, s)| *v += *s);
                }
            }
        } else {
            for (i, &place) in self.places.iter().enumerate().filter(|(_, place)| **place != NO_INDEX) {
                values[self.offsets.offset(i, place)] += sources[i];
            }
        }
        values
    }
}

/// The part of a source that an index of this shape uses.
fn used(source: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let narrow = |t: Tensor, (dim, &n): (usize, &usize)| t.narrow(dim, 0, n);
    Ok(contiguous(&shape.iter().enumerate().try_fold(source.clone(), narrow)?)?)
}

impl Spread {
    /// The layout that suits a source where the result is sharded: whole along axes that shard the dimension that is written
    /// to, and sharded as the result along other dimensions of the same size.
    fn beside(&self, source: &Layout) -> Result<Layout> {
        let placement = |axis: usize| match (&source.placements()[axis], &self.like.placements()[axis]) {
            (Placement::Replicate, _) => Placement::Replicate,
            (_, like) if like.is_shard(Some(self.dim)) => Placement::Replicate,
            (now, like) => {
                let same = |d: &usize| !self.slices && source.shape()[*d] == self.like.shape()[*d];
                like.chunk_dim().filter(same).map_or_else(|| now.clone(), |_| like.clone())
            }
        };
        let placements: Vec<Placement> = (0..source.mesh().ndim()).map(placement).collect();
        if placements == source.placements() {
            return Ok(source.clone());
        }
        // Ragged sizes need not fit other shards.
        Layout::new(source.mesh(), source.shape(), placements)
            .or_else(|_| source.without_axes(self.like.shard_order(self.dim)))
    }
}

impl Op for Spread {
    fn name(&self) -> &'static str {
        if self.slices { "index_add" } else { "scatter_add" }
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (index, source) = (&inputs[0], &inputs[1]);
        check_index(self.name(), index.dtype)?;
        let (ndim, like) = (source.shape.len(), self.like.shape());
        if self.slices {
            let fits = |d: usize| d == self.dim || source.shape[d] == like[d];
            if index.shape.len() != 1
                || ndim != like.len()
                || source.shape[self.dim] != index.shape[0]
                || !(0..ndim).all(fits)
            {
                return Err(ErrorKind::shape(&index.shape).error(
                    "operands",
                    format!(
                        "index {:?} and source {:?} in index_add of shape {like:?} along dimension {}",
                        index.shape, source.shape, self.dim
                    ),
                    "a vector with one index per slice, and slices of the tensor's sizes",
                    "reshape the operands",
                ));
            }
        }
        // A source that is longer than the index is not cut alike.
        let aligned = |d: usize| self.slices || index.shape[d] == source.shape[d];
        let of_source: Vec<Option<usize>> = (0..ndim).map(|d| aligned(d).then_some(d)).collect();
        let of_index = if self.slices { vec![Some(self.dim)] } else { of_source.clone() };
        let output: Vec<Option<usize>> = (0..ndim).map(|d| of_source[d].filter(|_| d != self.dim)).collect();
        let shared = (0..ndim).map(|d| if d == self.dim { Shared::Reduces(ReduceOp::Sum) } else { Shared::Free });
        let signature = Signature::new(shared, [of_index, of_source], [output])
            .passing([None, Some(ReduceOp::Sum)], ReduceOp::Sum)
            .passing([None, Some(ReduceOp::Avg)], ReduceOp::Avg);
        let mut shape = if self.slices { source.shape.clone() } else { index.shape.clone() };
        shape[self.dim] = self.size;
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: source.dtype }] })
    }

    /// In the layout of the sources; and along axes where they are whole, the dimension that is written to is sharded as
    /// wished. Sources smaller than the result are gathered for that: a partial sum would be reduced at its size.
    fn decide(&self, plan: &OpPlan, inputs: &[&Layout], elem: &[usize]) -> Result<Decision> {
        let bytes = |shape: &[usize], elem: usize| shape.iter().product::<usize>() * elem;
        let sources: usize = inputs.iter().zip(elem).map(|(l, &elem)| bytes(l.shape(), elem)).sum();
        let mut given: Vec<Layout> = inputs.iter().map(|&l| l.clone()).collect();
        if sources < bytes(&plan.outputs[0].shape, elem[1]) {
            given = given.iter().map(|l| self.beside(l)).collect::<Result<_>>()?;
        }
        let given: Vec<&Layout> = given.iter().collect();
        let mut decision = plan.signature.decide(&given, elem, &[&plan.outputs[0].shape])?;
        let output = &decision.outputs[0];
        let wished = |axis: &usize| {
            let free = output.placements()[*axis].is_replicate();
            free && self.like.placements()[*axis].chunk_dim() == Some(self.dim)
        };
        let axes: Vec<usize> = self.like.shard_order(self.dim).iter().copied().filter(wished).collect();
        let (mut placements, mut cuts) = (output.placements().to_vec(), output.cuts());
        for &axis in &axes {
            placements[axis] = Placement::Shard(self.dim as isize);
        }
        cuts[self.dim] = axes;
        decision.outputs[0] = Layout::from_cuts(output.mesh(), output.shape(), &placements, &cuts)?;
        Ok(decision)
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let (index, source) = (&inputs[0], &inputs[1]);
        let held = at.output(0, self.dim);
        let places = places(self.name(), &to_i64_vec(index)?, self.size, &held)?;
        let source = if self.slices { contiguous(source)? } else { used(source, index.dims())? };
        let mut shape = source.dims().to_vec();
        shape[self.dim] = held.len();
        let zeros = Tensor::zeros(shape.as_slice(), source.dtype(), source.device())?;
        if source.elem_count() == 0 || zeros.elem_count() == 0 {
            return Ok(vec![zeros]);
        }
        let dims = source.dims();
        let (n, inner) = (dims[self.dim], dims[self.dim + 1..].iter().product::<usize>());
        let offsets = GatherOffsets::new(&shape, self.dim, dims);
        // Half precision adds up in f32, integers wrap.
        let work = match source.dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            whole if !whole.is_float() => DType::I64,
            other => other,
        };
        let source = source.to_dtype(work)?;
        let spread = Spreading { places: &places, offsets: &offsets, slices: self.slices, n, inner, held: held.len() };
        let count = zeros.elem_count();
        let sum = if work == DType::I64 {
            let sources: Vec<Wrapping<i64>> = source.flatten_all()?.to_vec1()?.into_iter().map(Wrapping).collect();
            let values = spread.add(vec![Wrapping(0); count], &sources).into_iter().map(|v| v.0).collect::<Vec<_>>();
            Tensor::from_vec(values, shape.as_slice(), zeros.device())?
        } else {
            with_type!(work, T => {
                let sources: Vec<T> = source.flatten_all()?.to_vec1()?;
                let values = spread.add(vec![T::from_f64(0.0); count], &sources);
                Tensor::from_vec(values, shape.as_slice(), zeros.device())?
            }, otherwise unreachable!("tensors of a mesh have served types"))
        };
        Ok(vec![sum.to_dtype(zeros.dtype())?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(Keeps::Input(0), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.inputs()]) };
            let (dim, index) = (op.dim as isize, saved.input(0));
            let source = match op.slices {
                true => gradient.index_select(dim, &index)?,
                false => padded(&gradient.gather(dim, &index)?, saved.shape(1))?,
            };
            Ok(vec![None, Some(source)])
        })
    }
}

pub(super) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "scatter",
        samples: distinct,
        apply: |x| Ok(vec![x[0].scatter(0, &distinct_rows(&x[1])?, &x[1])?]),
    },
    OpEntry { name: "scatter_add", samples: scattered, apply: |x| Ok(vec![x[0].scatter_add(0, &x[1], &x[2])?]) },
    OpEntry { name: "index_add", samples: slices, apply: |x| Ok(vec![x[0].index_add(0, &x[1], &x[2])?]) },
    OpEntry {
        name: "index_put",
        samples: puts,
        apply: |x| {
            let places = [&x[1], &x[1]];
            Ok(vec![x[0].index_put(&places[..1], &x[2], true)?, x[0].index_put(&places, &x[3], true)?])
        },
    },
];

/// An index that names every row once, in reverse, as long as the source.
fn distinct_rows(source: &DTensor) -> Result<DTensor> {
    let n = source.shape()[0];
    let whole = vec![Placement::Replicate; source.placements().len()];
    let rows = DTensor::arange(0.0, n as f64, 1.0, DType::I64, source.device_mesh(), whole)?;
    let rows = rows.mul_scalar(-1.0)?.add_scalar(n as f64)?;
    rows.unsqueeze(1)?.expand(&[n as isize, source.shape()[1] as isize])
}

fn distinct() -> Vec<Vec<Sample>> {
    vec![
        vec![Sample::new(&[5, 3], DType::I64), Sample::new(&[4, 3], DType::I64)],
        vec![Sample::new(&[4, 3], DType::F64), Sample::new(&[2, 2], DType::F64)],
    ]
}

fn scattered() -> Vec<Vec<Sample>> {
    vec![
        vec![Sample::new(&[5, 3], DType::I64), Sample::index(&[4, 3], 5), Sample::new(&[4, 3], DType::I64)],
        vec![Sample::new(&[2, 4], DType::F64), Sample::index(&[3, 2], 2), Sample::new(&[3, 3], DType::F64)],
    ]
}

fn slices() -> Vec<Vec<Sample>> {
    vec![vec![Sample::new(&[5, 3], DType::I64), Sample::index(&[4], 5), Sample::new(&[4, 3], DType::I64)]]
}

fn puts() -> Vec<Vec<Sample>> {
    vec![vec![
        Sample::new(&[4, 3], DType::I64),
        Sample::index(&[2], 3),
        Sample::new(&[2, 3], DType::I64),
        Sample::new(&[2], DType::I64),
    ]]
}
