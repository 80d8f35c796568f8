//! Placements: how a tensor is distributed along one axis of a mesh.
//!
//! A placement that shards divides the indices of a tensor dimension over the coordinates of the axis. Each kind of shard is
//! one file that implements `Division`: which indices a coordinate holds, its stored form, its text form. The rest of the
//! crate asks a [`Placement`] and does not match on kinds, so a new kind is a file, its variant, and its line in `dim_mut`,
//! `ask` and `parse_kind` here.

mod chunks;
mod cyclic;
mod division;
mod partial;
mod ragged;
mod runs;
mod strided;

pub(crate) use division::DivisionContext;
pub(crate) use partial::{commute, is_idempotent, is_linear};
pub(crate) use runs::{Runs, chunk};
pub use shardwise_kernels::ReduceOp;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, ErrorKind, Result};
use chunks::Chunks;
use cyclic::Cyclic;
use division::{CanonicalForm, Division};
use ragged::Ragged;
use strided::Strided;

/// How a tensor is distributed along one axis of a mesh.
///
/// A layout has one placement per mesh axis. The dimension of a shard may be negative, counting from the last; the
/// placements of a [`Layout`](crate::Layout) always have non-negative dimensions.
///
/// | variant | text form | what coordinate `i` of `k` holds |
/// |---|---|---|
/// | `Replicate` | `R` | the whole tensor |
/// | `Shard(0)` | `S(0)` | chunk `i` of dimension 0 |
/// | `Ragged` | `S(0;3,1,2)` | a range of the `i`-th size |
/// | `StridedShard` | `SS(0,2)` | the `i`-th piece of each of 2 chunks |
/// | `BlockCyclic` | `BC(0,4)` | blocks `i`, `i + k`, ... of 4 indices |
/// | `Partial(Sum)` | `P(sum)` | a term; the tensor is the sum over all coordinates |
///
/// ```
/// # use shardwise::{Placement, Placement::*, ReduceOp};
/// assert_eq!(Shard(0).to_string(), "S(0)");
/// assert_eq!("S(0;3,1,2)".parse::<Placement>()?, Placement::ragged(0, [3, 1, 2]));
/// assert_eq!("P(max)".parse::<Placement>()?, Partial(ReduceOp::Max));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Every coordinate holds the whole tensor.
    Replicate,
    /// The dimension is sharded in chunks of `ceil(n / k)` indices; trailing chunks are smaller or empty.
    Shard(isize),
    /// The dimension is split into chunks of `ceil(n / split_factor)` indices, each chunk into one piece per coordinate;
    /// coordinate `i` holds the `i`-th piece of every chunk, in order.
    #[doc(alias = "_StridedShard")]
    StridedShard {
        /// The dimension that is sharded.
        dim: isize,
        /// Number of chunks before sharding.
        split_factor: usize,
    },
    /// The dimension is sharded in consecutive ranges of explicit sizes. PyTorch has no such placement.
    ///
    /// Slices and concatenations of sharded tensors get it, so that they need no communication.
    Ragged {
        /// The dimension that is sharded.
        dim: isize,
        /// One size per coordinate. If other axes shard the dimension before this one, their parts may be of different
        /// sizes and need different divisions: then one size per coordinate for every combination of their coordinates,
        /// this axis fastest.
        sizes: Arc<[usize]>,
    },
    /// The dimension is split into blocks that are assigned round-robin: coordinate `i` of `k` holds blocks `i`, `i + k`,
    /// `i + 2k`, ..., in order. Balances work that grows along a dimension, such as that of causal attention.
    #[doc(alias = "ScaLAPACK")]
    #[doc(alias = "cyclic")]
    BlockCyclic {
        /// The dimension that is sharded.
        dim: isize,
        /// Number of indices in a block.
        block: usize,
    },
    /// Every coordinate holds an operand of the whole shape; the tensor is their reduction. With several partial axes, the
    /// last axis is reduced first.
    Partial(ReduceOp),
}

impl Placement {
    /// Shards dimension `dim` in consecutive ranges of explicit sizes: [`Placement::Ragged`].
    pub fn ragged(dim: isize, sizes: impl Into<Arc<[usize]>>) -> Self {
        Placement::Ragged { dim, sizes: sizes.into() }
    }

    /// Shards dimension `dim` in blocks that are assigned round-robin: [`Placement::BlockCyclic`].
    ///
    /// ```
    /// # use shardwise::{Layout, Mesh, Placement};
    /// let layout = Layout::new(&Mesh::new([("sp", 2)])?, 7, [Placement::block_cyclic(0, 2)])?;
    /// assert_eq!(layout.global_indices(0, 0), [0, 1, 4, 5]);
    /// assert_eq!(layout.global_indices(1, 0), [2, 3, 6]);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn block_cyclic(dim: isize, block: usize) -> Self {
        Placement::BlockCyclic { dim, block }
    }

    /// Shards each of `split_factor` chunks of dimension `dim`: [`Placement::StridedShard`].
    pub fn strided(dim: isize, split_factor: usize) -> Self {
        Placement::StridedShard { dim, split_factor }
    }
}

// The only functions that match on the kinds of shards; `tests/communication/architecture` checks it.
impl Placement {
    /// The tensor dimension that is sharded, as written (it may be negative).
    #[inline]
    fn dim_mut(&mut self) -> Option<&mut isize> {
        match self {
            Placement::Shard(dim)
            | Placement::StridedShard { dim, .. }
            | Placement::Ragged { dim, .. }
            | Placement::BlockCyclic { dim, .. } => Some(dim),
            Placement::Replicate | Placement::Partial(_) => None,
        }
    }

    /// Calls `question` with the division and the dimension (as written) of a shard; `None` for other placements.
    #[inline]
    fn ask<R>(&self, question: impl FnOnce(&dyn Division, isize) -> R) -> Option<R> {
        match self {
            Placement::Shard(dim) => Some(question(&Chunks, *dim)),
            Placement::StridedShard { dim, split_factor } => {
                Some(question(&Strided { split_factor: *split_factor }, *dim))
            }
            Placement::Ragged { dim, sizes } => Some(question(&Ragged { sizes }, *dim)),
            Placement::BlockCyclic { dim, block } => Some(question(&Cyclic { block: *block }, *dim)),
            Placement::Replicate | Placement::Partial(_) => None,
        }
    }

    /// The dimension of a plain shard in a layout; `None` for all other placements.
    #[inline]
    pub(crate) fn chunk_dim(&self) -> Option<usize> {
        if let Placement::Shard(dim) = self { usize::try_from(*dim).ok() } else { None }
    }

    /// The split factor of a strided shard, `None` for all other placements.
    #[inline]
    pub(crate) fn split_factor(&self) -> Option<usize> {
        if let Placement::StridedShard { split_factor, .. } = self { Some(*split_factor) } else { None }
    }

    /// The reduction of a partial placement, `None` for every other placement.
    #[inline]
    pub fn reduction(&self) -> Option<ReduceOp> {
        if let Placement::Partial(op) = self { Some(*op) } else { None }
    }
}

impl Placement {
    /// The tensor dimension that this placement shards, as written (it may be negative).
    #[inline]
    fn written_dim(&self) -> Option<isize> {
        self.ask(|_, dim| dim)
    }

    /// The tensor dimension that this placement shards, `None` if it shards none.
    ///
    /// Meant for placements of a layout: also `None` for a negative dimension, see [`normalized`](Self::normalized).
    #[inline]
    pub fn shard_dim(&self) -> Option<usize> {
        self.written_dim().and_then(|dim| usize::try_from(dim).ok())
    }

    /// The same placement on another dimension.
    pub(crate) fn with_dim(&self, dim: usize) -> Self {
        let mut other = self.clone();
        if let Some(own) = other.dim_mut() {
            *own = dim as isize;
        }
        other
    }

    /// The plain shard on the dimension that this placement shards; placements that shard nothing are unchanged.
    pub(crate) fn plain(&self) -> Self {
        self.written_dim().map_or_else(|| self.clone(), Placement::Shard)
    }

    /// Whether every coordinate holds one range of the divided indices, in the order of coordinates; also true for
    /// placements that shard nothing.
    #[inline]
    pub(crate) fn is_contiguous(&self) -> bool {
        self.ask(|division, _| division.is_contiguous()).unwrap_or(true)
    }

    /// Whether it is valid for a dimension of any size, and after any other axes: all but ragged placements.
    pub(crate) fn fits_any_size(&self) -> bool {
        self.ask(|division, _| division.divides_any()).unwrap_or(true)
    }

    /// The indices of `whole` that coordinate `i` of `k` holds. `outer` is the row-major number of the coordinates on the
    /// axes that shard the dimension before this one.
    #[inline]
    pub(crate) fn part(&self, whole: &Runs, k: usize, i: usize, outer: usize) -> Runs {
        self.ask(|division, _| division.part(whole, k, i, outer)).unwrap_or_else(|| whole.clone())
    }

    /// The form in which a layout stores the placement, so that equivalent placements are equal; an error if it does not
    /// fit the dimension.
    pub(crate) fn canonical(&self, divided: &DivisionContext<'_>) -> Result<Self> {
        let canonical = self.ask(|division, dim| {
            Ok(match division.canonical(divided)? {
                CanonicalForm::AsWritten => self.clone(),
                CanonicalForm::Chunks => Placement::Shard(dim),
                CanonicalForm::Sizes(sizes) => Placement::ragged(dim, sizes),
            })
        });
        canonical.unwrap_or_else(|| Ok(self.clone()))
    }

    /// Whether the placement shards dimension `dim`, or any dimension for `None`.
    #[inline]
    pub fn is_shard(&self, dim: Option<usize>) -> bool {
        match dim {
            Some(dim) => self.shard_dim() == Some(dim),
            None => self.written_dim().is_some(),
        }
    }

    /// Whether this is `Replicate`.
    #[inline]
    pub fn is_replicate(&self) -> bool {
        matches!(self, Placement::Replicate)
    }

    /// Whether this is `Partial` with any reduction.
    #[inline]
    pub fn is_partial(&self) -> bool {
        self.reduction().is_some()
    }

    /// Returns the same placement with a non-negative dimension, for a tensor of `ndim` dimensions.
    ///
    /// # Errors
    /// [`ErrorKind::Dimension`] if the dimension is out of range.
    pub fn normalized(&self, ndim: usize) -> Result<Self> {
        let Some(written) = self.written_dim() else { return Ok(self.clone()) };
        let resolved = if written < 0 { written + ndim as isize } else { written };
        if resolved < 0 || resolved >= ndim as isize {
            return Err(ErrorKind::Dimension { dim: written, ndim }.error(
                "shard dimension",
                format!("{self} for a tensor of {ndim} dimension(s)"),
                if ndim == 0 {
                    "no shard of a scalar".into()
                } else {
                    format!("a dimension from -{ndim} to {}", ndim - 1)
                },
                if ndim == 0 { "use R".into() } else { format!("shard one of its {ndim} dimension(s)") },
            ));
        }
        Ok(self.with_dim(resolved as usize))
    }

    /// Parses a comma-separated list such as `S(0),R,P(sum)`.
    ///
    /// ```
    /// # use shardwise::{Placement, Placement::*};
    /// assert_eq!(Placement::parse_list("S(-1), R")?, [Shard(-1), Replicate]);
    /// # Ok::<(), shardwise::Error>(())
    /// ```
    pub fn parse_list(text: &str) -> Result<Vec<Self>> {
        let mut parts = vec![String::new()];
        let mut depth = 0usize;
        for c in text.chars() {
            match c {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                ',' if depth == 0 => {
                    parts.push(String::new());
                    continue;
                }
                _ => {}
            }
            parts.last_mut().expect("starts with one part").push(c);
        }
        parts.iter().map(|part| part.parse()).collect()
    }
}

/// The text forms, for the error of an unknown one.
const FORMS: [&str; 6] = ["R", Chunks::FORM, Ragged::FORM, Strided::FORM, Cyclic::FORM, "P or P(op)"];

/// Parses a shard from the two parts of its text form, `head(arguments)`.
fn parse_kind(head: &str, arguments: &str) -> Option<Placement> {
    let chunks = || Chunks::parse(head, arguments).map(Placement::Shard);
    let ragged = || Ragged::parse(head, arguments).map(|(dim, sizes)| Placement::ragged(dim, sizes));
    let strided = || Strided::parse(head, arguments).map(|(dim, kind)| Placement::strided(dim, kind.split_factor));
    let cyclic = || Cyclic::parse(head, arguments).map(|(dim, kind)| Placement::block_cyclic(dim, kind.block));
    chunks().or_else(ragged).or_else(strided).or_else(cyclic)
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reduction() {
            Some(op) => write!(f, "P({op})"),
            None => self.ask(|division, dim| division.write(dim, &mut *f)).unwrap_or_else(|| f.write_str("R")),
        }
    }
}

impl FromStr for Placement {
    type Err = Error;

    /// Parses `R`, `S(0)`, `S(0;3,1,2)` (ragged), `SS(0,2)` (strided), `BC(0,4)` (block-cyclic), `P(sum)` or `P` (sum); and
    /// PyTorch's `Replicate()`, `Shard(0)` or `Shard(dim=0)`, and `Partial()` or `Partial(sum)`.
    fn from_str(text: &str) -> Result<Self> {
        let trimmed = text.trim();
        match trimmed {
            "R" | "Replicate" | "Replicate()" => return Ok(Placement::Replicate),
            "P" | "Partial" | "Partial()" => return Ok(Placement::Partial(ReduceOp::Sum)),
            _ => {}
        }
        let parts = trimmed.strip_suffix(')').and_then(|t| t.split_once('('));
        let parts = match parts {
            Some(("P" | "Partial", op)) => return Ok(op.parse().map(Placement::Partial)?),
            Some(("Shard", dim)) => Some(("S", dim.trim_start_matches("dim="))),
            other => other,
        };
        parts.and_then(|(head, arguments)| parse_kind(head, arguments)).ok_or_else(|| {
            ErrorKind::Layout.error("placement", format!("`{text}`"), FORMS.join(", "), "write for example `S(0)`")
        })
    }
}

impl Serialize for Placement {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Placement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_pytorch_are_read() {
        for (text, expected) in [
            ("Replicate()", Placement::Replicate),
            ("Shard(1)", Placement::Shard(1)),
            ("Shard(dim=-1)", Placement::Shard(-1)),
            ("Partial()", Placement::Partial(ReduceOp::Sum)),
            ("Partial(max)", Placement::Partial(ReduceOp::Max)),
        ] {
            assert_eq!(text.parse::<Placement>().unwrap(), expected);
        }
    }

    #[test]
    fn text_and_serde_round_trip() {
        let mut all = vec![
            Placement::Replicate,
            Placement::Shard(3),
            Placement::Shard(-1),
            Placement::StridedShard { dim: 1, split_factor: 4 },
            Placement::ragged(0, [3, 0, 5]),
            Placement::ragged(1, []),
            Placement::block_cyclic(-2, 3),
        ];
        all.extend(ReduceOp::ALL.map(Placement::Partial));
        for placement in &all {
            assert_eq!(&placement.to_string().parse::<Placement>().unwrap(), placement);
            let json = serde_json::to_string(placement).unwrap();
            assert_eq!(&serde_json::from_str::<Placement>(&json).unwrap(), placement);
        }
        let list = all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        assert_eq!(Placement::parse_list(&list).unwrap(), all);
    }

    #[test]
    fn unparsable_placements_are_refused_with_the_text() {
        for text in [
            "", "X", "S", "S()", "S(a)", "S(0", "S0", "P(sums)", "SS(0)", "SS(0,-1)", "BC(0)", "BC(0,x)", "S(0;,)",
            "S(0;1,x)", "R(0)", "(0)",
        ] {
            let message = text.parse::<Placement>().expect_err(text).to_string();
            let shown = if text == "P(sums)" { "`sums`" } else { &format!("`{text}`") };
            assert!(message.contains(shown), "{message}");
        }
        assert!(Placement::parse_list("S(0),,R").is_err());
    }

    #[test]
    fn dimensions_are_counted_from_either_end_and_checked() {
        assert_eq!(Placement::Shard(-1).normalized(3).unwrap(), Placement::Shard(2));
        assert_eq!(Placement::ragged(-2, [1]).normalized(2).unwrap(), Placement::ragged(0, [1]));
        assert_eq!(Placement::Replicate.normalized(0).unwrap(), Placement::Replicate);
        for (placement, ndim, part) in [
            (Placement::Shard(2), 2, "from -2 to 1"),
            (Placement::Shard(-3), 2, "from -2 to 1"),
            (Placement::Shard(0), 0, "no shard of a scalar"),
            (Placement::Shard(isize::MIN), 2, "from -2 to 1"),
        ] {
            let message = placement.normalized(ndim).expect_err("out of range").to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
