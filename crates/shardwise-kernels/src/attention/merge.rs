//! Attention over parts of the keys: combination of the results, and dot products of rows.

use std::ops::Range;

use candle_core::{DType, Tensor};

use super::float::AttentionFloat;
use super::problem::{Locked, Operand};
use crate::error::{ErrorKind, Result};
use crate::parallel::{SharedPtr, over_ranges};
use crate::simd::{self, Kernel};
use crate::uninit_buffer::UninitBuffer;

/// Sums outputs of attention over parts of the keys: `sum over n of weights[n] * outputs[n]`.
///
/// `outputs` is `[parts, rows.., size]` and `weights` is `[parts, rows..]`, both of type f32 or both f64.
///
/// # Errors
/// If shapes or types do not fit, or memory does not suffice.
pub fn merge_attention_parts(outputs: &Tensor, weights: &Tensor) -> Result<Tensor> {
    let (true, [parts, rows @ .., size]) = (outputs.dtype() == weights.dtype(), outputs.dims()) else {
        return Err(misfit(outputs, weights));
    };
    if weights.dims().split_first() != Some((parts, rows)) {
        return Err(misfit(outputs, weights));
    }
    match outputs.dtype() {
        DType::F64 => merge::<f64>(outputs, weights, *parts, *size),
        _ => merge::<f32>(outputs, weights, *parts, *size),
    }
}

fn misfit(outputs: &Tensor, weights: &Tensor) -> crate::Error {
    let describe = |t: &Tensor| format!("{} {:?}", t.dtype().as_str(), t.dims());
    ErrorKind::shape(outputs.dims()).error(
        "parts",
        format!("outputs {} and weights {}", describe(outputs), describe(weights)),
        "[parts, rows.., size] and [parts, rows..] of one type",
        "pass one weight per output",
    )
}

fn merge<F: AttentionFloat>(outputs: &Tensor, weights: &Tensor, parts: usize, size: usize) -> Result<Tensor> {
    let shape = &outputs.dims()[1..];
    let rows: usize = weights.dims()[1..].iter().product();
    let merged = UninitBuffer::new(F::DTYPE, rows * size)?;
    let target = SharedPtr::new(merged.first().cast::<F>());
    let (outputs, weights) = (outputs.reshape((parts, rows, size))?, weights.reshape((parts, rows))?.unsqueeze(2)?);
    let (outputs, weights) = (Locked::new(&outputs)?, Locked::new(&weights)?);
    let (outputs, weights) = (outputs.operand(), weights.operand());
    over_ranges(rows, parts * size, 1, |range| {
        let (mut line, mut weight) = (vec![F::ZERO; size], F::ZERO);
        for row in range {
            // SAFETY: the row of the result, which no other range has.
            let to = unsafe { std::slice::from_raw_parts_mut(target.get().add(row * size).cast(), size) };
            to.fill(std::mem::MaybeUninit::new(F::ZERO));
            // SAFETY: just written.
            let to = unsafe { to.assume_init_mut() };
            for part in 0..parts {
                // SAFETY: the row is inside the tensors, and the buffers have room for it.
                unsafe {
                    outputs.load(part, row..row + 1, size, line.as_mut_ptr(), size);
                    weights.load(part, row..row + 1, 1, &raw mut weight, 1);
                }
                to.iter_mut().zip(&line).for_each(|(to, &x)| *to += weight * x);
            }
        }
    });
    // SAFETY: every row is written.
    Ok(unsafe { merged.finish(shape) })
}

/// Dot products of the rows of two tensors of one shape: `sum over the last dimension of a * b`, in f64 for f64 and otherwise
/// f32.
///
/// # Errors
/// If the shapes differ, there is no dimension, or memory does not suffice.
pub fn row_dots(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (true, [rows @ .., _]) = (a.dims() == b.dims(), a.dims()) else {
        return Err(ErrorKind::shape(a.dims()).error(
            "rows",
            format!("shapes {:?} and {:?}", a.dims(), b.dims()),
            "one shape with at least one dimension",
            "reshape the operands",
        ));
    };
    match a.dtype() {
        DType::F64 => dots::<f64>(a, b, rows),
        _ => dots::<f32>(a, b, rows),
    }
}

fn dots<F: AttentionFloat>(a: &Tensor, b: &Tensor, rows: &[usize]) -> Result<Tensor> {
    let count: usize = rows.iter().product();
    let size = a.dims()[rows.len()];
    let found = UninitBuffer::new(F::DTYPE, count)?;
    let target = SharedPtr::new(found.first().cast::<F>());
    let [a, b] = [a.unsqueeze(rows.len())?, b.unsqueeze(rows.len())?];
    let (a, b) = (Locked::new(&a)?, Locked::new(&b)?);
    let (a, b) = (a.operand(), b.operand());
    over_ranges(count, size, 1, |rows| simd::run(RowDots { a: &a, b: &b, size, rows, target }));
    // SAFETY: every row is written.
    Ok(unsafe { found.finish(rows) })
}

/// Dot products of some rows.
struct RowDots<'a, F> {
    a: &'a Operand,
    b: &'a Operand,
    size: usize,
    rows: Range<usize>,
    target: SharedPtr<F>,
}

impl<F: AttentionFloat> Kernel for RowDots<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        /// Sums that are computed side by side, as one vector.
        const LANES: usize = 16;
        let size = self.size;
        let padded = size.next_multiple_of(LANES);
        let (mut left, mut right) = (vec![F::ZERO; padded], vec![F::ZERO; padded]);
        for row in self.rows {
            // SAFETY: the rows are inside the tensors, and there is room for them. Without padding they are read in place.
            let (left, right) = unsafe {
                let line = |operand: &Operand, buffer: &mut [F]| -> *const F {
                    match operand.in_place::<F>(row) {
                        Some((first, _)) if padded == size => first,
                        _ => {
                            operand.load(row, 0..1, size, buffer.as_mut_ptr(), size);
                            buffer.as_ptr()
                        }
                    }
                };
                let (left, right) = (line(self.a, &mut left), line(self.b, &mut right));
                (std::slice::from_raw_parts(left, padded), std::slice::from_raw_parts(right, padded))
            };
            let mut sums = [F::ZERO; LANES];
            for (x, y) in left.as_chunks::<LANES>().0.iter().zip(right.as_chunks::<LANES>().0) {
                for l in 0..LANES {
                    sums[l] = x[l].multiply_add::<FMA>(y[l], sums[l]);
                }
            }
            let sum: f64 = sums.iter().map(|x| x.wide()).sum();
            // SAFETY: each row is written by one range.
            unsafe { self.target.get().add(row).write(F::narrow(sum)) };
        }
    }
}
