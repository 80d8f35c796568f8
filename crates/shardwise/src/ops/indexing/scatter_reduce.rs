//! Reductions into places that an index names, and what is written by index: `scatter_reduce`, `index_copy`, `put` and their kin.

use std::panic::Location;

use candle_core::{DType, Tensor};

use crate::error::{ErrorKind, Result};
use crate::layout::TensorMeta;
use crate::op::{Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::arguments::broadcast::broadcast_shape;
use crate::ops::arguments::indices::{check_indices, not_integer, wrapped};
use crate::ops::shapes::arrange::signed;
use crate::ops::{OpEntry, SampleInput};
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, Operand, SaveForBackward, SavedTensors};
use shardwise_kernels::{ScatterReduction, scatter_reduce};

/// How [`scatter_reduce`](DTensor::scatter_reduce) and [`index_reduce`](DTensor::index_reduce) reduce the elements for one place,
/// PyTorch's `reduce`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ScatterReduce {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The mean; of integers rounded down.
    Mean,
    /// The maximum.
    Amax,
    /// The minimum.
    Amin,
}

/// A product, maximum or minimum per place. Inputs: tensor, index and source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ReduceAt {
    dim: usize,
    reduction: ScatterReduction,
    include_self: bool,
}

/// Returns its second input, and passes the gradient to the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct StraightThrough;

impl DTensor {
    /// Returns a copy with elements of `source` reduced into the places that `index` names along a dimension; without
    /// `include_self` the places that are named start from only the sources.
    ///
    /// Sums and means communicate as [`scatter_add`](Self::scatter_add) does. For products, maxima and minima the dimension is
    /// gathered if it is sharded.
    ///
    /// # Errors
    /// If shapes do not fit. An index outside of the dimension is an error on the ranks that hold it; the other ranks get it with
    /// their next collective.
    #[track_caller]
    pub fn scatter_reduce(
        &self,
        dim: isize,
        index: &DTensor,
        source: &DTensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<DTensor> {
        if let Some(found) = self.as_vector(dim, |x| {
            x.scatter_reduce(0, &index.atleast_1d()?, &source.atleast_1d()?, reduce, include_self)?.squeeze(Some(0))
        }) {
            return found;
        }
        let at = self.resolve_dim("scatter_reduce", dim)?;
        if index.elem_count() == 0 {
            return Ok(self.clone());
        }
        let source = &source.to_dtype(self.dtype())?;
        let own = || match include_self {
            true => Ok(self.clone()),
            false => self.scatter(dim, index, &source.detach().zeros_like()?),
        };
        let reduction = match reduce {
            ScatterReduce::Sum => return own()?.scatter_add(dim, index, source),
            ScatterReduce::Mean => {
                let sum = own()?.scatter_add(dim, index, source)?;
                let ones = source.detach().ones_like()?;
                let first = if include_self { self.detach().ones_like()? } else { self.detach().zeros_like()? };
                let count = first.scatter_add(dim, index, &ones)?.clamp_min(1)?;
                return if self.dtype().is_float() { sum.div(&count) } else { sum.div_floor(&count) };
            }
            ScatterReduce::Prod => ScatterReduction::Product,
            ScatterReduce::Amax => ScatterReduction::Max,
            ScatterReduce::Amin => ScatterReduction::Min,
        };
        let op = ReduceAt { dim: at, reduction, include_self };
        Ok(dispatch(&op, &[self, index, source], Location::caller())?.swap_remove(0))
    }

    /// Returns a copy with slices of `source` reduced into the slices that a vector of indices names along a dimension.
    ///
    /// See [`scatter_reduce`](Self::scatter_reduce).
    #[track_caller]
    pub fn index_reduce(
        &self,
        dim: isize,
        index: &DTensor,
        source: &DTensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<DTensor> {
        if self.ndim() == 0 {
            return self.scatter_reduce(dim, index, source, reduce, include_self);
        }
        let index = self.slices_index("index_reduce", dim, index, source.shape())?;
        self.scatter_reduce(dim, &index, source, reduce, include_self)
    }

    /// Returns a copy with slices of `source` written at a vector of indices along a dimension.
    ///
    /// Communicates as [`scatter`](Self::scatter) does.
    #[track_caller]
    pub fn index_copy(&self, dim: isize, index: &DTensor, source: &DTensor) -> Result<DTensor> {
        if self.ndim() == 0 {
            return self.scatter(dim, index, source);
        }
        let source = &if source.ndim() == 0 { source.unsqueeze(0)? } else { source.clone() };
        let index = self.slices_index("index_copy", dim, index, source.shape())?;
        self.scatter(dim, &index, source)
    }

    /// Returns a copy with one value, a number or a scalar tensor, at a vector of indices along a dimension.
    ///
    /// The indices are gathered; this tensor keeps its layout.
    #[track_caller]
    pub fn index_fill<'a>(&self, dim: isize, index: &DTensor, value: impl Into<Operand<'a>>) -> Result<DTensor> {
        let value = value.into();
        if let Some(found) = self.as_vector(dim, |x| x.index_fill(0, &index.atleast_1d()?, value)?.squeeze(Some(0))) {
            return found;
        }
        let at = self.resolve_dim("index_fill", dim)?;
        let index = wrapped("index_fill", &index.atleast_1d()?, self.shape()[at])?;
        let value = match value {
            Operand::Number(number) => self.full_scalar(number)?,
            Operand::Tensor(value) => value.reshape(&[])?.to_dtype(self.dtype())?,
        };
        // A mask of the slices, so that one that is named twice counts once in the gradient of the value.
        let zeros = self.constant(&Tensor::zeros(self.shape()[at], DType::I64, &candle_core::Device::Cpu)?)?;
        let mask = zeros.index_add(0, &index, &index.ones_like()?)?;
        let mask = mask.gt(0)?.reshape(&[vec![-1], vec![1; self.ndim() - 1 - at]].concat())?;
        mask.where_cond(&value, self)
    }

    /// Selects elements of the flattened tensor by indices of any shape; negative ones count from the end.
    ///
    /// Communicates as [`index`](Self::index) of the flattened tensor does.
    #[track_caller]
    pub fn take(&self, index: &DTensor) -> Result<DTensor> {
        self.reshape(&[self.elem_count() as isize])?.index(index)
    }

    /// Returns a copy with elements of `source` written to places of the flattened tensor, or added if `accumulate`.
    ///
    /// Communicates as [`index_put`](Self::index_put) of the flattened tensor does.
    #[track_caller]
    pub fn put(&self, index: &DTensor, source: &DTensor, accumulate: bool) -> Result<DTensor> {
        if index.elem_count() == 0 && source.elem_count() == 0 {
            return Ok(self.clone());
        }
        let count = [index.elem_count() as isize];
        let (flat, index) = (self.reshape(&[self.elem_count() as isize])?, index.reshape(&count)?);
        let put = flat.index_put(&[&index], &source.reshape(&count)?, accumulate)?;
        put.reshape(&signed(self.shape()))
    }

    /// Gathers elements along a dimension as [`gather`](Self::gather) does, with tensor and indices broadcast in the other
    /// dimensions; without a dimension both are flattened.
    #[track_caller]
    pub fn take_along_dim(&self, indices: &DTensor, dim: Option<isize>) -> Result<DTensor> {
        let Some(dim) = dim else {
            let flat = |x: &DTensor| x.reshape(&[x.elem_count() as isize]);
            return flat(self)?.gather(0, &wrapped("take_along_dim", &flat(indices)?, self.elem_count())?);
        };
        let at = self.resolve_dim("take_along_dim", dim)?;
        let without = |x: &DTensor| {
            let mut shape = x.shape().to_vec();
            if let Some(n) = shape.get_mut(at) {
                *n = 1;
            }
            shape
        };
        let common = broadcast_shape(&[&without(self), &without(indices)]);
        let Some(common) = common.filter(|_| indices.ndim() == self.ndim()) else {
            let found = format!("indices {} in take_along_dim of {}", indices.layout(), self.layout());
            let needed = "as many dimensions, which broadcast except for the named one";
            return Err(ErrorKind::shape(indices.shape()).error("indices", found, needed, "reshape the indices"));
        };
        let expanded = |x: &DTensor| {
            let mut sizes = signed(&common);
            sizes[at] = x.shape()[at] as isize;
            x.expand(&sizes)
        };
        expanded(self)?.gather(dim, &wrapped("take_along_dim", &expanded(indices)?, self.shape()[at])?)
    }

    /// Returns a copy with the elements of `source`, in row-major order, at the places where `mask` is nonzero. Tensor and mask
    /// broadcast.
    ///
    /// A running count of the mask gives each place its element, so that ranks exchange counts and the elements that they lack.
    ///
    /// # Errors
    /// If the source has fewer elements than the mask selects, on the ranks that find it.
    #[track_caller]
    pub fn masked_scatter(&self, mask: &DTensor, source: &DTensor) -> Result<DTensor> {
        let both = DTensor::broadcast_tensors(&[self, mask])?;
        let (x, mask) = (&both[0], &both[1].ne(0)?);
        if x.elem_count() == 0 || source.elem_count() == 0 {
            return Ok(x.clone());
        }
        let order = mask.reshape(&[mask.elem_count() as isize])?.to_dtype(DType::I64)?.cumsum(0)?;
        let order = order.add_scalar(-1)?.clamp_min(0)?.reshape(&signed(x.shape()))?;
        let picked = source.reshape(&[source.elem_count() as isize])?.index(&order)?;
        mask.where_cond(&picked.to_dtype(self.dtype())?, x)
    }

    /// Returns `value`, a tensor of the same shape, whose gradient goes to this tensor instead.
    #[track_caller]
    pub(in crate::ops) fn straight_through(&self, value: &DTensor) -> Result<DTensor> {
        Ok(dispatch(&StraightThrough, &[self, &value.detach()], Location::caller())?.swap_remove(0))
    }

    /// A number as a scalar of the type of this tensor, on its mesh.
    #[track_caller]
    pub(in crate::ops) fn full_scalar(&self, number: impl Into<crate::tensor::Number>) -> Result<DTensor> {
        let replicated = vec![crate::placement::Placement::Replicate; self.placements().len()];
        DTensor::full(number, (), self.dtype(), self.device_mesh(), replicated)
    }

    /// A vector of indices of slices, expanded to an index of every element of `shape`.
    #[track_caller]
    fn slices_index(&self, name: &'static str, dim: isize, index: &DTensor, shape: &[usize]) -> Result<DTensor> {
        let at = self.resolve_dim(name, dim)?;
        let index = index.atleast_1d()?;
        if index.ndim() != 1 || shape.len() != self.ndim() || shape[at] != index.shape()[0] {
            let found = format!("an index {} for slices {shape:?} in {name} of {}", index.layout(), self.layout());
            let needed = "a vector with one index per slice of the source";
            return Err(ErrorKind::shape(index.shape()).error("index", found, needed, "reshape the operands"));
        }
        let mut column = vec![1; self.ndim()];
        column[at] = index.shape()[0] as isize;
        index.reshape(&column)?.expand(&signed(shape))
    }
}

impl ReduceAt {
    fn backward(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None; 3]) };
        let (x, index, source, result) = (saved.input(0), saved.input(1), saved.input(2), saved.output(0).detach());
        let (x, source, dim) = (x.detach(), source.detach(), self.dim as isize);
        let (mut of_x, of_source) = match self.reduction {
            ScatterReduction::Product => self.product_gradients(g, [&x, &index, &source], &result)?,
            // Equal maxima share the gradient.
            ScatterReduction::Max | ScatterReduction::Min => {
                let own = x.eq(&result)?.to_dtype(g.dtype())?;
                let given = source.eq(&result.gather(dim, &index)?)?.to_dtype(g.dtype())?;
                let count = own.scatter_add(dim, &index, &given)?;
                let share = g.div(&count)?;
                (own.mul(&share)?, given.mul(&share.gather(dim, &index)?)?)
            }
        };
        if !self.include_self {
            of_x = of_x.scatter(dim, &index, &source.zeros_like()?)?;
        }
        Ok(vec![Some(of_x), None, Some(of_source)])
    }

    /// Each gradient is the product of all other factors: the result divided by the factor, or the product of all but one if that is zero.
    fn product_gradients(&self, g: &DTensor, inputs: [&DTensor; 3], result: &DTensor) -> Result<(DTensor, DTensor)> {
        let ([x, index, source], dim) = (inputs, self.dim as isize);
        let reduce = |x: &DTensor, source: &DTensor| {
            x.scatter_reduce(dim, index, source, ScatterReduce::Prod, self.include_self)
        };
        let at = |t: &DTensor| t.gather(dim, index);
        let whole = x.eq(0.0)?.where_cond(1.0, x)?;
        let of_x = g.mul(&reduce(&whole, source)?)?.div(&whole)?;
        let zero = source.eq(0.0)?;
        let zeros = at(&x.zeros_like()?.scatter_add(dim, index, &zero.to_dtype(x.dtype())?)?)?;
        let single = zero.logical_and(&zeros.eq(1.0)?)?;
        let others = at(&g.mul(&reduce(x, &single.where_cond(1.0, source)?)?)?)?;
        let divided = at(&g.mul(result)?)?.div(&zero.where_cond(1.0, source)?)?;
        let of_source = single.where_cond(&others, &divided)?;
        Ok((of_x, zeros.gt(1.0)?.where_cond(0.0, &of_source)?))
    }
}

impl Op for ReduceAt {
    fn name(&self) -> &'static str {
        "scatter_reduce"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let [x, index, source] = inputs else { unreachable!("three inputs") };
        if index.dtype.is_float() {
            return Err(not_integer("scatter_reduce", index.dtype));
        }
        let ndim = x.shape.len();
        let inside = |d: usize| index.shape[d] <= source.shape[d] && (d == self.dim || index.shape[d] <= x.shape[d]);
        if index.shape.len() != ndim || source.shape.len() != ndim || !(0..ndim).all(inside) {
            return Err(ErrorKind::shape(&index.shape).error(
                "operands",
                format!("index {:?} and source {:?} in scatter_reduce of {:?}", index.shape, source.shape, x.shape),
                "equal numbers of dimensions, and an index no longer than the source, nor than the tensor except along the dimension",
                "reshape or slice the operands",
            ));
        }
        let aligned = |d: usize| {
            let same = index.shape[d] == x.shape[d] && source.shape[d] == x.shape[d];
            (d != self.dim && same).then_some(d)
        };
        let dims: Vec<Option<usize>> = (0..ndim).map(aligned).collect();
        let sharding = (0..ndim).map(|d| if d == self.dim { DimSharding::Never } else { DimSharding::Free });
        let signature = Signature::new(sharding, [dims.clone(), dims.clone(), dims.clone()], [dims]);
        Ok(OpPlan { signature, outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [x, index, source] = inputs else { unreachable!("three inputs") };
        check_indices("scatter_reduce", index, context.input_shape(0)[self.dim])?;
        let narrow = |t: Tensor, (dim, &n): (usize, &usize)| t.narrow(dim, 0, n);
        let source = index.dims().iter().enumerate().try_fold(source.clone(), narrow)?;
        Ok(vec![scatter_reduce(x, self.dim, index, &source, self.reduction, self.include_self)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::All, Self::backward)
    }
}

impl Op for StraightThrough {
    fn name(&self) -> &'static str {
        "straight_through"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let (x, value) = (&inputs[0], &inputs[1]);
        let signature = Signature::pointwise(&[&x.shape, &value.shape], &value.shape);
        Ok(OpPlan { signature, outputs: vec![value.clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(vec![inputs[1].clone()])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |_, _, gradients| Ok(vec![gradients[0].clone(), None]))
    }
}

const REDUCTIONS: [ScatterReduce; 5] =
    [ScatterReduce::Sum, ScatterReduce::Prod, ScatterReduce::Mean, ScatterReduce::Amax, ScatterReduce::Amin];

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry {
        name: "scatter_reduce",
        samples: scattered,
        apply: |x| REDUCTIONS.iter().map(|&r| x[0].scatter_reduce(0, &x[1], &x[2], r, true)).collect(),
    },
    OpEntry {
        name: "index_reduce",
        samples: slices,
        apply: |x| REDUCTIONS.iter().map(|&r| x[0].index_reduce(0, &x[1], &x[2], r, false)).collect(),
    },
    OpEntry { name: "index_copy", samples: rows, apply: |x| Ok(vec![x[0].index_copy(0, &rows_of(&x[0])?, &x[1])?]) },
    OpEntry { name: "index_fill", samples: slices, apply: |x| Ok(vec![x[0].index_fill(0, &x[1], 2)?]) },
    OpEntry { name: "take", samples: slices, apply: |x| Ok(vec![x[0].take(&x[1])?]) },
    OpEntry { name: "put", samples: slices, apply: |x| Ok(vec![x[0].put(&x[1], &x[2].select(1, 0)?, true)?]) },
    OpEntry {
        name: "take_along_dim",
        samples: slices,
        apply: |x| Ok(vec![x[0].take_along_dim(&x[1].unsqueeze(1)?, Some(0))?, x[0].take_along_dim(&x[1], None)?]),
    },
    OpEntry { name: "masked_scatter", samples: masks, apply: |x| Ok(vec![x[0].masked_scatter(&x[1], &x[2])?]) },
];

/// The indices of all rows, in reverse.
fn rows_of(x: &DTensor) -> Result<DTensor> {
    let indices: Vec<i64> = (0..x.shape()[0] as i64).rev().collect();
    x.constant(&Tensor::from_vec(indices, x.shape()[0], &candle_core::Device::Cpu)?)
}

fn scattered() -> Vec<Vec<SampleInput>> {
    vec![
        vec![
            SampleInput::new(&[5, 3], DType::F64),
            SampleInput::index(&[4, 3], 5),
            SampleInput::new(&[4, 3], DType::F64),
        ],
        vec![
            SampleInput::new(&[2, 4], DType::I64),
            SampleInput::index(&[3, 2], 2),
            SampleInput::new(&[3, 3], DType::I64),
        ],
    ]
}

fn slices() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[5, 3], DType::F64),
        SampleInput::index(&[4], 5),
        SampleInput::new(&[4, 3], DType::F64),
    ]]
}

fn rows() -> Vec<Vec<SampleInput>> {
    vec![vec![SampleInput::new(&[5, 3], DType::F64), SampleInput::new(&[5, 3], DType::F64)]]
}

fn masks() -> Vec<Vec<SampleInput>> {
    vec![vec![
        SampleInput::new(&[5, 3], DType::F64),
        SampleInput::index(&[5, 3], 2),
        SampleInput::new(&[15], DType::F64),
    ]]
}
