//! Derived layouts: a dimension of another size, without the shards of some axes, with plain shards.

use super::{Layout, coordinate_of};
use crate::error::Result;
use crate::mesh::Mesh;
use crate::placement::{Placement, Runs};

impl Layout {
    /// The layout of a tensor whose dimension `dim` has another size and is sharded by the same axes. `count` maps the
    /// indices that a coordinate held to the number that it holds afterwards.
    pub(crate) fn resized(&self, dim: usize, size: usize, count: &dyn Fn(&Runs) -> usize) -> Result<Layout> {
        let axes = self.shard_order(dim);
        let counts: Vec<usize> = coordinates(self.mesh(), axes).map(|c| count(&self.owned(dim, &c))).collect();
        let mut placements = self.placements().to_vec();
        for (axis, placement) in ragged(self.mesh(), dim, axes, &counts) {
            placements[axis] = placement;
        }
        let mut shape = self.shape().to_vec();
        shape[dim] = size;
        Self::from_shard_orders(self.mesh(), &shape, &placements, &self.shard_orders())
    }

    /// Per tensor dimension the axes that shard it, in order.
    pub(crate) fn shard_orders(&self) -> Vec<Vec<usize>> {
        (0..self.shape().len()).map(|dim| self.shard_order(dim).to_vec()).collect()
    }

    /// The same layout replicated on some axes. Ragged shards whose sizes depended on those axes become plain shards.
    pub(crate) fn without_axes(&self, axes: &[usize]) -> Result<Layout> {
        let replaced = |plain: bool| {
            let placements: Vec<Placement> = (0..self.mesh().ndim())
                .map(|axis| match &self.placements()[axis] {
                    _ if axes.contains(&axis) => Placement::Replicate,
                    sized if plain && !sized.fits_any_size() => sized.plain(),
                    other => other.clone(),
                })
                .collect();
            let kept = |order: Vec<usize>| order.into_iter().filter(|a| !axes.contains(a)).collect();
            let orders: Vec<Vec<usize>> = self.shard_orders().into_iter().map(kept).collect();
            Self::from_shard_orders(self.mesh(), self.shape(), &placements, &orders)
        };
        replaced(false).or_else(|_| replaced(true))
    }

    /// The same layout with plain shards in place of strided and block-cyclic ones on some dimensions, so that every rank
    /// holds one range of them.
    pub(crate) fn unstrided(&self, dims: &dyn Fn(usize) -> bool) -> Result<Layout> {
        let strided = |p: &Placement| !p.is_contiguous() && p.shard_dim().is_some_and(dims);
        if !self.placements().iter().any(strided) {
            return Ok(self.clone());
        }
        let plain = |p: &Placement| if p.shard_dim().is_some_and(dims) { p.plain() } else { p.clone() };
        let placements: Vec<Placement> = self.placements().iter().map(plain).collect();
        Self::from_shard_orders(self.mesh(), self.shape(), &placements, &self.shard_orders())
    }
}

/// All coordinates along some axes, in row-major order of the axes as listed; coordinates on other axes are zero.
pub(crate) fn coordinates<'a>(mesh: &'a Mesh, axes: &'a [usize]) -> impl Iterator<Item = Vec<usize>> + 'a {
    let combinations: usize = axes.iter().map(|&a| mesh.shape()[a]).product();
    (0..combinations).map(move |index| coordinate_of(mesh, axes, index))
}

/// The placements with which `axes`, in order, shard a dimension into pieces of these sizes: one size per combination of
/// their coordinates, row-major.
pub(crate) fn ragged(mesh: &Mesh, dim: usize, axes: &[usize], sizes: &[usize]) -> Vec<(usize, Placement)> {
    let mut inner = sizes.len();
    let mut placements = Vec::new();
    for &axis in axes {
        inner /= mesh.shape()[axis];
        let row: Vec<usize> = sizes.chunks(inner.max(1)).map(|piece| piece.iter().sum()).collect();
        placements.push((axis, Placement::ragged(dim as isize, row)));
    }
    placements
}
