//! How large the elements of a tensor are together: sums of powers, or the largest, in one pass and in f64.

use std::mem::MaybeUninit;

use candle_core::{DType, Tensor};

use super::update::{Stored, read};
use super::{check_served, dense, first_element, vector};
use crate::error::Result;

/// Elements that are worked on at a time.
const CHUNK: usize = 512;

/// Sums that are carried side by side.
const LANES: usize = 16;

/// What is made of the absolute values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Power {
    /// The sum of their powers with an exponent.
    Sum(f64),
    /// The largest; not-a-number wins.
    Largest,
}

/// The sum of powers, or the largest, of the absolute values of all elements; 0 without elements.
pub fn measure(x: &Tensor, power: Power) -> Result<f64> {
    check_served(x)?;
    match x.dtype() {
        DType::F64 => measure_in::<f64>(x, power),
        _ => measure_in::<f32>(x, power),
    }
}

/// Elements are read as numbers of a type, and then computed with in f64.
fn measure_in<S: Stored>(x: &Tensor, power: Power) -> Result<f64> {
    let x = dense(x)?;
    let guard = x.storage_and_layout();
    let (first, dtype) = first_element(&guard.0, guard.1);
    let mut buffer = [MaybeUninit::<S>::uninit(); CHUNK];
    let mut lanes = [0.0; LANES];
    for start in (0..x.elem_count()).step_by(CHUNK) {
        let n = CHUNK.min(x.elem_count() - start);
        // SAFETY: the tensor is dense and the guard keeps it; the range lies inside.
        let numbers = unsafe { read(dtype, first.add(start * dtype.size_in_bytes()), &mut buffer[..n]) };
        vector::run(Measure { numbers, lanes: &mut lanes, power });
    }
    let join = |a, b| if power == Power::Largest { largest(a, b) } else { a + b };
    Ok(lanes.into_iter().fold(0.0, join))
}

#[inline(always)]
fn largest(a: f64, b: f64) -> f64 {
    if a >= b || a.is_nan() { a } else { b }
}

struct Measure<'a, S> {
    numbers: &'a [S],
    lanes: &'a mut [f64; LANES],
    power: Power,
}

impl<S: Stored> vector::Kernel for Measure<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Measure { numbers, lanes, power } = self;
        match power {
            Power::Largest => each(numbers, lanes, |lane, x| largest(lane, x.abs())),
            Power::Sum(1.0) => each(numbers, lanes, |lane, x| lane + x.abs()),
            Power::Sum(2.0) => each(numbers, lanes, |lane, x| lane + x * x),
            Power::Sum(exponent) => each(numbers, lanes, |lane, x| lane + x.abs().powf(exponent)),
        }
    }
}

/// Joins every number to the lane of its position.
#[inline(always)]
fn each<S: Stored>(numbers: &[S], lanes: &mut [f64; LANES], join: impl Fn(f64, f64) -> f64) {
    let (blocks, rest) = numbers.as_chunks::<LANES>();
    let mut joined = *lanes;
    for block in blocks {
        for (lane, &x) in joined.iter_mut().zip(block) {
            *lane = join(*lane, x.wide());
        }
    }
    for (lane, &x) in joined.iter_mut().zip(rest) {
        *lane = join(*lane, x.wide());
    }
    *lanes = joined;
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn all_elements_count_once() {
        for n in [0usize, 1, 16, 17, 512, 1000] {
            let x = Tensor::arange(0f64, n as f64, &Device::Cpu).unwrap();
            let x = (x * -0.5).unwrap();
            for dtype in [DType::F64, DType::F32, DType::F16] {
                let x = x.to_dtype(dtype).unwrap();
                let sum = |p: i32| (0..n).map(|i| (i as f64 / 2.0).powi(p)).sum::<f64>();
                for p in 1..4 {
                    let got = measure(&x, Power::Sum(f64::from(p))).unwrap();
                    assert!((got - sum(p)).abs() <= 1e-12 * sum(p), "{got} {n} {p}");
                }
                assert_eq!(measure(&x, Power::Largest).unwrap(), n.saturating_sub(1) as f64 / 2.0);
            }
        }
        let odd = Tensor::new(&[1.0, f64::NAN, 2.0], &Device::Cpu).unwrap();
        assert!(measure(&odd, Power::Largest).unwrap().is_nan());
        assert!(measure(&odd, Power::Sum(2.0)).unwrap().is_nan());
    }
}
