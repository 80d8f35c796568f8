//! Mean and variance over sharded dimensions in one collective: every rank computes those of its shard, one all-gather brings the
//! two numbers per row and rank together, and every rank merges them. Unlike sums of elements and of squares, merged deviations stay
//! accurate for data far from zero.

use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::comm::record_implicit_operator;
use crate::error::Result;
use crate::layout::{Layout, TensorMeta, coordinates};
use crate::op::{Accumulation, Gradient, KernelContext, Op, OpPlan, dispatch};
use crate::placement::Placement;
use crate::rule::{Decision, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{DimReduction, contiguous, reduce_dims};

/// With more shards, two all-reduces of one number per row, which are communicated in f64, send fewer bytes than an all-gather of two
/// numbers per shard.
const MAX_SHARDS: usize = 4;

impl DTensor {
    /// Mean and variance (with divisor `n`) over some dimensions, kept with size 1; not partial. `None` if no such dimension is
    /// sharded, or over more ranks than pay off.
    #[track_caller]
    pub(in crate::ops) fn merged_statistics(
        &self,
        name: &'static str,
        dims: &[isize],
    ) -> Result<Option<(DTensor, DTensor)>> {
        let site = Location::caller();
        if self.ndim() == 0 {
            return Ok(None);
        }
        let mut reduced = dims.iter().map(|&d| self.resolve_dim(name, d)).collect::<Result<Vec<usize>>>()?;
        if reduced.is_empty() {
            reduced = (0..self.ndim()).collect();
        }
        reduced.sort_unstable();
        reduced.dedup();
        let per_shard = PerShard { from: self.layout().clone(), dims: reduced, spreads: false };
        let axes = per_shard.axes();
        let shards = per_shard.shards();
        if axes.is_empty() || shards > MAX_SHARDS || self.elem_count() == 0 || !self.dtype().is_float() {
            return Ok(None);
        }
        let run = |op: &PerShard, x: &DTensor| -> Result<DTensor> { Ok(dispatch(op, &[x], site)?.swap_remove(0)) };
        let spreads = PerShard { spreads: true, ..per_shard.clone() };
        let means = run(&per_shard, self)?;
        let deviations = self.sub(&run(&spreads, &means)?)?;
        let variances = run(&per_shard, &deviations.square()?)?;
        let packed = DTensor::stack(&[&means, &variances], -1)?;
        let whole = packed.layout().without_axes(&axes)?;
        let all = record_implicit_operator(name, || packed.to_layout_at(&whole, site))?;
        // In f64, so that the mean is rounded once more, not once per shard.
        let all = all.to_dtype(DType::F64)?;
        let (means, variances) = (all.select(-1, 0)?, all.select(-1, 1)?);
        let weights = self.constant(&per_shard.weights()?)?;
        let mean = means.mul(&weights)?.sum(&[-1], true)?;
        let apart = means.sub(&mean)?.square()?;
        let variance = variances.add(&apart)?.mul(&weights)?.sum(&[-1], true)?;
        let kept = |x: DTensor| -> Result<DTensor> {
            let x = x.squeeze(Some(-1))?.to_dtype(self.dtype())?;
            per_shard.dims.iter().try_fold(x, |x, &dim| x.unsqueeze(dim as isize))
        };
        Ok(Some((kept(mean)?, kept(variance)?)))
    }

    /// Two statistics of one shape and type, whose gradients are all-reduced in one call.
    #[track_caller]
    pub(in crate::ops) fn with_gradients_reduced_together(
        name: &'static str,
        both: [&DTensor; 2],
    ) -> Result<[DTensor; 2]> {
        let packed = DTensor::stack(&both, -1)?;
        let packed = dispatch(&ReduceGradient(name), &[&packed], Location::caller())?.swap_remove(0);
        Ok([packed.select(-1, 0)?, packed.select(-1, 1)?])
    }
}

/// The identity, whose gradient is all-reduced before it goes on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ReduceGradient(&'static str);

impl Op for ReduceGradient {
    fn name(&self) -> &'static str {
        self.0
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let shape = inputs[0].shape.as_slice();
        Ok(OpPlan { signature: Signature::pointwise(&[shape], shape), outputs: vec![inputs[0].clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        Ok(inputs.to_vec())
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Nothing, |op, _, gradients| {
            Ok(vec![gradients[0].as_ref().map(|gradient| gradient.all_reduced(op.0)).transpose()?])
        })
    }
}

/// The mean of what each rank holds along some dimensions, `[kept dimensions, shards]`, or (`spreads`) a number per rank repeated
/// along them. Local.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PerShard {
    /// The layout of the tensor with all dimensions.
    from: Layout,
    /// In ascending order.
    dims: Vec<usize>,
    spreads: bool,
}

impl PerShard {
    /// The mesh axes that shard the dimensions.
    fn axes(&self) -> Vec<usize> {
        let mut axes: Vec<usize> = self.dims.iter().flat_map(|&dim| self.from.shard_order(dim).to_vec()).collect();
        axes.sort_unstable();
        axes
    }

    fn shards(&self) -> usize {
        self.axes().iter().map(|&axis| self.from.mesh().shape()[axis]).product()
    }

    /// The number of elements per row that every shard has.
    fn counts(&self) -> Vec<usize> {
        let axes = self.axes();
        let count = |c: Vec<usize>| self.dims.iter().map(|&dim| self.from.owned(dim, &c).len()).product();
        coordinates(self.from.mesh(), &axes).map(count).collect()
    }

    /// The share of every shard in a row.
    fn weights(&self) -> Result<Tensor> {
        let counts = self.counts();
        let total: usize = counts.iter().sum();
        let shares: Vec<f64> = counts.iter().map(|&n| n as f64 / total as f64).collect();
        Ok(Tensor::from_vec(shares, counts.len(), &Device::Cpu)?)
    }

    fn kept(&self) -> Vec<usize> {
        (0..self.from.shape().len()).filter(|dim| !self.dims.contains(dim)).collect()
    }

    /// The layout of one number per row and shard: every rank holds that of its own shard.
    fn per_rank(&self) -> Result<Layout> {
        let (kept, axes) = (self.kept(), self.axes());
        let mut placements = vec![Placement::Replicate; self.from.mesh().ndim()];
        let mut shape: Vec<usize> = kept.iter().map(|&dim| self.from.shape()[dim]).collect();
        let mut orders: Vec<Vec<usize>> = kept.iter().map(|&dim| self.from.shard_order(dim).to_vec()).collect();
        for (new, order) in orders.iter().enumerate() {
            order.iter().for_each(|&axis| placements[axis] = self.from.placements()[axis].with_dim(new));
        }
        axes.iter().for_each(|&axis| placements[axis] = Placement::Shard(kept.len() as isize));
        shape.push(self.shards());
        orders.push(axes);
        Layout::from_shard_orders(self.from.mesh(), &shape, &placements, &orders)
    }
}

impl Op for PerShard {
    fn name(&self) -> &'static str {
        if self.spreads { "shard_spread" } else { "shard_mean" }
    }

    fn accumulation(&self) -> Accumulation {
        Accumulation::Disjoint
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        let layout = if self.spreads { self.from.clone() } else { self.per_rank()? };
        let shape = layout.shape().to_vec();
        let signature = Signature::new([], [vec![None; inputs[0].shape.len()]], [vec![None; shape.len()]]);
        Ok(OpPlan { signature, outputs: vec![TensorMeta { shape, dtype: inputs[0].dtype }] })
    }

    fn decide(&self, _: &OpPlan, _: &[&Layout], _: &[usize]) -> Result<Decision> {
        let per_rank = self.per_rank()?;
        Ok(match self.spreads {
            true => Decision::new([per_rank], [self.from.clone()]),
            false => Decision::new([self.from.clone()], [per_rank]),
        })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (x, shape) = (&inputs[0], context.local_shape(0));
        if self.spreads {
            let rows: Vec<usize> =
                shape.iter().enumerate().map(|(dim, &n)| if self.dims.contains(&dim) { 1 } else { n }).collect();
            return Ok(vec![contiguous(&contiguous(x)?.reshape(rows)?.broadcast_as(shape)?)?]);
        }
        let count: usize = self.dims.iter().map(|&dim| x.dims()[dim]).product();
        // Divided before it is rounded: the sum of large elements may be beyond the type.
        let sum = reduce_dims(DimReduction::Sum, x, &self.dims, shape, DType::F64)?;
        Ok(vec![(sum / count.max(1) as f64)?.to_dtype(x.dtype())?])
    }

    fn gradient(&self) -> Gradient<Self> {
        // A mean spreads its gradient, divided by the count; a repeated number has the sum of its gradients.
        Gradient::From(SaveForBackward::Nothing, |op, _, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None]) };
            let counts: Vec<f64> = op.counts().iter().map(|&n| n.max(1) as f64).collect();
            let counts = gradient.constant(&Tensor::new(counts, &Device::Cpu)?.to_dtype(gradient.dtype())?)?;
            let transposed = PerShard { spreads: !op.spreads, ..op.clone() };
            let run = |x: &DTensor| -> Result<DTensor> {
                Ok(dispatch(&transposed, &[x], Location::caller())?.swap_remove(0))
            };
            Ok(vec![Some(if op.spreads { run(gradient)?.mul(&counts)? } else { run(&gradient.div(&counts)?)? })])
        })
    }
}
