//! Where a tensor is to lie: on all axes of a mesh, or along some of them.

use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::error::{ErrorKind, Result};
use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::placement::Placement;
use crate::sharded::AnyShardingSpec;

/// Where a tensor is to lie.
///
/// ```
/// use shardwise::plan::Places;
/// use shardwise::{Layout, Mesh, Placement::*};
///
/// let mesh = Mesh::new([("dp", 2), ("tp", 2)])?;
/// let now = Layout::new(&mesh, (4, 4), [Shard(1), Replicate])?;
/// let all = Places::from([Replicate, Shard(0)]).layout(&now)?;
/// assert_eq!(all.placements(), [Replicate, Shard(0)]);
/// let some = Places::from([("tp", Shard(0))]).layout(&now)?;
/// assert_eq!(some.placements(), [Shard(1), Shard(0)]);
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Places {
    /// One placement per axis of the mesh.
    All(Vec<Placement>),
    /// Placements along axes by name. They cut in this order, after the axes that are not named, which stay as they are.
    Along(Vec<(String, Placement)>),
    /// The shards of a spec, which must be regular on the mesh: one per rank, cut along its axes.
    Spec(AnyShardingSpec),
}

impl<S: Into<AnyShardingSpec>> From<S> for Places {
    fn from(spec: S) -> Self {
        Places::Spec(spec.into())
    }
}

impl From<Vec<Placement>> for Places {
    fn from(placements: Vec<Placement>) -> Self {
        Places::All(placements)
    }
}

impl<const N: usize> From<[Placement; N]> for Places {
    fn from(placements: [Placement; N]) -> Self {
        Places::All(placements.to_vec())
    }
}

impl<const N: usize> From<[(&str, Placement); N]> for Places {
    fn from(placements: [(&str, Placement); N]) -> Self {
        Places::Along(placements.map(|(axis, placement)| (axis.to_string(), placement)).to_vec())
    }
}

impl Places {
    /// One placement along one axis.
    pub(super) fn one(axis: &str, placement: &Placement) -> Self {
        Places::Along(vec![(axis.to_string(), placement.clone())])
    }

    /// Whether a tensor stays as it is.
    pub(super) fn is_nothing(&self) -> bool {
        matches!(self, Places::Along(along) if along.is_empty())
    }

    /// The layout that a tensor gets which lies so now.
    pub fn layout(&self, now: &Layout) -> Result<Layout> {
        let mesh = now.mesh();
        self.check(mesh)?;
        let along = match self {
            Places::All(placements) => return Layout::new(mesh, now.shape(), placements.iter().cloned()),
            Places::Spec(spec) => {
                let shards = spec.build_metadata(now.shape(), DType::F32)?;
                return shards.layout_on(mesh).ok_or_else(|| {
                    let needed = format!("one shard per rank, cut along the axes of mesh {mesh}");
                    ErrorKind::Plan.error("sharding spec", spec, needed, "list the ranks in the order of the mesh")
                });
            }
            Places::Along(along) => along,
        };
        let (mut placements, mut cuts) = (now.placements().to_vec(), now.shard_orders());
        for (axis, placement) in along {
            let (axis, placement) = (mesh.axis(axis)?, placement.normalized(now.shape().len())?);
            cuts.iter_mut().for_each(|axes| axes.retain(|&a| a != axis));
            if let Some(dim) = placement.shard_dim() {
                cuts[dim].push(axis);
            }
            placements[axis] = placement;
        }
        Layout::from_shard_orders(mesh, now.shape(), &placements, &cuts)
    }

    /// An error unless the axes are those of a mesh.
    pub(super) fn check(&self, mesh: &Mesh) -> Result<()> {
        match self {
            Places::All(placements) if placements.len() != mesh.ndim() => Err(ErrorKind::Layout.error(
                "placements",
                format!("{self} for mesh {mesh}"),
                format!("{}, one per mesh axis", mesh.ndim()),
                "list all axes, or name those that matter",
            )),
            Places::All(_) | Places::Spec(_) => Ok(()),
            Places::Along(along) => {
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

    /// The same with placements along more axes, which cut last. A spec speaks of all axes and leaves none.
    pub(super) fn and(&self, mesh: &Mesh, more: &[(String, Placement)]) -> Result<Self> {
        self.check(mesh)?;
        let mut along = match self {
            Places::Along(along) => along.clone(),
            Places::Spec(spec) => {
                let found = format!("{spec} and placements along more axes");
                return Err(ErrorKind::Plan.error("sharding plan", found, "one of the two", "use placements for both"));
            }
            Places::All(placements) => {
                mesh.axes().iter().zip(placements).map(|(axis, p)| (axis.name.to_string(), p.clone())).collect()
            }
        };
        along.retain(|(axis, _)| more.iter().all(|(other, _)| other != axis));
        along.extend(more.iter().cloned());
        Ok(Places::Along(along))
    }
}

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = match self {
            Places::All(placements) => placements.iter().map(ToString::to_string).collect(),
            Places::Along(along) => along.iter().map(|(axis, placement)| format!("{axis}: {placement}")).collect(),
            Places::Spec(spec) => vec![spec.to_string()],
        };
        f.write_str(&texts.join(", "))
    }
}
