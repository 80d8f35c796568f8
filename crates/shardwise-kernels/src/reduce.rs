//! Elementwise reduction of several operands in their order, in one pass over memory.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use smallvec::SmallVec;

use crate::reduce_op::ReduceOp;

/// Elements worked on at a time: small enough that the accumulator stays in the first-level cache.
const BLOCK: usize = 1024;

/// A type whose operands can be reduced. Half-precision types accumulate in `f32` and round once at the end.
pub trait Reducible: Copy + Send + Sync + 'static {
    /// Reduces up to `BLOCK` elements: `dst[i]`, which holds `srcs[0][i]`, becomes the reduction of `srcs[..][i]`,
    /// first operand first.
    fn reduce(op: ReduceOp, srcs: &[&[Self]], dst: &mut [Self]);
}

/// Writes the reduction of `srcs`, all of one length, to `dst`, first operand first.
///
/// # Safety
/// `dst` can be written for the length of the operands and does not overlap them. It may be uninitialised.
pub unsafe fn reduce_block<T: Reducible>(op: ReduceOp, srcs: &[&[T]], dst: *mut T) {
    let len = srcs[0].len();
    let mut blocks: SmallVec<[&[T]; 8]> = SmallVec::new();
    for start in (0..len).step_by(BLOCK) {
        let end = len.min(start + BLOCK);
        blocks.clear();
        blocks.extend(srcs.iter().map(|s| &s[start..end]));
        // SAFETY: in range by the caller's promise. Copying the first operand in makes the memory initialised before a
        // reference to it exists.
        let dst = unsafe {
            std::ptr::copy_nonoverlapping(blocks[0].as_ptr(), dst.add(start), end - start);
            std::slice::from_raw_parts_mut(dst.add(start), end - start)
        };
        T::reduce(op, &blocks, dst);
    }
}

/// A type that is its own accumulator.
trait Accumulator: Copy {
    /// `acc[i]` becomes its reduction with `src[i]`; a mean is summed up first.
    fn fold(op: ReduceOp, acc: &mut [Self], src: &[Self]);
    /// What is left to do after `operands` operands have been folded.
    fn finish(op: ReduceOp, acc: &mut [Self], operands: usize);
}

fn zip<T: Copy>(acc: &mut [T], src: &[T], f: impl Fn(T, T) -> T) {
    for (a, &s) in acc.iter_mut().zip(src) {
        *a = f(*a, s);
    }
}

macro_rules! accumulator_float {
    ($T:ty) => {
        impl Accumulator for $T {
            fn fold(op: ReduceOp, acc: &mut [Self], src: &[Self]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Avg => zip(acc, src, |a, b| a + b),
                    // Not-a-number on either side stays, as in a maximum over one tensor.
                    ReduceOp::Max => zip(acc, src, |a, b| if a >= b || a.is_nan() { a } else { b }),
                    ReduceOp::Min => zip(acc, src, |a, b| if a <= b || a.is_nan() { a } else { b }),
                    ReduceOp::Product => zip(acc, src, |a, b| a * b),
                    ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => unreachable!("ReduceOp::check refuses it"),
                }
            }

            fn finish(op: ReduceOp, acc: &mut [Self], operands: usize) {
                if op == ReduceOp::Avg {
                    acc.iter_mut().for_each(|a| *a /= operands as $T);
                }
            }
        }
    };
}

macro_rules! accumulator_integer {
    ($T:ty) => {
        impl Accumulator for $T {
            fn fold(op: ReduceOp, acc: &mut [Self], src: &[Self]) {
                match op {
                    ReduceOp::Sum => zip(acc, src, <$T>::wrapping_add),
                    ReduceOp::Max => zip(acc, src, <$T>::max),
                    ReduceOp::Min => zip(acc, src, <$T>::min),
                    ReduceOp::Product => zip(acc, src, <$T>::wrapping_mul),
                    ReduceOp::BitAnd => zip(acc, src, |a, b| a & b),
                    ReduceOp::BitOr => zip(acc, src, |a, b| a | b),
                    ReduceOp::BitXor => zip(acc, src, |a, b| a ^ b),
                    ReduceOp::Avg => unreachable!("ReduceOp::check refuses it"),
                }
            }

            fn finish(_: ReduceOp, _: &mut [Self], _: usize) {}
        }
    };
}

/// Types that are reduced in themselves: the destination is the accumulator.
macro_rules! reducible_directly {
    ($($accumulator:ident: $($T:ty),*;)*) => {$($(
        $accumulator!($T);

        impl Reducible for $T {
            fn reduce(op: ReduceOp, srcs: &[&[Self]], dst: &mut [Self]) {
                srcs[1..].iter().for_each(|src| Self::fold(op, dst, src));
                Self::finish(op, dst, srcs.len());
            }
        }
    )*)*};
}
reducible_directly! {
    accumulator_float: f32, f64;
    accumulator_integer: u8, u32, i16, i32, i64;
}

/// Types that are reduced in `f32`.
macro_rules! reducible_widened {
    ($($T:ty),*) => {$(
        impl Reducible for $T {
            fn reduce(op: ReduceOp, srcs: &[&[Self]], dst: &mut [Self]) {
                let (mut acc, mut wide) = ([0f32; BLOCK], [0f32; BLOCK]);
                let (acc, wide) = (&mut acc[..dst.len()], &mut wide[..dst.len()]);
                srcs[0].convert_to_f32_slice(acc);
                for src in &srcs[1..] {
                    src.convert_to_f32_slice(wide);
                    f32::fold(op, acc, wide);
                }
                f32::finish(op, acc, srcs.len());
                dst.convert_from_f32_slice(acc);
            }
        }
    )*};
}
reducible_widened!(f16, bf16);

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<T: Reducible>(op: ReduceOp, srcs: &[&[T]]) -> Vec<T> {
        let mut out = Vec::with_capacity(srcs[0].len());
        // SAFETY: the capacity is the length of the operands, all of which are written.
        unsafe {
            reduce_block(op, srcs, out.as_mut_ptr());
            out.set_len(srcs[0].len());
        }
        out
    }

    #[test]
    fn half_precision_accumulates_in_f32() {
        // 2048 + 1 + 1 is 2048 in steps of f16, but 2050 when rounded once.
        let srcs = [[f16::from_f32(2048.0)], [f16::from_f32(1.0)], [f16::from_f32(1.0)]];
        let srcs: Vec<&[f16]> = srcs.iter().map(|s| &s[..]).collect();
        assert_eq!(reduce(ReduceOp::Sum, &srcs), [f16::from_f32(2050.0)]);
        let srcs = [[bf16::from_f32(256.0)], [bf16::from_f32(1.0)], [bf16::from_f32(1.0)]];
        let srcs: Vec<&[bf16]> = srcs.iter().map(|s| &s[..]).collect();
        assert_eq!(reduce(ReduceOp::Sum, &srcs), [bf16::from_f32(258.0)]);
    }

    #[test]
    fn not_a_number_wins_on_either_side() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let out = reduce(op, &[&[f32::NAN, 1.0, 1.0][..], &[1.0, f32::NAN, 2.0], &[0.0, 0.0, 3.0]]);
            assert!(out[0].is_nan() && out[1].is_nan() && !out[2].is_nan(), "{op}: {out:?}");
        }
    }

    #[test]
    fn integers_wrap_and_bits_combine_beyond_one_block() {
        let n = BLOCK + 7;
        let (a, b) = (vec![200u8; n], vec![100u8; n]);
        assert_eq!(reduce(ReduceOp::Sum, &[&a, &b]), vec![44u8; n]);
        assert_eq!(reduce(ReduceOp::BitXor, &[&a, &b]), vec![200u8 ^ 100; n]);
        assert_eq!(reduce(ReduceOp::BitAnd, &[&[-1i64][..], &[12]]), [12]);
        assert_eq!(reduce(ReduceOp::Avg, &[&[1.0f64][..], &[2.0], &[6.0]]), [3.0]);
    }
}
