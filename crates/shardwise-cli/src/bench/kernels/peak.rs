//! What the processor reaches at most: reading and writing of memory, and multiplications with an addition in registers.

use std::hint::black_box;
use std::time::Instant;

use shardwise::prelude::*;
use shardwise_kernels::UninitBuffer;

/// What a case has to do at least.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Work {
    /// Millions of f32 elements that are read, and written.
    Memory { read: f64, written: f64 },
    /// Millions of f32 elements that are read, and further millions that are changed in place.
    Update { read: f64, changed: f64 },
    /// Billions of multiplications with an addition.
    MultiplyAdds(f64),
}

/// Measures the milliseconds that this work takes at least, on some threads: the best of several samples.
pub(crate) fn floor_ms(work: Work, threads: usize) -> Result<f64> {
    match work {
        Work::Memory { read, written } => Ok(slowest(buffers(read, written, threads)?, |(mut source, mut target)| {
            let (source, target) = (source.bytes(), target.bytes());
            let sample = |far| best(|| shardwise_kernels::move_bytes(black_box(source), target, far));
            [false, true].map(sample).into_iter().fold(f64::INFINITY, f64::min)
        })),
        Work::Update { read, changed } => Ok(slowest(buffers(read, changed, threads)?, |(mut source, mut target)| {
            let (source, target) = (source.bytes(), target.bytes());
            let sample = |far| best(|| update(black_box(source), target, far));
            [false, true].map(sample).into_iter().fold(f64::INFINITY, f64::min)
        })),
        Work::MultiplyAdds(billions) => {
            // About a tenth of a millisecond: short enough not to be interrupted.
            let blocks = 20;
            let done = (blocks * shardwise_kernels::multiply_adds_per_block()) as f64;
            let ms = slowest(vec![(); threads], |()| best(|| shardwise_kernels::multiply_adds(blocks)));
            Ok(billions * 1e9 / done / threads as f64 * ms)
        }
    }
}

/// Measures the floating-point operations per second that some threads reach in registers, in f32.
pub(crate) fn peak_flops_per_s(threads: usize) -> Result<f64> {
    // Of one billion multiplications with an addition.
    Ok(2e9 / (floor_ms(Work::MultiplyAdds(1.0), threads)? / 1e3))
}

/// Memory of each thread to read and to write, of so many millions of f32 elements in all.
fn buffers(read: f64, written: f64, threads: usize) -> Result<Vec<(Filled, Filled)>> {
    let bytes = |millions: f64| (millions * 4e6) as usize / threads;
    (0..threads).map(|_| Ok((Filled::new(bytes(read))?, Filled::new(bytes(written))?))).collect()
}

/// Memory like that of tensors, with huge pages where the system has them.
struct Filled(UninitBuffer);

impl Filled {
    fn new(bytes: usize) -> Result<Self> {
        let buffer = UninitBuffer::new(DType::U8, bytes)?;
        // SAFETY: the memory has as many bytes.
        unsafe { buffer.first().write_bytes(1, bytes) };
        Ok(Filled(buffer))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: all bytes are filled, and borrowed with the buffer.
        unsafe { std::slice::from_raw_parts_mut(self.0.first(), self.0.count()) }
    }
}

/// Reads some memory and changes other memory in place, in turn.
fn update(source: &[u8], target: &mut [u8], far: bool) {
    const BLOCK: usize = 4096;
    let blocks = source.len().div_ceil(BLOCK).max(1);
    let mut sources = source.chunks(BLOCK);
    for target in target.chunks_mut(target.len().div_ceil(blocks).max(1)) {
        target.iter_mut().for_each(|x| *x ^= 1);
        shardwise_kernels::move_bytes(sources.next().unwrap_or_default(), &mut [], far);
    }
}

/// Milliseconds of the best of several calls, the first of which warms up.
fn best(mut call: impl FnMut()) -> f64 {
    const SAMPLES: usize = 9;
    let sample = |_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..SAMPLES).map(sample).fold(f64::INFINITY, f64::min)
}

/// The slowest of several threads that measure at once, each with something of its own.
fn slowest<T: Send>(items: Vec<T>, sample: impl Fn(T) -> f64 + Sync) -> f64 {
    let sample = &sample;
    std::thread::scope(|scope| {
        let running: Vec<_> = items.into_iter().map(|item| scope.spawn(move || sample(item))).collect();
        running.into_iter().map(|thread| thread.join().expect("a measurement")).fold(0.0, f64::max)
    })
}
