//! `StridedShard { dim, split_factor }`: every coordinate holds a piece of each of several chunks.

use std::fmt;

use super::division::{CanonicalForm, Division, DivisionContext};
use super::runs::{Runs, chunk};
use crate::error::{ErrorKind, Result};

/// Chunks of `ceil(n / split_factor)` indices, of each of which every coordinate holds a piece.
pub(super) struct Strided {
    pub(super) split_factor: usize,
}

impl Strided {
    /// The text form.
    pub(super) const FORM: &str = "SS(dim,factor)";

    /// Parses the dimension and the factor from the text form.
    pub(super) fn parse(head: &str, arguments: &str) -> Option<(isize, Self)> {
        let (dim, factor) = arguments.split_once(',').filter(|_| head == "SS")?;
        Some((dim.trim().parse().ok()?, Strided { split_factor: factor.trim().parse().ok()? }))
    }
}

impl Division for Strided {
    fn part(&self, whole: &Runs, k: usize, i: usize, _: usize) -> Runs {
        let n = whole.len();
        let mut part = Runs::default();
        // All groups after an empty one are empty too.
        let groups = (0..self.split_factor).map(|g| chunk(n, self.split_factor, g)).take_while(|g| !g.is_empty());
        for group in groups {
            let piece = chunk(group.len(), k, i);
            whole.take(group.start + piece.start..group.start + piece.end, &mut part);
        }
        part
    }

    fn is_contiguous(&self) -> bool {
        false
    }

    fn canonical(&self, divided: &DivisionContext<'_>) -> Result<CanonicalForm> {
        if self.split_factor == 0 {
            return Err(ErrorKind::Layout.error(
                "placement",
                format!("{} with split factor 0", (divided.name)()),
                "a factor of at least 1",
                "use S(dim) for a plain shard",
            ));
        }
        Ok(if self.split_factor == 1 || divided.k == 1 { CanonicalForm::Chunks } else { CanonicalForm::AsWritten })
    }

    fn write(&self, dim: isize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SS({dim},{})", self.split_factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_coordinate_holds_a_piece_of_every_group() {
        let held = |i| Strided { split_factor: 2 }.part(&Runs::all(9), 4, i, 0).iter().flatten().collect::<Vec<_>>();
        assert_eq!([held(0), held(1), held(2), held(3)], [vec![0, 1, 5], vec![2, 3, 6], vec![4, 7], vec![8]]);
    }
}
