//! The order in which mesh axes shard a tensor dimension, and its other form, strided shards.
//!
//! On a mesh `dp,tp`, "sharded by `tp`, then by `dp`" can also be written in mesh order: `dp` holds a piece of each of the
//! `tp` chunks, which is a strided shard with factor `tp` (PyTorch's `_StridedShard`). Both forms own the same elements if
//! the sizes divide. If not, they may differ, and the conversions here return an error.

use super::{Layout, coordinate_of};
use crate::error::{Error, ErrorKind, Result};
use crate::mesh::Mesh;
use crate::placement::Placement;

/// Per tensor dimension the axes that shard it, in mesh order.
pub(super) fn default_shard_orders(placements: &[Placement], ndim: usize) -> Vec<Vec<usize>> {
    let axes_of = |dim| (0..placements.len()).filter(|&a| placements[a].is_shard(Some(dim))).collect();
    (0..ndim).map(axes_of).collect()
}

/// Per tensor dimension the axes that shard it, in the `order` (dimension, axes) given or else in mesh order.
pub(super) fn shard_orders(
    mesh: &Mesh,
    placements: &[Placement],
    ndim: usize,
    order: &[(usize, Vec<usize>)],
) -> Result<Vec<Vec<usize>>> {
    let mut orders = default_shard_orders(placements, ndim);
    for (dim, axes) in order {
        let names = |axes: &[usize]| axes.iter().map(|&a| mesh.axes()[a].name.as_str()).collect::<Vec<_>>().join(",");
        let expected = orders.get(*dim).cloned().unwrap_or_default();
        let mut sorted = axes.clone();
        sorted.sort_unstable();
        let mut expected_sorted = expected.clone();
        expected_sorted.sort_unstable();
        if *dim >= ndim || sorted != expected_sorted {
            return Err(ErrorKind::Layout.error(
                "shard order",
                format!("`{}` for dimension {dim}", names(axes)),
                if *dim < ndim {
                    format!("each of `{}` once, the axes that shard dimension {dim}", names(&expected))
                } else {
                    format!("a dimension below {ndim}")
                },
                "list exactly the axes whose placement shards that dimension",
            ));
        }
        orders[*dim].clone_from(axes);
    }
    Ok(orders)
}

/// The position of an axis of size 1 makes no difference, so such axes always come first.
pub(super) fn canonical_order(mesh: &Mesh, axes: &[usize]) -> Vec<usize> {
    let (mut ordered, rest): (Vec<_>, Vec<_>) = axes.iter().partition(|&&a| mesh.shape()[a] == 1);
    ordered.sort_unstable();
    ordered.extend(rest);
    ordered
}

impl Layout {
    /// The axes that shard `dim`, in mesh order.
    pub(super) fn default_order(&self, dim: usize) -> Vec<usize> {
        let axes: Vec<usize> = (0..self.mesh().ndim()).filter(|a| self.shard_order(dim).contains(a)).collect();
        canonical_order(self.mesh(), &axes)
    }

    /// Whether all axes that shard the same dimension do so in mesh order.
    pub fn has_default_order(&self) -> bool {
        (0..self.shape().len()).all(|dim| self.shard_order(dim) == self.default_order(dim))
    }

    /// Returns the same layout in mesh order, with strided shards in place of an explicit shard order.
    ///
    /// This is the form in which PyTorch stores parameters that are sharded by tensor parallelism first and FSDP second.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the sizes do not divide, so that no strided shard owns the same elements.
    ///
    /// ```
    /// # use shardwise::{Layout, Mesh, Placement::*};
    /// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
    /// let ordered = Layout::with_shard_order(&mesh, 8, [Shard(0), Shard(0)], &[(0, &["tp", "dp"])])?;
    /// let strided = ordered.to_strided()?;
    /// assert_eq!(strided.to_string(), "[8] on dp=2,tp=2: SS(0,2), S(0)");
    /// assert_eq!(strided.to_shard_order()?, ordered);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn to_strided(&self) -> Result<Layout> {
        let mut placements = self.placements().to_vec();
        for dim in 0..self.shape().len() {
            let order = self.shard_order(dim);
            for (i, &axis) in order.iter().enumerate() {
                let later = order[..i].iter().filter(|&&a| a > axis);
                let split_factor: usize = later.map(|&a| self.mesh().shape()[a]).product();
                if split_factor == 1 {
                    continue;
                }
                if placements[axis].chunk_dim().is_none() {
                    return Err(self.no_other_form("strided", "only plain shards have a strided form"));
                }
                placements[axis] = Placement::strided(dim as isize, split_factor);
            }
        }
        let strided = Layout::new(self.mesh(), self.shape(), placements)?;
        self.checked_same_ownership(strided, "strided")
    }

    /// Returns the same layout with plain shards in an explicit order in place of strided shards; the inverse of
    /// [`to_strided`](Self::to_strided).
    ///
    /// # Errors
    /// [`Error::Invalid`] if a strided shard corresponds to no order of axes.
    pub fn to_shard_order(&self) -> Result<Layout> {
        if !self.placements().iter().any(|p| p.split_factor().is_some()) {
            return Ok(self.clone());
        }
        let mut placements = self.placements().to_vec();
        let mut order = Vec::new();
        for dim in 0..self.shape().len() {
            let strided = |&a: &usize| self.placements()[a].split_factor().is_some();
            if !self.shard_order(dim).iter().any(strided) {
                order.push((dim, self.shard_order(dim).to_vec()));
                continue;
            }
            let mut axes: Vec<usize> = Vec::new();
            let mut in_mesh_order = self.shard_order(dim).to_vec();
            in_mesh_order.sort_unstable();
            for &axis in in_mesh_order.iter().rev() {
                let factor = self.placements()[axis].split_factor();
                if factor.is_some() {
                    placements[axis] = placements[axis].plain();
                }
                let product = |axes: &[usize]| axes.iter().map(|&a| self.mesh().shape()[a]).product::<usize>();
                let position =
                    (0..=axes.len()).find(|&p| product(&axes[..p]) == factor.unwrap_or(1)).ok_or_else(|| {
                        self.no_other_form(
                            "ordered",
                            "a split factor is not the size of any axes that could shard first",
                        )
                    })?;
                axes.insert(position, axis);
            }
            order.push((dim, axes));
        }
        let ordered = Layout::build(self.mesh(), self.shape().to_vec(), &placements, &order)?;
        self.checked_same_ownership(ordered, "ordered")
    }

    fn checked_same_ownership(&self, other: Layout, form: &'static str) -> Result<Layout> {
        if self.owns_same_as(&other) {
            return Ok(other);
        }
        Err(self.no_other_form(form, "the sizes do not divide, so the two forms own different elements"))
    }

    /// Whether two layouts of one shape on one mesh are two names of one distribution: every rank holds the same elements in the same
    /// local order, with the same reductions left to do.
    pub(crate) fn names_same_as(&self, other: &Layout) -> bool {
        let alike = |(a, b): (&Placement, &Placement)| match (a.shard_dim(), b.shard_dim()) {
            (None, None) => a == b,
            (a, b) => a == b,
        };
        self.placements().iter().zip(other.placements()).all(alike) && self.owns_same_as(other)
    }

    /// Whether every rank owns the same elements in the same local order in both layouts, which must have the same mesh
    /// and shape.
    fn owns_same_as(&self, other: &Layout) -> bool {
        (0..self.shape().len()).all(|dim| {
            let axes = self.shard_order(dim);
            let combinations: usize = axes.iter().map(|&a| self.mesh().shape()[a]).product();
            (0..combinations).all(|index| {
                let coordinate = coordinate_of(self.mesh(), axes, index);
                self.owned(dim, &coordinate) == other.owned(dim, &coordinate)
            })
        })
    }

    fn no_other_form(&self, form: &'static str, why: &str) -> Error {
        ErrorKind::Layout.error(
            "layout",
            format!("{self}, which has no {form} form: {why}"),
            format!("a layout with a {form} form"),
            "use the layout as it is, or redistribute to plain shards",
        )
    }
}
