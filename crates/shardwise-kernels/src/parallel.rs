//! Division of a large kernel over the threads of the rank's pool.
//!
//! A kernel is divided into ranges of independent items (elements, rows, blocks). What an item computes must not depend on
//! the range that it is in, so that the bits of a result do not depend on the number of threads.

use std::ops::Range;

use rayon::prelude::*;

/// Work below this runs on the calling thread. In units of `cost`, about a third of a nanosecond each: waking the threads of
/// the pool and waiting for them takes 5 to 15 us.
pub(crate) const MIN_WORK_FOR_THREADS: usize = 1 << 16;

/// Ranges per thread: more than one, so that a thread that starts late or is interrupted does not hold up the result.
const RANGES_PER_THREAD: usize = 4;

/// Calls `body` with ranges that together are `0..count`, on the threads of the pool if there is enough work.
///
/// `cost` is the work per item, where 1 is reading or writing one f32 in the cache (about 0.3 ns). Ranges begin at multiples
/// of `align`.
#[inline]
pub(crate) fn over_ranges(count: usize, cost: usize, align: usize, body: impl Fn(Range<usize>) + Sync) {
    let work = count.saturating_mul(cost.max(1));
    if work >= MIN_WORK_FOR_THREADS && rayon::current_num_threads() > 1 {
        divide(count, work, align, &body);
    } else if count > 0 {
        body(0..count);
    }
}

/// Divides the items over the threads of the pool. Not generic: the code of rayon for one closure is larger than most kernels,
/// and there are about a thousand closures.
fn divide(count: usize, work: usize, align: usize, body: &(dyn Fn(Range<usize>) + Sync)) {
    let threads = rayon::current_num_threads();
    let ranges = (threads * RANGES_PER_THREAD).min(work / (MIN_WORK_FOR_THREADS / 4)).max(1);
    let size = count.div_ceil(ranges).next_multiple_of(align.max(1));
    (0..count.div_ceil(size)).into_par_iter().with_max_len(1).for_each(|i| body(i * size..((i + 1) * size).min(count)));
}

/// An address that several threads use: they read what nobody writes, or write to ranges that do not overlap.
#[derive(Clone, Copy)]
pub(crate) struct SharedPtr<T>(*mut T);

// SAFETY: whoever dereferences the address keeps to the contract of the type.
unsafe impl<T> Send for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    pub(crate) fn new(address: *mut T) -> Self {
        SharedPtr(address)
    }

    /// The address. A method, so that closures capture the whole value and not the pointer in it.
    pub(crate) fn get(self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn ranges_cover_every_item_once_and_begin_at_multiples() {
        for threads in [1, 2, 3, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for (count, cost, align) in
                [(0, 1, 1), (1, 1 << 20, 4), (7, 1 << 20, 1), (1000, 1, 8), (70_001, 3, 16), (1 << 20, 1, 64)]
            {
                let visits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.install(|| {
                    over_ranges(count, cost, align, |range| {
                        assert_eq!(range.start % align, 0);
                        range.for_each(|i| {
                            visits[i].fetch_add(1, Ordering::Relaxed);
                        });
                    });
                });
                assert!(visits.iter().all(|v| v.load(Ordering::Relaxed) == 1), "{count} on {threads} threads");
            }
        }
    }
}
