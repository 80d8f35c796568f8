//! Current and peak memory of a rank's tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of a rank's local tensors: those of its `DTensor`s and `ShardedTensor`s, optimizer state and intermediate results
/// of redistributions.
///
/// Counts logical sizes, not the allocator: tensors that share memory count each, temporaries inside kernels do not count.
/// In a dry run the bytes are counted although nothing is allocated.
#[doc(alias = "memory_allocated")]
#[derive(Debug, Clone, Default)]
pub struct Memory(Arc<MemoryCounters>);

#[derive(Debug, Default)]
struct MemoryCounters {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Memory {
    /// Bytes in use now.
    pub fn current(&self) -> usize {
        self.0.current.load(Relaxed)
    }

    /// Peak of the bytes in use since the launch or the last [`reset_peak`](Self::reset_peak).
    #[doc(alias = "max_memory_allocated")]
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }

    /// Sets the peak to the bytes in use now.
    #[doc(alias = "reset_peak_memory_stats")]
    pub fn reset_peak(&self) {
        self.0.peak.store(self.current(), Relaxed);
    }

    /// Adds `bytes` until the result is dropped.
    pub(crate) fn charge(&self, bytes: usize) -> MemoryCharge {
        self.take(bytes);
        MemoryCharge { memory: self.clone(), bytes }
    }

    /// Adds `bytes`, to be removed with [`release`](Self::release).
    pub(crate) fn take(&self, bytes: usize) {
        let now = self.0.current.fetch_add(bytes, Relaxed) + bytes;
        if now > self.0.peak.load(Relaxed) {
            self.0.peak.fetch_max(now, Relaxed);
        }
    }

    /// Removes `bytes`.
    pub(crate) fn release(&self, bytes: usize) {
        self.0.current.fetch_sub(bytes, Relaxed);
    }
}

/// Bytes that are counted until this is dropped.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    memory: Memory,
    bytes: usize,
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.memory.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_come_and_go_and_the_peak_stays() {
        let memory = Memory::default();
        let a = memory.charge(100);
        let b = memory.charge(50);
        drop(a);
        let c = memory.charge(20);
        assert_eq!((memory.current(), memory.peak()), (70, 150));
        memory.reset_peak();
        drop((b, c));
        assert_eq!((memory.current(), memory.peak()), (0, 70));
    }
}
