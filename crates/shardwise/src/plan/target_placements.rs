//! Target placements: for all axes of a mesh, or for some of them by name.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::sharded::AnyShardingSpec;

/// The placements that a plan asks for: for all mesh axes, for some of them by name, or as a sharding spec.
///
/// Plans take anything that converts into it, such as `[Shard(0), Replicate]` or `[("tp", Shard(0))]`.
///
/// ```
/// use shardwise::plan::TargetPlacements;
/// use shardwise::{Layout, Mesh, Placement::*};
///
/// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
/// let now = Layout::new(&mesh, (4, 4), [Shard(1), Replicate])?;
/// let all = TargetPlacements::from([Replicate, Shard(0)]).layout(&now)?;
/// assert_eq!(all.placements(), [Replicate, Shard(0)]);
/// let some = TargetPlacements::from([("tp", Shard(0))]).layout(&now)?;
/// assert_eq!(some.placements(), [Shard(1), Shard(0)]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetPlacements {
    /// One placement per axis of the mesh.
    All(Vec<Placement>),
    /// Placements over mesh axes by name. They shard in this order, after the axes that are not named, whose placements do
    /// not change.
    Along(Vec<(String, Placement)>),
    /// A sharding spec whose shards are a layout on the mesh: one per rank, sharded over its axes.
    Spec(AnyShardingSpec),
}

impl<S: Into<AnyShardingSpec>> From<S> for TargetPlacements {
    fn from(spec: S) -> Self {
        TargetPlacements::Spec(spec.into())
    }
}

impl From<Vec<Placement>> for TargetPlacements {
    fn from(placements: Vec<Placement>) -> Self {
        TargetPlacements::All(placements)
    }
}

impl<const N: usize> From<[Placement; N]> for TargetPlacements {
    fn from(placements: [Placement; N]) -> Self {
        TargetPlacements::All(placements.to_vec())
    }
}

impl<const N: usize> From<[(&str, Placement); N]> for TargetPlacements {
    fn from(placements: [(&str, Placement); N]) -> Self {
        TargetPlacements::Along(placements.map(|(axis, placement)| (axis.to_string(), placement)).to_vec())
    }
}

impl TargetPlacements {
    /// A placement over one mesh axis.
    pub(super) fn one(axis: &str, placement: &Placement) -> Self {
        TargetPlacements::Along(vec![(axis.to_string(), placement.clone())])
    }

    /// Whether no placement changes.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, TargetPlacements::Along(along) if along.is_empty())
    }

    /// Returns the layout to which a tensor with the layout `now` is redistributed.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if axes, placements or the spec do not fit the mesh and shape.
    pub fn layout(&self, now: &Layout) -> Result<Layout> {
        let mesh = now.mesh();
        self.check(mesh)?;
        let along = match self {
            TargetPlacements::All(placements) => return Layout::new(mesh, now.shape(), placements.iter().cloned()),
            TargetPlacements::Spec(spec) => {
                let shards = spec.build_metadata(now.shape(), DType::F32)?;
                return shards.layout_on(mesh).ok_or_else(|| {
                    let needed = format!("one shard per rank, sharded over the axes of mesh {mesh}");
                    ErrorKind::Plan.error("sharding spec", spec, needed, "list the ranks in the order of the mesh")
                });
            }
            TargetPlacements::Along(along) => along,
        };
        let (mut placements, mut shard_orders) = (now.placements().to_vec(), now.shard_orders());
        for (axis, placement) in along {
            let (axis, placement) = (mesh.axis(axis)?, placement.normalized(now.shape().len())?);
            shard_orders.iter_mut().for_each(|axes| axes.retain(|&a| a != axis));
            if let Some(dim) = placement.shard_dim() {
                shard_orders[dim].push(axis);
            }
            placements[axis] = placement;
        }
        Layout::from_shard_orders(mesh, now.shape(), &placements, &shard_orders)
    }

    /// Checks that the axes are those of a mesh.
    pub(super) fn check(&self, mesh: &Mesh) -> Result<()> {
        match self {
            TargetPlacements::All(placements) if placements.len() != mesh.ndim() => Err(ErrorKind::Layout.error(
                "placements",
                format!("{self} for mesh {mesh}"),
                format!("{}, one per mesh axis", mesh.ndim()),
                "list all axes, or name the axes that matter",
            )),
            TargetPlacements::All(_) | TargetPlacements::Spec(_) => Ok(()),
            TargetPlacements::Along(along) => {
                for (i, (axis, _)) in along.iter().enumerate() {
                    mesh.axis(axis)?;
                    if along[..i].iter().any(|(other, _)| other == axis) {
                        let found = format!("axis `{axis}` twice in {self}");
                        return Err(ErrorKind::Layout.error("placements", found, "every axis once", "leave one out"));
                    }
                }
                Ok(())
            }
        }
    }

    /// Adds placements over more axes, which shard last. A spec determines all axes, so nothing can be added to it.
    pub(super) fn and(&self, mesh: &Mesh, more: &[(String, Placement)]) -> Result<Self> {
        self.check(mesh)?;
        let mut along = match self {
            TargetPlacements::Along(along) => along.clone(),
            TargetPlacements::Spec(spec) => {
                let found = format!("{spec} and placements along more axes");
                return Err(ErrorKind::Plan.error("sharding plan", found, "one of the two", "use placements for both"));
            }
            TargetPlacements::All(placements) => {
                mesh.axes().iter().zip(placements).map(|(axis, p)| (axis.name.to_string(), p.clone())).collect()
            }
        };
        along.retain(|(axis, _)| more.iter().all(|(other, _)| other != axis));
        along.extend(more.iter().cloned());
        Ok(TargetPlacements::Along(along))
    }
}

impl fmt::Display for TargetPlacements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = match self {
            TargetPlacements::All(placements) => placements.iter().map(ToString::to_string).collect(),
            TargetPlacements::Along(along) => {
                along.iter().map(|(axis, placement)| format!("{axis}: {placement}")).collect()
            }
            TargetPlacements::Spec(spec) => vec![spec.to_string()],
        };
        f.write_str(&texts.join(", "))
    }
}
