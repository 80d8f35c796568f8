//! Elementwise reduction of several operands of one shape, in one pass over memory: the arithmetic of `all_reduce`.
//!
//! Operands are combined in their order, so that every rank that has the same operands gets the same bits.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use smallvec::SmallVec;

use crate::reduce_op::ReduceOp;

/// Elements reduced at a time: the accumulator (4 KiB of f32) stays in the first-level cache.
const BLOCK: usize = 1024;

/// An element type whose operands can be reduced.
///
/// f16 and bf16 accumulate in f32 and round once at the end; all other types accumulate in themselves. Integers wrap.
pub trait Reducible: Copy + Send + Sync + 'static {
    /// Reduces up to 1024 elements: `dst[i]`, which holds `srcs[0][i]` on entry, becomes the reduction of `srcs[..][i]`
    /// from the first operand to the last.
    fn reduce(op: ReduceOp, srcs: &[&[Self]], dst: &mut [Self]);
}

/// Writes the elementwise reduction of `srcs`, all of one length, to `dst`, from the first operand to the last.
///
/// Runs on the calling thread and allocates nothing. A type that `op` does not support panics ([`ReduceOp::check`]).
///
/// # Safety
/// `dst` can be written for the length of the operands and does not overlap them. It may be uninitialised.
pub unsafe fn reduce_operands<T: Reducible>(op: ReduceOp, srcs: &[&[T]], dst: *mut T) {
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

/// A type that accumulates in itself.
trait Accumulator: Copy {
    /// `acc[i]` becomes its reduction with `src[i]`; an average accumulates the sum.
    fn fold(op: ReduceOp, acc: &mut [Self], src: &[Self]);
    /// Divides the sum by the number of operands for an average.
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
                    // NaN on either side propagates, as in a maximum over one tensor.
                    ReduceOp::Max => zip(acc, src, |a, b| if a >= b || a.is_nan() { a } else { b }),
                    ReduceOp::Min => zip(acc, src, |a, b| if a <= b || a.is_nan() { a } else { b }),
                    ReduceOp::Product => zip(acc, src, |a, b| a * b),
                    ReduceOp::LogSumExp => zip(acc, src, |a, b| {
                        let (less, more) = if a < b { (a, b) } else { (b, a) };
                        // Of equal infinities the difference would be NaN.
                        let apart = if less == more { 0.0 } else { less - more };
                        more + apart.exp().ln_1p()
                    }),
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
                    ReduceOp::Avg | ReduceOp::LogSumExp => unreachable!("ReduceOp::check refuses it"),
                }
            }

            fn finish(_: ReduceOp, _: &mut [Self], _: usize) {}
        }
    };
}

/// Types that accumulate in themselves: the destination is the accumulator.
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

/// Types that accumulate in f32.
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
            reduce_operands(op, srcs, out.as_mut_ptr());
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
    fn nan_propagates_from_either_side() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            let out = reduce(op, &[&[f32::NAN, 1.0, 1.0][..], &[1.0, f32::NAN, 2.0], &[0.0, 0.0, 3.0]]);
            assert!(out[0].is_nan() && out[1].is_nan() && !out[2].is_nan(), "{op}: {out:?}");
        }
    }

    #[test]
    fn logarithms_of_sums_combine_without_overflow() {
        let (low, high) = (f64::NEG_INFINITY, f64::INFINITY);
        let operands: [&[f64]; 3] =
            [&[1e4, low, low, high, high, 2.5], &[1e4, low, 3.0, 1.0, low, low], &[low, low, low, 1e9, high, low]];
        let out = reduce(ReduceOp::LogSumExp, &operands);
        assert_eq!(out, [1e4 + 2f64.ln(), low, 3.0, high, high, 2.5]);
        let out = reduce(ReduceOp::LogSumExp, &[&[f64::NAN, 1.0, low][..], &[1.0, f64::NAN, f64::NAN]]);
        assert!(out.iter().all(|x| x.is_nan()), "{out:?}");
        assert_eq!(reduce(ReduceOp::LogSumExp, &[&[f16::from_f32(0.0)][..]; 4]), [f16::from_f32(4f32.ln())]);
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
