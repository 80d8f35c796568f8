//! Which global indices a coordinate owns along one tensor dimension.

use std::ops::Range;

use smallvec::SmallVec;

use crate::placement::Placement;

/// The range that chunk `i` of `k` has in `n`: chunks of `ceil(n / k)`, trailing ones smaller or empty.
pub(crate) fn chunk(n: usize, k: usize, i: usize) -> Range<usize> {
    let size = n.div_ceil(k);
    let edge = |i: usize| n.min(size.saturating_mul(i));
    edge(i)..edge(i + 1)
}

/// Ascending global indices along one dimension, as non-empty ranges with gaps between them. Everything but a strided
/// shard gives one range at most.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Runs(SmallVec<[Range<usize>; 1]>);

impl Runs {
    pub(super) fn all(n: usize) -> Self {
        Self::range(0..n)
    }

    /// One range.
    pub(crate) fn range(range: Range<usize>) -> Self {
        let mut runs = Runs::default();
        runs.push(range);
        runs
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(Range::len).sum()
    }

    /// First index owned, `None` if nothing is.
    pub(crate) fn first(&self) -> Option<usize> {
        self.0.first().map(|run| run.start)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.0.iter().cloned()
    }

    /// Appends a range behind all others.
    pub(crate) fn push(&mut self, run: Range<usize>) {
        match self.0.last_mut() {
            _ if run.is_empty() => {}
            Some(last) if last.end == run.start => last.end = run.end,
            _ => self.0.push(run),
        }
    }

    /// Appends the indices at `positions` of `self` to `out`.
    fn take(&self, positions: Range<usize>, out: &mut Runs) {
        let mut before = 0;
        for run in &self.0 {
            let from = positions.start.clamp(before, before + run.len()) - before;
            let to = positions.end.clamp(before, before + run.len()) - before;
            out.push(run.start + from..run.start + to);
            before += run.len();
        }
    }

    /// What coordinate `i` of `k` keeps when `placement` cuts these indices. `outer` numbers the coordinates of the
    /// axes that cut before (row-major); only a ragged placement looks at it.
    pub(super) fn cut(&self, placement: &Placement, k: usize, i: usize, outer: usize) -> Self {
        let n = self.len();
        let mut out = Runs::default();
        match placement {
            Placement::Replicate | Placement::Partial(_) => return self.clone(),
            Placement::Shard(_) => self.take(chunk(n, k, i), &mut out),
            Placement::StridedShard { split_factor, .. } => {
                // All groups behind an empty one are empty too.
                let groups = (0..*split_factor).map(|g| chunk(n, *split_factor, g)).take_while(|g| !g.is_empty());
                for group in groups {
                    let piece = chunk(group.len(), k, i);
                    self.take(group.start + piece.start..group.start + piece.end, &mut out);
                }
            }
            Placement::Ragged { sizes, .. } => {
                let row = ragged_row(sizes, k, outer);
                let start: usize = row[..i].iter().sum();
                self.take(start..start + row[i], &mut out);
            }
        }
        out
    }
}

/// The sizes that a ragged placement has for one combination of outer coordinates.
pub(super) fn ragged_row(sizes: &[usize], k: usize, outer: usize) -> &[usize] {
    if sizes.len() == k { sizes } else { &sizes[outer * k..(outer + 1) * k] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_follow_the_ceil_rule() {
        let sizes = |n, k| (0..k).map(|i| chunk(n, k, i).len()).collect::<Vec<_>>();
        assert_eq!(sizes(6, 4), [2, 2, 2, 0]);
        assert_eq!(sizes(5, 4), [2, 2, 1, 0]);
        assert_eq!(sizes(9, 8), [2, 2, 2, 2, 1, 0, 0, 0]);
        assert_eq!(sizes(0, 3), [0, 0, 0]);
        assert_eq!(chunk(5, 4, 3), 5..5);
        assert_eq!(chunk(usize::MAX, 2, 1).end, usize::MAX);
    }

    #[test]
    fn a_strided_cut_takes_a_piece_of_every_group() {
        let held = |i| {
            let runs = Runs::all(9).cut(&Placement::StridedShard { dim: 0, split_factor: 2 }, 4, i, 0);
            runs.iter().flatten().collect::<Vec<_>>()
        };
        assert_eq!([held(0), held(1), held(2), held(3)], [vec![0, 1, 5], vec![2, 3, 6], vec![4, 7], vec![8]]);
    }
}
