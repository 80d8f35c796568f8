//! Placements: how a tensor lies along one axis of a mesh.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
pub use shardwise_kernels::ReduceOp;

use crate::error::{Error, Result};

/// How a tensor lies along one axis of a mesh.
///
/// The dimension of a shard may be negative, counting from the last one, until a [`Layout`](crate::Layout) is made of
/// it: the placements of a layout always have non-negative dimensions.
///
/// ```
/// # use shardwise::{Placement, Placement::*, ReduceOp};
/// assert_eq!(Shard(0).to_string(), "S(0)");
/// assert_eq!("S(0;3,1,2)".parse::<Placement>()?, Placement::ragged(0, [3, 1, 2]));
/// assert_eq!("P(max)".parse::<Placement>()?, Partial(ReduceOp::Max));
/// # Ok::<(), shardwise::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every coordinate holds the whole.
    Replicate,
    /// The dimension is cut into chunks of `ceil(n / size)`; trailing chunks are smaller or empty.
    Shard(isize),
    /// The dimension is cut into chunks of `ceil(n / split_factor)`, each of these into one piece per coordinate;
    /// coordinate `i` holds the `i`-th piece of every chunk, joined in order.
    #[doc(alias = "_StridedShard")]
    StridedShard {
        /// The dimension that is cut.
        dim: isize,
        /// Number of chunks made before the cut.
        split_factor: usize,
    },
    /// The dimension is cut into pieces of the given sizes.
    Ragged {
        /// The dimension that is cut.
        dim: isize,
        /// One size per coordinate; or, if other axes cut the dimension before this one, one size per coordinate for
        /// every combination of their coordinates, this axis fastest.
        sizes: Arc<[usize]>,
    },
    /// Every coordinate holds an operand; the value is their reduction. With several partial axes the last axis is
    /// reduced first.
    Partial(ReduceOp),
}

impl Placement {
    /// A cut of `dim` into pieces of the given sizes.
    pub fn ragged(dim: isize, sizes: impl Into<Arc<[usize]>>) -> Self {
        Placement::Ragged { dim, sizes: sizes.into() }
    }

    /// The tensor dimension that this placement cuts, as written (it may be negative).
    fn cut_dim(&self) -> Option<isize> {
        match self {
            Placement::Shard(dim) | Placement::StridedShard { dim, .. } | Placement::Ragged { dim, .. } => Some(*dim),
            Placement::Replicate | Placement::Partial(_) => None,
        }
    }

    /// The tensor dimension that this placement cuts, `None` if it cuts none. For the placements of a layout; a
    /// negative dimension has no answer before it is resolved against a number of dimensions.
    pub fn shard_dim(&self) -> Option<usize> {
        self.cut_dim().and_then(|dim| usize::try_from(dim).ok())
    }

    /// The same cut of another dimension.
    pub(crate) fn with_dim(&self, dim: usize) -> Self {
        let dim = dim as isize;
        match self.clone() {
            Placement::Shard(_) => Placement::Shard(dim),
            Placement::StridedShard { split_factor, .. } => Placement::StridedShard { dim, split_factor },
            Placement::Ragged { sizes, .. } => Placement::Ragged { dim, sizes },
            other => other,
        }
    }

    /// Whether the placement cuts a dimension (any dimension for `None`).
    pub fn is_shard(&self, dim: Option<usize>) -> bool {
        match dim {
            Some(dim) => self.shard_dim() == Some(dim),
            None => self.cut_dim().is_some(),
        }
    }

    /// Whether every coordinate holds the whole.
    pub fn is_replicate(&self) -> bool {
        matches!(self, Placement::Replicate)
    }

    /// Whether a reduction is pending.
    pub fn is_partial(&self) -> bool {
        matches!(self, Placement::Partial(_))
    }

    /// The same placement with its dimension counted from the front, checked against `ndim`.
    pub fn normalized(&self, ndim: usize) -> Result<Self> {
        let Some(written) = self.cut_dim() else { return Ok(self.clone()) };
        let resolved = if written < 0 { written + ndim as isize } else { written };
        if resolved < 0 || resolved >= ndim as isize {
            return Err(Error::invalid(
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
        Ok(match self.clone() {
            Placement::Shard(_) => Placement::Shard(resolved),
            Placement::StridedShard { split_factor, .. } => Placement::StridedShard { dim: resolved, split_factor },
            Placement::Ragged { sizes, .. } => Placement::Ragged { dim: resolved, sizes },
            other => other,
        })
    }

    /// Reads a list such as `S(0),R,P(sum)`.
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

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate => f.write_str("R"),
            Placement::Shard(dim) => write!(f, "S({dim})"),
            Placement::StridedShard { dim, split_factor } => write!(f, "SS({dim},{split_factor})"),
            Placement::Ragged { dim, sizes } => {
                write!(f, "S({dim};")?;
                for (i, size) in sizes.iter().enumerate() {
                    write!(f, "{}{size}", if i == 0 { "" } else { "," })?;
                }
                f.write_str(")")
            }
            Placement::Partial(op) => write!(f, "P({op})"),
        }
    }
}

impl FromStr for Placement {
    type Err = Error;

    /// Reads `R`, `S(0)`, `S(0;3,1,2)` (ragged), `SS(0,2)` (strided), `P(sum)` or `P` (sum).
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid(
                "placement",
                format!("`{text}`"),
                "R, S(dim), S(dim;size,size,...), SS(dim,factor), P or P(op)",
                "write for example `S(0)`",
            )
        };
        let trimmed = text.trim();
        match trimmed {
            "R" => return Ok(Placement::Replicate),
            "P" => return Ok(Placement::Partial(ReduceOp::Sum)),
            _ => {}
        }
        let (head, argument) = trimmed.strip_suffix(')').and_then(|t| t.split_once('(')).ok_or_else(bad)?;
        let dim = |s: &str| s.trim().parse::<isize>().map_err(|_| bad());
        let size = |s: &str| s.trim().parse::<usize>().map_err(|_| bad());
        match head {
            "P" => Ok(argument.parse().map(Placement::Partial)?),
            "S" => match argument.split_once(';') {
                None => dim(argument).map(Placement::Shard),
                Some((d, sizes)) => {
                    let sizes = sizes.split(',').filter(|_| !sizes.trim().is_empty());
                    let sizes: Vec<usize> = sizes.map(size).collect::<Result<_>>()?;
                    Ok(Placement::ragged(dim(d)?, sizes))
                }
            },
            "SS" => {
                let (d, factor) = argument.split_once(',').ok_or_else(bad)?;
                Ok(Placement::StridedShard { dim: dim(d)?, split_factor: size(factor)? })
            }
            _ => Err(bad()),
        }
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
    fn text_and_serde_round_trip() {
        let mut all = vec![
            Placement::Replicate,
            Placement::Shard(3),
            Placement::Shard(-1),
            Placement::StridedShard { dim: 1, split_factor: 4 },
            Placement::ragged(0, [3, 0, 5]),
            Placement::ragged(1, []),
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
            "", "X", "S", "S()", "S(a)", "S(0", "S0", "P(sums)", "SS(0)", "SS(0,-1)", "S(0;,)", "S(0;1,x)", "R(0)",
            "(0)",
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
