//! Selecting elements by a mask, and writing where a mask is set. Every rank selects from its own shard of rows: ranks exchange
//! how many elements each of them selects, and no element moves.

use std::collections::BTreeMap;
use std::panic::Location;

use candle_core::{DType, Device, Tensor};

use crate::comm::{Call, DeviceMesh, record_implicit_operator};
use crate::error::{ErrorKind, Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::op::{Gradient, KernelContext, Op, OpPlan, check_one_mesh, dispatch, name_call};
use crate::ops::arguments::broadcast::broadcast_shape;
use crate::ops::{OpEntry, SampleInput};
use crate::placement::Placement;
use crate::rule::{Decision, DimSharding, RequiredInput, Signature};
use crate::tensor::{DTensor, SaveForBackward};
use shardwise_kernels::{contiguous, count_nonzero, index_select, nonzero_positions, put_slices};

/// The layouts in which every rank can apply a mask over dimensions `at..at + ndim` of a tensor by itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MaskLayouts {
    at: usize,
    ndim: usize,
    x: Layout,
    mask: Layout,
    /// The layout of the selected elements, in which the dimensions of the mask are one.
    picked: Layout,
}

/// Selects the elements where the mask is set. Inputs: tensor and mask.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MaskedSelect(MaskLayouts);

/// Copies a tensor with other values where the mask is set. Inputs: tensor, mask and values.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MaskedPut(MaskLayouts);

impl DTensor {
    /// Returns the elements where `mask` is nonzero, as a vector in row-major order. Tensor and mask broadcast.
    ///
    /// Collective: every rank of the mesh must call it. Ranks exchange how many elements each of them selects; the result is
    /// sharded like the rows of this tensor, with these sizes. Elements move only if a dimension other than the first is sharded
    /// (it becomes a shard of the first), or if the mask is sharded differently. A dry run selects all elements.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(2, |world| {
    ///     let mesh = world.mesh([("dp", 2)])?;
    ///     let x = DTensor::arange(0.0..6.0, DType::F32, &mesh, [Shard(0)])?;
    ///     let large = x.masked_select(&x.gt(1.5)?)?;
    ///     assert_eq!(large.layout().to_string(), "[4] on dp=2: S(0;1,3)");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "boolean_mask")]
    #[track_caller]
    pub fn masked_select(&self, mask: &DTensor) -> Result<DTensor> {
        let site = Location::caller();
        check_one_mesh("masked_select", &[self, mask], site)?;
        let Some(shape) = broadcast_shape(&[self.shape(), mask.shape()]) else {
            let found = format!("a mask of shape {:?} for {} in masked_select", mask.shape(), self.layout());
            let error = ErrorKind::shape(mask.shape()).error(
                "mask",
                found,
                "a shape that broadcasts",
                "reshape or expand the mask",
            );
            return Err(name_call(error, "masked_select", &[self, mask], site));
        };
        let (x, mask) = (self.stretched(&shape)?, mask.stretched(&shape)?);
        if shape.is_empty() {
            return x.unsqueeze(0)?.masked_part(0, &mask.unsqueeze(0)?);
        }
        x.masked_part(0, &mask)
    }

    /// Returns the indices of nonzero elements in row-major order, as i64: one row per element, one column per dimension.
    ///
    /// Collective, as [`masked_select`](Self::masked_select). The result is sharded like the rows of this tensor.
    #[doc(alias = "argwhere")]
    #[track_caller]
    pub fn nonzero(&self) -> Result<DTensor> {
        if self.ndim() == 0 {
            // One row without columns if it is nonzero.
            return self.unsqueeze(0)?.nonzero()?.narrow(1, 0, 0);
        }
        let site = Location::caller();
        let rows = by_rows(self.layout(), 0, self.ndim())?;
        let mask = record_implicit_operator("nonzero", || self.to_layout_at(&rows, site))?;
        let replicated = vec![Placement::Replicate; self.placements().len()];
        let columns = (0..self.ndim()).map(|dim| {
            let (n, mesh) = (self.shape()[dim] as i64, self.device_mesh());
            let indices = DTensor::arange(0..n, DType::I64, mesh, replicated.clone())?;
            let mut column = vec![1; self.ndim()];
            column[dim] = self.shape()[dim] as isize;
            let shape: Vec<isize> = self.shape().iter().map(|&n| n as isize).collect();
            indices.reshape(&column)?.expand(&shape)?.masked_select(&mask)
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        DTensor::stack(&columns.iter().collect::<Vec<_>>(), 1)
    }

    /// Expands this tensor to a shape. It is redistributed first, so that only its first dimension is sharded: before the
    /// expansion it is small.
    #[track_caller]
    fn stretched(&self, shape: &[usize]) -> Result<DTensor> {
        if self.shape() == shape {
            return Ok(self.clone());
        }
        let rows = |axis: &usize| self.ndim() == shape.len() && self.placements()[*axis].is_shard(Some(0));
        let others: Vec<usize> = (0..self.placements().len()).filter(|axis| !rows(axis)).collect();
        let (to, site) = (self.layout().without_axes(&others)?, Location::caller());
        let sizes: Vec<isize> = shape.iter().map(|&n| n as isize).collect();
        record_implicit_operator("masked_select", || self.to_layout_at(&to, site))?.expand(&sizes)
    }

    /// Selects by a mask over the dimensions from `at` on, which become one dimension.
    #[track_caller]
    pub(in crate::ops) fn masked_part(&self, at: usize, mask: &DTensor) -> Result<DTensor> {
        let (masked, mask) = self.prepared("masked_select", at, mask)?;
        Ok(dispatch(&MaskedSelect(masked), &[self, &mask], Location::caller())?.swap_remove(0))
    }

    /// Copies this tensor with `values`, which broadcast, where a mask over the dimensions from `at` on is set.
    #[track_caller]
    pub(in crate::ops) fn masked_put(&self, at: usize, mask: &DTensor, values: &DTensor) -> Result<DTensor> {
        let (masked, mask) = self.prepared("masked_put", at, mask)?;
        let shape: Vec<isize> = masked.picked.shape().iter().map(|&n| n as isize).collect();
        let values = values.to_dtype(self.dtype())?.expand(&shape)?;
        Ok(dispatch(&MaskedPut(masked), &[self, &mask, &values], Location::caller())?.swap_remove(0))
    }

    /// Finds the layouts in which every rank can apply the mask by itself, and redistributes the mask. Collective: exchanges how
    /// many elements each rank selects.
    #[track_caller]
    fn prepared(&self, name: &'static str, at: usize, mask: &DTensor) -> Result<(MaskLayouts, DTensor)> {
        let site = Location::caller();
        let ndim = mask.ndim();
        if ndim == 0 || self.shape().get(at..at + ndim) != Some(mask.shape()) {
            let found =
                format!("a mask of shape {:?} in {name} from dimension {at} of {}", mask.shape(), self.layout());
            return Err(ErrorKind::shape(mask.shape()).error(
                "mask",
                found,
                "the shape of the dimensions that it indexes",
                "expand the mask",
            ));
        }
        let x = sharded_as(by_rows(self.layout(), at, ndim)?, at, &by_rows(mask.layout(), 0, ndim)?)?;
        let over = |p: &Placement| if p.is_shard(Some(at)) { p.with_dim(0) } else { Placement::Replicate };
        let placements: Vec<Placement> = x.placements().iter().map(over).collect();
        let mut orders = vec![Vec::new(); ndim];
        orders[0] = x.shard_order(at).to_vec();
        let mask_layout = Layout::from_shard_orders(x.mesh(), mask.shape(), &placements, &orders)?;
        let mask = record_implicit_operator(name, || mask.to_layout_at(&mask_layout, site))?;
        let counts = selected_counts(&mask, site)?;
        let total = counts.values().sum();
        let resized = x.resized(at, total, &|runs| runs.first().map_or(0, |first| counts[&first]))?;
        let picked = joined(&resized, at, ndim)?;
        Ok((MaskLayouts { at, ndim, x, mask: mask_layout, picked }, mask))
    }
}

/// A layout in which every rank holds one range of whole rows of the dimensions `at..at + ndim`: axes that shard a later
/// dimension shard the first one instead. Selected elements are then in row-major order across ranks, and none is replicated.
fn by_rows(layout: &Layout, at: usize, ndim: usize) -> Result<Layout> {
    let settled = layout.reduced().unstrided(&|dim| dim == at)?;
    let inner = |axis: &usize| settled.placements()[*axis].shard_dim().is_some_and(|d| d > at && d < at + ndim);
    let inner: Vec<usize> = (0..settled.placements().len()).filter(inner).collect();
    if inner.is_empty() {
        return Ok(settled);
    }
    let outer = settled.without_axes(&inner)?;
    let (mut placements, mut orders) = (outer.placements().to_vec(), outer.shard_orders());
    inner.iter().for_each(|&axis| placements[axis] = Placement::Shard(at as isize));
    orders[at].extend(&inner);
    Layout::from_shard_orders(outer.mesh(), outer.shape(), &placements, &orders)
}

/// The layout `x`, sharded on dimension `at` like the rows of the mask if it is replicated there: narrowing is free.
fn sharded_as(x: Layout, at: usize, mask: &Layout) -> Result<Layout> {
    let axes = mask.shard_order(0);
    if !x.shard_order(at).is_empty() || !axes.iter().all(|&axis| x.placements()[axis].is_replicate()) {
        return Ok(x);
    }
    let (mut placements, mut orders) = (x.placements().to_vec(), x.shard_orders());
    axes.iter().for_each(|&axis| placements[axis] = mask.placements()[axis].with_dim(at));
    orders[at] = axes.to_vec();
    Layout::from_shard_orders(x.mesh(), x.shape(), &placements, &orders)
}

/// The layout without the `ndim - 1` dimensions after `at`, which are not sharded.
fn joined(layout: &Layout, at: usize, ndim: usize) -> Result<Layout> {
    let kept = |d: usize| d <= at || d >= at + ndim;
    let moved = |p: &Placement| match p.shard_dim() {
        Some(d) if d > at => p.with_dim(d + 1 - ndim),
        _ => p.clone(),
    };
    let placements: Vec<Placement> = layout.placements().iter().map(moved).collect();
    let dims = (0..layout.shape().len()).filter(|&d| kept(d));
    let (shape, orders): (Vec<usize>, Vec<Vec<usize>>) =
        dims.map(|d| (layout.shape()[d], layout.shard_order(d).to_vec())).unzip();
    Layout::from_shard_orders(layout.mesh(), &shape, &placements, &orders)
}

/// How many elements of a mask are set in each shard of its first dimension, by the first index of the shard. Collective if it
/// is sharded. A rank outside the mesh does not learn them: for it nothing is selected.
fn selected_counts(mask: &DTensor, site: Site) -> Result<BTreeMap<usize, usize>> {
    let (mesh, layout): (&DeviceMesh, &Layout) = (mask.device_mesh(), mask.layout());
    let (dry, axes) = (mesh.world().is_dry(), layout.shard_order(0));
    let row: usize = layout.shape()[1..].iter().product();
    let of_ranks: Vec<usize> = match (dry, axes.is_empty()) {
        (false, _) if !mask.is_readable() => vec![0; mesh.mesh().size()],
        (true, _) => mesh.mesh().ranks().iter().map(|&r| layout.local_shape(r)[0] * row).collect(),
        (false, true) => vec![count_nonzero(mask.local())?; mesh.mesh().size()],
        (false, false) => {
            let group = mesh.whole_group()?;
            let mine = Tensor::new(&[count_nonzero(mask.local())? as i64], &Device::Cpu)?;
            let call = Call::AllGather { dim: 0, sizes: std::iter::repeat_n(1, group.size()).collect() };
            let all = record_implicit_operator("masked_select", || group.run(&call, &[mine], site))?.swap_remove(0);
            all.to_vec1::<i64>()?.into_iter().map(|n| n as usize).collect()
        }
    };
    let parts = mesh.mesh().ranks().iter().zip(of_ranks);
    let held = parts.filter(|(rank, _)| layout.local_shape(**rank)[0] > 0);
    Ok(held.map(|(&rank, count)| (layout.global_offset(rank)[0], count)).collect())
}

impl MaskLayouts {
    /// The number of elements of a local tensor before, along and after the dimensions of the mask.
    fn sizes(&self, x: &Tensor) -> (usize, usize, usize) {
        let product = |dims: &[usize]| dims.iter().product();
        let dims = x.dims();
        (product(&dims[..self.at]), product(&dims[self.at..self.at + self.ndim]), product(&dims[self.at + self.ndim..]))
    }

    fn plan(inputs: &[TensorMeta], output: TensorMeta) -> OpPlan {
        // The layouts depend on what the mask selects and are fixed in `MaskLayouts`, not decided by a signature.
        let unnamed = |shape: &[usize]| vec![None; shape.len()];
        let signature = Signature::new(
            std::iter::empty::<DimSharding>(),
            inputs.iter().map(|m| unnamed(&m.shape)).collect::<Vec<_>>(),
            [unnamed(&output.shape)],
        );
        OpPlan { signature, outputs: vec![output] }
    }
}

impl Op for MaskedSelect {
    fn name(&self) -> &'static str {
        "masked_select"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(MaskLayouts::plan(inputs, TensorMeta::new(self.0.picked.shape(), inputs[0].dtype)))
    }

    fn decide(&self, _: &OpPlan, _: &[&Layout], _: &[usize]) -> Result<Decision> {
        let inputs = vec![RequiredInput::Layout(self.0.x.clone()), RequiredInput::Layout(self.0.mask.clone())];
        Ok(Decision { inputs, outputs: vec![self.0.picked.clone()] })
    }

    fn run(&self, inputs: &[Tensor], context: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let (outer, along, inner) = self.0.sizes(&inputs[0]);
        let flat = contiguous(&inputs[0])?.reshape((outer, along, inner))?;
        Ok(vec![contiguous(
            &index_select(&flat, 1, &nonzero_positions(&inputs[1])?)?.reshape(context.local_shape(0))?,
        )?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; 2]) };
            let zeros = zeros(&op.0.x, gradient, saved.mesh(0))?;
            let put = dispatch(&MaskedPut(op.0.clone()), &[&zeros, &saved.input(1), gradient], Location::caller())?;
            Ok(vec![put.into_iter().next(), None])
        })
    }
}

/// Zeros in a layout; replicated if the layout has a shard order that placements do not express by themselves.
#[track_caller]
fn zeros(layout: &Layout, like: &DTensor, mesh: &DeviceMesh) -> Result<DTensor> {
    let placements = match layout.has_default_order() {
        true => layout.placements().to_vec(),
        false => vec![Placement::Replicate; layout.placements().len()],
    };
    DTensor::zeros(layout.shape(), like.dtype(), mesh, placements)
}

impl Op for MaskedPut {
    fn name(&self) -> &'static str {
        "masked_put"
    }

    fn plan(&self, inputs: &[TensorMeta]) -> Result<OpPlan> {
        Ok(MaskLayouts::plan(inputs, inputs[0].clone()))
    }

    fn decide(&self, _: &OpPlan, _: &[&Layout], _: &[usize]) -> Result<Decision> {
        let MaskLayouts { x, mask, picked, .. } = &self.0;
        let inputs = [x, mask, picked].map(|layout| RequiredInput::Layout(layout.clone())).to_vec();
        Ok(Decision { inputs, outputs: vec![x.clone()] })
    }

    fn run(&self, inputs: &[Tensor], _: &KernelContext<'_>) -> Result<Vec<Tensor>> {
        let [x, mask, values] = inputs else { unreachable!("three inputs") };
        let (outer, along, inner) = self.0.sizes(x);
        Ok(vec![put_slices(x, [outer, along, inner], &nonzero_positions(mask)?, values)?])
    }

    fn gradient(&self) -> Gradient<Self> {
        Gradient::From(SaveForBackward::Input(1), |op, saved, gradients| {
            let Some(gradient) = &gradients[0] else { return Ok(vec![None; 3]) };
            let (mask, site) = (saved.input(1), Location::caller());
            let covered = || -> Result<DTensor> {
                let zeros = zeros(&op.0.picked, gradient, saved.mesh(0))?;
                Ok(dispatch(&MaskedPut(op.0.clone()), &[gradient, &mask, &zeros], site)?.swap_remove(0))
            };
            let values = || -> Result<DTensor> {
                Ok(dispatch(&MaskedSelect(op.0.clone()), &[gradient, &mask], site)?.swap_remove(0))
            };
            Ok(vec![
                saved.needs_input_grad(0).then(covered).transpose()?,
                None,
                saved.needs_input_grad(2).then(values).transpose()?,
            ])
        })
    }
}

pub(in crate::ops) const OPS: &[OpEntry] = &[
    OpEntry { name: "masked_select", samples, apply: |x| Ok(vec![x[0].masked_select(&x[1])?]) },
    OpEntry { name: "nonzero", samples: nonzero_samples, apply: |x| Ok(vec![x[0].nonzero()?]) },
];

/// Masks of zeros and ones that broadcast, or to which the tensor broadcasts.
fn samples() -> Vec<Vec<SampleInput>> {
    let shapes: [(&[usize], &[usize]); 5] =
        [(&[4, 6], &[4, 6]), (&[5, 3], &[3]), (&[5, 1], &[5, 4]), (&[3, 2, 2], &[3, 1, 2]), (&[0, 2], &[2])];
    shapes.iter().map(|(x, mask)| vec![SampleInput::new(x, DType::F64), SampleInput::index(mask, 2)]).collect()
}

fn nonzero_samples() -> Vec<Vec<SampleInput>> {
    let shapes: [&[usize]; 3] = [&[4, 6], &[5], &[3, 1, 2]];
    shapes.iter().map(|shape| vec![SampleInput::index(shape, 3)]).collect()
}
