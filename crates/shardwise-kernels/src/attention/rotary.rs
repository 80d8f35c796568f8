//! Rotary position embedding in one pass over memory.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::float::AttentionFloat;
use super::problem::{Locked, Operand};
use crate::error::{ErrorKind, Result};
use crate::parallel::{SharedPtr, over_ranges};
use crate::simd::{self, Kernel};
use crate::uninit_buffer::UninitBuffer;

/// Cosines and sines of the angles of rotary position embedding, for a range of positions.
#[derive(Debug)]
pub struct RotaryTable {
    half: usize,
    numbers: RotaryNumbers,
}

/// Per position the cosines of all angles, then their sines.
#[derive(Debug)]
enum RotaryNumbers {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl RotaryTable {
    /// Computes the angles `position * base^(-2 i / size)` of `length` positions from `first`, for tensors of type `dtype`.
    ///
    /// Numbers are rounded to f64 for f64, and otherwise to f32.
    pub fn new(dtype: DType, base: f64, size: usize, first: usize, length: usize) -> Self {
        let frequencies: Vec<f64> = (0..size / 2).map(|i| base.powf(-2.0 * i as f64 / size as f64)).collect();
        Self::with_frequencies(dtype, &frequencies, 1.0, first, length)
    }

    /// As [`new`](Self::new), with the angle per position of every pair, and a factor of the rotated elements.
    pub fn with_frequencies(dtype: DType, frequencies: &[f64], scale: f64, first: usize, length: usize) -> Self {
        let half = frequencies.len();
        let angles = (first..first + length).flat_map(|position| {
            let angle = move |frequency: &f64| position as f64 * frequency;
            let cosines = frequencies.iter().map(angle).map(|angle| scale * angle.cos());
            let sines = frequencies.iter().map(angle).map(|angle| scale * angle.sin());
            cosines.chain(sines).collect::<Vec<f64>>()
        });
        let numbers = match dtype {
            DType::F64 => RotaryNumbers::F64(angles.collect()),
            _ => RotaryNumbers::F32(angles.map(|x| x as f32).collect()),
        };
        RotaryTable { half, numbers }
    }
}

/// Rotates pairs of elements of the rows of `[.., length, size]`: element `i` and element `i + size / 2` by angle `i` of the
/// row's position, or by its negative if `inverse`. `positions` are the rows of the table for each row.
///
/// The result has the type of `x`; f16 and bf16 are computed in f32.
///
/// # Errors
/// If the table was built for another size or type, or lacks a position; or if memory does not suffice.
pub fn rotate_pairs(x: &Tensor, table: &RotaryTable, positions: &[usize], inverse: bool) -> Result<Tensor> {
    match (&table.numbers, x.dtype()) {
        (RotaryNumbers::F64(numbers), DType::F64) => rotate::<f64>(x, numbers, table.half, positions, inverse),
        (RotaryNumbers::F32(numbers), DType::F32 | DType::F16 | DType::BF16) => {
            rotate::<f32>(x, numbers, table.half, positions, inverse)
        }
        _ => Err(misfit(x, table.half)),
    }
}

fn misfit(x: &Tensor, half: usize) -> crate::Error {
    ErrorKind::shape(x.dims()).error(
        "operand",
        format!("{} {:?} with a table for size {}", x.dtype().as_str(), x.dims(), 2 * half),
        "[.., length, size] of the type and size of the table, which has all positions",
        "build the table for this tensor",
    )
}

fn rotate<F: AttentionFloat>(
    x: &Tensor,
    table: &[F],
    half: usize,
    positions: &[usize],
    inverse: bool,
) -> Result<Tensor> {
    let [.., length, size] = *x.dims() else { return Err(misfit(x, half)) };
    let held = positions.iter().all(|&position| (position + 1) * size <= table.len());
    if size != 2 * half || positions.len() != length || !held {
        return Err(misfit(x, half));
    }
    let rotated = UninitBuffer::new(x.dtype(), x.elem_count())?;
    let (locked, target) = (Locked::new(x)?, SharedPtr::new(rotated.first()));
    if x.elem_count() > 0 {
        let x_rows = locked.operand();
        over_ranges(x.elem_count() / size, size, 1, |rows| {
            simd::run(Rotate { x: &x_rows, dtype: x.dtype(), table, positions, size, rows, target, inverse });
        });
    }
    // SAFETY: every row is written.
    Ok(unsafe { rotated.finish(x.dims()) })
}

/// Some rows of all heads, counted over both.
struct Rotate<'a, F> {
    x: &'a Operand,
    dtype: DType,
    table: &'a [F],
    positions: &'a [usize],
    size: usize,
    rows: Range<usize>,
    target: SharedPtr<u8>,
    inverse: bool,
}

impl<F: AttentionFloat> Kernel for Rotate<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (size, half) = (self.size, self.size / 2);
        let direct = self.dtype == F::DTYPE;
        let mut buffer = vec![F::ZERO; 2 * size];
        let sign = if self.inverse { F::ZERO - F::ONE } else { F::ONE };
        for row in self.rows {
            let (head, at) = (row / self.positions.len(), row % self.positions.len());
            let (cosines, sines) = self.table[self.positions[at] * size..][..size].split_at(half);
            let (loaded, spare) = buffer.split_at_mut(size);
            // SAFETY: the row is inside the tensor, and is written by this range alone.
            unsafe {
                let to = self.target.get().add(row * size * self.dtype.size_in_bytes());
                let from = match self.x.in_place::<F>(head) {
                    Some((first, stride)) => first.add(at * stride),
                    None => {
                        self.x.load(head, at..at + 1, size, loaded.as_mut_ptr(), size);
                        loaded.as_ptr()
                    }
                };
                let written = if direct { to.cast::<F>() } else { spare.as_mut_ptr() };
                for i in 0..half {
                    let (a, b, c, s) = (*from.add(i), *from.add(half + i), cosines[i], sines[i] * sign);
                    written.add(i).write(a * c - b * s);
                    written.add(half + i).write(b * c + a * s);
                }
                if !direct {
                    F::store(self.dtype, spare, to);
                }
            }
        }
    }
}
