//! The first `k` elements of one line, by a scan that skips blocks in which no element is better than the worst kept one.

use super::rank::{Rank, Ranked, RankedIndex, Ranking};
use crate::simd;

/// Elements whose ranks are compared at a time: one or two vectors of every processor.
const BLOCK: usize = 32;

/// Up to this `k`, the kept elements are always sorted: inserting one moves at most as many items, which is faster than
/// selecting among collected candidates.
const SMALL: usize = 48;

/// Selects the first `k` elements of a line, sorted, into `kept`.
pub(super) struct SelectLine<'a, T: Ranked> {
    pub(super) line: &'a [T],
    pub(super) k: usize,
    pub(super) ranking: Ranking<T::Rank>,
    pub(super) kept: &'a mut Vec<RankedIndex<T::Rank>>,
}

impl<T: Ranked> simd::Kernel for SelectLine<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let SelectLine { line, k, ranking, kept } = self;
        // Candidates are collected up to twice a large `k` before the best are selected from them, so that the selections
        // together take time proportional to the line.
        let room = if k <= SMALL { k } else { (2 * k).min(line.len()) };
        kept.clear();
        kept.extend((0..room).map(|i| RankedIndex { rank: line[i].rank(ranking), index: i as u32 }));
        let mut worst = keep(kept, k);
        kept.sort_unstable();
        let (blocks, rest) = line[room..].as_chunks::<BLOCK>();
        for (number, block) in blocks.iter().enumerate() {
            let mut ranks = [T::Rank::default(); BLOCK];
            let mut best = T::Rank::MAX;
            for i in 0..BLOCK {
                ranks[i] = block[i].rank(ranking);
                best = best.min(ranks[i]);
            }
            // Of equal elements the first counts, and these are later.
            if best < worst {
                add(kept, k, room, &mut worst, &ranks, room + number * BLOCK);
            }
        }
        let from = line.len() - rest.len();
        for (i, x) in rest.iter().enumerate() {
            add(kept, k, room, &mut worst, &[x.rank(ranking)], from + i);
        }
        keep(kept, k);
        kept.sort_unstable();
    }
}

/// Adds the ranks that are better than the worst kept one; the first has this index.
fn add<K: Rank>(kept: &mut Vec<RankedIndex<K>>, k: usize, room: usize, worst: &mut K, ranks: &[K], from: usize) {
    for (i, &rank) in ranks.iter().enumerate() {
        if rank >= *worst {
            continue;
        }
        let item = RankedIndex { rank, index: (from + i) as u32 };
        if k <= SMALL {
            let mut at = k - 1;
            while at > 0 && kept[at - 1].rank > rank {
                kept[at] = kept[at - 1];
                at -= 1;
            }
            kept[at] = item;
            *worst = kept[k - 1].rank;
        } else {
            kept.push(item);
            if kept.len() > room {
                *worst = keep(kept, k);
            }
        }
    }
}

/// Keeps the first `k` items, in any order, and returns the largest rank among them.
fn keep<K: Rank>(items: &mut Vec<RankedIndex<K>>, k: usize) -> K {
    if k < items.len() {
        items.select_nth_unstable(k - 1);
        items.truncate(k);
    }
    items.iter().map(|item| item.rank).max().unwrap_or(K::MAX)
}
