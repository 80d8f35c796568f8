//! An allocator that counts the bytes of large allocations for the rank whose thread made them.
//!
//! A test target installs it with `#[global_allocator]`. Whoever frees the memory, it counts for the rank that allocated it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// The system's allocator, with counters.
pub struct CountedMemory;

/// Smaller allocations are not counted: tensors of measurements are larger, records of a trace are not.
const MIN_COUNTED: usize = 2048;

/// Ranks below this have counters. The last counter is that of threads without a rank.
const OWNERS: usize = 17;

static CURRENT: [AtomicUsize; OWNERS] = [const { AtomicUsize::new(0) }; OWNERS];
static PEAK: [AtomicUsize; OWNERS] = [const { AtomicUsize::new(0) }; OWNERS];

thread_local! {
    // Without a destructor and without a first access that allocates, so that an allocator may read it.
    static OWNER: Cell<usize> = const { Cell::new(OWNERS - 1) };
}

/// Counts the allocations of this thread for `rank` from now on.
///
/// # Panics
/// If there is no counter for this rank.
pub fn count_for(rank: usize) {
    assert!(rank + 1 < OWNERS, "counters for {} ranks", OWNERS - 1);
    OWNER.set(rank);
}

/// Calls `body` and returns by how many bytes the memory that `rank` allocated grew at its peak, with the result.
///
/// Other threads must not free memory of this rank from before while `body` runs.
pub fn peak_of<T>(rank: usize, body: impl FnOnce() -> T) -> (usize, T) {
    let before = CURRENT[rank].load(SeqCst);
    PEAK[rank].store(before, SeqCst);
    let result = body();
    (PEAK[rank].load(SeqCst) - before, result)
}

/// Bytes that threads without a rank have allocated, such as those of a thread pool.
pub fn without_rank() -> usize {
    CURRENT[OWNERS - 1].load(SeqCst)
}

/// Bytes before the memory of a counted allocation, which hold its owner. Keeps the alignment.
fn header(layout: Layout) -> usize {
    layout.align().max(align_of::<usize>())
}

/// The allocation with room for the header; `None` if it is not counted, or too large to have one.
fn counted(layout: Layout) -> Option<Layout> {
    let size = layout.size().checked_add(header(layout)).filter(|_| layout.size() >= MIN_COUNTED)?;
    Layout::from_size_align(size, header(layout)).ok()
}

/// # Safety
/// `start` is null or begins an allocation of `counted(layout)`.
unsafe fn claim(start: *mut u8, layout: Layout) -> *mut u8 {
    if start.is_null() {
        return start;
    }
    let owner = OWNER.get();
    let now = CURRENT[owner].fetch_add(layout.size(), SeqCst) + layout.size();
    PEAK[owner].fetch_max(now, SeqCst);
    // SAFETY: the header is part of the allocation, and aligned for a number.
    unsafe {
        start.cast::<usize>().write(owner);
        start.add(header(layout))
    }
}

// SAFETY: every call goes to the system's allocator, with memory for a header before what the caller gets; whether there is
// a header depends only on the layout, which is the same when memory is freed.
unsafe impl GlobalAlloc for CountedMemory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        unsafe {
            match counted(layout) {
                Some(whole) => claim(System.alloc(whole), layout),
                None => System.alloc(layout),
            }
        }
    }

    // Not the default, which would touch the pages of large zeros.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        unsafe {
            match counted(layout) {
                Some(whole) => claim(System.alloc_zeroed(whole), layout),
                None => System.alloc_zeroed(layout),
            }
        }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller's; a counted allocation begins with its header.
        unsafe {
            match counted(layout) {
                Some(whole) => {
                    let start = memory.sub(header(layout));
                    CURRENT[start.cast::<usize>().read()].fetch_sub(layout.size(), SeqCst);
                    System.dealloc(start, whole);
                }
                None => System.dealloc(memory, layout),
            }
        }
    }
}
