//! Convolutions over one to three spatial dimensions, forward and with respect to both operands, without a tensor of all windows.
//!
//! The three kernels evaluate one trilinear form, the sum of `g[n, o, p] * w[o, c, k] * x[n, c, i]` over all windows `p` and
//! offsets `k`, where `i = p * stride + k * dilation + base`, with one of the tensors left out: [`convolve`] leaves out `g`,
//! [`convolve_input`] leaves out `x` (a transposed convolution), and [`convolve_weight`] leaves out `w`.
//!
//! | file | what it holds |
//! |---|---|
//! | `geometry` | windows along one dimension; taps, which both directions have in common |
//! | `pack` | a block of input rows, shifted once per column of the window and converted |
//! | `vector`, `tile` | products of packed blocks in registers |
//! | `gather` | [`convolve`] and [`convolve_input`] |
//! | `weight` | [`convolve_weight`] |
//!
//! f64 is computed in f64; f32, f16 and bf16 in f32; integers in i64, which wraps. Every result is rounded once.

mod gather;
mod geometry;
mod pack;
mod tile;
mod vector;
mod weight;

#[cfg(test)]
mod tests;

pub use gather::{convolve, convolve_input};
pub use geometry::{ConvGeometry, WindowAxis};
pub use weight::convolve_weight;

use candle_core::WithDType;
use half::{bf16, f16};

/// A type in which convolutions are computed.
pub(crate) trait ConvNumber: Copy + Send + Sync + 'static {
    const ZERO: Self;

    /// `self + a * b`; `FMA` as in [`simd`](crate::simd).
    fn multiply_add<const FMA: bool>(self, a: Self, b: Self) -> Self;

    /// `self + other`.
    fn plus(self, other: Self) -> Self;
}

/// An element type of tensors, with the type in which it is computed.
pub(crate) trait ConvElement: WithDType {
    type Number: tile::TileNumber;

    fn widen(self) -> Self::Number;
    fn narrow(x: Self::Number) -> Self;
}

macro_rules! numbers {
    ($($T:ty: |$c:ident, $a:ident, $b:ident| $fused:expr, $plain:expr, $sum:expr;)*) => {$(
        impl ConvNumber for $T {
            const ZERO: Self = 0 as $T;

            #[inline(always)]
            fn multiply_add<const FMA: bool>(self, $a: Self, $b: Self) -> Self {
                let $c = self;
                if FMA { $fused } else { $plain }
            }

            #[inline(always)]
            fn plus(self, $b: Self) -> Self {
                let $c = self;
                $sum
            }
        }
    )*};
}
numbers! {
    f32: |c, a, b| a.mul_add(b, c), c + a * b, c + b;
    f64: |c, a, b| a.mul_add(b, c), c + a * b, c + b;
    i64: |c, a, b| c.wrapping_add(a.wrapping_mul(b)), c.wrapping_add(a.wrapping_mul(b)), c.wrapping_add(b);
}

macro_rules! elements {
    ($($T:ty => $N:ty: |$x:ident| $widen:expr, $narrow:expr;)*) => {$(
        impl ConvElement for $T {
            type Number = $N;

            #[inline(always)]
            fn widen(self) -> $N {
                let $x = self;
                $widen
            }

            #[inline(always)]
            fn narrow($x: $N) -> Self {
                $narrow
            }
        }
    )*};
}
elements! {
    f32 => f32: |x| x, x;
    f64 => f64: |x| x, x;
    f16 => f32: |x| x.to_f32(), f16::from_f32(x);
    bf16 => f32: |x| x.to_f32(), bf16::from_f32(x);
    i64 => i64: |x| x, x;
    i32 => i64: |x| x as i64, x as i32;
    i16 => i64: |x| x as i64, x as i16;
    u32 => i64: |x| x as i64, x as u32;
    u8 => i64: |x| x as i64, x as u8;
}
