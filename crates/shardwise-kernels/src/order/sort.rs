//! Stable sort of one line by the ranks of its elements: a radix sort, or comparisons for short lines.

use super::rank::{Rank, RankedIndex};

/// Lines up to this length are sorted by comparisons: clearing and adding up the counts of a radix sort takes about as long
/// as sorting 100 to 200 elements.
const SHORT: usize = 128;

/// Sorts items, which are in the order of their indices, by rank and then by index. `spare` is memory for as many items.
pub(super) fn sort_items<K: Rank>(items: &mut Vec<RankedIndex<K>>, spare: &mut Vec<RankedIndex<K>>) {
    if items.len() <= SHORT {
        items.sort_unstable();
        return;
    }
    radix_sort(items, spare);
}

/// Sorts byte by byte from the least significant one; each pass is stable, and bytes that all ranks share are skipped.
fn radix_sort<K: Rank>(items: &mut Vec<RankedIndex<K>>, spare: &mut Vec<RankedIndex<K>>) {
    let n = items.len();
    // Up to 8 bytes per rank. One pass over the items counts them all.
    let mut counts = [[0u32; 256]; 8];
    for item in items.iter() {
        for (byte, counts) in counts.iter_mut().enumerate().take(K::BYTES) {
            counts[item.rank.byte(byte)] += 1;
        }
    }
    spare.clear();
    spare.reserve(n);
    for (byte, counts) in counts.iter_mut().enumerate().take(K::BYTES) {
        if counts[items[0].rank.byte(byte)] as usize == n {
            continue;
        }
        let mut place = 0;
        for count in counts.iter_mut() {
            (*count, place) = (place, place + *count);
        }
        let to = spare.as_mut_ptr();
        for &item in items.iter() {
            let place = &mut counts[item.rank.byte(byte)];
            // SAFETY: the counts were those of these bytes, so the places are the numbers below `n`, each once, and there is
            // room for `n` items.
            unsafe { to.add(*place as usize).write(item) };
            *place += 1;
        }
        // SAFETY: all `n` items were written.
        unsafe { spare.set_len(n) };
        std::mem::swap(items, spare);
    }
}
