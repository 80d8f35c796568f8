//! The rows that a quantized matrix is multiplied with, as integers of 16 bits.

use super::packed::GROUP;
use crate::simd::{self, Kernel};

/// The largest integer. Sums of four products with a byte stay below 2^24, where every integer is an f32.
const LARGEST: f32 = 32767.0;

/// Rows whose elements are integers of 16 bits times a scale for every 32 elements.
///
/// GGML rounds to 8 bits. 16 cost few instructions more, and results stay those of unrounded rows up to 1/65000 of the largest
/// element of a group, so that neither tokens nor what ranks compute in parts depend on the rounding.
pub(super) struct RoundedRows {
    pub(super) integers: Vec<i16>,
    /// Of every 32 elements: the scale, and the sum of the elements, which offsets are multiplied with.
    pub(super) scales_and_sums: Vec<[f32; 2]>,
}

impl RoundedRows {
    /// Rounds rows, whose length is a multiple of 32. `None` if an element is infinite or NaN.
    pub(super) fn new(x: &[f32]) -> Option<Self> {
        let groups = x.len() / GROUP;
        let mut rows = RoundedRows { integers: vec![0; groups * GROUP], scales_and_sums: vec![[0.0; 2]; groups] };
        simd::run(Round { x, rows: &mut rows }).then_some(rows)
    }
}

struct Round<'a> {
    x: &'a [f32],
    rows: &'a mut RoundedRows,
}

impl Kernel for Round<'_> {
    /// Whether all elements are finite.
    type Output = bool;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> bool {
        let RoundedRows { integers, scales_and_sums } = self.rows;
        let (groups, _) = self.x.as_chunks::<GROUP>();
        let (integers, _) = integers.as_chunks_mut::<GROUP>();
        for ((x, integers), [scale, sum]) in groups.iter().zip(integers).zip(scales_and_sums) {
            // Magnitudes are ordered as their bits, and NaN is above them all.
            let bits = x.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
            if bits >= f32::INFINITY.to_bits() {
                return false;
            }
            *scale = f32::from_bits(bits) / LARGEST;
            if *scale == 0.0 {
                integers.fill(0);
                *sum = 0.0;
                continue;
            }
            let mut total = 0;
            for i in 0..GROUP {
                let integer = nearest((x[i] / *scale).clamp(-LARGEST, LARGEST));
                integers[i] = integer as i16;
                total += integer;
            }
            *sum = *scale * total as f32;
        }
        true
    }
}

/// The nearest integer, the even one of two. Adding 1.5 * 2^23 leaves no bits for a fraction; `round_ties_even` is a call on
/// processors without an instruction for it.
#[inline(always)]
fn nearest(x: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits().cast_signed() - SHIFT.to_bits().cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_rounded_to_the_nearest_multiple_of_the_scale() {
        let mut x: Vec<f32> = (0..3 * GROUP).map(|i| ((i * 61 % 97) as f32 - 48.0) * 0.37).collect();
        x[GROUP..2 * GROUP].fill(0.0);
        // The smallest numbers there are: their scale is not.
        x[2 * GROUP..].fill(0.0);
        x[2 * GROUP] = f32::from_bits(1);
        let rows = RoundedRows::new(&x).unwrap();
        for (group, x) in x.chunks(GROUP).enumerate() {
            let [scale, total] = rows.scales_and_sums[group];
            let integers = &rows.integers[group * GROUP..(group + 1) * GROUP];
            let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            assert_eq!(scale, largest / LARGEST);
            for (x, &integer) in x.iter().zip(integers) {
                let error = (f64::from(*x) - f64::from(scale) * f64::from(integer)).abs();
                assert!(error <= 0.5001 * f64::from(scale) || scale == 0.0, "{x}: {integer} times {scale}");
            }
            let sum: i32 = integers.iter().map(|&i| i32::from(i)).sum();
            assert_eq!(total, scale * sum as f32);
        }
        assert_eq!(
            [-2.5, -1.5, -0.5, 0.5, 1.5, 2.4999, 32767.0, -32767.0].map(nearest),
            [-2, -2, 0, 0, 2, 2, 32767, -32767]
        );
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = x.clone();
            x[40] = bad;
            assert!(RoundedRows::new(&x).is_none());
        }
    }
}
