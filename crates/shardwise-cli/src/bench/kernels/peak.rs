//! What the processor reaches at most: copying of memory, and multiplications with an addition in registers.

use std::hint::black_box;
use std::time::Instant;

/// Rates that bound every kernel.
#[derive(Clone, Copy)]
pub(super) struct Rates {
    /// Bytes that a memcpy reads and writes per millisecond.
    pub(super) bytes_per_ms: f64,
    /// f32 multiplications with an addition per millisecond.
    pub(super) multiply_adds_per_ms: f64,
}

/// Measures both rates on `threads` threads, each as the best of several samples.
pub(super) fn measure(threads: usize) -> Rates {
    // As long as the vectors of the elementwise cases.
    const BYTES: usize = 16 << 20;
    let copy = || {
        let (source, mut target) = (vec![1u8; BYTES], vec![2u8; BYTES]);
        best(9, || target.copy_from_slice(black_box(&source)))
    };
    let arithmetic = || {
        best(9, || {
            black_box(shardwise_kernels::multiply_adds(BLOCKS));
        })
    };
    const BLOCKS: usize = 20_000;
    Rates {
        bytes_per_ms: 2.0 * (BYTES * threads) as f64 / on_threads(threads, copy),
        multiply_adds_per_ms: (BLOCKS * shardwise_kernels::multiply_adds_per_block() * threads) as f64
            / on_threads(threads, arithmetic),
    }
}

/// Milliseconds of the best call.
fn best(samples: usize, mut call: impl FnMut()) -> f64 {
    let sample = |_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..samples).map(sample).fold(f64::INFINITY, f64::min)
}

/// The slowest of several threads that measure at once.
fn on_threads(threads: usize, sample: impl Fn() -> f64 + Sync) -> f64 {
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(&sample)).collect();
        running.into_iter().map(|thread| thread.join().expect("a measurement")).fold(0.0, f64::max)
    })
}
