//! Current and peak memory of a rank's tensors, by what they are for.

use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::memory_kind::MemoryKind;
use super::profile::note_memory;
use super::trace::current_operator;
use crate::module_scope::{current_phase, current_place_if_alive};
use crate::rank_context::Phase;

/// Bytes of a rank's local tensors: those of its `DTensor`s and `ShardedTensor`s, optimizer state and intermediate results
/// of redistributions.
///
/// Counts logical sizes, not the allocator: tensors that share memory count each, elements that an expansion repeats count once,
/// temporaries inside kernels do not count.
/// In a dry run the bytes are counted although nothing is allocated.
#[doc(alias = "memory_allocated")]
#[derive(Debug, Clone, Default)]
pub struct Memory(Arc<MemoryCounters>);

#[derive(Debug, Default)]
struct MemoryCounters {
    current: AtomicUsize,
    peak: AtomicUsize,
    by_kind: [AtomicUsize; MemoryKind::ALL.len()],
    /// `by_kind` at the time of the peak.
    at_peak: [AtomicUsize; MemoryKind::ALL.len()],
    is_recording: AtomicBool,
    samples: Mutex<Option<(Instant, Vec<MemorySample>)>>,
}

/// The number of a tensor for bytes that belong to none.
const NO_TENSOR: u64 = u64::MAX;

impl MemoryKind {
    /// The kind of a tensor that is created now, by the phase and the operator that this thread is in.
    pub(crate) fn of_new_tensor() -> Self {
        let is_implicit = current_operator().is_some_and(|(_, implicit)| implicit);
        match current_phase() {
            _ if is_implicit => MemoryKind::Buffers,
            Phase::Forward => MemoryKind::Activations,
            Phase::Backward => MemoryKind::Gradients,
            Phase::Update => MemoryKind::Buffers,
        }
    }
}

/// Bytes by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryByKind {
    /// Bytes of [`MemoryKind::Parameters`].
    pub parameters: usize,
    /// Bytes of [`MemoryKind::Gradients`].
    pub gradients: usize,
    /// Bytes of [`MemoryKind::OptimizerState`].
    pub optimizer_state: usize,
    /// Bytes of [`MemoryKind::Activations`].
    pub activations: usize,
    /// Bytes of [`MemoryKind::Buffers`].
    pub buffers: usize,
}

impl MemoryByKind {
    /// The numbers in the order of [`MemoryKind::ALL`].
    pub fn as_array(&self) -> [usize; MemoryKind::ALL.len()] {
        MemoryKind::ALL.map(|kind| self[kind])
    }

    /// The sum over all kinds.
    pub fn total(&self) -> usize {
        MemoryKind::ALL.iter().map(|&kind| self[kind]).sum()
    }

    /// The larger of both numbers for every kind.
    pub fn max(&self, other: &MemoryByKind) -> MemoryByKind {
        let mut larger = *self;
        MemoryKind::ALL.iter().for_each(|&kind| larger[kind] = larger[kind].max(other[kind]));
        larger
    }
}

impl Index<MemoryKind> for MemoryByKind {
    type Output = usize;
    fn index(&self, kind: MemoryKind) -> &usize {
        match kind {
            MemoryKind::Parameters => &self.parameters,
            MemoryKind::Gradients => &self.gradients,
            MemoryKind::OptimizerState => &self.optimizer_state,
            MemoryKind::Activations => &self.activations,
            MemoryKind::Buffers => &self.buffers,
        }
    }
}

impl IndexMut<MemoryKind> for MemoryByKind {
    fn index_mut(&mut self, kind: MemoryKind) -> &mut usize {
        match kind {
            MemoryKind::Parameters => &mut self.parameters,
            MemoryKind::Gradients => &mut self.gradients,
            MemoryKind::OptimizerState => &mut self.optimizer_state,
            MemoryKind::Activations => &mut self.activations,
            MemoryKind::Buffers => &mut self.buffers,
        }
    }
}

/// The bytes in use after a tensor was created or dropped; see [`Memory::start_recording`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemorySample {
    /// Microseconds since the recording began.
    pub us: f64,
    /// Bytes in use.
    pub bytes: MemoryByKind,
    /// The part of a training step.
    pub phase: Phase,
    /// Path of the module whose forward or backward pass was running, if any.
    pub module: Option<Arc<str>>,
}

impl Memory {
    /// Bytes in use now.
    pub fn current(&self) -> usize {
        self.0.current.load(Relaxed)
    }

    /// Bytes in use now, by what they are for.
    pub fn by_kind(&self) -> MemoryByKind {
        read(&self.0.by_kind)
    }

    /// Peak of the bytes in use since the launch or the last [`reset_peak`](Self::reset_peak).
    #[doc(alias = "max_memory_allocated")]
    pub fn peak(&self) -> usize {
        self.0.peak.load(Relaxed)
    }

    /// What the bytes at the [`peak`](Self::peak) were for.
    pub fn peak_by_kind(&self) -> MemoryByKind {
        read(&self.0.at_peak)
    }

    /// Sets the peak to the bytes in use now.
    #[doc(alias = "reset_peak_memory_stats")]
    pub fn reset_peak(&self) {
        self.0.peak.store(self.current(), Relaxed);
        self.note_peak();
    }

    /// Begins to record a sample whenever a tensor of this rank is created or dropped. Samples recorded before are deleted.
    ///
    /// Local. A sample takes about 0.2 us and 100 bytes.
    #[doc(alias = "_record_memory_history")]
    pub fn start_recording(&self) {
        *self.0.samples.lock() = Some((Instant::now(), Vec::new()));
        self.0.is_recording.store(true, Relaxed);
    }

    /// Ends the recording and returns its samples in order; none if there was no recording.
    pub fn stop_recording(&self) -> Vec<MemorySample> {
        self.0.is_recording.store(false, Relaxed);
        self.0.samples.lock().take().map_or(Vec::new(), |(_, samples)| samples)
    }

    /// Adds `bytes` until the result is dropped.
    pub(crate) fn charge(&self, bytes: usize, kind: MemoryKind) -> MemoryCharge {
        self.take(bytes, kind, NO_TENSOR);
        MemoryCharge { memory: self.clone(), bytes, kind }
    }

    /// Adds `bytes` of a tensor with this number, to be removed with [`release`](Self::release).
    pub(crate) fn take(&self, bytes: usize, kind: MemoryKind, tensor: u64) {
        let now = self.0.current.fetch_add(bytes, Relaxed) + bytes;
        self.0.by_kind[kind as usize].fetch_add(bytes, Relaxed);
        if now > self.0.peak.load(Relaxed) {
            self.0.peak.fetch_max(now, Relaxed);
            self.note_peak();
        }
        note_memory(bytes as isize, kind, tensor);
        self.sample();
    }

    /// Removes `bytes`.
    pub(crate) fn release(&self, bytes: usize, kind: MemoryKind, tensor: u64) {
        self.0.current.fetch_sub(bytes, Relaxed);
        self.0.by_kind[kind as usize].fetch_sub(bytes, Relaxed);
        note_memory(-(bytes as isize), kind, tensor);
        self.sample();
    }

    /// Counts `bytes` for another kind from now on.
    pub(crate) fn count_as(&self, bytes: usize, from: MemoryKind, to: MemoryKind, tensor: u64) {
        self.0.by_kind[from as usize].fetch_sub(bytes, Relaxed);
        self.0.by_kind[to as usize].fetch_add(bytes, Relaxed);
        note_memory(-(bytes as isize), from, tensor);
        note_memory(bytes as isize, to, tensor);
    }

    fn note_peak(&self) {
        for (peak, now) in self.0.at_peak.iter().zip(&self.0.by_kind) {
            peak.store(now.load(Relaxed), Relaxed);
        }
    }

    fn sample(&self) {
        if !self.0.is_recording.load(Relaxed) {
            return;
        }
        if let (Some((start, samples)), Some((phase, module))) = (&mut *self.0.samples.lock(), current_place_if_alive())
        {
            let us = start.elapsed().as_secs_f64() * 1e6;
            samples.push(MemorySample { us, bytes: self.by_kind(), phase, module });
        }
    }
}

fn read(counters: &[AtomicUsize; MemoryKind::ALL.len()]) -> MemoryByKind {
    let mut bytes = MemoryByKind::default();
    MemoryKind::ALL.iter().for_each(|&kind| bytes[kind] = counters[kind as usize].load(Relaxed));
    bytes
}

/// Bytes that are counted until this is dropped.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    memory: Memory,
    bytes: usize,
    kind: MemoryKind,
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.memory.release(self.bytes, self.kind, NO_TENSOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_come_and_go_and_the_peak_stays() {
        let memory = Memory::default();
        let a = memory.charge(100, MemoryKind::Activations);
        let b = memory.charge(50, MemoryKind::Gradients);
        drop(a);
        let c = memory.charge(20, MemoryKind::Activations);
        assert_eq!((memory.current(), memory.peak()), (70, 150));
        assert_eq!(memory.by_kind(), MemoryByKind { activations: 20, gradients: 50, ..Default::default() });
        assert_eq!(memory.peak_by_kind(), MemoryByKind { activations: 100, gradients: 50, ..Default::default() });
        memory.reset_peak();
        drop((b, c));
        assert_eq!((memory.current(), memory.peak()), (0, 70));
        assert_eq!(memory.peak_by_kind().total(), 70);
    }

    #[test]
    fn samples_are_recorded_between_start_and_stop() {
        let memory = Memory::default();
        memory.start_recording();
        drop(memory.charge(8, MemoryKind::Parameters));
        let totals: Vec<usize> = memory.stop_recording().iter().map(|sample| sample.bytes.total()).collect();
        assert_eq!(totals, [8, 0]);
        drop(memory.charge(8, MemoryKind::Parameters));
        assert!(memory.stop_recording().is_empty());
    }
}
