//! Sets of indices along one tensor dimension, as ascending ranges.

use std::ops::Range;

use smallvec::SmallVec;

/// The range of chunk `i` of `k` in `0..n`: chunks of `ceil(n / k)`, trailing ones smaller or empty.
pub(crate) fn chunk(n: usize, k: usize, i: usize) -> Range<usize> {
    let size = n.div_ceil(k);
    let edge = |i: usize| n.min(size.saturating_mul(i));
    edge(i)..edge(i + 1)
}

/// Ascending global indices along one dimension, as non-empty ranges with gaps between them; at most one range for
/// [contiguous](super::Placement::is_contiguous) placements.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Runs(SmallVec<[Range<usize>; 1]>);

impl Runs {
    pub(crate) fn all(n: usize) -> Self {
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

    /// The first index, `None` if there is none.
    pub(crate) fn first(&self) -> Option<usize> {
        self.0.first().map(|run| run.start)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.0.iter().cloned()
    }

    /// Appends a range of larger indices; adjacent ranges are merged.
    pub(crate) fn push(&mut self, run: Range<usize>) {
        match self.0.last_mut() {
            _ if run.is_empty() => {}
            Some(last) if last.end == run.start => last.end = run.end,
            _ => self.0.push(run),
        }
    }

    /// Appends to `out` the indices at `positions` of `self`.
    pub(super) fn take(&self, positions: Range<usize>, out: &mut Runs) {
        let mut before = 0;
        for run in &self.0 {
            let from = positions.start.clamp(before, before + run.len()) - before;
            let to = positions.end.clamp(before, before + run.len()) - before;
            out.push(run.start + from..run.start + to);
            before += run.len();
        }
    }

    /// Appends to `out` the indices at positions `first..first + len` of `self`, then at the `len` positions that begin
    /// `step` later, and so on. One pass over the ranges: large tensors with small blocks have many.
    pub(super) fn take_each(&self, first: usize, len: usize, step: usize, out: &mut Runs) {
        let (mut before, mut next) = (0, first);
        for run in &self.0 {
            let end = before + run.len();
            while next < end {
                let from = next.max(before);
                let to = next.saturating_add(len).min(end);
                out.push(run.start + (from - before)..run.start + (to - before));
                if next.saturating_add(len) > end {
                    break; // the remaining positions are in the next range
                }
                next = next.saturating_add(step);
            }
            before = end;
        }
    }
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
    fn positions_are_taken_across_ranges() {
        let mut runs = Runs::range(2..4);
        runs.push(7..10);
        let mut taken = Runs::default();
        runs.take(1..4, &mut taken);
        assert_eq!(taken.iter().collect::<Vec<_>>(), [3..4, 7..9]);
    }
}
