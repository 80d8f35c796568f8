//! Reductions over dimensions. A reduced dimension that is sharded leaves the result `Partial`; nothing is gathered.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use crate::comm::record_implicit_operator;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::ops::{OpEntry, SampleInput};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{DimSharding, Signature};
use crate::tensor::{DTensor, SaveForBackward, SavedTensors};
use shardwise_kernels::{ComputeType, DimReduction, ViaF64, pointwise, reduce_dims};

/// A reduction over the dimensions `dims`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reduce {
    kind: ReduceKind,
    dims: Vec<usize>,
    keepdim: bool,
    /// Whether the f32 terms of a partial sum are held in f64.
    exact: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ReduceKind {
    Sum,
    /// A sum divided by the global number of elements that are reduced to one.
    Mean(usize),
    Prod,
    Max,
    Min,
    /// 1 if any element is not zero.
    Any,
    /// 1 if no element is zero.
    All,
    CountNonzero,
}

impl DTensor {
    /// Sums over some dimensions, or over all if `dims` is empty; integers give i64.
    ///
    /// If a summed dimension is sharded, the result is `Partial(Sum)`: nothing is communicated until it is used by an operator
    /// that is not linear, or read. Accumulates in f64 on each rank and between ranks (half precision: f32 between ranks) and
    /// rounds once, so the result does not depend on the layout.
    #[track_caller]
    pub fn sum(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::Sum, dims, keepdim)
    }

    /// Returns the mean of all elements, see [`mean`](Self::mean).
    #[track_caller]
    pub fn mean_all(&self) -> Result<DTensor> {
        self.mean(&[], false)
    }

    /// Returns the sum of all elements, see [`sum`](Self::sum).
    #[track_caller]
    pub fn sum_all(&self) -> Result<DTensor> {
        self.sum(&[], false)
    }

    /// Sums nonnegative elements over some dimensions, or all if `dims` is empty, which are kept with size 1. Nothing cancels
    /// between ranks, so f32 terms are exchanged in f32, at half the bytes.
    #[track_caller]
    pub(in crate::ops) fn sum_of_positive(&self, dims: &[isize]) -> Result<DTensor> {
        let op = Reduce { kind: ReduceKind::Sum, dims: resolve("sum", dims, self)?, keepdim: true, exact: false };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }

    /// Averages over some dimensions, or over all if `dims` is empty; integers give f32.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Sum)`. Accumulates as [`sum`](Self::sum) does.
    #[track_caller]
    pub fn mean(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        // The sum of integers may be beyond i64 where the average is not.
        if !self.dtype().is_float() {
            return self.to_dtype(DType::F64)?.mean(dims, keepdim)?.to_dtype(DType::F32);
        }
        let resolved = resolve("mean", dims, self)?;
        let count: usize = resolved.iter().map(|&d| self.shape()[d]).product();
        reduce(self, ReduceKind::Mean(count), dims, keepdim)
    }

    /// Multiplies over some dimensions, or over all if `dims` is empty; integers give i64.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Product)`.
    #[track_caller]
    pub fn prod(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::Prod, dims, keepdim)
    }

    /// Returns the maximum over some dimensions, or over all if `dims` is empty; NaN if there is one.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Max)`. Equal maxima share the gradient.
    ///
    /// # Errors
    /// If a reduced dimension has size 0.
    #[track_caller]
    pub fn amax(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::Max, dims, keepdim)
    }

    /// Returns the minimum over some dimensions, or over all if `dims` is empty; NaN if there is one.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Min)`. Equal minima share the gradient.
    ///
    /// # Errors
    /// If a reduced dimension has size 0.
    #[track_caller]
    pub fn amin(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::Min, dims, keepdim)
    }

    /// Returns 1 (u8) where any element along some dimensions, or all if `dims` is empty, is nonzero.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Max)`.
    #[track_caller]
    pub fn any(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::Any, dims, keepdim)
    }

    /// Returns 1 (u8) where every element along some dimensions, or all if `dims` is empty, is nonzero.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Min)`.
    #[track_caller]
    pub fn all(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::All, dims, keepdim)
    }

    /// Counts nonzero elements along some dimensions, or all if `dims` is empty, as i64.
    ///
    /// If a reduced dimension is sharded, the result is `Partial(Sum)`.
    #[track_caller]
    pub fn count_nonzero(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, ReduceKind::CountNonzero, dims, keepdim)
    }
}

#[track_caller]
fn reduce(x: &DTensor, kind: ReduceKind, dims: &[isize], keepdim: bool) -> Result<DTensor> {
    let op = Reduce { kind, dims: resolve(kind.name(), dims, x)?, keepdim, exact: true };
    Ok(dispatch(&op, &[x], Location::caller())?.swap_remove(0))
}

/// Resolves negative dimensions; all dimensions if `dims` is empty.
pub(in crate::ops) fn resolve(name: &'static str, dims: &[isize], x: &DTensor) -> Result<Vec<usize>> {
    let ndim = x.ndim();
    // A scalar has dimensions 0 and -1 by name, as in PyTorch: there is nothing to reduce.
    if dims.is_empty() || ndim == 0 && matches!(dims, [0 | -1]) {
        return Ok((0..ndim).collect());
    }
    let mut resolved = Vec::new();
    for &dim in dims {
        let from_front = if dim < 0 { dim + ndim as isize } else { dim };
        match usize::try_from(from_front).ok().filter(|&d| d < ndim && !resolved.contains(&d)) {
            Some(d) => resolved.push(d),
            None => {
                return Err(x.bad_dims(name, dims, "dimensions of the tensor, each once"));
            }
        }
    }
    resolved.sort_unstable();
    Ok(resolved)
}

impl ReduceKind {
    fn name(self) -> &'static str {
        match self {
            ReduceKind::Sum => "sum",
            ReduceKind::Mean(_) => "mean",
            ReduceKind::Prod => "prod",
            ReduceKind::Max => "amax",
            ReduceKind::Min => "amin",
            ReduceKind::Any => "any",
            ReduceKind::All => "all",
            ReduceKind::CountNonzero => "count_nonzero",
        }
    }

    /// The kernel that reduces local elements.
    fn fold(self) -> DimReduction {
        match self {
            ReduceKind::Sum | ReduceKind::Mean(_) => DimReduction::Sum,
            ReduceKind::Prod => DimReduction::Product,
            ReduceKind::Max => DimReduction::Max,
            ReduceKind::Min => DimReduction::Min,
            ReduceKind::Any => DimReduction::Any,
            ReduceKind::All => DimReduction::All,
            ReduceKind::CountNonzero => DimReduction::CountNonzero,
        }
    }

    /// The reduction between ranks.
    fn reduce_op(self) -> ReduceOp {
        match self {
            ReduceKind::Sum | ReduceKind::Mean(_) | ReduceKind::CountNonzero => ReduceOp::Sum,
            ReduceKind::Prod => ReduceOp::Product,
            ReduceKind::Max | ReduceKind::Any => ReduceOp::Max,
            ReduceKind::Min | ReduceKind::All => ReduceOp::Min,
        }
    }

    fn dtype(self, input: DType) -> DType {
        match self {
            ReduceKind::Sum | ReduceKind::Prod if !input.is_float() => DType::I64,
            ReduceKind::Mean(_) if !input.is_float() => DType::F32,
            ReduceKind::Sum | ReduceKind::Mean(_) | ReduceKind::Prod | ReduceKind::Max | ReduceKind::Min => input,
            ReduceKind::Any | ReduceKind::All => DType::U8,
            ReduceKind::CountNonzero => DType::I64,
        }
    }
}

impl Reduce {
    /// The shape of the result for an input of this shape.
    fn shape<'a>(&'a self, input: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        let kept = (0..input.len()).filter(|d| self.keepdim || !self.dims.contains(d));
        kept.map(|d| if self.dims.contains(&d) { 1 } else { input[d] })
    }
}

impl Op for Reduce {
    fn name(&self) -> &'static str {
        self.kind.name()
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let x = &inputs[0];
        if matches!(self.kind, ReduceKind::Max | ReduceKind::Min) && self.dims.iter().any(|&d| x.shape[d] == 0) {
            return Err(ErrorKind::shape(&x.shape).error(
                "operand",
                format!("shape {:?} in {} over dimensions {:?}", x.shape, self.name(), self.dims),
                "at least one element to choose from",
                "reduce other dimensions",
            ));
        }
        let dtype = self.kind.dtype(x.dtype);
        let combines = self.kind.reduce_op();
        let mut signature =
            Signature::reduction(x.shape.len(), &self.dims, self.keepdim, DimSharding::Reduces(combines));
        match self.kind {
            // Narrow integers wrap in their own type: partial ones are reduced in it before they are widened to i64.
            ReduceKind::Sum | ReduceKind::Mean(_) | ReduceKind::Prod if dtype != x.dtype => {}
            ReduceKind::Sum | ReduceKind::Mean(_) => {
                signature = signature.allow_partial([Some(ReduceOp::Sum)], ReduceOp::Sum);
                signature = signature.allow_partial([Some(ReduceOp::Avg)], ReduceOp::Avg);
            }
            ReduceKind::Prod | ReduceKind::Max | ReduceKind::Min => {
                signature = signature.allow_partial([Some(combines)], combines);
            }
            ReduceKind::Any | ReduceKind::All | ReduceKind::CountNonzero => {}
        }
        let shape = self.shape(&x.shape).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn accumulation(&self) -> Accumulation {
        if self.exact { Accumulation::Exact } else { Accumulation::InF32 }
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, dtype) = (&inputs[0], context.output_dtype(0));
        let shape: SmallVec<[usize; 6]> = self.shape(x.dims()).collect();
        let ReduceKind::Mean(count) = self.kind else {
            return Ok(vec![reduce_dims(self.kind.fold(), x, &self.dims, &shape, dtype)?]);
        };
        let sum = reduce_dims(DimReduction::Sum, x, &self.dims, &shape, DType::F64)?;
        let mean = ViaF64(move |[x]: [f64; 1]| x / count as f64, |[x]: [i64; 1]| x);
        Ok(vec![pointwise(mean, [&sum], &shape, ComputeType::F64, dtype)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        let saves = match self.kind {
            ReduceKind::Sum | ReduceKind::Mean(_) => SaveForBackward::Nothing,
            ReduceKind::Prod => SaveForBackward::Inputs,
            ReduceKind::Max | ReduceKind::Min => SaveForBackward::All,
            ReduceKind::Any | ReduceKind::All | ReduceKind::CountNonzero => return Gradient::NotDifferentiable,
        };
        Gradient::From(saves, Self::backward)
    }
}

impl Reduce {
    fn backward(&self, saved: &SavedTensors<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None]) };
        // With the reduced dimensions, as size 1.
        let kept = |t: &DTensor| match self.keepdim {
            true => Ok(t.clone()),
            false => self.dims.iter().try_fold(t.clone(), |t, &d| t.unsqueeze(d as isize)),
        };
        let shape: Vec<isize> = saved.shape(0).iter().map(|&n| n as isize).collect();
        let g = before_broadcast(self.name(), &kept(g)?, saved.layout(0))?;
        let gradient = match self.kind {
            ReduceKind::Prod => g.mul(&products_of_others(&saved.input(0), &self.dims)?)?,
            ReduceKind::Max | ReduceKind::Min => {
                // Equal maxima or minima share the gradient, as in PyTorch.
                let mask = saved.input(0).eq(&kept(&saved.output(0))?)?.to_dtype(g.dtype())?;
                let dims: Vec<isize> = self.dims.iter().map(|&d| d as isize).collect();
                let count = if dims.is_empty() { mask.clone() } else { mask.sum(&dims, true)? };
                g.div(&count)?.mul(&mask)?
            }
            ReduceKind::Mean(count) => sharded_like(&g.div_scalar(count as f64)?.expand(&shape)?, saved.layout(0))?,
            ReduceKind::Sum => sharded_like(&g.expand(&shape)?, saved.layout(0))?,
            ReduceKind::Any | ReduceKind::All | ReduceKind::CountNonzero => unreachable!("not differentiable"),
        };
        Ok(vec![Some(gradient.to_dtype(saved.dtype(0))?)])
    }
}

/// Redistributes a gradient that is about to be broadcast to the shape of `x` while it is still small: partial sums are reduced,
/// and along axes that shard `x` it is sharded like `x` or replicated. After the broadcast a redistribution would move the
/// larger tensor.
#[track_caller]
fn before_broadcast(name: &'static str, gradient: &DTensor, x: &Layout) -> Result<DTensor> {
    let own = gradient.layout();
    if gradient.elem_count() >= x.shape().iter().product() {
        return Ok(gradient.clone());
    }
    let placement = |axis: usize| match (&own.placements()[axis], &x.placements()[axis]) {
        (_, sharded) if sharded.shard_dim().is_some_and(|d| own.shape()[d] == x.shape()[d]) => sharded.clone(),
        (now, Placement::Replicate | Placement::Partial(_)) if !now.is_partial() => now.clone(),
        _ => Placement::Replicate,
    };
    let placements: Vec<Placement> = (0..own.mesh().ndim()).map(placement).collect();
    let order = |dim: usize| {
        let led = x.shard_order(dim).iter().copied();
        let other = own.shard_order(dim).iter().copied().filter(|a| !x.shard_order(dim).contains(a));
        led.chain(other).filter(|&a| placements[a].is_shard(Some(dim))).collect::<Vec<_>>()
    };
    let orders: Vec<Vec<usize>> = (0..own.shape().len()).map(order).collect();
    // Ragged sizes of `x` may not fit the other shards of the gradient; replicated always does.
    let to = Layout::from_shard_orders(own.mesh(), own.shape(), &placements, &orders);
    let to = to.or_else(|_| Layout::replicated(own.mesh(), own.shape()))?;
    let site = Location::caller();
    record_implicit_operator(name, || gradient.to_layout_at(&to, site))
}

/// Narrows the broadcast gradient of a vector, such as losses of tokens, along axes that shard it, without communication. The next
/// operator may copy it, and must not copy the gradients of all ranks. Of a matrix, the next operator may need it in another layout.
#[track_caller]
fn sharded_like(gradient: &DTensor, x: &Layout) -> Result<DTensor> {
    let own = gradient.layout();
    let both = || own.placements().iter().zip(x.placements());
    // Shards of other dimensions would divide what `x` divides by sizes that may be ragged.
    let fits = |(now, of_x): (&Placement, &Placement)| match of_x.is_shard(None) {
        true => now.is_replicate() || now == of_x,
        false => !now.is_shard(None),
    };
    if x.shape().len() > 1 || !both().all(fits) {
        return Ok(gradient.clone());
    }
    let placements: Vec<Placement> =
        both().map(|(now, of_x)| if of_x.is_shard(None) { of_x.clone() } else { now.clone() }).collect();
    let orders: Vec<Vec<usize>> = (0..x.shape().len()).map(|dim| x.shard_order(dim).to_vec()).collect();
    let to = Layout::from_shard_orders(own.mesh(), own.shape(), &placements, &orders)?;
    gradient.to_layout_at(&to, Location::caller())
}

/// Per element the product of all other elements along some dimensions: the gradient of `prod`, correct for zeros too.
///
/// Dimensions are multiplied one after the other, so a sharded one exchanges only the products of its shards.
#[track_caller]
fn products_of_others(x: &DTensor, dims: &[usize]) -> Result<DTensor> {
    let mut others: Option<DTensor> = None;
    let mut x = x.all_reduced("prod")?;
    for (i, &dim) in dims.iter().enumerate() {
        let along = x.products_before(dim)?.mul(&x.products_after(dim)?)?;
        others = Some(others.map_or(Ok(along.clone()), |others| others.mul(&along))?);
        if i + 1 < dims.len() {
            x = reduce(&x, ReduceKind::Prod, &[dim as isize], true)?.all_reduced("prod")?;
        }
    }
    match others {
        Some(others) => Ok(others),
        None => x.ones_like(),
    }
}

macro_rules! entries {
    ($($name:ident),*) => {
        &[$(
            OpEntry { name: stringify!($name), samples, apply: |x| Ok(vec![
                x[0].$name(&[0], false)?,
                x[0].$name(&[-1], true)?,
                x[0].$name(&[], false)?,
            ]) },
        )*]
    };
}

pub(in crate::ops) const OPS: &[OpEntry] = entries!(sum, mean, prod, amax, amin, any, all, count_nonzero);

fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1, 1], &[3]];
    let mut all: Vec<Vec<SampleInput>> = shapes.iter().map(|shape| vec![SampleInput::new(shape, DType::F64)]).collect();
    all.push(vec![SampleInput::new(&[5, 2], DType::I64)]);
    all
}
