//! Timing of collective calls.

use std::cell::RefCell;
use std::time::Instant;

use candle_core::{Device, Tensor};
use shardwise::{Error, Group, ReduceOp, Result};

/// Times of one call in milliseconds, in ascending order. Collective.
///
/// A sample begins with a barrier and lasts until the slowest rank is done; short calls are repeated within a sample.
pub(super) fn time(group: &Group, bytes: usize, call: impl Fn() -> Result<()>) -> Result<Vec<f64>> {
    let [times] = time_in_turn(group, bytes, [&call])?;
    Ok(times)
}

/// As [`time`], for several calls in alternation, so that noise of the machine affects all of them alike.
pub(super) fn time_in_turn<const N: usize>(
    group: &Group,
    bytes: usize,
    calls: [&dyn Fn() -> Result<()>; N],
) -> Result<[Vec<f64>; N]> {
    // A sample of a small call has to be long against the resolution of the clock and the barrier before it.
    let (samples, repeats) = match bytes {
        b if b < 1 << 16 => (20, 2000),
        b if b <= 1 << 20 => (20, 20),
        _ => (9, 1),
    };
    for call in calls {
        (0..repeats.min(50)).try_for_each(|_| call())?;
    }
    let mut times = [const { Vec::new() }; N];
    for _ in 0..samples {
        for (call, times) in calls.iter().zip(&mut times) {
            group.barrier()?;
            let start = Instant::now();
            (0..repeats).try_for_each(|_| call())?;
            let elapsed = Tensor::new(start.elapsed().as_secs_f64(), &Device::Cpu)?;
            let slowest: f64 = group.all_reduce(&elapsed, ReduceOp::Max)?.to_scalar().map_err(Error::from)?;
            times.push(slowest * 1e3 / f64::from(repeats));
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    Ok(times)
}

/// Best time of a memcpy of `bytes` into allocated memory, on all ranks at once. Collective.
pub(super) fn memcpy_ms(group: &Group, bytes: usize) -> Result<f64> {
    let (source, copy) = (vec![1u8; bytes], RefCell::new(vec![2u8; bytes]));
    let times = time(group, bytes, || {
        copy.borrow_mut().copy_from_slice(std::hint::black_box(&source));
        Ok(())
    })?;
    Ok(times[0])
}

/// Milliseconds in a readable unit.
pub(super) fn duration(ms: f64) -> String {
    if ms < 0.1 { format!("{:.2} us", ms * 1e3) } else { format!("{ms:.2} ms") }
}
