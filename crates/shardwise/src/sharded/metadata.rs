//! Metadata of all shards of a tensor, the same on every rank. No data, no communication.

use std::collections::BTreeMap;
use std::fmt;

use candle_core::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::device::RemoteDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::layout::{Layout, OwnedBox, TensorBox, ragged};
use crate::mesh::Mesh;
use crate::placement::Placement;

/// Offsets and sizes of a shard in the whole tensor, and the rank and device that hold it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawShardMetadata")]
pub struct ShardMetadata {
    /// Index of its first element in the whole tensor, one number per dimension.
    pub offsets: Vec<usize>,
    /// Its size in every dimension; a size may be 0.
    pub sizes: Vec<usize>,
    /// The rank and device that hold it; `None` in a description without data.
    pub placement: Option<RemoteDevice>,
}

impl ShardMetadata {
    /// Describes a shard by offsets, sizes and the device that holds it.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless there are as many offsets as sizes.
    pub fn new(
        offsets: impl Into<Vec<usize>>,
        sizes: impl Into<Vec<usize>>,
        placement: Option<RemoteDevice>,
    ) -> Result<Self> {
        let shard = ShardMetadata { offsets: offsets.into(), sizes: sizes.into(), placement };
        if shard.offsets.len() == shard.sizes.len() {
            return Ok(shard);
        }
        let found = format!("{} offsets and {} sizes", shard.offsets.len(), shard.sizes.len());
        Err(ErrorKind::Argument.error(
            "shard",
            found,
            "as many of the one as of the other",
            "give both for every dimension",
        ))
    }

    /// The box of the whole tensor that the shard covers.
    pub fn as_box(&self) -> TensorBox {
        TensorBox { offsets: self.offsets.clone(), sizes: self.sizes.clone() }
    }

    /// The global rank that holds the shard, if its placement names one.
    pub fn rank(&self) -> Option<usize> {
        self.placement.as_ref().and_then(RemoteDevice::rank)
    }

    /// Number of elements of the shard.
    pub fn volume(&self) -> usize {
        self.as_box().volume()
    }
}

impl fmt::Display for ShardMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.sizes, self.offsets)?;
        self.placement.as_ref().map_or(Ok(()), |placement| write!(f, " on {placement}"))
    }
}

/// A shard as it is deserialized, before [`ShardMetadata::new`] has checked it.
#[derive(Deserialize)]
struct RawShardMetadata {
    offsets: Vec<usize>,
    sizes: Vec<usize>,
    placement: Option<RemoteDevice>,
}

impl TryFrom<RawShardMetadata> for ShardMetadata {
    type Error = Error;

    fn try_from(raw: RawShardMetadata) -> Result<Self> {
        ShardMetadata::new(raw.offsets, raw.sizes, raw.placement)
    }
}

/// Shape, element type and shards of a sharded tensor, the same on every rank.
#[doc(alias = "TensorProperties")]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardedTensorMetadata {
    /// Shape of the whole tensor.
    pub size: Vec<usize>,
    /// Element type.
    #[serde(serialize_with = "write_dtype", deserialize_with = "read_dtype")]
    pub dtype: DType,
    /// Whether the tensor becomes a leaf, for which `backward` computes a gradient.
    #[serde(default)]
    pub requires_grad: bool,
    /// The shards of all ranks. Those of one rank are in the order of its local shards.
    pub shards: Vec<ShardMetadata>,
}

impl ShardedTensorMetadata {
    /// Checks that every element of the tensor is in exactly one shard.
    ///
    /// # Errors
    /// [`Error::Invalid`] if shards overlap, leave a gap, exceed the tensor or have another number of dimensions.
    pub fn check_covering(&self) -> Result<()> {
        check_disjoint(&self.shards)?;
        for shard in &self.shards {
            if shard.offsets.len() != self.size.len() {
                return Err(ErrorKind::Argument.error(
                    "shards",
                    format!("shard {shard} of {} dimensions", shard.offsets.len()),
                    format!("{} dimensions, as the tensor of size {:?} has", self.size.len(), self.size),
                    "give offsets and sizes for every dimension of the tensor",
                ));
            }
            let outside = |(&size, (&offset, &length)): (&usize, (&usize, &usize))| {
                offset.checked_add(length).is_none_or(|end| end > size)
            };
            if self.size.iter().zip(shard.offsets.iter().zip(&shard.sizes)).any(outside) {
                let needed = format!("shards inside the tensor of size {:?}", self.size);
                return Err(ErrorKind::Argument.error(
                    "shards",
                    format!("shard {shard}"),
                    needed,
                    "correct its offsets or sizes",
                ));
            }
        }
        let volume_of = |sizes: &[usize]| sizes.iter().fold(1usize, |count, &n| count.saturating_mul(n));
        let (covered, volume) = (volume(&self.shards), volume_of(&self.size));
        if covered == volume {
            return Ok(());
        }
        Err(ErrorKind::Argument.error(
            "shards",
            format!("{covered} elements in {} shard(s)", self.shards.len()),
            format!("{volume}, all elements of the tensor of size {:?}", self.size),
            "add shards for the part of the tensor that none covers",
        ))
    }

    /// Combines the metadata that each rank has of its own shards; `None` stands for a rank without shards. Local.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless ranks agree on shape, type and `requires_grad`, and every element is in exactly one shard.
    #[doc(alias = "_raise_if_mismatch")]
    #[doc(alias = "build_global_metadata")]
    pub fn merge(ranks: &[Option<ShardedTensorMetadata>]) -> Result<ShardedTensorMetadata> {
        let mut held = ranks.iter().enumerate().filter_map(|(rank, m)| Some((rank, m.as_ref()?)));
        let Some((first_rank, first)) = held.next() else {
            let needed = "shards on one rank at least";
            return Err(ErrorKind::Argument.error(
                "sharded tensor",
                "no shards on any rank",
                needed,
                "pass the shards of a rank",
            ));
        };
        let mut whole = first.clone();
        for (rank, other) in held {
            let differs = |what: &str, a: &dyn fmt::Debug, b: &dyn fmt::Debug| {
                let found = format!("{what} {a:?} on rank {first_rank} and {b:?} on rank {rank}");
                Err(ErrorKind::Disagreement.error(
                    "sharded tensor",
                    found,
                    "the same on all ranks",
                    "pass the same on all ranks",
                ))
            };
            if other.size != whole.size {
                return differs("global size", &whole.size, &other.size);
            }
            if other.dtype != whole.dtype {
                return differs("element type", &whole.dtype.as_str(), &other.dtype.as_str());
            }
            if other.requires_grad != whole.requires_grad {
                return differs("requires_grad", &whole.requires_grad, &other.requires_grad);
            }
            whole.shards.extend(other.shards.iter().cloned());
        }
        whole.check_covering()?;
        Ok(whole)
    }

    /// The shards of a rank, in the order of its local shards.
    pub fn shards_of(&self, rank: usize) -> impl Iterator<Item = &ShardMetadata> {
        self.shards.iter().filter(move |shard| shard.rank() == Some(rank))
    }

    /// The non-empty boxes of a rank, with local offsets that count in the whole tensor.
    pub(crate) fn boxes_of(&self, rank: usize) -> Vec<OwnedBox> {
        let owned = |s: &ShardMetadata| OwnedBox { rank, global: s.as_box(), local_offsets: s.offsets.clone() };
        self.shards_of(rank).filter(|s| s.volume() > 0).map(owned).collect()
    }

    /// Finds the layout on `mesh` in which every rank holds exactly what it holds here. There is one if each rank has at most
    /// one box and every mesh axis shards one dimension.
    pub fn layout_on(&self, mesh: &Mesh) -> Option<Layout> {
        let mut held: BTreeMap<usize, TensorBox> = BTreeMap::new();
        for shard in self.shards.iter().filter(|s| s.volume() > 0) {
            let rank = shard.rank().filter(|&rank| mesh.contains(rank))?;
            if held.insert(rank, shard.as_box()).is_some() {
                return None;
            }
        }
        // The dimension whose offset changes along a mesh axis is the one that the axis shards.
        let first = held.values().next()?;
        let origin = held.iter().find(|(_, b)| b.offsets.iter().all(|&o| o == 0)).map(|(&rank, _)| rank)?;
        let sharded_dim = |axis: usize| {
            let group_ranks = mesh.group_ranks(&[axis], origin);
            let offsets = |dim: usize| group_ranks.iter().filter_map(|r| held.get(r)).map(|b| b.offsets[dim]).max();
            let dim = (0..first.offsets.len()).find(|&dim| offsets(dim) > Some(0));
            // Where one rank holds everything and the rest nothing, any dimension can be the sharded one.
            let lonely = group_ranks.iter().filter(|r| held.contains_key(r)).count() == 1 && group_ranks.len() > 1;
            dim.or_else(|| (lonely && !first.offsets.is_empty()).then_some(0))
        };
        let axes: Vec<Option<usize>> = (0..mesh.ndim()).map(sharded_dim).collect();
        let mut placements = vec![Placement::Replicate; mesh.ndim()];
        for dim in 0..self.size.len() {
            let sharding: Vec<usize> = (0..mesh.ndim()).filter(|&axis| axes[axis] == Some(dim)).collect();
            if sharding.is_empty() {
                continue;
            }
            let size = |rank: &usize| held.get(rank).map_or(0, |b| b.sizes[dim]);
            let sizes: Vec<usize> = mesh.group_ranks(&sharding, origin).iter().map(size).collect();
            for (axis, placement) in ragged(mesh, dim, &sharding, &sizes) {
                placements[axis] = placement;
            }
        }
        let layout = Layout::new(mesh, self.size.as_slice(), placements).ok()?;
        let same = |&rank: &usize| match layout.boxes_of(rank).as_slice() {
            [] => !held.contains_key(&rank),
            [single] => held.get(&rank) == Some(&single.global),
            _ => false,
        };
        mesh.ranks().iter().all(same).then_some(layout)
    }

    /// Finds a layout on a new mesh (axes `dim0`, `dim1`, ...) if the shards form a grid of boxes with one box per rank.
    pub fn layout(&self) -> Option<Layout> {
        let mut boxes: Vec<(Vec<usize>, usize)> = Vec::new();
        for shard in self.shards.iter().filter(|s| s.volume() > 0) {
            boxes.push((shard.offsets.clone(), shard.rank()?));
        }
        // Sorted by offsets in row-major order, the ranks of a grid are the ranks of a mesh.
        boxes.sort();
        let mut axes: Vec<(String, usize)> = Vec::new();
        for dim in 0..self.size.len() {
            let mut starts: Vec<usize> = boxes.iter().map(|(offsets, _)| offsets[dim]).collect();
            starts.sort_unstable();
            starts.dedup();
            if starts.len() > 1 {
                axes.push((format!("dim{dim}"), starts.len()));
            }
        }
        if axes.is_empty() {
            axes.push(("whole".to_string(), 1));
        }
        let mesh = Mesh::from_ranks(axes, boxes.into_iter().map(|(_, rank)| rank).collect()).ok()?;
        self.layout_on(&mesh)
    }
}

impl fmt::Display for ShardedTensorMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gradient = if self.requires_grad { ", requires_grad" } else { "" };
        write!(f, "{} {:?} in {} shard(s){gradient}", self.dtype.as_str(), self.size, self.shards.len())?;
        self.shards.iter().try_for_each(|shard| write!(f, "\n  {shard}"))
    }
}

/// Checks that all shards have the same number of dimensions and no two share an element.
pub(super) fn check_disjoint(shards: &[ShardMetadata]) -> Result<()> {
    let Some(first) = shards.first() else { return Ok(()) };
    if let Some(other) = shards.iter().find(|s| s.offsets.len() != first.offsets.len()) {
        let found = format!("shards of {} and of {} dimensions", first.offsets.len(), other.offsets.len());
        return Err(ErrorKind::Argument.error(
            "shards",
            found,
            "one number of dimensions",
            "describe all of them in one tensor",
        ));
    }
    // Sorted by where they begin along one dimension, a shard can overlap only shards that begin before it ends. The
    // dimension with the most starts leaves the fewest to look at.
    let starts = |dim: usize| {
        let mut starts: Vec<usize> = shards.iter().map(|s| s.offsets[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let Some(along) = (0..first.offsets.len()).max_by_key(|&dim| starts(dim)) else {
        return match shards {
            [_] => Ok(()),
            _ => Err(overlap(&shards[0], &shards[1])),
        };
    };
    let mut sorted: Vec<&ShardMetadata> = shards.iter().filter(|s| s.volume() > 0).collect();
    sorted.sort_by_key(|s| s.offsets[along]);
    for (i, shard) in sorted.iter().enumerate() {
        let end = shard.offsets[along].saturating_add(shard.sizes[along]);
        for later in sorted[i + 1..].iter().take_while(|later| later.offsets[along] < end) {
            if shard.as_box().intersect(&later.as_box()).is_some() {
                return Err(overlap(shard, later));
            }
        }
    }
    Ok(())
}

fn overlap(a: &ShardMetadata, b: &ShardMetadata) -> Error {
    let found = format!("shards {a} and {b}, which overlap");
    ErrorKind::Argument.error("shards", found, "every element in one shard", "correct their offsets or sizes")
}

fn volume(shards: &[ShardMetadata]) -> usize {
    shards.iter().fold(0, |sum: usize, shard| sum.saturating_add(shard.volume()))
}

fn write_dtype<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(dtype.as_str())
}

fn read_dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
    let name = String::deserialize(deserializer)?;
    name.parse().map_err(|_| de::Error::custom(format!("unknown element type `{name}`")))
}
