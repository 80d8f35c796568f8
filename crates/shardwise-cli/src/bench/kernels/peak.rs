//! What the processor reaches at most: reading and writing of memory, and multiplications with an addition in registers.

use std::hint::black_box;
use std::time::Instant;

use shardwise::prelude::*;
use shardwise_kernels::UninitBuffer;

/// What a case has to do at least.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Work {
    /// Millions of f32 elements that are read, and written.
    Memory { read: f64, written: f64 },
    /// Billions of multiplications with an addition.
    MultiplyAdds(f64),
}

/// Measures the milliseconds that this work takes at least, on some threads: the best of several samples.
pub(super) fn floor_ms(work: Work, threads: usize) -> Result<f64> {
    match work {
        Work::Memory { read, written } => {
            let bytes = |millions: f64| (millions * 4e6) as usize / threads;
            let buffers = || Ok((filled(bytes(read))?, filled(bytes(written))?));
            let buffers = (0..threads).map(|_| buffers()).collect::<Result<Vec<_>>>()?;
            Ok(slowest(buffers, |(source, target)| {
                // SAFETY: all bytes are filled, and nobody else uses them.
                let (source, target) = unsafe {
                    (
                        std::slice::from_raw_parts(source.first().cast_const(), source.count()),
                        std::slice::from_raw_parts_mut(target.first(), target.count()),
                    )
                };
                let sample = |streaming| best(|| shardwise_kernels::move_bytes(black_box(source), target, streaming));
                [false, true].map(sample).into_iter().fold(f64::INFINITY, f64::min)
            }))
        }
        Work::MultiplyAdds(billions) => {
            // About a tenth of a millisecond: short enough not to be interrupted.
            let blocks = 20;
            let done = (blocks * shardwise_kernels::multiply_adds_per_block()) as f64;
            let ms = slowest(vec![(); threads], |()| best(|| shardwise_kernels::multiply_adds(blocks)));
            Ok(billions * 1e9 / done / threads as f64 * ms)
        }
    }
}

/// Memory like that of tensors, with huge pages where the system has them.
fn filled(bytes: usize) -> Result<UninitBuffer> {
    let buffer = UninitBuffer::new(DType::U8, bytes)?;
    // SAFETY: the memory has as many bytes.
    unsafe { buffer.first().write_bytes(1, bytes) };
    Ok(buffer)
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
