//! Attention over parts of the keys: combination of the results, and dot products of rows.

use candle_core::{DType, Tensor};

use super::float::AttentionFloat;
use super::problem::{Locked, Operand};
use crate::error::{ErrorKind, Result};
use crate::parallel::{SharedPtr, over_ranges};
use crate::uninit_buffer::UninitBuffer;

/// Sums outputs of attention over parts of the keys: `sum over n of exp(logs[n] - all_logs) * outputs[n]`.
///
/// `outputs` is `[parts, rows.., size]`, `logs` is `[parts, rows..]` and `all_logs` is `[rows..]`, all of type f32 or all f64.
/// A part whose logarithm is -inf has no keys and adds nothing.
///
/// # Errors
/// If shapes or types do not fit, or memory does not suffice.
pub fn merge_attention_parts(outputs: &Tensor, logs: &Tensor, all_logs: &Tensor) -> Result<Tensor> {
    let [parts, rows @ .., size] = outputs.dims() else {
        return Err(misfit([outputs, logs, all_logs]));
    };
    if logs.dims().split_first() != Some((parts, rows)) || all_logs.dims() != rows {
        return Err(misfit([outputs, logs, all_logs]));
    }
    match outputs.dtype() {
        DType::F64 => merge::<f64>(outputs, logs, all_logs, *parts, *size),
        _ => merge::<f32>(outputs, logs, all_logs, *parts, *size),
    }
}

fn misfit(found: [&Tensor; 3]) -> crate::Error {
    let shapes = found.map(|t| format!("{:?}", t.dims())).join(", ");
    ErrorKind::shape(found[0].dims()).error(
        "parts",
        format!("shapes {shapes}"),
        "[parts, rows.., size], [parts, rows..] and [rows..]",
        "pass what attention over parts of the keys returned",
    )
}

fn merge<F: AttentionFloat>(
    outputs: &Tensor,
    logs: &Tensor,
    all_logs: &Tensor,
    parts: usize,
    size: usize,
) -> Result<Tensor> {
    let shape = &outputs.dims()[1..];
    let rows = all_logs.elem_count();
    let merged = UninitBuffer::new(F::DTYPE, rows * size)?;
    let target = SharedPtr::new(merged.first().cast::<F>());
    let [outputs, logs, all_logs] = [
        outputs.reshape((parts * rows, 1, size))?,
        logs.reshape((parts * rows, 1, 1))?,
        all_logs.reshape((rows, 1, 1))?,
    ];
    let (outputs, logs, all_logs) = (Locked::new(&outputs)?, Locked::new(&logs)?, Locked::new(&all_logs)?);
    let [outputs, logs, all_logs] = [&outputs, &logs, &all_logs].map(Locked::operand);
    over_ranges(rows, parts * size, 1, |range| {
        let mut line = vec![F::ZERO; size];
        for row in range {
            // SAFETY: the row of the result, which no other range has.
            let to = unsafe { std::slice::from_raw_parts_mut(target.get().add(row * size).cast(), size) };
            to.fill(std::mem::MaybeUninit::new(F::ZERO));
            // SAFETY: just written.
            let to = unsafe { to.assume_init_mut() };
            let whole = first::<F>(&all_logs, row);
            for part in 0..parts {
                let log = first::<F>(&logs, part * rows + row);
                if log == F::NEG_INFINITY {
                    continue;
                }
                let weight = (log - whole).exponential::<false>();
                // SAFETY: the row is inside the tensor, and the buffer has room for it.
                unsafe { outputs.load(part * rows + row, 0..1, size, line.as_mut_ptr(), size) };
                to.iter_mut().zip(&line).for_each(|(to, &x)| *to += weight * x);
            }
        }
    });
    // SAFETY: every row is written.
    Ok(unsafe { merged.finish(shape) })
}

fn first<F: AttentionFloat>(numbers: &Operand, row: usize) -> F {
    let mut found = F::ZERO;
    // SAFETY: a row of one element.
    unsafe { numbers.load(row, 0..1, 1, &raw mut found, 1) };
    found
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
    over_ranges(count, size, 1, |range| {
        let (mut left, mut right) = (vec![F::ZERO; size], vec![F::ZERO; size]);
        for row in range {
            // SAFETY: the rows are inside the tensors, and each is written by one range.
            unsafe {
                a.load(row, 0..1, size, left.as_mut_ptr(), size);
                b.load(row, 0..1, size, right.as_mut_ptr(), size);
                let sum: f64 = left.iter().zip(&right).map(|(x, y)| x.wide() * y.wide()).sum();
                target.get().add(row).write(F::narrow(sum));
            }
        }
    });
    // SAFETY: every row is written.
    Ok(unsafe { found.finish(rows) })
}
