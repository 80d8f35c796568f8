//! How much memory the tensors of a rank take, and how much at most.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes of the local tensors of a rank's distributed tensors. In a dry run they are counted although they do not exist.
#[derive(Debug, Clone, Default)]
pub struct Memory(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Memory {
    /// Bytes in use now.
    pub fn current(&self) -> usize {
        self.0.current.load(Relaxed)
    }

    /// The most bytes that were in use at one time since the beginning or the last [`reset_peak`](Self::reset_peak).
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }

    /// Forgets the peak so far.
    pub fn reset_peak(&self) {
        self.0.peak.store(self.current(), Relaxed);
    }

    /// Counts `bytes` for as long as the result lives.
    pub(crate) fn charge(&self, bytes: usize) -> Charge {
        self.take(bytes);
        Charge { memory: self.clone(), bytes }
    }

    /// Counts `bytes` until they are released.
    pub(crate) fn take(&self, bytes: usize) {
        let now = self.0.current.fetch_add(bytes, Relaxed) + bytes;
        if now > self.0.peak.load(Relaxed) {
            self.0.peak.fetch_max(now, Relaxed);
        }
    }

    /// Counts `bytes` no longer.
    pub(crate) fn release(&self, bytes: usize) {
        self.0.current.fetch_sub(bytes, Relaxed);
    }
}

/// Some bytes that are in use while this lives.
#[derive(Debug)]
pub(crate) struct Charge {
    memory: Memory,
    bytes: usize,
}

impl Drop for Charge {
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
