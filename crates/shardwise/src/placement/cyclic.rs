//! `BlockCyclic { dim, block }`: blocks assigned to the coordinates round-robin, as in ScaLAPACK.

use std::fmt;

use super::division::{CanonicalForm, Division, DivisionContext};
use super::runs::Runs;
use crate::error::{ErrorKind, Result};

/// Blocks of a given size, the last one possibly smaller: coordinate `i` of `k` holds blocks `i`, `i + k`, `i + 2k`, ...
pub(super) struct Cyclic {
    pub(super) block: usize,
}

impl Cyclic {
    /// The text form.
    pub(super) const FORM: &str = "BC(dim,block)";

    /// Parses the dimension and the block size from the text form.
    pub(super) fn parse(head: &str, arguments: &str) -> Option<(isize, Self)> {
        let (dim, block) = arguments.split_once(',').filter(|_| head == "BC")?;
        Some((dim.trim().parse().ok()?, Cyclic { block: block.trim().parse().ok()? }))
    }
}

impl Division for Cyclic {
    fn part(&self, whole: &Runs, k: usize, i: usize, _: usize) -> Runs {
        let mut part = Runs::default();
        whole.take_each(self.block.saturating_mul(i), self.block, self.block.saturating_mul(k), &mut part);
        part
    }

    fn is_contiguous(&self) -> bool {
        false
    }

    fn canonical(&self, divided: &DivisionContext<'_>) -> Result<CanonicalForm> {
        let k = divided.k;
        if self.block == 0 {
            return Err(ErrorKind::Layout.error(
                "placement",
                format!("{} with blocks of size 0", (divided.name)()),
                "blocks of at least 1",
                "use S(dim) for a plain shard",
            ));
        }
        // Only if the block is exactly the chunk: a larger block is the same for this size too, but a program may take the
        // placement from the layout and use it for a larger tensor.
        let is_chunked = |n: usize| n <= 1 || self.block == n.div_ceil(k);
        let same = k == 1 || (0..divided.combinations).all(|outer| is_chunked((divided.len)(outer)));
        Ok(if same { CanonicalForm::Chunks } else { CanonicalForm::AsWritten })
    }

    fn write(&self, dim: isize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BC({dim},{})", self.block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_assigned_round_robin() {
        let held = |whole: &Runs, i| Cyclic { block: 2 }.part(whole, 3, i, 0).iter().flatten().collect::<Vec<_>>();
        let all = Runs::all(9);
        assert_eq!([held(&all, 0), held(&all, 1), held(&all, 2)], [vec![0, 1, 6, 7], vec![2, 3, 8], vec![4, 5]]);
        // positions count within the indices that outer axes have left
        let mut rest = Runs::range(1..4);
        rest.push(10..15);
        assert_eq!([held(&rest, 0), held(&rest, 1), held(&rest, 2)], [vec![1, 2, 13, 14], vec![3, 10], vec![11, 12]]);
        assert!(held(&Runs::all(0), 0).is_empty());
    }
}
