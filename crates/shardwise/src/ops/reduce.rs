//! Reductions over dimensions. A dimension that ranks share leaves the result pending; nothing is gathered.

use std::panic::Location;

use candle_core::{DType, Tensor};
use smallvec::SmallVec;

use super::{OpEntry, Sample};
use crate::comm::implicitly;
use crate::error::{ErrorKind, Result};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Accumulation, Gradient, Op, OpPlan, Place, dispatch};
use crate::placement::{Placement, ReduceOp};
use crate::rule::{Shared, Signature};
use crate::tensor::{DTensor, Keeps, Saved};
use shardwise_kernels::{ComputeType, DimReduction, ViaF64, pointwise, reduce_dims};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reduce {
    kind: Kind,
    dims: Vec<usize>,
    keepdim: bool,
    /// Whether terms of f32 on several ranks are held in f64.
    exact: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Sum,
    /// A sum divided by the number of elements that it is made of on all ranks together.
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
    /// The sum over some dimensions (all for none named); integers give i64. Added up in f64, on ranks and between
    /// them (half precision: between ranks in f32), and rounded once, so that it does not depend on the layout.
    #[track_caller]
    pub fn sum(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::Sum, dims, keepdim)
    }

    /// The mean of all elements.
    #[track_caller]
    pub fn mean_all(&self) -> Result<DTensor> {
        self.mean(&[], false)
    }

    /// The sum of all elements.
    #[track_caller]
    pub fn sum_all(&self) -> Result<DTensor> {
        self.sum(&[], false)
    }

    /// The sum over some dimensions (all for none named), kept with size 1, of terms that are not negative: nothing cancels between ranks, so that
    /// terms of f32 travel as such.
    #[track_caller]
    pub(super) fn sum_of_positive(&self, dims: &[isize]) -> Result<DTensor> {
        let op = Reduce { kind: Kind::Sum, dims: resolve("sum", dims, self)?, keepdim: true, exact: false };
        Ok(dispatch(&op, &[self], Location::caller())?.swap_remove(0))
    }

    /// The mean over some dimensions (all for none named), added up as [`sum`](Self::sum) is; integers give f32.
    #[track_caller]
    pub fn mean(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        let resolved = resolve("mean", dims, self)?;
        let count: usize = resolved.iter().map(|&d| self.shape()[d]).product();
        reduce(self, Kind::Mean(count), dims, keepdim)
    }

    /// The product over some dimensions (all for none named); integers give i64.
    #[track_caller]
    pub fn prod(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::Prod, dims, keepdim)
    }

    /// The largest element along some dimensions (all for none named).
    #[track_caller]
    pub fn amax(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::Max, dims, keepdim)
    }

    /// The smallest element along some dimensions (all for none named).
    #[track_caller]
    pub fn amin(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::Min, dims, keepdim)
    }

    /// 1 where any element along some dimensions (all for none named) is not zero.
    #[track_caller]
    pub fn any(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::Any, dims, keepdim)
    }

    /// 1 where no element along some dimensions (all for none named) is zero.
    #[track_caller]
    pub fn all(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::All, dims, keepdim)
    }

    /// How many elements along some dimensions (all for none named) are not zero.
    #[track_caller]
    pub fn count_nonzero(&self, dims: &[isize], keepdim: bool) -> Result<DTensor> {
        reduce(self, Kind::CountNonzero, dims, keepdim)
    }
}

#[track_caller]
fn reduce(x: &DTensor, kind: Kind, dims: &[isize], keepdim: bool) -> Result<DTensor> {
    let op = Reduce { kind, dims: resolve(kind.name(), dims, x)?, keepdim, exact: true };
    Ok(dispatch(&op, &[x], Location::caller())?.swap_remove(0))
}

/// Dimensions counted from the front, all of them for none named.
fn resolve(name: &'static str, dims: &[isize], x: &DTensor) -> Result<Vec<usize>> {
    let ndim = x.rank();
    if dims.is_empty() {
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

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Sum => "sum",
            Kind::Mean(_) => "mean",
            Kind::Prod => "prod",
            Kind::Max => "amax",
            Kind::Min => "amin",
            Kind::Any => "any",
            Kind::All => "all",
            Kind::CountNonzero => "count_nonzero",
        }
    }

    /// How elements combine.
    fn fold(self) -> DimReduction {
        match self {
            Kind::Sum | Kind::Mean(_) => DimReduction::Sum,
            Kind::Prod => DimReduction::Product,
            Kind::Max => DimReduction::Max,
            Kind::Min => DimReduction::Min,
            Kind::Any => DimReduction::Any,
            Kind::All => DimReduction::All,
            Kind::CountNonzero => DimReduction::CountNonzero,
        }
    }

    /// How parts combine.
    fn combines(self) -> ReduceOp {
        match self {
            Kind::Sum | Kind::Mean(_) | Kind::CountNonzero => ReduceOp::Sum,
            Kind::Prod => ReduceOp::Product,
            Kind::Max | Kind::Any => ReduceOp::Max,
            Kind::Min | Kind::All => ReduceOp::Min,
        }
    }

    fn dtype(self, input: DType) -> DType {
        match self {
            Kind::Sum | Kind::Prod if !input.is_float() => DType::I64,
            Kind::Mean(_) if !input.is_float() => DType::F32,
            Kind::Sum | Kind::Mean(_) | Kind::Prod | Kind::Max | Kind::Min => input,
            Kind::Any | Kind::All => DType::U8,
            Kind::CountNonzero => DType::I64,
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
        if matches!(self.kind, Kind::Max | Kind::Min) && self.dims.iter().any(|&d| x.shape[d] == 0) {
            return Err(ErrorKind::shape(&x.shape).error(
                "operand",
                format!("shape {:?} in {} over dimensions {:?}", x.shape, self.name(), self.dims),
                "at least one element to choose from",
                "reduce other dimensions",
            ));
        }
        let dtype = self.kind.dtype(x.dtype);
        let combines = self.kind.combines();
        let mut signature = Signature::reduction(x.shape.len(), &self.dims, self.keepdim, Shared::Reduces(combines));
        match self.kind {
            // A type that wraps must do so before it is widened.
            Kind::Sum | Kind::Mean(_) | Kind::Prod if dtype != x.dtype => {}
            Kind::Sum | Kind::Mean(_) => {
                signature = signature.passing([Some(ReduceOp::Sum)], ReduceOp::Sum);
                signature = signature.passing([Some(ReduceOp::Avg)], ReduceOp::Avg);
            }
            Kind::Prod | Kind::Max | Kind::Min => signature = signature.passing([Some(combines)], combines),
            Kind::Any | Kind::All | Kind::CountNonzero => {}
        }
        let shape = self.shape(&x.shape).collect();
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype }] })
    }

    fn accumulation(&self) -> Accumulation {
        if self.exact { Accumulation::Exact } else { Accumulation::InF32 }
    }

    fn run(&self, inputs: &[Tensor], at: &Place<'_>) -> Result<Vec<Tensor>> {
        let (x, dtype) = (&inputs[0], at.output_dtype(0));
        let shape: SmallVec<[usize; 6]> = self.shape(x.dims()).collect();
        let Kind::Mean(count) = self.kind else {
            return Ok(vec![reduce_dims(self.kind.fold(), x, &self.dims, &shape, dtype)?]);
        };
        let sum = reduce_dims(DimReduction::Sum, x, &self.dims, &shape, DType::F64)?;
        let mean = ViaF64(move |[x]: [f64; 1]| x / count as f64, |[x]: [i64; 1]| x);
        Ok(vec![pointwise(mean, [&sum], &shape, ComputeType::F64, dtype)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        let keeps = match self.kind {
            Kind::Sum | Kind::Mean(_) => Keeps::Nothing,
            Kind::Prod => Keeps::Inputs,
            Kind::Max | Kind::Min => Keeps::All,
            Kind::Any | Kind::All | Kind::CountNonzero => return Gradient::NotDifferentiable,
        };
        Gradient::From(keeps, Self::backward)
    }
}

impl Reduce {
    fn backward(&self, saved: &Saved<'_>, gradients: &[Option<DTensor>]) -> Result<Vec<Option<DTensor>>> {
        let Some(g) = &gradients[0] else { return Ok(vec![None]) };
        // With the dimensions that were reduced, of size one.
        let kept = |t: &DTensor| match self.keepdim {
            true => Ok(t.clone()),
            false => self.dims.iter().try_fold(t.clone(), |t, &d| t.unsqueeze(d as isize)),
        };
        let shape: Vec<isize> = saved.shape(0).iter().map(|&n| n as isize).collect();
        let g = before_broadcast(self.name(), &kept(g)?, saved.layout(0))?;
        let gradient = match self.kind {
            Kind::Prod => g.mul(&products_of_others(&saved.input(0), &self.dims)?)?,
            Kind::Max | Kind::Min => {
                // Equal extremes share the gradient.
                let mask = saved.input(0).eq(&kept(&saved.output(0))?)?.to_dtype(g.dtype())?;
                let dims: Vec<isize> = self.dims.iter().map(|&d| d as isize).collect();
                let count = if dims.is_empty() { mask.clone() } else { mask.sum(&dims, true)? };
                g.div(&count)?.mul(&mask)?
            }
            Kind::Mean(count) => g.div_scalar(count as f64)?.expand(&shape)?,
            Kind::Sum => g.expand(&shape)?,
            Kind::Any | Kind::All | Kind::CountNonzero => unreachable!("not differentiable"),
        };
        Ok(vec![Some(gradient.to_dtype(saved.dtype(0))?)])
    }
}

/// A gradient that is about to be broadcast to the tensor `x`, which has as many dimensions, brought beside it while it is
/// small: partial sums are reduced, and along axes that shard `x` it is sharded as `x` is or whole. A gradient of the larger
/// shape that were placed in another way would have to be moved at that size.
#[track_caller]
fn before_broadcast(name: &'static str, gradient: &DTensor, x: &Layout) -> Result<DTensor> {
    let own = gradient.layout();
    if gradient.elem_count() >= x.shape().iter().product() {
        return Ok(gradient.clone());
    }
    let placement = |axis: usize| match (&own.placements()[axis], &x.placements()[axis]) {
        (Placement::Replicate, _) => Placement::Replicate,
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
    let cuts: Vec<Vec<usize>> = (0..own.shape().len()).map(order).collect();
    // Ragged sizes need not fit the other shards; replicas always do.
    let to = Layout::from_cuts(own.mesh(), own.shape(), &placements, &cuts);
    let to = to.or_else(|_| Layout::replicated(own.mesh(), own.shape()))?;
    let site = Location::caller();
    implicitly(name, || gradient.to_layout_at(&to, site))
}

/// Per element the product of all others along some dimensions, correct also where some are zero.
///
/// The dimensions are multiplied one after the other, so that one that is sharded exchanges the products of its shards only.
#[track_caller]
fn products_of_others(x: &DTensor, dims: &[usize]) -> Result<DTensor> {
    let mut others: Option<DTensor> = None;
    let mut x = x.everywhere("prod")?;
    for (i, &dim) in dims.iter().enumerate() {
        let along = x.products_before(dim)?.mul(&x.products_after(dim)?)?;
        others = Some(others.map_or(Ok(along.clone()), |others| others.mul(&along))?);
        if i + 1 < dims.len() {
            x = reduce(&x, Kind::Prod, &[dim as isize], true)?.everywhere("prod")?;
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

pub(super) const OPS: &[OpEntry] = entries!(sum, mean, prod, amax, amin, any, all, count_nonzero);

fn samples() -> Vec<Vec<Sample>> {
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1, 1], &[3]];
    let mut all: Vec<Vec<Sample>> = shapes.iter().map(|shape| vec![Sample::new(shape, DType::F64)]).collect();
    all.push(vec![Sample::new(&[5, 2], DType::I64)]);
    all
}
