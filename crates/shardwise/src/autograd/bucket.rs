//! Buckets of gradients: gradients that need the same reduction share one collective.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::comm::{Call, DeviceMesh, Origin, record_operator, with_call_origin};
use crate::error::{Result, Site};
use crate::layout::{Layout, TensorMeta};
use crate::placement::{Placement, ReduceOp};
use crate::tensor::DTensor;
use shardwise_kernels::{concat, contiguous, placeholder};

/// Bytes of the largest bucket. 25 MiB is the default of PyTorch's DDP.
const MAX_BUCKET_BYTES: usize = 25 << 20;

/// Gradients of at least this many bytes are reduced alone: packing them would take longer than another collective.
const MIN_BYTES_ALONE: usize = 1 << 20;

/// The collective that a gradient needs.
#[derive(PartialEq, Eq, PartialOrd, Ord, Clone, Copy)]
enum BucketKind {
    AllReduce,
    /// Every rank keeps its shard of one dimension.
    ReduceScatter,
}

/// What gradients of one bucket have in common: mesh, kind, mesh axes, element type.
type BucketKey = (usize, BucketKind, Vec<usize>, u8);

/// Redistributes tensors to these layouts, in buckets where a reduction is all they need. Collective; the order of the
/// collectives is the same on all ranks.
pub(super) fn to_layouts(wanted: &[(DTensor, Layout)], site: Site) -> Result<Vec<DTensor>> {
    let mut done: Vec<Option<DTensor>> = vec![None; wanted.len()];
    let mut buckets: BTreeMap<BucketKey, Vec<usize>> = BTreeMap::new();
    let mut meshes: Vec<&DeviceMesh> = Vec::new();
    for (i, (tensor, layout)) in wanted.iter().enumerate() {
        let Some((kind, axes)) = kind(tensor.layout(), layout) else {
            done[i] = Some(tensor.to_layout_at(layout, site)?);
            continue;
        };
        let mesh = meshes.iter().position(|mesh| mesh.is_same(tensor.device_mesh())).unwrap_or_else(|| {
            meshes.push(tensor.device_mesh());
            meshes.len() - 1
        });
        buckets.entry((mesh, kind, axes, tensor.dtype() as u8)).or_default().push(i);
    }
    for ((_, kind, axes, _), members) in buckets {
        for bucket in fill(&members, wanted) {
            let parts: Vec<&(DTensor, Layout)> = bucket.iter().map(|&i| &wanted[i]).collect();
            let moved = record_operator("gradients", || reduce(kind, &axes, &parts, site))?;
            bucket.iter().zip(moved).for_each(|(&i, tensor)| done[i] = Some(tensor));
        }
    }
    Ok(done.into_iter().map(|tensor| tensor.expect("each is done once")).collect())
}

/// The reduction that takes a tensor from one layout to another, and its mesh axes, if one reduction is enough.
fn kind(from: &Layout, to: &Layout) -> Option<(BucketKind, Vec<usize>)> {
    let differs = |&axis: &usize| from.placements()[axis] != to.placements()[axis];
    let axes: Vec<usize> = (0..from.mesh().ndim()).filter(differs).collect();
    let is_partial = |&axis: &usize| from.placements()[axis] == Placement::Partial(ReduceOp::Sum);
    // The other axes must shard the same dimensions in the same order.
    let others = |layout: &Layout, dim: usize| -> Vec<usize> {
        layout.shard_order(dim).iter().copied().filter(|axis| !axes.contains(axis)).collect()
    };
    let alike = (0..from.shape().len()).all(|dim| others(from, dim) == others(to, dim));
    if axes.is_empty() || !axes.iter().all(is_partial) || !alike {
        return None;
    }
    // A sum of one term needs no reduction, and no copy in a bucket.
    if axes.iter().all(|&axis| from.mesh().shape()[axis] == 1) {
        return None;
    }
    if axes.iter().all(|&axis| to.placements()[axis].is_replicate()) {
        return Some((BucketKind::AllReduce, axes));
    }
    let [axis] = axes[..] else { return None };
    let target = &to.placements()[axis];
    let dim = target.shard_dim().filter(|_| target.is_contiguous())?;
    // The axis must shard the dimension last, so that the shards of its ranks are consecutive in what each rank holds.
    let last = to.shard_order(dim).last() == Some(&axis);
    last.then_some((BucketKind::ReduceScatter, axes))
}

/// Divides the members into buckets of at most [`MAX_BUCKET_BYTES`]; large gradients are alone.
fn fill(members: &[usize], wanted: &[(DTensor, Layout)]) -> Vec<Vec<usize>> {
    let mut buckets: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut alone = Vec::new();
    for &i in members {
        // The size of the whole tensor, an upper bound that is the same on all ranks, so that all form the same buckets.
        let bytes = wanted[i].0.elem_count() * reduction_dtype(wanted[i].0.dtype()).size_in_bytes();
        match buckets.last_mut() {
            _ if bytes >= MIN_BYTES_ALONE => alone.push(vec![i]),
            Some((size, bucket)) if *size + bytes <= MAX_BUCKET_BYTES => {
                *size += bytes;
                bucket.push(i);
            }
            _ => buckets.push((bytes, vec![i])),
        }
    }
    buckets.into_iter().map(|(_, bucket)| bucket).chain(alone).collect()
}

/// The type in which gradients are reduced: half precision in f32.
fn reduction_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

fn reduce(kind: BucketKind, axes: &[usize], parts: &[&(DTensor, Layout)], site: Site) -> Result<Vec<DTensor>> {
    if let [(tensor, layout)] = parts {
        return Ok(vec![tensor.to_layout_at(layout, site)?]);
    }
    let mesh = parts[0].0.device_mesh();
    let rank = mesh.world().rank();
    if !mesh.contains(rank) {
        return parts.iter().map(|(tensor, layout)| tensor.to_layout_at(layout, site)).collect();
    }
    let group = mesh.group_of(axes)?;
    let (dtype, reduced_as) = (parts[0].0.dtype(), reduction_dtype(parts[0].0.dtype()));
    // Per gradient and rank of the group, the shape of the rank's result.
    let pieces = |layout: &Layout| -> Vec<Vec<usize>> {
        match kind {
            BucketKind::AllReduce => vec![layout.local_shape(rank)],
            BucketKind::ReduceScatter => group.ranks().iter().map(|&r| layout.local_shape(r)).collect(),
        }
    };
    let shapes: Vec<Vec<Vec<usize>>> = parts.iter().map(|(_, layout)| pieces(layout)).collect();
    let count = |shape: &Vec<usize>| shape.iter().product::<usize>();
    let (call, own) = match kind {
        BucketKind::AllReduce => (Call::AllReduce { op: ReduceOp::Sum }, 0),
        BucketKind::ReduceScatter => {
            let sizes = (0..group.size()).map(|r| shapes.iter().map(|s| count(&s[r])).sum()).collect();
            (Call::ReduceScatter { op: ReduceOp::Sum, dim: 0, sizes }, group.rank())
        }
    };
    let packed = pack(mesh, axes[0], parts, &shapes, reduced_as)?;
    let origins = parts.iter().map(|(tensor, _)| tensor.origin());
    let origin = Origin::operator("backward", parts.len() as u64, origins, parts[0].0.shape());
    let reduced = with_call_origin(&origin, 0, || group.run(&call, &[packed], site))?.swap_remove(0);
    let mut start = 0;
    let mut moved = Vec::new();
    for ((tensor, layout), shapes) in parts.iter().zip(&shapes) {
        let shape = shapes[own].clone();
        let n = count(&shape);
        let local = match mesh.world().is_dry() || n == 0 {
            true => placeholder(&TensorMeta { shape, dtype: reduced_as })?,
            // A view: all gradients of a bucket are used by the same step, and a copy would be one more pass over them.
            false => reduced.narrow(0, start, n)?.reshape(shape)?,
        };
        start += n;
        moved.push(DTensor::from_storage(mesh, layout.clone(), local, dtype, tensor.origin().clone())?);
    }
    Ok(moved)
}

/// Packs all gradients into one vector: everything for the first rank of the group, then for the next.
fn pack(
    mesh: &DeviceMesh,
    axis: usize,
    parts: &[&(DTensor, Layout)],
    shapes: &[Vec<Vec<usize>>],
    dtype: DType,
) -> Result<Tensor> {
    let total: usize = shapes.iter().flatten().map(|shape| shape.iter().product::<usize>()).sum();
    if mesh.world().is_dry() || total == 0 {
        return Ok(placeholder(&TensorMeta { shape: vec![total], dtype })?);
    }
    let mut flat: Vec<Tensor> = Vec::new();
    for piece in 0..shapes[0].len() {
        for ((tensor, layout), shapes) in parts.iter().zip(shapes) {
            let local = tensor.storage().to_dtype(dtype)?;
            let part = match layout.placements()[axis].shard_dim() {
                None => local.clone(),
                Some(dim) => {
                    let start = shapes[..piece].iter().map(|s| s[dim]).sum();
                    local.narrow(dim, start, shapes[piece][dim])?
                }
            };
            if part.elem_count() > 0 {
                flat.push(contiguous(&part)?.flatten_all()?);
            }
        }
    }
    Ok(concat(&flat, 0)?)
}
