//! The types in which factorizations compute.

use std::ops::Neg;

use candle_core::WithDType;

/// f32 or f64.
pub(super) trait MatrixElement: WithDType + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NAN: Self;
    /// The distance from 1 to the next larger number.
    const EPSILON: Self;
    /// The smallest normal number.
    const TINY: Self;

    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    fn is_finite(self) -> bool;
    fn is_nan(self) -> bool;
    /// The magnitude of this number with the sign of another.
    fn copysign(self, sign: Self) -> Self;
    /// `self * by + to`, rounded once if `FMA`.
    fn multiply_add<const FMA: bool>(self, by: Self, to: Self) -> Self;
    fn wide(self) -> f64;
    fn narrow(x: f64) -> Self;

    fn larger(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
}

macro_rules! reals {
    ($($T:ident)*) => {$(
        impl MatrixElement for $T {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NAN: Self = $T::NAN;
            const EPSILON: Self = $T::EPSILON;
            const TINY: Self = $T::MIN_POSITIVE;

            #[inline(always)]
            fn sqrt(self) -> Self {
                $T::sqrt(self)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                $T::abs(self)
            }

            #[inline(always)]
            fn is_finite(self) -> bool {
                $T::is_finite(self)
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                $T::is_nan(self)
            }

            #[inline(always)]
            fn copysign(self, sign: Self) -> Self {
                $T::copysign(self, sign)
            }

            #[inline(always)]
            fn multiply_add<const FMA: bool>(self, by: Self, to: Self) -> Self {
                if FMA { self.mul_add(by, to) } else { self * by + to }
            }

            #[inline(always)]
            fn wide(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            fn narrow(x: f64) -> Self {
                x as $T
            }
        }
    )*};
}
reals! { f32 f64 }

/// Runs `$body` with `$T` as the type of the elements, which is f32 or f64.
macro_rules! with_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($crate::error::ErrorKind::dtype(other).error(
                "element type",
                other.as_str(),
                "f32 or f64",
                "convert the matrices first",
            )),
        }
    };
}
pub(super) use with_real;
