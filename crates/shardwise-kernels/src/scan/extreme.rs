//! Cumulative maxima and minima with their indices.

use candle_core::{Tensor, WithDType};

use super::ScanKind;
use crate::error::Result;
use crate::parallel::{SharedPtr, over_ranges};
use crate::typed_slice::{LineShape, filled_by, with_slice};
use crate::{check_supported, contiguous, simd, with_type};

/// Cumulative maxima or minima.
pub struct ScannedExtremes {
    /// The cumulative values, in the type of the elements.
    pub values: Tensor,
    /// The index (i64) of each value: the last of equal ones.
    pub indices: Tensor,
    /// The value at the end of every line; the dimension becomes 1, or stays 0.
    pub last_values: Tensor,
    /// The indices of `last_values`.
    pub last_indices: Tensor,
}

/// An element that has an order.
trait Extreme: WithDType {
    fn is_nan(self) -> bool;

    /// Whether the maximum (else the minimum) so far stays when `x` follows. NaN stays until the next NaN.
    #[inline(always)]
    fn stays<const MAX: bool>(self, x: Self) -> bool {
        let worse = if MAX { x < self } else { x > self };
        worse | (self.is_nan() & !x.is_nan())
    }
}

macro_rules! extremes {
    ($($T:ty: |$x:ident| $is_nan:expr;)*) => {$(
        impl Extreme for $T {
            #[inline(always)]
            fn is_nan(self) -> bool {
                let $x = self;
                $is_nan
            }
        }
    )*};
}
extremes! {
    f64: |x| f64::is_nan(x);
    f32: |x| f32::is_nan(x);
    half::f16: |x| half::f16::is_nan(x);
    half::bf16: |x| half::bf16::is_nan(x);
    i64: |_x| false;
    i32: |_x| false;
    i16: |_x| false;
    u32: |_x| false;
    u8: |_x| false;
}

/// Adjacent columns that are scanned together: their values and indices stay in the first-level cache.
const COLUMNS: usize = 256;

/// Returns the cumulative maxima or minima along `dim` and their indices plus `first_index`.
///
/// Lines are divided over the threads of the pool.
///
/// # Errors
/// If the kernels do not support the type or device of the tensor, or memory does not suffice.
///
/// # Panics
/// If the kind is not a maximum or a minimum.
pub fn scan_extremes(x: &Tensor, dim: usize, kind: ScanKind, first_index: i64) -> Result<ScannedExtremes> {
    check_supported(x)?;
    let x = contiguous(x)?;
    with_type!(x.dtype(), T => with_slice::<T, _>(&x, |elements| match kind {
        ScanKind::Max => scan_by::<T, true>(elements, x.dims(), dim, first_index),
        ScanKind::Min => scan_by::<T, false>(elements, x.dims(), dim, first_index),
        _ => unreachable!("sums and products have no indices"),
    })?, otherwise unreachable!("checked above"))
}

fn scan_by<T: Extreme, const MAX: bool>(
    elements: &[T],
    dims: &[usize],
    dim: usize,
    first_index: i64,
) -> Result<ScannedExtremes> {
    let LineShape { outer, n, inner } = LineShape::new(dims, dim);
    let mut shape = dims.to_vec();
    shape[dim] = n.min(1);
    let [mut indices, mut last_values, mut last_indices] = [const { None }; 3];
    // SAFETY: the strips are all lines, and each writes all results of its own lines.
    let values = unsafe {
        filled_by::<T>(dims, |to_values| {
            indices = Some(filled_by::<i64>(dims, |to_indices| {
                last_values = Some(filled_by::<T>(&shape, |to_last| {
                    last_indices = Some(filled_by::<i64>(&shape, |to_last_index| {
                        if elements.is_empty() {
                            return;
                        }
                        let strips = inner.div_ceil(COLUMNS);
                        // A comparison, and three elements that are moved.
                        over_ranges(outer * strips, n * inner.min(COLUMNS) * 6, 1, |range| {
                            for strip in range {
                                let (matrix, column) = (strip / strips, strip % strips * COLUMNS);
                                let first = matrix * n * inner + column;
                                let line = matrix * inner + column;
                                let width = COLUMNS.min(inner - column);
                                let to = |lines: SharedPtr<T>, at: usize| lines.get().add(at);
                                simd::run(ScanStrip::<T, MAX> {
                                    from: &elements[first..(matrix + 1) * n * inner],
                                    n,
                                    stride: inner,
                                    first_index,
                                    values: to(to_values, first),
                                    indices: to_indices.get().add(first),
                                    last_values: std::slice::from_raw_parts_mut(to(to_last, line), width),
                                    last_indices: std::slice::from_raw_parts_mut(to_last_index.get().add(line), width),
                                });
                            }
                        });
                    }));
                }));
            }));
        })?
    };
    let built = "built inside";
    Ok(ScannedExtremes {
        values,
        indices: indices.expect(built)?,
        last_values: last_values.expect(built)?,
        last_indices: last_indices.expect(built)?,
    })
}

/// Up to [`COLUMNS`] adjacent lines; `from` begins with the first element of the first one.
struct ScanStrip<'a, T, const MAX: bool> {
    from: &'a [T],
    n: usize,
    /// The distance between elements of a line.
    stride: usize,
    first_index: i64,
    values: *mut T,
    indices: *mut i64,
    /// One per line: the value and the index so far.
    last_values: &'a mut [T],
    last_indices: &'a mut [i64],
}

impl<T: Extreme, const MAX: bool> simd::Kernel for ScanStrip<'_, T, MAX> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let width = self.last_values.len();
        self.last_values.copy_from_slice(&self.from[..width]);
        self.last_indices.fill(self.first_index);
        for j in 0..self.n {
            let number = self.first_index + j as i64;
            let line = &self.from[j * self.stride..][..width];
            // SAFETY: there is a result for each of these elements, which no other strip writes.
            let (values, indices) = unsafe {
                (
                    std::slice::from_raw_parts_mut(self.values.add(j * self.stride), width),
                    std::slice::from_raw_parts_mut(self.indices.add(j * self.stride), width),
                )
            };
            let so_far = self.last_values.iter_mut().zip(self.last_indices.iter_mut());
            for (((value, index), &x), (to, to_index)) in so_far.zip(line).zip(values.iter_mut().zip(indices)) {
                let stays = value.stays::<MAX>(x);
                *value = if stays { *value } else { x };
                *index = if stays { *index } else { number };
                (*to, *to_index) = (*value, *index);
            }
        }
    }
}

/// Combines scanned maxima or minima of a part of a dimension with the ends of the parts before it.
///
/// `last_values` and `last_indices` have one element per part along `dim`, of which the first `before` count. Returns values and
/// indices.
///
/// # Errors
/// If memory does not suffice.
///
/// # Panics
/// If the kind is not a maximum or a minimum.
pub fn carry_extremes(
    scanned: &ScannedExtremes,
    dim: usize,
    kind: ScanKind,
    before: usize,
) -> Result<(Tensor, Tensor)> {
    with_type!(scanned.values.dtype(), T => match kind {
        ScanKind::Max => carry::<T, true>(scanned, dim, before),
        ScanKind::Min => carry::<T, false>(scanned, dim, before),
        _ => unreachable!("sums and products have no indices"),
    }, otherwise unreachable!("the result of a scan has a supported type"))
}

fn carry<T: Extreme, const MAX: bool>(
    scanned: &ScannedExtremes,
    dim: usize,
    before: usize,
) -> Result<(Tensor, Tensor)> {
    let ScannedExtremes { values, indices, last_values, last_indices } = scanned;
    let (dims, parts) = (values.dims(), last_values.dims()[dim]);
    let LineShape { outer, n, inner } = LineShape::new(dims, dim);
    // The value before this part and its index, for every line.
    let heads: Vec<(T, i64)> = with_slice::<T, _>(last_values, |values| {
        with_slice::<i64, _>(last_indices, |indices| {
            let head = |line: usize| {
                let at = |part: usize| (line / inner * parts + part) * inner + line % inner;
                (1..before).fold((values[at(0)], indices[at(0)]), |(value, index), part| {
                    let x = values[at(part)];
                    if value.stays::<MAX>(x) { (value, index) } else { (x, indices[at(part)]) }
                })
            };
            (0..outer * inner).map(head).collect()
        })
    })??;
    let mut carried = None;
    // SAFETY: both loops write every element.
    let carried_values = unsafe {
        with_slice::<T, _>(values, |values| {
            with_slice::<i64, _>(indices, |indices| {
                filled_by::<T>(dims, |to| {
                    carried = Some(filled_by::<i64>(dims, |to_index| {
                        for (i, (&x, &own)) in values.iter().zip(indices).enumerate() {
                            let (value, index) = heads[i / inner / n * inner + i % inner];
                            let stays = value.stays::<MAX>(x);
                            to.get().add(i).write(if stays { value } else { x });
                            to_index.get().add(i).write(if stays { index } else { own });
                        }
                    }));
                })
            })
        })???
    };
    Ok((carried_values, carried.expect("built inside")?))
}
