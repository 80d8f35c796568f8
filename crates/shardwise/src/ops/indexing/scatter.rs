//! Scatters: writing or adding elements and slices at given indices. A rank writes what falls into its own shard; if the source
//! is sharded instead, the result of an addition is `Partial(Sum)`.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch, name_call};
use crate::ops::arguments::indices::{check_indices, wrapped};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Decision, DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{IndexRange, SumsFrom, index_add, scatter, scatter_add};

/// Copies `x` with elements of `source` written at `index` along a dimension. Inputs: `x`, `index`, `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Scatter {
    dim: usize,
}

/// Adds elements of a source to `from`, at an index along a dimension of a given size. Inputs: `index`, `source`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ScatterAdd {
    dim: usize,
    size: usize,
    /// Whether the index is a vector of slices (`index_add`), not of elements (`scatter_add`).
    slices: bool,
    from: SumsFrom,
    /// How the result is sharded along axes that the source does not determine.
    like: Layout,
}

impl DTensor {
    /// Returns a copy with elements of `source` written at `index` along a dimension: `out[index[i][j]][j] = source[i][j]`.
    ///
    /// Indices must be distinct; otherwise it is unspecified which element is written. If `dim` is sharded, `index` and `source`
    /// are gathered along its axes, and this tensor keeps its layout.
    #[track_caller]
    pub fn scatter(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        if let Some(found) = self.on_vectors(dim, index, source, |x, index, source| x.scatter(0, index, source)) {
            return found;
        }
        let op = Scatter { dim: self.resolve_dim("scatter", dim)? };
        if index.elem_count() == 0 {
            return Ok(self.clone());
        }
        let source = source.to_dtype(self.dtype())?;
        Ok(dispatch(&op, &[self, index, &source], Location::caller())?.swap_remove(0))
    }

    /// Returns a copy with elements of `source` added at `index` along a dimension: `out[index[i][j]][j] += source[i][j]`.
    ///
    /// A sharded source smaller than this tensor is gathered; a larger one gives a partial sum, which is reduced.
    #[track_caller]
    pub fn scatter_add(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        if let Some(found) = self.on_vectors(dim, index, source, |x, index, source| x.scatter_add(0, index, source)) {
            return found;
        }
        let at = self.resolve_dim("scatter_add", dim)?;
        if index.elem_count() == 0 {
            return Ok(self.clone());
        }
        let site = Location::caller();
        check_sizes("scatter_add", at, self.shape(), index.shape(), source.shape())
            .map_err(|e| name_call(e, "scatter_add", &[self, index, source], site))?;
        let source = source.to_dtype(self.dtype())?;
        self.add(&scatter_add_elements(self.layout(), at, index, &source, SumsFrom::Neutral)?)
    }

    /// Returns a copy with slices of `source` added at a vector of indices along a dimension.
    ///
    /// Communicates as [`scatter_add`](Self::scatter_add) does.
    #[track_caller]
    pub fn index_add(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        if let Some(found) = self.on_vectors(dim, index, source, |x, index, source| x.index_add(0, index, source)) {
            return found;
        }
        let at = self.resolve_dim("index_add", dim)?;
        let index = &index.atleast_1d()?;
        let source = source.to_dtype(self.dtype())?;
        self.add(&scatter_add_slices(self.layout(), at, index, &source, SumsFrom::Neutral)?)
    }

    /// Runs an operator on a scalar along a dimension that it has only by name: all operands as vectors. `None` for any other
    /// tensor.
    #[track_caller]
    fn on_vectors(
        &self,
        dim: isize,
        index: &DTensor,
        source: &DTensor,
        run: impl FnOnce(&DTensor, &DTensor, &DTensor) -> Result<DTensor>,
    ) -> Option<Result<DTensor>> {
        self.as_vector(dim, |x| run(x, &index.atleast_1d()?, &source.atleast_1d()?)?.squeeze(Some(0)))
    }

    /// Returns a copy with `values` written at indices of the first dimensions, or added if `accumulate`.
    ///
    /// The indices broadcast, and negative ones count from the end; `values` broadcasts to their shape, followed by the dimensions
    /// without index. Communicates as [`scatter`](Self::scatter) and [`index_add`](Self::index_add) do.
    #[track_caller]
    pub fn index_put(&self, indices: &[&DTensor], values: &DTensor, accumulate: bool) -> Result<DTensor> {
        if indices.is_empty() || indices.len() > self.ndim() {
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
        let places = [place.shape(), rest].concat();
        let place = place.reshape(&[count as isize])?;
        let wanted = [signed(&[count]), signed(rest)].concat();
        let mut dims = values.shape().iter().rev().zip(places.iter().rev());
        if values.ndim() > places.len() || dims.any(|(&own, &wanted)| own != wanted && own != 1) {
            let found =
                format!("values of shape {:?} for {count} places in index_put of {}", values.shape(), self.layout());
            let needed = format!("values that broadcast to {places:?}");
            return Err(ErrorKind::shape(values.shape()).error(
                "values",
                found,
                needed,
                "reshape or expand the values",
            ));
        }
        let values = values.expand(&signed(&places))?.reshape(&wanted)?;
        let put = if accumulate {
            flat.index_add(0, &place, &values)?
        } else {
            let column = [vec![count as isize], vec![1; rest.len()]].concat();
            flat.scatter(0, &place.reshape(&column)?.expand(&wanted)?, &values)?
        };
        put.reshape(&signed(self.shape()))
    }
}

/// Adds slices of `source` to `from` in the shape and, where possible, the layout `like`, at a vector of indices along `dim`.
#[track_caller]
pub(in crate::ops) fn scatter_add_slices(
    like: &Layout,
    dim: usize,
    index: &DTensor,
    source: &DTensor,
    from: SumsFrom,
) -> Result<DTensor> {
    check_mesh("index_add", like, index)?;
    let op = ScatterAdd { dim, size: like.shape()[dim], slices: true, from, like: like.reduced() };
    Ok(dispatch(&op, &[index, source], Location::caller())?.swap_remove(0))
}

/// Adds elements of `source` to `from` in the shape and, where possible, the layout `like`, at `index` along `dim`.
#[track_caller]
pub(in crate::ops) fn scatter_add_elements(
    like: &Layout,
    dim: usize,
    index: &DTensor,
    source: &DTensor,
    from: SumsFrom,
) -> Result<DTensor> {
    check_mesh("scatter_add", like, index)?;
    let op = ScatterAdd { dim, size: like.shape()[dim], slices: false, from, like: like.reduced() };
    let sums = dispatch(&op, &[index, source], Location::caller())?.swap_remove(0);
    let border = if from == SumsFrom::Neutral && sums.dtype().is_float() { -0.0 } else { 0.0 };
    padded(&sums, like.shape(), border)
}

fn check_mesh(name: &str, like: &Layout, index: &DTensor) -> Result<()> {
    if like.mesh() == index.layout().mesh() {
        return Ok(());
    }
    let found = format!("{} and an index {} in {name}", like, index.layout());
    Err(ErrorKind::Operands.error("operands", found, "tensors on one mesh", "move the tensors first"))
}

/// Pads at the end of every dimension, up to a shape.
#[track_caller]
fn padded(x: &DTensor, shape: &[usize], value: f64) -> Result<DTensor> {
    let missing = |d: usize| (0, shape[d] - x.shape()[d]);
    x.pad(&(0..x.ndim()).rev().map(missing).collect::<Vec<_>>(), value)
}

/// Narrows every dimension but one to the size in a shape.
#[track_caller]
fn narrowed(x: &DTensor, dim: usize, shape: &[usize]) -> Result<DTensor> {
    let mut others = (0..x.ndim()).filter(|&d| d != dim);
    others.try_fold(x.clone(), |x, d| x.narrow(d as isize, 0, shape[d]))
}

fn replicated(like: &DTensor) -> Vec<Placement> {
    vec![Placement::Replicate; like.placements().len()]
}

/// Fails unless `source` has an element for every element of `index`, and `index` is no longer than `x` in any dimension but `dim`.
fn check_sizes(name: &str, dim: usize, x: &[usize], index: &[usize], source: &[usize]) -> Result<()> {
    let inside = |d: usize| index[d] <= source[d] && (d == dim || index[d] <= x[d]);
    if index.len() == x.len() && source.len() == x.len() && (0..x.len()).all(inside) {
        return Ok(());
    }
    Err(ErrorKind::shape(index).error(
        "operands",
        format!("index {index:?} and source {source:?} in {name} of shape {x:?} along dimension {dim}"),
        "equal numbers of dimensions, and an index no longer than the source, nor than the tensor except along that dimension",
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
        let sharding = (0..ndim).map(|_| DimSharding::Free);
        let mut signature = Signature::new(sharding, [of_x.clone(), of_index.clone(), of_index], [of_x]);
        for op in ReduceOp::ALL {
            signature = signature.allow_partial([Some(op), None, Some(op)], op);
        }
        Ok(OpPlan { signature, outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [x, index, source] = inputs else { unreachable!("three inputs") };
        check_indices("scatter", index, context.input_shape(0)[self.dim])?;
        let held = IndexRange::new(context.input_runs(0, self.dim).iter());
        Ok(vec![scatter(x, self.dim, index, &used(source, index.dims())?, &held)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let (dim, index) = (op.dim as isize, saved.input(1));
            let covered = || {
                let zeros =
                    DTensor::zeros(index.shape(), gradient.dtype(), gradient.device_mesh(), replicated(gradient))?;
                gradient.scatter(dim, &index, &zeros)
            };
            let source =
                || padded(&narrowed(gradient, op.dim, index.shape())?.gather(dim, &index)?, saved.shape(2), 0.0);
            Ok(vec![
                saved.needs_input_grad(0).then(covered).transpose()?,
                None,
                saved.needs_input_grad(2).then(source).transpose()?,
            ])
        })
    }
}

/// Narrows a source to the shape of the index.
fn used(source: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let narrow = |t: Tensor, (dim, &n): (usize, &usize)| t.narrow(dim, 0, n);
    Ok(shape.iter().enumerate().try_fold(source.clone(), narrow)?)
}

impl ScatterAdd {
    /// The layout in which a source can be added to the sharded result locally: replicated along axes that shard the indexed
    /// dimension, and sharded like the result on other dimensions of the same size.
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
        // Ragged sizes of the result may not fit the other shards of the source.
        Layout::new(source.mesh(), source.shape(), placements)
            .or_else(|_| source.without_axes(self.like.shard_order(self.dim)))
    }
}

impl Op for ScatterAdd {
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
        // A dimension in which the source is longer than the index cannot be sharded: local shards would not line up.
        let aligned = |d: usize| self.slices || index.shape[d] == source.shape[d];
        let of_source: Vec<Option<usize>> = (0..ndim).map(|d| aligned(d).then_some(d)).collect();
        let of_index = if self.slices { vec![Some(self.dim)] } else { of_source.clone() };
        let output: Vec<Option<usize>> = (0..ndim).map(|d| of_source[d].filter(|_| d != self.dim)).collect();
        let sharding =
            (0..ndim).map(|d| if d == self.dim { DimSharding::Reduces(ReduceOp::Sum) } else { DimSharding::Free });
        let signature = Signature::new(sharding, [of_index, of_source], [output])
            .allow_partial([None, Some(ReduceOp::Sum)], ReduceOp::Sum)
            .allow_partial([None, Some(ReduceOp::Avg)], ReduceOp::Avg);
        let mut shape = if self.slices { source.shape.clone() } else { index.shape.clone() };
        shape[self.dim] = self.size;
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: source.dtype }] })
    }

    /// The layout of the sources decides; along axes where they are replicated, the indexed dimension is sharded as in `like`.
    /// Sources smaller than the result are gathered for that, because reducing a partial sum would move the larger result.
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
        let shardable = |axis: &usize| {
            let free = output.placements()[*axis].is_replicate();
            free && self.like.placements()[*axis].chunk_dim() == Some(self.dim)
        };
        let axes: Vec<usize> = self.like.shard_order(self.dim).iter().copied().filter(shardable).collect();
        let (mut placements, mut orders) = (output.placements().to_vec(), output.shard_orders());
        for &axis in &axes {
            placements[axis] = Placement::Shard(self.dim as isize);
        }
        orders[self.dim] = axes;
        decision.outputs[0] = Layout::from_shard_orders(output.mesh(), output.shape(), &placements, &orders)?;
        Ok(decision)
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (index, source) = (&inputs[0], &inputs[1]);
        check_indices(self.name(), index, self.size)?;
        let held = IndexRange::new(context.output_runs(0, self.dim).iter());
        if self.slices {
            return Ok(vec![index_add(self.dim, index, source, &held, self.from)?]);
        }
        let mut shape = index.dims().to_vec();
        shape[self.dim] = held.len();
        Ok(vec![scatter_add(&shape, self.dim, index, &used(source, index.dims())?, &held, self.from)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Input(0), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; saved.num_inputs()]) };
            let (dim, index) = (op.dim as isize, saved.input(0));
            let source = match op.slices {
                true => gradient.index_select(dim, &index)?,
                false => padded(&gradient.gather(dim, &index)?, saved.shape(1), 0.0)?,
            };
            Ok(vec![None, Some(source)])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
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

/// An index with every row of the source once, in reverse.
fn distinct_rows(source: &DTensor) -> Result<DTensor> {
    let n = source.shape()[0];
    let replicated = vec![Placement::Replicate; source.placements().len()];
    let rows = DTensor::arange(0.0..n as f64, DType::I64, source.device_mesh(), replicated)?;
    let rows = rows.mul_scalar(-1.0)?.add_scalar(n as f64)?;
    rows.unsqueeze(1)?.expand(&[n as isize, source.shape()[1] as isize])
}

fn distinct() -> Vec<Vec<SampleInput>> {
    vec![
        vec![SampleInput::new(&[5, 3], DType::I64), SampleInput::new(&[4, 3], DType::I64)],
        vec![SampleInput::new(&[4, 3], DType::F64), SampleInput::new(&[2, 2], DType::F64)],
    ]
}

fn scattered() -> Vec<Vec<SampleInput>> {
    vec![
        vec![
            SampleInput::new(&[5, 3], DType::I64),
            SampleInput::index(&[4, 3], 5),
            SampleInput::new(&[4, 3], DType::I64),
        ],
        vec![
            SampleInput::new(&[2, 4], DType::F64),
            SampleInput::index(&[3, 2], 2),
            SampleInput::new(&[3, 3], DType::F64),
        ],
    ]
}

fn slices() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[5, 3], DType::I64),
        SampleInput::index(&[4], 5),
        SampleInput::new(&[4, 3], DType::I64),
    ]]
}

fn puts() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[4, 3], DType::I64),
        SampleInput::index(&[2], 3),
        SampleInput::new(&[2, 3], DType::I64),
        SampleInput::new(&[2], DType::I64),
    ]]
}
