//! The types in which attention computes: f64 for f64, and f32 for f32, f16 and bf16.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub};

use crate::convert::Compute;
use crate::math;

/// A floating-point type in which attention computes.
pub(super) trait AttentionFloat:
    Compute
    + Default
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + MulAssign
{
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    const NEG_INFINITY: Self;

    fn wide(self) -> f64;
    fn narrow(x: f64) -> Self;
    /// `self * by + to`, rounded once if `FMA`.
    fn multiply_add<const FMA: bool>(self, by: Self, to: Self) -> Self;
    fn exponential<const FMA: bool>(self) -> Self;
    fn hyperbolic_tangent<const FMA: bool>(self) -> Self;
}

macro_rules! attention_floats {
    ($($T:ident: |$x:ident| $exp:expr, $tanh:expr;)*) => {$(
        impl AttentionFloat for $T {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const INFINITY: Self = $T::INFINITY;
            const NEG_INFINITY: Self = $T::NEG_INFINITY;

            #[inline(always)]
            fn wide(self) -> f64 {
                self as f64
            }

            #[inline(always)]
            fn narrow(x: f64) -> Self {
                x as $T
            }

            #[inline(always)]
            fn multiply_add<const FMA: bool>(self, by: Self, to: Self) -> Self {
                if FMA { self.mul_add(by, to) } else { self * by + to }
            }

            #[inline(always)]
            fn exponential<const FMA: bool>(self) -> Self {
                let $x = self;
                $exp
            }

            #[inline(always)]
            fn hyperbolic_tangent<const FMA: bool>(self) -> Self {
                let $x = self;
                $tanh
            }
        }
    )*};
}
attention_floats! {
    f32: |x| math::exp::<FMA>(x), math::tanh::<FMA>(x);
    f64: |x| x.exp(), x.tanh();
}
